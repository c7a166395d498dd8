"""The text of prompts' continuations as their tokens come in: streams, stop strings, and how a text ended."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Literal

from jllama.errors import quoted
from jllama.runner import Batch, Kept, Runner
from jllama.settings import Settings
from jllama.text import StopStrings, StreamDecoder
from jllama.tokenizer import Tokenizer

_CHUNK_SECONDS = 0.05  # how long a stream may keep a reader waiting for the next piece
_MAX_CHUNK = 64  # steps between two looks at the text
_ALL = 2**30  # steps: more than any context holds


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to continue, and how.

    Raises:
      ValueError: the text is none.
    """

    text: str
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ValueError(f"the prompt {quoted(self.text)}: expected a text (str)")


@dataclasses.dataclass(frozen=True)
class Completion:
    """A continued prompt.

    Args:
      prompt: the prompt's text.
      text: what follows it, up to a stop string.
      tokens: the generated ids, without the one that ended the text.
      logprobs: the natural log of the model's probability of each of them, before any sampling setting.
      finish_reason: "stop" (end-of-text token or stop string) or "length" (max_new_tokens, or the context is full).
    """

    prompt: str
    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


class Row:
    """The text of one prompt's continuation as it comes in."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, ids: list[int]) -> None:
        """Begin after a prompt whose ids are `ids`."""
        self.prompt = prompt
        self.ids = ids
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self._stop_ids = tokenizer.stop_ids
        self._decoder = StreamDecoder(tokenizer, ids)
        self._stops = StopStrings(prompt.settings.stop)
        self._read = 0

    def take(self, ids: Sequence[int], logprobs: Sequence[float], *, done: bool) -> None:
        """Add generated tokens; with `done` no more will come."""
        for token, logprob in zip(ids, logprobs, strict=True):
            if token in self._stop_ids:
                self._finish("stop")
                return
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if self._add(self._decoder.feed(token)):
                self.finish_reason = "stop"
                return
        if done:
            self._finish("length")

    def _add(self, text: str) -> bool:
        safe, stopped = self._stops.feed(text)
        self.text += safe
        return stopped

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        """End the text: what was held back comes out, unless it completes a stop string."""
        stopped = self._add(self._decoder.flush())
        if not stopped:
            held, stopped = self._stops.flush()
            self.text += held
        self.finish_reason = "stop" if stopped else reason

    def new_text(self) -> str:
        """Return what was added to the text since the last call."""
        new, self._read = self.text[self._read :], len(self.text)
        return new

    def completion(self) -> Completion:
        """Return the finished text."""
        assert self.finish_reason is not None
        return Completion(self.prompt.text, self.text, self.tokens, self.logprobs, self.finish_reason)


def run(
    runner: Runner, rows: Sequence[Row], stop_ids: Sequence[int], *, stream: bool, kept: Kept | None = None
) -> Iterator[Batch]:
    """Generate for rows together, telling each its new tokens, and yield the batch whenever there are some.

    Args:
      runner: the model.
      rows: to be continued.
      stop_ids: the tokens that end a row.
      stream: whether somebody waits for each piece.
      kept: of a single row, what is in a cache already.
    """
    batch = Batch(runner, [row.ids for row in rows], [row.prompt.settings for row in rows], stop_ids, kept)
    # Stop strings and readers want to see the text now and then; the chunks grow to what a reader may wait for.
    steps = 1 if stream or any(row.prompt.settings.stop for row in rows) else _ALL
    while True:
        for i, row in enumerate(rows):
            if row.finish_reason is None:
                row.take(*batch.take(i), done=bool(batch.done[i]))
            if row.finish_reason is not None:
                batch.end(i)
        yield batch
        if batch.done.all():
            return
        began = time.perf_counter()
        batch.advance(steps)
        if steps < _MAX_CHUNK and time.perf_counter() - began < _CHUNK_SECONDS:
            steps *= 2


def stream(runner: Runner, row: Row, stop_ids: Sequence[int]) -> Generator[str, None, Completion]:
    """Generate for one row, piece by piece; returns the completion."""
    for _ in run(runner, [row], stop_ids, stream=True):
        if piece := row.new_text():
            yield piece
    return row.completion()
