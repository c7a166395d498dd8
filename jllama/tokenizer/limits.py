"""What a tokenizer.json may ask of the tokenizers library, which checks no time and no memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_PARTS = 64  # normalizers and pre-tokenizers
_GROWTH = 100  # characters that they may make of one
_PATTERN = 10_000  # characters of a pattern
_REPEATS = 100  # that may stand inside other repeats
_IN_A_ROW = 3  # repeats of an alternative
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_ESCAPE = re.compile(r"\\[pPxukgo]\{[^}]*\}|\\.", re.DOTALL)
_GROUP = re.compile(r"\((\?(<?[=!]|[a-zA-Z-]*[:)]|[>#~|]|<\w+>)?)?")


def parts(*nodes: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every normalizer, pre-tokenizer or decoder in `nodes`, also those in sequences, in order."""
    todo = list(nodes[::-1])
    while todo:
        node = todo.pop()
        if isinstance(node, Mapping):
            yield node
            for inside in ("normalizers", "pretokenizers", "decoders"):
                found = node.get(inside)
                todo += found[::-1] if isinstance(found, list) else []


def problems(spec: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the normalizers and pre-tokenizers of a tokenizer.json: too much time or memory."""
    found = []
    count, growth = 0, 1
    for part in parts(spec.get("normalizer"), spec.get("pre_tokenizer")):
        count += 1
        growth = min(growth * _growth(part), _GROWTH**2)
        pattern = part.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        if isinstance(regex, str) and repeats_repeats(regex):
            found.append(f"the pattern {regex[:40]!a} repeats too much: it can take forever")
    if count > _PARTS:
        found.append(f"{count} normalizers and pre-tokenizers, expected {_PARTS} at most")
    if growth > _GROWTH:
        found.append(f"normalizers that can make a text {_GROWTH} times as long")
    return found


def _growth(part: Mapping[str, Any]) -> int:
    """How many characters a part can make of one."""
    kind, content = part.get("type"), part.get("content")
    if kind == "Replace" and isinstance(content, str):
        pattern = part.get("pattern")
        text = pattern.get("String") if isinstance(pattern, Mapping) else None
        return -(-len(content) // len(text)) or 1 if text and isinstance(text, str) else 1 + len(content)
    if kind == "Prepend" and isinstance(prepended := part.get("prepend"), str):
        return max(1, len(prepended))
    return {"ByteLevel": 2, "Precompiled": 4}.get(str(kind), 1)


class _Group(NamedTuple):
    """An open group of an expression: whether it holds repeats or alternatives, and how many repeats in a row."""

    holds: bool = False
    row: int = 0  # in the alternative that goes on
    most: int = 0  # in one of those before

    @property
    def longest(self) -> int:
        return max(self.row, self.most)


def repeats_repeats(pattern: str) -> bool:
    """Whether an expression is too long, or a repeat in it stands in another one, around alternatives or after many.

    No expression of a published tokenizer does that. One that does can try more ways to match than there is time for.
    """
    groups = [_Group()]
    at, last = 0, False  # whether what stands before `at` holds repeats or alternatives
    while at < len(pattern) <= _PATTERN and groups[-1].row <= _IN_A_ROW:
        char, group = pattern[at], groups[-1]
        if match := _ESCAPE.match(pattern, at):
            at, last = match.end(), False
        elif char == "[":
            at, last = _after_class(pattern, at), False
        elif match := _GROUP.match(pattern, at):
            at = match.end()
            groups += [] if match[0].endswith(")") else [_Group()]
        elif char == ")" and len(groups) > 1:
            outer = groups[-2]
            groups[-2:] = [outer._replace(holds=outer.holds or group.holds, row=outer.row + group.longest)]
            at, last = at + 1, group.holds
        elif (match := _QUANTIFIER.match(pattern, at)) and _many(match):
            if last:
                return True
            groups[-1] = group._replace(holds=True, row=group.row + 1)
            lazy_or_possessive = pattern[match.end() : match.end() + 1] in ("?", "+")
            at, last = match.end() + lazy_or_possessive, True
        elif match:
            at = match.end()
        else:
            if char == "|":
                groups[-1] = _Group(len(groups) > 1 or group.holds, 0, group.longest)
            at, last = at + 1, False
    return len(pattern) > _PATTERN or groups[-1].row > _IN_A_ROW


def _many(quantifier: re.Match[str]) -> bool:
    if quantifier[0] in "*+":
        return True
    if quantifier[0] == "?":
        return False
    most = quantifier[3] or ("" if quantifier[2] else quantifier[1])
    return not most or len(most) > 9 or int(most) > _REPEATS


def _after_class(pattern: str, at: int) -> int:
    """Where a class that begins at `at` ends; classes can hold others."""
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        at += 2 if char == "\\" else 1
        depth += (char == "[") - (char == "]")
        if char == "[" and pattern[at : at + 1] == "^":
            at += 1
        if not depth:
            break
    return at
