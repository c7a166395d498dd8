"""The one table of a model's tensors: their names, shapes, and what becomes of each.

Reading, saving, dividing over a mesh, random weights and counting are loops over `tensors(config)`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container
from typing import Literal, NamedTuple

from jllama.config import Config

# How a tensor is divided over the devices of a model: by rows (query heads, key heads, the width of the feed-forward,
# the vocabulary), by columns ("inputs"), or not at all.
Divided = Literal["query heads", "key heads", "width", "vocabulary", "inputs", "not"]


class Tensor(NamedTuple):
    """A tensor of a model, or one of each layer."""

    name: str  # as in Meta's checkpoints; `{}` stands for the number of the layer
    shape: tuple[int, ...]  # [out, in] of a matrix, of those of all experts one below the other
    leaf: str  # the path in `Params`; tensors of one leaf lie below each other in it, in this order
    divided: Divided
    matrix: bool = True  # kept in the model's storage form; else float32
    rotary: bool = False  # its rows are rotary pairs, neighbours in each head
    experts: int = 0  # of how many experts it has a matrix each; 0: it is no expert's

    def names(self, config: Config) -> list[str]:
        """Return its name, or that of each layer's."""
        return [self.name.format(i) for i in range(config.n_layers)] if self.in_layers else [self.name]

    @property
    def is_norm(self) -> bool:
        """Whether it is the weight of a norm."""
        return self.name.endswith("norm.weight")

    @property
    def in_layers(self) -> bool:
        """Whether each layer has one."""
        return "{}" in self.name


def tensors(config: Config) -> tuple[Tensor, ...]:
    """List the tensors of a model."""
    c = config
    d, f, v = c.dim, c.hidden_dim, c.vocab_size

    def norm(name: str, leaf: str, width: int = d, *, rotary: bool = False) -> list[Tensor]:
        weight = Tensor(f"{name}.weight", (width,), f"{leaf}.weight", "not", matrix=False, rotary=rotary)
        bias = Tensor(f"{name}.bias", (width,), f"{leaf}.bias", "not", matrix=False)
        return [weight, bias] if c.norm_bias else [weight]

    def expert(name: str, leaf: str, shape: tuple[int, int], divided: Divided) -> Tensor:
        rows = c.n_experts * shape[0]
        return Tensor(f"{ffn}.experts.{name}.weight", (rows, shape[1]), leaf, divided, experts=c.n_experts)

    def linear(name: str, leaf: str, shape: tuple[int, int], divided: Divided, bias: bool) -> list[Tensor]:
        rotary = c.position == "rope" and name.endswith(("wq", "wk"))
        weight = Tensor(f"{name}.weight", shape, f"{leaf}.weight", divided, rotary=rotary)
        rows: Divided = "not" if divided == "inputs" else divided  # a bias is added to the sum over all devices
        added = Tensor(f"{name}.bias", shape[:1], f"{leaf}.bias", rows, matrix=False, rotary=rotary)
        return [weight, added] if bias else [weight]

    attention, ffn = "layers.{}.attention", "layers.{}.feed_forward"
    found = [Tensor("tok_embeddings.weight", (v, d), "embedding", "vocabulary")]
    if c.position == "learned":
        found.append(Tensor("position_embeddings.weight", (c.max_seq_len, d), "positions", "not", matrix=False))
    before, after = c.norms != "after", c.norms != "before"
    found += norm("layers.{}.attention_norm", "layers.attention_norm") if before else []
    found += linear(f"{attention}.wq", "layers.wqkv", (c.q_dim, d), "query heads", c.qkv_bias)
    found += linear(f"{attention}.wk", "layers.wqkv", (c.kv_dim, d), "key heads", c.qkv_bias)
    found += linear(f"{attention}.wv", "layers.wqkv", (c.kv_dim, d), "key heads", c.qkv_bias)
    found += linear(f"{attention}.wo", "layers.wo", (d, c.q_dim), "inputs", c.wo_bias)
    if c.head_norms or c.width_norms:
        for name, width in (("q_norm", c.q_dim), ("k_norm", c.kv_dim)):
            width = width if c.width_norms else c.head_dim
            found += norm(f"{attention}.{name}", f"layers.{name}", width, rotary=True)
    found += norm("layers.{}.attention_post_norm", "layers.attention_post_norm") if after else []
    found += norm("layers.{}.ffn_norm", "layers.ffn_norm") if before else []
    if c.n_experts:
        found.append(Tensor(f"{ffn}.router.weight", (c.n_experts, d), "layers.router", "not", matrix=False))
        found.append(expert("w1", "layers.experts.w13", (f, d), "width"))
        found.append(expert("w3", "layers.experts.w13", (f, d), "width"))
        found.append(expert("w2", "layers.experts.w2", (d, f), "inputs"))
    if c.shared_dim:
        found.append(Tensor(f"{ffn}.shared_gate.weight", (d,), "layers.shared_gate", "not", matrix=False))
    if width := c.shared_dim if c.n_experts else f:
        found += linear(f"{ffn}.w1", "layers.w13", (width, d), "width", c.ffn_bias)
        found += linear(f"{ffn}.w3", "layers.w13", (width, d), "width", c.ffn_bias) if c.gated else []
        found += linear(f"{ffn}.w2", "layers.w2", (d, width), "inputs", c.ffn_bias)
    found += norm("layers.{}.ffn_post_norm", "layers.ffn_post_norm") if after else []
    found += norm("norm", "norm")
    if not c.tied:
        found.append(Tensor("output.weight", (v, d), "output", "vocabulary"))
    return tuple(found)


def leaves(config: Config) -> dict[str, list[Tensor]]:
    """Group the tensors of a model by the leaf that they make up."""
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors(config):
        found.setdefault(tensor.leaf, []).append(tensor)
    return found


def fitted(config: Config, names: Container[str]) -> Config:
    """Set the switches that a file says only by having some tensors: biases, norms of heads, a head of its own."""
    at = "layers.0.attention"
    return dataclasses.replace(
        config,
        qkv_bias=any(f"{at}.{name}.bias" in names for name in ("wq", "wk", "wv")),
        wo_bias=f"{at}.wo.bias" in names,
        head_norms=not config.width_norms and any(f"{at}.{name}.weight" in names for name in ("q_norm", "k_norm")),
        tied="output.weight" not in names,
    )


def counts(config: Config) -> tuple[int, int]:
    """Count the numbers that a step multiplies: in all layers' matrices, of chosen experts alone, and in the head."""
    layers = 0
    for t in tensors(config):
        if t.matrix and t.in_layers:
            layers += (
                math.prod(t.shape) * config.n_active_experts // config.n_experts if t.experts else math.prod(t.shape)
            )
    return layers * config.n_layers, config.vocab_size * config.dim
