"""Weights in int8 with one scale for each output."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllama import kernels
from jllama.weights.base import Array, Weight, dot, layer_of, stacked, summed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8(Weight):
    """A matrix `weight[o, i] = values[o, i] * scale[o]`.

    Its products round their inputs to int8 with one scale a row, sum in int32 and scale back; `fine` ones round what
    that left in its turn and multiply it too, at twice the cost. A single row is always fine: its product is as slow
    as that of two. Over a mesh the sums are integers and the scales are of whole rows, so that the result doesn't
    depend on it.
    """

    values: jax.Array  # int8 [out, in], within -127..127; of a stack [n, out, in]
    scale: jax.Array  # float32 [out]; of a stack [n, out]
    layer: jax.Array | None = None  # which of the stack is meant

    @property
    def dtype(self) -> str:
        return "int8"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def at(self, layer: jax.Array) -> Int8:
        return Int8(self.values, self.scale, layer)

    def dot(self, x: jax.Array, *, native: bool, fine: bool, axis: str | None) -> jax.Array:
        n = len(x)
        fine = fine or n == 1
        if native and axis is None and kernels.has("int8"):
            return kernels.dot_int8(self.values, self.scale, x, self.layer, fine=fine)
        values, scale = layer_of(self.values, self.layer), layer_of(self.scale, self.layer)
        rounded = quantize(x, axis)
        if fine:
            rest = quantize(x - rounded.values.astype(jnp.float32) * rounded.scale[:, None], axis)
            rounded = jax.tree.map(lambda *parts: jnp.concatenate(parts), rounded, rest)
        y = summed(dot(values, rounded.values, jnp.int32), axis).astype(jnp.float32)
        y = y * (rounded.scale[:, None] * scale[None])
        return y[:n] + y[n:] if fine else y

    def take(self, ids: jax.Array) -> jax.Array:
        values, scale = layer_of(self.values, self.layer), layer_of(self.scale, self.layer)
        return values[ids].astype(jnp.float32) * scale[ids][..., None]

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: str, array: Any) -> Int8:
        return cls(array(shape, "int8"), array(shape[:-1], "float32"))

    @classmethod
    def encode(cls, block: Array, dtype: str) -> Int8:
        """Do what `quantize` does, in NumPy: twice as fast as XLA on a CPU, nothing to compile."""
        x = block.astype(np.float32, copy=False)
        # NaN and infinity are let through: they stay in the scale, and so in the logits.
        with np.errstate(invalid="ignore"):
            scale = np.maximum(x.max(axis=-1), -x.min(axis=-1)) / np.float32(127)
            inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale >= np.finfo(np.float32).tiny)
            return cls(np.rint(x * inverse[:, None]).astype(np.int8), scale)

    def columns(self, wanted: slice) -> Int8:
        return Int8(self.values[..., wanted], self.scale)

    def decode(self) -> Array:
        rows: Array = np.asarray(self.values).astype(np.float32)
        rows *= np.asarray(self.scale)[:, None]
        return rows

    def specs(self, rows: Any, columns: Any) -> Int8:
        return Int8(stacked(self, rows, columns), stacked(self, rows))


def quantize(x: jax.Array, axis: str | None = None) -> Int8:
    """Round `x` (float `[R, in]`) to int8 with one scale for each row.

    The largest magnitude of a row becomes 127, so no element is off by more than scale / 2; a row of zeros stays
    zero. `axis` is the mesh axis over which each row is divided, if it is.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    if axis is not None:
        largest = lax.pmax(largest, axis)  # type: ignore[no-untyped-call]
    scale = largest / 127.0
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return Int8(jnp.round(x * inverse[..., None]).astype(jnp.int8), scale)
