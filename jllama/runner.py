"""Drives the compiled functions of `decode` over a batch of rows: ids in, ids out, and the time it took."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jllama import decode, native, sharding
from jllama.config import KVDtype
from jllama.decode import Stop
from jllama.model import Params
from jllama.programs import DECODE, READ_PROMPT, REGROUP, START, Program, Programs
from jllama.quant import dtype_name
from jllama.settings import Settings, to_sampling

_MIN_SLOTS = 256  # of a cache; it doubles when it is full
_MIN_WIDTH = 16  # of a block of prompt tokens; sizes are powers of two, so that few programs serve all lengths
_MAX_WIDTH = 512
_BLOCK_TOKENS = 4096  # the most tokens in a block, all rows together: bounds the memory of long prompts


def prepare(params: Params, *, kernels: str = "auto", kv_dtype: KVDtype = "float32") -> Params:
    """Say how a model is run.

    Args:
      params: the model.
      kernels: "xla"; "native", the package's own for CPUs; or "auto", the latter where they can be used.
      kv_dtype: "float32" or "bfloat16", what keys and values are kept in.

    Raises:
      ValueError: another word, or kernels that can't be used here.
    """
    on_mesh = sharding.mesh_of(params) is not None
    if on_mesh and kernels == "native":
        raise ValueError("kernels = native: they run on a single device: expected no mesh, or kernels = auto")
    use_native = native.choose(kernels) and not on_mesh
    return dataclasses.replace(params, config=dataclasses.replace(params.config, kv_dtype=kv_dtype, native=use_native))


@dataclasses.dataclass
class Timings:
    """Where the time went, in seconds, and the tokens that came of it."""

    compile_seconds: float = 0.0
    prompt_seconds: float = 0.0
    prompt_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0


class Runner:
    """A model with its programs, and the time that they took."""

    def __init__(self, params: Params, compile_cache: str | Path | None = None) -> None:
        """Take a model; programs are kept in the folder `compile_cache`, or in memory alone."""
        self.params = params
        self.mesh = sharding.mesh_of(params)
        self.shards = sharding.shape_of(self.mesh).data  # that the rows of a batch are divided into
        self.timings = Timings()
        self._programs = Programs(params, compile_cache)

    def check(self, ids: Sequence[int]) -> None:
        """Raise ValueError for a prompt that the model can't read: no tokens, too many, or not of its vocabulary."""
        config = self.params.config
        if not 1 <= len(ids) <= config.max_seq_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens: expected 1 to {config.max_seq_len}, the model's context"
            )
        if wrong := [i for i in ids if not 0 <= i < config.vocab_size]:
            raise ValueError(f"token id {wrong[0]}: expected 0 to {config.vocab_size - 1}, the model's vocabulary")

    def call(self, program: Program, *args: Any, **static: Any) -> Any:
        """Run a program of `programs` on arrays; it adds the model."""
        result = self._programs.call(program, *args, **static)
        self.timings.compile_seconds = self._programs.seconds
        return result

    def put(self, tree: Any, where: Any) -> Any:
        """Lay host arrays out as `where` says: a tree of specs of `sharding`, or one for all."""
        return sharding.put(self.mesh, tree, where)

    def agree(self, tree: Any) -> Any:
        """Return what the first of several processes has: all of them must do the same."""
        return sharding.agree(self.mesh, tree)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of the block, compiling apart, to `timings.{phase}_seconds`."""
        began, compiling = time.perf_counter(), self.timings.compile_seconds
        yield
        spent = time.perf_counter() - began - (self.timings.compile_seconds - compiling)
        setattr(self.timings, f"{phase}_seconds", getattr(self.timings, f"{phase}_seconds") + spent)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A cache of one row, left by an earlier batch, and the ids whose keys and values are in it."""

    state: decode.State
    ids: list[int]


class Batch:
    """Rows that are generated together: their `State`, and how much of it was handed out."""

    def __init__(
        self,
        runner: Runner,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[Settings],
        stop_ids: Sequence[int],
        kept: Kept | None = None,
    ) -> None:
        """Read the prompts and draw the first token of each.

        Args:
          runner: the model.
          prompts: ids of each row.
          settings: of each row.
          stop_ids: the tokens that end a row.
          kept: what an earlier batch of one row left; it is used up. Only what its ids lack of the prompt is read.

        Raises:
          ValueError: a prompt that the model can't read.
        """
        for ids in prompts:
            runner.check(ids)
        context = runner.params.config.max_seq_len
        rows = runner.shards * batch_rows(len(prompts), runner.shards, dtype_name(runner.params.embedding))
        spare = rows - len(prompts)  # rows of one token, full from the start
        self._runner = runner
        self._taken = np.array([len(ids) for ids in prompts] + [1] * spare, np.int32)
        ends = [min(n + s.max_new_tokens, context) for n, s in zip(self._taken.tolist(), settings, strict=False)]
        stop = Stop(np.array(stop_ids, np.int32), np.array(ends + [1] * spare, np.int32))  # type: ignore[arg-type]
        self._stop = runner.put(stop, sharding.STOP)
        sampling = runner.agree(to_sampling([*settings, *[Settings()] * spare]))  # random seeds, and so the text
        self._sampling = runner.put(sampling, sharding.SAMPLING)
        self._read(prompts, kept)

    def _read(self, prompts: Sequence[Sequence[int]], kept: Kept | None) -> None:
        rows, longest = len(self._taken), int(self._taken.max())
        # The last token is read in any case: its logits are wanted.
        begin = 0 if kept is None else min(common_prefix(kept.ids, prompts[0]), longest - 1)
        width = block_width(rows // self._runner.shards, longest - begin)
        blocks = range(begin, longest, width)
        slots = cache_slots(max(longest + 1, blocks[-1] + width))
        call, put = self._runner.call, self._runner.put
        with self._runner.timed("prompt"):
            cache = None
            if kept is not None:
                slots = max(slots, kept.state.tokens.shape[1])
                cache = self._grown(kept.state, slots).cache
            tokens = np.zeros((rows, slots), np.int32)
            for row, ids in zip(tokens, prompts, strict=False):
                row[: len(ids)] = ids
            tokens, length = put((tokens, self._taken), sharding.ROWS)
            state = call(START, tokens, length, self._stop, cache)
            for first in blocks:
                state = call(READ_PROMPT, state, self._sampling, self._stop, np.int32(first), width=width)
            self._fetch(state)
        self._runner.timings.prompt_tokens += sum(map(len, prompts)) - begin

    def keep(self) -> Kept | None:
        """Return what a following batch can use; None where a step was broken off. This batch is over then."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            return None
        return Kept(self._state, self._tokens[0, : self._pos[0]].tolist())

    def _grown(self, state: decode.State, slots: int) -> decode.State:
        if state.tokens.shape[1] == slots:
            return state
        rows = np.arange(len(self._taken) // self._runner.shards, dtype=np.int32)
        everywhere = self._runner.put(np.tile(rows, self._runner.shards), sharding.ROWS)
        grown: decode.State = self._runner.call(REGROUP, state, everywhere, slots=slots)
        return grown

    def _fetch(self, state: decode.State) -> None:
        self._state = state
        self._tokens, self._logprobs, self._pos, done = sharding.get(state[1:])
        self.done = np.array(done)

    def advance(self, steps: int) -> None:
        """Generate up to `steps` tokens in each row that isn't done."""
        slots, before = self._tokens.shape[1], self._pos.sum()
        steps = int(self._runner.agree(np.int32(steps)))
        with self._runner.timed("decode"):
            is_full = self._pos[~self.done].max(initial=0) + 1 >= slots
            state = self._grown(self._state, 2 * slots if is_full else slots)
            state = state._replace(done=self._runner.put(self.done, sharding.ROWS))
            self._fetch(self._runner.call(DECODE, state, self._sampling, self._stop, np.int32(steps)))
        self._runner.timings.decode_tokens += int(self._pos.sum() - before)

    def take(self, row: int) -> tuple[list[int], list[float]]:
        """Return the ids generated in a row since the last call, and their log-probabilities.

        Raises:
          FloatingPointError: the model's logits were not finite.
        """
        new = slice(int(self._taken[row]), int(self._pos[row]) + 1)
        if not np.isfinite(self._logprobs[row, new]).all():
            raise FloatingPointError(f"non-finite logits at position {new.stop - 2}: the weights hold NaN or infinity")
        self._taken[row] = new.stop
        return self._tokens[row, new].tolist(), self._logprobs[row, new].tolist()

    def end(self, row: int) -> None:
        """Generate no more in this row."""
        self.done[row] = True


def common_prefix(old: Sequence[int], new: Sequence[int]) -> int:
    """Return how many ids two sequences begin with in common."""
    return next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def batch_rows(prompts: int, shards: int, dtype: str) -> int:
    """Return how many rows of a batch each of `shards` gets, with weights of a dtype."""
    rows = power_of_two(-(-prompts // shards))
    # int8 rounds a row alone in another way: its text would depend on the mesh.
    return max(rows, 2) if dtype == "int8" and prompts > 1 else rows


def block_width(rows: int, longest: int) -> int:
    """Return how many tokens of each of `rows` prompts, the longest of `longest`, are read at a time."""
    most = _BLOCK_TOKENS // power_of_two(rows)
    return min(power_of_two(longest, _MIN_WIDTH), max(_MIN_WIDTH, min(_MAX_WIDTH, most)))


def cache_slots(tokens: int) -> int:
    """Return the slots of a cache for rows of up to `tokens` tokens."""
    return power_of_two(tokens, _MIN_SLOTS)


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())
