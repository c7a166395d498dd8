"""Qwen 2, 2.5 and 3."""

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


def _qwen2_fields(config: Config) -> dict[str, Any]:
    return huggingface.fields_of(config) | {
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": 0 if config.sliding_window else config.n_layers,
    }


def _qwen3_fields(config: Config) -> dict[str, Any]:
    return _qwen2_fields(config) | {"attention_bias": config.wo_bias}


HUGGINGFACE = (
    HuggingFace("qwen2", "Qwen2ForCausalLM", _qwen2, huggingface.LAYOUT, _qwen2_fields),
    HuggingFace("qwen3", "Qwen3ForCausalLM", _qwen3, huggingface.LAYOUT, _qwen3_fields),
)
_LAYOUT = Layout(gguf.NAMES, fused=gguf.FUSED, half_split=True)
GGUF_FILES = (GGUF("qwen2", gguf.windowed, _LAYOUT), GGUF("qwen3", gguf.windowed, _LAYOUT))
