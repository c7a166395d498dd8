"""A pool whose rows move page by page, so that few programs serve all traffic and beginnings can be shared.

A page is a fixed number of slots of one row's cache. A prompt is read in a state of its own, whose pages are copied to
a row of the running state; a state grows or shrinks as the pages of its rows are copied to another. So every number
of rows and of slots needs a few programs of its own, and no pair of them does.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from jllama.decode import State
from jllama.mesh import ROWS
from jllama.model import Cache, init_cache
from jllama.pool import Pool, common_prefix
from jllama.programs import CUT, PASTE, READ_PROMPT, START
from jllama.row import Row
from jllama.runner import Runner, block_width, cache_slots
from jllama.settings import Settings

_PAGE = 64  # slots
_WIDEST = 128  # tokens of a block: others wait while it is read
_NARROW = 32  # of those that read what is left over
_MIN_SLOTS = 512
_GROWTH = 4  # of rows and of slots: programs take long to compile, and a row or a slot that is not used costs little


@dataclasses.dataclass(frozen=True)
class Pages:
    """A copy of a row's cache: of page i the first slot is i times a page, but a last one ends with the slots.

    Args:
      ids: the tokens whose keys and values are in it.
      pages: what holds them; the rest of the last one is anything.
    """

    ids: list[int]
    pages: list[Cache]


class PagedPool(Pool):
    """Rows that run together on one device, or on parts of a model.

    Attributes:
      token_bytes: what a slot of a row takes.
    """

    def __init__(self, runner: Runner, stop_ids: Sequence[int], most: int) -> None:
        """Make an empty pool of up to `most` rows.

        Raises:
          ValueError: the model is divided by rows, or over several processes.
        """
        super().__init__(runner, stop_ids, most)
        if runner.shards > 1 or jax.process_count() > 1:
            raise ValueError(
                f"a model on data:{runner.shards} in {jax.process_count()} processes: expected data:1 and one process"
            )
        config = runner.params.config
        self._last_slots = cache_slots(config.max_seq_len, config.max_seq_len)
        self._slots = _ladder(_MIN_SLOTS, self._last_slots)
        self._rows = _ladder(1, most)
        self._page = min(_PAGE, self._slots[0])
        cache = jax.eval_shape(lambda: init_cache(runner.params, 1, self._page))
        self.token_bytes: int = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) // self._page

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and slots there are."""
        return (0, 0) if self._state is None else (self._local, self._tokens.shape[1])

    def local_rows(self, count: int) -> int:
        """Return the rows of a state for `count` rows."""
        return next(n for n in self._rows if n >= count)

    def begin(self, ids: list[int], settings: Settings, known: Pages | None = None) -> PagedReading:
        """Begin to read a prompt; what `known` has of its beginning is copied.

        Raises:
          ValueError: a prompt that the model can't read.
        """
        (row,) = self.accept([(ids, settings)])
        return PagedReading(self, row, known)

    def pages(self, row: Row, known: Pages | None = None) -> Pages:
        """Copy the cache of a row; the pages that `known` has too are shared."""
        assert row.place is not None
        assert self._state is not None
        ids = self._tokens[row.place, : self._pos[row.place]].tolist()
        return self.cut(self._state, row.place, ids, known)

    def cut(self, state: State, place: int, ids: list[int], known: Pages | None) -> Pages:
        """Copy the cache of the row at a place, which holds `ids`."""
        shared = [] if known is None else known.pages[: common_prefix(known.ids, ids) // self._page]
        rest = [self._cut(state, place, i) for i in range(len(shared), self._count(len(ids)))]
        return Pages(ids, [*shared, *rest])

    def paste(self, cache: Cache, place: int, pages: Sequence[Cache]) -> Cache:
        """Put pages into the row at a place of a cache, whose memory is used again."""
        for i, page in enumerate(pages):
            cache = self.runner.call(PASTE, cache, page, np.int32(place), self._first(i))
        return cache

    def prefix(self, known: Pages, length: int) -> list[Cache]:
        """Return the pages that hold the first `length` tokens."""
        return known.pages[: self._count(length)]

    def end(self, row: Row) -> None:
        """Generate no more in a row, or stop reading its prompt; after the last one, no memory is held."""
        super().end(row)
        if not self.rows:
            self._state, self._arguments, self._places = None, None, []

    def admit(self, rows: list[Row | None], state: State) -> None:
        """Take up the row whose prompt is read."""
        row = rows[0]
        if row not in self._reading or not self.rows:
            super().admit(rows, state)
            return
        assert row is not None
        local, slots = self.shape
        wanted = max(local, self.local_rows(len(self.rows) + 1)), max(slots, state.tokens.shape[1])
        if wanted != (local, slots):
            self._regroup(*wanted)
        assert self._state is not None
        place = self._places.index(None)
        cache = self.paste(self._state.cache, place, self.cut(state, 0, row.ids, None).pages)
        self._reading.remove(row)
        self._places[place], self._arguments = row, None
        here, new = self._small(self._state), self._small(state)
        new = jax.tree.map(lambda leaf: _fit(leaf, wanted[1]), new)
        self._take_over(cache, jax.tree.map(lambda old, leaf: _insert(old, leaf, place), here, new))

    def warm_up(self, settings: Settings, allowed: int) -> None:
        """Run every program once that can be needed while the states are no larger than `allowed` bytes."""
        for slots in self._slots:
            for width in self.widths(slots):
                room = min(slots, self.runner.params.config.max_seq_len) - len(self._rows) - 1  # for a step of each
                prompt = [0] * min(width, room)
                (row,) = self.accept([(prompt, dataclasses.replace(settings, max_new_tokens=slots))])
                PagedReading(self, row, None, slots).finish()
                if width != self.widths(slots)[-1]:
                    self.end(row)
            for rows in self._rows:
                if rows * slots * self.token_bytes <= allowed or rows == 1:
                    self._regroup(rows, slots)
                    self._regroup(rows, slots)  # from this size too
                    row.done = False
                    self.advance(1)
                    self._warm_up_guesses()
            self.end(row)

    def _warm_up_guesses(self) -> None:
        speculator = self.runner.speculator
        if speculator is not None:
            assert self._state is not None
            assert self._arguments is not None
            state = speculator.warm_up(self.runner, self._state, *self._arguments, self._tokens, self._pos)
            self._fetch(state)

    def widths(self, slots: int) -> list[int]:
        """Return the widths of the blocks that a prompt is read in, beside so many slots, the narrowest first."""
        scores = slots * self.runner.params.config.n_heads // self.runner.parts
        widest = min(slots, block_width(1, _WIDEST, scores))
        return sorted({min(_NARROW, widest), widest})

    def slots_for(self, tokens: int) -> int:
        """Return the slots of a state whose rows have up to `tokens` tokens."""
        return next((n for n in self._slots if n >= tokens), self._last_slots)

    def _regroup(self, local: int, slots: int) -> None:
        """Copy the rows that are here to a state of so many rows and slots."""
        assert self._state is not None
        used = [i for i, row in enumerate(self._places) if row is not None]
        places = [*(self._places[i] for i in used), *[None] * (local - len(used))]
        old, sources = self._state, np.array([*used, *[0] * (local - len(used))])
        self._arguments = self._put_arguments(places)
        cache = self.empty(local, slots, self._arguments[1]).cache
        for place, source in enumerate(used):
            pages = [self._cut(old, source, i) for i in range(self._count(int(self._pos[source])))]
            cache = self.paste(cache, place, pages)
        small = jax.tree.map(lambda leaf: _fit(leaf[sources], slots), self._small(old))
        self._places = places
        self._take_over(cache, small)

    def empty(self, rows: int, slots: int, stop: object) -> State:
        """Make a state that holds nothing."""
        tokens, length = np.zeros((rows, slots), np.int32), np.ones(rows, np.int32)
        state: State = self.runner.call(START, *self.runner.put((tokens, length), ROWS), stop, None)
        return state

    def _take_over(self, cache: Cache, small: State) -> None:
        self._fetch(self.runner.put(small, ROWS)._replace(cache=cache))

    def _small(self, state: State) -> State:
        """Fetch all of a state but its cache."""
        small: State = self.runner.get(state._replace(cache=Cache((), ())))
        return small

    def _cut(self, state: State, place: int, page: int) -> Cache:
        cut: Cache = self.runner.call(CUT, state, np.int32(place), self._first(page), slots=self._page)
        return cut

    def _first(self, page: int) -> np.int32:
        # The largest state alone may be no multiple of a page.
        return np.int32(min(page * self._page, self._last_slots - self._page))

    def _count(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def _slots_for(self, tokens: int) -> int:
        return self.slots_for(tokens)


class PagedReading:
    """A prompt that is being read, a block at a time, so that the pool can go on between two blocks.

    Attributes:
      row: which joins with the last block.
      cached: how many of its tokens were known.
    """

    def __init__(self, pool: PagedPool, row: Row, known: Pages | None, slots: int = 0) -> None:
        """Begin; `PagedPool.begin` does."""
        self.row = row
        self._pool = pool
        runner = pool.runner
        # The last token is read in any case: its logits are wanted.
        self.cached = 0 if known is None else min(common_prefix(known.ids, row.ids), len(row.ids) - 1)
        slots = max(slots, pool.slots_for(len(row.ids) + 1))
        widths = pool.widths(slots)
        self._blocks, self._widest = _blocks(self.cached, len(row.ids), widths, slots), widths[-1]
        self._known = known
        self._read = self.cached
        with runner.timed("prompt"):
            self._sampling, self._stop = pool._put_arguments([row])
            state = pool.empty(1, slots, self._stop)
            tokens = np.zeros((1, slots), np.int32)
            tokens[0, : len(row.ids)] = row.ids
            length = np.array([len(row.ids)], np.int32)
            cache = state.cache if known is None else pool.paste(state.cache, 0, pool.prefix(known, self.cached))
            tokens, pos, done = runner.put((tokens, length - 1, length >= row.limit), ROWS)
            self._state = state._replace(cache=cache, tokens=tokens, pos=pos, done=done)

    @property
    def share(self) -> float:
        """How wide the next block is, of the widest that there is."""
        return self._blocks[0][1] / self._widest

    def advance(self) -> bool:
        """Read a block; returns whether it was the last, and the row has joined unless it was ended meanwhile."""
        runner = self._pool.runner
        with runner.timed("prompt"):
            first, width = self._blocks.popleft()
            self._state = runner.call(
                READ_PROMPT, self._state, self._sampling, self._stop, np.int32(first), width=width
            )
            self._read = min(first + width, len(self.row.ids))
            if self._blocks:
                jax.block_until_ready(self._state.pos)  # type: ignore[no-untyped-call]
                return False
            self._pool.admit([self.row], self._state)
        runner.timings.prompt_tokens += len(self.row.ids) - self.cached
        return True

    def finish(self) -> None:
        """Read all that is left."""
        while not self.advance():
            pass

    def pages(self) -> Pages:
        """Copy what was read so far."""
        return self._pool.cut(self._state, 0, self.row.ids[: self._read], self._known)


def _blocks(begin: int, end: int, widths: list[int], slots: int) -> deque[tuple[int, int]]:
    """Divide a prompt from `begin` on into blocks: their first tokens and their widths."""
    blocks = deque[tuple[int, int]]()
    narrow, wide = widths[0], widths[-1]
    while begin < end:
        width = wide if end - begin > wide - narrow else narrow
        # The last block ends with the slots: it begins earlier then, and reads some tokens again.
        blocks.append((min(begin, slots - width), width))
        begin += width
    return blocks


def _ladder(low: int, high: int) -> list[int]:
    """Return the sizes that there are, from `low` up to `high`."""
    steps = [min(low, high)]
    while steps[-1] < high:
        steps.append(min(_GROWTH * steps[-1], high))
    return steps


def _fit(leaf: np.ndarray, slots: int) -> np.ndarray:
    """Cut or pad the slots of an array by rows, if it has any."""
    if leaf.ndim < 2:
        return leaf
    cut = leaf[:, :slots]
    return np.pad(cut, [(0, slots - cut.shape[1] if axis == 1 else 0) for axis in range(leaf.ndim)])


def _insert(old: np.ndarray, new: np.ndarray, place: int) -> np.ndarray:
    """Put an array's only row in the place of a row of another."""
    return np.concatenate([old[:place], new, old[place + 1 :]])
