"""Qwen 2, 2.5 and 3, and those of them with experts."""

from __future__ import annotations

from typing import Any

from jllama.config import Config
from jllama.families import gguf, huggingface
from jllama.families.family import GGUF, HuggingFace, Layout
from jllama.families.fields import Fields

_FIRST_WINDOW = 28  # transformers' default of max_window_layers


def _qwen2(fields: Fields) -> dict[str, Any]:
    values = huggingface.decoder(fields)
    first = fields.get("max_window_layers", int, _FIRST_WINDOW)
    slides = fields.get("use_sliding_window", bool, False)
    window = huggingface.window(fields, values["n_layers"], first=first) if slides else None
    return values | {"sliding_window": window, "qkv_bias": True}


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias = fields.get("attention_bias", bool, False)
    return _qwen2(fields) | {"qkv_bias": bias, "wo_bias": bias, "head_norms": True}


def _experts(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [])
    # transformers 5 has the second name for Qwen 3's.
    count = fields.agree({name: fields.peek(name) for name in ("num_experts", "num_local_experts")})
    return values | {
        "hidden_dim": fields.get("moe_intermediate_size", int),
        "n_experts": fields.within("", {"num_experts": count}).get("num_experts", int),
        "n_active_experts": fields.get("num_experts_per_tok", int),
        "normalized_experts": fields.get("norm_topk_prob", bool, False),
    }


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    return _experts(fields, _qwen2(fields)) | {
        "qkv_bias": fields.get("qkv_bias", bool, True),
        "shared_dim": fields.get("shared_expert_intermediate_size", int),
    }


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    return _experts(fields, _qwen3(fields))


def _gguf2_moe(fields: Fields) -> dict[str, Any]:
    values = _gguf_experts(fields, normalized=False)
    return values | {"shared_dim": fields.get("expert_shared_feed_forward_length", int)}


def _gguf3_moe(fields: Fields) -> dict[str, Any]:
    return _gguf_experts(fields, normalized=True)


def _gguf_experts(fields: Fields, *, normalized: bool) -> dict[str, Any]:
    width = {"hidden_dim": fields.get("expert_feed_forward_length", int)}
    return gguf.windowed(fields, has_experts=True) | gguf.experts(fields, normalized=normalized) | width


def _qwen2_fields(config: Config) -> dict[str, Any]:
    return huggingface.fields_of(config) | {
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": 0 if config.sliding_window else config.n_layers,
    }


def _qwen3_fields(config: Config) -> dict[str, Any]:
    return _qwen2_fields(config) | {"attention_bias": config.wo_bias}


def _experts_fields(config: Config) -> dict[str, Any]:
    return {
        "moe_intermediate_size": config.hidden_dim,
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.n_active_experts,
        "norm_topk_prob": config.normalized_experts,
    }


def _qwen2_moe_fields(config: Config) -> dict[str, Any]:
    return (
        _qwen2_fields(config)
        | _experts_fields(config)
        | {"qkv_bias": config.qkv_bias, "shared_expert_intermediate_size": config.shared_dim}
    )


def _qwen3_moe_fields(config: Config) -> dict[str, Any]:
    return _qwen3_fields(config) | _experts_fields(config)


_FEED_FORWARD, _MLP = "layers.{}.feed_forward", "model.layers.{}.mlp"
_NAMES = huggingface.experts("mlp")
_SHARED = {f"{_FEED_FORWARD}.shared_gate": f"{_MLP}.shared_expert_gate"} | {
    f"{_FEED_FORWARD}.w{i}": f"{_MLP}.shared_expert.{x}_proj" for i, x in ((1, "gate"), (2, "down"), (3, "up"))
}
HUGGINGFACE = (
    HuggingFace("qwen2", "Qwen2ForCausalLM", _qwen2, huggingface.LAYOUT, _qwen2_fields),
    HuggingFace("qwen3", "Qwen3ForCausalLM", _qwen3, huggingface.LAYOUT, _qwen3_fields),
    HuggingFace(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _qwen2_moe,
        huggingface.LAYOUT._replace(names=_NAMES | _SHARED),
        _qwen2_moe_fields,
    ),
    HuggingFace(
        "qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, huggingface.LAYOUT._replace(names=_NAMES), _qwen3_moe_fields
    ),
)
_LAYOUT = Layout(gguf.NAMES, fused=gguf.FUSED, half_split=True)
_GGUF_SHARED = {f"{_FEED_FORWARD}.shared_gate": "blk.{}.ffn_gate_inp_shexp"} | {
    f"{_FEED_FORWARD}.w{i}": f"blk.{{}}.ffn_{x}_shexp" for i, x in ((1, "gate"), (2, "down"), (3, "up"))
}
GGUF_FILES = (
    GGUF("qwen2", gguf.windowed, _LAYOUT),
    GGUF("qwen3", gguf.windowed, _LAYOUT),
    GGUF("qwen2moe", _gguf2_moe, _LAYOUT._replace(names=gguf.NAMES | _GGUF_SHARED)),
    GGUF("qwen3moe", _gguf3_moe, _LAYOUT),
)
