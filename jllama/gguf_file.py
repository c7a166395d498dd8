"""GGUF files: their metadata, and where the tensors lie. Nothing that a file says is trusted.

All is little-endian: magic, version, the counts of tensors and of metadata; the metadata (a key, a type, a value);
each tensor's name, dimensions (innermost first), type and offset; from the next multiple of the alignment on, the
tensors. Source of the layout: docs/gguf.md in ggml-org/ggml; versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"GGUF"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32


class GGUFError(ValueError):
    """A file that is no GGUF file, or a damaged one."""


class TensorInfo(NamedTuple):
    """Where a tensor lies."""

    shape: tuple[int, ...]  # outermost dimension first, so a matrix is [out, in]
    type: int  # of ggml: 0 is F32, 1 F16, 30 BF16, most others are blocks of small integers
    offset: int  # from the start of the file


class Header(NamedTuple):
    """What a file says about itself."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def metadata(path: str | Path) -> dict[str, Any]:
    """Read a file's metadata: str, int, float and bool, arrays of numbers as NumPy's, of strings as lists.

    Strings that aren't UTF-8 keep their bytes as surrogates: `.encode("utf-8", "surrogateescape")` gives them back.

    Raises:
      GGUFError: the file is no GGUF file of version 2 or 3, or damaged.
      OSError: the file cannot be opened.
    """
    return _parse(path, with_tensors=False).metadata


def read(path: str | Path) -> Header:
    """Read a file's metadata and tensor list; every tensor starts within the file, its end is not checked.

    Raises like `metadata`, with all problems of the tensor list in one message.
    """
    return _parse(path, with_tensors=True)


def _parse(path: str | Path, *, with_tensors: bool) -> Header:
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise GGUFError(f"{path}: expected a GGUF file, which begins with {MAGIC!r}")
        # Only the pages that the header touches are read.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(_Reader(data), with_tensors=with_tensors)
            except GGUFError as e:
                raise GGUFError(f"{path}: {e}") from e


def _header(reader: _Reader, *, with_tensors: bool) -> Header:
    reader.at = len(MAGIC)
    version = reader.number("I")
    if version not in (2, 3):
        found = "big-endian byte order" if version & 0xFFFF == 0 and version else f"version {version}"
        raise GGUFError(f"GGUF in {found}, expected little-endian of version 2 or 3")
    n_tensors, n_values = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        key = reader.string()
        if key in metadata:
            raise GGUFError(f"the key {key[:80]!r} occurs twice")
        try:
            metadata[key] = reader.value(reader.number("I"))
        except GGUFError as e:
            raise GGUFError(f"{key[:80]!r}: {e}") from e
    return Header(metadata, _tensors(reader, n_tensors, metadata) if with_tensors else {})


def _tensors(reader: _Reader, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise GGUFError(f"general.alignment = {ascii(alignment)[:40]}: expected a power of two")
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for _ in range(count):
        name = reader.string()
        if not name.isprintable():
            raise GGUFError(f"a tensor is named {name[:80]!r}, expected printable characters")
        n_dims = reader.number("I")
        if not 1 <= n_dims <= _MAX_DIMS:  # what follows can't be found then
            raise GGUFError("; ".join([*problems, f"{name} has {n_dims} dimensions, expected 1 to {_MAX_DIMS}"]))
        shape = tuple(reader.number("Q") for _ in range(n_dims))[::-1]
        kind, offset = reader.number("I"), reader.number("Q")
        if name in tensors:
            problems.append(f"the tensor {name} occurs twice")
        if math.prod(shape) == 0:
            problems.append(f"{name} is {list(shape)}, expected no dimension of 0")
        if offset % alignment:
            problems.append(f"{name} is at offset {offset}, expected a multiple of {alignment}")
        tensors[name] = TensorInfo(shape, kind, offset)
    start = -(-reader.at // alignment) * alignment
    for name, tensor in tensors.items():
        tensors[name] = tensor._replace(offset=start + tensor.offset)
        if tensors[name].offset >= reader.size:
            problems.append(f"{name} begins at byte {start + tensor.offset}, but the file has {reader.size}")
    if problems:
        raise GGUFError("; ".join(problems))
    return tensors


class _Reader:
    """Takes values off a buffer, one after another, and never past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.size = data, 0, len(data)

    def skip(self, count: int) -> int:
        """Move over `count` bytes and return where they begin."""
        at = self.at
        if count > self.size - at:
            raise GGUFError(f"{count} bytes expected from byte {at} on, but the file has {self.size}")
        self.at += count
        return at

    def number(self, code: str) -> Any:
        code = f"<{code}"
        (value,) = struct.unpack_from(code, self.data, self.skip(struct.calcsize(code)))
        return value

    def string(self) -> str:
        size = self.number("Q")
        return self.data[self.skip(size) : self.at].decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        if (code := _SCALARS.get(kind)) is None:
            raise GGUFError(f"value of type {kind}, expected 0 to 12")
        value = self.number(code)
        return float(str(np.float32(value))) if code == "f" else value  # 1e-05, not 9.999999747378752e-06

    def array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            if count * 8 > self.size - self.at:
                raise GGUFError(f"{count} strings expected from byte {self.at} on, but the file has {self.size} bytes")
            return [self.string() for _ in range(count)]
        if (code := _SCALARS.get(kind)) is None:
            raise GGUFError(f"array of type {kind}, expected one of numbers or strings")
        dtype = np.dtype(f"<{code}")
        return np.frombuffer(self.data[self.skip(count * dtype.itemsize) : self.at], dtype)
