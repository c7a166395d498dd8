"""What changes logits before temperature and filters: biases, penalties, tokens that must not come.

Each works on float32 `[B, V]`, each row with settings of its own, and costs next to nothing where no row has any.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def forbid(logits: jax.Array, ids: jax.Array, on: jax.Array) -> jax.Array:
    """Take the tokens `ids [B, N]` from the rows `on [B]`; ids below 0 are none."""
    rows = lax.broadcasted_iota(jnp.int32, ids.shape, 0)
    places = jnp.where(on[:, None] & (ids >= 0), ids, logits.shape[1])  # outside, and dropped, for the others
    result: jax.Array = lax.cond(
        jnp.any(on), lambda: logits.at[rows, places].set(-jnp.inf, mode="drop"), lambda: logits
    )
    return result


def allow(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Take all tokens but those of `masks [B, ceil(V / 32)]`, uint32: bit i % 32 of word i // 32 for id i."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    return jnp.where(bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] != 0, logits, -jnp.inf)


def add_biases(logits: jax.Array, ids: jax.Array, biases: jax.Array) -> jax.Array:
    """Add `biases [B, N]` to the logits of tokens `ids [B, N]`; what is no token is passed over."""
    rows = lax.broadcasted_iota(jnp.int32, ids.shape, 0)
    result: jax.Array = lax.cond(
        jnp.any(biases != 0.0), lambda: logits.at[rows, ids].add(biases, mode="drop"), lambda: logits
    )
    return result


def penalise_repetition(logits: jax.Array, penalty: jax.Array, tokens: jax.Array, pos: jax.Array) -> jax.Array:
    """Divide positive logits of the tokens at positions `0 .. pos` by `penalty [B]`, and multiply negative ones.

    Source: Keskar et al., CTRL, arXiv 1909.05858, with the sign rule of `transformers`.
    """

    def penalise() -> jax.Array:
        scaled = jnp.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
        return jnp.where(_count(logits.shape, tokens, jnp.zeros_like(pos), pos) > 0, scaled, logits)

    result: jax.Array = lax.cond(jnp.any(penalty != 1.0), penalise, lambda: logits)
    return result


def penalise_generated(
    logits: jax.Array, frequency: jax.Array, presence: jax.Array, tokens: jax.Array, start: jax.Array, pos: jax.Array
) -> jax.Array:
    """Take `frequency [B]` off a token's logit for each time it stands at `start .. pos`, and `presence [B]` once.

    Source: OpenAI's API reference; vLLM does the same.
    """

    def penalise() -> jax.Array:
        counts = _count(logits.shape, tokens, start, pos).astype(jnp.float32)
        return logits - counts * frequency[:, None] - jnp.where(counts > 0, presence[:, None], 0.0)

    result: jax.Array = lax.cond(jnp.any((frequency != 0.0) | (presence != 0.0)), penalise, lambda: logits)
    return result


def _count(shape: tuple[int, ...], tokens: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """Count each token at positions `first .. last` of its row: int32 of `shape`, `[B, V]`."""
    rows, places = (lax.broadcasted_iota(jnp.int32, tokens.shape, axis) for axis in (0, 1))
    counted = (places >= first[:, None]) & (places <= last[:, None])
    ids = jnp.where(counted, tokens, shape[1])
    return jnp.zeros(shape, jnp.int32).at[rows, ids].add(1, mode="drop")
