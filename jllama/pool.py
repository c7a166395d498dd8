"""Rows that come and go: prompts are read beside a running `State`, join it, and leave it as they end.

A row's text is what it is alone, whoever runs beside it: a draw depends on its seed and position, and a product on its
own row. On a mesh every data shard has as many rows as the others; a row stays on the shard where its prompt is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jllama.decode import State, Stop
from jllama.grammar import GrammarError
from jllama.mesh import ROWS
from jllama.programs import CLEAR, DECODE, PLACE, READ_PROMPT, REGROUP, SAMPLING, START, STOP
from jllama.row import Kept, Row, Taken, guides, stop_ids
from jllama.runner import Runner, block_width, cache_slots, power_of_two
from jllama.sampling import Sampling
from jllama.settings import Settings, to_sampling
from jllama.speculator import Speculator


class Pool:
    """Rows that run together.

    Attributes:
      most: how many there can be.
    """

    def __init__(self, runner: Runner, stop_ids: Sequence[int], most: int) -> None:
        """Make an empty pool; a token of `stop_ids` ends a row."""
        self.most = most
        self.runner = runner
        self._stop_ids = stop_ids
        self._reading: list[Row] = []
        self._places: list[Row | None] = []
        self._state: State | None = None
        self._arguments: tuple[Sampling, Stop] | None = None  # those of the rows that are here, on the devices

    @property
    def rows(self) -> list[Row]:
        """Those that run, or have ended and not left."""
        return [row for row in self._places if row is not None]

    @property
    def free(self) -> int:
        """How many rows can join."""
        return self.most - len(self.rows) - len(self._reading)

    def join(self, prompts: Sequence[tuple[list[int], Settings]], kept: Kept | None = None) -> Reading:
        """Begin to read prompts, together: ids and settings.

        Args:
          prompts: no more than are `free`.
          kept: what a row has left, for a single prompt; it is used up. Only what its ids lack is read.

        Raises:
          ValueError: a prompt that the model can't read, a format that can't be compiled, or token ids in the settings
            that the model hasn't.
        """
        return Reading(self, self.accept(prompts, None if kept is None else kept.shard), kept)

    def accept(self, prompts: Sequence[tuple[list[int], Settings]], shard: int | None = None) -> list[Row]:
        """Make rows of prompts, which are about to be read, on the least used shard or on `shard`. Raises as `join`."""
        assert 0 < len(prompts) <= self.free
        for ids, settings in prompts:
            self.runner.check(ids, settings)
        context = self.runner.params.config.max_seq_len
        followers = [self.runner.guide(ids, settings) for ids, settings in prompts]
        sampling = self.runner.agree(
            to_sampling([s for _, s in prompts], [len(ids) for ids, _ in prompts])
        )  # random seeds
        rows = []
        for i, (ids, settings) in enumerate(prompts):
            mine = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], sampling)
            on = self._least_used() if shard is None else shard
            limit, ends = min(len(ids) + settings.max_new_tokens, context), settings.ends(self._stop_ids)
            rows.append(Row(ids, mine, limit, on, len(ids), ends, guide=followers[i]))
            self._reading.append(rows[-1])
        return rows

    def advance(self, steps: int) -> None:
        """Take up to `steps` steps in each row that isn't done: each gives a token, or more where some are guessed."""
        steps = int(self.runner.agree(np.int32(steps)))
        live = [i for i, row in enumerate(self._places) if row is not None and not row.done]
        if not live:
            return
        before = self._pos[live].sum()
        with self.runner.timed("decode"):
            slots = self._tokens.shape[1]
            if self._pos[live].max() + 1 >= slots:
                self._regroup(self._local, self._slots_for(slots + 1))
            if self._arguments is None:
                self._arguments = self._put_arguments(self._places)
            sampling, stop = self._arguments
            if followed := guides(self._places):
                allowed = self.runner.put(self.runner.masks(followed, len(self._places)), ROWS)
                stop, steps = stop._replace(allowed=allowed), 1
            done = np.array([row is None or row.done or row.stuck or row.complete for row in self._places])
            # A place that is free costs least at its beginning.
            pos = np.where([row is None for row in self._places], 0, self._pos)
            guessing = None if followed else self.runner.speculator  # a grammar allows one token at a time
            self._fetch(self._decode(done, pos.astype(np.int32), sampling, stop, steps, guessing))
        self.runner.timings.decode_tokens += int(self._pos[live].sum() - before)

    def _decode(
        self,
        done: np.ndarray,
        pos: np.ndarray,
        sampling: Sampling,
        stop: Stop,
        steps: int,
        guessing: Speculator | None,
    ) -> State:
        assert self._state is not None
        on_devices = self.runner.put((done, pos), ROWS)
        state = self._state._replace(done=on_devices[0], pos=on_devices[1])
        if guessing is None:
            decoded: State = self.runner.call(DECODE, state, sampling, stop, np.int32(steps))
            return decoded
        live = [None if ended else row for row, ended in zip(self._places, done, strict=True)]
        return guessing.decode(self.runner, state, sampling, stop, steps, live, self._tokens, pos)

    def take(self, row: Row) -> Taken:
        """Return the ids generated in a row since the last call, and their log-probabilities.

        Raises:
          FloatingPointError: the model's logits were not finite.
          GrammarError: the row's grammar can't go on.
          ValueError: no token could follow.
        """
        assert row.place is not None
        if row.guide is not None and row.guide.fault:
            raise GrammarError(f"the grammar stops after {row.guide.count} tokens: {row.guide.fault}")
        new = slice(row.taken, int(self._pos[row.place]) + 1)
        logprobs = self._logprobs[row.place, new]
        if np.isneginf(logprobs).any():
            raise ValueError(f"no token can follow at position {new.stop - 1}: min_new_tokens or a grammar leaves none")
        if not np.isfinite(logprobs).all():
            row.is_finite = False
            raise FloatingPointError(f"non-finite logits at position {new.stop - 2}: the weights hold NaN or infinity")
        row.taken = new.stop
        return Taken(self._tokens[row.place, new].tolist(), logprobs.tolist(), self._take_likely(row, new))

    def _take_likely(self, row: Row, new: slice) -> list[list[tuple[int, float]]]:
        count = int(row.sampling.top_logprobs)
        if not count or self._likely is None:
            return []
        ids, logprobs = (leaf[row.place, new, :count].tolist() for leaf in self._likely)
        return [
            [(i, x) for i, x in zip(*place, strict=True) if x > -np.inf] for place in zip(ids, logprobs, strict=True)
        ]

    def end(self, row: Row) -> None:
        """Generate no more in a row, or stop reading its prompt; its place is free."""
        row.done = True
        if row in self._reading:
            self._reading.remove(row)
        if row.place is not None:
            self._places[row.place] = None
            if not row.is_finite:
                self._clear(row)
            row.place = None

    def _clear(self, row: Row) -> None:
        """Let nothing of a row's cache reach the next one in its place."""
        assert row.place is not None
        places = np.full(self.runner.shards, self._local, np.int32)
        places[row.shard] = row.place % self._local
        self._state = self.runner.call(CLEAR, self._state, self.runner.put(places, ROWS))

    def leave(self, row: Row) -> Kept | None:
        """End a row and return what can be used again; None if it hasn't joined, isn't finite, or broke off."""
        place, state = row.place, self._state
        broken = state is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        if place is None or state is None or broken or not row.is_finite:
            self.end(row)
            return None
        if len(self.rows) == 1 and self._local == 1:
            kept = Kept(state, self._tokens[place, : self._pos[place]].tolist(), row.shard)
            self._state = None  # handed over as it is
        else:
            kept = self.copy(row)
        self.end(row)
        return kept

    def copy(self, row: Row) -> Kept:
        """Return what can be used again of a row that goes on."""
        assert row.place is not None
        ids = self._tokens[row.place, : self._pos[row.place]].tolist()
        sources = np.zeros(self.runner.shards, np.int32)
        sources[row.shard] = row.place % self._local
        slots = self._slots_for(len(ids) + 1)
        state = self.runner.call(REGROUP, self._state, self.runner.put(sources, ROWS), slots=slots)
        return Kept(state, ids, row.shard)

    def shrink(self) -> None:
        """Give up places and slots that no row needs; a copy of what stays, worth it where many rows have gone."""
        if self.rows:
            counts = [sum(row.shard == shard for row in self.rows) for shard in range(self.runner.shards)]
            slots = self._slots_for(max(int(self._pos[row.place]) for row in self.rows) + 2)
            rows = self.local_rows(max(counts))
            if (rows, slots) != (self._local, self._tokens.shape[1]):
                self._regroup(rows, slots)

    def local_rows(self, count: int) -> int:
        """Return the rows of a state for `count` rows on a shard."""
        return power_of_two(count)

    def admit(self, rows: list[Row | None], state: State) -> None:
        """Take up rows whose prompts are read, in the order of their state's."""
        rows = [row if row in self._reading else None for row in rows]  # without those that were ended meanwhile
        self._reading = [row for row in self._reading if row not in rows]
        if not any(rows):
            return
        if self.rows:
            places = self._make_room(rows, state.tokens.shape[1])
            local = [self._local if place is None else place % self._local for place in places]
            targets = self.runner.put(np.array(local, np.int32), ROWS)
            state = self.runner.call(PLACE, self._state, state, targets)
            for place, row in zip(places, rows, strict=True):
                if place is not None:
                    self._places[place] = row
        else:
            self._places = rows
        self._arguments = None
        self._fetch(state)

    def _make_room(self, rows: list[Row | None], slots: int) -> list[int | None]:
        """Return free places for rows on their shards, and grow the state where it lacks some, or slots."""
        shards = range(self.runner.shards)
        coming = [row for row in rows if row is not None]
        needed = max(sum(row.shard == shard for row in (*self.rows, *coming)) for shard in shards)
        local, slots = max(self._local, self.local_rows(needed)), max(self._tokens.shape[1], slots)
        if (local, slots) != (self._local, self._tokens.shape[1]):
            self._regroup(local, slots)
        free = [[i for i in range(s * local, (s + 1) * local) if self._places[i] is None] for s in shards]
        return [None if row is None else free[row.shard].pop(0) for row in rows]

    def _regroup(self, local: int, slots: int) -> None:
        """Copy the rows that are here to a state of `local` rows a shard."""
        sources, places = list[int](), list[Row | None]()
        for first in range(0, len(self._places), self._local):
            here = self._places[first : first + self._local]
            used = [i for i, row in enumerate(here) if row is not None]
            sources += used + [0] * (local - len(used))
            places += [here[i] for i in used] + [None] * (local - len(used))
        rows = self.runner.put(np.array(sources, np.int32), ROWS)
        self._places, self._arguments = places, None
        self._fetch(self.runner.call(REGROUP, self._state, rows, slots=slots))

    def _fetch(self, state: State) -> None:
        self._state = state
        self._tokens, self._logprobs, self._pos, done = self.runner.get(
            (state.tokens, state.logprobs, state.pos, state.done)
        )
        is_wanted = any(row is not None and row.sampling.top_logprobs for row in self._places)
        self._likely = self.runner.get(state.likely) if is_wanted else None
        for place, row in enumerate(self._places):
            if row is not None:
                row.place, row.done = place, row.done or bool(done[place])
                row.follow(self._tokens[place, : self._pos[place] + 1])

    def _put_arguments(self, rows: Sequence[Row | None]) -> tuple[Sampling, Stop]:
        """Lay out what the programs want to know of rows; a place without one is full from the start."""
        anyone = next(row for row in rows if row is not None)
        settings = [(row or anyone).sampling for row in rows]
        sampling = jax.tree.map(lambda *leaves: np.stack(leaves), *settings)
        limits = np.array([1 if row is None else row.limit for row in rows], np.int32)
        allowed = self.runner.masks(guides(rows), len(rows))
        stop = Stop(stop_ids(rows), limits, self.runner.banned, allowed)  # type: ignore[arg-type]
        return self.runner.put(sampling, SAMPLING), self.runner.put(stop, STOP)

    def _least_used(self) -> int:
        used = [row.shard for row in (*self.rows, *self._reading)]
        return min(range(self.runner.shards), key=used.count)

    def _slots_for(self, tokens: int) -> int:
        return cache_slots(tokens, self.runner.params.config.max_seq_len)

    @property
    def _local(self) -> int:
        return len(self._places) // self.runner.shards


class Reading:
    """Prompts that are being read, a block at a time, so that the pool can go on between two blocks.

    Attributes:
      rows: in the order of the prompts.
    """

    def __init__(self, pool: Pool, rows: list[Row], kept: Kept | None) -> None:
        """Begin; `Pool.join` does."""
        self.rows = rows
        self._pool = pool
        runner, config = pool.runner, pool.runner.params.config
        shards = [[row for row in rows if row.shard == shard] for shard in range(runner.shards)]
        local = pool.local_rows(max(map(len, shards)))
        self._places: list[Row | None] = [x for here in shards for x in (*here, *[None] * (local - len(here)))]
        longest = max(len(row.ids) for row in rows)
        # The last token is read in any case: its logits are wanted.
        begin = 0 if kept is None else min(common_prefix(kept.ids, rows[0].ids), longest - 1)
        slots = cache_slots(longest + 1, config.max_seq_len)
        if kept is not None:
            slots = max(slots, kept.state.tokens.shape[1])
        self._width = min(slots, block_width(local, longest - begin, slots * config.n_heads // runner.parts))
        # The last block ends with the slots: it begins earlier then, and reads some tokens again.
        self._blocks = [min(first, slots - self._width) for first in range(begin, longest, self._width)]
        self._count = sum(len(row.ids) for row in rows) - begin
        with runner.timed("prompt"):
            self._state = self._start(slots, kept)

    def _start(self, slots: int, kept: Kept | None) -> State:
        runner, places = self._pool.runner, self._places
        self._sampling, self._stop = self._pool._put_arguments(places)
        tokens = np.zeros((len(places), slots), np.int32)
        for row, line in zip(places, tokens, strict=True):
            if row is not None:
                line[: len(row.ids)] = row.ids
        length = np.array([1 if row is None else len(row.ids) for row in places], np.int32)
        cache = None
        if kept is not None:
            state = kept.state
            if state.tokens.shape != (len(places), slots):
                first = runner.put(np.zeros(len(places), np.int32), ROWS)
                state = runner.call(REGROUP, state, first, slots=slots)
            cache = state.cache
        begun: State = runner.call(START, *runner.put((tokens, length), ROWS), self._stop, cache)
        return begun

    def advance(self) -> bool:
        """Read a block; returns whether it was the last, and the rows that were not ended meanwhile have joined."""
        runner, pool = self._pool.runner, self._pool
        if all(row.done for row in self.rows):
            return True
        with runner.timed("prompt"):
            first, *self._blocks = self._blocks
            self._state = runner.call(
                READ_PROMPT, self._state, self._sampling, self._stop, np.int32(first), width=self._width
            )
            if self._blocks:
                jax.block_until_ready(self._state.pos)  # type: ignore[no-untyped-call]
                return False
            pool.admit(self._places, self._state)
        runner.timings.prompt_tokens += self._count
        return True

    def finish(self) -> list[Row]:
        """Read all that is left."""
        while not self.advance():
            pass
        return self.rows


def common_prefix(old: list[int], new: list[int]) -> int:
    """Return how many ids two lists begin with in common."""
    low, high = 0, min(len(old), len(new))
    if old[:high] == new[:high]:
        return high
    while high - low > 1:  # the first that differ are among low .. high - 1
        middle = (low + high) // 2
        low, high = (middle, high) if old[low:middle] == new[low:middle] else (low, middle)
    return low
