"""What form an answer must have: a JSON schema, any JSON object, a regular expression or a grammar."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jllama.errors import quoted

KINDS = ("json_schema", "json_object", "regex", "lark")
_MOST = 2**18  # characters of a schema, an expression or a grammar


@dataclasses.dataclass(frozen=True)
class Format:
    """The form of an answer, not compiled yet.

    Args:
      kind: one of `KINDS`.
      text: the JSON schema, the regular expression that the whole answer matches (the syntax of Rust's regex, without
        look-around), or the grammar in llguidance's dialect of Lark; empty for "json_object".

    Raises:
      ValueError: there is no such kind, or the text is none, too long, or no JSON schema.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a format of kind {quoted(self.kind)}: expected {', '.join(KINDS)}")
        if not isinstance(self.text, str) or len(self.text) > _MOST:
            raise ValueError(f"a {self.kind} is {quoted(self.text)}: expected a text of {_MOST} characters at most")
        if self.kind == "json_object" and self.text:
            raise ValueError(f"a json_object has the text {quoted(self.text)}: expected none")
        if self.kind == "json_schema":
            self._check_schema()

    def _check_schema(self) -> None:
        try:
            schema = json.loads(self.text)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"a json_schema is no JSON: {e}") from e
        if not isinstance(schema, dict) and schema is not True:
            raise ValueError(f"a json_schema is {quoted(schema)}: expected an object, or true")


def to_format(value: Any) -> Format | None:
    """Read a format as OpenAI's API writes it: `{"type": "json_schema", "json_schema": {"schema": {...}}}`.

    Also `{"type": "json_object"}`, with a `schema` as llama.cpp has it, `{"type": "regex", "regex": "..."}` and
    `{"type": "lark", "lark": "..."}`. None and `{"type": "text"}` are no format.

    Raises:
      ValueError: it is none of these.
    """
    if value is None or isinstance(value, Format):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"response_format = {quoted(value)}: expected an object with a type")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind in ("regex", "lark"):
        return Format(kind, value.get(kind))  # type: ignore[arg-type]  # which checks it
    if kind not in ("json_object", "json_schema"):
        raise ValueError(f"response_format.type = {quoted(kind)}: expected text, {', '.join(KINDS)}")
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else value.get("schema")
    if schema is None:
        if kind == "json_schema":
            raise ValueError("response_format.json_schema.schema is not there: expected a JSON schema")
        return Format("json_object")
    try:
        return Format("json_schema", json.dumps(schema, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"response_format: the schema can't be written as JSON: {e}") from e
