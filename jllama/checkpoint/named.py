"""A file's tensors by the engine's names and in its order of rows, and back: what formats with families share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jllama.checkpoint.mapped import half_split, interleaved, joined, rows_of
from jllama.checkpoint.source import Array, Source
from jllama.config import Config
from jllama.errors import shown
from jllama.families import Layout
from jllama.tensors import Tensor, tensors


class _Place(NamedTuple):
    """Where a kind of tensor lies in the files."""

    tensor: Tensor
    name: str  # its name in the files, `{}` for the number of the layer, and a second for the expert's
    first: int  # of its rows there, after those of other kinds


def present(layout: Layout, found: Collection[str]) -> set[str]:
    """Give the engine's names of what there is in a file outside of layers and in the first of them."""
    names = [*_fitting(layout, found).items(), *layout.fused.items()]
    return {
        f"{ours.format(0)}.{suffix}"
        for ours, theirs in names
        for suffix in ("weight", "bias")
        if f"{theirs.format(0, 0)}.{suffix}" in found
    }


def arranged(layout: Layout, config: Config, found: Mapping[str, Source], problems: list[str]) -> dict[str, Source]:
    """Give a file's tensors as `tensors.tensors` lists them.

    Args:
      layout: where the file has them.
      config: the model's.
      found: all tensors of the file by its own names. A norm may be a matrix of one row.
      problems: takes what is missing, misshapen or left over, by the file's names.
    """
    sources, expected = dict[str, Source](), dict[str, tuple[int, ...]]()
    if config.n_experts > len(found) and any(theirs.count("{}") == 2 for theirs in layout.names.values()):
        problems.append(f"{config.n_experts} experts: the files hold only {len(found)} tensors")
        return sources
    for place in _places(layout, config, found):
        is_transposed = _is_transposed(layout, place.tensor)
        for ours, theirs in _names(place, config):
            shape = (place.first + place.tensor.shape[0] // len(theirs), *place.tensor.shape[1:])
            expected |= dict.fromkeys(theirs, shape[::-1] if is_transposed else shape)
            there = [found[name] for name in theirs if name in found]
            if len(there) == len(theirs) == 1 or [s.shape for s in there] == [shape] * len(theirs):
                whole = joined(there, axis=0)
                source = _part(place, whole, is_transposed, config.head_dim * layout.by_heads)
                if layout.norm_offset and place.tensor.is_norm:
                    source = _plus(source, layout.norm_offset)
                is_split = layout.half_split and place.tensor.rotary
                sources[ours] = interleaved(source, config.head_dim, config.rotated_dim) if is_split else source
    for name, shape in expected.items():
        if name not in found:
            problems.append(f"{name} is missing, expected {list(shape)}")
        elif (has := found[name].shape) != shape and has != (1, *shape):
            problems.append(f"{name} is {list(has)}, expected {list(shape)}")
    problems += [f"{shown(name)} is not a tensor of this model" for name in found if name not in expected]
    return sources


def spread(layout: Layout, config: Config, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Give a model's tensors by a file's names, in its order of rows: the opposite of `arranged`."""
    parts: dict[str, list[Source]] = {}
    for place in _places(layout, config, ()):
        for ours, theirs in _names(place, config):
            source, is_split = sources[ours], layout.half_split and place.tensor.rotary
            if is_split:
                source = half_split(source, config.head_dim, config.rotated_dim)
            if layout.norm_offset and place.tensor.is_norm:
                source = _plus(source, -layout.norm_offset)
            rows = source.shape[0] // len(theirs)
            for i, name in enumerate(theirs):
                parts.setdefault(name, []).append(rows_of(source, i * rows, rows))
    return {name: joined(several, axis=0) for name, several in parts.items()}


def _places(layout: Layout, config: Config, found: Collection[str]) -> Iterator[_Place]:
    names, rows = _fitting(layout, found), dict[str, int]()
    for tensor in tensors(config):
        stem, _, suffix = tensor.name.rpartition(".")
        name = f"{names[stem]}.{suffix}"
        if stem in layout.fused and name.format(0) not in found and f"{layout.fused[stem]}.{suffix}".format(0) in found:
            name = f"{layout.fused[stem]}.{suffix}"
        yield _Place(tensor, name, rows.get(name, 0))
        rows[name] = rows.get(name, 0) + tensor.shape[0]


def _fitting(layout: Layout, found: Collection[str]) -> Mapping[str, str]:
    """Give the layout's names, without the prefix where no name in the file has it."""
    prefix = layout.optional_prefix
    if not prefix or not found or any(name.startswith(prefix) for name in found):
        return layout.names
    return {ours: theirs.removeprefix(prefix) for ours, theirs in layout.names.items()}


def _names(place: _Place, config: Config) -> Iterator[tuple[str, list[str]]]:
    """Give the names in the engine and in the files, of each layer; there it may be one of each expert."""
    experts = place.tensor.experts if place.name.count("{}") == 2 else 1
    for i, ours in enumerate(place.tensor.names(config)):
        yield ours, [place.name.format(i, expert) for expert in range(experts)]


def _is_transposed(layout: Layout, tensor: Tensor) -> bool:
    return layout.transposed and tensor.in_layers and len(tensor.shape) == 2


def _part(place: _Place, whole: Source, is_transposed: bool, head_dim: int) -> Source:
    """Give the rows of one kind; those of wq, wk and wv alternate by heads of `head_dim`, unless that is 0."""
    count = place.tensor.shape[0]
    if is_transposed:
        return _transposed(whole, place)
    if head_dim and whole.shape[0] == 3 * count:
        return _of_heads(whole, place, head_dim)
    if len(whole.shape) == 2 and len(place.tensor.shape) == 1:
        return Source(place.tensor.shape, lambda start, stop: whole.read(0, 1)[0, start:stop])
    return whole if whole.shape == place.tensor.shape else rows_of(whole, place.first, count)


def _of_heads(whole: Source, place: _Place, head_dim: int) -> Source:
    part = place.first // place.tensor.shape[0]

    def read(start: int, stop: int) -> Array:
        first, last = start // head_dim, -(-stop // head_dim)
        block = whole.read(3 * head_dim * first, 3 * head_dim * last)
        heads = block.reshape(-1, 3, head_dim, *block.shape[1:])[:, part]
        return heads.reshape(-1, *block.shape[1:])[start - first * head_dim : stop - first * head_dim]

    return Source(place.tensor.shape, read)


def _plus(source: Source, offset: float) -> Source:
    return Source(source.shape, lambda start, stop: source.read(start, stop).astype(np.float32) + np.float32(offset))


def _transposed(whole: Source, place: _Place) -> Source:
    def read(start: int, stop: int) -> Array:
        return whole.read(0, whole.shape[0]).T[place.first + start : place.first + stop]  # a view of the file

    return Source(place.tensor.shape, read)
