"""Answers of a given form: every whole one fits, every other one is a beginning, and nothing ever waits for more."""

import importlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import oracle
import pytest
import schemas
import tiny
import trained
from console import Run, error
from hypothesis import HealthCheck, given, settings

from jllama import LLM, Completion, Format, Prompt, Settings, tokenizer
from jllama.config import Config
from jllama.grammar import GrammarError, Grammars, Guide
from jllama.response_format import to_format
from jllama.tokenizer import Tokenizer

BYTES = [bytes([b]) for b in range(256)]
PIECES = [b"", b"", b"", *BYTES, b'{"', b'":', b'", "', b"\n  ", b"true", b"null", b"12", b"ab", "é".encode(), b"red"]
CONFIG = Config(32, 64, 2, 4, 2, len(PIECES), 512)
NOTHING = Format("lark", 'start: "a" X\nX: /b/ & /c/')  # after an a nothing can follow


class Bytes(tiny.Letters):
    def encode(self, text: str) -> list[int]:
        return [b + 3 for b in text.encode()]


@pytest.fixture(scope="module")
def untrained() -> LLM:
    return LLM(tiny.params(oracle.random_weights(CONFIG, tied=True, seed=0), CONFIG), Bytes(PIECES))


@pytest.fixture(scope="module")
def stories() -> LLM:
    return LLM.load("stories", kernels="xla", dtype="float32")


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": value}}


def regex(text: str) -> Format:
    return Format("regex", text)


# What others say of a text.


class ByBytes:
    """A tokenizer of single bytes: what llguidance says of a text by it depends on no vocabulary."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*BYTES, b"")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


REFERENCE = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByBytes()))


def begins(text: str, value: Any) -> bool:
    """Whether llguidance takes a text for the beginning of one that fits a schema."""
    matcher = llguidance.LLMatcher(REFERENCE, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(value)))
    data = list(text.encode())
    return matcher.validate_tokens(data) == len(data)


def check_json(answer: Completion, value: Any) -> None:
    if answer.finish_reason == "stop":
        jsonschema.validate(
            json.loads(answer.text), value, jsonschema.Draft202012Validator, format_checker=jsonschema.FormatChecker()
        )
    else:
        # A character may be cut in the middle.
        assert begins(answer.text.removesuffix("\ufffd"), value), (answer.text, value)


def check_schemas(llm: LLM, values: list[Any], most: int, **how: Any) -> int:
    """Answer in the forms of schemas, all in one batch; returns how many answers are whole."""
    asked = [Prompt("a", Settings(response_format=schema(v), max_new_tokens=most, seed=7, **how)) for v in values]
    answers = llm.generate(asked, batch_size=8)
    for answer, value in zip(answers, values, strict=True):
        check_json(answer, value)
    return sum(answer.finish_reason == "stop" for answer in answers)


def some_schemas(count: int) -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=count, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(schemas.SCHEMAS)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def test_answers_fit_random_schemas(untrained: LLM, stories: LLM) -> None:
    values = some_schemas(16)
    assert check_schemas(untrained, values, 96) > 4
    assert check_schemas(stories, values, 64, temperature=1.5) > 4


@pytest.mark.slow
def test_answers_fit_200_random_schemas(untrained: LLM, stories: LLM) -> None:
    values = some_schemas(220)
    assert len(values) >= 200
    assert check_schemas(untrained, values, 256) > 100
    assert check_schemas(stories, values, 128, temperature=1.5) > 100


# Small languages, word by word.


@pytest.mark.parametrize(
    "pattern", ["a", "ab|abc+", "(a|b)*c", "a?b?c?", "[^b]{2,3}", "(ab)+|c", "", "(a{1,2}b){2}", "."]
)
def test_a_regular_expression_lets_through_what_python_matches(pattern: str) -> None:
    letters = tiny.Letters([b"", b"", b"", b"a", b"b", b"c", b"ab", b"bc", b"cab"])
    grammars = Grammars(letters, 9)
    words = ["".join(word) for n in range(5) for word in itertools.product("abc", repeat=n)]
    found = {word for word in words if accepts(grammars, letters, regex(pattern), [ids for ids in ways(word)])}
    assert found == {word for word in words if re.fullmatch(pattern, word)}


def ways(word: str) -> Iterator[list[int]]:
    """All ways in which pieces make a word."""
    if not word:
        yield []
    for i, piece in enumerate(["a", "b", "c", "ab", "bc", "cab"], 3):
        if word.startswith(piece):
            yield from ([i, *rest] for rest in ways(word[len(piece) :]))


def accepts(grammars: Grammars, tokens: Tokenizer, form: Format, all_ids: list[list[int]]) -> bool:
    """Whether a word can be all of an answer; every way to write it must lead to the same."""
    (found,) = {follows(grammars, form, ids, tokens.stop_ids) for ids in all_ids}
    return found


def allowed(grammars: Grammars, guide: Guide) -> set[int]:
    mask = grammars.masks({1: guide}, 2)
    assert (mask[0] == 0xFFFFFFFF).all()  # a row without a guide
    return set(np.flatnonzero(np.unpackbits(mask[1].view(np.uint8), bitorder="little")).tolist())


def follows(
    grammars: Grammars, form: Format, ids: list[int], ends: tuple[int, ...], prompt: tuple[int, ...] = (3,)
) -> bool:
    """Whether each id may come after those before it, and the text may end there."""
    guide = grammars.guide(form, prompt)
    for i in ids:
        if guide.complete or i not in allowed(grammars, guide):
            return False
        guide.feed([i])
    return guide.complete or set(ends) <= allowed(grammars, guide)


@pytest.mark.parametrize("kind", ["llama2.c", "SentencePiece", "byte-level"])
def test_the_tokens_of_a_text_are_its_bytes_whatever_the_tokenizer(kind: str, tmp_path: Path) -> None:
    if kind == "llama2.c":
        trained.write_tokenizer(tmp_path / "tokenizer.bin", 400)
        found = tokenizer.load(tmp_path / "tokenizer.bin")
    elif kind == "SentencePiece":
        (tmp_path / "tokenizer.model").write_bytes(trained.train_sentencepiece().serialized_model_proto())
        found = tokenizer.load(tmp_path / "tokenizer.model")
    else:
        (tmp_path / "tokenizer.json").write_text(trained.train().to_str())
        found = tokenizer.load(tmp_path / "tokenizer.json")
    grammars = Grammars(found, found.vocab_size + 5)  # a padded vocabulary
    prompt = found.encode("x")
    for text in ("the cat sat, 12", " hello\n\n there", "é 🦙 株", "<|im_end|>"):
        ids = found.encode(text)
        written = found.decode([*prompt, *ids]).removeprefix(found.decode(prompt))
        assert follows(grammars, regex(re.escape(written)), ids, found.stop_ids, tuple(prompt)), text
        assert not follows(grammars, regex(re.escape(written) + "x"), ids, found.stop_ids, tuple(prompt)), text
    # As the first of a text a token may lose its space: then it is not what a grammar takes it for.
    for i in allowed(grammars, grammars.guide(regex(" ?[a-z]+"), ())):
        assert re.fullmatch(r" ?[a-z]*", found.decode([i]))
        assert found.piece(i, first=True) == found.piece(i, first=False)
    # Neither what stands for nothing nor a control token is text.
    free = allowed(grammars, grammars.guide(regex("(?s:.*)"), (3,)))
    assert free & set(found.special.ids.values()) <= set(found.stop_ids) <= free
    assert max(free) < found.vocab_size


# In a batch, in parts, and with other settings.


def test_rows_with_and_without_share_a_batch(stories: LLM) -> None:
    free = Settings(seed=3, max_new_tokens=24)
    forms: list[Any] = [None, regex(r" [a-z]+(, [a-z]+){2}\."), None, {"type": "json_object"}, regex("(yes|no)")]
    prompts = [Prompt("Once", Settings(**{**vars(free), "response_format": form})) for form in forms]
    together = stories.generate(prompts, batch_size=4)
    alone = [stories.generate([prompt])[0] for prompt in prompts]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert together[0].tokens == stories.generate(["Once"], seed=3, max_new_tokens=24)[0].tokens
    assert re.fullmatch(r" [a-z]+(, [a-z]+){2}\.", together[1].text)
    assert together[1].finish_reason == together[4].finish_reason == "stop"


def test_a_stream_is_the_text_and_stop_strings_end_it(stories: LLM) -> None:
    form = regex("(one, two, |three, ){3,6}!")
    whole = stories.generate(["Once"], seed=1, response_format=form)[0]
    assert re.fullmatch("(one, two, |three, ){3,6}!", whole.text)
    pieces = list(stories.stream("Once", seed=1, response_format=form))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 3
    stopped = stories.generate(["Once"], seed=1, response_format=form, stop=["e, "])[0]
    assert stopped.text == whole.text[: whole.text.index("e, ")]
    assert stopped.finish_reason == "stop"


def test_a_limit_leaves_a_beginning_and_no_more_than_the_text_is_generated(stories: LLM) -> None:
    form = regex("abcdefghij")
    for most in range(1, 8):
        answer = stories.generate(["Once"], max_new_tokens=most, response_format=form)[0]
        assert "abcdefghij".startswith(answer.text)
        assert len(answer.tokens) == min(most, len(answer.tokens))
        assert (answer.finish_reason == "stop") == (answer.text == "abcdefghij")


def test_without_an_end_a_text_goes_on_for_as_long_as_it_may(stories: LLM) -> None:
    asked: Any = {"response_format": regex("[a-c]{2,6}"), "ignore_eos": True}
    for seed in range(3):
        answer = stories.generate(["Once"], seed=seed, **asked)[0]
        assert re.fullmatch("[a-c]{6}", answer.text)
        assert answer.finish_reason == "stop"
    short = stories.generate(["Once"], seed=0, response_format=regex("[a-c]{2,60}"), min_new_tokens=20)[0]
    assert len(short.tokens) >= 20


def test_log_probabilities_are_those_of_the_model(stories: LLM) -> None:
    answer = stories.generate(["Once"], response_format=regex("[ a-z]{12}"), seed=2)[0]
    ids = [*stories.tokenizer.prompt_ids("Once"), *answer.tokens]
    logits = tiny.all_logits(stories.params, np.array([ids], np.int32))[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = [logprobs[i - 1, ids[i]] for i in range(len(ids) - len(answer.tokens), len(ids))]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


# On the command line.


def test_flags_of_forms(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type": "array", "items": {"enum": ["red", 7]}, "minItems": 1, "maxItems": 2}')
    (tmp_path / "g.lark").write_text('start: " " ("yes" | "no") "!"')
    flags = ("--checkpoint=stories", "--kernels=xla", "--noecho", "--seed=1", "--prompt=Once")
    assert set(json.loads(run(*flags, f"--json_schema={tmp_path}/s.json")[1])) <= {"red", 7}
    assert run(*flags, f"--grammar={tmp_path}/g.lark")[1] in (" yes!\n", " no!\n")
    assert re.fullmatch("[xyz]{4}\n", run(*flags, "--regex=[xyz]{4}")[1])
    lines = [
        {"prompt": "Once", "response_format": {"type": "regex", "regex": "[0-9]{3}"}},
        {"prompt": "Once", "response_format": None, "max_new_tokens": 1},
        {"prompt": "Once"},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = run(*flags[:2], f"--prompt_file={tmp_path}/p.jsonl", "--regex=x", "--batch_size=2")[1]
    texts = [json.loads(line)["text"] for line in out.splitlines()]
    assert re.fullmatch("[0-9]{3}", texts[0])
    assert texts[1:] == [" upon", "x"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--regex=["], "regex: unclosed character class"),
        (["--regex=a", "--grammar=b"], "--regex and --grammar: expected one of them"),
        (["--json_schema=/nowhere.json"], "/nowhere.json: No such file or directory"),
        (["--grammar={}/s.json"], "lark: "),
        (["--json_schema={}/s.json"], "a json_schema is no JSON"),
        (["--prompt_file={}/p.jsonl"], "line 1: regex: unclosed character class"),
    ],
)
def test_wrong_forms_on_the_command_line(run: Run, tmp_path: Path, flags: list[str], words: str) -> None:
    (tmp_path / "s.json").write_text("{")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "response_format": {"type": "regex", "regex": "["}}')
    assert words in error(run("--checkpoint=stories", *(flag.format(tmp_path) for flag in flags)))


# What can't be.


def test_a_grammar_that_cannot_go_on_is_an_error(stories: LLM) -> None:
    with pytest.raises(GrammarError, match="the grammar stops after 1 tokens: nothing can follow"):
        stories.generate(["Once"], response_format=NOTHING)
    letters = tiny.Letters([b"", b"", b"", b"a", b"b"])  # no c
    grammars = Grammars(letters, 5)
    guide = grammars.guide(regex("ac"), (3,))
    guide.feed([3])
    grammars.masks({0: guide}, 1)
    assert guide.fault == "nothing can follow"
    with pytest.raises(GrammarError, match="regex: nothing can follow"):
        grammars.check(regex("c"))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (schema({"type": "nope"}), "json_schema: Invalid type: nope"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (schema({"$ref": "http://example.com/x"}), "json_schema: Resource"),
        (schema({"not": {}}), "Unimplemented"),
        (regex("(?=a)b"), "look-around"),
        (regex("["), "regex: unclosed character class"),
        (Format("lark", "start: a"), "lark: unknown name"),
        (Format("lark", "start: <[999999]>"), "lark: "),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_any_work(stories: LLM, form: Any, message: str) -> None:
    before = stories.timings.prompt_tokens
    with pytest.raises(ValueError, match=message) as found:
        stories.generate(["Once", Prompt("a", Settings(response_format=form))])
    assert str(found.value).isprintable()
    assert stories.timings.prompt_tokens == before


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "response_format = 3: expected an object with a type"),
        ({"type": "xml"}, "response_format.type = 'xml': expected text, json_schema"),
        ({"type": "json_schema"}, "schema is not there"),
        (schema(3), "a json_schema is 3: expected an object, or true"),
        ({"type": "regex"}, "a regex is None: expected a text"),
        ({"type": "regex", "regex": "a" * 2**19}, "characters at most"),
    ],
)
def test_a_wrong_format_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(response_format=value)


def test_formats_as_others_write_them() -> None:
    some = Format("json_schema", '{"type": "integer"}')
    assert to_format({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}) == some
    assert to_format({"type": "json_object", "schema": {"type": "integer"}}) == some
    assert to_format({"type": "json_object"}) == Format("json_object")
    assert to_format({"type": "text"}) is to_format(None) is None
    assert hash(to_format({"type": "regex", "regex": "a"})) == hash(regex("a"))
    assert Settings(response_format={"type": "lark", "lark": "start: /a/"}).form == Format("lark", "start: /a/")


def test_without_the_library_it_says_how_to_install_it(stories: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'jllama\[grammar\]'"):
        stories.generate(["Once"], response_format=regex("not compiled before"))
    importlib.invalidate_caches()


def test_white_space_has_an_end(untrained: LLM) -> None:
    guide = untrained.grammars.guide(Format("json_object"), (3,))
    spaces = {b + 3 for b in b" \t\r\n"} | {PIECES.index(b"\n  ")}
    guide.feed([ord("{") + 3])
    for _ in range(20):
        if not (found := allowed(untrained.grammars, guide) & spaces):
            return
        guide.feed([max(found)])
    raise AssertionError("it goes on")
