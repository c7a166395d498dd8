"""GGUF files, made from the weights of the oracle."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import oracle

from jllama.config import Config

CONFIG = Config(32, 64, 2, 4, 2, vocab_size=48, max_seq_len=128, rope_theta=5e5)
KEYS = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 8,
    "llama.rope.freq_base": 5e5,
}
NAMES = {
    "tok_embeddings": "token_embd",
    "norm": "output_norm",
    "output": "output",
    "attention_norm": "attn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
HF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "mlp.up_proj": "ffn_up",
}
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30


def string(text: str | bytes) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text


def value(x: Any) -> bytes:
    """A typed value: bytes are taken as they are."""
    if isinstance(x, bytes):
        return x
    if isinstance(x, bool):
        return struct.pack("<I?", 7, x)
    if isinstance(x, int):
        return struct.pack("<II", 4, x)
    if isinstance(x, float):
        return struct.pack("<If", 6, x)
    if isinstance(x, list):
        return struct.pack("<IIQ", 9, 8, len(x)) + b"".join(map(string, x))
    if isinstance(x, np.ndarray):
        return struct.pack("<IIQ", 9, 5 if x.dtype == np.int32 else 6, x.size) + x.tobytes()
    return struct.pack("<I", 8) + string(x)


def plain(array: np.ndarray) -> tuple[tuple[int, ...], int, bytes]:
    return array.shape, {"float32": F32, "float16": F16, "bfloat16": BF16}[array.dtype.name], array.tobytes()


def gguf_bytes(
    keys: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]], *, version: int = 3
) -> bytes:
    alignment = keys.get("general.alignment", 32)
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    out += b"".join(string(key) + value(x) for key, x in keys.items())
    data = b""
    for name, (shape, kind, content) in tensors.items():
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += content + bytes(-len(content) % alignment)
    return out + bytes(-len(out) % alignment) + data


def renamed(weights: oracle.Weights, names: dict[str, str] = NAMES, prefix: str = "layers.") -> oracle.Weights:
    result = {}
    for name, array in weights.items():
        kind, suffix = name.rsplit(".", 1)
        layer = ""
        if kind.startswith(prefix):
            number, kind = kind.removeprefix(prefix).split(".", 1)
            layer = f"blk.{number}."
        result[f"{layer}{names[kind]}.{suffix}"] = array
    return result


def write(path: Path, weights: oracle.Weights, keys: dict[str, Any] | None = None, *, version: int = 3) -> Path:
    """Write a model; keys of None are left out."""
    merged = {key: x for key, x in (KEYS | (keys or {})).items() if x is not None}
    path.write_bytes(gguf_bytes(merged, {n: plain(a) for n, a in renamed(weights).items()}, version=version))
    return path
