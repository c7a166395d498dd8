"""The forward pass of the Llama family and of GPT-2: pure functions on pytrees.

`forward` is the whole model; `prefill` reads a batch of prompts with it, `step` one token a row.

Axis letters, those of `jax.nn.dot_product_attention`:
  B batch, T new tokens, S cache slots, N query heads, K key/value heads, G = N / K, H head width,
  D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllama import kernels
from jllama.config import Config
from jllama.quant import Linear, Weight, linear, take


class Norm(NamedTuple):
    """The scale of a norm, and the shift of GPT-2's."""

    weight: jax.Array  # float32 [D], or [H] for the norms of single heads
    bias: jax.Array | None = None  # float32 [D]


class Layer(NamedTuple):
    """The weights of one layer. What a family doesn't have is None, and no leaf."""

    attention_norm: Norm
    wqkv: Linear  # [N*H + 2*K*H, D]: the rows of wq, wk and wv; rotary pairs interleaved
    wo: Linear  # [D, N*H]
    ffn_norm: Norm
    w13: Linear  # [2*F, D]: the rows of w1 (gate) and w3 (up); GPT-2: [F, D]
    w2: Linear  # [D, F]
    q_norm: Norm | None = None  # of each query head, as Qwen3 has it
    k_norm: Norm | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """A whole model: its weights, and its sizes as static data."""

    embedding: Weight  # [V, D]
    layers: tuple[Layer, ...]
    norm: Norm
    output: Weight | None  # [V, D]; None: the embedding serves as the head too
    config: Config = dataclasses.field(metadata={"static": True})
    positions: jax.Array | None = None  # float32 [max_seq_len, D] where positions are learned


class Cache(NamedTuple):
    """Keys and values of past tokens, one pair of leaves a layer, each `[B*K, S, H]` in `config.kv_dtype`.

    It keeps no position: slot s of a row is valid if and only if s <= the row's position. Batch and heads share an
    axis because a batch axis of size 1 makes XLA's CPU back end copy the whole cache in every step.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def init_cache(params: Params, batch: int, length: int) -> Cache:
    """Make an empty cache of `length` slots for `batch` rows."""
    config = params.config
    shape = (batch * config.n_kv_heads, length, config.head_dim)
    leaves = tuple(jnp.zeros(shape, config.kv_dtype) for _ in range(2 * config.n_layers))
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
    chex.assert_shape(length, (rows,))
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
    chex.assert_equal_shape([token, pos])
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
    x = take(params.embedding, tokens, config.axis)
    if params.positions is not None:
        x = x + params.positions[jnp.minimum(positions, config.max_seq_len - 1)]  # padding may lie beyond the table
    rotation = rotary(config, positions) if config.position == "rope" else None
    keys, values = [], []
    for layer, k, v in zip(params.layers, cache.k, cache.v, strict=True):
        a, k, v = attention(config, layer, k, v, norm(config, layer.attention_norm, x), positions, rotation)
        x = x + a
        x = x + feed_forward(config, layer, norm(config, layer.ffn_norm, x))
        keys.append(k)
        values.append(v)
    return norm(config, params.norm, x), Cache(tuple(keys), tuple(values))


def head(params: Params, hidden: jax.Array) -> jax.Array:
    """Turn hidden states `[..., D]` into float32 logits `[..., V]`."""
    weight = Linear(params.embedding if params.output is None else params.output)
    logits = linear(weight, hidden, use_native=params.config.native)
    if params.config.axis is not None:
        logits = lax.all_gather(logits, params.config.axis, axis=logits.ndim - 1, tiled=True)
        logits = logits[..., : params.config.vocab_size]  # without the rows that fill up the last part
    return logits


def attention(
    config: Config,
    layer: Layer,
    k_cache: jax.Array,
    v_cache: jax.Array,
    x: jax.Array,
    positions: jax.Array,
    rotation: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write the keys and values of `x [B, T, D]` to the cache and attend to every slot up to each token's own.

    Returns:
      The attention's output `[B, T, D]` and the two cache leaves `[B*K, S, H]`.
    """
    b, t, _ = x.shape
    n_kv, h = config.n_kv_heads, config.head_dim
    g = config.n_heads // n_kv
    q, k, v = jnp.split(
        linear(layer.wqkv, x, use_native=config.native), (config.q_dim, config.q_dim + config.kv_dim), axis=-1
    )
    q, k, v = q.reshape(b, t, n_kv * g, h), k.reshape(b, t, n_kv, h), v.reshape(b, t, n_kv, h)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = norm(config, layer.q_norm, q), norm(config, layer.k_norm, k)
    if rotation is not None:
        q, k = rotate(q, rotation[:, :, None]), rotate(k, rotation[:, :, None])

    if config.native and kernels.has("attention"):
        out, k_cache, v_cache = kernels.attend(
            q, k, v, k_cache, v_cache, positions[:, 0], window=config.sliding_window, scale=h**-0.5
        )
        out = out.reshape(b, t, -1)
        return linear(layer.wo, out, axis=config.axis, use_native=config.native), k_cache, v_cache

    first = jnp.repeat(positions[:, 0], n_kv)
    k, v = k.swapaxes(1, 2).reshape(b * n_kv, t, h), v.swapaxes(1, 2).reshape(b * n_kv, t, h)
    # The G query heads of a key head are rows of one product, beside the T tokens.
    q = q.reshape(b, t, n_kv, g, h).transpose(0, 2, 1, 3, 4).reshape(b * n_kv, t * g, h) * (h**-0.5)
    k_cache, v_cache = _write(k_cache, k, first), _write(v_cache, v, first)
    out = _attend(config, q, k_cache, v_cache, positions)
    out = out.reshape(b, n_kv, t, g, h).transpose(0, 2, 1, 3, 4).reshape(b, t, -1)
    return linear(layer.wo, out, axis=config.axis, use_native=config.native), k_cache, v_cache


def _attend(config: Config, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Attend with `q [B*K, T*G, H]` to the slots of `k` and `v [B*K, S, H]` that each of `positions [B, T]` sees."""
    b, t = positions.shape
    scores = jnp.einsum("nqh,nsh->nqs", q, k.astype(q.dtype), precision=lax.Precision.HIGHEST)
    scores = scores.reshape(b, config.n_kv_heads, t, -1, k.shape[1])
    slots = lax.broadcasted_iota(jnp.int32, scores.shape, 4)
    here = positions[:, None, :, None, None]
    visible = slots <= here
    if config.sliding_window is not None:
        visible &= slots > here - config.sliding_window
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).reshape(*q.shape[:2], -1)
    return jnp.einsum("nqs,nsh->nqh", weights, v.astype(q.dtype), precision=lax.Precision.HIGHEST)


def _write(cache: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """Write `new [B*K, T, H]` into `cache [B*K, S, H]`, row n at slots `first[n] .. first[n] + T - 1`."""
    # Vmapped, this compiles to a scatter: updated in place inside the decoding loop, each row at its own position.
    return jax.vmap(lambda c, x, i: lax.dynamic_update_slice(c, x, (i, jnp.int32(0))))(
        cache, new.astype(cache.dtype), first
    )


def feed_forward(config: Config, layer: Layer, x: jax.Array) -> jax.Array:
    """SwiGLU, `w2 (silu(w1 x) * w3 x)`, or GPT-2's `w2 gelu(w1 x)`: `[B, T, D]` to `[B, T, D]`.

    Sources: Shazeer, arXiv 2002.05202; Hendrycks and Gimpel, arXiv 1606.08415, the tanh form.
    """
    hidden = linear(layer.w13, x, use_native=config.native)
    if config.activation == "gelu":
        hidden = jax.nn.gelu(hidden, approximate=True)
    else:
        gate, up = jnp.split(hidden, 2, axis=-1)
        hidden = jax.nn.silu(gate) * up
    # A few of the inputs are far larger than the others.
    return linear(layer.w2, hidden, fine=True, axis=config.axis, use_native=config.native)


def norm(config: Config, scale: Norm, x: jax.Array) -> jax.Array:
    """Bring the last axis of `x [..., D]` to a root mean square (or a standard deviation) of 1, then scale it.

    Sources: Zhang and Sennrich, arXiv 1910.07467; Ba et al., arXiv 1607.06450.
    """
    if config.norm == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
    x = x * scale.weight.reshape((1,) * (x.ndim - 1) + (-1,))
    return x if scale.bias is None else x + scale.bias.reshape((1,) * (x.ndim - 1) + (-1,))


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
