"""Weights in groups of 32 small integers: exactly what quantised files store; and floats in int8 and int4.

Source of GGUF's types: ggml's block_q8_0, block_q4_0 and so on, in ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllama import kernels
from jllama.weights.base import Array, Weight, layer_of, stacked, summed


class Kind(NamedTuple):
    """What a type of groups is made of."""

    bits: int  # of an element in `values`
    high: int  # of an element in `high`
    group: int = 32  # elements that share a scale
    own_scales: bool = False  # groups have scales (and mins), and 256 elements share d (and m)
    has_m: bool = False
    zero: int = 0  # the number that stands for 0, where there is no m
    dtype: str = "float16"  # of d and m

    @property
    def share(self) -> int:
        """How many elements share a d."""
        return 256 if self.own_scales else 32

    def columns(self, n: int) -> tuple[int, ...]:
        """How many columns each part of n elements has; 0 for a part that there isn't."""
        own, m = self.own_scales, self.has_m
        shared = n // self.share
        return (
            n * self.bits // 8, n * self.high // 8, own * (n // self.group), own * m * (n // self.group), shared,
            m * shared,
        )  # fmt: skip


KINDS = {
    "q8_0": Kind(8, 0),
    "q4_0": Kind(4, 0, zero=8),
    "q4_1": Kind(4, 0, has_m=True),
    "q5_0": Kind(4, 1, zero=16),
    "q5_1": Kind(4, 1, has_m=True),
    "q4_k": Kind(4, 0, own_scales=True, has_m=True),
    "q5_k": Kind(4, 1, own_scales=True, has_m=True),
    "q6_k": Kind(4, 2, group=16, own_scales=True, zero=32),
    "q80": Kind(8, 0, dtype="float32"),  # llama2.c's
    "int8": Kind(8, 0, has_m=True),
    "int4": Kind(4, 0, zero=8),  # q4_0 by the layout
}
_AT_ONCE = 1 << 15  # elements that are rounded at a time: temporaries stay small
_STEPS = (-8.5, -8.25, -8.0, -7.75, -7.5)  # what the largest element of a group may become in int4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups(Weight):
    """A matrix `weight[o, i] = a * u[o, i] + b`, with u of a few bits and an a and a b for each group.

    a is d, times the group's scale if it has one; b is m, or minus m times the group's min, or minus a times `zero`.
    Products round their inputs to int8 with a scale for each 32 elements; `fine` ones round what that left in its turn
    and multiply it too. A part that a kind lacks is None.
    """

    values: jax.Array  # int8 [out, in]; or uint8 [out, in/2]: byte j of 16 has elements j and j + 16 of 32
    high: jax.Array | None  # uint8 [out, in/8]: element j's 5th bit is bit j of 32; or [out, in/4], see `numbers`
    scales: jax.Array | None  # uint8 [out, in/32], or int8 [out, in/16]
    mins: jax.Array | None  # uint8 [out, in/32]
    d: jax.Array  # float16 [out, in/32] or [out, in/256]; of q80 float32
    m: jax.Array | None  # the same
    kind: str = dataclasses.field(metadata={"static": True})
    layer: jax.Array | None = None  # which of a stack is meant; the parts have an axis of layers before the others then

    @classmethod
    def of(cls, kind: str, parts: Iterable[Any]) -> Groups:
        """Put parts together."""
        values, high, scales, mins, d, m = parts
        return cls(values, high, scales, mins, d, m, kind)

    @property
    def dtype(self) -> str:
        return self.kind

    @property
    def parts(self) -> tuple[Any, ...]:
        """The leaves but for `layer`."""
        return self.values, self.high, self.scales, self.mins, self.d, self.m

    @property
    def shape(self) -> tuple[int, ...]:
        *axes, columns = self.values.shape
        return *axes, columns * 8 // KINDS[self.kind].bits

    def at(self, layer: jax.Array) -> Groups:
        return dataclasses.replace(self, layer=layer)

    def dot(self, x: jax.Array, *, native: bool, fine: bool, axis: str | None) -> jax.Array:
        if native and kernels.has("groups"):
            kind = "q4_0" if self.kind == "int4" else self.kind
            return summed(kernels.dot_groups(kind, self.parts, x, self.layer, fine=fine), axis)
        rounded = round_in_groups(x)
        if fine:
            rounded = rounded + round_in_groups(x - rounded)
        w = self._of_layer().numbers(jnp)
        y = lax.dot_general(rounded, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        return summed(y, axis)

    def take(self, ids: jax.Array) -> jax.Array:
        rows: jax.Array = self._of_layer()._each(lambda part: part[ids]).numbers(jnp)
        return rows

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: str, array: Any) -> Groups:
        kind = KINDS[dtype]
        dtypes = ("int8" if kind.bits == 8 else "uint8", "uint8", "int8" if kind.group == 16 else "uint8", "uint8")
        parts = [
            array((*shape[:-1], columns), dtype) if columns else None
            for columns, dtype in zip(kind.columns(shape[-1]), (*dtypes, kind.dtype, kind.dtype), strict=True)
        ]
        return cls.of(dtype, parts)

    @classmethod
    def encode(cls, block: Array, dtype: str) -> Groups:
        return encode(block, dtype)

    def columns(self, wanted: slice) -> Groups:
        start, stop, _ = wanted.indices(self.shape[-1])
        first, last = (KINDS[self.kind].columns(n) for n in (start, stop))
        parts = [None if part is None else part[..., a:b] for part, a, b in zip(self.parts, first, last, strict=True)]
        return Groups.of(self.kind, parts)

    def decode(self) -> Array:
        with np.errstate(invalid="ignore"):  # scales that aren't finite stay so
            rows: Array = self._each(np.asarray).numbers(np)
        return rows

    def specs(self, rows: Any, columns: Any) -> Groups:
        return self._each(lambda _: stacked(self, rows, columns))

    def numbers(self, xp: ModuleType) -> Any:
        """Compute the weights, float32 `[..., in]`, with NumPy or with `jax.numpy`."""
        kind = KINDS[self.kind]
        u = xp.asarray(self.values)
        groups = (*u.shape[:-1], -1)
        ones = (1,) * u.ndim
        if kind.bits == 4:
            u = u.reshape(*groups, 16)
            u = xp.concatenate([u & np.uint8(15), u >> np.uint8(4)], axis=-1)
        if kind.high == 1:
            shift = np.arange(8, dtype=np.uint8).reshape(*ones, 1, 8)
            bits = self.high.reshape(*groups, 4, 1) >> shift  # type: ignore[union-attr]
            u = u | ((bits & np.uint8(1)) << np.uint8(4)).reshape(*groups, 32)
        elif kind.high == 2:
            # Bits 2i and 2i + 1 of byte j of 8 are element j + 8i's.
            shift = np.arange(0, 8, 2, dtype=np.uint8).reshape(*ones, 4, 1)
            bits = self.high.reshape(*groups, 1, 8) >> shift  # type: ignore[union-attr]
            u = u | ((bits & np.uint8(3)) << np.uint8(4)).reshape(*groups, 32)
        a, b = self._scales(kind)
        w = u.astype(np.float32).reshape(*groups, kind.group) * a[..., None] + b[..., None]
        return w.reshape(*groups)

    def _scales(self, kind: Kind) -> tuple[Any, Any]:
        """Give a and b of each group."""
        a: Any = self.d.astype(np.float32)
        b: Any = 0.0 if self.m is None else self.m.astype(np.float32)
        if self.scales is not None:
            each = kind.share // kind.group
            a = self.scales.astype(np.float32) * a.repeat(each, axis=-1)
            if self.mins is not None:
                b = self.mins.astype(np.float32) * -b.repeat(each, axis=-1)
        return a, b if kind.has_m else a * np.float32(-kind.zero)

    def _each(self, change: Any) -> Groups:
        return Groups.of(self.kind, (None if part is None else change(part) for part in self.parts))

    def _of_layer(self) -> Groups:
        return self._each(lambda part: layer_of(part, self.layer))


def round_in_groups(x: jax.Array) -> jax.Array:
    """Round float32 `x [R, in]` to int8 times a scale for each 32 elements, and give that as float32."""
    groups = x.reshape(x.shape[0], -1, 32)
    scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / 127.0
    normal = scale >= np.finfo(np.float32).tiny
    inverse = jnp.where(normal, 1.0 / jnp.where(normal, scale, 1.0), 0.0)
    return (jnp.round(groups * inverse) * scale).reshape(x.shape)


def from_blocks(blocks: Array, dtype: str) -> Groups:
    """Take blocks of a file, uint8 `[out, bytes]`, apart, moving bits alone.

    Those of q80 are a d and 32 values; the others are GGUF's.

    Raises:
      ValueError: a row is no whole number of blocks.
    """
    kind = KINDS[dtype]
    wide = np.dtype(kind.dtype).itemsize
    size = sum(kind.columns(kind.share)[:2]) + wide * (1 + kind.has_m) + kind.own_scales * (12 if kind.has_m else 16)
    if blocks.shape[-1] % size:
        raise ValueError(f"rows of {blocks.shape[-1]} bytes: expected a multiple of {dtype}'s {size}")
    b: Any = blocks.reshape(len(blocks), -1, size)
    if dtype == "q6_k":
        low, pairs, own, d = np.split(b, (128, 192, 208), axis=-1)
        parts = [_nibbles(_halves(low, 64)), _pack_pairs(pairs), own.view(np.int8), None, d, None]
    else:
        d, m = b[..., :wide], b[..., wide : 2 * wide] if kind.has_m else None
        at = wide * (1 + kind.has_m)
        scales, mins = _k_scales(b[..., at : at + 12]) if kind.own_scales else (None, None)
        at += 12 * kind.own_scales
        high = b[..., at : at + kind.share // 8] if kind.high else None
        values = b[..., at + (0 if high is None else kind.share // 8) :]
        if kind.own_scales:
            values = _nibbles(_halves(values, 32))
            high = None if high is None else _pack_bits(high)
        parts = [values.view(np.int8) if kind.bits == 8 else values, high, scales, mins, d, m]
    rows = [None if part is None else np.ascontiguousarray(part).reshape(len(blocks), -1) for part in parts]
    floats = [None if part is None else part.view(kind.dtype) for part in rows[4:]]
    return Groups.of(dtype, [*rows[:4], *floats])


def _halves(b: Any, n: int) -> Any:
    """Give the elements of `b`, whose n bytes hold first the low halves of 2n elements' bytes, then the high ones."""
    b = b.reshape(*b.shape[:-1], -1, 1, n)
    return np.concatenate([b & 15, b >> 4], axis=-2)


def _nibbles(elements: Any) -> Any:
    """Put elements of 4 bits, uint8, two in a byte: j and j + 16 of each 32."""
    pairs = elements.reshape(*elements.shape[:-2], -1, 2, 16)
    return pairs[..., 0, :] | pairs[..., 1, :] << 4


def _pack_bits(high: Any) -> Any:
    """Put the 5th bits of 8 groups, of which byte j has those of the elements j, group by group."""
    bits = high[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return np.packbits(bits, axis=-1, bitorder="little")


def _pack_pairs(high: Any) -> Any:
    """Put the upper two bits of q6_k's elements, of which byte j of 32 has those of 4 groups, group by group."""
    shift = np.arange(0, 8, 2, dtype=np.uint8)
    pairs = high.reshape(*high.shape[:-1], 2, 1, 32) >> shift[:, None] & 3
    pairs = pairs.reshape(*pairs.shape[:-1], 4, 8) << shift[:, None]
    return np.bitwise_or.reduce(pairs, axis=-2)


def _k_scales(b: Any) -> tuple[Any, Any]:
    """Unpack the 6-bit scales and mins of 8 groups from 12 bytes."""
    first, second, third = b[..., :4], b[..., 4:8], b[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    return scales, np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)


def encode(x: Array, dtype: str) -> Groups:
    """Round floats `[rows, in]` to groups of q80, int8 or int4, on the host; NaN and infinity show in d or m.

    In q80 the largest element of a group becomes 127 or -127. In int8 the least becomes -128 and the greatest 127: what
    was q4_1 before stays what it is, but for the rounding of d and m. In int4, where the largest would become -8, a few
    other scales are tried, and that of the least error is taken, in squares weighted with the elements' own.

    Raises:
      ValueError: another kind, or a row of which the length is no multiple of 32.
    """
    if dtype not in ("q80", "int8", "int4") or x.shape[-1] % 32:
        raise ValueError(f"{dtype}, rows of {x.shape[-1]}: expected q80, int8 or int4, and a multiple of 32")
    rows = max(_AT_ONCE // x.shape[-1], 1)
    parts = [_encode(x[i : i + rows], dtype).parts for i in range(0, max(len(x), 1), rows)]
    joined = (None if part[0] is None else np.concatenate(part) for part in zip(*parts, strict=True))
    return Groups.of(dtype, joined)


def _encode(x: Array, dtype: str) -> Groups:
    groups = x.astype(np.float32, copy=False).reshape(len(x), -1, 32)
    most, least, m = groups.max(axis=-1), groups.min(axis=-1), None
    with np.errstate(invalid="ignore", over="ignore"):
        if dtype == "int4":
            d = _least_error(groups).astype(np.float16)
            u = np.rint(groups * _inverse(d.astype(np.float32)) + 8).clip(0, 15).astype(np.uint8)
            values = _nibbles(u)
        elif dtype == "q80":
            d = np.maximum(most, -least) / np.float32(127)
            values = np.rint(groups * _inverse(d)).astype(np.int8)
        else:
            d = ((most - least) / 255).astype(np.float16)
            m = (least + 128 * d.astype(np.float32)).astype(np.float16)
            u = (groups - m.astype(np.float32)[..., None]) * _inverse(d.astype(np.float32))
            values = np.rint(u).clip(-128, 127).astype(np.int8)
    return Groups.of(dtype, (values.reshape(len(x), -1), None, None, None, d, m))


def _least_error(groups: Array) -> Array:
    """Find the d of each group `[..., 32]` with which int4 is nearest to it; a group that isn't finite has none."""
    at = np.abs(groups).argmax(axis=-1)[..., None]
    largest = np.take_along_axis(groups, at, axis=-1)[..., 0]
    d, most = np.where(np.isfinite(largest), 0, np.nan).astype(np.float32), np.zeros_like(largest)
    weight = groups * groups  # what is large matters more: less text is lost than with plain squares
    for step in _STEPS:
        q = np.rint(groups * _inverse(largest / np.float32(step))).clip(-8, 7)
        product, square = (weight * groups * q).sum(axis=-1), (weight * q * q).sum(axis=-1)
        gain = np.divide(product * product, square, out=np.zeros_like(square), where=square > 0)  # off the error
        best = np.divide(product, square, out=np.zeros_like(square), where=square > 0)
        d = np.where(gain > most, best, d)
        most = np.maximum(gain, most)
    return d


def _inverse(d: Array) -> Array:
    """Give 1 / d with another axis; 0 where d is 0, or so small that the inverse would be infinite."""
    large = np.abs(d) >= np.finfo(np.float32).tiny
    return np.divide(1, d, out=np.zeros_like(d), where=large)[..., None]
