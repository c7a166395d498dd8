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
from jax import lax

from jllama.config import Config, RopeScaling
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
