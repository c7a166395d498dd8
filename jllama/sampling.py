"""Logits to tokens, with settings for each row.

Every setting is an array, so none of them is compiled in, and a row is computed from itself alone: its text does
not depend on its neighbours. Nothing here sorts the vocabulary: the filters find the smallest kept probability by
bisection, and the draw needs one random number a row. docs/performance.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllama.processors import add_biases, penalise_generated, penalise_repetition

_BLOCK = 128  # tokens a block in the draw: about the square root of the vocabulary
_MIN_TEMPERATURE = 1e-5  # below it the draw is greedy: the arg max is certain, and 1 / temperature still finite


class Sampling(NamedTuple):
    """How each row's next token is chosen; every leaf has the length of the batch.

    The order, as in `transformers`, vLLM and llama.cpp: what can't come at all (a vocabulary's padding, what a grammar
    doesn't allow, the end before min_new_tokens), logit_bias, repetition penalty, frequency and presence penalty,
    temperature, top_k, top_p, min_p, draw. Log-probabilities are the model's own, before all of that.
    """

    temperature: jax.Array  # float32 [B]: 0 is greedy
    top_k: jax.Array  # int32 [B]: keep the k most probable; 0 is off
    top_p: jax.Array  # float32 [B]: then the fewest whose sum reaches p, at least one; 1 is off, 0 is greedy
    min_p: jax.Array  # float32 [B]: then those of at least min_p times the largest; 0 is off
    repetition_penalty: jax.Array  # float32 [B]: divides a seen token's logit if positive, else multiplies; 1 is off
    presence_penalty: jax.Array  # float32 [B]: comes off the logit of a token generated before; 0 is off
    frequency_penalty: jax.Array  # float32 [B]: the same, for each time that it was generated
    min_new_tokens: jax.Array  # int32 [B]: how many tokens come before one may end the row
    top_logprobs: jax.Array  # int32 [B]: how many of the most probable tokens are wanted in each place; 0 is off
    start: jax.Array  # int32 [B]: the tokens of the prompt, which were not generated
    bias_ids: jax.Array  # int32 [B, N]: tokens that have a bias; what is no token pads
    biases: jax.Array  # float32 [B, N]: what is added to their logits
    seed: jax.Array  # uint32 [B, 2]: the two words of a random key


def sample(logits: jax.Array, sampling: Sampling, tokens: jax.Array, pos: jax.Array) -> jax.Array:
    """Choose each row's next token.

    Args:
      logits: float32 `[B, V]`, finite, or -inf for tokens that must not come (a grammar's, padding), but not for all.
      sampling: the settings of each row.
      tokens: int32 `[B, S]`, the ids of each row by position: what the penalties look at.
      pos: int32 `[B]`, the position of the last known token; with the seed it decides the draw.

    Returns:
      int32 `[B]`. With temperature 0 the largest logit, the lowest id where several are equal.
    """
    logits = process(logits, sampling, tokens, pos)
    token: jax.Array = lax.cond(
        jnp.any(sampling.temperature >= _MIN_TEMPERATURE),
        lambda: jnp.where(sampling.temperature < _MIN_TEMPERATURE, argmax(logits), _draw(logits, sampling, pos)),
        lambda: argmax(logits),
    )
    return token


def process(logits: jax.Array, sampling: Sampling, tokens: jax.Array, pos: jax.Array) -> jax.Array:
    """Apply each row's biases and penalties to its logits, float32 `[B, V]`."""
    logits = add_biases(logits, sampling.bias_ids, sampling.biases)
    logits = penalise_repetition(logits, sampling.repetition_penalty, tokens, pos)
    return penalise_generated(
        logits, sampling.frequency_penalty, sampling.presence_penalty, tokens, sampling.start, pos
    )


def probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Compute the distribution that `sample` draws from after `process`: float32 `[B, V]`, rows sum to 1."""
    greedy = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=jnp.float32)
    weights = jnp.where((sampling.temperature < _MIN_TEMPERATURE)[:, None], greedy, _weights(logits, sampling))
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def argmax(x: jax.Array) -> jax.Array:
    """Find the first largest element of each row, int32 `[B]`; V where a row holds NaN."""
    # Two vectorised reductions: XLA's own argmax compares one element at a time, 8 times slower on CPU.
    ids = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), ids, x.shape[-1]), axis=-1)


def _weights(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Compute unnormalised probabilities float32 `[B, V]`, the largest 1, zero where a filter drops the token."""
    temperature = jnp.maximum(sampling.temperature, _MIN_TEMPERATURE)[:, None]
    weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
    on = (sampling.top_k > 0) & (sampling.top_k < logits.shape[-1])
    weights = _keep(weights, jnp.ones_like, on, sampling.top_k.astype(jnp.float32))
    weights = _keep(weights, lambda w: w, sampling.top_p < 1.0, sampling.top_p * jnp.sum(weights, axis=-1))
    return jnp.where(weights >= sampling.min_p[:, None], weights, 0.0)


def _keep(weights: jax.Array, measure: Callable[[jax.Array], jax.Array], on: jax.Array, enough: jax.Array) -> jax.Array:
    """Keep the fewest largest `weights [B, V]` whose measures sum to `enough [B]`, at least one, in the rows `on`.

    Of equal weights those with the lowest ids are kept.
    """
    measures = measure(weights)

    def total(bits: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(weights >= _float(bits)[:, None], measures, 0.0), axis=-1)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        reached = total(middle) >= enough
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    def keep() -> jax.Array:
        # Floats from 0 to 1 are ordered like their bit patterns, of which 30 halvings leave one: the threshold.
        one = lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
        low, _ = lax.fori_loop(0, 30, halve, (jnp.zeros_like(on, jnp.int32), jnp.full_like(on, one + 1, jnp.int32)))
        threshold = _float(jnp.minimum(low, one))
        surplus = total(low) - measure(threshold) >= enough
        kept = lax.cond(
            jnp.any(surplus), lambda: first_of_equal(threshold[:, None]), lambda: weights >= threshold[:, None]
        )
        return jnp.where(kept | ~on[:, None], weights, 0.0)

    def first_of_equal(threshold: jax.Array) -> jax.Array:
        above = weights > threshold
        equal = jnp.where(weights == threshold, measures, 0.0)
        before = jnp.sum(jnp.where(above, measures, 0.0), axis=-1, keepdims=True) + jnp.cumsum(equal, axis=-1) - equal
        first = lax.broadcasted_iota(jnp.int32, weights.shape, 1) == argmax(weights)[:, None]
        return above | ((weights == threshold) & (before < enough[:, None])) | first

    result: jax.Array = lax.cond(jnp.any(on), keep, lambda: weights)
    return result


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _draw(logits: jax.Array, sampling: Sampling, pos: jax.Array) -> jax.Array:
    """Draw one token a row by inverting the cumulative distribution at one uniform number, int32 `[B]`.

    A token of weight 0 is never drawn, however the sums are rounded.
    """
    weights = _weights(logits, sampling)
    rows, vocab = weights.shape
    # Two levels, blocks and then the tokens of one: a cumulative sum over the whole vocabulary is slow, and rounds.
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = jax.vmap(_uniform)(sampling.seed, pos)[:, None] * ends[:, -1:]
    block = _first(ends > target, sums > 0)
    chosen = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    start = jnp.take_along_axis(jnp.pad(ends, ((0, 0), (1, 0))), block, axis=1)
    token = _first(start + jnp.cumsum(chosen, axis=-1) > target, chosen > 0)
    return (block * _BLOCK + token)[:, 0]


def _first(reached: jax.Array, possible: jax.Array) -> jax.Array:
    """Find where each row is first reached and possible, int32 `[B, 1]`; where nowhere, the last possible place."""
    # Sums of floats may still grow in their last bit where only zeros follow, and may end short of their total.
    places = lax.broadcasted_iota(jnp.int32, reached.shape, 1)
    last = jnp.max(jnp.where(possible, places, 0), axis=-1, keepdims=True)
    return jnp.min(jnp.where(reached & possible, places, last), axis=-1, keepdims=True)


def _uniform(seed: jax.Array, pos: jax.Array) -> jax.Array:
    """Draw a number in [0, 1) that depends on the seed's two words and the position alone."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), pos)
    return jax.random.uniform(key, dtype=jnp.float32)


def log_probability(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Compute the log of the probability of `token [B]`: float32 `[B]`, not finite where the logits are not."""
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
