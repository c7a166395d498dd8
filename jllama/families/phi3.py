"""Phi-3 and Phi-4-mini: Llama with fused matrices."""

from __future__ import annotations

from typing import Any

from jllama.families import gguf, huggingface
from jllama.families.family import GGUF, HuggingFace, Layout
from jllama.families.fields import Fields

_AT, _FEED_FORWARD = "model.layers.{}", "layers.{}.feed_forward"
_NAMES = huggingface.NAMES | {
    **{f"layers.{{}}.attention.w{x}": f"{_AT}.self_attn.qkv_proj" for x in "qkv"},
    **{f"{_FEED_FORWARD}.w{x}": f"{_AT}.mlp.gate_up_proj" for x in (1, 3)},
}
_GGUF_NAMES = gguf.NAMES | gguf.FUSED | {f"{_FEED_FORWARD}.w{x}": "blk.{}.ffn_up" for x in (1, 3)}


def _config(fields: Fields) -> dict[str, Any]:
    values = huggingface.decoder(fields, says_kv_heads=False, part=1.0)
    return values | {"sliding_window": fields.get("sliding_window", int, 0) or None}


def _gguf(fields: Fields) -> dict[str, Any]:
    values = gguf.decoder(fields, is_partial=True)
    return values | {"sliding_window": fields.get("attention.sliding_window", int, 0) or None}


HUGGINGFACE = (HuggingFace("phi3", "Phi3ForCausalLM", _config, huggingface.LAYOUT._replace(names=_NAMES)),)
GGUF_FILES = (GGUF("phi3", _gguf, Layout(_GGUF_NAMES, half_split=True)),)
