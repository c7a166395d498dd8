"""The text of prompts' continuations as their tokens come in: one by one or many at a time, and how a text ended."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Literal

from jllama.errors import quoted
from jllama.pool import Pool
from jllama.row import Kept, Row
from jllama.runner import Runner
from jllama.settings import Settings
from jllama.text import StopStrings, StreamDecoder
from jllama.tokenizer import Tokenizer
from jllama.tools import CallParser, Found, ToolCall, finish_reason

_CHUNK_SECONDS = 0.05  # how long a stream may keep a reader waiting for the next piece
_MAX_CHUNK = 64  # steps between two looks at the text
_SHORT = 64  # tokens of a prompt that are read again sooner than copied
_MOST_ANSWERS = 1024  # to one prompt
_WINDOW = 16  # batches whose prompts are held


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to continue, and how.

    Args:
      text: what is continued.
      settings: how.
      ids: the text's, where it was encoded already.

    Raises:
      ValueError: the text is none.
    """

    text: str
    settings: Settings = dataclasses.field(default_factory=Settings)
    ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ValueError(f"the prompt {quoted(self.text)}: expected a text (str)")

    def variants(self, n: int) -> list[Prompt]:
        """Return it n times, with seeds that follow its own; without a seed each text is a new one anyway.

        Raises:
          ValueError: n is no number of answers.
        """
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _MOST_ANSWERS:
            raise ValueError(f"n = {quoted(n)}: expected an integer from 1 to {_MOST_ANSWERS}")
        return [dataclasses.replace(self, settings=self.settings.of_answer(j)) for j in range(n)]


@dataclasses.dataclass(frozen=True)
class Completion:
    """A continued prompt.

    Args:
      prompt: the prompt's text.
      text: what follows it, up to a stop string.
      tokens: the generated ids, without the one that ended the text.
      logprobs: the natural log of the model's probability of each of them, before any sampling setting.
      finish_reason: "stop" (end-of-text token, stop string, or the whole of a response_format) or "length"
        (max_new_tokens, or the context is full); "tool_calls" where a chat's answer stops with calls.
      top_logprobs: the most probable ids in the place of each, as many as the setting asks for, with the same logs.
      tool_calls: those in a chat's answer, which the text is without.
    """

    prompt: str
    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "tool_calls"]
    top_logprobs: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)


class Answer:
    """The text of one prompt's continuation as it comes in."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, ids: list[int]) -> None:
        """Begin after a prompt whose ids are `ids`."""
        self.prompt = prompt
        self.ids = ids
        self.row: Row  # from `join` on
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self._stop_ids = prompt.settings.ends(tuple(tokenizer.stop_ids))
        self._decoder = StreamDecoder(tokenizer, ids)
        self._stops = StopStrings(prompt.settings.stop)
        self._read = 0
        self._ends: list[int] = []  # of each token in the text, before any of it is cut off

    def join(self, row: Row) -> None:
        """Take its tokens from this row of a pool."""
        self.row = row

    @property
    def room(self) -> int:
        """How many tokens can follow at most."""
        return self.row.limit - self.row.taken

    def update(self, pool: Pool) -> None:
        """Add the tokens that its row has got."""
        ids, logprobs, top = pool.take(self.row)
        for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if token in self._stop_ids:
                self._finish("stop")
                return
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.top_logprobs += top[i : i + 1]
            piece = self._decoder.feed(token)
            self._ends.append(len(piece) + (self._ends[-1] if self._ends else 0))
            if self._add(piece):
                self.finish_reason = "stop"
                return
        if self.row.done:
            self._finish("stop" if self.row.complete else "length")

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

    def cut(self) -> None:
        """End the text here, whatever could follow."""
        self._finish("length")

    @property
    def begun(self) -> int:
        """The number of tokens whose text begins in `text`, what they leave to the next one included."""
        return min(bisect.bisect_left(self._ends, len(self.text)) + 1, len(self._ends)) if self.text else 0

    def new_text(self) -> str:
        """Return what was added to the text since the last call."""
        new, self._read = self.text[self._read :], len(self.text)
        return new

    def completion(self) -> Completion:
        """Return the finished text."""
        assert self.finish_reason is not None
        return Completion(
            self.prompt.text, self.text, self.tokens, self.logprobs, self.finish_reason, self.top_logprobs
        )


class _Chunks:
    """How many steps are taken between two looks at the texts: as many as a reader may wait for."""

    def __init__(self) -> None:
        self._steps = 1

    def advance(self, pool: Pool, most: int = _MAX_CHUNK) -> None:
        """Generate in the rows of a pool; the chunks grow while they are quick."""
        began, steps = time.perf_counter(), min(self._steps, most)
        pool.advance(steps)
        if steps == self._steps < _MAX_CHUNK and time.perf_counter() - began < _CHUNK_SECONDS:
            self._steps *= 2


def follow(pool: Pool, answer: Answer, kept: Kept | None = None) -> Iterator[str]:
    """Generate one answer in an empty pool, piece by piece; `kept` holds the cache of what its prompt begins with."""
    answer.join(pool.join([(answer.ids, answer.prompt.settings)], kept).finish()[0])
    chunks = _Chunks()
    while True:
        answer.update(pool)
        if piece := answer.new_text():
            yield piece
        if answer.finish_reason is not None:
            return
        chunks.advance(pool)


def with_calls(pieces: Generator[str, None, Completion], parser: CallParser) -> Generator[str, None, Completion]:
    """Tell the calls of an answer from its text, piece by piece; returns the completion with both."""
    text, calls = "", list[ToolCall]()

    def add(found: Found) -> str:
        nonlocal text
        text += found.text
        calls.extend(found.calls)
        return found.text

    try:
        while True:
            if piece := add(parser.feed(next(pieces))):
                yield piece
    except StopIteration as end:
        completion: Completion = end.value
    if piece := add(parser.flush(whole=completion.finish_reason == "stop")):
        yield piece
    reason = finish_reason(completion.finish_reason, calls)
    return dataclasses.replace(completion, text=text, tool_calls=calls, finish_reason=reason)


def complete(
    runner: Runner,
    stop_ids: Sequence[int],
    answers: Iterator[Answer],
    *,
    batch_size: int,
    ready: Callable[[], bool],
    progress: Callable[[int], object],
) -> Iterator[Answer]:
    """Generate any number of answers, and yield them in order. A prompt joins the others as soon as one of them ends.

    Args:
      runner: the model.
      stop_ids: the tokens that end a row.
      answers: to be generated; no more than `_WINDOW` batches of them are held at a time.
      batch_size: how many run together.
      ready: whether the next of `answers` can be had without waiting.
      progress: called with the number of answers that have ended since the last call.
    """
    unfinished, waiting, running = deque[Answer](), list[Answer](), list[Answer]()
    pool: Pool | None = None
    fault: Exception | None = None
    chunks, more = _Chunks(), True
    while True:
        while more and len(unfinished) < _WINDOW * batch_size and (not unfinished or ready()):
            try:
                new = list(itertools.islice(answers, 1))
            except Exception as e:  # what came before is answered first
                new, fault = [], e
            more = bool(new)
            unfinished += new
            waiting += new
        if not unfinished:
            if fault is not None:
                raise fault
            return
        pool = pool or Pool(runner, stop_ids, batch_size if more else min(batch_size, len(unfinished)))
        while waiting and pool.free:
            running += _join(pool, waiting, running)
            running = _update(pool, running, progress)
        while unfinished and unfinished[0].finish_reason is not None:
            yield unfinished.popleft()
        if running:
            # Where it is known when a row ends, its place is filled again at once.
            chunks.advance(pool, min(answer.room for answer in running) if waiting or more else _MAX_CHUNK)
            running = _update(pool, running, progress)


def _join(pool: Pool, waiting: list[Answer], running: list[Answer]) -> list[Answer]:
    """Read the prompts of some answers that wait, the oldest and those that are about as long, and return them.

    A long prompt that one of `running` has read is copied from there.
    """
    first = waiting[0]
    twin = next((answer for answer in running if answer.ids == first.ids), None)
    if twin is not None and len(first.ids) > _SHORT and pool.runner.shards == 1:
        first.join(pool.join([(first.ids, first.prompt.settings)], pool.copy(twin.row)).finish()[0])
        return [waiting.pop(0)]
    count = min(pool.free, len(waiting))
    # Few at a time are read one by one, so that there are programs for two sizes alone.
    count = count if 2 * count > pool.most else 1
    if len(first.ids) > _SHORT and any(answer.ids == first.ids for answer in waiting[1:]):
        count = 1
    group = sorted(waiting, key=lambda answer: abs(len(answer.ids) - len(waiting[0].ids)))[:count]
    rows = pool.join([(answer.ids, answer.prompt.settings) for answer in group]).finish()
    for answer, row in zip(group, rows, strict=True):
        answer.join(row)
        waiting.remove(answer)
    return group


def _update(pool: Pool, running: list[Answer], progress: Callable[[int], object]) -> list[Answer]:
    """Tell each answer its new tokens; the places of those that have ended are free. Return the others."""
    for answer in running:
        answer.update(pool)
    ended = [answer for answer in running if answer.finish_reason is not None]
    for answer in ended:
        pool.end(answer.row)
    if ended:
        progress(len(ended))
    return [answer for answer in running if answer.finish_reason is None]
