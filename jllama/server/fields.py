"""The fields of a request's JSON: parsed within limits, typed, None where they are absent or null."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from jllama.errors import quoted
from jllama.server.errors import refusal

_DEEPEST = 64  # arrays and objects inside each other
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    str: "a string",
    list: "an array",
    dict: "an object",
}


class Fields:
    """The fields of an object.

    Args:
      values: by name.
      where: what stands before a name in messages: "" or "stream_options.".
    """

    def __init__(self, values: dict[str, Any], where: str = "") -> None:
        self.values = {name: value for name, value in values.items() if value is not None}
        self.where = where

    def get(self, name: str, kind: type) -> Any:
        """Return a field of a kind of JSON, None where there is none.

        Raises:
          ApiError: it is of another kind.
        """
        value = self.values.get(name)
        if value is None or type(value) is kind:
            return value
        raise self.wrong(name, _KINDS[kind])

    def within(self, name: str, low: int, high: int) -> int | None:
        """Return an integer field within bounds, None where there is none."""
        value: int | None = self.get(name, int)
        if value is not None and not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def wrong(self, name: str, expected: str) -> Exception:
        """Return the error for a field that isn't what was expected."""
        param = self.where + name
        return refusal(param, f"{param} = {quoted(self.values.get(name))}: expected {expected}")


def parse(body: bytes) -> Fields:
    """Read the JSON object of a request.

    Raises:
      ApiError: it is none, or too deep, or holds what no text can express.
    """
    try:
        values = json.loads(body.decode("utf-8-sig"), parse_constant=_no_number)
    except UnicodeDecodeError as e:
        raise refusal(None, f"the body is not UTF-8: {e}") from e
    except RecursionError as e:
        raise refusal(None, f"the body nests deeper than {_DEEPEST} levels") from e
    except ValueError as e:
        raise refusal(None, f"the body is not JSON: {e}") from e
    if not isinstance(values, dict):
        raise refusal(None, f"the body is {_KINDS.get(type(values), 'a number or null')}: expected an object")
    for name, value in values.items():
        _check(name, None)
        _check(value, name)
    return Fields(values)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _check(value: Any, param: str | None) -> None:
    """Raise ApiError for a value that nests too deep, or a text with half a character."""
    level = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str):
                try:
                    each.encode()
                except UnicodeEncodeError as e:
                    raise refusal(param, f"a lone surrogate at character {e.start} of a text: expected Unicode") from e
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, dict):
                inner += each
                inner += each.values()
        if not inner:
            return
        level = inner
    raise refusal(param, f"the body nests deeper than {_DEEPEST} levels")
