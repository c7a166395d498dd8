"""StableLM 2: Llama with layer norms, and a part of each head rotated."""

from __future__ import annotations

from typing import Any

from jllama.families import gguf, huggingface
from jllama.families.family import GGUF, HuggingFace, Layout
from jllama.families.fields import Fields

_SWITCHES = {"norm": "layer", "norm_bias": True}


def _config(fields: Fields) -> dict[str, Any]:
    values = huggingface.decoder(fields, eps="layer_norm_eps", part=0.25)
    fields.only("use_parallel_residual", False)  # the 12B model's, with norms of its own for each head
    fields.only("qk_layernorm", False)
    return values | _SWITCHES | {"qkv_bias": fields.get("use_qkv_bias", bool, False)}


def _gguf(fields: Fields) -> dict[str, Any]:
    fields.only("use_parallel_residual", False)
    return gguf.decoder(fields, is_partial=True, norm="layer") | _SWITCHES


HUGGINGFACE = (HuggingFace("stablelm", "StableLmForCausalLM", _config, huggingface.LAYOUT),)
GGUF_FILES = (GGUF("stablelm", _gguf, Layout(gguf.NAMES, half_split=True)),)
