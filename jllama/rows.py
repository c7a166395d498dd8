"""Rows of a running `State`: put some in, choose which stay, change how many slots they have. Pure functions.

A row needs no cleaning before it is used again, unless what it holds isn't finite: its slot s is valid if and only if
s <= pos, but XLA's attention multiplies the others by 0. The leaves of a cache end in the axes `[B*K, S, H]`, whatever
stands before them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jllama.decode import State
from jllama.model import Cache


def place(state: State, new: State, rows: jax.Array) -> State:
    """Put the rows of `new` in the places of rows of `state`.

    Args:
      state: of B rows.
      new: of b rows, and no more slots than `state` has.
      rows: int32 `[b]`, where each of them goes; B and more is nowhere.
    """
    slots = new.tokens.shape[1]
    heads = _heads(new, rows)
    return State(
        cache=jax.tree.map(lambda leaf, x: leaf.at[..., heads, :slots, :].set(x, mode="drop"), state.cache, new.cache),
        tokens=state.tokens.at[rows, :slots].set(new.tokens, mode="drop"),
        logprobs=state.logprobs.at[rows, :slots].set(new.logprobs, mode="drop"),
        pos=state.pos.at[rows].set(new.pos, mode="drop"),
        done=state.done.at[rows].set(new.done, mode="drop"),
        likely=jax.tree.map(lambda x, y: x.at[rows, :slots].set(y, mode="drop"), state.likely, new.likely),
    )


def clear(state: State, rows: jax.Array) -> State:
    """Fill the caches of rows with zeros; `rows` is int32 `[b]`, of which B and more are none."""
    heads = _heads(state, rows)
    cache = jax.tree.map(lambda leaf: leaf.at[..., heads, :, :].set(0, mode="drop"), state.cache)
    return state._replace(cache=cache)


def regroup(state: State, rows: jax.Array, slots: int) -> State:
    """Copy rows, in any order and as often as wanted, to a state of their own.

    Args:
      state: of B rows.
      rows: int32 `[b]`, 0 to B - 1: what each row of the new state is a copy of.
      slots: of the new state; no fewer than the tokens of each row.
    """
    heads = _heads(state, rows)
    return State(
        cache=jax.tree.map(lambda leaf: _fit(jnp.take(leaf, heads, axis=-3), -2, slots), state.cache),
        tokens=_fit(state.tokens[rows], 1, slots),
        logprobs=_fit(state.logprobs[rows], 1, slots),
        pos=state.pos[rows],
        done=state.done[rows],
        likely=jax.tree.map(lambda x: _fit(x[rows], 1, slots), state.likely),
    )


def cut(state: State, row: jax.Array | int, first: jax.Array | int, *, slots: int) -> Cache:
    """Copy the slots `first .. first + slots - 1` of one row's cache: a cache of one row."""
    heads = _heads(state, jnp.asarray(row)[None])

    def leaf(x: jax.Array) -> jax.Array:
        here = lax.dynamic_slice_in_dim(x, heads[0], len(heads), axis=-3)
        own: jax.Array = lax.dynamic_slice_in_dim(here, first, slots, axis=-2)
        return own

    part: Cache = jax.tree.map(leaf, state.cache)
    return part


def paste(cache: Cache, part: Cache, row: jax.Array | int, first: jax.Array | int) -> Cache:
    """Put what `cut` returns into a row of `cache`, its first slot at `first`."""

    def leaf(x: jax.Array, new: jax.Array) -> jax.Array:
        start = (*[0] * (x.ndim - 3), row * new.shape[-3], first, 0)
        pasted: jax.Array = lax.dynamic_update_slice(x, new, start)
        return pasted

    whole: Cache = jax.tree.map(leaf, cache, part)
    return whole


def _heads(state: State, rows: jax.Array) -> jax.Array:
    """Return where the K heads of rows `[b]` lie in the cache's leaves, `[b * K]`."""
    k = jax.tree.leaves(state.cache)[0].shape[-3] // state.pos.shape[0]
    heads: jax.Array = (rows[:, None] * k + jnp.arange(k, dtype=jnp.int32)[None]).reshape(-1)
    return heads


def _fit(x: jax.Array, axis: int, slots: int) -> jax.Array:
    """Cut or pad one axis of `x`."""
    axis %= x.ndim
    more = max(slots - x.shape[axis], 0)
    padded = jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])
    cut: jax.Array = jax.lax.slice_in_dim(padded, 0, slots, axis=axis)
    return cut
