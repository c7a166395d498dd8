"""Experts: many feed-forwards a layer, of which each token takes a few, and no others are read."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllama.config import Config
from jllama.run import Run
from jllama.weights import Linear, Plain, Weight, linear
from jllama.weights.base import summed

_TILE = 16  # rows of one expert's product, at least, where there are as many


class Experts(NamedTuple):
    """The weights of a layer's E experts; of n layers, those of one layer after those of another."""

    w13: Weight  # [E, 2*F, D]: of each expert the rows of w1 (gate) and w3 (up)
    w2: Weight  # [E, D, F]


def mixture(
    config: Config, run: Run, router: jax.Array, experts: Experts, x: jax.Array, number: jax.Array | None
) -> jax.Array:
    """Add up what the chosen experts make of each token, by their weights: float32 `[B, T, D]` to `[B, T, D]`.

    No token is dropped and none depends on others: tokens of the same expert are only multiplied together, in tiles.

    Args:
      config: the model's sizes.
      run: how it is run.
      router: float32 `[E, D]`.
      experts: their weights.
      x: the inputs.
      number: the layer's place in a stack, int32 scalar, if it is of one.

    Source: Jiang et al., Mixtral of Experts, arXiv 2401.04088.
    """
    rows = x.reshape(-1, x.shape[-1])
    weights, chosen = route(config, run, router, rows)
    # A pair of a row and one of its experts is number row * k + i; here those of each expert stand together.
    k, pairs = config.n_active_experts, chosen.size
    order = jnp.argsort(chosen.reshape(-1)).astype(jnp.int32)
    counts = jnp.bincount(chosen.reshape(-1), length=config.n_experts).astype(jnp.int32)
    size = min(len(rows), max(_TILE, pairs // config.n_experts))
    tiles = -(-counts // size)
    last_pair, last_tile = jnp.cumsum(counts), jnp.cumsum(tiles)  # of each expert, the one behind it

    def multiply(tile: jax.Array, outputs: jax.Array) -> jax.Array:
        expert = jnp.sum(last_tile <= tile, dtype=jnp.int32)
        end = last_pair[expert]
        first = end - counts[expert] + size * (tile - last_tile[expert] + tiles[expert])
        places = first + jnp.arange(size, dtype=jnp.int32)
        here = order[jnp.minimum(places, pairs - 1)]
        at = expert if number is None else number * config.n_experts + expert
        gate, up = jnp.split(linear(_one(experts.w13, at, run), rows[here // k], run), 2, axis=-1)
        y = linear(_one(experts.w2, at, run), jax.nn.silu(gate) * up, run, fine=True)
        return outputs.at[jnp.where(places < end, here, pairs)].set(y, mode="drop")

    outputs = lax.fori_loop(0, last_tile[-1], multiply, jnp.zeros((pairs, x.shape[-1]), jnp.float32))
    y = jnp.sum(outputs.reshape(len(rows), k, -1) * weights[..., None], axis=1)
    return summed(y, run.axis).reshape(x.shape)


def _one(weights: Weight, number: jax.Array, run: Run) -> Linear:
    """Give one expert's matrix, which kernels take where it is."""
    if not run.kernels:
        # Without the barrier XLA's CPU back end widens the bfloat16 weights of all experts, before the loop.
        weights, number = lax.optimization_barrier((weights, number))  # type: ignore[no-untyped-call]
    return Linear(weights.at(number))


def route(config: Config, run: Run, router: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choose the k most probable experts of each of the `rows [R, D]`: their weights and numbers, `[R, k]` each."""
    probabilities = jax.nn.softmax(linear(Linear(Plain(router)), rows, run), axis=-1)
    weights, chosen = lax.top_k(probabilities, config.n_active_experts)
    if config.normalized_experts:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen
