"""What all error messages about input have in common: one printable line of moderate length, whatever a file says."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

_LONGEST = 800  # characters of a message
_LISTED = 400  # characters of the problems listed in one
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 80


class InputError(ValueError):
    """What came in from outside can't be used; the message is made printable, and cut where it is long."""

    def __init__(self, message: str) -> None:
        cut = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."
        super().__init__(printable(cut))


def printable(text: str) -> str:
    """Escape what a terminal would obey or could not show; line ends and tabs become spaces."""
    return "".join(c if c.isprintable() else " " if c in "\n\r\t" else ascii(c)[1:-1] for c in text)


def shown(name: object) -> str:
    """Write a name from a file in one printable line, shortened where it is long."""
    if isinstance(name, str) and name.isprintable():
        return name if len(name) <= 200 else f"{name[:200]}..."
    return quoted(name)


def quoted(value: object) -> str:
    """Write a value from a file as Python would, in one printable line, shortened where it is long or deep."""
    try:
        return printable(_REPR.repr(value))
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"a {type(value).__name__} too long to show"


def listed(problems: Sequence[str]) -> str:
    """Join problems into one line: the first few, and how many more there are."""
    kept: list[str] = []
    room = _LISTED
    for problem in problems:
        if kept and len(problem) > room:
            break
        kept.append(problem if len(problem) <= _LISTED else f"{problem[:_LISTED]}...")
        room -= len(problem)
    rest = [f"and {len(problems) - len(kept)} more"] if len(kept) < len(problems) else []
    return "; ".join([*kept, *rest])
