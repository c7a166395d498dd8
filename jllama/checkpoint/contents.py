"""What a format's reader finds in a file, and the error of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jllama.checkpoint.source import Source
from jllama.config import Config
from jllama.errors import InputError


class CheckpointError(InputError):
    """A file that cannot be read as a model, or a model that a file format cannot hold."""


class Contents(NamedTuple):
    """A model in a file, not yet read."""

    config: Config
    sources: Mapping[str, Source]  # by the names of `tensors.tensors(config)`
    dtype: str  # a key of `weights.FORMS`: the nearest to what the file stores
