"""PyTorch's `.pth` files, read without PyTorch and without running what is in them.

`torch.save` writes a zip archive, nothing in it compressed: `NAME/data.pkl`, a pickle of the tensors' names, shapes,
strides and offsets; `NAME/data/KEY`, the numbers of each storage. A pickle is a program that may call any function
of Python: here it can call two, and both are stand-ins.
Source of the layout: torch/serialization.py and torch/_utils.py (`_rebuild_tensor_v2`) in pytorch/pytorch.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jllama.checkpoint.build import CheckpointError
from jllama.checkpoint.mapped import map_file, strided
from jllama.checkpoint.source import Source

MAGIC = b"PK\3\4"

_DTYPES = {"FloatStorage": np.dtype("<f4"), "HalfStorage": np.dtype("<f2"), "BFloat16Storage": np.dtype(jnp.bfloat16)}


class Tensor(NamedTuple):
    """A tensor not yet read; two with equal places are one."""

    source: Source
    dtype: np.dtype
    place: tuple[Any, ...]


class _Storage(NamedTuple):
    kind: str  # "FloatStorage", "HalfStorage", ...
    key: str
    numbers: int


class _View(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a file without reading them.

    Raises:
      CheckpointError: it is no archive of tensors, is damaged, or its pickle asks for anything else than tensors.
      OSError: the file cannot be opened.
    """
    with open(path, "rb") as file:
        if not file.read(4).startswith(MAGIC):
            message = "not in the zip layout of PyTorch 1.6 and later: load it in PyTorch and torch.save it again"
            raise CheckpointError(f"{path}: {message}")
        data = map_file(file)
        try:
            with zipfile.ZipFile(file) as archive:
                blobs = _blobs(archive, data)
                folder = next((name.removesuffix("data.pkl") for name in blobs if name.endswith("/data.pkl")), None)
                if folder is None:
                    raise ValueError("there is no data.pkl in it")
                order = archive.read(f"{folder}byteorder") if f"{folder}byteorder" in blobs else b"little"
                views = archive.read(f"{folder}data.pkl")
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, EOFError, OSError) as e:
            raise CheckpointError(f"{path}: a damaged or incomplete zip archive: {e}") from e
    if order != b"little":
        raise CheckpointError(f"{path}: byte order {order[:20]!r}, expected b'little'")
    tensors, problems = {}, []
    for name, view in _unpickled(views, path).items():
        found = _tensor(view, blobs, f"{folder}data/", data)
        if isinstance(found, Tensor):
            tensors[name] = found
        elif name != "rope.freqs":
            problems.append(f"{name} {found}")
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    return tensors


def _blobs(archive: zipfile.ZipFile, data: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Return where each file of the archive begins, and its size."""
    blobs = {}
    for info in archive.infolist():
        # The names before the data have lengths of their own, which only the header there tells.
        signature, *_, name, extra = struct.unpack_from("<4s5H3I2H", data, info.header_offset)
        start = info.header_offset + 30 + name + extra
        if info.compress_type != zipfile.ZIP_STORED or signature != MAGIC or start + info.file_size > len(data):
            raise ValueError(f"{info.filename} is compressed or cut short")
        blobs[info.filename] = (start, info.file_size)
    return blobs


class _Unpickler(pickle._Unpickler):
    """Builds the tree of tensors; whatever else the pickle asks for becomes an inert stand-in, and is noted.

    The base is the one in Python: in the one in C, ten bytes can ask for more memory than there is.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.refused: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *rest: _View(storage, offset, shape, strides)
        if module == "torch" and name.endswith("Storage"):
            return name
        self.refused.append(f"{module}.{name}")
        return lambda *args, **kwargs: None

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, numbers = pid
        return _Storage(kind, key, numbers)


def _unpickled(data: bytes, path: Path) -> dict[str, Any]:
    unpickler = _Unpickler(data)
    fault: Exception | None = None
    tree: Any = None
    try:
        tree = unpickler.load()
    except Exception as e:  # a damaged pickle can fail in any way
        fault = e
    if unpickler.refused:
        names = ", ".join(sorted({ascii(name)[1:-1][:80] for name in unpickler.refused}))
        raise CheckpointError(f"{path}: its pickle asks for {names}, expected nothing but tensors; nothing was run")
    if fault is not None:
        raise CheckpointError(f"{path}: a damaged pickle: {type(fault).__name__} {ascii(str(fault))[:200]}") from fault
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise CheckpointError(f"{path}: holds a {type(tree).__name__}, expected a dict of tensors by their names")
    return tree


def _tensor(view: Any, blobs: dict[str, tuple[int, int]], folder: str, data: mmap.mmap) -> Tensor | str:
    """Map one tensor, or say what is wrong with it."""
    if not (isinstance(view, _View) and isinstance(view.storage, _Storage)):
        return f"is a {type(view).__name__}, expected a tensor"
    (kind, key, numbers), offset, shape, strides = view
    if (dtype := _DTYPES.get(str(kind))) is None:
        return f"is in a {kind}, expected {', '.join(_DTYPES)}"
    if f"{folder}{key}" not in blobs:
        return f"is in the storage {key}, which is not in the archive"
    counts = (numbers, offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (-1,)
    if not all(type(n) is int and n >= 0 for n in counts) or not shape or len(shape) != len(strides):
        return "has no proper shape, strides and offset"
    start, size = blobs[f"{folder}{key}"]
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if numbers * dtype.itemsize > size or (0 not in shape and last >= numbers):
        return f"is {list(shape)} and needs {last + 1} numbers of a storage of {size // dtype.itemsize}"
    source = strided(
        data, dtype, start + offset * dtype.itemsize, shape, tuple(stride * dtype.itemsize for stride in strides)
    )
    return Tensor(source, dtype, (key, *view[1:]))
