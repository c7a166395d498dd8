"""What the files beside a tokenizer and the metadata of a GGUF file say of it: beginnings, ends, added tokens."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from trained import SPECIAL, metadata_of, sentencepiece_metadata, train, train_sentencepiece

from jllama import tokenizer
from jllama.chat import Template, find_template
from jllama.tokenizer import TokenizerError, gguf

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
USER = [{"role": "user", "content": "the"}]


def folder(path, tokens=None, **files):
    """Write a SentencePiece model, or what `tokens` is, and JSON files beside it, and load it."""
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    if tokens is None:
        (path / "tokenizer.model").write_bytes(train_sentencepiece().serialized_model_proto())
    else:
        (path / "tokenizer.json").write_text(json.dumps(tokens))
    return tokenizer.load(tokenizer.find(path))


def spec(**changes):
    return json.loads(train().to_str()) | changes


def extended(metadata, tokens, kind):
    """The metadata with more tokens, all of one kind."""
    key = "tokenizer.ggml."
    found = {**metadata, key + "tokens": [*metadata[key + "tokens"], *tokens]}
    found[key + "token_type"] = [*map(int, metadata[key + "token_type"]), *[kind] * len(tokens)]
    if key + "scores" in metadata:
        found[key + "scores"] = [*map(float, metadata[key + "scores"]), *[0.0] * len(tokens)]
    return found


# Control tokens that GGUF files give another type. Right values: llama.cpp 0.3.36.


def test_user_defined_chat_tokens_of_a_sentencepiece_gguf_are_control_tokens():
    sp = train_sentencepiece()
    n = sp.vocab_size()
    metadata = extended(sentencepiece_metadata(sp), ["<|im_start|>", "<|im_end|>"], 4)
    tok = gguf.from_metadata(metadata, Path("made up"))
    ids = Template(CHATML, tok).render(USER)
    assert ids == [1, n, *sp.encode("user\nthe"), n + 1, *sp.encode("\n")]
    assert tok.stop_ids == (1, 2, n + 1)
    assert not {n, n + 1} & set(tok.encode("<|im_start|>user<|im_end|>"))


@pytest.mark.parametrize("kind", [1, 3])
@pytest.mark.parametrize(
    "end",
    [
        "<|eot_id|>",
        "<end_of_turn>",
        "<EOT>",
        "[EOT]",
        "</s>",
        "<|return|>",
        "<|file_sep|>",
        "<|fim_pad|>",
        "<|repo_name|>",
    ],
)
def test_an_end_of_an_answer_ends_it_whatever_its_type(end, kind):
    metadata = metadata_of(spec())
    n = len(metadata["tokenizer.ggml.tokens"])
    tok = gguf.from_metadata(extended(metadata, [end], kind), Path("made up"))
    assert tok.stop_ids == (1, 2, n)
    assert tok.encode_template(f"the{end}") == [*tok.encode("the"), n]
    assert n not in tok.encode(end)


def test_a_part_of_an_answer_of_gpt_oss_is_no_end():
    metadata = extended(metadata_of(spec()), ["<|end|>", "<|return|>", "<|call|>"], 3)
    n = len(metadata["tokenizer.ggml.tokens"])
    assert gguf.from_metadata(metadata, Path("made up")).stop_ids == (1, 2, n - 2, n - 1)


def test_a_gguf_file_that_names_no_end_runs(caplog):
    metadata = {k: v for k, v in metadata_of(spec()).items() if not k.endswith("eos_token_id")}
    tok = gguf.from_metadata(metadata, Path("made up"))
    assert (tok.bos, tok.eos, tok.stop_ids) == (0, None, (2, 1))
    metadata["tokenizer.ggml.tokens"][1:3] = "<|one|>", "<|other|>"
    assert gguf.from_metadata(metadata, Path("made up")).stop_ids == ()
    assert "nothing says which token ends a text" in caplog.text


def test_a_bos_out_of_range_matters_only_where_it_is_wanted(caplog):
    metadata = metadata_of(spec(), bos_token_id=9999, add_bos_token=False)
    tok = gguf.from_metadata(metadata, Path("made up"))
    assert tok.prompt_ids("the") == tok.encode("the")
    assert tok.prompt_ids("") == [1]
    with pytest.raises(TokenizerError, match="bos_token_id is 9999; expected 0 to"):
        gguf.from_metadata(metadata | {"tokenizer.ggml.add_bos_token": True}, Path("made up"))


@pytest.mark.parametrize("without", ["token_type", "scores"])
def test_a_sentencepiece_gguf_without_types_or_scores(without):
    """Without types it is the same tokenizer; without scores pairs are joined from the left, as by llama.cpp."""
    sp = train_sentencepiece()
    metadata = {k: v for k, v in sentencepiece_metadata(sp).items() if not k.endswith(without)}
    tok = gguf.from_metadata(metadata, Path("made up"))
    assert tok.decode(tok.encode("the é🦙")) == "the é🦙"
    if without == "token_type":
        assert tok.encode("the cat é🦙\n") == sp.encode("the cat é🦙\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": ["a", 3]}, "tokens is list; expected a list of strings"),
        ({"token_type": ["a"]}, "token_type has not the"),
        ({"token_type": "x"}, "token_type has not the"),
        ({"merges": [3]}, "merges is list; expected a list of strings"),
        ({"merges": 3}, "merges is int"),
        ({"pre": ["a"]}, r"pre is \['a'\]"),
        ({"model": {}}, r"model is \{\}"),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"eos_token_id": "1"}, "eos_token_id is '1'"),
        ({"add_bos_token": 3}, "add_bos_token is 3; expected true or false"),
    ],
)
def test_metadata_of_other_types_are_named(change, message):
    with pytest.raises(TokenizerError, match=message):
        gguf.from_metadata(metadata_of(spec(), **change), Path("made up"))


@pytest.mark.parametrize("kinds", [[-1], [0.5], ["a"], [[1]]])
def test_types_that_are_no_numbers_are_named(kinds):
    n = len(train().get_vocab())
    with pytest.raises(TokenizerError, match="token_type has something else"):
        gguf.from_metadata(metadata_of(spec(), token_type=kinds * n), Path("made up"))


# Hugging Face's files. Right values: transformers 5.24 and tokenizers 0.23.


def test_a_model_may_want_no_bos(tmp_path):
    sp = train_sentencepiece()
    tok = folder(tmp_path, tokenizer_config={"add_bos_token": False})
    assert tok.prompt_ids("the") == sp.encode("the")
    assert folder(tmp_path, tokenizer_config={}).prompt_ids("the") == [1, *sp.encode("the")]


def test_ends_beside_a_sentencepiece_model(tmp_path):
    tok = folder(tmp_path, generation_config={"eos_token_id": [7, 2]}, config={"eos_token_id": 5})
    assert (tok.eos, tok.stop_ids) == (7, (1, 7, 2))


@pytest.mark.parametrize("name", ["added_tokens", "tokenizer_config"])
def test_tokens_added_to_a_sentencepiece_model(name, tmp_path):
    sp = train_sentencepiece()
    n = sp.vocab_size()
    texts = {"<|im_end|>": n, "<|im_start|>": n + 1, "<think>": n + 2}
    files = {
        "added_tokens": texts,
        "tokenizer_config": {
            "added_tokens_decoder": {str(i): {"content": t, "special": False} for t, i in texts.items()}
        },
    }
    tok = folder(tmp_path, **{name: files[name]})
    assert Template(CHATML, tok).render(USER) == [1, n + 1, *sp.encode("user\nthe"), n, *sp.encode("\n")]
    assert (tok.vocab_size, tok.stop_ids, tok.unused) == (n + 3, (1, 2, n), frozenset())
    assert tok.encode("the<think>") == [*sp.encode("the"), n + 2]
    assert tok.decode([1, n + 2, *sp.encode("the")]) == "<think> the"
    assert not {n, n + 1} & set(tok.encode("<|im_start|>"))


def test_added_tokens_must_not_contradict_the_model(tmp_path):
    with pytest.raises(TokenizerError, match="token 1 is '<s>', and '<x>' in the files beside it"):
        folder(tmp_path, added_tokens={"<x>": 1, "</s>": 2})


@pytest.mark.parametrize("damaged", [[1], {"a": "b"}, {"a": -1}, {"a": 2**31}, {"a": True}])
def test_damaged_added_tokens_are_named(damaged, tmp_path):
    with pytest.raises(TokenizerError, match=re.escape(str(tmp_path))):
        folder(tmp_path, added_tokens=damaged)


def test_padded_rows_of_a_model_are_accepted_beside_a_sentencepiece_model(tmp_path):
    tok = folder(tmp_path)
    n = tok.vocab_size
    assert tok.fit(n) is tok
    assert tok.fit(n + 54).unused == set(range(n, n + 54))
    assert tok.fit(n + 54).encode("the") == tok.encode("the")
    with pytest.raises(ValueError, match="expected the tokenizer that the model was trained with"):
        tok.fit(tok.vocab_size - 1)


def test_templates_see_no_bos_where_there_is_none(tmp_path):
    config = {"bos_token": None, "eos_token": "<|end|>", "chat_template": "{{ bos_token }}a"}
    tok = folder(tmp_path, spec(), tokenizer_config=config, config={"bos_token_id": 0})
    assert find_template(tmp_path, tok).render(USER) == tok.encode("a")


@pytest.mark.parametrize("template", ["a", "{{ bos_token }}a"])
def test_a_template_of_hugging_face_says_itself_where_bos_is(template, tmp_path):
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": template}
    tok = folder(tmp_path, spec(post_processor=begins("<|begin|>")), tokenizer_config=config)
    assert tok.prompt_ids("a") == [0, *tok.encode("a")]
    assert find_template(tmp_path, tok).render(USER) == [0] * ("bos" in template) + tok.encode("a")


def begins(*tokens):
    ids = {t: SPECIAL.index(t) for t in tokens}
    return {
        "type": "TemplateProcessing",
        "single": [
            *({"SpecialToken": {"id": t, "type_id": 0}} for t in tokens),
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in ids.items()},
    }


def test_all_that_a_post_processor_puts_before_a_text(tmp_path):
    changed = spec(post_processor=begins("<|begin|>", "<|im_end|>"))
    tok = folder(tmp_path, changed, tokenizer_config={"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    assert tok.prompt_ids("the") == tokenizers.Tokenizer.from_str(json.dumps(changed)).encode("the").ids
    assert tok.prompt_ids("the")[:2] == [0, 2]


@pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer_config", "added_tokens"])
@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff"])
def test_a_damaged_file_beside_is_named_whatever_the_others_say(name, data, tmp_path):
    folder(tmp_path, generation_config={"bos_token_id": 0, "eos_token_id": 1})
    (tmp_path / f"{name}.json").write_bytes(data)
    with pytest.raises(TokenizerError, match=rf"{name}\.json: "):
        tokenizer.load(tmp_path / "tokenizer.model")


@pytest.mark.parametrize("stated", [None, []])
def test_an_end_that_generation_config_leaves_open_is_configs(stated, tmp_path):
    tok = folder(tmp_path, spec(), generation_config={"eos_token_id": stated}, config={"eos_token_id": 7})
    assert tok.stop_ids == (7, 2)


def test_a_model_that_says_no_end_goes_on_to_the_limit(tmp_path, caplog):
    tokens = toy()
    tok = folder(tmp_path, tokens, generation_config={"eos_token_id": None}, config={"eos_token_id": None})
    assert (tok.eos, tok.stop_ids) == (None, ())
    assert caplog.text.count("answers go on to their limit") == 1


def toy():
    return {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "?": 3}, "merges": ["a b"], "unk_token": "?"},
        "added_tokens": [],
    }


@pytest.mark.parametrize("stated", [True, "5", 2.0, [True], -1, 2**31, {}])
def test_an_end_that_is_no_id_is_named(stated, tmp_path):
    with pytest.raises(TokenizerError, match=r"config\.json: eos_token_id is .*; expected a token id"):
        folder(tmp_path, spec(), config={"eos_token_id": stated})


def test_a_unigram_model_is_read_from_its_sentencepiece_file(tmp_path):
    sp = train_sentencepiece()
    (tmp_path / "tokenizer.model").write_bytes(sp.serialized_model_proto())
    assert folder(tmp_path, {"model": {"type": "Unigram", "vocab": []}}).encode("the cat") == sp.encode("the cat")


def test_a_control_token_that_the_model_has_no_row_for_is_left_out(tmp_path, caplog):
    changed, n = spec(), train().get_vocab_size()
    changed["added_tokens"].append({**changed["added_tokens"][0], "id": n, "content": "<|pad|>"})
    tok = folder(tmp_path, changed).fit(n)
    assert (tok.vocab_size, tok.stop_ids) == (n, (2,))
    assert max(tok.encode_template("<|pad|>")) < n
    assert "1 more are left out" in caplog.text
    changed["added_tokens"][-1] |= {"content": "pad", "special": False}
    with pytest.raises(ValueError, match=f"the tokenizer has {n + 1} tokens and the model {n}"):
        folder(tmp_path, changed).fit(n)


def test_ids_without_a_token_are_known(tmp_path):
    changed, n = spec(), train().get_vocab_size()
    changed["added_tokens"].append({**changed["added_tokens"][0], "id": n + 2, "content": "<|x|>"})
    assert folder(tmp_path, changed).unused == {n, n + 1}
    assert gguf.from_metadata(extended(metadata_of(spec()), ["[PAD0]"], 5), Path("x")).unused == {n}


# Text


def test_surrogate_pairs_are_the_character_that_they_stand_for(tmp_path):
    tok = folder(tmp_path)
    assert tok.encode("a\ud83d\udc4d") == tok.encode("a👍")
    with pytest.raises(TokenizerError, match=r"'\\ud83d' at character 1"):
        tok.encode("a\ud83d\ud83d\udc4d")


# Files that are not whole


def test_a_sentencepiece_model_cut_before_its_normalizer_is_refused(shared, tmp_path):
    """Without its last 20 bytes Llama 2's gives other ids for double spaces."""
    data = (shared / "models" / "llama2-tokenizer" / "tokenizer.model").read_bytes()
    for cut, message in ((20, "says how text is normalised"), (21, "damaged or cut short"), (100, "damaged or cut")):
        (tmp_path / "tokenizer.model").write_bytes(data[:-cut])
        with pytest.raises(TokenizerError, match=message):
            tokenizer.load(tmp_path / "tokenizer.model")


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=re.escape(f"{tmp_path}/nosuch.gguf: no such file or folder")):
        tokenizer.find(tmp_path / "nosuch.gguf")


def test_libraries_are_imported_when_they_are_needed():
    code = (
        "import sys, jllama.chat, jllama.session, jllama.tokenizer\n"
        "print({'jinja2', 'tokenizers', 'sentencepiece'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")
