"""llama2.c's `.bin` files: version 0 (legacy) and 1 in float32, version 2 in int8 groups.

Layouts and the quantiser's rounding follow `export.py` of karpathy/llama2.c.

  version 0: 7 int32 (below; a negative vocab_size means a head of its own), then the tensors.
  version 1: uint32 magic, int32 1, the 7 int32, a byte that is 1 where the head is tied; at byte 256 the tensors.
  version 2: the same with int32 group_size after that byte; matrices are int8 values, then their float32 scales.

All is little-endian. Rotary pairs are interleaved.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jllama.checkpoint.build import CheckpointError, Contents, blocks, sources_of
from jllama.checkpoint.files import replacing
from jllama.checkpoint.mapped import map_file, release
from jllama.checkpoint.source import Array, Source, Stored
from jllama.config import Config, ConfigError
from jllama.model import Params
from jllama.tensors import tensors

MAGIC = 0x616B3432
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")

_GROUP_SIZE = 64
_TABLES = ("freqs_cos", "freqs_sin")  # version 0 stores the rotary tables; they are written, and skipped when read
_NORMS = ("layers.{}.attention_norm.weight", "layers.{}.ffn_norm.weight", "norm.weight")
_ATTENTION = tuple(f"layers.{{}}.attention.{name}.weight" for name in ("wq", "wk", "wv", "wo"))
_FEED_FORWARD = tuple(f"layers.{{}}.feed_forward.{name}.weight" for name in ("w1", "w2", "w3"))

# `{}` stands for each layer's tensor in turn.
_ORDER_0 = ("tok_embeddings.weight", _NORMS[0], *_ATTENTION, _NORMS[1], *_FEED_FORWARD, _NORMS[2], *_TABLES)
_ORDER_1 = (*_NORMS, "tok_embeddings.weight", *_ATTENTION, *_FEED_FORWARD)


class Header(NamedTuple):
    """What a file's header says."""

    version: int
    config: Config
    group_size: int = 0  # int8 values to a scale; 0 where matrices are float32


def read(path: Path) -> Contents:
    """Check a file's header and size, and map its tensors without reading them.

    Raises:
      CheckpointError: the header makes no model (every wrong field is named), or the size is not what it asks for.
      OSError: the file cannot be opened.
    """
    with open(path, "rb") as file:
        header = _parse(file.read(256), path)
        found, expected = os.fstat(file.fileno()).st_size, file_size(header)
        if found != expected:
            sizes = ", ".join(f"{field} {getattr(header.config, field)}" for field in FIELDS)
            message = f"expected {expected} bytes for a llama2.c file of version {header.version} ({sizes})"
            raise CheckpointError(f"{path}: {message}, found {found}")
        data = map_file(file)
    sources, offset = {}, _start(header.version)
    for kind, shape in _layout(header):
        for name in _expand(kind, header.config):
            if name not in _TABLES:
                sources[name] = _source(data, offset, shape, header.group_size)
            offset += _tensor_size(shape, header.group_size)
    # Groups of other sizes can only be widened.
    return Contents(header.config, sources, "q80" if header.group_size and header.group_size % 32 == 0 else "float32")


def file_size(header: Header) -> int:
    """Return the bytes of a whole file."""
    config, tensors = header.config, 0
    for kind, shape in _layout(header):
        tensors += _tensor_size(shape, header.group_size) * (config.n_layers if "{}" in kind else 1)
    return _start(header.version) + tensors


def save(params: Params, path: str | Path, *, version: int = 0) -> None:
    """Write a model as a llama2.c file, which appears under its name only when it is complete.

    Args:
      params: the model; weights of other dtypes are widened to float32 first.
      path: the file, replaced if it exists.
      version: 0 or 1 for float32, 2 for int8 in groups of 64 (halved until they divide `dim`).

    Raises:
      CheckpointError: the format has no place for something in the model's config; all of it is named.
      OSError: the file cannot be written.
    """
    path = Path(path)
    header = _header_for(params, version, path)
    sources = sources_of(params)
    sources |= dict(zip(_TABLES, _rotary_tables(header.config), strict=True))
    with replacing(path) as file:
        file.write(_pack(header))
        for kind, _ in _layout(header):
            for name in _expand(kind, header.config):
                _write(file, sources[name], header.group_size)


def _parse(head: bytes, path: Path) -> Header:
    magic, version = struct.unpack_from("<Ii", head) if len(head) >= 8 else (0, 0)
    if magic != MAGIC:
        version = 0
    elif version not in (1, 2):
        raise CheckpointError(f"{path}: llama2.c file of version {version}, expected 1 or 2 (or 0, without the magic)")
    if len(head) < _start(version):
        raise CheckpointError(f"{path}: expected a header of {_start(version)} bytes, found {len(head)} bytes")
    fields = dict(zip(FIELDS, struct.unpack_from("<7i", head, 8 if version else 0), strict=True))
    group_size = 0
    if version == 0:
        tied = fields["vocab_size"] > 0
        fields["vocab_size"] = abs(fields["vocab_size"])
    else:
        tied = head[36] != 0
    try:
        header = Header(version, Config(**fields, tied=tied))
        if version == 2:
            (group_size,) = struct.unpack_from("<i", head, 37)
            sizes = [math.prod(shape) for _, shape in _layout(header) if len(shape) == 2]
            if group_size < 1 or any(size % group_size for size in sizes):
                raise ConfigError(f"group_size = {group_size}: expected a divisor of the size of every matrix")
    except ConfigError as e:
        raise CheckpointError(f"{path}: wrong header for a llama2.c file of version {version}: {e}") from e
    return header._replace(group_size=group_size)


def _start(version: int) -> int:
    return 256 if version else 28


def _pack(header: Header) -> bytes:
    fields = [getattr(header.config, field) for field in FIELDS]
    if header.version == 0:
        fields[FIELDS.index("vocab_size")] *= 1 if header.config.tied else -1
        return struct.pack("<7i", *fields)
    start = struct.pack("<Ii7iB", MAGIC, header.version, *fields, header.config.tied)
    return (start + (struct.pack("<i", header.group_size) if header.version == 2 else b"")).ljust(256, b"\0")


def _layout(header: Header) -> list[tuple[str, tuple[int, ...]]]:
    """Return the kinds of tensors and their shapes in file order."""
    config = header.config
    shapes = {tensor.name: tensor.shape for tensor in tensors(config)}
    shapes |= dict.fromkeys(_TABLES, (config.max_seq_len, config.head_dim // 2))
    order = (_ORDER_1 if header.version else _ORDER_0) + (() if config.tied else ("output.weight",))
    return [(kind, shapes[kind]) for kind in order]


def _expand(kind: str, config: Config) -> list[str]:
    return [kind.format(i) for i in range(config.n_layers)] if "{}" in kind else [kind]


def _tensor_size(shape: tuple[int, ...], group_size: int) -> int:
    count = math.prod(shape)
    return count + count // group_size * 4 if group_size and len(shape) == 2 else count * 4


def _source(data: mmap.mmap, offset: int, shape: tuple[int, ...], group_size: int) -> Source:
    count, width = math.prod(shape), math.prod(shape[1:])

    def read(start: int, stop: int) -> Array:
        release(data)
        return np.frombuffer(data, "<f4", (stop - start) * width, offset + start * width * 4).reshape(-1, *shape[1:])

    def read_groups(start: int, stop: int) -> Array:
        release(data)
        # Groups run over the flattened matrix and may cross the ends of rows: take all that these rows touch.
        first, last = start * width // group_size, -(-stop * width // group_size)
        values = np.frombuffer(data, np.int8, (last - first) * group_size, offset + first * group_size)
        scales = np.frombuffer(data, "<f4", last - first, offset + count + first * 4)
        with np.errstate(invalid="ignore", over="ignore"):  # scales that aren't finite stay so, and show in the logits
            flat: Array = (values.reshape(-1, group_size) * scales[:, None]).ravel()
        return flat[start * width - first * group_size :][: (stop - start) * width].reshape(-1, width)

    def blocks_of(start: int, stop: int) -> Array:
        """Give rows of values and scales as blocks of q80: a scale for each 32 values."""
        release(data)
        first, last = start * width // 32, stop * width // 32
        values = np.frombuffer(data, np.int8, (last - first) * 32, offset + first * 32).reshape(-1, 32)
        scales = np.frombuffer(data, "<f4", count // group_size, offset + count)
        own = scales[np.arange(first, last) * 32 // group_size]
        joined = np.concatenate([own.astype("<f4")[:, None].view(np.uint8), values.view(np.uint8)], axis=1)
        return joined.reshape(stop - start, -1)

    if not group_size or len(shape) != 2:
        return Source(shape, read)
    is_kept = math.gcd(group_size, width) % 32 == 0
    return Source(shape, read_groups, stored=Stored("q80", blocks_of) if is_kept else None)


def _header_for(params: Params, version: int, path: Path) -> Header:
    config = params.config
    if version not in (0, 1, 2):
        raise CheckpointError(f"{path}: version = {version}: expected 0, 1 or 2")
    problems = []
    if config.head_dim * config.n_heads != config.dim:
        problems.append(f"head_dim = {config.head_dim} (only dim / n_heads = {config.dim / config.n_heads:g})")
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        if field.name not in (*FIELDS, "head_dim", "tied") and value != field.default:
            problems.append(f"{field.name} = {value} (only {field.default})")
    if problems:
        raise CheckpointError(f"{path}: a llama2.c file cannot hold {', '.join(problems)}")
    group_size = math.gcd(_GROUP_SIZE, config.dim) if version == 2 else 0
    return Header(version, config, group_size)


def _rotary_tables(config: Config) -> tuple[Source, Source]:
    """Return cos and sin of every position's angles, float32 `[S, H/2]`."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = 1 / np.float32(config.rope_theta) ** exponent
    shape = (config.max_seq_len, config.head_dim // 2)

    def angles(start: int, stop: int) -> Array:
        return np.outer(np.arange(start, stop, dtype=np.float32), frequencies)

    return Source(shape, lambda start, stop: np.cos(angles(start, stop))), Source(
        shape, lambda start, stop: np.sin(angles(start, stop))
    )


def _write(file: BinaryIO, source: Source, group_size: int) -> None:
    if not (group_size and len(source.shape) == 2):
        for start, stop in blocks(source.shape):
            file.write(source.read(start, stop).astype("<f4", copy=False).tobytes())
        return
    scales = []
    for start, stop in blocks(source.shape, multiple=group_size):
        values, scale = _quantize_groups(source.read(start, stop), group_size)
        file.write(values.tobytes())
        scales.append(scale.astype("<f4", copy=False).tobytes())
    file.writelines(scales)


def _quantize_groups(block: Array, group_size: int) -> tuple[Array, Array]:
    """Quantise as export.py does, bit for bit, but for groups of zeros, which it divides by zero."""
    groups = block.reshape(-1, group_size)
    scale = np.abs(groups).max(axis=1) / np.float32(127)
    quotient = np.divide(groups, scale[:, None], out=np.zeros_like(groups), where=scale[:, None] > 0)
    return np.rint(quotient).astype(np.int8), scale
