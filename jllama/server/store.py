"""What is kept of the caches of prompts and answers, for prompts that begin alike."""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict

import jax
import numpy as np

from jllama.pool import common_prefix
from jllama.server.pages import Pages


class Store:
    """Caches by the ids that they hold; those that were of no use for the longest time go first.

    Attributes:
      budget: the most bytes that it holds.
      bytes: of all pages that are held, each counted once, however many share it.
    """

    def __init__(self, budget: int) -> None:
        """Make an empty store of at most `budget` bytes."""
        self.bytes = 0
        self.budget = budget
        self._entries: OrderedDict[tuple[str, bytes], Pages] = OrderedDict()  # the least recently used first
        # Of sorted texts one of the two neighbours has the longest prefix in common with another.
        self._sorted: dict[str, list[bytes]] = {}
        self._uses: Counter[int] = Counter()  # of a page, by its identity

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: list[int], salt: str = "") -> Pages | None:
        """Return what begins as `ids` do for as long as any does, None where nothing does; it must not be written to.

        Only what was added with the same `salt` counts.
        """
        keys, key = self._sorted.get(salt, []), _key(ids)
        at = bisect.bisect_left(keys, key)
        near = [(salt, each) for each in keys[max(at - 1, 0) : at + 1]]
        best = max(near, key=lambda each: common_prefix(self._entries[each].ids, ids), default=None)
        if best is None or self._entries[best].ids[:1] != ids[:1]:
            return None
        self._entries.move_to_end(best)
        return self._entries[best]

    def add(self, pages: Pages, salt: str = "") -> None:
        """Keep a row's cache, and nothing beside it that is the beginning of it."""
        if not pages.ids or sum(map(_size, pages.pages)) > self.budget:
            return
        key, keys = _key(pages.ids), self._sorted.get(salt, [])
        at = bisect.bisect_left(keys, key)
        if at < len(keys) and keys[at].startswith(key):
            self._entries.move_to_end((salt, keys[at]))
            return
        while at and key.startswith(keys[at - 1]):
            at -= 1
            self._remove(salt, keys[at])
        self._sorted.setdefault(salt, keys).insert(at, key)
        self._entries[salt, key] = pages
        for page in pages.pages:
            self._uses[id(page)] += 1
            self.bytes += _size(page) if self._uses[id(page)] == 1 else 0
        while self.bytes > self.budget:
            self._remove(*next(iter(self._entries)))

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._sorted.clear()
        self._uses.clear()
        self.bytes = 0

    def _remove(self, salt: str, key: bytes) -> None:
        keys = self._sorted[salt]
        del keys[bisect.bisect_left(keys, key)]
        if not keys:
            del self._sorted[salt]
        for page in self._entries.pop((salt, key)).pages:
            self._uses[id(page)] -= 1
            if not self._uses[id(page)]:
                del self._uses[id(page)]
                self.bytes -= _size(page)


def _key(ids: list[int]) -> bytes:
    return np.array(ids, ">i4").tobytes()  # sorted as the ids are


def _size(page: object) -> int:
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(page))
