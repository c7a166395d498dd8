"""Named tensors to `Params`, and back: what every file format shares.

A format gives a `Config` and, by the names of Meta's checkpoints, tensors not yet read. `build_params` checks all of
them, then reads each once, block of rows by block of rows, straight into the arrays that the engine keeps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tqdm
from jax import lax
from jax.sharding import Mesh

from jllama import mesh as meshes
from jllama.checkpoint.contents import CheckpointError, Contents
from jllama.checkpoint.mapped import joined, rows_of
from jllama.checkpoint.parts import part
from jllama.checkpoint.source import Array, Source
from jllama.config import Config
from jllama.errors import listed, shown
from jllama.experts import Experts
from jllama.model import Layer, Params
from jllama.norms import Norm
from jllama.run import Run
from jllama.tensors import Tensor, leaves, tensors
from jllama.weights import FORMS, KINDS, Linear, Plain, Weight
from jllama.weights.groups import from_blocks

__all__ = ["DTYPES", "CheckpointError", "Contents", "abstract_params", "blocks", "build_params", "sources_of"]

DTYPES = ("float32", "bfloat16", "int8")
STORED = "stored"  # each matrix in the form that its file has it in, where there is one
PLAIN = Run()

# Elements converted at a time: the temporaries stay in the processor's cache, and out of the peak of memory.
_BLOCK = 1 << 20


def build_params(
    config: Config,
    sources: Mapping[str, Source],
    *,
    dtype: str,
    origin: str,
    run: Run = PLAIN,
    mesh: Mesh | None = None,
) -> Params:
    """Check all tensors against the config, then read each once into the weights of a model.

    Memory peaks at the weights in their final dtype and one block of rows. A progress bar appears on stderr if that
    is a terminal and reading takes over a second.

    Args:
      config: sizes of the model.
      sources: its tensors by name.
      dtype: one of `DTYPES` or `STORED`, for the matrices; norms are float32 always.
      origin: where the tensors are from, for messages.
      run: how the model will be run.
      mesh: the devices that the model is laid out over; this process reads the parts of its own. None: the default
        device.

    Raises:
      CheckpointError: tensors are missing, left over or of a wrong shape; all are named.
      ValueError: the mesh doesn't divide the model.
    """
    _check(config, sources, origin)
    count = meshes.shape_of(mesh).model
    devices = {0: [None]} if mesh is None else meshes.local_devices(mesh)
    parts = [part(sources, config, i, count) for i in devices]
    total = sum(math.prod(source.shape) for source in sources.values())
    with tqdm.tqdm(total=total, unit="w", unit_scale=True, desc="weights", delay=1, disable=None) as bar:

        def leaf(layers: Sequence[Sequence[str]], dtype: str, stacked: bool, experts: int) -> Any:
            found = [_matrices([[p[name] for name in names] for names in layers], experts) for p in parts]
            hosts = _read(found, _form(found[0], dtype), stacked)
            placed = [_put(host, on) for host, there in zip(hosts, devices.values(), strict=True) for on in there]
            bar.update(sum(math.prod(sources[name].shape) for names in layers for name in names))
            return placed[0] if mesh is None else jax.tree.map(lambda *leaves: meshes.Parts(leaves), *placed)

        params = _assemble(config, run, dtype, leaf)
        return params if mesh is None else meshes.join(mesh, params)


def abstract_params(
    config: Config, sources: Mapping[str, Source], *, dtype: str, parts: int = 1, run: Run = PLAIN
) -> Params:
    """Give the shapes and dtypes of one of the `parts` of a model, as `build_params` lays it out on each device.

    Raises:
      ValueError: the model can't be divided like that.
    """
    narrowed = part(sources, config, 0, parts)

    def leaf(layers: Sequence[Sequence[str]], dtype: str, stacked: bool, experts: int) -> Any:
        found = _matrices([[narrowed[name] for name in names] for names in layers], experts)
        return _make(found, _form(found, dtype), stacked, jax.ShapeDtypeStruct)

    return _assemble(meshes.local_config(config, parts), run, dtype, leaf)


def sources_of(params: Params) -> dict[str, Source]:
    """Return the tensors of a model by name, the fused ones apart: what `build_params` takes, in float32."""
    sources = {}
    for path, group in leaves(params.config).items():
        first = 0  # row of the leaf
        for tensor in group:
            for number, name in enumerate(tensor.names(params.config)):
                is_stacked = tensor.in_layers and params.run.stacked
                weight = _leaf(params, path, 0 if is_stacked else number)
                at, count = number if is_stacked else 0, tensor.experts or 1
                shape = (tensor.shape[0] // count, *tensor.shape[1:])
                matrices = range(at * count, (at + 1) * count) if is_stacked or tensor.experts else [None]
                sources[name] = joined([_rows_of(weight, i, first, shape) for i in matrices], axis=0)
            first += shape[0]
    return sources


def blocks(shape: tuple[int, ...], multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Cut the rows of a tensor into blocks, each but the last a multiple of `multiple` rows: `(start, stop)`."""
    rows = max(_BLOCK // math.prod(shape[1:]) // multiple, 1) * multiple
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def _assemble(
    config: Config, run: Run, dtype: str, leaf: Callable[[Sequence[Sequence[str]], str, bool, int], Any]
) -> Params:
    """Put a model together; `leaf` makes one of the tensors of one or several layers, in a form.

    It is told whether they are to be stacked, and of how many experts each tensor has a matrix: these are always.
    """

    def fields(group: list[tuple[str, list[Tensor]]], numbers: Sequence[int], stacked: bool) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {}
        for path, parts in group:
            names = [[tensor.name.format(i) for tensor in parts] for i in numbers]
            is_matrix = parts[0].matrix
            experts = parts[0].experts
            weight = leaf(names, dtype if is_matrix else "float32", stacked or experts > 0, experts)
            field, _, suffix = path.removeprefix("layers.").partition(".")
            found.setdefault(field, {})[suffix] = weight if is_matrix else weight.values
        kinds: dict[str, Any] = dict.fromkeys((f for f in found if f.endswith("norm")), Norm) | {"experts": Experts}
        return {
            field: leaves[""] if "" in leaves else kinds.get(field, Linear)(**leaves) for field, leaves in found.items()
        }

    run = dataclasses.replace(run, stacked=run.stacked and config.has_equal_layers)
    table = leaves(config).items()
    in_layers = [(path, group) for path, group in table if group[0].in_layers]
    others = [(path, group) for path, group in table if not group[0].in_layers]
    every = list(range(config.n_layers))
    elements = [every] if run.stacked else [[i] for i in every]
    layers = tuple(Layer(**fields(in_layers, numbers, run.stacked)) for numbers in elements)
    return Params(layers=layers, config=config, run=run, **fields(others, [0], False))


def _check(config: Config, sources: Mapping[str, Source], origin: str) -> None:
    if config.n_layers > len(sources):  # else a damaged file could ask for billions of names
        raise CheckpointError(f"{origin}: n_layers = {config.n_layers}, but there are only {len(sources)} tensors")
    expected = {name: tensor.shape for tensor in tensors(config) for name in tensor.names(config)}
    problems = []
    for name, shape in expected.items():
        if name not in sources:
            problems.append(f"{name} is missing, expected {list(shape)}")
        elif sources[name].shape != shape:
            problems.append(f"{name} is {list(sources[name].shape)}, expected {list(shape)}")
    problems += [f"{shown(name)} is not a tensor of this model" for name in sources if name not in expected]
    if problems:
        raise CheckpointError(f"{origin}: {listed(problems)}")


def _matrices(layers: list[list[Source]], experts: int) -> list[list[Source]]:
    """Take the tensors of layers apart into the matrices of each expert, as if those were layers themselves."""
    if not experts:
        return layers
    rows = [source.shape[0] // experts for source in layers[0]]
    each = range(experts)
    return [[rows_of(s, i * n, n) for s, n in zip(sources, rows, strict=True)] for sources in layers for i in each]


def _form(layers: Sequence[Sequence[Source]], dtype: str) -> str:
    """Return the form of the leaf that some tensors of each layer make up."""
    if dtype != STORED:
        return dtype
    kinds = {source.stored.kind if source.stored else None for sources in layers for source in sources}
    kind = kinds.pop()
    if kind is None and not kinds:
        return "float32"
    # Leaves of several types, and of rare ones, are kept in 8 bits: of what they were, little is lost.
    return kind if kind in KINDS and not kinds else "q8_0"


def _encoded(source: Source, form: str, start: int, stop: int) -> Weight:
    """Read some rows in a form: the file's own blocks, where they are of that."""
    if source.stored is not None and source.stored.kind == form:
        return from_blocks(source.stored.read(start, stop), form)
    return FORMS[form].encode(source.read(start, stop), form)


def _make(layers: Sequence[Sequence[Source]], form: str, stacked: bool, array: Any) -> Weight:
    """Make the arrays that hold some tensors of each layer, those of a layer below each other."""
    shape = (sum(source.shape[0] for source in layers[0]), *layers[0][0].shape[1:])
    return FORMS[form].make((len(layers), *shape) if stacked else shape, form, array)


def _read(parts: Sequence[Sequence[Sequence[Source]]], form: str, stacked: bool) -> list[Weight]:
    """Read some tensors of one or several layers, of each part of a model, into weights on the host."""
    hosts = [_make(layers, form, stacked, _empty) for layers in parts]
    for number in range(len(parts[0])):
        first = 0
        for sources in zip(*(layers[number] for layers in parts), strict=True):
            if sources[0].columns is None:
                for host, source in zip(hosts, sources, strict=True):
                    _fill([host], [source], source, form, number if stacked else None, first)
            else:  # columns of the same matrix, read once for all parts
                _fill(hosts, sources, sources[0].columns[0], form, number if stacked else None, first)
            first += sources[0].shape[0]
    return hosts


def _fill(
    hosts: Sequence[Weight], parts: Sequence[Source], source: Source, form: str, number: int | None, first: int
) -> None:
    """Read a tensor, and write each part's columns of it into rows `first` on (of a layer of a stack)."""
    for start, stop in blocks(source.shape):
        encoded = _encoded(source, form, start, stop)
        rows: Any = slice(first + start, first + stop)
        for host, wanted in zip(hosts, parts, strict=True):
            block = encoded if wanted.columns is None else encoded.columns(wanted.columns[1])
            for to, values in zip(jax.tree.leaves(host), jax.tree.leaves(block), strict=True):
                to[rows if number is None else (number, rows)] = values


def _empty(shape: tuple[int, ...], dtype: str) -> Array:
    """Allocate on a 64-byte border, where JAX on a CPU takes over the buffer of an array and makes no copy."""
    count = math.prod(shape) * jax.numpy.dtype(dtype).itemsize
    raw = np.empty(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array: Array = raw[start : start + count].view(jax.numpy.dtype(dtype)).reshape(shape)
    return array


def _put(arrays: Any, device: jax.Device | None) -> Any:
    # Transfers to an accelerator run behind: without waiting, host copies of many tensors would pile up.
    return jax.block_until_ready(jax.device_put(arrays, device))  # type: ignore[no-untyped-call]


def _leaf(params: Params, path: str, element: int) -> Weight:
    """Find a leaf by its path, in that element of `Params.layers`; a vector as `Plain`."""
    found: Any = params
    for name in path.split("."):
        found = getattr(found, name)
        found = found[element] if name == "layers" else found
    return found if isinstance(found, Weight) else Plain(found)


def _rows_of(weight: Weight, number: int | None, first: int, shape: tuple[int, ...]) -> Source:
    """Give the rows of a weight (of a layer of a stack) from `first` on, in float32, as a source of that shape."""

    def read(start: int, stop: int) -> Array:
        # Sliced on the device, so that only these rows travel, and by a traced start, so that it compiles once.
        def rows(leaf: jax.Array) -> jax.Array:
            leaf = leaf if number is None else lax.dynamic_index_in_dim(leaf, number, keepdims=False)
            return lax.dynamic_slice_in_dim(leaf, first + start, stop - start)

        block: Weight = jax.tree.map(rows, weight)
        return block.decode()

    return Source(shape, read)
