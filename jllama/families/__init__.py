"""The families of models, a file each: what their files say, and what the engine calls it.

A new family is a file with `HUGGINGFACE` and `GGUF_FILES`, and a row here. Nothing else knows one family from another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jllama.config import Config, ConfigError
from jllama.errors import listed, shown
from jllama.families import gemma, gpt2, gptneox, granite, llama, olmo2, phi3, qwen, smollm3, stablelm
from jllama.families.family import Layout
from jllama.families.fields import Fields

__all__ = ["GGUF", "HUGGINGFACE", "Fields", "Layout", "config_of"]

_FAMILIES = (llama, qwen, smollm3, granite, olmo2, phi3, stablelm, gemma, gpt2, gptneox)

HUGGINGFACE = {row.model_type: row for family in _FAMILIES for row in family.HUGGINGFACE}
GGUF = {row.architecture: row for family in _FAMILIES for row in family.GGUF_FILES}


def config_of(
    read: Callable[[Fields], dict[str, Any]], fields: Fields, *, strict: bool = False
) -> tuple[Config, bool | None]:
    """Read a model's config from the metadata of a file, and whether the head is tied, None where it doesn't say that.

    With `strict` all fields must be known, as each might change what is computed.

    Raises:
      ConfigError: fields are missing, wrong, contradicting or not supported; all are named.
    """
    values = read(fields)
    problems = fields.problems
    if strict:
        problems = problems + [f"{fields.prefix}{shown(name)}: not supported" for name in fields.unasked()]
    if problems:
        raise ConfigError(listed(problems))
    tied = values.pop("tied", None)
    return Config(**values, tied=bool(tied)), tied
