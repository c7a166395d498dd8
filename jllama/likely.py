"""The most probable tokens in each place, by the model alone."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MOST = 20  # tokens in a place: one number for all rows, so that asking for them compiles nothing


class Likely(NamedTuple):
    """Tokens, the most probable first; where a vocabulary has fewer, those of -inf pad."""

    ids: jax.Array  # int32 [..., 20]
    logprobs: jax.Array  # float32 [..., 20]: natural logs


def no_tokens(*shape: int) -> Likely:
    """Make room for the tokens of so many places."""
    return Likely(jnp.zeros((*shape, MOST), jnp.int32), jnp.zeros((*shape, MOST), jnp.float32))


def find(logits: jax.Array, wanted: jax.Array) -> Likely:
    """Find the most probable tokens of each row `[B, 20]`, if any row wants some: `wanted [B]` is how many."""

    def search() -> Likely:
        count = min(MOST, logits.shape[1])
        top, ids = lax.top_k(logits, count)
        logprobs = top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        more = ((0, 0), (0, MOST - count))
        return Likely(jnp.pad(ids, more), jnp.pad(logprobs, more, constant_values=-jnp.inf))

    found: Likely = lax.cond(jnp.any(wanted > 0), search, lambda: no_tokens(logits.shape[0]))
    return found
