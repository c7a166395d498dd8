"""Safetensors files: named tensors, mapped and read when asked for.

  8 bytes: length of the header; the header: JSON, name -> {dtype, shape, data_offsets}; then the data, without gaps.

All is little-endian. Source: the format's description in huggingface/safetensors, README.md. The library of that name
has no bfloat16 for NumPy, keeps the pages it has read in memory, and says neither which tensor is wrong nor more than
one problem.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import logging

from jllama.checkpoint.build import CheckpointError, blocks
from jllama.checkpoint.files import parse_json
from jllama.checkpoint.mapped import map_file, release
from jllama.checkpoint.source import Array, Source
from jllama.errors import listed, shown

FLOATS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
}

# What quantised weights are made of.
STORED: dict[str, np.dtype[Any]] = {
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
}

_OTHERS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0",
    16: "U16 I16",
    32: "U32 I32",
    64: "U64 I64 C64",
}
_BITS = {name: 8 * dtype.itemsize for name, dtype in FLOATS.items()}
_BITS |= {name: bits for bits, names in _OTHERS.items() for name in names.split()}
_MAX_HEADER = 100_000_000  # the library's own limit
_MAX_AXES = 32


class Tensor(NamedTuple):
    """A tensor of a file; `view()` gives all of it, mapped: only what is touched is read.

    `view` gives memory back that earlier views have read, and needs a dtype of `FLOATS` or `STORED`.
    """

    dtype: str
    shape: tuple[int, ...]
    view: Callable[[], Array]


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read(path: Path) -> dict[str, Tensor]:
    """Check a file's header and size, and map its tensors without reading them.

    Raises:
      CheckpointError: the file does not hold what its header says; every wrong tensor is named.
      OSError: the file cannot be opened.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if len(head) < 8:
            raise CheckpointError(f"{path}: expected the header's length in 8 bytes, found {len(head)} bytes")
        (length,) = struct.unpack("<Q", head)
        start = 8 + length
        if not 2 <= length <= _MAX_HEADER or start > size:
            raise CheckpointError(f"{path}: header of {length} bytes in a file of {size} bytes")
        header = parse_json(file.read(length), f"{path}: header")
        data = map_file(file)
    header.pop("__metadata__", None)
    problems: list[str] = []
    entries = {name: _entry(name, fields, problems) for name, fields in header.items()}
    if not problems:
        problems = _misplaced(entries, size - start)
    if problems:
        raise CheckpointError(f"{path}: {listed(problems)}")
    return {name: _tensor(data, start + entry.begin, entry) for name, entry in entries.items()}


def shards(index: Path) -> dict[str, str]:
    """Read from a `model.safetensors.index.json` which file of its folder holds each tensor.

    Raises:
      CheckpointError: it does not say that, or a file is missing or outside the folder; all are named.
      OSError: it cannot be opened.
    """
    found = parse_json(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()) or not found:
        raise CheckpointError(f"{index}: weight_map: expected an object of tensors' names and their files")
    problems = []
    for name in sorted(set(found.values())):
        if Path(name).name != name or "\\" in name or name in ("", ".."):
            problems.append(f"{shown(name)} is not the name of a file in this folder")
        elif not (index.parent / name).is_file():
            problems.append(f"{shown(name)} is missing")
    if problems:
        raise CheckpointError(f"{index}: {listed(problems)}")
    return found


def read_shards(index: Path) -> dict[str, Tensor]:
    """Map the tensors that an index lists; each must be where the index has it, and nowhere else.

    Raises:
      CheckpointError: as `read` and `shards` do, for all files at once.
      OSError: a file cannot be opened.
    """
    places = shards(index)
    tensors: dict[str, Tensor] = {}
    problems = []
    for shard in sorted(set(places.values())):
        try:
            found = read(index.parent / shard)
        except CheckpointError as e:
            problems.append(str(e).removeprefix(f"{index.parent}{os.sep}"))
            continue
        if unlisted := [name for name in found if name not in places]:
            logging.warning("%s: left out, as the index doesn't list them: %s", index.parent / shard, listed(unlisted))
        for name in found:
            if (place := places.get(name, shard)) != shard:
                problems.append(f"{shown(name)} is in {shown(shard)}, and in the index under {shown(place)}")
        problems += [
            f"{shown(name)} is not in {shown(shard)}" for name in places if places[name] == shard and name not in found
        ]
        tensors |= {name: tensor for name, tensor in found.items() if name in places}
    if problems:
        raise CheckpointError(f"{index}: {listed(problems)}")
    return tensors


def write(file: BinaryIO, tensors: Mapping[str, tuple[str, Source]]) -> None:
    """Write tensors, each with one of `FLOATS` to store it in, block of rows by block of rows."""
    # Wide ones first, as the library does, so that each begins at a multiple of its item size.
    order = sorted(tensors, key=lambda name: (-_BITS[tensors[name][0]], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    begin = 0
    for name in order:
        dtype, source = tensors[name]
        end = begin + math.prod(source.shape) * FLOATS[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(source.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        dtype, source = tensors[name]
        for start, stop in blocks(source.shape):
            file.write(source.read(start, stop).astype(FLOATS[dtype], copy=False).tobytes())


def _entry(name: str, fields: Any, problems: list[str]) -> _Entry:
    """Read what a header says of a tensor; what makes no sense goes to `problems`."""

    def sizes(value: Any) -> bool:
        return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)

    fields = fields if isinstance(fields, dict) else {}
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    wrong = []
    if not isinstance(dtype, str) or dtype not in _BITS:
        wrong.append(f"dtype {shown(dtype)}, expected one of safetensors'")
    if not sizes(shape) or len(shape) > _MAX_AXES:
        wrong.append(f"shape {shown(shape)}, expected a list of sizes")
    if not sizes(span) or len(span) != 2 or span[0] > span[1]:
        wrong.append(f"data_offsets {shown(span)}, expected its first byte and the one after its last")
    if not wrong and (bits := math.prod(shape) * _BITS[dtype]) != 8 * (span[1] - span[0]):
        wrong.append(f"{dtype} {shape} needs {-(-bits // 8)} bytes, data_offsets {span} are {span[1] - span[0]}")
    if wrong:
        problems.extend(f"{shown(name)}: {problem}" for problem in wrong)
        return _Entry("", (), 0, 0)
    return _Entry(dtype, tuple(shape), *span)


def _misplaced(entries: Mapping[str, _Entry], size: int) -> list[str]:
    """Name the tensors that overlap, leave a gap or lie outside the `size` bytes of data."""
    problems = []
    last, end = "the header", 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin < end:
            problems.append(f"{shown(name)} begins at byte {entry.begin} of the data, inside {shown(last)}")
        elif entry.begin > end:
            problems.append(f"{entry.begin - end} bytes between {shown(last)} and {shown(name)} belong to no tensor")
        if entry.end > size:
            problems.append(f"{shown(name)} ends at byte {entry.end} of the data, expected at most {size}")
        if entry.end >= end:
            last, end = name, entry.end
    if end < size:
        problems.append(f"{size - end} bytes after {shown(last)} belong to no tensor")
    return problems


def _tensor(data: mmap.mmap, offset: int, entry: _Entry) -> Tensor:
    def view() -> Array:
        release(data)
        dtype = (FLOATS | STORED)[entry.dtype]
        return np.frombuffer(data, dtype, math.prod(entry.shape), offset).reshape(entry.shape)

    return Tensor(entry.dtype, entry.shape, view)
