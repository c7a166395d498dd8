"""Hugging Face's folders: `config.json`, and safetensors files, one or several with an index.

What differs from the engine's order of rows (`families.Layout`) is undone block by block, while reading.
Sources: convert_llama_weights_to_hf.py and the configurations and models of huggingface/transformers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from absl import logging

from jllama.checkpoint import quantized, safetensors
from jllama.checkpoint.build import CheckpointError, Contents, sources_of
from jllama.checkpoint.files import new_folder, parse_json
from jllama.checkpoint.huggingface_config import describe, is_model, parse
from jllama.checkpoint.named import arranged, spread
from jllama.checkpoint.source import Source
from jllama.errors import listed, shown
from jllama.families import Layout
from jllama.model import Params

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def recognises(path: Path, head: bytes) -> bool:
    """Whether `path` is a folder with a model's config.json, or the config.json or a safetensors file in one."""
    config = _config_file(path)
    if config == path and (head.lstrip()[:1] != b"{" or b"\0" in head):  # no JSON
        return False
    try:
        return config.is_file() and is_model(parse_json(config.read_bytes(), str(config)))
    except CheckpointError:
        return config != path  # reading will say what is wrong


def read(path: Path) -> Contents:
    """Check config and tensors of a model, and map its tensors without reading them.

    `auto` becomes bfloat16 where all matrices are stored as that, else float32: the nearest that loses nothing of
    float16. A head in the files is used even where the config ties it to the embedding, as transformers 5 does.

    Args:
      path: the folder; or its config.json, under any name; or one of its safetensors files.

    Raises:
      CheckpointError: anything missing, left over, wrong or not supported; all of one file is named.
      OSError: a file cannot be opened.
    """
    config = _config_file(path)
    described = parse(parse_json(config.read_bytes(), str(config)), str(config))
    layout = described.family.layout
    tensors = _tensors(path, layout)
    if described.config.n_layers > len(tensors):
        raise CheckpointError(
            f"{config}: num_hidden_layers = {described.config.n_layers}: the files hold only {len(tensors)} tensors"
        )
    head = f"{layout.names['output']}.weight"
    tied = head not in tensors and described.tied is not False
    if described.tied and not tied:
        logging.warning("%s: tie_word_embeddings = true, but there is an %s: using that", config, head)
    sizes = dataclasses.replace(described.config, tied=tied)
    problems: list[str] = []
    if how := described.quantization:
        found = quantized.sources(how, tensors, problems)
    else:
        found = {name: _source(tensor) for name, tensor in tensors.items()}
        problems += [
            f"{shown(name)} is {tensor.dtype}, expected {', '.join(safetensors.FLOATS)}"
            for name, tensor in tensors.items()
            if tensor.dtype not in safetensors.FLOATS
        ]
    # What belongs to a matrix that can't be put together would be missing too.
    sources = arranged(layout, sizes, found, problems) if how is None or not problems else {}
    if problems:
        raise CheckpointError(f"{path}: {listed(problems)}")
    if how is not None:
        has_integers = any(source.stored is not None for source in found.values())
        return Contents(sizes, sources, "int8" if has_integers else "bfloat16")
    matrices = {tensor.dtype for tensor in tensors.values() if len(tensor.shape) == 2}
    return Contents(sizes, sources, "bfloat16" if matrices == {"BF16"} else "float32")


def save(params: Params, path: str | Path) -> None:
    """Write a model of a family that can be written as a Hugging Face folder, which appears only when it is complete.

    Matrices are stored as they are kept, int8 widened to float32; norms and biases in float32.

    Args:
      params: the model.
      path: the folder, which must be new or empty. A tokenizer is not written.

    Raises:
      CheckpointError: the layout has no place for the model, or the folder is in use.
      OSError: something cannot be written.
    """
    path = Path(path)
    dtype = "bfloat16" if params.embedding.dtype == "bfloat16" else "float32"
    family, fields = describe(params.config, dtype, str(path))
    stored = {1: "F32", 2: "BF16" if dtype == "bfloat16" else "F32"}  # by the number of axes
    sources = spread(family.layout, params.config, sources_of(params))
    with new_folder(path) as folder:
        with open(folder / WEIGHTS, "wb") as file:
            safetensors.write(file, {name: (stored[len(s.shape)], s) for name, s in sources.items()})
        (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _config_file(path: Path) -> Path:
    """Return the config.json that goes with a folder or a safetensors file, or any other file itself."""
    if path.is_dir():
        return path / CONFIG
    return path.with_name(CONFIG) if _holds_tensors(path) else path


def _holds_tensors(path: Path) -> bool:
    if path.is_dir():
        return False
    with open(path, "rb") as file:  # the name tells a damaged file
        return path.suffix == ".safetensors" or file.read(9)[4:] == b"\0\0\0\0{"


def _tensors(path: Path, layout: Layout) -> dict[str, safetensors.Tensor]:
    """Map the tensors of a file, or of all files of a folder, without those that hold nothing of the model."""
    folder = path if path.is_dir() else path.parent
    named = _holds_tensors(path)
    index, single = folder / INDEX, path if named else folder / WEIGHTS
    shards = safetensors.shards(index) if index.is_file() else {}
    # Beside an index a model.safetensors is a left-over, unless it is asked for.
    if shards and (not named or single.name in shards.values()):
        tensors = safetensors.read_shards(index)
    elif single.is_file():
        tensors = safetensors.read(single)
    else:
        raise CheckpointError(f"{folder}: no weights here; expected {WEIGHTS} or {INDEX}")
    return {name: tensors[name] for name in layout.kept(tensors, str(folder))}


def _source(tensor: safetensors.Tensor) -> Source:
    return Source(tensor.shape, lambda start, stop: tensor.view()[start:stop])
