"""Gemma 1, 2 and 3 (text): norms on both sides, gated GELU, soft caps, and a window in most layers."""

from __future__ import annotations

from typing import Any

from jllama.families import gguf, huggingface
from jllama.families.family import GGUF, HuggingFace, Layout
from jllama.families.fields import Fields

_LOCAL_THETA = 10000.0
_NAMES = huggingface.NAMES | {
    "layers.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "layers.{}.ffn_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
_PATTERN = {"gemma2": 2, "gemma3": 6}  # one layer of so many attends to all tokens
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the model whose scale llama.cpp takes from dim, not head_dim


def _gemma(fields: Fields) -> dict[str, Any]:
    act = "hidden_act" if fields.peek("hidden_activation") is None else "hidden_activation"
    return _finished(huggingface.decoder(fields, activation=act))


def _gemma2(fields: Fields) -> dict[str, Any]:
    return _both(fields, huggingface.decoder(fields, activation="hidden_activation"), _PATTERN["gemma2"])


def _gemma3(fields: Fields) -> dict[str, Any]:
    tables = fields.get("rope_parameters", dict, {})  # of transformers 5: one for each kind of layer
    given = dict(fields.values)
    theta = fields.get("rope_local_base_freq", float, _LOCAL_THETA)
    if "full_attention" in tables:
        given["rope_parameters"] = tables["full_attention"]
        local = tables.get("sliding_attention")
        inner = fields.within("rope_parameters.sliding_attention.", local if isinstance(local, dict) else {})
        inner.only("rope_type", "default")
        theta = inner.get("rope_theta", float, theta)
    values = huggingface.decoder(fields.within("", given), activation="hidden_activation")
    fields.only("use_bidirectional_attention", False)
    pattern = fields.get("sliding_window_pattern", int, _PATTERN["gemma3"])
    return _both(fields, values, pattern) | {"local_rope_theta": theta, "head_norms": True}


def _both(fields: Fields, values: dict[str, Any], pattern: int) -> dict[str, Any]:
    """Add what Gemma 2 and 3 have in common."""
    n_layers = values["n_layers"]
    if fields.peek("layer_types") is None:
        full = _full(pattern, n_layers)
    else:
        kinds = fields.get("layer_types", list)
        full = tuple(i for i, kind in enumerate(kinds) if kind != "sliding_attention")
        if len(kinds) != n_layers or not {"sliding_attention", "full_attention"}.issuperset(map(str, kinds)):
            fields.problems.append(f"layer_types: expected sliding_attention or full_attention for {n_layers} layers")
    fields.only("attention_bias", False)
    return _finished(values) | {
        "norms": "both",
        "sliding_window": fields.get("sliding_window", int),
        "full_layers": full,
        "attention_scale": _root(fields.get("query_pre_attn_scalar", float)),
        "attention_cap": fields.get("attn_logit_softcapping", float, 0.0),
        "logit_cap": fields.get("final_logit_softcapping", float, 0.0),
    }


def _finished(values: dict[str, Any]) -> dict[str, Any]:
    tied = True if values.get("tied") is None else values["tied"]
    return values | {"embedding_scale": max(values["dim"], 0) ** 0.5, "tied": tied}


def _gguf(fields: Fields) -> dict[str, Any]:
    values = gguf.decoder(fields)
    return values | {"activation": "gelu", "embedding_scale": max(values["dim"], 0) ** 0.5}


def _gguf_both(fields: Fields, name: str) -> dict[str, Any]:
    values = _gguf(fields)
    is_largest, head_dim = values["n_layers"] == _LARGEST[name], values["head_dim"]
    width = values["dim"] / max(values["n_heads"], 1) if is_largest or not head_dim else head_dim
    return values | {
        "norms": "both",
        "sliding_window": fields.get("attention.sliding_window", int),
        "full_layers": _full(_PATTERN[name], values["n_layers"]),
        "attention_scale": _root(width),
    }


def _gguf2(fields: Fields) -> dict[str, Any]:
    caps = {"attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
    defaults = {"attention_cap": 50.0, "logit_cap": 30.0}
    return _gguf_both(fields, "gemma2") | {
        name: fields.get(field, float, defaults[name]) for name, field in caps.items()
    }


def _gguf3(fields: Fields) -> dict[str, Any]:
    caps = {"logit_cap": fields.get("final_logit_softcapping", float, 0.0)}
    theta = fields.get("rope.freq_base_swa", float, _LOCAL_THETA)
    return _gguf_both(fields, "gemma3") | {"local_rope_theta": theta, "head_norms": True} | caps


def _full(pattern: int, n_layers: int) -> tuple[int, ...]:
    return tuple(range(pattern - 1, min(n_layers, 1 << 16), pattern)) if pattern > 0 else ()


def _root(x: float) -> float:
    return x**-0.5 if x > 0 else -1.0


_LAYOUT = huggingface.LAYOUT._replace(norm_offset=1.0)
HUGGINGFACE = (
    HuggingFace("gemma", "GemmaForCausalLM", _gemma, _LAYOUT),
    HuggingFace("gemma2", "Gemma2ForCausalLM", _gemma2, _LAYOUT._replace(names=_NAMES)),
    HuggingFace("gemma3_text", "Gemma3ForCausalLM", _gemma3, _LAYOUT._replace(names=_NAMES)),
)
_GGUF_LAYOUT = Layout(gguf.NAMES, half_split=True)  # the converter adds 1 to the weights of norms
GGUF_FILES = (
    GGUF("gemma", _gguf, _GGUF_LAYOUT),
    GGUF("gemma2", _gguf2, _GGUF_LAYOUT),
    GGUF("gemma3", _gguf3, _GGUF_LAYOUT),
)
