"""GGUF files: their metadata, and where the tensors lie. Nothing that a file says is trusted.

All is little-endian: magic, version, the counts of tensors and of metadata; the metadata (a key, a type, a value);
each tensor's name, dimensions (innermost first), type and offset; from the next multiple of the alignment on, the
tensors. Source of the layout: docs/gguf.md in ggml-org/ggml; versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jllama.errors import InputError, listed, quoted, shown

MAGIC = b"GGUF"

_MAX_HEADER = 1 << 28  # bytes; files can be sparse, so their size bounds nothing
_MAX_KEY = 65535  # the format's own limit
_MAX_STRING = 1 << 26
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_BIG_ENDIAN = "GGUF in big-endian byte order, expected little-endian"
DEFAULT_ALIGNMENT = 32


class GGUFError(InputError):
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


def recognises(head: bytes) -> bool:
    """Whether a file that begins with `head` is a GGUF file, of either byte order."""
    return head[:4] in (MAGIC, MAGIC[::-1])


def read(path: str | Path) -> Header:
    """Read a file's metadata and tensor list; every tensor starts within the file, its end is not checked.

    Metadata are str, int, float and bool, arrays of numbers as NumPy's, of strings as lists. Strings that aren't UTF-8
    keep their bytes as surrogates: `.encode("utf-8", "surrogateescape")` gives them back.

    Raises:
      GGUFError: the file is no GGUF file of version 2 or 3, or damaged.
      OSError: the file cannot be opened.
    """
    with open(path, "rb") as file:
        head = file.read(4)
        if not recognises(head):
            raise GGUFError(f"{path}: expected a GGUF file, which begins with {MAGIC!r}")
        if head != MAGIC:
            raise GGUFError(f"{path}: {_BIG_ENDIAN}")
        # Only the pages that the header touches are read.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(_Reader(data))
            except GGUFError as e:
                raise GGUFError(f"{path}: {e}") from e


def header_of(path: Path) -> Header | None:
    """Read the header of a file that several readers will want; None where it has none: they say what is wrong."""
    try:
        return read(path)
    except (GGUFError, OSError):
        return None


def read_parts(path: Path, header: Header | None = None) -> dict[Path, Header]:
    """Read the headers of a model that may be split over several files; all metadata but `split.*` are in the first.

    Args:
      path: the model, or the first of its parts, `NAME-00001-of-00003.gguf`, which lie beside each other.
      header: that of `path`, where it was read already.

    Raises:
      GGUFError: a file is damaged or missing, or `path` is another part than the first.
      OSError: a file cannot be opened.
    """
    header = header or read(path)
    number, count = (header.metadata.get(key, default) for key, default in (("split.no", 0), ("split.count", 1)))
    if count in (0, 1):
        return {path: header}
    match = _PART.fullmatch(path.name)
    if match is None or (int(match[2]), int(match[3])) != (number + 1, count):
        message = f"part {quoted(number)} (from 0) of {quoted(count)} by its metadata: expected a name such as"
        raise GGUFError(f"{path}: {message} NAME-00001-of-00003.gguf to say the same")
    files = [path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if number:
        raise GGUFError(f"{path}: part {number + 1} of a model in {count} files: expected the first, {files[0].name}")
    if missing := [file.name for file in files if not file.is_file()]:
        raise GGUFError(f"{path}: part 1 of a model in {count} files, and beside it are missing: {listed(missing)}")
    parts = {path: header} | {file: read(file) for file in files[1:]}
    found = sum(len(part.tensors) for part in parts.values())
    if found != (expected := header.metadata.get("split.tensors.count", found)):
        raise GGUFError(f"{path}: {found} tensors in its {count} files, expected {quoted(expected)}")
    return parts


def _header(reader: _Reader) -> Header:
    reader.at = len(MAGIC)
    version = reader.number("I")
    if version not in (2, 3):
        is_swapped = version and version & 0xFFFF == 0
        raise GGUFError(_BIG_ENDIAN if is_swapped else f"GGUF of version {version}, expected 2 or 3")
    n_tensors, n_values = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        key = reader.string(_MAX_KEY)
        if key in metadata:
            raise GGUFError(f"the key {shown(key)} occurs twice")
        try:
            metadata[key] = reader.value(reader.number("I"))
        except GGUFError as e:
            raise GGUFError(f"{shown(key)}: {e}") from e
    return Header(metadata, _tensors(reader, n_tensors, metadata))


def _tensors(reader: _Reader, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise GGUFError(f"general.alignment = {quoted(alignment)}: expected a power of two")
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for _ in range(count):
        name = reader.string(_MAX_KEY)
        if not name.isprintable():
            raise GGUFError(f"a tensor is named {shown(name)}, expected printable characters")
        n_dims = reader.number("I")
        if not 1 <= n_dims <= _MAX_DIMS:  # what follows can't be found then
            problems.append(f"{shown(name)} has {n_dims} dimensions, expected 1 to {_MAX_DIMS}")
            raise GGUFError(listed(problems))
        shape = tuple(reader.number("Q") for _ in range(n_dims))[::-1]
        kind, offset = reader.number("I"), reader.number("Q")
        if name in tensors:
            problems.append(f"the tensor {shown(name)} occurs twice")
        if math.prod(shape) == 0:
            problems.append(f"{shown(name)} is {list(shape)}, expected no dimension of 0")
        if offset % alignment:
            problems.append(f"{shown(name)} is at offset {offset}, expected a multiple of {alignment}")
        tensors[name] = TensorInfo(shape, kind, offset)
    start = -(-reader.at // alignment) * alignment
    for name, tensor in tensors.items():
        tensors[name] = tensor._replace(offset=start + tensor.offset)
        if tensors[name].offset >= reader.size:
            problems.append(f"{shown(name)} begins at byte {start + tensor.offset}, but the file has {reader.size}")
    if problems:
        raise GGUFError(listed(problems))
    return tensors


class _Reader:
    """Takes values off a buffer, one after another, and never past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.size = data, 0, len(data)
        self.end = min(self.size, _MAX_HEADER)

    def skip(self, count: int) -> int:
        """Move over `count` bytes and return where they begin."""
        at = self.at
        if count > self.end - at:
            self.fail(f"{count} bytes expected from byte {at} on")
        self.at += count
        return at

    def fail(self, expected: str) -> NoReturn:
        limit = f", of which a header can take {self.end}" if self.end < self.size else ""
        raise GGUFError(f"{expected}, but the file has {self.size}{limit}")

    def number(self, code: str) -> Any:
        code = f"<{code}"
        (value,) = struct.unpack_from(code, self.data, self.skip(struct.calcsize(code)))
        return value

    def string(self, longest: int = _MAX_STRING) -> str:
        size = self.number("Q")
        if size > longest:
            raise GGUFError(f"a string of {size} bytes at byte {self.at}, expected at most {longest}")
        return self.data[self.skip(size) : self.at].decode("utf-8", "surrogateescape")

    def strings(self, count: int) -> list[str]:
        if count * 8 > self.end - self.at:
            self.fail(f"{count} strings expected from byte {self.at} on")
        # A vocabulary has hundreds of thousands: what `string` does, in one loop.
        data, at, end, size_at = self.data, self.at, self.end, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if at + 8 > end:
                break
            (size,) = size_at(data, at)
            start, at = at + 8, at + 8 + size
            if at > end:
                break
            found.append(data[start:at].decode("utf-8", "surrogateescape"))
        if len(found) < count:
            self.fail(f"{count} strings expected from byte {self.at} on, {len(found)} of them found")
        self.at = at
        return found

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
            return self.strings(count)
        if (code := _SCALARS.get(kind)) is None:
            raise GGUFError(f"array of type {kind}, expected one of numbers or strings")
        dtype = np.dtype(f"<{code}")
        return np.frombuffer(self.data[self.skip(count * dtype.itemsize) : self.at], dtype)
