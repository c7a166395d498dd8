"""What a tokenizer.json may ask of the tokenizers library, which checks no time and no memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_PARTS = 64  # normalizers and pre-tokenizers
_GROWTH = 100  # characters that they may make of one
_PATTERN = 10_000  # characters of a pattern
_REPEATS = 100  # that may stand inside other repeats
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
            found.append(f"the pattern {regex[:40]!a} repeats what repeats or has alternatives: it can take forever")
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


def repeats_repeats(pattern: str) -> bool:
    """Whether a repeat in an expression stands inside another one, or around alternatives, or it is too long.

    No expression of a published tokenizer does that. One that does can try more ways to match than there is time for.
    """
    if len(pattern) > _PATTERN:
        return True
    groups = [False]  # whether each open group holds many repeats or alternatives
    at, last = 0, False  # whether what stands before `at` does
    while at < len(pattern):
        char = pattern[at]
        if match := _ESCAPE.match(pattern, at):
            at, last = match.end(), False
        elif char == "[":
            at, last = _after_class(pattern, at), False
        elif match := _GROUP.match(pattern, at):
            at = match.end()
            groups += [] if match[0].endswith(")") else [False]
        elif char == ")":
            last = groups.pop() if len(groups) > 1 else False
            groups[-1] |= last
            at += 1
        elif match := _QUANTIFIER.match(pattern, at):
            at = match.end()
            if _many(match):
                if last:
                    return True
                last = groups[-1] = True
                if pattern[at : at + 1] in ("?", "+"):  # lazy, possessive
                    at += 1
        else:
            groups[-1] |= char == "|" and len(groups) > 1
            at, last = at + 1, False
    return False


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
