"""Control tokens: where they stand in a template's text, and how a look-alike in a message stays text."""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")  # of a turn or a text
LOOKS_CONTROL = re.compile(r"<\|[^<>]+\|>")
LOOKS_NAME = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # of BOS or EOS, which some files don't list as control tokens

_LONGEST = 1000  # characters of a control token
_MARKS = range(0xD800, 0xE000)  # lone surrogates: no text that can be encoded holds one
_MARKED = re.compile("[\ud800-\udfff]")
_SPACES = re.compile(r"\s*")


class Special:
    """The control tokens of a vocabulary.

    Args:
      ids: their ids by their texts.
      lstrip: texts of those that take in the white space before them.
      rstrip: texts of those that take in the white space after them.

    Attributes:
      ids: as given, without texts of one character, which can't be told from text.

    Raises:
      ValueError: a text is too long or no Unicode, or they have more different characters than can be marked.
    """

    def __init__(self, ids: Mapping[str, int], lstrip: Collection[str] = (), rstrip: Collection[str] = ()) -> None:
        self.ids = {text: i for text, i in ids.items() if len(text) > 1}
        self._lstrip, self._rstrip = frozenset(lstrip), frozenset(rstrip)
        self._longest = max(map(len, self.ids), default=0)
        chars = sorted(set("".join(self.ids)))
        if _MARKED.search("".join(ids)):
            raise ValueError("a control token is no valid Unicode")
        if self._longest > _LONGEST:
            raise ValueError(f"a control token has {self._longest} characters; expected {_LONGEST} at most")
        if len(chars) > len(_MARKS):
            raise ValueError(f"control tokens with {len(chars)} different characters; expected {len(_MARKS)} at most")
        self._marks = {char: chr(mark) for char, mark in zip(chars, _MARKS, strict=False)}
        self._chars = {mark: char for char, mark in self._marks.items()}

    def text(self, token: int | None) -> str:
        """Return the text of a control token, "" for an id that is none."""
        return next((text for text, i in self.ids.items() if i == token), "")

    def below(self, size: int) -> Special:
        """Return the control tokens whose ids are less than `size`."""
        return Special({text: i for text, i in self.ids.items() if i < size}, self._lstrip, self._rstrip)

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the ids of the control tokens in `text` and the texts between them, in order, without marks."""
        at = 0
        for start, token in self._found(text):
            if start < at:  # inside the one before
                continue
            between = text[at:start].rstrip() if token in self._lstrip else text[at:start]
            if between:
                yield self.show(between)
            yield self.ids[token]
            at = start + len(token)
            if token in self._rstrip and (spaces := _SPACES.match(text, at)):
                at = spaces.end()
        if rest := text[at:]:
            yield self.show(rest)

    def guard(self, text: str) -> str:
        """Return `text` marked so that `split` finds no control token in it, nor one that it is a part of.

        A mark takes the place of a character, a different one for each, so that templates count, cut and compare
        marked texts as they would the texts themselves.
        """
        marked = {at for at, _ in self._found(text)}
        # A template may strip the white space around a text.
        if body := text.strip():
            start = text.index(body[0])
            if _begins(self._sorted, body, self._longest):
                marked.add(start + len(body) - 1)
            if _begins(self._reversed, body[::-1], self._longest) or (
                len(body) < self._longest and body in self._joined
            ):
                marked.add(start)
        if not marked:
            return text
        chars = list(text)
        for at in marked:
            chars[at] = self._marks[chars[at]]
        return "".join(chars)

    def show(self, text: str) -> str:
        """Return `text` without marks."""
        return _MARKED.sub(lambda mark: self._chars.get(mark[0], mark[0]), text)

    def stop_ids(self, *ids: int, ends: Collection[str] = ENDS) -> tuple[int, ...]:
        """Return `ids` and those of the control tokens that end a turn or a text, each once."""
        return tuple(dict.fromkeys([*ids, *(self.ids[text] for text in ends if text in self.ids)]))

    def _found(self, text: str) -> Iterator[tuple[int, str]]:
        """Where control tokens are in `text`, also inside others: the longest that begins at each place."""
        # A dictionary, as an expression of thousands takes seconds to compile, and tries them in turn.
        for first in self._firsts.finditer(text):
            at = first.start()
            for length in self._lengths.get(text[at : at + 2], ()):
                if (token := text[at : at + length]) in self.ids:
                    yield at, token
                    break

    @cached_property
    def _firsts(self) -> re.Pattern[str]:
        firsts = sorted({text[0] for text in self.ids})
        return re.compile(f"[{''.join(map(re.escape, firsts))}]" if firsts else "(?!)")

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """The lengths of the control tokens by their first two characters, the longest first."""
        lengths: dict[str, set[int]] = {}
        for text in self.ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        return {begin: sorted(found, reverse=True) for begin, found in lengths.items()}

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.ids)

    @cached_property
    def _reversed(self) -> list[str]:
        return sorted(text[::-1] for text in self.ids)

    @cached_property
    def _joined(self) -> str:
        return "\ud800".join(self.ids)


def _begins(texts: list[str], body: str, longest: int) -> bool:
    """Whether an end of `body` begins one of `texts`, which are sorted, without being all of it."""
    for n in range(1, min(len(body), longest - 1) + 1):
        end = body[-n:]
        at = bisect.bisect_right(texts, end)  # past a whole one: those are found as such
        if at < len(texts) and texts[at].startswith(end):
            return True
    return False
