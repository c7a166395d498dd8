"""Rotary positions: how far each pair of a query or key turns, and the turning."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jllama.config import Config


def rotary(config: Config, positions: jax.Array) -> jax.Array:
    """Compute the rotation of each pair at `positions [B, T]`: `[B, T, R/2, 2]`, cosine and sine.

    Source: Su, RoFormer, arXiv 2104.09864; pairs of neighbours, as in Meta's files.
    """
    angles = positions.astype(jnp.float32)[..., None] * rotary_frequencies(config)[None, None]
    rotation = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return rotation if config.rope_scaling is None else rotation * config.rope_scaling.magnitude


def rotary_frequencies(config: Config) -> np.ndarray:
    """Compute the angle by which each of the R/2 pairs turns a position, float32, from float64."""
    frequencies = config.rope_theta ** -(np.arange(0, config.rotated_dim, 2, dtype=np.float64) / config.rotated_dim)
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling.stretch(frequencies, config.rope_theta)
    return frequencies.astype(np.float32)


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotate the first R numbers of `x [..., H]`, pairs of neighbours, by `rotation [..., R/2, 2]`."""
    r = 2 * rotation.shape[-2]
    pairs = x[..., :r].reshape(*x.shape[:-1], -1, 2)
    cos, sin = rotation[..., 0], rotation[..., 1]
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(*x.shape[:-1], r)
    return rotated if r == x.shape[-1] else jnp.concatenate([rotated, x[..., r:]], axis=-1)
