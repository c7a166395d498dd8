"""A request's answers on their way to a client: whole, or as a stream of events; they end when the client goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jllama.server import sse
from jllama.server.answers import Answers
from jllama.server.errors import FAULTS, from_fault
from jllama.server.jobs import Finished, Piece
from jllama.server.scoring import PromptScores
from jllama.server.service import Running

LOG = logging.getLogger("jllama.server")
KEEP_ALIVE_SECONDS = 15.0
T = TypeVar("T")


class EventStream(StreamingResponse):
    """A stream of events; what runs for it ends with it, even where it was never begun."""

    def __init__(self, running: Running, answers: Answers, scores: Sequence[PromptScores | None]) -> None:
        self._running = running
        super().__init__(events(running, answers, scores), headers=sse.HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


async def events(running: Running, answers: Answers, scores: Sequence[PromptScores | None]) -> AsyncIterator[bytes]:
    """Yield a stream: chunks of all choices, what they took if that is wanted, and one [DONE], or else an error."""
    try:
        while any(choice.ended is None for choice in answers.choices):
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    found = await running.next()
            except TimeoutError:
                yield sse.KEEP_ALIVE
                continue
            chunks: list[dict[str, Any]] = []
            for i, event in found:
                choice = answers.choices[i]
                if isinstance(event, Piece | Finished):
                    chunks += choice.begin(scores[i])
                if isinstance(event, Piece):
                    chunks += choice.piece(event)
                elif isinstance(event, Finished):
                    chunks += choice.end(event)
            if chunks:
                yield b"".join(sse.event(answers.chunk(chunk)) for chunk in chunks)
    except Exception as e:
        LOG.error("%s failed: %s", answers.id, e, exc_info=None if isinstance(e, FAULTS) else e)
        yield sse.event(from_fault(e).envelope)
        return
    if (last := answers.last()) is not None:
        yield sse.event(last)
    yield sse.DONE


async def whole(running: Running, answers: Answers, scores: Sequence[PromptScores | None]) -> dict[str, Any]:
    """Wait for all answers."""
    entries: dict[int, dict[str, Any]] = {}
    while len(entries) < len(answers.choices):
        for i, event in await running.next():
            if isinstance(event, Finished):
                entries[i] = answers.choices[i].whole(event, scores[i])
    return answers.whole([entries[i] for i in sorted(entries)])


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """Return what `work` does, None where the client goes before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        leaving.cancel()
