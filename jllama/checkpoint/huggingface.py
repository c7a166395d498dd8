"""Hugging Face's folders: `config.json`, and safetensors files, one or several with an index.

Two things differ from Meta's layout, which the engine keeps. Within each query and key head the first parts of all
rotary pairs come first, then the second parts ("half-split"). And GPT-2 stores its matrices `[in, out]`, with those of
query, key and value as one. Both are undone block by block, while reading.
Sources: convert_llama_weights_to_hf.py and modeling_gpt2.py of huggingface/transformers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from absl import logging

from jllama.checkpoint import safetensors
from jllama.checkpoint.build import CheckpointError, Contents, sources_of
from jllama.checkpoint.files import new_folder, parse_json
from jllama.checkpoint.huggingface_config import Description, fields_of, is_model, parse
from jllama.checkpoint.mapped import half_split, interleaved
from jllama.checkpoint.safetensors import Tensor as SafeTensor
from jllama.checkpoint.source import Array, Source
from jllama.config import Config
from jllama.errors import listed, shown
from jllama.model import Params
from jllama.tensors import Tensor, tensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_ATTENTION = "layers.{}.attention"
_FEED_FORWARD = "layers.{}.feed_forward"
_LLAMA = {
    "tok_embeddings": "model.embed_tokens",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    **{f"{_ATTENTION}.w{x}": f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkvo"},
    **{f"{_ATTENTION}.{x}_norm": f"model.layers.{{}}.self_attn.{x}_norm" for x in "qk"},
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    f"{_FEED_FORWARD}.w1": "model.layers.{}.mlp.gate_proj",
    f"{_FEED_FORWARD}.w2": "model.layers.{}.mlp.down_proj",
    f"{_FEED_FORWARD}.w3": "model.layers.{}.mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
_GPT2 = {
    "tok_embeddings": "transformer.wte",
    "position_embeddings": "transformer.wpe",
    "layers.{}.attention_norm": "transformer.h.{}.ln_1",
    **{f"{_ATTENTION}.w{x}": "transformer.h.{}.attn.c_attn" for x in "qkv"},
    f"{_ATTENTION}.wo": "transformer.h.{}.attn.c_proj",
    "layers.{}.ffn_norm": "transformer.h.{}.ln_2",
    f"{_FEED_FORWARD}.w1": "transformer.h.{}.mlp.c_fc",
    f"{_FEED_FORWARD}.w2": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "output": "lm_head",
}

# Constants that some files hold beside the weights: rotary frequencies, and GPT-2's causal masks.
_BUFFERS = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
)


class _Place(NamedTuple):
    """Where a kind of tensor lies in the files."""

    tensor: Tensor
    name: str  # its name in the files
    first: int  # of its rows there, after those of other kinds
    transposed: bool  # as GPT-2's `[in, out]`


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
    tensors = _tensors(path)
    if described.config.n_layers > len(tensors):
        raise CheckpointError(
            f"{config}: num_hidden_layers = {described.config.n_layers}: the files hold only {len(tensors)} tensors"
        )
    tied = "lm_head.weight" not in tensors and described.tied is not False
    if described.tied and not tied:
        logging.warning("%s: tie_word_embeddings = true, but there is an lm_head.weight: using that", config)
    sizes = dataclasses.replace(described.config, tied=tied)
    places = list(_places(described.family, sizes))
    if described.family == "gpt2" and not any(name.startswith("transformer.") for name in tensors):
        places = [place._replace(name=place.name.removeprefix("transformer.")) for place in places]
    _check(places, tensors, sizes.n_layers, path)
    sources, matrices = {}, set()
    for place in places:
        for kind, name in _names(place, sizes.n_layers):
            sources[kind] = _source(place, tensors[name], sizes.head_dim)
            if len(place.tensor.shape) == 2:
                matrices.add(tensors[name].dtype)
    return Contents(sizes, sources, "bfloat16" if matrices == {"BF16"} else "float32")


def save(params: Params, path: str | Path) -> None:
    """Write a model of the Llama family as a Hugging Face folder, which appears only when it is complete.

    Matrices are stored as they are kept, int8 widened to float32; norms and biases in float32.

    Args:
      params: the model.
      path: the folder, which must be new or empty. A tokenizer is not written.

    Raises:
      CheckpointError: the layout has no place for the model, or the folder is in use.
      OSError: something cannot be written.
    """
    path = Path(path)
    described = _describe(params, path)
    dtype = "bfloat16" if params.embedding.dtype == "bfloat16" else "float32"
    sources, tensors = sources_of(params), {}
    for place in _places(described.family, params.config):
        for kind, name in _names(place, params.config.n_layers):
            source = sources[kind]
            if place.tensor.rotary:
                source = half_split(source, params.config.head_dim)
            tensors[name] = ("BF16" if dtype == "bfloat16" and len(place.tensor.shape) == 2 else "F32", source)
    with new_folder(path) as folder:
        with open(folder / WEIGHTS, "wb") as file:
            safetensors.write(file, tensors)
        (folder / CONFIG).write_text(json.dumps(fields_of(described, dtype), indent=2) + "\n", encoding="utf-8")


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


def _tensors(path: Path) -> dict[str, SafeTensor]:
    """Map the tensors of a file, or of all files of a folder, without the buffers among them."""
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
    return {name: tensor for name, tensor in tensors.items() if not _BUFFERS.fullmatch(name)}


def _places(family: str, config: Config) -> Iterator[_Place]:
    is_gpt2, rows = family == "gpt2", dict[str, int]()
    for tensor in tensors(config):
        stem, _, suffix = tensor.name.rpartition(".")
        name = f"{(_GPT2 if is_gpt2 else _LLAMA)[stem]}.{suffix}"
        transposed = is_gpt2 and tensor.in_layers and len(tensor.shape) == 2
        yield _Place(tensor, name, rows.get(name, 0), transposed)
        rows[name] = rows.get(name, 0) + tensor.shape[0]


def _names(place: _Place, n_layers: int) -> Iterator[tuple[str, str]]:
    """Give the names in the engine and in the files, of each layer."""
    numbers = range(n_layers) if place.tensor.in_layers else [0]
    return ((place.tensor.name.format(i), place.name.format(i)) for i in numbers)


def _check(places: list[_Place], tensors: Mapping[str, SafeTensor], n_layers: int, path: Path) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for place in places:
        shape = (place.first + place.tensor.shape[0], *place.tensor.shape[1:])
        expected |= {name: shape[::-1] if place.transposed else shape for _, name in _names(place, n_layers)}
    problems = []
    for name, shape in expected.items():
        if name not in tensors:
            problems.append(f"{name} is missing, expected {list(shape)}")
            continue
        tensor = tensors[name]
        if tensor.shape != shape:
            problems.append(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in safetensors.FLOATS:
            problems.append(f"{name} is {tensor.dtype}, expected {', '.join(safetensors.FLOATS)}")
    problems += [f"{shown(name)} is not a tensor of this model" for name in tensors if name not in expected]
    if problems:
        raise CheckpointError(f"{path}: {listed(problems)}")


def _source(place: _Place, tensor: SafeTensor, head_dim: int) -> Source:
    def read(start: int, stop: int) -> Array:
        whole = tensor.view()
        return (whole.T if place.transposed else whole)[place.first + start : place.first + stop]

    source = Source(place.tensor.shape, read)
    return interleaved(source, head_dim) if place.tensor.rotary else source


def _describe(params: Params, path: Path) -> Description:
    """Find the family that has everything that a model has."""
    config = params.config
    if config.head_norms:
        family = "qwen3"
    elif config.qkv_bias and not config.wo_bias:
        family = "qwen2"
    else:
        family = "mistral" if config.sliding_window is not None else "llama"
    described = Description(family, config, config.tied)
    fields = dataclasses.asdict(config)
    parsed = parse(fields_of(described, "float32"), str(path))
    kept = dataclasses.asdict(dataclasses.replace(parsed.config, tied=bool(parsed.tied)))
    if lost := [f"{name} = {value}" for name, value in fields.items() if kept[name] != value]:
        raise CheckpointError(f"{path}: a Hugging Face folder of type {family} cannot hold {', '.join(lost)}")
    return described
