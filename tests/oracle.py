"""An independent forward pass of the Llama family and of GPT-2, in float64 NumPy: the source of right values.

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
        x = x + (experts(layer, config, h) if "feed_forward.router.weight" in layer else swiglu(layer, h))
    head = w.get("output.weight", w["tok_embeddings.weight"])
    return rms_norm(x, w["norm.weight"], config.norm_eps) @ head.T


def swiglu(layer: dict[str, Array], x: Array, names: str = "feed_forward.w{}.weight") -> Array:
    """Apply a gated feed-forward."""
    w1, w2, w3 = (layer[names.format(i)] for i in (1, 2, 3))
    gate = x @ w1.T
    return (gate / (1 + np.exp(-gate)) * (x @ w3.T)) @ w2.T


def experts(layer: dict[str, Array], config: Any, x: Array) -> Array:
    """Apply all experts to all tokens, weighed by their probabilities; those not taken by 0."""
    n = config.n_experts
    scores = x @ layer["feed_forward.router.weight"].T
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    p[p < np.sort(p, axis=-1)[:, -config.n_active_experts, None]] = 0
    if config.normalized_experts:
        p = p / p.sum(axis=-1, keepdims=True)
    y = np.zeros_like(x)
    for e in range(n):
        one = {str(i): layer[f"feed_forward.experts.w{i}.weight"] for i in (1, 2, 3)}
        one = {name: w.reshape(n, -1, w.shape[-1])[e] for name, w in one.items()}
        y += p[:, e, None] * swiglu(one, x, "{}")
    if "feed_forward.shared_gate.weight" in layer:
        gate = x @ layer["feed_forward.shared_gate.weight"]
        y += swiglu(layer, x) / (1 + np.exp(-gate))[:, None]
    return y


def attention(layer: dict[str, Array], config: Any, x: Array, angles: Array) -> Array:
    """Attend causally: query head n reads key/value head n // (n_heads / n_kv_heads)."""
    length, size = len(x), config.head_dim

    def project(name: str, x: Array) -> Array:
        return x @ layer[f"attention.{name}.weight"].T + layer.get(f"attention.{name}.bias", 0)

    q, k, v = (project(name, x).reshape(length, -1, size) for name in ("wq", "wk", "wv"))
    if "attention.q_norm.weight" in layer:
        q = rms_norm(q, layer["attention.q_norm.weight"], config.norm_eps)
        k = rms_norm(k, layer["attention.k_norm.weight"], config.norm_eps)
    q, k = rotate(q, angles), rotate(k, angles)
    out = np.zeros_like(q)
    for n in range(config.n_heads):
        kv = n // (config.n_heads // config.n_kv_heads)
        for t in range(length):
            first = max(0, t + 1 - (config.sliding_window or length))
            scores = k[first : t + 1, kv] @ q[t, n] / math.sqrt(size)
            p = np.exp(scores - scores.max())
            out[t, n] = p / p.sum() @ v[first : t + 1, kv]
    return project("wo", out.reshape(length, -1))


def forward_gpt2(weights: Weights, n_heads: int, eps: float, tokens: NDArray[np.int32]) -> Array:
    """Return the logits `[T, V]` of GPT-2 for tensors by the names of its published files, matrices `[in, out]`."""
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    x = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    future = np.triu(np.ones((len(tokens), len(tokens)), bool), 1)

    def layer_norm(name: str, x: Array) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv1d(name: str, x: Array) -> Array:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    for i in range(sum(name.endswith("ln_1.weight") for name in w)):
        q, k, v = np.split(conv1d(f"h.{i}.attn.c_attn", layer_norm(f"h.{i}.ln_1", x)), 3, axis=-1)
        heads = []
        for qh, kh, vh in zip(*(np.split(a, n_heads, axis=-1) for a in (q, k, v)), strict=True):
            scores = np.where(future, -np.inf, qh @ kh.T / math.sqrt(qh.shape[-1]))
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            heads.append(p / p.sum(axis=-1, keepdims=True) @ vh)
        x = x + conv1d(f"h.{i}.attn.c_proj", np.concatenate(heads, axis=-1))
        h = conv1d(f"h.{i}.mlp.c_fc", layer_norm(f"h.{i}.ln_2", x))
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + conv1d(f"h.{i}.mlp.c_proj", h)
    return layer_norm("ln_f", x) @ w["wte.weight"].T


def random_gpt2(dim: int, hidden: int, n_layers: int, vocab_size: int, context: int, *, seed: int = 0) -> Weights:
    """Make small float32 weights for `forward_gpt2`: matrices N(0, 0.2), norms 1 + N(0, 0.1), biases N(0, 0.1)."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"wte": (vocab_size, dim), "wpe": (context, dim), "ln_f": (dim,)}
    for i in range(n_layers):
        shapes |= {f"h.{i}.ln_1": (dim,), f"h.{i}.ln_2": (dim,)}
        shapes |= {f"h.{i}.attn.c_attn": (dim, 3 * dim), f"h.{i}.attn.c_proj": (dim, dim)}
        shapes |= {f"h.{i}.mlp.c_fc": (dim, hidden), f"h.{i}.mlp.c_proj": (hidden, dim)}
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = rng.normal(*((1, 0.1) if len(shape) == 1 else (0, 0.2)), shape).astype(np.float32)
        if name not in ("wte", "wpe"):
            weights[f"{name}.bias"] = rng.normal(0, 0.1, shape[-1:]).astype(np.float32)
    return weights


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
    if n := getattr(config, "n_experts", 0):
        three = {name: layer.pop(f"feed_forward.{name}") for name in ("w1", "w2", "w3")}
        layer |= {f"feed_forward.experts.{name}": (n * rows, columns) for name, (rows, columns) in three.items()}
        layer["feed_forward.router"] = (n, d)
        if s := config.shared_dim:
            layer |= {f"feed_forward.{name}": shape for name, shape in (("w1", (s, d)), ("w2", (d, s)), ("w3", (s, d)))}
            layer["feed_forward.shared_gate"] = (d,)
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
