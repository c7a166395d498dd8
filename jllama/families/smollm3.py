"""SmolLM3: Llama, but every fourth layer rotates nothing."""

from __future__ import annotations

from typing import Any

from jllama.config import Config
from jllama.families import gguf, huggingface
from jllama.families.family import GGUF, HuggingFace, Layout
from jllama.families.fields import Fields

_INTERVAL = 4


def _config(fields: Fields) -> dict[str, Any]:
    values = huggingface.decoder(fields)
    n_layers, bias = values["n_layers"], fields.get("attention_bias", bool, False)
    interval = fields.get("no_rope_layer_interval", int, _INTERVAL)
    if fields.peek("no_rope_layers") is None:
        unrotated = _every(interval, n_layers)
    else:
        rotates = fields.get("no_rope_layers", list)  # in spite of the name
        if len(rotates) != n_layers:
            fields.problems.append(f"no_rope_layers has {len(rotates)} numbers, expected {n_layers}")
        unrotated = tuple(i for i, rotated in enumerate(rotates) if not rotated)
    fields.only("use_sliding_window", False)
    return values | {"unrotated_layers": unrotated, "qkv_bias": bias, "wo_bias": bias}


def _fields(config: Config) -> dict[str, Any]:
    rotates = [int(i not in config.unrotated_layers) for i in range(config.n_layers)]
    return huggingface.fields_of(config) | {"attention_bias": config.wo_bias, "no_rope_layers": rotates}


def _gguf(fields: Fields) -> dict[str, Any]:
    values = gguf.decoder(fields)
    return values | {"unrotated_layers": _every(_INTERVAL, values["n_layers"])}  # the files don't say it


def _every(interval: int, n_layers: int) -> tuple[int, ...]:
    return tuple(range(interval - 1, min(n_layers, 1 << 16), interval)) if interval > 0 else ()


HUGGINGFACE = (HuggingFace("smollm3", "SmolLM3ForCausalLM", _config, huggingface.LAYOUT, _fields),)
GGUF_FILES = (GGUF("smollm3", _gguf, Layout(gguf.NAMES)),)
