"""Tokenizers from strangers: none takes more time or memory than it may, and what is wrong is said in a short line."""

import base64
import json
import re
import time
import tracemalloc

import pytest
from test_beside import folder, spec, toy
from trained import metadata_of

from jllama import tokenizer
from jllama.tokenizer import TokenizerError, gguf, tiktoken
from jllama.tokenizer.bpe import GPT2_SPLIT, LLAMA3_SPLIT, library_errors
from jllama.tokenizer.limits import repeats_repeats
from jllama.tokenizer.special import Special

LLAMA3_CONTROL = {f"<|reserved_special_token_{n}|>": n for n in range(256)}
# Of GPT-4o, DeepSeek V3, BLOOM and Kimi K2.
PUBLISHED = [
    GPT2_SPLIT,
    LLAMA3_SPLIT,
    *(split for pre in gguf._PRE.values() for split in pre.splits),
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}&&[^\p{Han}]]*(?i:'s|'t)?|(?=(\d{3})+(?!\d))|(?<=a)b",
]


def seconds(call):
    began = time.process_time()
    call()
    return time.process_time() - began


# Control tokens


def test_many_control_tokens_take_no_time_in_a_long_text():
    special = Special(LLAMA3_CONTROL)
    text = "a < b <| c <|reserved_special_token_7|> [x] " * 3000
    parts = list(special.split(text))
    assert parts == ["a < b <| c ", 7, " [x] a < b <| c ", *[7, " [x] a < b <| c "] * 2998, 7, " [x] "]
    assert seconds(lambda: list(special.split(text))) < 1  # 7 s with an expression of 256 groups
    assert seconds(lambda: special.guard(text)) < 1


def test_two_hundred_thousand_control_tokens_take_seconds_and_not_minutes():
    ids = {f"<|x{n}|>": n for n in range(200_000)}
    assert seconds(lambda: list(Special(ids).split("<|x199999|>" * 1000))) < 5
    special = Special(ids)
    assert seconds(lambda: special.guard("a <|x5|> b <|x")) < 5
    assert list(special.split(special.guard("a <|x5|> b <|x") + "7|>")) == ["a <|x5|> b <|x7|>"]


def test_a_long_control_token_is_refused_in_little_memory():
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a control token has 200000 characters; expected 1000 at most"):
            Special({"<|" + "x" * 199_996 + "|>": 0})
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("strip", ["lstrip", "rstrip"])
def test_spaces_beside_control_tokens_that_take_them_in_cost_no_square(strip):
    special = Special({"<|a|>": 0}, **{strip: ["<|a|>"]})
    text = "b" + " " * 200_000 + "<|a|>" + " " * 200_000 + "c"
    assert seconds(lambda: list(special.split(text))) < 1
    assert [p if isinstance(p, int) else p.strip() for p in special.split(text)] == ["b", 0, "c"]


@pytest.mark.parametrize("texts", [["<\udcff>"], ["\udc80"], [chr(0x4E00 + n) * 2 for n in range(3000)]])
def test_control_tokens_that_no_mark_is_left_for_are_refused(texts):
    with pytest.raises(ValueError, match=r"Unicode|3000 different characters"):
        Special({text: i for i, text in enumerate(texts)})


# What the tokenizers library would do without a bound


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_are_taken(pattern):
    assert not repeats_repeats(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a*)*",
        "((a{2,})b?)*c",
        "(?:a|a)+$",
        "(?:(a+)?)+",
        "(a{1,5000}){2,}",
        "(?=(a+)+)",
        "x" * 20_000,
        r"(\p{L}+\s*){9999999999}",
        "((((a+))))*",
        "([a]+)*",
        "(a+?)+?",
        "(a+b)+?$",
        r"\w*\w*\w*\w*!",
        r"(\w*(\w*|b)\w*)\w*!",
    ],
)
def test_patterns_that_can_take_forever_are_refused(pattern, tmp_path):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    with pytest.raises(TokenizerError, match="it can take forever"):
        folder(tmp_path, spec(pre_tokenizer={"type": "Sequence", "pretokenizers": [split]}))


DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    "steps",
    [
        [DOUBLES] * 45,
        [{"type": "Replace", "pattern": {"Regex": "a"}, "content": "a" * 200}],
        [{"type": "Replace", "pattern": {"String": ""}, "content": "a" * 200}],
        [{"type": "Prepend", "prepend": "a" * 10_000}],
        [{"type": "NFC"}] * 100,
    ],
)
def test_normalizers_that_make_texts_long_are_refused(steps, tmp_path):
    with pytest.raises(TokenizerError, match=r"times as long|expected 64 at most"):
        folder(tmp_path, spec(normalizer={"type": "Sequence", "normalizers": steps}))


def test_byte_levels_on_byte_levels_are_refused(tmp_path):
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    with pytest.raises(TokenizerError, match="times as long"):
        folder(tmp_path, spec(pre_tokenizer={"type": "Sequence", "pretokenizers": [step] * 45}))


def test_a_panic_of_the_library_is_an_error():
    class PanicException(BaseException):
        """As pyo3 has it."""

    with pytest.raises(TokenizerError, match="x: index out of bounds"), library_errors("x"):
        raise PanicException("index out of bounds")
    with pytest.raises(KeyboardInterrupt), library_errors("x"):
        raise KeyboardInterrupt


def test_a_long_token_in_tiktokens_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tiktoken, "_N_TOKENS", 1)
    (tmp_path / "tokenizer.model").write_bytes(
        base64.b64encode(b"a") + b" 0\n" + base64.b64encode(bytes(10**6)) + b" 1\n"
    )
    with pytest.raises(TokenizerError, match="line 2 has a token of 1000000 bytes, expected 1000 at most"):
        tokenizer.load(tmp_path / "tokenizer.model")


# Messages


def test_messages_name_the_first_problems_and_count_the_rest(tmp_path):
    merges = [f"a{'b' * 1000}\x1b[31m"] * 1000
    with pytest.raises(TokenizerError) as e:
        gguf.from_metadata(metadata_of(spec(), merges=merges), "x.gguf")
    assert len(str(e.value)) < 1000
    assert re.search(r"and 99\d more", str(e.value))
    assert str(e.value).isprintable()


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "\x1b[31m" * 100}},
        {"model": {**toy()["model"], "merges": ["\x1b[31m \x07"]}},
        {"model": {**toy()["model"], "unk_token": "\x00" * 5000}},
        {"model": {**toy()["model"], "merges": 3}},
        {"model": {**toy()["model"], "merges": [["a"]]}},
        {"normalizer": {"type": "\x1b" * 1000}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                            "pair": [], "special_tokens": {}}},
    ],
)  # fmt: skip
def test_what_a_tokenizer_json_says_is_shown_escaped_and_short(change, tmp_path):
    with pytest.raises(TokenizerError) as e:
        folder(tmp_path, toy() | change)
    assert len(str(e.value)) < 900
    assert str(e.value).isprintable()


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"model": ' * 50_000, b'{"a": ' + b"9" * 5000 + b"}", b"{\x1b}"])
def test_json_that_is_none_is_named(data, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"{" + data[1:] if data[:1] == b"[" else data)
    with pytest.raises(TokenizerError, match=re.escape(str(tmp_path))) as e:
        tokenizer.load(tmp_path / "tokenizer.json")
    assert str(e.value).isprintable()


def test_deep_normalizers_are_an_error(tmp_path):
    deep = '{"type": "Sequence", "normalizers": [' * 400 + "]}" * 400
    tokens = json.dumps(toy())[:-1] + f', "normalizer": {deep}}}'
    (tmp_path / "tokenizer.json").write_text(tokens)
    with pytest.raises(TokenizerError):
        tokenizer.load(tmp_path / "tokenizer.json")
