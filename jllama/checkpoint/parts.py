"""The tensors of one part of a model that a mesh divides: the same names, fewer rows or columns."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from jllama import sharding
from jllama.checkpoint.mapped import joined, rows_of
from jllama.checkpoint.source import Array, Source
from jllama.config import Config

_NAME = re.compile(r"(?:.*\.)?(wq|wk|wv|wo|w1|w2|w3|tok_embeddings|output)\.(weight|bias)")


def part(sources: Mapping[str, Source], config: Config, index: int, count: int) -> dict[str, Source]:
    """Give the tensors of part `index` of `count`.

    By rows: heads of wq, wk and wv, the feed-forward's width in w1 and w3, the vocabulary, to which rows of zeros are
    added where it is no multiple of `count`. By columns: wo and w2, without their biases. All others are whole.

    Raises:
      ValueError: the model can't be divided like that.
    """
    local = sharding.part(config, count)
    heads = {"wq": config.n_heads, "wk": config.n_kv_heads, "wv": config.n_kv_heads}

    def narrowed(name: str, source: Source) -> Source:
        kind, suffix = match.groups() if (match := _NAME.fullmatch(name)) else ("", "")
        if kind in heads:
            first = index * heads[kind] // count * config.head_dim
            return rows_of(source, first, local.q_dim if kind == "wq" else local.kv_dim)
        if kind in ("w1", "w3"):
            return rows_of(source, index * local.hidden_dim, local.hidden_dim)
        if kind in ("wo", "w2") and suffix == "weight":
            return _columns_of(source, index, source.shape[1] // count)
        return (
            _filled_up(source, index, -(-source.shape[0] // count)) if kind in ("tok_embeddings", "output") else source
        )

    return {name: narrowed(name, source) for name, source in sources.items()} if count > 1 else dict(sources)


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
