"""Speculative decoding: several tokens of a row in one pass of the model, and those that it draws one by one.

A draw depends on the seed and the position alone. So a guess is right if and only if it is the token that is drawn in
its place, and one pass over a row's last token and K guesses gives all draws up to the first guess that is wrong.
Nothing is taken back: slots past a row's position are written before they are read.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllama.decode import State, Stop, extend
from jllama.model import Cache, Params, forward, head, step
from jllama.sampling import Sampling
from jllama.weights import take

SHORTEST = 2  # tokens that must have occurred before
_LONGEST = 4  # tokens that are compared: of several places with as many the last one serves
_BLOCK = 64  # tokens that a draft model reads at a time of what it has not seen


class Tally(NamedTuple):
    """What became of the guesses, for each row."""

    passes: jax.Array  # int32 [B]: of the model, while the row was not done
    guessed: jax.Array  # int32 [B]: tokens
    examined: jax.Array  # int32 [B]: of them up to the first that was wrong
    accepted: jax.Array  # int32 [B]: of them right


def decode_lookup(
    params: Params, state: State, sampling: Sampling, stop: Stop, steps: jax.Array | int, *, guesses: int
) -> tuple[State, Tally]:
    """Do what `decode.decode` does, with tokens guessed from each row's own text.

    Args:
      params: the model.
      state: of rows that have `guesses + 1` slots left; it comes back as soon as one of them doesn't.
      sampling: as for `decode`.
      stop: as for `decode`.
      steps: passes of the model, each of which gives a row 1 to `guesses + 1` tokens.
      guesses: how many tokens are guessed for a pass.
    """

    def body(carry: tuple[jax.Array, State, Tally]) -> tuple[jax.Array, State, Tally]:
        n, state, tally = carry
        found, is_found = lookup(state.tokens, state.pos, guesses)
        return n + 1, *_verify(params, state, jnp.where(is_found[:, None], found, -1), sampling, stop, tally)

    begun = (jnp.int32(0), state, _no_tally(state))
    return lax.while_loop(lambda carry: _unfinished(*carry[:2], steps, guesses), body, begun)[1:]


def decode_draft(
    params: Params,
    state: State,
    draft: Params,
    cache: Cache,
    known: jax.Array,
    sampling: Sampling,
    stop: Stop,
    steps: jax.Array | int,
    *,
    guesses: int,
) -> tuple[State, Tally, Cache]:
    """Do what `decode_lookup` does, with tokens guessed by a smaller model of the same vocabulary.

    Args:
      params: the model.
      state: as for `decode_lookup`.
      draft: the smaller model.
      cache: the smaller model's, with as many rows and slots as the state.
      known: int32 `[B]`, how many of a row's first tokens are in that cache.
      sampling: as for `decode`; the smaller model draws with it too.
      stop: as for `decode`.
      steps: as for `decode_lookup`.
      guesses: as for `decode_lookup`.
    """

    def body(carry: tuple[jax.Array, State, Tally, Cache]) -> tuple[jax.Array, State, Tally, Cache]:
        n, state, tally, cache = carry
        drafted, cache = _draft(draft, cache, state, sampling, stop, guesses, params.config.vocab_size)
        # An embedding that the model itself never draws may hold NaN, which a product with 0 doesn't hide.
        is_finite = jnp.all(jnp.isfinite(take(params.embedding, drafted, params.run)), axis=-1)
        drafted = jnp.where(is_finite, drafted, -1)
        return n + 1, *_verify(params, state, drafted, sampling, stop, tally), cache

    begun = (jnp.int32(0), state, _no_tally(state), _catch_up(draft, cache, state, known))
    return lax.while_loop(lambda carry: _unfinished(*carry[:2], steps, guesses), body, begun)[1:]


def lookup(tokens: jax.Array, pos: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Guess that each row goes on as it did the last time after what now are its last tokens.

    Source: Saxena, Prompt Lookup Decoding, github.com/apoorvumang/prompt-lookup-decoding.

    Args:
      tokens: int32 `[B, S]`, the ids of each row by position.
      pos: int32 `[B]`, the position of the last known one.
      count: how many tokens to guess.

    Returns:
      int32 `[B, count]`, and bool `[B]`: whether the row's last tokens have occurred before.
    """
    slots = tokens.shape[1]
    places = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    matches, length = places < pos[:, None], jnp.zeros_like(tokens)
    for back in range(_LONGEST):
        last = jnp.take_along_axis(tokens, jnp.maximum(pos - back, 0)[:, None], axis=1)
        matches &= (jnp.roll(tokens, back, axis=1) == last) & (places >= back)
        length += matches.astype(jnp.int32)
    best = jnp.max(length * slots + places, axis=1)
    place, found = best % slots, best // slots >= SHORTEST
    # Past the last token the text goes on in the same way: what repeats itself is guessed as often as it fits.
    period = jnp.maximum(pos - place, 1)[:, None]
    after = place[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)[None] % period
    return jnp.take_along_axis(tokens, jnp.minimum(after, pos[:, None]), axis=1), found


def _unfinished(n: jax.Array, state: State, steps: jax.Array | int, guesses: int) -> jax.Array:
    has_slots = jnp.max(state.pos) + 1 + guesses < state.tokens.shape[1]
    return (n < steps) & has_slots & ~jnp.all(state.done)


def _no_tally(state: State) -> Tally:
    return Tally(*[jnp.zeros_like(state.pos)] * len(Tally._fields))


def _verify(
    params: Params, state: State, guesses: jax.Array, sampling: Sampling, stop: Stop, tally: Tally
) -> tuple[State, Tally]:
    """Draw the tokens of rows that aren't done, up to the first that was not guessed; a guess of -1 is none."""
    cache, live = state.cache, ~state.done
    tally = tally._replace(
        passes=tally.passes + live.astype(jnp.int32),
        guessed=tally.guessed + jnp.sum((guesses >= 0) & live[:, None], axis=1, dtype=jnp.int32),
    )
    own = jnp.take_along_axis(state.tokens, state.pos[:, None], axis=1)
    block = jnp.concatenate([own, jnp.where(guesses < 0, own, guesses)], axis=1)
    hidden, cache = forward(params, cache, block, state.pos)
    logits = head(params, hidden)
    guesses = jnp.pad(guesses, ((0, 0), (0, 1)), constant_values=-1)

    def draw(carry: tuple[jax.Array, jax.Array, State, Tally]) -> tuple[jax.Array, jax.Array, State, Tally]:
        n, active, state, tally = carry
        guess = lax.dynamic_index_in_dim(guesses, n, axis=1, keepdims=False)
        here = lax.dynamic_index_in_dim(logits, n, axis=1, keepdims=False)
        state = extend(state, here, sampling, stop, active)
        drawn = jnp.take_along_axis(state.tokens, state.pos[:, None], axis=1)[:, 0]
        right = active & (drawn == guess)
        tally = tally._replace(
            examined=tally.examined + (active & (guess >= 0)).astype(jnp.int32),
            accepted=tally.accepted + right.astype(jnp.int32),
        )
        return n + 1, right & ~state.done, state, tally

    begun = (jnp.int32(0), live, state._replace(cache=Cache((), ())), tally)
    _, _, state, tally = lax.while_loop(lambda carry: jnp.any(carry[1]), draw, begun)
    return state._replace(cache=cache), tally


def _catch_up(draft: Params, cache: Cache, state: State, known: jax.Array) -> Cache:
    """Let a draft model read what it has not seen of each row, but for the last two tokens."""
    slots = state.tokens.shape[1]
    width = min(_BLOCK, slots)

    def body(carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        known, cache = carry
        first = jnp.minimum(known, slots - width)
        places = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        block = jnp.take_along_axis(state.tokens, jnp.minimum(places, state.pos[:, None]), axis=1)
        return first + width, forward(draft, cache, block, first)[1]

    return lax.while_loop(lambda carry: jnp.any(carry[0] + 1 < state.pos), body, (known, cache))[1]


def _draft(
    draft: Params, cache: Cache, state: State, sampling: Sampling, stop: Stop, count: int, vocab: int
) -> tuple[jax.Array, Cache]:
    """Guess each row's next tokens, int32 `[B, count]`: those that a draft model would draw, up to an id of `vocab`."""

    def extended(state: State, logits: jax.Array) -> State:
        # Models of one tokenizer may be padded to different sizes.
        more = max(vocab - logits.shape[1], 0)
        logits = jnp.pad(logits, ((0, 0), (0, more)), constant_values=-jnp.inf)[:, :vocab]
        return extend(state, logits, sampling, stop, jnp.ones_like(state.done))

    # The token before the last one may not be cached: it is read again.
    first = jnp.maximum(state.pos - 1, 0)
    places = jnp.minimum(first[:, None] + jnp.arange(2, dtype=jnp.int32)[None], state.pos[:, None])
    pair = jnp.take_along_axis(state.tokens, places, axis=1)
    hidden, cache = forward(draft, cache, pair, first)
    hidden = jnp.take_along_axis(hidden, (state.pos - first)[:, None, None], axis=1)[:, 0]
    ahead = extended(state._replace(cache=Cache((), ())), head(draft, hidden))

    def body(_: int, carry: tuple[State, Cache]) -> tuple[State, Cache]:
        state, cache = carry
        token = jnp.take_along_axis(state.tokens, state.pos[:, None], axis=1)[:, 0]
        logits, cache = step(draft, cache, jnp.minimum(token, vocab - 1), state.pos)
        return extended(state, logits), cache

    ahead, cache = lax.fori_loop(1, count, body, (ahead, cache))
    places = state.pos[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)[None]
    return jnp.minimum(jnp.take_along_axis(ahead.tokens, places, axis=1), vocab - 1), cache
