"""Weights in float32 or bfloat16."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllama import kernels
from jllama.weights.base import Array, Weight, dot, layer_of, stacked, summed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plain(Weight):
    """A matrix in float32, whose products are exact (no TF32 on GPUs), or in bfloat16, whose inputs are rounded too."""

    values: jax.Array  # [out, in]; of a stack [n, out, in]
    layer: jax.Array | None = None  # which of the stack is meant

    @property
    def dtype(self) -> str:
        return str(self.values.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def at(self, layer: jax.Array) -> Plain:
        return Plain(self.values, layer)

    def dot(self, x: jax.Array, *, native: bool, fine: bool, axis: str | None) -> jax.Array:
        if native and kernels.has(self.dtype):
            return summed(kernels.dot(self.values, x, self.layer), axis)
        w, x = layer_of(self.values, self.layer), x.astype(self.values.dtype)
        if len(x) == 1 and w.dtype != jnp.float32:
            # One row alone falls into a scalar loop on CPU, 10 to 20 times slower than two.
            return summed(dot(w, jnp.pad(x, ((0, 1), (0, 0))), jnp.float32)[:1], axis)
        return summed(dot(w, x, jnp.float32), axis)

    def take(self, ids: jax.Array) -> jax.Array:
        return layer_of(self.values, self.layer)[ids].astype(jnp.float32)

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: str, array: Any) -> Plain:
        return cls(array(shape, dtype))

    @classmethod
    def encode(cls, block: Array, dtype: str) -> Plain:
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity stay, and show in the logits
            return cls(block.astype(jnp.dtype(dtype), copy=False))  # type: ignore[arg-type]

    def columns(self, wanted: slice) -> Plain:
        return Plain(self.values[..., wanted])

    def decode(self) -> Array:
        return np.asarray(self.values).astype(np.float32)

    def specs(self, rows: Any, columns: Any) -> Plain:
        return Plain(stacked(self, rows, columns))
