"""The families of models, a file each: what their files say, and what the engine calls it.

A new family is a file with `HUGGINGFACE` and `GGUF_FILES`, and a row here. Nothing else knows one family from another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jllama.config import Config, ConfigError
from jllama.errors import listed
from jllama.families import gpt2, llama, qwen
from jllama.families.family import Layout
from jllama.families.fields import Fields

__all__ = ["GGUF", "HUGGINGFACE", "Fields", "Layout", "config_of"]

_FAMILIES = (llama, qwen, gpt2)

HUGGINGFACE = {row.model_type: row for family in _FAMILIES for row in family.HUGGINGFACE}
GGUF = {row.architecture: row for family in _FAMILIES for row in family.GGUF_FILES}


def config_of(read: Callable[[Fields], dict[str, Any]], fields: Fields) -> tuple[Config, bool | None]:
    """Read a model's config from the metadata of a file, and whether the head is tied, None where it doesn't say that.

    Raises:
      ConfigError: fields are missing, wrong, contradicting or not supported; all are named.
    """
    values = read(fields)
    if fields.problems:
        raise ConfigError(listed(fields.problems))
    tied = values.pop("tied", None)
    return Config(**values, tied=bool(tied)), tied
