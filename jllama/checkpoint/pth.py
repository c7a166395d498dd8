"""PyTorch's `.pth` files, read without PyTorch and without running what is in them.

`torch.save` writes a zip archive, nothing in it compressed: `NAME/data.pkl`, a pickle of the tensors' names, shapes,
strides and offsets; `NAME/data/KEY`, the numbers of each storage. A pickle is a program that may call any function
of Python: here it can call two, and both are stand-ins.
Source of the layout: torch/serialization.py and torch/_utils.py (`_rebuild_tensor_v2`) in pytorch/pytorch.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from jllama.checkpoint.build import CheckpointError
from jllama.checkpoint.mapped import map_file, strided
from jllama.checkpoint.source import Source
from jllama.errors import listed, shown

MAGIC = b"PK\3\4"

_MAX_PICKLE = 1 << 26
_MAX_AXES = 8
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE),
    *(pickle.BINPERSID, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.GET, pickle.BINGET),
    *(pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.INT, pickle.BININT, pickle.BININT1),
    *(pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.UNICODE, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND),
    *(pickle.APPENDS, pickle.EMPTY_DICT),
)

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
                if blobs[f"{folder}data.pkl"][1] > _MAX_PICKLE:
                    raise ValueError(f"its data.pkl is larger than {_MAX_PICKLE} bytes")
                views = archive.read(f"{folder}data.pkl")
        except (zipfile.BadZipFile, ValueError, struct.error, RuntimeError, EOFError, OverflowError, OSError) as e:
            raise CheckpointError(f"{path}: a damaged or incomplete zip archive: {e}") from e
    if order != b"little":
        raise CheckpointError(f"{path}: byte order {order[:20]!r}, expected b'little'")
    tensors: dict[str, Tensor] = {}
    problems = []
    for name, view in _unpickled(views, path).items():
        found = _tensor(view, blobs, f"{folder}data/", data)
        if isinstance(found, Tensor):
            tensors[name] = found
        elif name != "rope.freqs":
            problems.append(f"{shown(name)} {found}")
    # A few bytes must not stand for any number of weights; embedding and head may be one.
    total = sum(math.prod(tensor.source.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    if total > 2 * len(data):
        problems.append(f"tensors of {total} bytes in a file of {len(data)}")
    if problems:
        raise CheckpointError(f"{path}: {listed(problems)}")
    return tensors


def _blobs(archive: zipfile.ZipFile, data: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Return where each file of the archive begins, and its size."""
    blobs = {}
    for info in archive.infolist():
        if not 0 <= info.header_offset <= len(data) - 30 or info.flag_bits & 1:
            raise ValueError(f"{shown(info.filename)} is encrypted or cut short")
        # The names before the data have lengths of their own, which only the header there tells.
        signature, *_, name, extra = struct.unpack_from("<4s5H3I2H", data, info.header_offset)
        start = info.header_offset + 30 + name + extra
        if info.compress_type != zipfile.ZIP_STORED or signature != MAGIC or start + info.file_size > len(data):
            raise ValueError(f"{shown(info.filename)} is compressed or cut short")
        blobs[info.filename] = (start, info.file_size)
    return blobs


def _with_string_key(opcode: bytes) -> Callable[[Any], None]:
    """Give the base's function for SETITEM or SETITEMS, for dicts with no keys but strings."""
    base, is_many = pickle._Unpickler.dispatch[opcode[0]], opcode == pickle.SETITEMS

    def load(unpickler: Any) -> None:
        keys = unpickler.stack[::2] if is_many else unpickler.stack[-2:-1]
        if not all(isinstance(key, str) for key in keys):
            raise pickle.UnpicklingError("a key that is no string")
        base(unpickler)

    return load


def _refuse(unpickler: Any) -> NoReturn:
    raise pickle.UnpicklingError("an opcode that trees of tensors can do without")


def _without_attributes(unpickler: Any) -> None:
    """Drop the attributes that BUILD sets: of a state_dict, the versions of its modules."""
    unpickler.stack.pop()


class _Unpickler(pickle._Unpickler):
    """Builds the tree of tensors; whatever else the pickle asks for becomes an inert stand-in, and is noted.

    The base is the one in Python, where opcodes can be left out. Those that trees of tensors can do without are: some
    take any memory for a few bytes. So do keys that are no strings with time.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **dict.fromkeys(range(256), _refuse),
        **{opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES},
        **{opcode[0]: _with_string_key(opcode) for opcode in (pickle.SETITEM, pickle.SETITEMS)},
        pickle.BUILD[0]: _without_attributes,
    }

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.refused: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return lambda: OrderedDict()
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
        raise CheckpointError(f"{path}: a damaged pickle: {type(fault).__name__} {shown(str(fault))}") from fault
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise CheckpointError(f"{path}: holds a {type(tree).__name__}, expected a dict of tensors by their names")
    return tree


def _tensor(view: Any, blobs: dict[str, tuple[int, int]], folder: str, data: mmap.mmap) -> Tensor | str:
    """Map one tensor, or say what is wrong with it."""
    if not (isinstance(view, _View) and isinstance(view.storage, _Storage)):
        return f"is a {type(view).__name__}, expected a tensor"
    (kind, key, numbers), offset, shape, strides = view
    if not (isinstance(kind, str) and isinstance(key, str)):
        return "is in no storage"
    if (dtype := _DTYPES.get(kind)) is None:
        return f"is in a {shown(kind)}, expected {', '.join(_DTYPES)}"
    if f"{folder}{key}" not in blobs:
        return f"is in the storage {shown(key)}, which is not in the archive"
    counts = (numbers, offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (-1,)
    proper = all(type(n) is int and 0 <= n < 1 << 63 for n in counts) and 0 < len(counts) - 2 <= 2 * _MAX_AXES
    if not proper or len(shape) != len(strides) or 0 in shape:
        return "has no proper shape, strides and offset"
    start, size = blobs[f"{folder}{key}"]
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    needed = max(last + 1, math.prod(shape))  # the latter is more where strides are 0
    if numbers * dtype.itemsize > size or needed > numbers:
        return f"is {list(shape)} and needs {needed} numbers of a storage of {size // dtype.itemsize}"
    steps = tuple(stride * dtype.itemsize if n > 1 else 0 for n, stride in zip(shape, strides, strict=True))
    source = strided(data, dtype, start + offset * dtype.itemsize, shape, steps)
    return Tensor(source, dtype, (key, *view[1:]))
