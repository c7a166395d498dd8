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
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
    x = x * scale.weight.reshape((1,) * (x.ndim - 1) + (-1,))
    return x if scale.bias is None else x + scale.bias.reshape((1,) * (x.ndim - 1) + (-1,))
