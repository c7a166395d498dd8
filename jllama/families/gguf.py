"""What most families have in common in the keys and tensors of GGUF files.

Names: docs/gguf.md in ggml-org/ggml; gguf-py/gguf/constants.py in ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

from jllama.families import ropes
from jllama.families.fields import Fields

NAMES = {
    "tok_embeddings": "token_embd",
    "position_embeddings": "position_embd",
    "layers.{}.attention_norm": "blk.{}.attn_norm",
    "layers.{}.attention_post_norm": "blk.{}.post_attention_norm",
    "layers.{}.attention.wq": "blk.{}.attn_q",
    "layers.{}.attention.wk": "blk.{}.attn_k",
    "layers.{}.attention.wv": "blk.{}.attn_v",
    "layers.{}.attention.wo": "blk.{}.attn_output",
    "layers.{}.attention.q_norm": "blk.{}.attn_q_norm",
    "layers.{}.attention.k_norm": "blk.{}.attn_k_norm",
    "layers.{}.ffn_norm": "blk.{}.ffn_norm",
    "layers.{}.ffn_post_norm": "blk.{}.post_ffw_norm",
    "layers.{}.feed_forward.w1": "blk.{}.ffn_gate",
    "layers.{}.feed_forward.w2": "blk.{}.ffn_down",
    "layers.{}.feed_forward.w3": "blk.{}.ffn_up",
    "layers.{}.feed_forward.router": "blk.{}.ffn_gate_inp",
    "layers.{}.feed_forward.experts.w1": "blk.{}.ffn_gate_exps",
    "layers.{}.feed_forward.experts.w2": "blk.{}.ffn_down_exps",
    "layers.{}.feed_forward.experts.w3": "blk.{}.ffn_up_exps",
    "norm": "output_norm",
    "output": "output",
}
FUSED = {f"layers.{{}}.attention.w{x}": "blk.{}.attn_qkv" for x in "qkv"}


# Keys that say nothing about what is computed, or what the tensors say too.
_HARMLESS = (
    *("vocab_size", "tensor_data_layout", "pooling_type", "expert_used_count", "rope.scaling.finetuned"),
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
)


def sizes(fields: Fields, *, has_experts: bool = False) -> dict[str, Any]:
    """Read the sizes that all families have, and refuse what none has; experts are for families that have them."""
    for name in _HARMLESS:
        fields.peek(name)
    n_layers = fields.get("block_count", int)
    n_heads = fields.per_layer("attention.head_count", n_layers)
    values = {
        "dim": fields.get("embedding_length", int),
        "hidden_dim": fields.per_layer("feed_forward_length", n_layers),
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": fields.per_layer("attention.head_count_kv", n_layers, n_heads),
        "vocab_size": fields.get("vocab_size", int),
        "max_seq_len": fields.get("context_length", int),
        "head_dim": fields.get("attention.key_length", int, 0),
    }
    if not fields.problems:
        fields.only("attention.value_length", values["head_dim"] or values["dim"] // max(n_heads, 1))
    fields.only("attention.causal", True)
    if not has_experts:
        fields.only("expert_count", 0)
    return values


def decoder(
    fields: Fields, *, is_partial: bool = False, norm: str = "rms", has_experts: bool = False
) -> dict[str, Any]:
    """Read what nearly all families have: sizes, epsilon of the norms and rotary positions.

    Heads may be rotated in part if `is_partial`; `norm` is that of `Config`.
    """
    eps = "attention.layer_norm_epsilon" if norm == "layer" else "attention.layer_norm_rms_epsilon"
    values = sizes(fields, has_experts=has_experts) | {"norm_eps": fields.get(eps, float)}
    return ropes.from_gguf(fields, values, is_partial=is_partial)


def windowed(fields: Fields, *, has_experts: bool = False) -> dict[str, Any]:
    """Read what `decoder` does, and the window of all layers."""
    window = fields.get("attention.sliding_window", int, 0) or None
    return decoder(fields, has_experts=has_experts) | {"sliding_window": window}


def experts(fields: Fields, *, normalized: bool) -> dict[str, Any]:
    """Read how many experts there are, 0 where the file doesn't say, and how many of them a token takes.

    Whether their weights are `normalized` is llama.cpp's rule for the architecture.
    """
    count = fields.get("expert_count", int, 0)
    active = fields.get("expert_used_count", int, None if count else 0)
    fields.only("expert_weights_norm", normalized)
    return {"n_experts": count, "n_active_experts": active, "normalized_experts": normalized and count > 0}
