"""Granite 3: Llama with four numbers that scale what it adds up."""

from __future__ import annotations

from typing import Any

from jllama.config import Config
from jllama.families import gguf, huggingface
from jllama.families.family import GGUF, HuggingFace, Layout
from jllama.families.fields import Fields

_NAMES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def _config(fields: Fields) -> dict[str, Any]:
    bias = fields.get("attention_bias", bool, False)
    scales = {name: fields.get(field, float, 1.0) for name, field in _NAMES.items()}
    return huggingface.decoder(fields, says_kv_heads=False) | _divided(scales) | {"qkv_bias": bias, "wo_bias": bias}


def _fields(config: Config) -> dict[str, Any]:
    scales = _divided({name: getattr(config, name) for name in _NAMES})
    scales["attention_scale"] = scales["attention_scale"] or config.head_dim**-0.5
    return (
        huggingface.fields_of(config)
        | {"attention_bias": config.wo_bias}
        | {field: scales[name] for name, field in _NAMES.items()}
    )


def _gguf(fields: Fields) -> dict[str, Any]:
    names = {name: "attention.scale" if name == "attention_scale" else name for name in _NAMES}
    defaults = {"attention_scale": 0.0}
    scales = {name: fields.get(field, float, defaults.get(name, 1.0)) for name, field in names.items()}
    return gguf.decoder(fields) | _divided(scales)


def _divided(scales: dict[str, float]) -> dict[str, float]:
    """Turn a divisor of the logits into a factor, or back."""
    return scales | {"logit_scale": 1 / scales["logit_scale"] if scales["logit_scale"] else 0.0}


HUGGINGFACE = (HuggingFace("granite", "GraniteForCausalLM", _config, huggingface.LAYOUT, _fields),)
GGUF_FILES = (GGUF("granite", _gguf, Layout(gguf.NAMES)),)
