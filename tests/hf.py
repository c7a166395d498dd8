"""Folders as Hugging Face's libraries write them, made from the weights of the oracle."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import oracle
from ml_dtypes import bfloat16, float8_e4m3fn

from jllama.config import Config

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": bfloat16, "I64": np.int64, "BOOL": np.bool_}
DTYPES |= {"I8": np.int8, "I32": np.int32, "F8_E4M3": float8_e4m3fn}


def packed(header: Any, data: bytes = b"") -> bytes:
    """Return a safetensors file with this header: an object to write as JSON, or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        dtype = next(key for key, value in DTYPES.items() if array.dtype == value)
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    path.write_bytes(packed(header, data))


def half_split(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Put the even rows of each head before the odd ones."""
    order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    heads = weight.reshape(-1, head_dim, *weight.shape[1:])
    return heads[:, order].reshape(weight.shape)


def llama_tensors(weights: oracle.Weights, config: Config) -> dict[str, np.ndarray]:
    """Rename and reorder tensors from Meta's layout."""
    attention = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm"}
    others = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        **{f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in attention.items()},
    }
    tensors = {}
    for name, array in weights.items():
        stem, suffix = name.rsplit(".", 1)
        if stem.startswith("layers."):
            _, number, ours = stem.split(".", 2)
            if ours.endswith(("wq", "wk", "q_norm", "k_norm")):
                array = half_split(array, config.head_dim)
            stem = f"model.layers.{number}.{others[ours]}"
        else:
            stem = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}[stem]
        tensors[f"{stem}.{suffix}"] = array
    return tensors


def llama_config(config: Config, **changes: Any) -> dict[str, Any]:
    """Return the fields of a config.json of a Llama; a change to ... takes a field out."""
    scaling = config.rope_scaling
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | changes
    return {name: value for name, value in fields.items() if value is not ...}


def gpt2_config(
    dim: int, hidden: int | None, n_layers: int, n_heads: int, vocab_size: int, context: int
) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_ctx": context,
        "n_positions": context,
        "n_embd": dim,
        "n_inner": hidden,
        "n_layer": n_layers,
        "n_head": n_heads,
        "vocab_size": vocab_size,
    }


def write_folder(folder: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """Write config.json and one safetensors file, or several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_llama(folder: Path, weights: oracle.Weights, config: Config, shards: int = 1, **changes: Any) -> Path:
    changes = {"tie_word_embeddings": "output.weight" not in weights} | changes
    return write_folder(folder, llama_config(config, **changes), llama_tensors(weights, config), shards)
