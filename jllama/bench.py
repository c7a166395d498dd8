"""Measures a model on this machine: eager against compiled, prefill and decode, each beside what the machine could do.

Every figure is the median of some repeats after one warm-up. Bounds are measured in the same run: how fast this
machine reads memory, and how fast it multiplies matrices of each dtype.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllama import decode, programs
from jllama.decode import State, Stop
from jllama.machine import Machine, Spread, measure_machine, timed
from jllama.model import Params, init_cache, step
from jllama.plan import read_bytes
from jllama.runner import block_width, cache_slots
from jllama.sampling import argmax
from jllama.settings import Settings, to_sampling
from jllama.tensors import counts

TOKENS_PER_SECOND = "tokens/s: tokens of all rows together, read (prefill) or generated (decode), per second"
_EAGER_TOKENS = 16  # enough for a median; eager decoding is slow
_CACHE_LIMIT = 4 << 30  # bytes: deeper or wider rows than fit this are left out


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
      phase: "prefill", or "decode" (from `depth` on).
      dtype: of the weights.
      batch: rows.
      depth: position of the first token.
      tokens: per row.
      seconds: of the whole phase.
      tokens_per_second: of all rows together.
      bound: "memory" or "compute", whichever would take longer.
      fraction: how much of that bound is reached; 1 is the machine's own speed.
    """

    phase: str
    dtype: str
    batch: int
    depth: int
    tokens: int
    seconds: Spread
    tokens_per_second: float
    bound: str
    fraction: float


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of running the same greedy generation of a batch of one.

    Args:
      name: "eager" (operation by operation), "step" (jitted step, loop in Python) or "loop" (all of it compiled).
      first_call: seconds of the first call, tracing and compiling in it.
      tokens_per_second: of later calls.
      speedup: against eager.
    """

    name: str
    first_call: float
    tokens_per_second: float
    speedup: float


@dataclasses.dataclass(frozen=True)
class Model:
    """Costs of one dtype before the first token: seconds, bytes."""

    dtype: str
    weight_bytes: int
    load_seconds: float
    compile_seconds: float
    time_to_first_token: float
    peak_memory: int


@dataclasses.dataclass(frozen=True)
class Report:
    """All of a run; `dataclasses.asdict` of it is the JSON output.

    Args:
      machine: what it could do.
      kernels: "native" or "xla", what multiplied few rows.
      kv_dtype: of keys and values.
      definition: what tokens per second are.
      prompt: tokens of a prompt.
      new: tokens to generate.
      repeats: of each measurement.
      models: a dtype each.
      rows: prefill and decode of each dtype and batch.
      ways: eager against compiled.
    """

    machine: Machine
    kernels: str
    kv_dtype: str
    definition: str
    prompt: int
    new: int
    repeats: int
    models: list[Model]
    rows: list[Row]
    ways: list[Way]


def run(
    load: Callable[[str], Params],
    *,
    prompt: int,
    new: int,
    batches: Sequence[int],
    dtypes: Sequence[str],
    repeats: int,
    progress: Callable[[str], object] = lambda line: None,
) -> Report:
    """Measure a model in some dtypes.

    Args:
      load: gives the model in a dtype.
      prompt: tokens of a prompt.
      new: tokens to generate.
      batches: numbers of rows.
      dtypes: of the weights.
      repeats: of each measurement.
      progress: is told what is being measured.
    """
    progress("machine")
    machine = measure_machine(dtypes)
    models: list[Model] = []
    rows: list[Row] = []
    ways: list[Way] = []
    for dtype in dtypes:
        progress(f"{dtype}: load")
        began = time.perf_counter()
        params = load(dtype)
        jax.block_until_ready(params)  # type: ignore[no-untyped-call]
        bench = _Bench(params, machine, repeats)
        models.append(bench.start(prompt, time.perf_counter() - began))
        for batch in batches:
            progress(f"{dtype}: batch {batch}")
            rows += bench.rows(batch, prompt, new)
        if not ways:
            progress(f"{dtype}: eager against compiled")
            ways = compare_ways(params, min(new, _EAGER_TOKENS), repeats)
    kernels = "native" if params.run.kernels else "xla"
    return Report(machine, kernels, params.run.kv_dtype, TOKENS_PER_SECOND, prompt, new, repeats, models, rows, ways)


class _Bench:
    """The measurements of one model."""

    def __init__(self, params: Params, machine: Machine, repeats: int) -> None:
        self.params, self.machine, self.repeats = params, machine, repeats
        self.dtype = params.embedding.dtype
        self.layer_weights, self.head_weights = counts(params.config)
        self.weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def start(self, prompt: int, load_seconds: float) -> Model:
        """Measure what it takes to get to the first token, compiling included."""
        began = time.perf_counter()
        read, compiling = self._reader(1, prompt)
        read()
        first = time.perf_counter() - began
        return Model(self.dtype, self.weight_bytes, load_seconds, compiling, first, _peak_memory())

    def rows(self, batch: int, prompt: int, new: int) -> list[Row]:
        """Measure prefill, and decoding at the beginning and near the end of the context."""
        context = self.params.config.max_seq_len
        found = [self.prefill(batch, min(prompt, context - 1))]
        for depth in sorted({0, max(0, context - new - 1)}):
            tokens = min(new, context - depth - 1)
            if self._cache_bytes(batch, cache_slots(depth + tokens + 1)) <= _CACHE_LIMIT:
                found.append(self.decode(batch, depth, tokens))
        return found

    def prefill(self, batch: int, prompt: int) -> Row:
        """Time the reading of a prompt, in blocks as `runner.Batch` does it."""
        read, _ = self._reader(batch, prompt)
        config = self.params.config
        attention = 2 * config.n_layers * config.q_dim * prompt * prompt  # scores and values, half of the square each
        operations = 2 * (self.layer_weights * prompt + self.head_weights) + attention
        weights = read_bytes(self.params, batch * prompt)
        return self._row("prefill", batch, 0, prompt, timed(read, repeats=self.repeats), weights, batch * operations)

    def _reader(self, batch: int, prompt: int) -> tuple[Callable[[], State], float]:
        """Compile the reading of prompts of one length: the function, and the seconds it took to compile."""
        state, stop = self._state(batch, prompt - 1, cache_slots(prompt + 1))
        sampling = to_sampling([Settings(temperature=0.0)] * batch)
        width = block_width(batch, prompt, cache_slots(prompt + 1) * self.params.config.n_heads)
        began = time.perf_counter()
        program = programs.READ_PROMPT.jitted.lower(
            self.params, state, sampling, stop, np.int32(0), width=width
        ).compile()
        compiling = time.perf_counter() - began

        def read() -> State:
            nonlocal state
            state = state._replace(pos=jnp.full(batch, prompt - 1, jnp.int32))
            for first in range(0, prompt, width):
                state = program(self.params, state, sampling, stop, np.int32(first))
            return state

        return read, compiling

    def decode(self, batch: int, depth: int, new: int) -> Row:
        """Time the generation of `new` tokens from position `depth` on."""
        config = self.params.config
        state, stop = self._state(batch, depth, cache_slots(depth + new + 1))
        sampling = to_sampling([Settings(temperature=0.0)] * batch)
        steps = np.int32(new)
        program = programs.DECODE.jitted.lower(self.params, state, sampling, stop, steps).compile()

        def generate() -> State:
            nonlocal state
            at_depth = state._replace(pos=jnp.full(batch, depth, jnp.int32))
            result: State = program(self.params, at_depth, sampling, stop, steps)
            state = result
            return result

        seconds = timed(generate, repeats=self.repeats)
        middle = depth + new // 2
        read = read_bytes(self.params, batch) + self._cache_bytes(batch, middle)
        operations = 2 * batch * (self.layer_weights + self.head_weights + 2 * config.n_layers * config.q_dim * middle)
        return self._row("decode", batch, depth, new, seconds, read * new, operations * new)

    def _row(
        self, phase: str, batch: int, depth: int, tokens: int, seconds: Spread, read: float, operations: float
    ) -> Row:
        memory, compute = read / self.machine.bandwidth, operations / self.machine.peak[self.dtype]
        return Row(
            phase, self.dtype, batch, depth, tokens, seconds,
            tokens_per_second=batch * tokens / seconds.median,
            bound="memory" if memory > compute else "compute",
            fraction=max(memory, compute) / seconds.median,
        )  # fmt: skip

    def _cache_bytes(self, batch: int, slots: int) -> int:
        config = self.params.config
        return 2 * config.n_layers * batch * config.kv_dim * slots * jnp.dtype(self.params.run.kv_dtype).itemsize

    def _state(self, batch: int, depth: int, slots: int) -> tuple[State, Stop]:
        length = jnp.full(batch, depth + 1, jnp.int32)
        stop = Stop(jnp.array([-1], jnp.int32), jnp.full(batch, slots + 1, jnp.int32))  # nothing ends a row
        return programs.START.jitted(self.params, jnp.full((batch, slots), 5, jnp.int32), length, stop), stop


def compare_ways(params: Params, new: int, repeats: int) -> list[Way]:
    """Run the same greedy generation eagerly, with a jitted step, and compiled as a whole."""
    slots = cache_slots(new + 1)

    def in_python(advance: Callable[..., Any]) -> Callable[[], list[int]]:
        def generate() -> list[int]:
            cache, token, ids = init_cache(params, 1, slots), jnp.array([1], jnp.int32), []
            for pos in range(new):
                logits, cache = advance(params, cache, token, jnp.array([pos], jnp.int32))
                token = argmax(logits)
                ids.append(int(token[0]))
            return ids

        return generate

    stop = Stop(jnp.array([-1], jnp.int32), jnp.array([new + 1], jnp.int32))
    greedy = to_sampling([Settings(temperature=0.0)])
    loop = jax.jit(decode.decode)

    def compiled() -> list[int]:
        state = decode.start(params, jnp.ones((1, slots), jnp.int32), jnp.array([1], jnp.int32), stop)
        ids: list[int] = loop(params, state, greedy, stop, np.int32(new)).tokens[0, 1 : new + 1].tolist()
        return ids

    ways: list[Way] = []
    step_in_place = jax.jit(step, donate_argnums=1)
    for name, generate in (("eager", in_python(step)), ("step", in_python(step_in_place)), ("loop", compiled)):
        began = time.perf_counter()
        generate()
        first = time.perf_counter() - began
        rate = new / timed(generate, repeats=repeats).median
        ways.append(Way(name, first, rate, rate / ways[0].tokens_per_second if ways else 1.0))
    return ways


def _peak_memory() -> int:
    """Return the most memory this process held so far, in bytes; 0 where the system doesn't tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
