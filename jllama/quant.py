"""Weights and the products with them: plain arrays and int8 leaves behind one `linear` and one `take`.

A weight is `[out, in]`, as checkpoints store it. The forms below are those that XLA's CPU back end turns into
its fast kernels, and cost nothing elsewhere; docs/performance.md has the measurements.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllama import kernels


class QuantizedWeight(NamedTuple):
    """An int8 matrix with one scale a row: `weight[o, i] = values[o, i] * scale[o]`."""

    values: jax.Array  # int8 [out, in], within -127..127
    scale: jax.Array  # float32 [out]


Weight = jax.Array | QuantizedWeight


def dtype_name(w: Weight) -> str:
    """Name what a weight is stored in: "float32", "bfloat16" or "int8"."""
    return str(w.values.dtype if isinstance(w, QuantizedWeight) else w.dtype)


def quantize(x: jax.Array, axis: str | None = None) -> QuantizedWeight:
    """Round `x` (float `[..., in]`) to int8 with one scale for each row of the last axis.

    The largest magnitude of a row becomes 127, so no element is off by more than scale / 2; a row of zeros stays
    zero. `axis` is the mesh axis over which each row is divided, if it is.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    if axis is not None:
        largest = lax.pmax(largest, axis)  # type: ignore[no-untyped-call]
    scale = largest / 127.0
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return QuantizedWeight(jnp.round(x * inverse[..., None]).astype(jnp.int8), scale)


def dequantize(w: Weight) -> jax.Array:
    """Return the weight as float32 `[out, in]`."""
    if isinstance(w, QuantizedWeight):
        return w.values.astype(jnp.float32) * w.scale[:, None]
    return w.astype(jnp.float32)


def take(w: Weight, ids: jax.Array, axis: str | None = None) -> jax.Array:
    """Look up rows: `ids` int `[...]` within the matrix -> float32 `[..., in]`.

    `axis` is the mesh axis over which the rows of the matrix are divided, if they are.
    """
    if axis is not None:
        rows = jax.tree.leaves(w)[0].shape[0]
        ids = ids - lax.axis_index(axis) * rows
        here = (ids >= 0) & (ids < rows)
        return _sum(jnp.where(here[..., None], take(w, jnp.where(here, ids, 0)), 0.0), axis)
    if isinstance(w, QuantizedWeight):
        return w.values[ids].astype(jnp.float32) * w.scale[ids][..., None]
    return w[ids].astype(jnp.float32)


class Linear(NamedTuple):
    """A weight `[out, in]` and, in some models, a bias float32 `[out]`."""

    weight: Weight
    bias: jax.Array | None = None


def linear(
    layer: Linear, x: jax.Array, *, fine: bool = False, axis: str | None = None, use_native: bool = False
) -> jax.Array:
    """Multiply float32 `x [..., in]` by a weight `[out, in]` and add the bias -> float32 `[..., out]`.

    float32 weights are exact (no TF32 on GPUs). bfloat16 weights round `x` to bfloat16. int8 weights round `x` to
    int8 with one scale a row, sum in int32 and scale back; with `fine`, what the rounding left is rounded to int8 in
    its turn and multiplied too, at twice the cost. A single row is always fine: its product is as slow as that of two.

    `axis` is the mesh axis over which the inputs are divided, if they are: products are summed over it. int8's are
    summed as integers, and its scales are of whole rows, so that the result doesn't depend on the mesh.
    `use_native` lets the kernels of `kernels` multiply what they can.
    """
    w, bias = layer
    rows = x.reshape(-1, x.shape[-1])
    n = rows.shape[0]
    fine = fine or n == 1
    use_native = use_native and kernels.has(dtype_name(w))
    if isinstance(w, QuantizedWeight) and use_native and axis is None:
        y = kernels.dot_int8(w.values, w.scale, rows, fine=fine)
    elif isinstance(w, QuantizedWeight):
        q = quantize(rows, axis)
        if fine:
            rest = quantize(rows - q.values.astype(jnp.float32) * q.scale[:, None], axis)
            q = jax.tree.map(lambda *parts: jnp.concatenate(parts), q, rest)
        y = _sum(_dot(w.values, q.values, jnp.int32), axis).astype(jnp.float32) * (q.scale[:, None] * w.scale[None])
        y = y[:n] + y[n:] if fine else y
    elif use_native:
        y = _sum(kernels.dot(w, rows), axis)
    elif n == 1 and w.dtype != jnp.float32:
        # One row alone falls into a scalar loop on CPU, 10 to 20 times slower than two.
        y = _sum(_dot(w, jnp.pad(rows.astype(w.dtype), ((0, 1), (0, 0))), jnp.float32)[:1], axis)
    else:
        y = _sum(_dot(w, rows.astype(w.dtype), jnp.float32), axis)
    if bias is not None:
        y = y + bias[None]
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _sum(y: jax.Array, axis: str | None) -> jax.Array:
    total: jax.Array = y if axis is None else lax.psum(y, axis)  # type: ignore[no-untyped-call]
    return total


def _dot(w: jax.Array, rows: jax.Array, accumulate: type) -> jax.Array:
    """`rows [R, in]` times `w [out, in]` transposed, `[R, out]`, summed in `accumulate`."""
    # With the weights as the left operand the CPU's kernels for few rows run at the speed of memory.
    return lax.dot_general(
        w,
        rows,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if w.dtype == jnp.float32 else None,
        preferred_element_type=accumulate,
    ).T
