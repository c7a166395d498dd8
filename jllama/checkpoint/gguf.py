"""GGUF files: the models of llama.cpp, in every type of number that the `gguf` package can widen.

Source: docs/gguf.md in ggml-org/ggml.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jllama import gguf_file, rope
from jllama.checkpoint.build import CheckpointError, Contents
from jllama.checkpoint.mapped import map_file, release, strided
from jllama.checkpoint.named import arranged, present
from jllama.checkpoint.source import Array, Source, Stored
from jllama.config import Config, ConfigError
from jllama.errors import listed, quoted, shown
from jllama.families import GGUF, Fields, config_of
from jllama.gguf_file import GGUFError, Header, TensorInfo
from jllama.rotary import rotary_frequencies
from jllama.tensors import fitted

_PLAIN = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype(jnp.bfloat16)}
_BF16 = 30

_ROPE_DIVISORS = "rope_freqs.weight"
_LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")


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
    if (family := GGUF.get(str(architecture))) is None:
        expected = ", ".join(GGUF)
        raise CheckpointError(f"{path}: general.architecture = {quoted(architecture)}, expected one of {expected}")
    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    raw: dict[str, Source] = {}
    for part, (keys, found) in parts.items():
        problems += [f"{shown(name)} is in two of the model's files" for name in found.keys() & tensors.keys()]
        tensors |= found
        with open(part, "rb") as file:
            data = map_file(file)
        found = {name: _flat(tensor, metadata.get(f"{architecture}.expert_count")) for name, tensor in found.items()}
        raw |= _sources(data, found, keys.get("general.alignment", gguf_file.DEFAULT_ALIGNMENT), problems)
    divisors = raw.pop(_ROPE_DIVISORS, None)
    fields = _fields(metadata, str(path), tensors)
    if all(name in raw for name in _LONGROPE):
        numbers = [source.read(0, source.shape[0]) for source in map(raw.pop, _LONGROPE)]
        fields.values = dict(fields.values) | {"rope_factors": tuple(tuple(x.ravel().tolist()) for x in numbers)}
    try:
        config, _ = config_of(family.config, fields, strict=True)
        if divisors is not None:
            config = _stretched(config, divisors.read(0, divisors.shape[0]))
    except ConfigError as e:
        raise CheckpointError(f"{path}: {listed([*problems, str(e)])}") from e
    if config.n_layers > len(tensors):  # else a damaged file could ask for billions of names
        problems.append(f"{architecture}.block_count = {config.n_layers}: the file holds only {len(tensors)} tensors")
        raise CheckpointError(f"{path}: {listed(problems)}")
    config = fitted(config, present(family.layout, tensors))
    sources = arranged(family.layout, config, raw, problems)
    if problems:
        raise CheckpointError(f"{path}: {listed(problems)}")
    return Contents(config, sources, _nearest_dtype(tensors))


def _nearest_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    types = {t.type for name, t in tensors.items() if len(t.shape) > 1 and not name.endswith("ffn_gate_inp.weight")}
    if not types <= set(_PLAIN):
        return "int8"
    return "bfloat16" if types == {_BF16} else "float32"


def _fields(metadata: Mapping[str, Any], origin: str, tensors: Mapping[str, TensorInfo]) -> Fields:
    """Give the keys of the architecture, and the number of ids where only the embedding tells it."""
    prefix = f"{metadata['general.architecture']}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if (embedding := tensors.get("token_embd.weight")) is not None:
        values["vocab_size"] = embedding.shape[0]
    return Fields(values, origin, prefix)


def _stretched(config: Config, divisors: Array) -> Config:
    """Find the formula that divides the rotary frequencies by `divisors [R/2]`: Llama 3.1's where that fits.

    All known models of it have low and high factors of 1 and 4, and were first trained on a power of two of positions.

    Raises:
      ConfigError: numbers that make no sense.
    """
    if config.rope_scaling is not None:
        raise ConfigError(f"{_ROPE_DIVISORS}: not supported beside another stretch, {config.rope_scaling}")
    if divisors.shape == (config.rotated_dim // 2,) and np.all(divisors == 1):
        return config
    try:
        divided = dataclasses.replace(config, rope_scaling=rope.Divided(tuple(divisors.ravel().tolist())))
    except ConfigError as e:
        raise ConfigError(f"{_ROPE_DIVISORS}: {e}") from e
    if np.all(divisors == divisors[0]):
        return dataclasses.replace(config, rope_scaling=rope.Linear(float(divisors[0])))
    for exponent in range(4, 24):
        scaling = rope.Llama3(float(divisors.max()), 1.0, 4.0, 2**exponent)
        stretched = dataclasses.replace(config, rope_scaling=scaling)
        if scaling.factor > 1 and np.allclose(
            rotary_frequencies(divided), rotary_frequencies(stretched), rtol=1e-5, atol=0
        ):
            return stretched
    return divided


def _flat(tensor: TensorInfo, experts: Any) -> TensorInfo:
    """Take the matrices of all experts `[E, out, in]` as one of E * out rows."""
    if len(tensor.shape) != 3 or tensor.shape[0] != experts:
        return tensor
    return tensor._replace(shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))


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

    def blocks(start: int, stop: int) -> Array:
        release(data)
        return np.frombuffer(data, np.uint8, (stop - start) * row, offset + start * row).reshape(-1, row)

    def read(start: int, stop: int) -> Array:
        with np.errstate(invalid="ignore", over="ignore"):  # scales that aren't finite stay so, and show in the logits
            return block.dequantize(blocks(start, stop))

    return Source(shape, read, stored=Stored(block.name.lower(), blocks))
