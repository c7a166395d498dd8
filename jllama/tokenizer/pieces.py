"""The bytes of tokens, made when asked for: a vocabulary is large, and an answer short."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

SPACE = "\u2581"  # stands for a space inside pieces of SentencePiece
# SentencePiece.Type in src/sentencepiece_model.proto of google/sentencepiece; GGUF has them too.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE_KIND = 1, 2, 3, 4, 5, 6

_BYTE = re.compile(rb"<0x([0-9A-F]{2})>")  # the piece of a byte


class BytePieces(Sequence[tuple[bytes, bytes]]):
    """The bytes of every id: those of a byte-level token, the text of another one, none for a gap.

    Args:
      vocab: the byte-level tokens.
      plain: tokens that stand for their own text.
      size: how many ids there are at least.

    Attributes:
      missing: bytes that no token stands for.
      unused: ids that no token has.
    """

    def __init__(self, vocab: Mapping[str, int], plain: Mapping[str, int], size: int = 0) -> None:
        size = max(size, 1 + max([*vocab.values(), *plain.values()], default=-1))
        self._tokens: list[str | None] = [None] * size
        for token, i in vocab.items():
            self._tokens[i] = token
        for token, i in plain.items():
            self._tokens[i] = token
        self._plain = frozenset(plain.values())
        self.missing = [b for char, b in _BYTES.items() if char not in vocab or char in plain]
        self.unused = [i for i, token in enumerate(self._tokens) if token is None]

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, i: int) -> tuple[bytes, bytes]:  # type: ignore[override]  # no slices
        token = self._tokens[i] or ""
        try:
            piece = token.encode() if i in self._plain else bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # not in the alphabet
            piece = token.encode()
        return piece, piece


class SpacedPieces(Sequence[tuple[bytes, bytes]]):
    """The bytes of every piece, inside a text and at its start.

    Args:
      texts: with plain spaces.
      kinds: control and unused pieces have no bytes.
      prefix: whether the encoder puts a space before a text.
      plain: ids of pieces that it puts none before.
    """

    def __init__(
        self, texts: Sequence[bytes], kinds: Sequence[int], *, prefix: bool, plain: Collection[int] = ()
    ) -> None:
        self._texts, self._kinds, self._prefix, self._plain = texts, kinds, b" " if prefix else b"", plain

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, i: int) -> tuple[bytes, bytes]:  # type: ignore[override]  # no slices
        text, kind = self._texts[i], self._kinds[i]
        if kind in (CONTROL, UNUSED):
            return b"", b""
        if kind == BYTE_KIND:
            text = byte_of(text) or b""
        if kind in (UNKNOWN, BYTE_KIND) or i in self._plain:
            return text, text
        return text, text.removeprefix(self._prefix)


def byte_of(piece: bytes) -> bytes | None:
    """Return the byte that a piece like <0x0A> stands for, None for any other piece."""
    match = _BYTE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else None


def alphabet() -> list[str]:
    """Return the character that stands for each byte: itself if it is printable, else one from U+0100 on.

    Source: `bytes_to_unicode` in openai/gpt-2, src/encoder.py.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(0x100)]


_BYTES = {char: b for b, char in enumerate(alphabet())}
