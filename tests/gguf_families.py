"""Hugging Face's folders as GGUF files, by the names of gguf-py and in the orders of llama.cpp's converter."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf_writer import gguf_bytes, plain

from jllama.checkpoint import safetensors

PERMUTED = ("llama", "smollm3", "granite")  # whose rotary pairs the converter makes neighbours


def convert(folder: Path, path: Path) -> Path:
    """Write a GGUF file with what a folder holds, in float32."""
    import gguf

    fields = json.loads((folder / "config.json").read_text())
    kind = architecture(fields)
    tensors = {name: t.view().astype(np.float32) for name, t in safetensors.read(folder / "model.safetensors").items()}
    tensors = _merged(tensors)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, fields["num_hidden_layers"])
    found = {}
    for name, array in tensors.items():
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = _converted(kind, name, array, fields)
    assert None not in found
    if fields["rope_parameters"].get("rope_type") == "longrope":
        for name in ("short", "long"):
            found[f"rope_factors_{name}.weight"] = np.array(fields["rope_parameters"][f"{name}_factor"], np.float32)
    path.write_bytes(gguf_bytes(keys(kind, fields), {name: plain(array) for name, array in found.items()}))
    return path


def architecture(fields: dict[str, Any]) -> str:
    """Give llama.cpp's name of the architecture of a config.json."""
    kind = fields["model_type"].removesuffix("_text")
    return {"gpt_neox": "gptneox", "mixtral": "llama"}.get(kind, kind.replace("_moe", "moe"))


def _merged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put the experts' tensors of a layer together, under the converter's names."""
    found: dict[str, Any] = {}
    for name, array in tensors.items():
        merged = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        if merged == name:
            found[name] = array
        else:
            merged = merged.replace("model.layers", "layers") if "block_sparse_moe" in merged else merged
            found.setdefault(merged.replace("block_sparse_moe", "feed_forward"), {})[name] = array

    def number(name: str) -> int:
        return int(name.split(".experts.")[1].split(".")[0])

    return {
        name: np.stack([x[key] for key in sorted(x, key=number)]) if isinstance(x, dict) else x
        for name, x in found.items()
    }


def _converted(kind: str, name: str, array: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    heads = {"q_proj": fields["num_attention_heads"], "k_proj": fields.get("num_key_value_heads")}
    projection = next((key for key in heads if key in name), None)
    if kind in PERMUTED and projection is not None:
        n = heads[projection]
        return array.reshape(n, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if "query_key_value" in name:
        n = fields["num_attention_heads"]
        return array.reshape(n, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
    return array + 1 if kind.startswith("gemma") and name.endswith("norm.weight") else array


def keys(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Give the metadata of a GGUF file for the fields of a config.json."""
    from gguf import Keys

    n_heads, rope = fields["num_attention_heads"], fields["rope_parameters"]
    rope = rope.get("full_attention", rope)
    head_dim = fields.get("head_dim") or fields["hidden_size"] // n_heads
    has_layer_norms = "layer_norm_eps" in fields
    eps = Keys.Attention.LAYERNORM_EPS if has_layer_norms else Keys.Attention.LAYERNORM_RMS_EPS
    found = {
        Keys.LLM.BLOCK_COUNT: fields["num_hidden_layers"],
        Keys.LLM.CONTEXT_LENGTH: fields["max_position_embeddings"],
        Keys.LLM.EMBEDDING_LENGTH: fields["hidden_size"],
        Keys.LLM.FEED_FORWARD_LENGTH: fields["intermediate_size"],
        Keys.LLM.EXPERT_COUNT: fields.get("num_local_experts", fields.get("num_experts")),
        Keys.LLM.EXPERT_USED_COUNT: fields.get("num_experts_per_tok"),
        Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: fields.get("moe_intermediate_size"),
        Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: fields.get("shared_expert_intermediate_size"),
        Keys.Attention.HEAD_COUNT: n_heads,
        Keys.Attention.HEAD_COUNT_KV: fields.get("num_key_value_heads", n_heads),
        Keys.Attention.KEY_LENGTH: head_dim,
        Keys.Attention.VALUE_LENGTH: head_dim,
        eps: fields["layer_norm_eps" if has_layer_norms else "rms_norm_eps"],
        Keys.Rope.FREQ_BASE: rope["rope_theta"],
        Keys.Rope.DIMENSION_COUNT: int(head_dim * rope.get("partial_rotary_factor", 1)),
        Keys.LLM.USE_PARALLEL_RESIDUAL: fields.get("use_parallel_residual"),
        Keys.Attention.SLIDING_WINDOW: fields.get("sliding_window") or None,
        Keys.LLM.ATTN_LOGIT_SOFTCAPPING: fields.get("attn_logit_softcapping"),
        Keys.LLM.FINAL_LOGIT_SOFTCAPPING: fields.get("final_logit_softcapping"),
        Keys.LLM.EMBEDDING_SCALE: fields.get("embedding_multiplier"),
        Keys.LLM.RESIDUAL_SCALE: fields.get("residual_multiplier"),
        Keys.LLM.LOGIT_SCALE: fields.get("logits_scaling"),
        Keys.Attention.SCALE: fields.get("attention_multiplier"),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {Keys.Rope.SCALING_TYPE: rope["rope_type"], Keys.Rope.SCALING_FACTOR: rope["factor"]}
        found[Keys.Rope.SCALING_ORIG_CTX_LEN] = rope.get("original_max_position_embeddings")
    if rope["rope_type"] == "longrope":  # what the converter works out, from the two lengths
        original = rope.get("original_max_position_embeddings", fields.get("original_max_position_embeddings"))
        found[Keys.Rope.SCALING_ORIG_CTX_LEN] = original
        found[Keys.Rope.SCALING_ATTN_FACTOR] = math.sqrt(
            1 + math.log(fields["max_position_embeddings"] / original) / math.log(original)
        )
    named = {key.format(arch=kind): value for key, value in found.items() if value is not None}
    return {"general.architecture": kind} | named
