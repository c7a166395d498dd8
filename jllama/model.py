"""The forward pass of the Llama family and of GPT-2: pure functions on pytrees.

`forward` is the whole model; `prefill` reads a batch of prompts with it, `step` one token a row.

Axis letters, those of `jax.nn.dot_product_attention`:
  B batch, T new tokens, S cache slots, N query heads, K key/value heads, G = N / K, H head width,
  D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllama import kernels
from jllama.config import Config
from jllama.rotary import rotary, rotate
from jllama.run import Run
from jllama.weights import Linear, Weight, layer_of, linear, take

XLA = Run()


class Norm(NamedTuple):
    """The scale of a norm, and the shift of GPT-2's."""

    weight: jax.Array  # float32 [D], or [H] for the norms of single heads
    bias: jax.Array | None = None  # float32 [D]


class Layer(NamedTuple):
    """The weights of one layer; or of n equal ones, every leaf with an axis n before the others.

    What a family doesn't have is None, and no leaf.
    """

    wqkv: Linear  # [N*H + 2*K*H, D]: the rows of wq, wk and wv; rotary pairs interleaved
    wo: Linear  # [D, N*H]
    w13: Linear  # [2*F, D]: the rows of w1 (gate) and w3 (up); [F, D] without a gate
    w2: Linear  # [D, F]
    attention_norm: Norm | None = None  # before and after the attention, and the same of the feed-forward
    attention_post_norm: Norm | None = None
    ffn_norm: Norm | None = None
    ffn_post_norm: Norm | None = None
    q_norm: Norm | None = None  # of each query head, or of all together
    k_norm: Norm | None = None

    @property
    def stacked(self) -> bool:
        """Whether these are several layers."""
        return len(self.wo.weight.shape) == 3

    def at(self, number: jax.Array) -> Layer:
        """Give one of several layers (int32 scalar)."""

        def leaf(x: Any) -> Any:
            return x.at(number) if isinstance(x, Weight) else layer_of(x, number)

        found: Layer = jax.tree.map(leaf, self, is_leaf=lambda x: isinstance(x, Weight))
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """A whole model: its weights, and as static data its sizes and how it is run."""

    embedding: Weight  # [V, D]
    layers: tuple[Layer, ...]  # one after another, each a single one or a stack
    norm: Norm
    config: Config = dataclasses.field(metadata={"static": True})
    output: Weight | None = None  # [V, D]; None: the embedding serves as the head too
    positions: jax.Array | None = None  # float32 [max_seq_len, D] where positions are learned
    run: Run = dataclasses.field(default=Run(), metadata={"static": True})


class Cache(NamedTuple):
    """Keys and values of past tokens, a pair of leaves for each element of `Params.layers`, in `run.kv_dtype`.

    A leaf is `[B*K, S, H]`, or `[n, B*K, S, H]` for a stack of n layers. It keeps no position: slot s of a row is
    valid if and only if s <= the row's position. Batch and heads share an axis because a batch axis of size 1 makes
    XLA's CPU back end copy the whole cache in every step.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


class _Tokens(NamedTuple):
    """Where the new tokens of a forward pass stand, as a layer sees it."""

    positions: jax.Array  # int32 [B, T]
    rotation: jax.Array | None  # [B, T, R/2, 2], cosine and sine, where positions are rotary
    window: int | None  # how many tokens each attends to


def init_cache(params: Params, batch: int, length: int) -> Cache:
    """Make an empty cache of `length` slots for `batch` rows."""
    config = params.config
    shape = (batch * config.n_kv_heads, length, config.head_dim)
    stacks = [layer.wo.weight.shape[:-2] for layer in params.layers]
    return Cache(*(tuple(jnp.zeros((*stack, *shape), params.run.kv_dtype) for stack in stacks) for _ in range(2)))


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
    last = jnp.clip(length - 1, 0, t - 1)
    # Padding is replaced by the row's own last token: an embedding that nobody asked for may hold NaN.
    tokens = jnp.take_along_axis(tokens, jnp.minimum(jnp.arange(t, dtype=jnp.int32)[None], last[:, None]), axis=1)
    hidden, cache = forward(params, cache, tokens, jnp.full(rows, start, jnp.int32))
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
    config, run = params.config, params.run
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    x = take(params.embedding, tokens, run)
    if params.positions is not None:
        x = x + params.positions[jnp.minimum(positions, config.max_seq_len - 1)]  # padding may lie beyond the table
    if config.embedding_scale != 1:
        x = x * config.embedding_scale
    keys, values, where = [], [], _places(config, positions)
    for number, (layer, k, v) in enumerate(zip(params.layers, cache.k, cache.v, strict=True)):
        x, k, v = (_stack if layer.stacked else _layer)(config, run, layer, k, v, x, where(number))
        keys.append(k)
        values.append(v)
    return norm(config, params.norm, x, run), Cache(tuple(keys), tuple(values))


def _places(config: Config, positions: jax.Array) -> Callable[[int], _Tokens]:
    """Tell how each layer sees tokens at `positions [B, T]`; a stack's layers all see them alike."""
    rotation = rotary(config, positions) if config.position == "rope" else None
    local = rotation
    if config.local_rope_theta:
        local = rotary(dataclasses.replace(config, rope_theta=config.local_rope_theta, rope_scaling=None), positions)

    def where(number: int) -> _Tokens:
        window = None if number in config.full_layers else config.sliding_window
        turned = None if number in config.unrotated_layers else rotation if window is None else local
        return _Tokens(positions, turned, window)

    return where


def _stack(
    config: Config, run: Run, layers: Layer, k: jax.Array, v: jax.Array, x: jax.Array, where: _Tokens
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the layers of a stack one after another: compiled once, however many there are."""

    def body(carry: tuple[jax.Array, jax.Array, jax.Array], number: jax.Array) -> tuple[Any, None]:
        x, k, v = carry
        return _layer(config, run, layers.at(number), k, v, x, where, number), None

    return lax.scan(body, (x, k, v), jnp.arange(len(k), dtype=jnp.int32))[0]


def _layer(
    config: Config,
    run: Run,
    layer: Layer,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array,
    where: _Tokens,
    number: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run one layer over `x [B, T, D]`; `number` is its place in the stack that the cache is of, if it is of one."""

    def scaled(x: jax.Array) -> jax.Array:
        return x if config.residual_scale == 1 else x * config.residual_scale

    a, k, v = attention(config, run, layer, k, v, norm(config, layer.attention_norm, x, run), where, number)
    after = x + scaled(norm(config, layer.attention_post_norm, a, run))
    f = feed_forward(config, run, layer, norm(config, layer.ffn_norm, x if config.parallel else after, run))
    return after + scaled(norm(config, layer.ffn_post_norm, f, run)), k, v


def head(params: Params, hidden: jax.Array) -> jax.Array:
    """Turn hidden states `[..., D]` into float32 logits `[..., V]`."""
    logits = linear(Linear(params.embedding if params.output is None else params.output), hidden, params.run)
    if params.run.axis is not None:
        logits = lax.all_gather(logits, params.run.axis, axis=logits.ndim - 1, tiled=True)
        logits = logits[..., : params.config.vocab_size]  # without the rows that fill up the last part
    if params.config.logit_scale != 1:
        logits = logits * params.config.logit_scale
    return capped(logits, params.config.logit_cap)


def capped(x: jax.Array, cap: float) -> jax.Array:
    """Bound `x` smoothly by `cap`, unless that is 0. Source: Gemma 2, arXiv 2408.00118."""
    return cap * jnp.tanh(x / cap) if cap else x


def attention(
    config: Config,
    run: Run,
    layer: Layer,
    k_cache: jax.Array,
    v_cache: jax.Array,
    x: jax.Array,
    where: _Tokens,
    number: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write the keys and values of `x [B, T, D]` to the cache and attend to every slot up to each token's own.

    Returns:
      The attention's output `[B, T, D]` and the two leaves of the cache.
    """
    b, t, _ = x.shape
    n_kv, h = config.n_kv_heads, config.head_dim
    q, k, v = jnp.split(linear(layer.wqkv, x, run, fine=True), (config.q_dim, config.q_dim + config.kv_dim), axis=-1)
    if config.width_norms:
        q, k = norm(config, layer.q_norm, q, run), norm(config, layer.k_norm, k, run)
    q, k, v = q.reshape(b, t, config.n_heads, h), k.reshape(b, t, n_kv, h), v.reshape(b, t, n_kv, h)
    if config.head_norms:
        q, k = norm(config, layer.q_norm, q, run), norm(config, layer.k_norm, k, run)
    if where.rotation is not None:
        q, k = rotate(q, where.rotation[:, :, None]), rotate(k, where.rotation[:, :, None])

    in_kernel = run.kernels and kernels.has("attention") and not config.attention_cap
    attend = kernels.attend if in_kernel else functools.partial(_attend, cap=config.attention_cap)
    scale = config.attention_scale or h**-0.5
    out, k_cache, v_cache = attend(
        q, k, v, k_cache, v_cache, where.positions[:, 0], number, window=where.window, scale=scale
    )
    return linear(layer.wo, out.reshape(b, t, -1), run, divided=True), k_cache, v_cache


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    first: jax.Array,
    number: jax.Array | None,
    *,
    window: int | None,
    scale: float,
    cap: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Do what `kernels.attend` does, by XLA, with products of queries and keys bounded by `cap` unless it is 0."""
    b, t, n, h = q.shape
    n_kv = k.shape[2]
    positions, first = first[:, None] + jnp.arange(t, dtype=jnp.int32)[None], jnp.repeat(first, n_kv)
    k, v = k.swapaxes(1, 2).reshape(b * n_kv, t, h), v.swapaxes(1, 2).reshape(b * n_kv, t, h)
    # The G query heads of a key head are rows of one product, beside the T tokens.
    q = q.reshape(b, t, n_kv, -1, h).transpose(0, 2, 1, 3, 4).reshape(b * n_kv, -1, h) * scale
    k_cache, v_cache = _write(k_cache, k, first, number), _write(v_cache, v, first, number)
    k, v = layer_of(k_cache, number).astype(q.dtype), layer_of(v_cache, number).astype(q.dtype)
    scores = jnp.einsum("nqh,nsh->nqs", q, k, precision=lax.Precision.HIGHEST)
    scores = capped(scores, cap).reshape(b, n_kv, t, -1, k.shape[1])
    slots = lax.broadcasted_iota(jnp.int32, scores.shape, 4)
    here = positions[:, None, :, None, None]
    visible = slots <= here
    if window is not None:
        visible &= slots > here - window
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).reshape(*q.shape[:2], -1)
    out = jnp.einsum("nqs,nsh->nqh", weights, v, precision=lax.Precision.HIGHEST)
    return out.reshape(b, n_kv, t, -1, h).transpose(0, 2, 1, 3, 4).reshape(b, t, n, h), k_cache, v_cache


def _write(cache: jax.Array, new: jax.Array, first: jax.Array, number: jax.Array | None) -> jax.Array:
    """Write `new [B*K, T, H]` into `cache [B*K, S, H]`, row n at slots `first[n] .. first[n] + T - 1`.

    With `number` into that layer of a cache `[n, B*K, S, H]`.
    """
    new = new.astype(cache.dtype)
    if number is not None:
        rows = lax.broadcasted_iota(jnp.int32, new.shape[:2], 0)
        slots = first[:, None] + lax.broadcasted_iota(jnp.int32, new.shape[:2], 1)
        return cache.at[number, rows, slots].set(new, mode="drop")
    # Vmapped, this compiles to a scatter: updated in place inside the decoding loop, each row at its own position.
    return jax.vmap(lambda c, x, i: lax.dynamic_update_slice(c, x, (i, jnp.int32(0))))(cache, new, first)


def feed_forward(config: Config, run: Run, layer: Layer, x: jax.Array) -> jax.Array:
    """SwiGLU, `w2 (silu(w1 x) * w3 x)`, or without a gate `w2 gelu(w1 x)`: `[B, T, D]` to `[B, T, D]`.

    Sources: Shazeer, arXiv 2002.05202; Hendrycks and Gimpel, arXiv 1606.08415, the tanh form.
    """
    hidden, up = linear(layer.w13, x, run), None
    if config.gated:
        hidden, up = jnp.split(hidden, 2, axis=-1)
    is_exact = config.activation == "gelu_erf"
    hidden = jax.nn.silu(hidden) if config.activation == "silu" else jax.nn.gelu(hidden, approximate=not is_exact)
    return linear(layer.w2, hidden if up is None else hidden * up, run, fine=True, divided=True)


def norm(config: Config, scale: Norm | None, x: jax.Array, run: Run = XLA) -> jax.Array:
    """Bring the last axis of `x [..., D]` to a root mean square (or a standard deviation) of 1, then scale it.

    Without a scale there is no norm.

    Sources: Zhang and Sennrich, arXiv 1910.07467; Ba et al., arXiv 1607.06450.
    """
    if scale is None:
        return x
    if config.norm == "layer":
        x = x - _mean(run, x)
    x = x * lax.rsqrt(_mean(run, x * x) + config.norm_eps)
    x = x * scale.weight.reshape((1,) * (x.ndim - 1) + (-1,))
    return x if scale.bias is None else x + scale.bias.reshape((1,) * (x.ndim - 1) + (-1,))


def _mean(run: Run, x: jax.Array) -> jax.Array:
    """Give the mean of the last axis of `x [..., D]`, `[..., 1]`."""
    if not (run.kernels and kernels.has("float32")):
        return jnp.mean(x, axis=-1, keepdims=True)
    # XLA adds in an order that depends on how many rows there are; a product with one output doesn't.
    d = x.shape[-1]
    return kernels.dot(jnp.full((1, d), 1 / d, jnp.float32), x.reshape(-1, d)).reshape(*x.shape[:-1], 1)
