"""Log-probabilities in the shapes of both endpoints, each token with the very bytes that it adds to the text."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jllama.tokenizer import Tokenizer

Top = Sequence[tuple[int, float]]

_NONE = -9999.0  # JSON has no infinity; vLLM's word for it


class Spelling:
    """The bytes of the tokens of a text, one after another.

    Args:
      tokenizer: gives them.
      prompt: ids before the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._first = True
        for token in prompt:
            self.next(token)

    def next(self, token: int) -> bytes:
        """Return the bytes of the next token."""
        piece = self.instead(token)
        self._first = self._tokenizer.first_after(token, first=self._first)
        return piece

    def instead(self, token: int) -> bytes:
        """Return what the bytes would be if this token were the next."""
        return self._tokenizer.piece(token, first=self._first)


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can have it."""
    return logprob if math.isfinite(logprob) else _NONE


class ChatLogprobs:
    """The entries of a chat's answer, as its tokens come."""

    def __init__(self, spelling: Spelling, count: int) -> None:
        """Begin; `count` is how many likely tokens stand beside each one."""
        self._spelling = spelling
        self._count = count

    def add(self, tokens: list[int], logprobs: Sequence[float | None], tops: Sequence[Top]) -> dict[str, Any]:
        """Return the entries of some tokens."""
        content = []
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            top = tops[i][: self._count] if tops else ()
            likely = [_entry(self._spelling.instead(other), value) for other, value in top]
            content.append(_entry(self._spelling.next(token), logprob) | {"top_logprobs": likely})
        return {"content": content, "refusal": None}


def _entry(piece: bytes, logprob: float | None) -> dict[str, Any]:
    assert logprob is not None
    return {"token": piece.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(piece)}


class TextLogprobs:
    """The lists of a completion, as its tokens come; offsets count characters from the start of what is echoed."""

    def __init__(self, spelling: Spelling, count: int) -> None:
        """Begin; `count` is how many likely tokens stand beside each one."""
        self._spelling = spelling
        self._count = count
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, tokens: list[int], logprobs: Sequence[float | None], tops: Sequence[Top]) -> dict[str, Any]:
        """Return the lists of some tokens; the first of a text has no log-probability."""
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            top = tops[i][: self._count] if tops else ()
            likely = {_text(self._spelling.instead(other)): finite(value) for other, value in reversed(top)}
            piece = self._spelling.next(token)
            found["tokens"].append(_text(piece))
            found["token_logprobs"].append(None if logprob is None else finite(logprob))
            found["top_logprobs"].append(None if logprob is None else likely | {_text(piece): finite(logprob)})
            found["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(piece))
        return found


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")
