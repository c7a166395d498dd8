"""What a model would need of devices that need not be here: bytes of weights and cache, the longest context, the speed.

All of it follows from the shapes of the arrays that a run would make; nothing is allocated. The cache is what the
engine makes of it: as many slots as a power of two, and while it doubles the old one is still there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jllama.checkpoint import Contents, abstract_params
from jllama.mesh import Shape
from jllama.model import Params, init_cache
from jllama.run import KVDtype, Run
from jllama.runner import batch_rows, cache_slots


class Device(NamedTuple):
    """What a device has: memory in bytes, and how many of them it reads a second, by its maker's data."""

    name: str
    memory: float
    bandwidth: float


# https://docs.cloud.google.com/tpu/docs/v5e, .../v6e (some editions round to 800 and 1600 GB/s)
# https://www.nvidia.com/en-us/data-center/a100/ (80 GB, SXM), .../h100/ (SXM), .../h200/
DEVICES = (
    Device("TPU v5e", 16e9, 819e9),
    Device("TPU v6e", 32e9, 1640e9),
    Device("A100 80GB", 80e9, 2039e9),
    Device("H100 SXM", 80e9, 3350e9),
    Device("H200", 141e9, 4800e9),
)


class Fit(NamedTuple):
    """How a model does on a kind of device.

    Args:
      device: the kind.
      context: tokens of the longest context that fits, 0 where none does; at most the model's.
      first: the most tokens a second of all rows together, by the bytes to be read, with an empty cache.
      last: the same with the cache full.
    """

    device: Device
    context: int
    first: float
    last: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Needs of a model on a mesh, in bytes of one device.

    Args:
      parameters: numbers in the weights of the whole model.
      rows: of a batch, on one device.
      weights: what they take.
      read: how much of them a step reads, `read_bytes`.
      slot: what a token takes in the cache, with its rows and layers.
      fits: each kind of device.
    """

    parameters: int
    rows: int
    weights: int
    read: int
    slot: int
    fits: list[Fit]


def plan(
    contents: Contents,
    dtype: str,
    mesh: Shape,
    batch_size: int,
    devices: Sequence[Device] = DEVICES,
    *,
    kv_dtype: KVDtype = "float32",
) -> Plan:
    """Work out what a model needs.

    Args:
      contents: the model; only the shapes of its tensors count.
      dtype: of the weights.
      mesh: how many parts are made of the batch and of the model.
      batch_size: rows of all devices together.
      devices: kinds to look at.
      kv_dtype: of keys and values.

    Raises:
      ValueError: the mesh doesn't divide the model.
    """
    run = Run(kv_dtype=kv_dtype, stacked=True)
    part = abstract_params(contents.config, contents.sources, dtype=dtype, parts=mesh.model, run=run)
    rows = batch_rows(batch_size, mesh.data, dtype)
    weights = size(part)
    read = read_bytes(part, rows)

    slot = size(jax.eval_shape(functools.partial(init_cache, batch=rows, length=1), part))

    def cache(slots: int) -> int:
        return slot * slots

    def fit(device: Device) -> Fit:
        context = longest_context(part, cache, device.memory)
        full = cache(cache_slots(context, part.config.max_seq_len)) if context else math.inf
        rate = rows * mesh.data * device.bandwidth
        return Fit(device, context, rate / read if context else 0.0, rate / (read + full))

    parameters = sum(math.prod(source.shape) for source in contents.sources.values())
    return Plan(parameters, rows, weights, read, slot, [fit(device) for device in devices])


def longest_context(part: Params, cache: Any, memory: float) -> int:
    """Return the tokens of the longest context that fits, or 0; `cache` gives the bytes of so many slots."""
    limit, found = part.config.max_seq_len, 0
    free = memory - size(part)
    slots = cache_slots(1, limit)
    needed = cache(slots)
    while found < limit and needed <= free:
        found = min(slots, limit)
        before, slots = slots, cache_slots(2 * slots, limit)
        needed = cache(before) + cache(slots)
    return found


def read_bytes(params: Params, rows: int) -> int:
    """Return the bytes of weights that a pass over so many tokens reads at most, arrays real or abstract.

    Of experts those that the tokens can take; of an embedding that isn't the head too next to nothing.
    """
    config = params.config
    spare = 0 if params.output is None else size(params.embedding)
    experts = sum(size(layer.experts) for layer in params.layers)
    left = max(config.n_experts - rows * config.n_active_experts, 0)
    return size(params) - spare - (experts * left // config.n_experts if experts else 0)


def size(tree: Any) -> int:
    """Return the bytes of all arrays of a tree, real or abstract."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def table(plan: Plan, title: str) -> str:
    """Write a plan as text."""
    lines = [
        f"{title}: {plan.parameters:,} parameters",
        f"one device: {gigabytes(plan.weights)} of weights, {gigabytes(plan.slot * 1024)} of cache for 1,024 tokens "
        f"of {plan.rows} rows",
        "",
        f"{'device':<12}{'memory':>9}{'reads':>12}{'longest context':>18}"
        f"{'tokens/s at most, empty cache':>32}{'full':>9}",
    ]
    for device, context, first, last in plan.fits:
        fits = f"{context:>18,}{first:>32,.0f}{last:>9,.0f}" if context else f"{'does not fit':>18}"
        lines.append(f"{device.name:<12}{device.memory / 1e9:>6.0f} GB{device.bandwidth / 1e9:>7,.0f} GB/s{fits}")
    lines += [
        "",
        "Weights and cache alone count: leave some memory for what a step computes, and time for what is sent.",
    ]
    return "\n".join(lines)


def gigabytes(count: float) -> str:
    """Write a number of bytes in GB, of 10^9."""
    return f"{count / 1e9:,.2f} GB"
