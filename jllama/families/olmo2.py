"""OLMo 2: norms after attention and feed-forward, and over all heads of queries and of keys."""

from __future__ import annotations

from typing import Any

from jllama.config import Config
from jllama.families import gguf, huggingface
from jllama.families.family import GGUF, HuggingFace, Layout
from jllama.families.fields import Fields

_SWITCHES = {"norms": "after", "width_norms": True}
_NAMES = huggingface.NAMES | {
    "layers.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.ffn_post_norm": "model.layers.{}.post_feedforward_layernorm",
}


def _config(fields: Fields) -> dict[str, Any]:
    bias = fields.get("attention_bias", bool, False)
    return huggingface.decoder(fields, says_kv_heads=False) | _SWITCHES | {"qkv_bias": bias, "wo_bias": bias}


def _fields(config: Config) -> dict[str, Any]:
    return huggingface.fields_of(config) | {"attention_bias": config.wo_bias}


def _gguf(fields: Fields) -> dict[str, Any]:
    return gguf.decoder(fields) | _SWITCHES


HUGGINGFACE = (HuggingFace("olmo2", "Olmo2ForCausalLM", _config, huggingface.LAYOUT._replace(names=_NAMES), _fields),)
GGUF_FILES = (GGUF("olmo2", _gguf, Layout(gguf.NAMES, half_split=True)),)
