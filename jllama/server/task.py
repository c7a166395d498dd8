"""A job on its way through the engine."""

from __future__ import annotations

import time

from jllama.generation import Answer
from jllama.row import Row
from jllama.server.jobs import Job, Piece, Timings
from jllama.server.pages import PagedPool, PagedReading, Pages


class Task:
    """A job, how far it is, and what of its answer was handed out.

    Attributes:
      job: it.
      answer: its text as it comes in.
      slots: those of a cache that holds it to its end.
      cancelled: whether nobody wants it any more; set from any thread.
      faulty: whether its cache can't be trusted.
      reading: of its prompt, from `begin` on.
      known: the pages of its cache that others can share.
    """

    reading: PagedReading

    def __init__(self, job: Job, answer: Answer, slots: int) -> None:
        self.job = job
        self.answer = answer
        self.slots = slots
        self.cancelled = False
        self.faulty = False
        self.started = False
        self.known: Pages | None = None
        self._sent = 0  # tokens
        self._arrived = time.monotonic()
        self._began = self._first = self._arrived

    @property
    def row(self) -> Row:
        """Its row of the pool."""
        return self.reading.row

    def begin(self, pool: PagedPool, known: Pages | None) -> None:
        """Begin to read the prompt. Raises as `PagedPool.begin`."""
        self.reading = pool.begin(self.job.ids, self.job.settings, known)
        self.answer.join(self.reading.row)
        self.known, self.started = known, True
        self._began = time.monotonic()

    def update(self, pool: PagedPool) -> int:
        """Add the tokens that its row has got, and return how many. Raises as `Answer.update`."""
        before = len(self.answer.tokens)
        self.answer.update(pool)
        if not before:
            self._first = time.monotonic()
        return len(self.answer.tokens) - before

    def piece(self) -> Piece | None:
        """Return what can be handed out, None where that is nothing."""
        answer, begin = self.answer, self._sent
        text = answer.new_text()
        end = len(answer.tokens) if answer.finish_reason is not None else answer.begun
        if not text and (answer.finish_reason is None or begin == end):
            return None
        self._sent = end
        top = getattr(answer, "top_logprobs", [])[begin:end]
        return Piece(text, answer.tokens[begin:end], answer.logprobs[begin:end], top)

    def timings(self) -> Timings:
        """Return when what happened."""
        at = (self._began, self._first, time.monotonic())
        return Timings(*(moment - self._arrived for moment in at))
