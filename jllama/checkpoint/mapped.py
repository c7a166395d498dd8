"""Tensors in files mapped into memory: what several formats share."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from typing import BinaryIO

import numpy as np

from jllama.checkpoint.source import Array, Source, Stored


def map_file(file: BinaryIO) -> mmap.mmap:
    """Map an open file, which may be closed then; nothing is read yet."""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def release(data: mmap.mmap) -> None:
    """Give the pages that were read back: until then they count as memory of this process."""
    if hasattr(data, "madvise"):
        data.madvise(mmap.MADV_DONTNEED)


def strided(
    data: mmap.mmap, dtype: np.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> Source:
    """Give a tensor of plain numbers as a source.

    Args:
      data: the file.
      dtype: of the numbers, in the file's byte order.
      offset: of the first number, in bytes.
      shape: of the tensor.
      strides: bytes from an index to the next on each axis; None: rows one after another.
    """
    tensor: Array = np.ndarray(shape, dtype, buffer=data, offset=offset, strides=strides)

    def read(start: int, stop: int) -> Array:
        release(data)
        return tensor[start:stop]

    return Source(shape, read)


def rows_of(source: Source, first: int, count: int) -> Source:
    """Give `count` rows of a source from `first` on."""
    rows = _with_rows(source, (count, *source.shape[1:]), lambda read, start, stop: read(first + start, first + stop))
    return rows._replace(columns=source.columns and (rows_of(source.columns[0], first, count), source.columns[1]))


def _with_rows(
    source: Source, shape: tuple[int, ...], rows: Callable[[Callable[[int, int], Array], int, int], Array]
) -> Source:
    """Give a source that takes rows of another, whether as numbers or as the file's blocks."""

    def of(read: Callable[[int, int], Array]) -> Callable[[int, int], Array]:
        return lambda start, stop: rows(read, start, stop)

    stored = source.stored and Stored(source.stored.kind, of(source.stored.read))
    return Source(shape, of(source.read), stored=stored)


def joined(parts: Sequence[Source], axis: int) -> Source:
    """Put tensors below each other (axis 0) or side by side (axis 1); their other axes are equal."""
    if len(parts) == 1:
        return parts[0]
    if axis == 1:
        shape = (parts[0].shape[0], sum(part.shape[1] for part in parts))
        return Source(shape, lambda start, stop: np.concatenate([part.read(start, stop) for part in parts], axis=1))

    def of(reads: Sequence[Callable[[int, int], Array]], start: int, stop: int) -> Array:
        found, first = [], 0
        for part, read in zip(parts, reads, strict=True):
            begin, end = max(start - first, 0), min(stop - first, part.shape[0])
            if begin < end:
                found.append(read(begin, end))
            first += part.shape[0]
        return np.concatenate(found)

    stored = [part.stored for part in parts if part.stored is not None]
    is_same = len(stored) == len(parts) and len({one.kind for one in stored}) == 1
    blocks = Stored(stored[0].kind, functools.partial(of, [one.read for one in stored])) if is_same else None
    rows = sum(part.shape[0] for part in parts)
    return Source((rows, *parts[0].shape[1:]), functools.partial(of, [part.read for part in parts]), stored=blocks)


def interleaved(source: Source, head_dim: int, rotary_dim: int) -> Source:
    """Reorder the rows of each head, whose rotary pairs are (j, j + R/2), so that they are (2j, 2j + 1).

    The width of a head, H, divides the rows: those of wq or wk, of their biases, or of the norm of a head. Only the
    first R of its rows are pairs.
    """
    return _regrouped(source, head_dim, rotary_dim, 2)


def half_split(source: Source, head_dim: int, rotary_dim: int) -> Source:
    """Undo `interleaved`."""
    return _regrouped(source, head_dim, rotary_dim, rotary_dim // 2)


def _regrouped(source: Source, head_dim: int, rotary_dim: int, groups: int) -> Source:
    """Cut the rotary rows of each head into `groups`; give the first row of every group, then the second, and so on."""
    order = np.arange(head_dim)
    order[:rotary_dim] = order[:rotary_dim].reshape(groups, -1).T.ravel()

    def rows(read: Callable[[int, int], Array], start: int, stop: int) -> Array:
        first, last = start // head_dim * head_dim, -(-stop // head_dim) * head_dim  # whole heads
        block = read(first, last)
        heads = block.reshape(-1, head_dim, *block.shape[1:])[:, order]
        return heads.reshape(block.shape)[start - first : stop - first]

    return _with_rows(source, source.shape, rows)
