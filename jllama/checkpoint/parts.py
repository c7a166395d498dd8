"""The tensors of one part of a model that a mesh divides: the same names, fewer rows or columns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jllama import mesh
from jllama.checkpoint.mapped import joined, rows_of
from jllama.checkpoint.source import Array, Source
from jllama.config import Config
from jllama.tensors import Divided, tensors


def part(sources: Mapping[str, Source], config: Config, index: int, count: int) -> dict[str, Source]:
    """Give the tensors of part `index` of `count`.

    Where the vocabulary is no multiple of `count`, rows of zeros are added to it.

    Raises:
      ValueError: the model can't be divided like that.
    """
    local = mesh.local_config(config, count)
    heads = {"query heads": (config.n_heads, local.q_dim), "key heads": (config.n_kv_heads, local.kv_dim)}

    def narrowed(source: Source, divided: Divided, experts: int) -> Source:
        if divided in heads:
            total, rows = heads[divided]
            return rows_of(source, index * total // count * config.head_dim, rows)
        if divided == "width":
            starts = range(0, source.shape[0], source.shape[0] // max(experts, 1))
            rows = source.shape[0] // len(starts) // count
            return joined([rows_of(source, start + index * rows, rows) for start in starts], axis=0)
        if divided == "inputs":
            return _columns_of(source, index, source.shape[1] // count)
        return _filled_up(source, index, -(-source.shape[0] // count)) if divided == "vocabulary" else source

    if count == 1:
        return dict(sources)
    names = {name: tensor for tensor in tensors(config) for name in tensor.names(config)}
    return {name: narrowed(source, names[name].divided, names[name].experts) for name, source in sources.items()}


def _columns_of(source: Source, index: int, count: int) -> Source:
    columns = slice(index * count, (index + 1) * count)
    return Source((source.shape[0], count), lambda start, stop: source.read(start, stop)[:, columns], (source, columns))


def _filled_up(source: Source, index: int, count: int) -> Source:
    """Give rows `index * count` on, and zeros after the last."""
    first = min(index * count, source.shape[0])
    there = min(count, source.shape[0] - first)

    def zeros(start: int, stop: int) -> Array:
        return np.zeros((stop - start, *source.shape[1:]), np.float32)

    parts = [rows_of(source, first, there), Source((count - there, *source.shape[1:]), zeros)]
    return joined([p for p in parts if p.shape[0]], axis=0)
