"""What this machine can do: how fast it reads memory, and how fast it multiplies matrices of each dtype."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllama.run import Run
from jllama.weights import Linear, Plain, linear
from jllama.weights.base import dot


@dataclasses.dataclass(frozen=True)
class Spread:
    """Seconds of some repeats: their median, and the fastest and slowest."""

    median: float
    fastest: float
    slowest: float


@dataclasses.dataclass(frozen=True)
class Machine:
    """What this machine can do, measured: bytes read a second, and multiplications and additions a second by dtype."""

    cpu: str
    cores: int
    devices: str
    jax: str
    jaxlib: str
    bandwidth: float
    peak: dict[str, float]


def measure_machine(dtypes: Sequence[str], megabytes: int = 256) -> Machine:
    """Measure how fast this machine reads memory and multiplies matrices."""
    w = jnp.ones((megabytes * 128, 2048), jnp.float32)
    run = Run()
    reads = [timed(jax.jit(lambda w, x: linear(Linear(Plain(w)), x, run)), w, jnp.ones((1, 2048)), repeats=10)]
    reads.append(timed(jax.jit(jnp.sum), w, repeats=10))
    bandwidth = w.nbytes / min(r.fastest for r in reads)
    peak = {}
    for dtype in dtypes:
        out, width, rows = 4096, 2048, 512
        of = "int8" if dtype == "int4" else dtype  # inputs are rounded to int8 for both
        accumulate = np.int32 if of == "int8" else np.float32
        x = jnp.ones((rows, width), of)
        spread = timed(jax.jit(dot, static_argnums=2), jnp.ones((out, width), of), x, accumulate, repeats=5)
        peak[dtype] = 2 * out * width * rows / spread.fastest
    devices = ", ".join(sorted({d.device_kind for d in jax.devices()}))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(_cpu_name(), cores, devices, jax.__version__, version("jaxlib"), bandwidth, peak)


def timed(function: Callable[..., Any], *args: Any, repeats: int) -> Spread:
    """Time a function whose results are JAX arrays, after one warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(function(*args))  # type: ignore[no-untyped-call]
        seconds.append(time.perf_counter() - began)
    del seconds[0]
    return Spread(statistics.median(seconds), min(seconds), max(seconds))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
