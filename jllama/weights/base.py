"""What every storage form of a weight has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

Array = np.ndarray[Any, np.dtype[Any]]


class Weight(ABC):
    """A matrix `[out, in]` in some storage form; or a stack of such matrices, one for each of n layers.

    A form is a frozen dataclass and a pytree. All its leaves begin with the axis `out`, in a stack with n before it, so
    that rows of a form are rows of its leaves. It stands in for arrays on a device, on the host (NumPy), for their
    shapes (`jax.ShapeDtypeStruct`) and for where they lie (`PartitionSpec`).
    """

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The name of the form: a key of `weights.FORMS`."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`[out, in]`, of a stack `[n, out, in]`."""

    @abstractmethod
    def at(self, layer: jax.Array) -> Self:
        """Give the matrix of one layer (int32 scalar) of a stack, without a copy where a kernel will take it."""

    @abstractmethod
    def dot(self, x: jax.Array, *, native: bool, fine: bool, axis: str | None) -> jax.Array:
        """Multiply float32 rows `x [R, in]`: float32 `[R, out]`.

        Args:
          x: the rows.
          native: whether to use those of `jllama.kernels` where they serve.
          fine: whether a form that rounds `x` should do so with care, at some cost.
          axis: the mesh axis over which the inputs are divided, and over which to sum, if they are.
        """

    @abstractmethod
    def take(self, ids: jax.Array) -> jax.Array:
        """Look up rows: `ids` int `[...]` within the matrix -> float32 `[..., in]`."""

    @classmethod
    @abstractmethod
    def make(cls, shape: tuple[int, ...], dtype: str, array: Any) -> Self:
        """Make the leaves of a matrix or a stack by `array(shape, dtype)`."""

    @classmethod
    @abstractmethod
    def encode(cls, block: Array, dtype: str) -> Self:
        """Bring a block of rows (NumPy, floats) into the form, on the host."""

    @abstractmethod
    def columns(self, wanted: slice) -> Self:
        """Give some columns of what `encode` made of whole rows."""

    @abstractmethod
    def decode(self) -> Array:
        """Give rows on the host as float32 `[rows, in]`; the opposite of `encode`."""

    @abstractmethod
    def specs(self, rows: Any, columns: Any) -> Self:
        """Tell where the leaves lie if the axis `out` is divided over the mesh axis `rows`, and `in` over `columns`."""


def stacked(weight: Weight, *axes: Any) -> Any:
    """Tell where a leaf of a weight lies whose last axes are divided over the mesh axes `axes`."""
    spec: Any = PartitionSpec
    return spec(*[None] * (len(weight.shape) - 2), *axes)


def layer_of(leaf: jax.Array, layer: jax.Array | None) -> jax.Array:
    """Give one layer of a leaf of a stack; the leaf itself where `layer` is None."""
    return leaf if layer is None else lax.dynamic_index_in_dim(leaf, layer, keepdims=False)


def summed(y: jax.Array, axis: str | None) -> jax.Array:
    """Sum over a mesh axis, if there is one."""
    total: jax.Array = y if axis is None else lax.psum(y, axis)  # type: ignore[no-untyped-call]
    return total


def dot(w: jax.Array, rows: jax.Array, accumulate: type) -> jax.Array:
    """`rows [R, in]` times `w [out, in]` transposed, `[R, out]`, summed in `accumulate`, by XLA."""
    # With the weights as the left operand the CPU's kernels for few rows run at the speed of memory.
    return lax.dot_general(
        w,
        rows,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if w.dtype == np.float32 else None,
        preferred_element_type=accumulate,
    ).T
