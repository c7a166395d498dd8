"""Text as it comes out: token ids to whole characters, and the end at a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class Pieces(Protocol):
    """What decoding asks of a tokenizer."""

    def piece(self, token: int, *, first: bool) -> bytes:
        """Return the bytes of a token: as the first of a text, or inside one."""

    def first_after(self, token: int, *, first: bool) -> bool:
        """Whether the token after `token` counts as the first of a text, given whether `token` does."""


class StreamDecoder:
    """Turn token ids into text one by one; the parts joined are the text of all ids.

    A character split over several tokens comes out whole with its last one. Bytes that are no UTF-8 become U+FFFD,
    one for each broken character, as Python's `errors="replace"` does.

    Args:
      tokenizer: gives the bytes of each token.
      prompt: ids that precede the text. They are not part of it, but settle whether its leading space stays.
    """

    def __init__(self, tokenizer: Pieces, prompt: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        for token in prompt:
            self.feed(token)

    def feed(self, token: int) -> str:
        """Return the characters that `token` completes, "" where it completes none."""
        piece = self._tokenizer.piece(token, first=self._first)
        self._first = self._tokenizer.first_after(token, first=self._first)
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for a character cut short, else ""."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Cut a stream of text before the first stop string in it, wherever its parts begin and end.

    Of several stop strings the one that begins earliest in the text wins. Text is held back only while it could be
    the beginning of a stop string. What a prompt holds doesn't count: feed only new text.

    Raises:
      ValueError: a stop string is empty.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        if "" in self._stops:
            raise ValueError('a stop string is "": expected at least one character')

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that can go out, and whether a stop string ended it: feed nothing after that."""
        text = self._held + text
        end, stopped = self._scan(text)
        self._held = "" if stopped else text[end:]
        return text[:end], stopped

    def flush(self) -> tuple[str, bool]:
        """Return the text held back, at the end of the text, and whether a stop string ends it."""
        # A whole stop string can be among it, where a longer one that began earlier was still possible.
        text, self._held = self._held, ""
        end = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=len(text))
        return text[:end], end < len(text)

    def _scan(self, text: str) -> tuple[int, bool]:
        """Where a stop string begins or still could, and whether it is there in full."""
        for at in range(len(text)):
            if text.startswith(self._stops, at):
                return at, True
            rest = text[at : at + self._longest]
            if any(stop.startswith(rest) for stop in self._stops):
                return at, False
        return len(text), False
