"""Answers of a given form: which tokens may come next in a row, by llguidance.

A `Guide` follows the tokens of one row. Its masks leave only tokens whose bytes the grammar allows, and those that end
a text once it is complete. How the text is cut into tokens stays the model's choice.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jllama.errors import InputError
from jllama.response_format import Format
from jllama.tokenizer import Tokenizer

_CACHED = 64  # grammars that stay compiled
_SPACE = r" |\n {0,16}"  # between two parts of JSON, unless the schema says otherwise: a model could go on forever
# Work that a grammar may cost: at most about 0.1 s to compile, and 0.02 s a step.
_LIMITS = {"initial_lexer_fuel": 5_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000}
_WHERE = re.compile(r"^at \d+\(\d+\): (invalid regex .* \(in regex\): )?")
_START = '%llguidance {"no_forcing": true}\nstart: @answer'


class GrammarError(InputError):
    """A grammar that can't be compiled, or that a text can't go on with."""


class Guide:
    """What may come next in a row.

    Attributes:
      complete: whether the text is whole, and nothing can follow.
      fault: why it can't go on, "" where it can.
      count: how many tokens came.
    """

    def __init__(self, matcher: Any, barred: np.ndarray | None, ends: np.ndarray | None) -> None:
        """Begin before the first token, which can't be one that is `barred`, nor any one of `ends`; both are masks."""
        self._matcher = matcher
        self._barred = barred
        self._ends = ends
        self.complete = False
        self.fault = ""
        self.count = 0

    def feed(self, tokens: Iterable[int]) -> None:
        """Take the tokens that came."""
        for token in tokens:
            self.count += 1
            if not (self.complete or self.fault):
                self._barred = None
                self._matcher.consume_token(token)
                self._look()

    def bar(self, mask: np.ndarray) -> None:
        """Take out of a mask `[W]` what its row can't have, and see whether anything is left."""
        self._look()
        for barred in (self._barred, self._ends):
            if barred is not None:
                mask &= ~barred
        if not self.fault and not mask.any():
            self.complete = bool(self._matcher.is_accepting())
            self.fault = "" if self.complete else "no token of the vocabulary can come next"

    def _look(self) -> None:
        if self._matcher.is_error():
            self.fault = _reason(self._matcher.get_error())
        else:
            self.complete = self._matcher.is_stopped()


class Grammars:
    """The grammars of a tokenizer, compiled when they are first asked for."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """Take the tokenizer of a model with `size` ids."""
        self._tokenizer = tokenizer
        self._size = size
        self._compile = functools.lru_cache(_CACHED)(self._compiled)

    @property
    def words(self) -> int:
        """The width of a mask: 32 ids a word."""
        return -(-self._size // 32)

    def check(self, form: Format) -> None:
        """Raise GrammarError for a format that can't be compiled, or that no token can begin."""
        guide = self.guide(form, ())
        self.masks({0: guide}, 1)
        if guide.fault:
            raise GrammarError(f"{form.kind}: {guide.fault}")

    def guide(self, form: Format, prompt: Iterable[int], *, ends: bool = True) -> Guide:
        """Return the guide of a row after the ids of its prompt; without `ends` it goes on for as long as it can.

        Raises:
          GrammarError: the format can't be compiled.
        """
        first = True
        for token in prompt:
            first = self._tokenizer.first_after(token, first=first)
        matcher = self._compile(form).deep_copy()
        return Guide(matcher, self._stripped if first else None, None if ends else self._ends)

    def masks(self, guides: Mapping[int, Guide], rows: int) -> np.ndarray:
        """Compute which tokens may come next: uint32 `[rows, W]`, bit i % 32 of word i // 32 for id i.

        Rows without a guide may have any. A guide that finds none says so by its `fault`.
        """
        masks = np.full((rows, self._padded), 0xFFFFFFFF, np.uint32)
        live = [(guide._matcher, row) for row, guide in guides.items() if not (guide.complete or guide.fault)]
        if live:
            self._executor.unsafe_compute_mask_ptr(live, masks.ctypes.data, self._padded * 4, rows)
        for _, row in live:
            guides[row].bar(masks[row, : self.words])
        return masks[:, : self.words]

    def _compiled(self, form: Format) -> Any:
        """The matcher of a format, at its beginning."""
        library = _library()
        with _refused(form.kind):
            matcher = library.LLMatcher(
                self._vocabulary,
                json.dumps({"grammars": [{"lark_grammar": _START}, {"name": "answer"} | _grammar(form)]}),
                log_level=0,
                limits=library.LLParserLimits(**_LIMITS, verbose_errors=False),
            )
        if matcher.is_error():
            raise GrammarError(f"{form.kind}: {_reason(matcher.get_error())}")
        return matcher

    @functools.cached_property
    def _vocabulary(self) -> Any:
        """The tokenizer as llguidance wants it."""
        library = _library()
        ends = self._tokenizer.stop_ids or (self._size,)  # without one, an id that is never drawn
        adapter = library.TokenizerWrapper(_Adapter(self._tokenizer, self._size, ends))
        with _refused("the tokenizer"):
            return library.LLTokenizer(adapter, n_vocab=len(adapter.tokens), eos_token=list(ends))

    @functools.cached_property
    def _padded(self) -> int:
        return -(-int(self._vocabulary.vocab_size) // 32)

    @functools.cached_property
    def _executor(self) -> Any:
        return _library().LLExecutor()

    @functools.cached_property
    def _stripped(self) -> np.ndarray:
        """The tokens that lose a space at the beginning of a text, packed: the grammar knows them with it."""
        pieces = _pieces(self._tokenizer, self._size, first=True)
        inside = _pieces(self._tokenizer, self._size, first=False)
        return self._packed(i for i, (a, b) in enumerate(zip(pieces, inside, strict=True)) if a != b)

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        """The tokens that end a text, packed."""
        return self._packed(self._tokenizer.stop_ids)

    def _packed(self, ids: Iterable[int]) -> np.ndarray:
        bits = np.zeros(self.words * 32, bool)
        bits[list(ids)] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)


class _Adapter:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        control = {*tokenizer.special.ids.values(), *ends}
        self.special_token_ids = sorted(control)
        self.tokens = [*_pieces(tokenizer, size, first=False), *[b""] * (max(ends) >= size)]
        names = {i: text.encode() for text, i in tokenizer.special.ids.items()}
        for i in control:
            self.tokens[i] = names.get(i, b"<%d>" % i)

    def __call__(self, text: bytes) -> list[int]:
        """Encode a text: only where tokens are forced, and here none is."""
        return []


def _pieces(tokenizer: Tokenizer, size: int, *, first: bool) -> list[bytes]:
    known = min(size, tokenizer.vocab_size)
    return [*(tokenizer.piece(i, first=first) for i in range(known)), *[b""] * (size - known)]


def _grammar(form: Format) -> dict[str, Any]:
    """A format as part of llguidance's own."""
    if form.kind == "lark":
        return {"lark_grammar": form.text}
    if form.kind == "regex":
        return dict(json.loads(_library().LLMatcher.grammar_from_regex(form.text))["grammars"][0]) | {"name": "answer"}
    schema = {"type": "object"} if form.kind == "json_object" else json.loads(form.text)
    schema = {} if schema is True else schema
    options = schema.get("x-guidance", {})
    if isinstance(options, dict):
        options = {"whitespace_pattern": _SPACE} | options
    return {"json_schema": schema | {"x-guidance": options}}


def _reason(error: str) -> str:
    """What llguidance says, without the lines in which it shows where."""
    first, *more = error.strip().splitlines() or ["no reason given"]
    if first.startswith("NoExtension"):
        return "nothing can follow"
    if found := [line.removeprefix("error: ") for line in more if line.startswith("error: ")]:
        first = f"{first.removesuffix('regex parse error:')}{found[0]}"
    return _WHERE.sub("", first)


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError as e:
        raise GrammarError("a response_format needs the llguidance library: pip install 'jllama[grammar]'") from e


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn what llguidance raises, panics too, into GrammarError."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise GrammarError(f"{what}: {e}") from e
