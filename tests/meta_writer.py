"""Meta's checkpoints and the layout of torch.save, made from the weights of the oracle."""

import io
import json
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import oracle

from jllama.config import Config

CONFIG = Config(32, 96, 2, 4, 4, vocab_size=48, max_seq_len=4096, norm_eps=1e-5)
PARAMS = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": -1, "multiple_of": 32, "norm_eps": 1e-5}


class Storage(NamedTuple):
    array: np.ndarray
    kind: str = ""


class View:
    """What a tensor is to the pickler: a part of a storage."""

    def __init__(self, storage: Storage, offset: int, shape: Any, strides: Any) -> None:
        self.parts = (storage, offset, shape, strides)

    def __reduce__(self) -> Any:
        return sys.modules["torch._utils"]._rebuild_tensor_v2, (*self.parts, False, OrderedDict())


class Pickler(pickle._Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[Storage] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Storage):
            return None
        if not any(known is obj for known in self.storages):
            self.storages.append(obj)
        key = next(i for i, known in enumerate(self.storages) if known is obj)
        kind = obj.kind or {"float32": "Float", "float16": "Half", "bfloat16": "BFloat16"}[obj.array.dtype.name]
        return "storage", getattr(sys.modules["torch"], f"{kind}Storage"), str(key), "cpu", obj.array.size


def fake_torch() -> dict[str, Any]:
    """Modules with the names that a pickle of tensors refers to."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in ("Float", "Half", "BFloat16", "Int"):
        setattr(torch, f"{name}Storage", type(f"{name}Storage", (), {"__module__": "torch"}))

    def rebuild() -> None: ...

    rebuild.__module__, rebuild.__qualname__, rebuild.__name__ = "torch._utils", *["_rebuild_tensor_v2"] * 2
    utils._rebuild_tensor_v2 = rebuild  # type: ignore[attr-defined]
    torch._utils = utils  # type: ignore[attr-defined]
    return {"torch": torch, "torch._utils": utils}


def whole(array: np.ndarray, kind: str = "") -> View:
    return View(Storage(array, kind), 0, array.shape, tuple(s // array.itemsize for s in array.strides))


def write_zip(path: Path, pickled: bytes, blobs: dict[str, bytes], *, order: bytes = b"little", how: int = 0) -> None:
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, blob in {"data.pkl": pickled, "byteorder": order, **blobs}.items():
            archive.writestr(f"{path.stem}/{name}", blob)


def torch_save(path: Path, tree: Any, **options: Any) -> None:
    with mock.patch.dict(sys.modules, fake_torch()):
        pickler = Pickler(file := io.BytesIO())
        pickler.dump(tree)
    blobs = {f"data/{i}": storage.array.tobytes("K") for i, storage in enumerate(pickler.storages)}
    write_zip(path, file.getvalue(), blobs, **options)


def split(name: str, array: np.ndarray, n: int, *, embedding_axis: int) -> list[np.ndarray]:
    """Cut a tensor as Meta's model parallel code does."""
    kind = name.split(".")[-2]
    if kind == "tok_embeddings":
        axis = embedding_axis
    elif kind in ("wo", "w2"):
        axis = 1
    else:
        axis = 0
    return [array] * n if array.ndim == 1 else [np.ascontiguousarray(a) for a in np.split(array, n, axis)]


def write(folder: Path, weights: oracle.Weights, n: int = 1, *, embedding_axis: int = 1, **params: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(PARAMS | params))
    for i in range(n):
        shard = {name: whole(split(name, a, n, embedding_axis=embedding_axis)[i]) for name, a in weights.items()}
        shard["rope.freqs"] = whole(np.ones(4, np.float32))
        torch_save(folder / f"consolidated.{i:02}.pth", shard)
    return folder
