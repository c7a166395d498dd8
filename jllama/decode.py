"""From prompts to tokens: one loop for whole generations and for streams.

A `State` holds a batch of rows. `read_prompt` fills it from the prompts and draws the first token of each row;
`decode` draws the others in one `lax.while_loop`. All functions are pure; `programs` compiles them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllama.likely import Likely, find, no_tokens
from jllama.model import Cache, Params, forward, head, init_cache, prefill, step
from jllama.processors import allow, forbid
from jllama.sampling import Sampling, argmax, log_probability, sample


class State(NamedTuple):
    """A batch of rows in the middle of their generation; S slots, of which a row fills pos + 1."""

    cache: Cache
    tokens: jax.Array  # int32 [B, S]: each row's ids by position, the prompt and what follows
    logprobs: jax.Array  # float32 [B, S]: of each generated token; -inf where none could come, NaN for bad logits
    pos: jax.Array  # int32 [B]: the position of the last known token; its keys and values are not cached yet
    done: jax.Array  # bool [B]
    likely: Likely  # [B, S, 20]: by position, of the rows that want them


class Stop(NamedTuple):
    """When a row ends, and what can't come in it."""

    ids: jax.Array  # int32 [E] or [B, E]: a generated token that is one of these is a row's last; pad with -1
    length: jax.Array  # int32 [B]: the number of tokens, prompt included, at which a row is full
    banned: jax.Array | None = None  # bool [V]: tokens that are never drawn, such as a vocabulary's padding
    allowed: jax.Array | None = None  # uint32 [B, ceil(V / 32)]: what each row's next token may be, a bit an id


def start(params: Params, tokens: jax.Array, length: jax.Array, stop: Stop, cache: Cache | None = None) -> State:
    """Make the state of a batch whose prompts are not read yet.

    Args:
      params: the model.
      tokens: int32 `[B, S]`, right-padded prompts; S becomes the number of slots.
      length: int32 `[B]`, the tokens of each prompt, at least 1.
      stop: a row whose `stop.length` is no more than its prompt's is done already.
      cache: of S slots, some of whose first ones hold the prompts' already; None makes an empty one.
    """
    return State(
        cache=init_cache(params, *tokens.shape) if cache is None else cache,
        tokens=tokens,
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        pos=length - 1,
        done=length >= stop.length,
        likely=no_tokens(*tokens.shape),
    )


def read_prompt(
    params: Params, state: State, sampling: Sampling, stop: Stop, first: jax.Array | int, *, width: int
) -> State:
    """Read the block of prompt tokens at positions `first .. first + width - 1`.

    Call it for every block from the first position not cached on, until the longest prompt is read. A row whose
    prompt ends in this block gets its first token.
    """
    block = lax.dynamic_slice_in_dim(state.tokens, first, width, axis=1)
    # Of a row that ends before the block all is padding: it is replaced here, as `prefill` does where some of it is.
    own = jnp.take_along_axis(state.tokens, state.pos[:, None], axis=1)
    block = jnp.where((state.pos < first)[:, None], own, block)
    length = state.pos + 1 - first
    logits, cache = prefill(params, state.cache, block, length, first)
    return extend(state._replace(cache=cache), logits, sampling, stop, ~state.done & (length > 0) & (length <= width))


def decode(params: Params, state: State, sampling: Sampling, stop: Stop, steps: jax.Array | int) -> State:
    """Generate up to `steps` tokens a row: until every row is done, or a row that isn't has no slot left.

    The text doesn't depend on how many calls it took, so a stream is this with few steps a call.
    """
    slots = state.tokens.shape[1]

    def unfinished(carry: tuple[jax.Array, State]) -> jax.Array:
        n, state = carry
        furthest = jnp.max(jnp.where(state.done, -1, state.pos))
        return (n < steps) & (furthest >= 0) & (furthest + 1 < slots)

    def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        n, state = carry
        token = jnp.take_along_axis(state.tokens, state.pos[:, None], axis=1)[:, 0]
        logits, cache = step(params, state.cache, token, state.pos)
        return n + 1, extend(state._replace(cache=cache), logits, sampling, stop, ~state.done)

    return lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]


def extend(state: State, logits: jax.Array, sampling: Sampling, stop: Stop, active: jax.Array) -> State:
    """Draw the next token of the rows that are `active`, and end those that are complete."""
    if stop.banned is not None:
        logits = jnp.where(stop.banned[None], -jnp.inf, logits)
    within = logits if stop.allowed is None else allow(logits, stop.allowed)
    ids = jnp.broadcast_to(stop.ids, (logits.shape[0], stop.ids.shape[-1]))
    early = state.pos + 1 - sampling.start < sampling.min_new_tokens
    possible = forbid(within, ids, early)
    token = sample(possible, sampling, state.tokens, state.pos)
    found = jnp.take_along_axis(possible, token[:, None], axis=1)[:, 0]
    logprob = jnp.where(jnp.isneginf(found), -jnp.inf, log_probability(logits, token))
    best = find(logits, sampling.top_logprobs)
    pos = state.pos + active.astype(jnp.int32)
    rows = jnp.arange(pos.shape[0], dtype=jnp.int32)
    slot = jnp.where(active, pos, state.tokens.shape[1])  # outside, and dropped, for the others
    last = jnp.any(token[:, None] == ids, axis=-1) | (pos + 1 >= stop.length) | ~jnp.isfinite(logprob)
    return state._replace(
        tokens=state.tokens.at[rows, slot].set(token, mode="drop"),
        logprobs=state.logprobs.at[rows, slot].set(logprob, mode="drop"),
        pos=pos,
        done=state.done | (active & last),
        likely=jax.tree.map(lambda all_, x: all_.at[rows, slot].set(x, mode="drop"), state.likely, best),
    )


def generate(params: Params, tokens: jax.Array, length: jax.Array, sampling: Sampling, stop: Stop, slots: int) -> State:
    """Generate from right-padded prompts `tokens [B, T]` in a state of `slots` slots: the whole job in one function."""
    width = tokens.shape[1]
    tokens = jnp.pad(tokens, ((0, 0), (0, slots - width)))
    state = start(params, tokens, length, stop)
    state = read_prompt(params, state, sampling, stop, 0, width=width)
    return decode(params, state, sampling, stop, slots)


def score(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Predict every token of `tokens [B, T]` from those before it.

    Returns:
      The log-probability of tokens 1 to T - 1, float32 `[B, T-1]`, and the most probable id in the place of each,
      int32 `[B, T-1]`.
    """
    hidden, _ = forward(params, init_cache(params, *tokens.shape), tokens, jnp.zeros(tokens.shape[0], jnp.int32))
    logits = head(params, hidden[:, :-1]).reshape(-1, params.config.vocab_size)
    shape = (tokens.shape[0], tokens.shape[1] - 1)
    return log_probability(logits, tokens[:, 1:].reshape(-1)).reshape(shape), argmax(logits).reshape(shape)
