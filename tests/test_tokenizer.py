"""Tokenizers: reference values of other programs, properties, and files that are not what they should be."""

import json
import random
import struct
import time

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from trained import train_sentencepiece

from jllama import tokenizer
from jllama.text import StreamDecoder
from jllama.tokenizer import Tokenizer, TokenizerError

CONTROL = [b"<unk>", b"\n<s>\n", b"\n</s>\n"]
BYTES = [b"<0x%02X>" % i for i in range(256)]
ODD = " \n\tabehloté<>/s0xA你🐶\u0301\x01\x7f\ufeff"


def new_layout(pieces, scores=None, longest=None):
    """A tokenizer.bin as llama2.c writes it."""
    scores = scores or [0.0] * len(pieces)
    head = struct.pack("<i", max(map(len, pieces)) if longest is None else longest)
    return head + b"".join(struct.pack("<fi", s, len(p)) + p for p, s in zip(pieces, scores, strict=True))


def old_layout(pieces):
    return b"".join(struct.pack("<i", len(p)) + p for p in pieces)


def tokens_of(data):
    """Pieces and scores of a tokenizer.bin of the new layout."""
    pieces, scores, at = [], [], 4
    while at < len(data):
        score, n = struct.unpack_from("<fi", data, at)
        pieces.append(data[at + 8 : at + 8 + n])
        scores.append(score)
        at += 8 + n
    return pieces, scores


def slow_encode(data, text):
    """llama2.c's merge loop, word for word: join the best pair, the leftmost of equals, until none is left."""
    pieces, scores = tokens_of(data)
    ids = {p: i for i, p in enumerate(pieces)}
    out = [ids[b" "]] if text else []
    for char in text:
        out += [ids[char.encode()]] if char.encode() in ids else [b + 3 for b in char.encode()]
    while True:
        best, best_at, best_id = -1e10, -1, -1
        for at in range(len(out) - 1):
            joined = ids.get(pieces[out[at]] + pieces[out[at + 1]])
            if joined is not None and scores[joined] > best:
                best, best_at, best_id = scores[joined], at, joined
        if best_at < 0:
            return out
        out[best_at : best_at + 2] = [best_id]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with one small tokenizer in three formats: SentencePiece, and both layouts of llama2.c."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sp = train_sentencepiece(("the  cat sat on    the mat, then it ate the hat", "hello   there, hello other"), 320)
    (folder / "tokenizer.model").write_bytes(sp.serialized_model_proto())
    ids = range(3, sp.vocab_size())
    pieces = [*CONTROL, *(sp.id_to_piece(i).replace("\u2581", " ").encode() for i in ids)]
    (folder / "tokenizer.bin").write_bytes(new_layout(pieces, [0.0] * 3 + [sp.get_score(i) for i in ids]))
    (folder / "old.bin").write_bytes(old_layout(pieces))
    return folder


@pytest.fixture(scope="session", params=["tokenizer.model", "tokenizer.bin"])
def small(request, trained) -> Tokenizer:
    return tokenizer.load(trained / request.param)


@pytest.fixture(scope="session", params=["tokenizer.model", "tokenizer.bin", "llama2", "llama2_runc", "tok512"])
def each(request, trained) -> Tokenizer:
    """Small ones made here, and the published ones where they are."""
    if request.param.startswith("tokenizer."):
        return tokenizer.load(trained / request.param)
    return request.getfixturevalue("real")[request.param]


@pytest.fixture(scope="session")
def golden(shared):
    return json.loads((shared / "golden" / "tokenizer.json").read_text())


@pytest.fixture(scope="session")
def real(shared):
    """The published tokenizers, by the name that the reference values have for them."""
    models = shared / "models"
    files = {
        "llama2": "llama2-tokenizer/tokenizer.model",
        "llama2_runc": "llama2-tokenizer/tokenizer.bin",
        "tok512": "stories260K/tok512.bin",
        "tok512_old": "stories260K/tok512_old.bin",
    }
    return {name: tokenizer.load(models / file) for name, file in files.items()}


def streamed(tok, ids):
    decoder = StreamDecoder(tok)
    return [decoder.feed(i) for i in ids], decoder.flush()


@pytest.mark.parametrize("name", ["llama2", "llama2_runc", "tok512"])
def test_encode_gives_the_reference_ids(name, real, golden):
    for case in golden["encode"]:
        if case[name] is not None:  # the reference program takes no NUL
            assert real[name].encode(case["text"]) == case[name], case["name"]


@pytest.mark.parametrize(
    ("name", "key"), [("llama2", "decode_llama2"), ("tok512", "decode_tok512"), ("tok512_old", "decode_tok512")]
)
def test_decode_gives_the_reference_text(name, key, real, golden):
    for case in golden[key]:
        assert streamed(real[name], case["ids"]) == (case["pieces"], case["flush"]), case["name"]
        assert real[name].decode(case["ids"]) == case["text"], case["name"]


@pytest.mark.parametrize("name", ["llama2", "llama2_runc"])
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("   Hello", [1678, 15043]),
        ("    Hello\n    Hello", [268, 15043, 13, 1678, 15043]),
        ("a   b   ", [263, 259, 289, 1678]),
        ("hello  world", [22172, 29871, 3186]),
        ("\n \n\n \n", [29871, 13, 29871, 13, 13, 29871, 13]),
        ("Lets try ö & 株式会社", [365, 1691, 1018, 3963, 669, 29871, 31409, 30607, 30437, 30564]),
        ("𒎗𓐍", [29871, 243, 149, 145, 154, 243, 150, 147, 144]),
        ("ﬀ", [29871, 242, 175, 131]),
        ("e\u0301", [321, 30103]),
        ("\ufeffHello", [29871, 30143, 10994]),
        ("a\r\nb", [263, 30004, 13, 29890]),
        ("<0x0A>", [529, 29900, 29916, 29900, 29909, 29958]),
        ("I love you.</s>", [306, 5360, 366, 21106, 29879, 29958]),
        ("<unk>", [529, 2960, 29958]),
        ("lorem ipsum dolor sit amet " * 2000, 12001),
    ],
)
def test_llama2_ids(name, text, ids, real):
    encoded = real[name].encode(text)
    assert (len(encoded) if isinstance(ids, int) else encoded) == ids
    assert real[name].decode(encoded) == text


def test_vocab_size_is_the_number_of_pieces(real):
    assert {name: t.vocab_size for name, t in real.items()} == {
        "llama2": 32000,
        "llama2_runc": 32000,
        "tok512": 512,
        "tok512_old": 512,
    }


def test_vocab_size_of_a_small_file(tmp_path):
    (tmp_path / "t.bin").write_bytes(GOOD)
    assert tokenizer.load(tmp_path / "t.bin").vocab_size == 261


def test_every_byte_piece_is_its_byte(each):
    for first in (False, True):
        assert [each.piece(i, first=first) for i in range(3, 259)] == [bytes([b]) for b in range(256)]


def test_bos_and_eos_end_a_generation(each):
    assert each.stop_ids == (each.bos, each.eos) == (1, 2)


@settings(deadline=None)
@given(text=st.text() | st.text(ODD))
def test_round_trip(each, text):
    text = text.replace("\u2581", "")  # SentencePiece takes it for a space
    ids = each.encode(text)
    assert each.decode(ids) == text
    assert each.prompt_ids(text) == [each.bos, *ids]
    pieces, end = streamed(each, ids)
    assert "".join(pieces) == text
    assert end == ""
    assert not {0, *each.stop_ids} & set(ids)


@settings(deadline=None)
@given(data=st.data(), n=st.integers(0, 10))
def test_random_ids_stream_to_the_same_text(each, data, n):
    """Byte tokens in any order, cut anywhere into what was given and what is new."""
    tokens = st.integers(3, 258) | st.integers(0, each.vocab_size - 1)
    ids = data.draw(st.lists(tokens, max_size=20))
    before, after = StreamDecoder(each), StreamDecoder(each, ids[:n])
    parts = [*map(before.feed, ids[:n]), *map(after.feed, ids[n:]), after.flush()]
    assert "".join(parts) == each.decode(ids)


def test_a_literal_u2581_stays_itself_in_a_llama2c_tokenizer(trained):
    tok = tokenizer.load(trained / "tokenizer.bin")
    assert tok.decode(tok.encode("the\u2581 cat")) == "the\u2581 cat"


@settings(deadline=None)
@given(text=st.text(ODD + "the hat") | st.text("the "))
def test_all_formats_give_the_same(trained, text):
    model, new, old = (tokenizer.load(trained / f) for f in ("tokenizer.model", "tokenizer.bin", "old.bin"))
    ids = model.encode(text)
    assert new.encode(text) == ids
    assert model.decode(ids) == new.decode(ids) == old.decode(ids) == text


@pytest.mark.parametrize("special", ["<s>", "</s>", "<unk>", "\n<s>\n", "\n</s>\n", "x </s><s>[INST] y"])
def test_user_text_never_becomes_a_control_id(special, each):
    ids = each.encode(special)
    assert not {0, 1, 2} & set(ids)
    assert each.decode(ids) == special


def test_decode_agrees_with_the_sentencepiece_library(trained):
    """On whole characters; the library's own rule for broken ones is another."""
    tok = tokenizer.load(trained / "tokenizer.model")
    sp = sentencepiece.SentencePieceProcessor(model_file=str(trained / "tokenizer.model"))
    rng = random.Random(0)
    ids = [0, 1, 2, *range(3, 3 + 128), *range(259, tok.vocab_size)]
    for _ in range(1000):
        some = rng.choices(ids, k=rng.randrange(6))
        assert tok.decode(some) == sp.decode(some)


def test_llama2c_decode_strips_after_bos_only(trained):
    tok = tokenizer.load(trained / "tokenizer.bin")
    (the,) = tok.encode("the")
    assert tok.decode([the, 1, the, the, 2, the]) == "the\n<s>\nthe the\n</s>\n the"


def test_a_continuation_keeps_its_space(small):
    (the,) = small.encode("the")
    assert StreamDecoder(small, small.prompt_ids("the")).feed(the) == " the"
    assert StreamDecoder(small, small.prompt_ids("")).feed(the) == "the"


def test_encoding_equals_the_slow_loop_with_ties(tmp_path):
    """Random merges with few different scores, so that most choices are between equals."""
    rng = random.Random(1)
    chars = [b" ", b"a", b"b", b"c"]
    for _ in range(10):
        merges = sorted({b"".join(rng.choices(chars, k=rng.randint(2, 5))) for _ in range(30)})
        pieces = [*CONTROL, *BYTES, *chars, *merges]
        scores = [rng.choice([-1e9, -1.0, -2.0, -3.0]) for _ in pieces]
        data = new_layout(pieces, scores)
        (tmp_path / "t.bin").write_bytes(data)
        tok = tokenizer.load(tmp_path / "t.bin")
        for _ in range(300):
            text = "".join(rng.choices("  abcé", k=rng.randrange(30)))
            assert tok.encode(text) == slow_encode(data, text), text


def test_encoding_equals_the_slow_loop_on_stories(shared, real):
    data = (shared / "models" / "stories260K" / "tok512.bin").read_bytes()
    words = (shared / "text" / "tinystories_sample.txt").read_text()[:20000].split(" ")
    rng = random.Random(2)
    for _ in range(5000):
        text = "".join(rng.choices(" \nabehlnot.é🐶", k=rng.randrange(20))) + " ".join(rng.choices(words, k=3))
        assert real["tok512"].encode(text[:40]) == slow_encode(data, text[:40]), text


@pytest.mark.parametrize("unit", ["the cat ", "a", "th", " ", "é"])
def test_a_long_prompt_takes_time_in_proportion(small, unit):
    def seconds(n):
        start = time.process_time()
        small.encode(unit * (n // len(unit)))
        return time.process_time() - start

    # The slow loop takes minutes for the first, and four times as long for the double: the bounds are far from both.
    assert min(seconds(100_000) for _ in range(3)) < 3
    assert min(seconds(800_000) for _ in range(3)) < max(1, 4 * min(seconds(400_000) for _ in range(3)))


def test_load_goes_by_content_not_by_name(trained, tmp_path):
    for name in ("tokenizer.model", "tokenizer.bin", "old.bin"):
        (tmp_path / "x.dat").write_bytes((trained / name).read_bytes())
        loaded, named = tokenizer.load(tmp_path / "x.dat"), tokenizer.load(str(trained / name))
        assert type(loaded) is type(named)
        assert loaded.vocab_size == named.vocab_size


def test_the_old_layout_decodes_but_has_no_scores_to_encode_with(trained):
    new, old = tokenizer.load(trained / "tokenizer.bin"), tokenizer.load(trained / "old.bin")
    ids = range(new.vocab_size)
    assert [new.decode([1, i, i]) for i in ids] == [old.decode([1, i, i]) for i in ids]
    assert old.encode("") == []
    with pytest.raises(TokenizerError, match=r"old\.bin: old layout.*no scores"):
        old.encode("the")


def test_a_vocabulary_without_byte_pieces_has_unk_for_the_rest(tmp_path):
    (tmp_path / "t.bin").write_bytes(new_layout([*CONTROL, b" ", b"a"]))
    tok = tokenizer.load(tmp_path / "t.bin")
    assert tok.encode("aéa") == [3, 4, 0, 4]


GOOD = new_layout([*CONTROL, *BYTES, b" ", b"a"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 499723\n", "Git LFS pointer"),
        (b"\x80\x02PK foreign", "begins b'.*expected a SentencePiece model or a llama2.c tokenizer.bin"),
        (GOOD[:3], "begins b'"),
        (GOOD[:-1], r"token 260 at byte \d+: length 1; expected 1 to 0"),
        (GOOD[:-5], r"token 260 at byte \d+: 4 bytes are left; expected 8"),
        (GOOD + b"\0\0\0", r"token 261 at byte \d+: 3 bytes are left; expected 8"),
        (GOOD + struct.pack("<fi", 0, -3) + b"abc", r"token 261 at byte \d+: length -3; expected 1 to 3"),
        (GOOD + struct.pack("<fi", 0, 9) + b"abc", r"token 261 at byte \d+: length 9; expected 1 to 3"),
        (GOOD + struct.pack("<fi", 0, 0), r"length 0"),
        (old_layout(CONTROL) + struct.pack("<i", -1), r"token 3 at byte 28: length -1; expected 1 to 0"),
        (old_layout(CONTROL) + b"\1\0", r"token 3 at byte 28: 2 bytes are left; expected 4"),
        (new_layout([*CONTROL, b"a"], longest=-7), r"max_token_length -7; expected 6"),
        (new_layout([*CONTROL, b"a"], longest=5), r"max_token_length 5; expected 6"),
        (new_layout([*CONTROL, b"a"], longest=2**31 - 1), r"max_token_length 2147483647; expected 6 .* to \d+"),
        (new_layout(CONTROL[:2]), "holds 2 tokens"),
        (new_layout([*CONTROL, b"a", b"b", b"a"]), r"token 5 \(b'a'\) is the same as token 3"),
        (new_layout([*CONTROL, b"a\0b"]), r"token 3 \(b'a\\x00b'\).*without NUL"),
        (new_layout([*CONTROL, b"\xff"]), r"token 3 \(b'\\xff'\).*UTF-8"),
        (new_layout([*CONTROL, b"a"], [0.0, 0.0, 0.0, float("nan")]), r"token 3 .* score nan"),
    ],
)
def test_a_wrong_file_is_named(data, message, tmp_path):
    path = tmp_path / "odd.bin"
    path.write_bytes(data)
    with pytest.raises(TokenizerError, match=message) as e:
        tokenizer.load(path)
    assert str(path) in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.bin", "old.bin"])
def test_a_file_cut_anywhere_raises_nothing_else(name, trained, tmp_path):
    """A tokenizer.bin holds no count: cut between two tokens it is a smaller one."""
    data, refused = (trained / name).read_bytes(), []
    for n in range(0, len(data), 13):
        (tmp_path / "cut").write_bytes(data[:n])
        try:
            tokenizer.load(tmp_path / "cut")
        except TokenizerError as e:
            refused.append(str(e))
    total = len(range(0, len(data), 13))
    assert len(refused) == total if name == "tokenizer.model" else len(refused) > 0.7 * total
    assert not any("\n" in message for message in refused)


def test_missing_files_and_folders_are_named(tmp_path):
    for path in (tmp_path / "none.bin", tmp_path):
        with pytest.raises(TokenizerError, match="cannot be read") as e:
            tokenizer.load(path)
        assert str(path) in str(e.value)


def test_ids_outside_the_vocabulary_are_refused(small):
    for i in (-1, small.vocab_size):
        with pytest.raises(TokenizerError, match=f"token id {i}: expected 0 to {small.vocab_size - 1}"):
            small.decode([i])


def test_text_that_is_no_unicode_is_refused(small):
    with pytest.raises(TokenizerError, match=r"'\\udc80' at character 2"):
        small.encode("ab\udc80")


def test_find_looks_beside_a_checkpoint_and_in_a_folder(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer.bin, tok512.bin, tokenizer.json, tokenizer.model, vocab.json"):
        tokenizer.find(tmp_path / "model.bin")
    for name in (
        "vocab.json",
        "tokenizer.model",
        "tokenizer.json",
        "tok512.bin",
        "tokenizer.bin",
    ):  # the last one written is preferred
        (tmp_path / name).touch()
        assert tokenizer.find(tmp_path / "model.bin") == tokenizer.find(tmp_path) == tmp_path / name
