"""A row of a pool: a prompt and what is generated after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jllama.decode import State
from jllama.grammar import Guide
from jllama.runner import power_of_two
from jllama.sampling import Sampling

_STOP_IDS = 128  # of a row; with more there are programs for that


class Taken(NamedTuple):
    """Tokens of a row, as `Completion` has them."""

    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]  # as many as the ids, or none


@dataclasses.dataclass(eq=False)
class Row:
    """A prompt and what is generated after it.

    Args:
      ids: of the prompt.
      sampling: its settings, arrays of one row.
      limit: the number of tokens, prompt included, at which it is full.
      shard: where it is on a mesh.
      taken: how many of its tokens were handed out, prompt included.
      stop_ids: the tokens that end it.
      done: whether no more will be generated.
      place: its row in the state, None before its prompt is read and after it has left.
      is_finite: whether what it has cached is.
      guide: what its text must be like, None for anything; it follows the row's tokens.
    """

    ids: list[int]
    sampling: Sampling
    limit: int
    shard: int
    taken: int
    stop_ids: tuple[int, ...]
    done: bool = False
    place: int | None = None
    is_finite: bool = True
    guide: Guide | None = None

    @property
    def complete(self) -> bool:
        """Whether its grammar lets nothing follow."""
        return self.guide is not None and self.guide.complete

    @property
    def stuck(self) -> bool:
        """Whether its grammar can't go on."""
        return self.guide is not None and bool(self.guide.fault)

    def follow(self, tokens: np.ndarray) -> None:
        """Tell the guide the row's tokens, of which it knows the first ones."""
        if self.guide is not None:
            self.guide.feed(tokens[len(self.ids) + self.guide.count :].tolist())
        self.done = self.done or self.complete or self.stuck


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a row has left behind: a state, in which it is the first row of its shard, and the ids cached there."""

    state: State
    ids: list[int]
    shard: int


def guides(rows: Sequence[Row | None]) -> dict[int, Guide]:
    """Return the guides of those that go on, by their places."""
    return {i: row.guide for i, row in enumerate(rows) if row is not None and row.guide is not None and not row.done}


def stop_ids(rows: Iterable[Row | None]) -> np.ndarray:
    """Return the tokens that end each row, int32 `[B, E]`, padded with -1."""
    ends = [() if row is None else row.stop_ids for row in rows]
    width = power_of_two(max(map(len, ends)), _STOP_IDS)
    return np.array([[*ids, *[-1] * (width - len(ids))] for ids in ends], np.int32)
