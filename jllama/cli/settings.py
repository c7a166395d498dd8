"""The settings that the flags ask for."""

from __future__ import annotations

import dataclasses

from jllama.cli.flags import FLAGS
from jllama.cli.folders import expanded
from jllama.response_format import Format
from jllama.settings import Settings


def from_flags() -> Settings:
    """Return the settings.

    Raises:
      ValueError: a wrong one, or more than one form of an answer.
      OSError: the file of a schema or a grammar can't be read.
    """
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "response_format"]
    return Settings(**{name: getattr(FLAGS, name) for name in names}, response_format=_form())


def _form() -> Format | None:
    kinds = {"json_schema": "json_schema", "regex": "regex", "grammar": "lark"}
    given = [name for name in kinds if getattr(FLAGS, name) is not None]
    if len(given) > 1:
        raise ValueError(f"--{' and --'.join(given)}: expected one of them")
    for name in given:
        value = getattr(FLAGS, name)
        try:
            text = value if name == "regex" else expanded(value).read_text(encoding="utf-8")
            return Format(kinds[name], text)
        except ValueError as e:
            raise ValueError(f"--{name}={value}: {e}") from e
    return None
