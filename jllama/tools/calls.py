"""Tool calls found in an answer as it comes in."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Collection
from typing import Literal, NamedTuple

from jllama.tools.families import Family

Reason = Literal["stop", "length", "tool_calls"]
_ALPHABET = string.ascii_letters + string.digits
_MAY_BEGIN = re.compile(r"[\s;]*(\[\s*)?")


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A function that the model wants to be called.

    Args:
      name: of the function.
      arguments: a JSON object.
      id: what the answer to it names; nine letters and digits, as Mistral's templates want them.
    """

    name: str
    arguments: str
    id: str = dataclasses.field(default_factory=lambda: "".join(secrets.choice(_ALPHABET) for _ in range(9)))


class Found(NamedTuple):
    """A part of an answer: its text, and the calls after it."""

    text: str
    calls: list[ToolCall]


class CallParser:
    """Tell calls from text, piece by piece. Text goes out as soon as it can't begin a call; a call comes out whole.

    White space around calls is dropped. What looks like a call and is none, or names no function that there is, is
    text; so is a call that is broken off.

    Args:
      family: how calls are written.
      names: of the functions.
    """

    def __init__(self, family: Family, names: Collection[str]) -> None:
        self._family = family
        self._names = frozenset(names)
        self._held = ""
        self._at: int | None = None  # where something that looks like a call begins in what is held
        self._fresh = True  # whether nothing but white space came since the beginning, or the last call
        self._called = False
        self._text = ""  # to go out
        begin = "|".join(filter(None, (re.escape(family.marker), family.opening)))
        self._begin = re.compile(rf"[\s;]*(?={begin})")

    def feed(self, text: str) -> Found:
        """Return what a piece of the answer completes."""
        self._held += text
        return self._go_on(final=False)

    def flush(self, *, whole: bool = True) -> Found:
        """Return what is left at the end of an answer, which is `whole` unless it was cut by a limit."""
        text, calls = self._go_on(final=whole)
        rest = "" if self._called and self._fresh and not self._held.strip() else self._held
        self._held = ""
        return Found(text + rest, calls)

    def whole(self, text: str, *, whole: bool = True) -> Found:
        """Return what is in an answer that is there at once."""
        first, last = self.feed(text), self.flush(whole=whole)
        return Found(first.text + last.text, first.calls + last.calls)

    def _go_on(self, *, final: bool) -> Found:
        calls = list[ToolCall]()
        while (at := self._find() if self._at is None else self._at) is not None:
            self._at = at
            try:
                found = self._read(at, final=final)
            except ValueError:  # its first character is text, and what follows is looked at again
                self._text, self._held = self._text + self._held[: at + 1], self._held[at + 1 :]
                self._at, self._fresh = None, False
                continue
            if found is None:
                break
            calls += found
            self._at, self._fresh, self._called = None, True, True
        out, self._text = self._text, ""
        return Found(out, calls)

    def _find(self) -> int | None:
        """Let out the text before a call, and whatever can't begin one; returns where one seems to begin."""
        held, marker = self._held, self._family.marker
        if self._fresh and (found := self._begin.match(held)):
            return found.end()
        if self._fresh and _MAY_BEGIN.fullmatch(held):
            return None
        at = held.find(marker)
        whole = at >= 0
        if not whole:
            lengths = range(min(len(held), len(marker) - 1), 0, -1)
            at = len(held) - next((n for n in lengths if marker.startswith(held[-n:])), 0)
        text = held[:at].rstrip()
        self._text, self._held = self._text + text, held[len(text) :]
        self._fresh = self._fresh and not text
        return at - len(text) if whole else None

    def _read(self, at: int, *, final: bool) -> list[ToolCall] | None:
        """Take the calls at a place in the held text; None where it takes more to tell, ValueError for none."""
        if (found := self._family.read(self._held[at:], final)) is None:
            return None
        calls, end = found
        if unknown := {name for name, _ in calls} - self._names:
            raise ValueError(f"no function {unknown}")
        made = [ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)) for name, arguments in calls]
        self._held = self._held[at + end :]
        return made


def parse(family: Family, names: Collection[str], text: str, *, whole: bool = True) -> Found:
    """Tell the calls of an answer from its text; `whole` unless it was cut by a limit."""
    return CallParser(family, names).whole(text, whole=whole)


def finish_reason(reason: Reason, calls: Collection[ToolCall]) -> Reason:
    """Return how an answer ended in which there were calls: cut by a limit, it may have lacked more."""
    return "tool_calls" if calls and reason == "stop" else reason
