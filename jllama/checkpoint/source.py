"""A tensor that is not read yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Stored(NamedTuple):
    """The blocks that a file keeps a matrix in."""

    kind: str  # often a key of `weights.KINDS`
    read: Callable[[int, int], Array]  # of some rows, uint8 [rows, bytes]


class Source(NamedTuple):
    """A tensor not yet read: its shape is known, `read(start, stop)` gives those rows as floats of any width.

    A block may be a view that is only good until the next `read`.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], Array]
    columns: tuple[Source, slice] | None = None  # the matrix that this is some columns of: int8 scales are of its rows
    stored: Stored | None = None  # where the file has blocks that can stay as they are
