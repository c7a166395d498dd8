"""An independent forward pass of the Llama family, in float64 NumPy: the source of right values.

Nothing here comes from jllama: weights are a dict of `[out, in]` arrays by the names of Meta's checkpoints, sizes any
object with the fields of its `Config`. One sequence at a time, no cache, no batch, no fused weights.
"""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, NDArray[Any]]


def forward(weights: Weights, config: Any, tokens: NDArray[np.int32]) -> Array:
    """Return the logits `[T, V]` at every position of one sequence `[T]`; the head is tied without output.weight."""
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    x = w["tok_embeddings.weight"][tokens]
    angles = np.outer(np.arange(len(tokens)), frequencies(config))
    for i in range(config.n_layers):
        layer = {name.removeprefix(f"layers.{i}."): a for name, a in w.items() if name.startswith(f"layers.{i}.")}
        x = x + attention(layer, config, rms_norm(x, layer["attention_norm.weight"], config.norm_eps), angles)
        h = rms_norm(x, layer["ffn_norm.weight"], config.norm_eps)
        gate = h @ layer["feed_forward.w1.weight"].T
        up = h @ layer["feed_forward.w3.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["feed_forward.w2.weight"].T
    head = w.get("output.weight", w["tok_embeddings.weight"])
    return rms_norm(x, w["norm.weight"], config.norm_eps) @ head.T


def attention(layer: dict[str, Array], config: Any, x: Array, angles: Array) -> Array:
    """Attend causally: query head n reads key/value head n // (n_heads / n_kv_heads)."""
    length, size = len(x), config.head_dim
    q = rotate((x @ layer["attention.wq.weight"].T).reshape(length, config.n_heads, size), angles)
    k = rotate((x @ layer["attention.wk.weight"].T).reshape(length, config.n_kv_heads, size), angles)
    v = (x @ layer["attention.wv.weight"].T).reshape(length, config.n_kv_heads, size)
    out = np.zeros_like(q)
    for n in range(config.n_heads):
        kv = n // (config.n_heads // config.n_kv_heads)
        for t in range(length):
            scores = k[: t + 1, kv] @ q[t, n] / math.sqrt(size)
            p = np.exp(scores - scores.max())
            out[t, n] = p / p.sum() @ v[: t + 1, kv]
    return out.reshape(length, -1) @ layer["attention.wo.weight"].T


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Divide each row by its root mean square."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Array, angles: Array) -> Array:
    """Turn each pair (2j, 2j + 1) of `x [T, heads, H]`, as a complex number, by `angles [T, H/2]`."""
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None, :]
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def frequencies(config: Any) -> Array:
    """Return the rotary frequency of each pair, stretched the way of Llama 3.1 where the config says so."""
    result = []
    for j in range(config.head_dim // 2):
        f = config.rope_theta ** (-2 * j / config.head_dim)
        s = config.rope_scaling
        if s is not None:
            turns = s.original_max_seq_len * f / (2 * math.pi)  # how often the pair turns within the old context
            keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            keep = min(max(keep, 0.0), 1.0)
            f = keep * f + (1 - keep) * f / s.factor
        result.append(f)
    return np.array(result)


def random_weights(config: Any, *, tied: bool, seed: int = 0) -> Weights:
    """Make small float32 weights: matrices N(0, 0.2), norms 1 + N(0, 0.1), so that leaving one out shows."""
    rng = np.random.default_rng(seed)
    d, f, q, kv = config.dim, config.hidden_dim, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = {
        "attention_norm": (d,),
        "attention.wq": (q, d),
        "attention.wk": (kv, d),
        "attention.wv": (kv, d),
        "attention.wo": (d, q),
        "ffn_norm": (d,),
        "feed_forward.w1": (f, d),
        "feed_forward.w2": (d, f),
        "feed_forward.w3": (f, d),
    }
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings": (config.vocab_size, d), "norm": (d,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(config.n_layers) for name, shape in layer.items()}
    shapes |= {} if tied else {"output": (config.vocab_size, d)}
    return {
        f"{name}.weight": (1 + rng.normal(0, 0.1, shape) if len(shape) == 1 else rng.normal(0, 0.2, shape)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def write_v0(path: Path, weights: Weights, config: Any) -> None:
    """Write a llama2.c file of version 0, its rotary tables left zero: readers must skip them."""
    per_layer = ["attention_norm", *(f"attention.{n}" for n in ("wq", "wk", "wv", "wo"))]
    per_layer += ["ffn_norm", *(f"feed_forward.{n}" for n in ("w1", "w2", "w3"))]
    names = ["tok_embeddings", *(f"layers.{i}.{name}" for name in per_layer for i in range(config.n_layers)), "norm"]
    vocab = -config.vocab_size if "output.weight" in weights else config.vocab_size
    sizes = (config.dim, config.hidden_dim, config.n_layers, config.n_heads, config.n_kv_heads, vocab)
    data = [struct.pack("<7i", *sizes, config.max_seq_len), *(weights[f"{n}.weight"].tobytes() for n in names)]
    data += [bytes(4 * config.max_seq_len * config.head_dim)]
    if "output.weight" in weights:
        data.append(weights["output.weight"].tobytes())
    path.write_bytes(b"".join(data))
