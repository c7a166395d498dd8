"""The forward pass of a Llama: pure functions on pytrees.

`forward` is the whole model; `prefill` reads a batch of prompts with it, `step` one token a row.

Axis letters, those of `jax.nn.dot_product_attention`:
  B batch, T new tokens, S cache slots, N query heads, K key/value heads, G = N / K, H head width,
  D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllama.config import Config
from jllama.quant import Weight, linear, take


class Layer(NamedTuple):
    """The weights of one layer."""

    attention_norm: jax.Array  # float32 [D]
    wqkv: Weight  # [N*H + 2*K*H, D]: the rows of wq, wk and wv; rotary pairs interleaved
    wo: Weight  # [D, N*H]
    ffn_norm: jax.Array  # float32 [D]
    w13: Weight  # [2*F, D]: the rows of w1 (gate) and w3 (up)
    w2: Weight  # [D, F]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """A whole model: its weights, and its sizes as static data."""

    embedding: Weight  # [V, D]
    layers: tuple[Layer, ...]
    norm: jax.Array  # float32 [D]
    output: Weight | None  # [V, D]; None: the embedding serves as the head too
    config: Config = dataclasses.field(metadata={"static": True})


class Cache(NamedTuple):
    """Keys and values of past tokens, one pair of leaves a layer, each float32 `[B*K, S, H]`.

    It keeps no position: slot s of a row is valid if and only if s <= the row's position. Batch and heads share an
    axis because a batch axis of size 1 makes XLA's CPU back end copy the whole cache in every step.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def init_cache(params: Params, batch: int, length: int) -> Cache:
    """Make an empty cache of `length` slots for `batch` rows."""
    config = params.config
    shape = (batch * config.n_kv_heads, length, config.head_dim)
    leaves = tuple(jnp.zeros(shape, jnp.float32) for _ in range(2 * config.n_layers))
    return Cache(k=leaves[: config.n_layers], v=leaves[config.n_layers :])


def prefill(
    params: Params, cache: Cache, tokens: jax.Array, length: jax.Array, start: jax.Array | int = 0
) -> tuple[jax.Array, Cache]:
    """Read a block of right-padded prompts into the cache.

    Args:
      params: the model.
      cache: with at least `start + T` slots; those before `start` are filled.
      tokens: int32 `[B, T]`, the ids at positions `start .. start + T - 1`; anything after a row's end.
      length: int32 `[B]`, how many of a row's T tokens are real, 1 to T.
      start: int32 scalar, the position of the block's first token.

    Returns:
      float32 logits `[B, V]` after each row's last real token, and the cache with slots `start .. start + T - 1`
      written. Slots past a row's end hold padding; `step` overwrites each before it is ever attended to.
    """
    rows, t = tokens.shape
    hidden, cache = forward(params, cache, tokens, jnp.full(rows, start, jnp.int32))
    last = jnp.clip(length - 1, 0, t - 1)
    return head(params, jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]), cache


def step(params: Params, cache: Cache, token: jax.Array, pos: jax.Array) -> tuple[jax.Array, Cache]:
    """Read one token a row and predict the next.

    Args:
      params: the model.
      cache: its slots before `pos` are filled.
      token: int32 `[B]`.
      pos: int32 `[B]`, each row's own position, below the number of slots.

    Returns:
      float32 logits `[B, V]`, and the cache with slot `pos` of each row written.
    """
    hidden, cache = forward(params, cache, token[:, None], pos)
    return head(params, hidden[:, 0]), cache


def forward(params: Params, cache: Cache, tokens: jax.Array, start: jax.Array) -> tuple[jax.Array, Cache]:
    """Run the layers over T new tokens a row, at each row's own position.

    Args:
      params: the model.
      cache: its slots before `start` are filled; row b needs `start[b] + T` slots.
      tokens: int32 `[B, T]`.
      start: int32 `[B]`, the position of each row's first new token.

    Returns:
      float32 hidden states `[B, T, D]` after the last norm, and the cache with the new slots written.
    """
    config = params.config
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    rotation = rotary(config, positions)
    x = take(params.embedding, tokens)
    keys, values = [], []
    for layer, k, v in zip(params.layers, cache.k, cache.v, strict=True):
        a, k, v = attention(config, layer, k, v, rms_norm(x, layer.attention_norm, config.norm_eps), positions, rotation)
        x = x + a
        x = x + feed_forward(layer, rms_norm(x, layer.ffn_norm, config.norm_eps))
        keys.append(k)
        values.append(v)
    return rms_norm(x, params.norm, config.norm_eps), Cache(tuple(keys), tuple(values))


def head(params: Params, hidden: jax.Array) -> jax.Array:
    """Turn hidden states `[..., D]` into float32 logits `[..., V]`."""
    return linear(params.embedding if params.output is None else params.output, hidden)


def attention(
    config: Config,
    layer: Layer,
    k_cache: jax.Array,
    v_cache: jax.Array,
    x: jax.Array,
    positions: jax.Array,
    rotation: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write the keys and values of `x [B, T, D]` to the cache and attend to every slot up to each token's own.

    Returns:
      The attention's output `[B, T, D]` and the two cache leaves `[B*K, S, H]`.
    """
    b, t, _ = x.shape
    n_kv, h = config.n_kv_heads, config.head_dim
    g = config.n_heads // n_kv
    q, k, v = jnp.split(linear(layer.wqkv, x), (config.q_dim, config.q_dim + config.kv_dim), axis=-1)
    q = rotate(q.reshape(b, t, n_kv, g, h), rotation[:, :, None, None])
    k = rotate(k.reshape(b, t, n_kv, h), rotation[:, :, None])
    v = v.reshape(b, t, n_kv, h)

    first = jnp.repeat(positions[:, 0], n_kv)
    k_cache = _write(k_cache, k.swapaxes(1, 2).reshape(b * n_kv, t, h), first)
    v_cache = _write(v_cache, v.swapaxes(1, 2).reshape(b * n_kv, t, h), first)

    # The G query heads of a key head are rows of one product, beside the T tokens.
    q = q.transpose(0, 2, 1, 3, 4).reshape(b * n_kv, t * g, h) * (h**-0.5)
    scores = jnp.einsum("nqh,nsh->nqs", q, k_cache, precision=lax.Precision.HIGHEST)
    scores = scores.reshape(b, n_kv, t, g, -1)
    slots = lax.broadcasted_iota(jnp.int32, scores.shape, 4)
    scores = jnp.where(slots <= positions[:, None, :, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).reshape(b * n_kv, t * g, -1)
    out = jnp.einsum("nqs,nsh->nqh", weights, v_cache, precision=lax.Precision.HIGHEST)
    out = out.reshape(b, n_kv, t, g, h).transpose(0, 2, 1, 3, 4).reshape(b, t, -1)
    return linear(layer.wo, out), k_cache, v_cache


def _write(cache: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """Write `new [B*K, T, H]` into `cache [B*K, S, H]`, row n at slots `first[n] .. first[n] + T - 1`."""
    # Vmapped, this compiles to a scatter: updated in place inside the decoding loop, each row at its own position.
    return jax.vmap(lambda c, x, i: lax.dynamic_update_slice(c, x, (i, jnp.int32(0))))(cache, new, first)


def feed_forward(layer: Layer, x: jax.Array) -> jax.Array:
    """SwiGLU: `w2 (silu(w1 x) * w3 x)`, `[B, T, D]` to `[B, T, D]`. Source: Shazeer, arXiv 2002.05202."""
    gate, up = jnp.split(linear(layer.w13, x), 2, axis=-1)
    return linear(layer.w2, jax.nn.silu(gate) * up)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scale `x [..., D]` to a root mean square of 1, then by `weight [D]`. Source: Zhang, arXiv 1910.07467."""
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight.reshape((1,) * (x.ndim - 1) + (-1,))


def rotary(config: Config, positions: jax.Array) -> jax.Array:
    """Compute the rotation of each pair at `positions [B, T]`: `[B, T, H/2, 2]`, cosine and sine.

    Source: Su, RoFormer, arXiv 2104.09864; pairs of neighbours, as in Meta's files.
    """
    angles = positions.astype(jnp.float32)[..., None] * rotary_frequencies(config)[None, None]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def rotary_frequencies(config: Config) -> np.ndarray:
    """Compute the angle by which each of the H/2 pairs turns a position, float32, from float64."""
    frequency = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_max_seq_len * frequency / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = frequency * (keep + (1.0 - keep) / scaling.factor)
    return frequency.astype(np.float32)


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotate the neighbouring pairs of `x [..., H]` by `rotation [..., H/2, 2]`."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    cos, sin = rotation[..., 0], rotation[..., 1]
    even, odd = pairs[..., 0], pairs[..., 1]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
