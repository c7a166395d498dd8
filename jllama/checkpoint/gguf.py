"""GGUF files: the models of llama.cpp, in every type of number that the `gguf` package can widen.

Names of metadata and tensors: docs/gguf.md in ggml-org/ggml; gguf-py/gguf/constants.py in ggml-org/llama.cpp.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import mmap
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jllama import gguf_file
from jllama.checkpoint.build import CheckpointError, Contents
from jllama.checkpoint.mapped import interleaved, map_file, release, rows_of, strided
from jllama.checkpoint.source import Array, Source
from jllama.config import GPT2, Config, ConfigError, RopeScaling
from jllama.errors import listed, quoted, shown
from jllama.gguf_file import GGUFError, Header, TensorInfo
from jllama.model import rotary_frequencies
from jllama.tensors import fitted

_NAMES = {
    "token_embd": "tok_embeddings",
    "position_embd": "position_embeddings",
    "output_norm": "norm",
    "output": "output",
    "attn_norm": "attention_norm",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_output": "attention.wo",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}


class _Family(NamedTuple):
    names: Mapping[str, str]
    half_split: bool = False  # rotary pairs are (j, j + H/2), where Meta's are neighbours
    switches: Mapping[str, Any] = {}  # fields of Config


_GPT2_NAMES = {gguf: ours for gguf, ours in _NAMES.items() if gguf != "ffn_gate"} | {"ffn_up": "feed_forward.w1"}
_FAMILIES = {
    "llama": _Family(_NAMES),
    "qwen2": _Family(_NAMES, half_split=True),
    "qwen3": _Family(_NAMES, half_split=True),
    "gpt2": _Family(_GPT2_NAMES, switches=GPT2),
}

_PLAIN = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype(jnp.bfloat16)}
_BF16 = 30

_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")
_ROTATED = re.compile(r"layers\.\d+\.attention\.(wq|wk|q_norm|k_norm)\.")
_ROPE_DIVISORS = "rope_freqs.weight"


def read(path: Path, header: Header | None = None) -> Contents:
    """Check metadata and tensor lists of a file, or of all parts of a model, and map the tensors without reading them.

    `header` is that of `path`, where it was read already. The nearest dtype is int8 for a file with quantised matrices,
    bfloat16 where all are that, else float32 (which is exact for float16).

    Raises:
      CheckpointError: the file is damaged, of an unknown architecture or has tensors that can't be read; all are named.
      OSError: the file cannot be opened.
    """
    try:
        parts = gguf_file.read_parts(path, header)
    except GGUFError as e:
        raise CheckpointError(str(e)) from e
    metadata = parts[path].metadata
    architecture = metadata.get("general.architecture")
    if (family := _FAMILIES.get(str(architecture))) is None:
        expected = ", ".join(_FAMILIES)
        raise CheckpointError(f"{path}: general.architecture = {quoted(architecture)}, expected one of {expected}")
    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    raw: dict[str, Source] = {}
    for part, (keys, found) in parts.items():
        problems += [f"{shown(name)} is in two of the model's files" for name in found.keys() & tensors.keys()]
        tensors |= found
        with open(part, "rb") as file:
            data = map_file(file)
        raw |= _sources(data, found, keys.get("general.alignment", gguf_file.DEFAULT_ALIGNMENT), problems)
    divisors = raw.pop(_ROPE_DIVISORS, None)
    config = _config(metadata, family, tensors.get("token_embd.weight"), problems)
    if config is None or problems:
        raise CheckpointError(f"{path}: {listed(problems)}")
    if divisors is not None:
        try:
            config = _stretched(config, divisors.read(0, divisors.shape[0]))
        except ConfigError as e:
            raise CheckpointError(f"{path}: {_ROPE_DIVISORS}: {e}") from e
    sources = _renamed(raw, config, family.names)
    if family.half_split:
        sources = {name: interleaved(s, config.head_dim) if _ROTATED.match(name) else s for name, s in sources.items()}
    return Contents(fitted(config, sources), sources, _nearest_dtype(tensors))


def _nearest_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    types = {tensor.type for tensor in tensors.values() if len(tensor.shape) == 2}
    if not types <= set(_PLAIN):
        return "int8"
    return "bfloat16" if types == {_BF16} else "float32"


def _config(
    metadata: Mapping[str, Any], family: _Family, embedding: TensorInfo | None, problems: list[str]
) -> Config | None:
    """Read the sizes; what is wrong with them is added to `problems`."""
    architecture = metadata["general.architecture"]

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if type(value) is kind:
            return value
        fault = "is missing" if value is None else f"= {quoted(value)}"
        problems.append(f"{architecture}.{key} {fault}, expected {'an integer' if kind is int else 'a number'}")
        return kind(1)

    found = len(problems)
    dim, n_heads = get("embedding_length", int), get("attention.head_count", int)
    norm = "layer_norm_epsilon" if family.switches.get("norm") == "layer" else "layer_norm_rms_epsilon"
    fields = {
        "dim": dim,
        "hidden_dim": get("feed_forward_length", int),
        "n_layers": get("block_count", int),
        "n_heads": n_heads,
        "n_kv_heads": get("attention.head_count_kv", int, n_heads),
        "vocab_size": embedding.shape[0] if embedding else get("vocab_size", int),
        "max_seq_len": get("context_length", int),
        "head_dim": get("attention.key_length", int, 0),
        "norm_eps": get(f"attention.{norm}", float),
        "rope_theta": get("rope.freq_base", float, 10000.0),
    }
    if len(problems) > found:
        return None
    try:
        config = Config(**fields, **family.switches)
    except ConfigError as e:
        problems.append(str(e))
        return None
    # What changes the computation, and the one value of it that jllama has.
    fixed = {
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.scaling.type": "none",
        "rope.scale_linear": 1.0,
        "expert_count": 0,
    }
    for key, expected in fixed.items():
        value = metadata.get(f"{architecture}.{key}", expected)
        if isinstance(value, np.ndarray) or value != expected:
            problems.append(f"{architecture}.{key} = {quoted(value)}, expected {expected!r}")
    return config


def _stretched(config: Config, divisors: Array) -> Config:
    """Find the `RopeScaling` that divides the rotary frequencies by `divisors [H/2]`.

    All known models have low and high factors of 1 and 4, and were first trained on a power of two of positions.

    Raises:
      ConfigError: there is none of that kind.
    """
    if divisors.shape != (config.head_dim // 2,):
        raise ConfigError(f"{list(divisors.shape)} divisors, expected [{config.head_dim // 2}]")
    if np.all(divisors == 1):
        return config
    plain = rotary_frequencies(config)
    for exponent in range(4, 24):
        scaling = RopeScaling(float(divisors.max()), 1.0, 4.0, 2**exponent)
        stretched = dataclasses.replace(config, rope_scaling=scaling)
        if np.allclose(divisors, plain / rotary_frequencies(stretched), rtol=1e-5, atol=0):
            return stretched
    raise ConfigError(f"divisors from {divisors.min():g} to {divisors.max():g} that are not those of Llama 3.1's kind")


def _sources(
    data: mmap.mmap, tensors: Mapping[str, TensorInfo], alignment: int, problems: list[str]
) -> dict[str, Source]:
    """Map all tensors, by the file's own names; what can't be mapped is added to `problems`."""
    sources = {}
    spans: list[tuple[int, int, str]] = []
    blocks = _block_types({tensor.type for tensor in tensors.values()} - set(_PLAIN))
    for name, (shape, kind, offset) in tensors.items():
        block = blocks.get(kind)
        if isinstance(block, str):
            problems.append(f"{name} {block}")
            continue
        if block is None:
            size = math.prod(shape) * _PLAIN[kind].itemsize
        elif len(shape) == 2 and shape[1] % block.numbers == 0:
            size = shape[0] * shape[1] // block.numbers * block.size
        else:
            problems.append(f"{name} is {list(shape)}, expected rows of a multiple of {block.numbers} in {block.name}")
            continue
        spans.append((offset, size, name))
        if offset + size > len(data):
            problems.append(f"{name} has {size} bytes from byte {offset} on, but the file has {len(data)}")
        elif block is None:
            sources[name] = strided(data, _PLAIN[kind], offset, shape)
        else:
            sources[name] = _quantised(data, offset, shape, block)
    # Wrong offsets show in overlaps and gaps.
    for (start, size, name), (begin, _, other) in itertools.pairwise(sorted(spans)):
        if begin != (end := -(-(start + size) // alignment) * alignment) and not problems:
            problems.append(f"{other} begins at byte {begin}, expected {end}, where {name} ends")
    return sources


class _Block(NamedTuple):
    """A type that keeps a row as blocks of small integers with scales."""

    name: str
    numbers: int
    size: int  # in bytes
    dequantize: Callable[[Array], Array]  # uint8 [rows, bytes] to float32 [rows, numbers]


def _block_types(kinds: set[int]) -> dict[int, _Block | str]:
    """Return how to read each type of `kinds`, or why that can't be done."""
    if not kinds:
        return {}
    if importlib.util.find_spec("gguf") is None:
        reason = "is quantised (type {}): `pip install gguf` installs what reads it"
        return {kind: reason.format(kind) for kind in kinds}
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    def block_type(kind: int) -> _Block | str:
        try:
            quantization = GGMLQuantizationType(kind)
            numbers, size = GGML_QUANT_SIZES[quantization]
            dequantize(np.zeros((1, size), np.uint8), quantization)
        except (ValueError, KeyError, NotImplementedError):
            name = GGMLQuantizationType(kind).name if kind in list(GGMLQuantizationType) else "unknown"
            return f"is of type {kind} ({name}), which the gguf package can't widen"
        return _Block(quantization.name, numbers, size, lambda rows: dequantize(rows, quantization))

    return {kind: block_type(kind) for kind in kinds}


def _quantised(data: mmap.mmap, offset: int, shape: tuple[int, ...], block: _Block) -> Source:
    row = shape[1] // block.numbers * block.size

    def read(start: int, stop: int) -> Array:
        release(data)
        blocks = np.frombuffer(data, np.uint8, (stop - start) * row, offset + start * row)
        with np.errstate(invalid="ignore", over="ignore"):  # scales that aren't finite stay so, and show in the logits
            return block.dequantize(blocks.reshape(-1, row))

    return Source(shape, read)


def _renamed(raw: Mapping[str, Source], config: Config, names: Mapping[str, str]) -> dict[str, Source]:
    """Give the tensors Meta's names; those unknown keep their own."""
    sources = {}
    for name, source in raw.items():
        match = _NAME.fullmatch(name)
        layer, kind, suffix = match.groups() if match else ("", name, "")
        at = f"layers.{layer}." if layer else ""
        if kind == "attn_qkv" and source.shape[0] == config.q_dim + 2 * config.kv_dim:
            q, kv = config.q_dim, config.kv_dim
            for part, first, count in (("wq", 0, q), ("wk", q, kv), ("wv", q + kv, kv)):
                sources[f"{at}attention.{part}.{suffix}"] = rows_of(source, first, count)
        else:
            sources[f"{at}{names[kind]}.{suffix}" if kind in names else name] = source
    return sources
