"""Llama 1 to 3, and Mistral."""

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


def _llama_fields(config: Config) -> dict[str, Any]:
    return huggingface.fields_of(config) | {"attention_bias": config.wo_bias}


def _mistral_fields(config: Config) -> dict[str, Any]:
    return huggingface.fields_of(config) | {"sliding_window": config.sliding_window}


HUGGINGFACE = (
    HuggingFace("llama", "LlamaForCausalLM", _llama, huggingface.LAYOUT, _llama_fields),
    HuggingFace("mistral", "MistralForCausalLM", _mistral, huggingface.LAYOUT, _mistral_fields),
)
# Mistral's files are of Llama's architecture. The converter makes neighbours of the rotary pairs.
GGUF_FILES = (GGUF("llama", gguf.windowed, Layout(gguf.NAMES, fused=gguf.FUSED)),)
