"""A request's answers: from the engine's events to JSON, whole or piece by piece."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jllama.server.jobs import Finished, Piece
from jllama.server.logprobs import Spelling, Top
from jllama.server.requests import Asked, Given
from jllama.server.scoring import PromptScores
from jllama.tokenizer import Tokenizer
from jllama.tools import Found, ToolCall, finish_reason


class Lists(Protocol):
    """Log-probabilities in the shape of an endpoint."""

    def __init__(self, spelling: Spelling, count: int) -> None: ...

    def add(self, tokens: list[int], logprobs: Sequence[float | None], tops: Sequence[Top]) -> dict[str, Any]:
        """Return those of some tokens."""


class Shape(Protocol):
    """How the answers of an endpoint are written."""

    endpoint: str
    prefix: str
    whole: str
    chunk: str
    logprobs: type[Lists]

    def first(self) -> dict[str, Any] | None:
        """Return the beginning of a choice."""

    def part(self, text: str, calls: Sequence[ToolCall] = (), first: int = 0) -> dict[str, Any]:
        """Return a part of a choice, "" without calls for its end; `first` is the index of the first call."""

    def full(self, text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return a choice."""


class Choice:
    """One answer.

    Attributes:
      ended: the event that said so.
    """

    def __init__(self, index: int, given: Given, asked: Asked, tokenizer: Tokenizer, shape: Shape) -> None:
        self.given = given
        self.ended: Finished | None = None
        self._tokenizer = tokenizer
        self._index = index
        self._asked = asked
        self._shape = shape
        self._begun = False
        self._held: list[tuple[int, float, Top]] = []  # tokens whose text is still to come
        self._parser = None if given.turn is None else given.turn.parser()
        self._calls: list[ToolCall] = []
        self._lists: Lists | None = None
        if asked.logprobs is not None:
            spelling = Spelling(tokenizer, () if asked.echo else given.ids)
            self._lists = shape.logprobs(spelling, asked.logprobs)

    def begin(self, scored: PromptScores | None) -> Iterator[dict[str, Any]]:
        """Yield what comes before the answer: a role, or the prompt."""
        if self._begun:
            return
        self._begun = True
        if (first := self._shape.first()) is not None:
            yield self._entry(first)
        if self._asked.echo:
            yield self._entry(self._shape.part(self.given.text), self._prompt_lists(scored))

    def piece(self, event: Piece) -> Iterator[dict[str, Any]]:
        """Yield a piece of the answer; one without a text waits for the next."""
        tops: Sequence[Top] = event.top_logprobs or [()] * len(event.tokens)
        self._held += zip(event.tokens, event.logprobs, tops, strict=True)
        yield from self._parts(Found(event.text, []) if self._parser is None else self._parser.feed(event.text))

    def end(self, event: Finished) -> Iterator[dict[str, Any]]:
        """Yield the end of the answer."""
        self.ended, reason = event, event.completion.finish_reason
        if self._parser is not None:
            yield from self._parts(self._parser.flush(whole=reason == "stop"))
        lists = self._held_lists() if self._held else None
        yield self._entry(self._shape.part(""), lists, finish_reason(reason, self._calls))

    def _parts(self, found: Found) -> Iterator[dict[str, Any]]:
        if found.text or found.calls:
            part = self._shape.part(found.text, found.calls, len(self._calls))
            self._calls += found.calls
            yield self._entry(part, self._held_lists())

    def whole(self, event: Finished, scored: PromptScores | None) -> dict[str, Any]:
        """Return the answer at once."""
        self.ended, done = event, event.completion
        found, lists = Found(done.text, []), None
        if self._parser is not None:
            found = self._parser.whole(done.text, whole=done.finish_reason == "stop")
        text = found.text
        if self._lists is not None:
            parts = [self._prompt_lists(scored)] if self._asked.echo else []
            parts.append(self._lists.add(done.tokens, done.logprobs, done.top_logprobs))
            lists = {
                name: [each for part in parts if part for each in part[name]] if isinstance(value, list) else value
                for name, value in (parts[-1] or {}).items()
            }
        if self._asked.echo:
            text = self.given.text + text
        return self._entry(self._shape.full(text, found.calls), lists, finish_reason(done.finish_reason, found.calls))

    def generated(self) -> int:
        """Count the tokens of the answer, with the one that ended it, as vLLM and llama.cpp do."""
        if self.ended is None:
            return 0
        done, spelling = self.ended.completion, Spelling(self._tokenizer, self.given.ids)
        # A stop string ends a text before the end of its tokens.
        whole = b"".join(map(spelling.next, done.tokens)).decode(errors="replace")
        return len(done.tokens) + (done.finish_reason == "stop" and whole == done.text)

    def _prompt_lists(self, scored: PromptScores | None) -> dict[str, Any] | None:
        return self._lists.add(self.given.ids, scored.logprobs, scored.tops) if self._lists and scored else None

    def _held_lists(self) -> dict[str, Any] | None:
        held, self._held = self._held, []
        if self._lists is None:
            return None
        return self._lists.add([token for token, _, _ in held], [p for _, p, _ in held], [top for _, _, top in held])

    def _entry(self, body: dict[str, Any], lists: Any = None, reason: str | None = None) -> dict[str, Any]:
        return {"index": self._index, **body, "logprobs": lists, "finish_reason": reason}


class Answers:
    """All answers of a request.

    Attributes:
      id: the request's.
      choices: `n` for each prompt, in order.
    """

    def __init__(self, asked: Asked, tokenizer: Tokenizer, shape: Shape, model: str) -> None:
        self.id = f"{shape.prefix}-{secrets.token_hex(12)}"
        self._shape = shape
        self._asked = asked
        self._head = {"created": int(time.time()), "model": model}
        givens = [given for given in asked.prompts for _ in range(asked.n)]
        self.choices = [Choice(i, given, asked, tokenizer, shape) for i, given in enumerate(givens)]

    def chunk(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return an event with a part of a choice."""
        return self._wrap(self._shape.chunk, [entry]) | ({"usage": None} if self._asked.usage else {})

    def last(self) -> dict[str, Any] | None:
        """Return the event with what a stream took, if that is wanted."""
        return self._wrap(self._shape.chunk, []) | {"usage": self.usage()} if self._asked.usage else None

    def whole(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the whole answer."""
        return self._wrap(self._shape.whole, entries) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Count tokens: a prompt once, whatever the number of its answers."""
        prompt = sum(len(given.ids) for given in self._asked.prompts)
        # An answer's siblings find its whole prompt cached: what was saved is what the first of them found.
        cached = sum(c.ended.cached_tokens for c in self.choices[:: self._asked.n] if c.ended)
        generated = sum(choice.generated() for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _wrap(self, kind: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, **self._head, "choices": entries}
