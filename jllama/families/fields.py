"""Metadata read with checks: what a config.json and the keys of a GGUF file have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jllama.errors import shown


class Fields:
    """Fields read with checks. What is wrong goes to `problems`, and something of the right type is returned.

    Args:
      values: the fields by name.
      origin: where they are from, for messages.
      prefix: what messages put before the names.
    """

    _EXPECTED: ClassVar = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        dict: "an object",
        list: "a list",
    }

    def __init__(self, values: Mapping[str, Any], origin: str, prefix: str = "") -> None:
        self.values = values
        self.origin = origin
        self.prefix = prefix
        self.problems: list[str] = []
        self._asked: set[str] = set()

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field of this type; the default where it is absent or null, unless there is none."""
        value = self.peek(name)
        value = default if value is None else value
        if value is None:
            self.problems.append(f"{self.prefix}{name} is missing, expected {self._EXPECTED[kind]}")
        elif (typed := _typed(value, kind)) is not None:
            return typed
        else:
            self.problems.append(f"{self.prefix}{name} = {shown(value)}: expected {self._EXPECTED[kind]}")
        return kind()

    def per_layer(self, name: str, n_layers: int, default: int | None = None) -> int:
        """Return a whole number, which may be given as an array of equal ones, one a layer."""
        value = self.peek(name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) == n_layers:
            if (value == value[0]).all():
                return int(value[0])
            self.problems.append(f"{self.prefix}{name} = {shown(value)}: not supported; expected equal layers")
            return int(value[0])
        found: int = self.get(name, int, default)
        return found

    def peek(self, name: str) -> Any:
        """Return a field of whatever type; None where it is absent."""
        self._asked.add(name)
        return self.values.get(name)

    def only(self, name: str, *expected: Any) -> None:
        """Refuse any value but these; absent and null stand for them."""
        value = self.peek(name)
        if value is not None and not any(_equal(value, one) for one in expected):
            choices = " or ".join(map(str, expected))
            self.problems.append(f"{self.prefix}{name} = {shown(value)}: not supported; expected {choices}")

    def agree(self, found: Mapping[str, Any]) -> Any:
        """Return the value that was found under several names, None where under none."""
        given = [(name, value) for name, value in found.items() if value is not None]
        if not all(_equal(value, given[0][1]) for _, value in given):
            both = " and ".join(f"{self.prefix}{name} = {shown(value)}" for name, value in given)
            self.problems.append(f"{both}: expected one value")
        return given[0][1] if given else None

    def within(self, prefix: str, values: Mapping[str, Any]) -> Fields:
        """Give other fields, of a table among these, whose problems are these's too."""
        inner = Fields(values, self.origin, f"{self.prefix}{prefix}")
        inner.problems = self.problems
        return inner

    def unasked(self) -> list[str]:
        """Name the fields that nobody has asked for."""
        return [name for name in self.values if name not in self._asked]


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; an array is so to arrays alone."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and np.array_equal(one, other)
    return bool(one == other)


def _typed(value: Any, kind: type) -> Any:
    """Return a value of this type, None where it is of another; no numbers past 64 bits."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = None if abs(value) >= 1 << 63 else float(value) if kind is float else value
    return value if type(value) is kind else None
