"""Norms: by root mean square, or by standard deviation and mean."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllama.config import Config


class Norm(NamedTuple):
    """The scale of a norm, and the shift of GPT-2's."""

    weight: jax.Array  # float32 [D], or [H] for the norms of single heads
    bias: jax.Array | None = None  # float32 [D]


def norm(config: Config, scale: Norm | None, x: jax.Array) -> jax.Array:
    """Bring the last axis of `x [..., D]` to a root mean square (or a standard deviation) of 1, then scale it.

    Without a scale there is no norm.

    Sources: Zhang and Sennrich, arXiv 1910.07467; Ba et al., arXiv 1607.06450.
    """
    if scale is None:
        return x
    if config.norm == "layer":
        x = x - _mean(x)
    x = x * lax.rsqrt(_mean(x * x) + config.norm_eps)
    x = x * scale.weight.reshape((1,) * (x.ndim - 1) + (-1,))
    return x if scale.bias is None else x + scale.bias.reshape((1,) * (x.ndim - 1) + (-1,))


def _mean(x: jax.Array) -> jax.Array:
    """Average over the last axis of `x [..., D]`: `[..., 1]`."""
    # By halves: on a CPU the order of XLA's own sum of a row depends on how many rows there are.
    n = x.shape[-1]
    total = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, (1 << (n - 1).bit_length()) - n)])
    while (half := total.shape[-1] // 2) > 0:
        total = total[..., :half] + total[..., half:]
    return total / n
