"""Llama 1 to 3, Mistral and Mixtral."""

from __future__ import annotations

from typing import Any

from jllama.config import Config
from jllama.families import gguf, huggingface
from jllama.families.family import GGUF, HuggingFace, Layout
from jllama.families.fields import Fields


def _llama(fields: Fields) -> dict[str, Any]:
    bias = fields.get("attention_bias", bool, False)
    # The first Llama's files have no num_key_value_heads.
    return huggingface.decoder(fields, says_kv_heads=False) | {"qkv_bias": bias, "wo_bias": bias}


def _mistral(fields: Fields) -> dict[str, Any]:
    values = huggingface.decoder(fields)
    return values | {"sliding_window": huggingface.window(fields, values["n_layers"])}


def _mixtral(fields: Fields) -> dict[str, Any]:
    return huggingface.decoder(fields) | {
        "sliding_window": fields.get("sliding_window", int, 0) or None,
        "n_experts": fields.get("num_local_experts", int),
        "n_active_experts": fields.get("num_experts_per_tok", int),
        "normalized_experts": True,
    }


def _llama_fields(config: Config) -> dict[str, Any]:
    return huggingface.fields_of(config) | {"attention_bias": config.wo_bias}


def _mistral_fields(config: Config) -> dict[str, Any]:
    return huggingface.fields_of(config) | {"sliding_window": config.sliding_window}


def _mixtral_fields(config: Config) -> dict[str, Any]:
    counts = {"num_local_experts": config.n_experts, "num_experts_per_tok": config.n_active_experts}
    return _mistral_fields(config) | counts


def _gguf(fields: Fields) -> dict[str, Any]:
    return gguf.windowed(fields, has_experts=True) | gguf.experts(fields, normalized=True)


_MIXTRAL = huggingface.LAYOUT._replace(names=huggingface.experts("block_sparse_moe", ("w1", "w2", "w3")))
HUGGINGFACE = (
    HuggingFace("llama", "LlamaForCausalLM", _llama, huggingface.LAYOUT, _llama_fields),
    HuggingFace("mistral", "MistralForCausalLM", _mistral, huggingface.LAYOUT, _mistral_fields),
    HuggingFace("mixtral", "MixtralForCausalLM", _mixtral, _MIXTRAL, _mixtral_fields),
)
# Mistral's and Mixtral's files are of Llama's architecture. The converter makes neighbours of the rotary pairs.
GGUF_FILES = (GGUF("llama", _gguf, Layout(gguf.NAMES, fused=gguf.FUSED)),)
