"""Meta's checkpoints: `params.json` with `consolidated.NN.pth` shards, or with one `.npy` file a tensor.

What params.json doesn't say: the feed-forward's width is that of w1; the context follows from the generation, which
rope scaling, vocabulary, theta and epsilon tell apart (`_context`); the factor of rope scaling is 8, as Meta's code has
it, but 32 for the two models that Hugging Face's files give 32 (Llama 3.2 1B and 3B, by their sizes).

Sources: meta-llama/llama-models, models/llama3/args.py and model.py, models/checkpoint.py; facebookresearch/llama.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from jllama import rope
from jllama.checkpoint import pth
from jllama.checkpoint.build import CheckpointError, Contents
from jllama.checkpoint.files import parse_json
from jllama.checkpoint.mapped import joined
from jllama.checkpoint.source import Array, Source
from jllama.config import Config, ConfigError
from jllama.errors import listed, quoted, shown
from jllama.tensors import fitted

_SHARD = re.compile(r"consolidated\.(\d\d)\.pth")
_ROWS_APART = re.compile(r"(?:.*\.)?(?:wq|wk|wv|w1|w3|output)\.weight")
_COLUMNS_APART = re.compile(r".*\.(?:wo|w2)\.weight")
_EMBEDDING, _OUTPUT = "tok_embeddings.weight", "output.weight"
_WQ, _W1 = "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight"
_KINDS = {int: "an integer", float: "a number", bool: "true or false"}
_IGNORED = "rope.freqs"  # a table that Meta's code computes anew, too

# By dim and n_layers. Meta's own code takes 8 for them: texts go bad after about 80,000 tokens.
_FACTOR_32 = ((2048, 16), (3072, 28))


def recognises(path: Path, head: bytes) -> bool:
    """Whether this is a `.pth` file, or a folder with shards, `.npy` files, or Meta's `params.json` alone."""
    if not path.is_dir():
        return head.startswith(pth.MAGIC) or path.suffix == ".pth"
    found = (path / "params.json").is_file() and not (path / "config.json").is_file()
    return found or bool(_shards(path)) or _npy_folder(path) is not None


def read(path: Path) -> Contents:
    """Map the tensors of a folder, or of a `.pth` file with `params.json` beside it, without reading them.

    `.npy` files may lie in the folder itself or in one within it; `params.json` beside them or one level up.
    The nearest dtype is bfloat16 for a model that is all that, else float32.

    Raises:
      CheckpointError: params.json, a shard or a tensor is missing, damaged or unexpected; all of a kind are named.
      OSError: a file cannot be opened.
    """
    folder = path if path.is_dir() else path.parent
    numbered = path.is_dir() or _SHARD.fullmatch(path.name)
    shards = _shards(folder) if numbered else [path]
    npy = None if shards else _npy_folder(folder)
    if not shards and npy is None:
        raise CheckpointError(f"{path}: expected consolidated.00.pth or one .npy file a tensor beside params.json")
    opened = _open_shards(shards)
    origin = next((f for f in (folder / "params.json", folder.parent / "params.json") if f.is_file()), None)
    if origin is None:
        raise CheckpointError(f"{folder / 'params.json'} is missing: expected the sizes of the model in it")
    params = _read_params(origin)
    try:
        sources, dtypes = _join_shards(opened, params.dim) if npy is None else _read_npy(npy)
        config = fitted(_config(params, sources), sources)
    except ConfigError as e:
        raise CheckpointError(f"{path}: {e}") from e
    return Contents(config, sources, "bfloat16" if dtypes == {"bfloat16"} else "float32")


def hidden_dim(dim: int, multiple_of: int, ffn_dim_multiplier: float = 1.0) -> int:
    """Return the feed-forward's width that Meta's code computes: 2/3 of 4 * dim, stretched, and rounded up."""
    hidden = int(ffn_dim_multiplier * int(2 * 4 * dim / 3))
    return -(-hidden // multiple_of) * multiple_of


class _Params(NamedTuple):
    """What params.json says, and what Meta's code takes for what it doesn't."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int = 0  # as many as n_heads
    vocab_size: int = -1  # as many as the embedding has rows
    multiple_of: int = 256
    ffn_dim_multiplier: float = 1.0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    use_scaled_rope: bool = False
    rope_scaling_factor: float = 0.0  # in files of Llama 4's time; 8, or 32 for the two models above
    rope_high_freq_factor: float = 4.0
    max_seq_len: int = 0  # in no file of Meta's


def _read_params(path: Path) -> _Params:
    found = parse_json(path.read_bytes(), str(path))
    problems: list[str] = []
    fields: dict[str, Any] = {}
    for name, kind in get_type_hints(_Params).items():
        value: Any = found.get(name)
        if value is None and name in _Params._field_defaults:
            continue
        if kind is float and type(value) is int:
            value = float(max(-(2**31), min(value, 2**31)))
        if type(value) is not kind:
            fault = "is missing" if value is None else f"= {quoted(value)}"
            problems.append(f"{name} {fault}, expected {_KINDS[kind]}")
        elif not abs(value) < 2**31 or (name == "multiple_of" and value < 1):  # NaN is not less than anything
            problems.append(f"{name} = {quoted(value)} is out of range")
        fields[name] = value
    if problems:
        raise CheckpointError(f"{path}: {listed(problems)}")
    return _Params(**fields)


def _config(params: _Params, sources: Mapping[str, Source]) -> Config:
    """Join what params.json says with what the tensors' shapes do.

    Raises:
      ConfigError: they disagree, or make no model.
    """
    hidden = hidden_dim(params.dim, params.multiple_of, params.ffn_dim_multiplier)
    if _W1 in sources and (found := sources[_W1].shape[0]) != hidden:
        given = ", ".join(f"{name} = {getattr(params, name)}" for name in ("dim", "multiple_of", "ffn_dim_multiplier"))
        raise ConfigError(f"{_W1} has {found} rows, but by {given} of params.json expected are {hidden}")
    vocab_size = params.vocab_size
    if vocab_size == -1 and _EMBEDDING in sources:
        vocab_size = sources[_EMBEDDING].shape[0]
    scaling = None
    if params.use_scaled_rope:
        factor = params.rope_scaling_factor or (32.0 if (params.dim, params.n_layers) in _FACTOR_32 else 8.0)
        scaling = rope.Llama3(factor, 1.0, params.rope_high_freq_factor, 8192)
    return Config(
        dim=params.dim,
        hidden_dim=hidden,
        n_layers=params.n_layers,
        n_heads=params.n_heads,
        n_kv_heads=params.n_kv_heads or params.n_heads,
        vocab_size=vocab_size,
        max_seq_len=params.max_seq_len or _context(params, vocab_size),
        norm_eps=params.norm_eps,
        rope_theta=params.rope_theta,
        rope_scaling=scaling,
    )


def _context(params: _Params, vocab_size: int) -> int:
    """Tell the generation, and so the context, which params.json has no field for, from what it does have."""
    if params.use_scaled_rope:
        return 131072  # Llama 3.1 and later
    if vocab_size >= 128000:
        return 8192  # Llama 3
    if params.rope_theta >= 1e6:
        return 16384  # Code Llama
    is_65b = params.dim == 8192 and params.n_kv_heads in (0, params.n_heads)
    return 2048 if params.norm_eps < 1e-5 or is_65b else 4096  # Llama 1, else Llama 2


def _shards(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("consolidated.*.pth") if _SHARD.fullmatch(file.name))


def _npy_folder(folder: Path) -> Path | None:
    """Return where the `.npy` files are: here, or in a folder in here."""
    found = next(folder.glob("*.npy"), None) or next(folder.glob(f"*/{_EMBEDDING}.npy"), None)
    return None if found is None else found.parent


def _read_npy(folder: Path) -> tuple[dict[str, Source], set[str]]:
    """Give the tensors of a folder and the names of their dtypes.

    Raises:
      ConfigError: some files can't be read.
    """

    def source(file: Path, shape: tuple[int, ...]) -> Source:
        # Opened anew for each block: a file kept open for each tensor could be more than a process may have.
        return Source(shape, lambda start, stop: _npy(file)[start:stop])

    sources, dtypes, problems = {}, set(), []
    for file in sorted(folder.glob("*.npy")):
        if (name := file.name.removesuffix(".npy")) == _IGNORED:
            continue
        try:
            tensor = _npy(file)
        except Exception as e:  # NumPy's parser of headers fails in a dozen ways
            problems.append(f"{shown(file.name)} cannot be read: {shown(str(e))}")
            continue
        dtypes.add(tensor.dtype.name)
        sources[name] = source(file, tensor.shape)
    if problems:
        raise ConfigError(listed(problems))
    return sources, dtypes


def _npy(file: Path) -> Array:
    """Map a `.npy` file of floats; its header is checked before, as NumPy maps anything, and dies of some headers."""
    with open(file, "rb") as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers that Python 2 wrote
        is_first = np.lib.format.read_magic(opened) == (1, 0)
        header = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = header(opened)
        offset, size = opened.tell(), os.fstat(opened.fileno()).st_size
    if dtype not in (np.float32, np.float16) or not shape:
        raise ValueError(f"it is {shown(str(dtype))} {quoted(list(shape))}, expected float32 or float16")
    needed = math.prod(shape) * dtype.itemsize + offset
    if min(shape) < 1 or needed > size:
        raise ValueError(f"{quoted(list(shape))} needs {needed} bytes, and there are {size}")
    return np.memmap(file, dtype, "r", offset, shape, order="F" if is_fortran else "C")


def _open_shards(files: list[Path]) -> dict[str, dict[str, pth.Tensor]]:
    """Map the tensors of each file."""
    shards: dict[str, dict[str, pth.Tensor]] = {}
    problems: list[str] = []
    for file in files:
        try:
            shards[file.name] = {name: tensor for name, tensor in pth.read(file).items() if name != _IGNORED}
        except CheckpointError as e:
            problems.append(str(e).removeprefix(f"{file.parent}{os.sep}") if problems else str(e))
    if problems:
        raise CheckpointError(listed(problems))
    if all(_is_tied(shard) for shard in shards.values()):
        for shard in shards.values():
            del shard[_OUTPUT]
    return shards


def _join_shards(shards: Mapping[str, Mapping[str, pth.Tensor]], dim: int) -> tuple[dict[str, Source], set[str]]:
    """Join each tensor along the axis on which Meta's code splits it; give the names of all dtypes, too.

    Raises:
      ConfigError: shards are missing, or tensors in some of them.
    """
    if problems := _missing_shards(shards, dim):
        raise ConfigError(listed(problems))
    sources = {}
    for name in dict.fromkeys(name for shard in shards.values() for name in shard):
        if absent := [file for file, shard in shards.items() if name not in shard]:
            problems.append(f"{shown(name)} is missing in {', '.join(absent)}")
            continue
        parts = [shard[name].source for shard in shards.values()]
        axis = _axis(name, parts[0].shape, dim)
        if axis is None:
            sources[name] = parts[0]  # each shard has a copy
        elif any(len(part.shape) != 2 or part.shape[1 - axis] != parts[0].shape[1 - axis] for part in parts):
            shapes = " and ".join(str(list(part.shape)) for part in parts)
            problems.append(f"{shown(name)} is {shapes}, expected matrices that differ in axis {axis} at most")
        else:
            sources[name] = joined(parts, axis)
    if problems:
        raise ConfigError(listed(problems))
    return sources, {tensor.dtype.name for shard in shards.values() for tensor in shard.values()}


def _is_tied(shard: Mapping[str, pth.Tensor]) -> bool:
    """Whether embedding and head are one tensor under two names."""
    return _OUTPUT in shard and _EMBEDDING in shard and shard[_OUTPUT].place == shard[_EMBEDDING].place


def _axis(name: str, shape: tuple[int, ...], dim: int) -> int | None:
    """Return the axis along which the shards of a tensor are joined, None for one that each has a copy of."""
    if name == _EMBEDDING:
        return 0 if shape[-1:] == (dim,) else 1  # Llama 3 splits the vocabulary, Llama 1 and 2 the width
    if _ROWS_APART.fullmatch(name):
        return 0
    return 1 if _COLUMNS_APART.fullmatch(name) else None


def _missing_shards(shards: Mapping[str, Mapping[str, pth.Tensor]], dim: int) -> list[str]:
    """Name the shards that are missing, by the gaps in their numbers and by the rows of wq that each has."""
    rows = next((shard[_WQ].source.shape[0] for shard in shards.values() if _WQ in shard), dim)
    numbered = [int(match[1]) + 1 for match in map(_SHARD.fullmatch, shards) if match]
    count = max([dim // rows if rows and dim % rows == 0 else 0, *numbered])
    if len(shards) >= count:
        return []
    names = (f"consolidated.{i:02}.pth" for i in range(count))
    first = ", ".join(itertools.islice((name for name in names if name not in shards), 8))
    more = "" if count - len(shards) <= 8 else f" and {count - len(shards) - 8} more"
    return [f"{first}{more} missing: found {len(shards)} of {count} shards"]
