"""How many tokens are generated between two looks at the texts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_CHUNK_SECONDS = 0.05  # how long a stream may wait for the next piece
_MAX_CHUNK = 64  # steps


class Pace:
    """What the last turn took, and so how many steps the next one may take.

    Attributes:
      read_seconds: how long prompts were read.
    """

    def __init__(self) -> None:
        self.read_seconds = 0.0
        self._step_seconds = self._seconds = _CHUNK_SECONDS

    def steps(self, room: int | None, *, reading: bool) -> int:
        """Return how many steps to take, no more than `room` if that isn't None.

        While prompts are being read, it is for as long as that takes: the sooner the rows are filled, the more a step
        gives.
        """
        seconds = min(_CHUNK_SECONDS, self.read_seconds) if reading else _CHUNK_SECONDS
        most = _MAX_CHUNK if room is None else min(room, _MAX_CHUNK)
        return max(1, min(most, int(seconds / self._step_seconds)))

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Time the steps of a turn."""
        began = time.perf_counter()
        yield
        self._seconds = time.perf_counter() - began

    def note(self, tokens: int) -> None:
        """Remember how many tokens the row that got the most of them has got."""
        if tokens:
            self._step_seconds = self._seconds / tokens
