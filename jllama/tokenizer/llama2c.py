"""llama2.c's `tokenizer.bin`.

New layout: int32 max_token_length, then for each token float32 score, int32 length, bytes. Old layout: for each token
int32 length, bytes. Both are little-endian, and the number of tokens is not stored: they go on to the end of the file.
Source: `export` in karpathy/llama2.c, tokenizer.py; the old layout is the one before scores came in.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from jllama.tokenizer import Tokenizer, TokenizerError
from jllama.tokenizer.sentencepiece import encode, processor

_BYTE = re.compile(rb"<0x([0-9A-F]{2})>")
_UNK = b"<unk>"  # token 0 of every file, so it tells the layouts apart
_BOS, _EOS = 1, 2


def recognises(head: bytes) -> bool:
    """Whether a file that begins with `head` is of the new or the old layout."""
    return _is_new(head) or head[4:9] == _UNK


def _is_new(head: bytes) -> bool:
    return head[12:17] == _UNK


def read(data: bytes, path: Path) -> Tokenizer:
    """Read a `tokenizer.bin` of either layout.

    Raises:
      TokenizerError: the file is damaged, or its tokens make no tokenizer.
    """
    pieces, scores = _parse(data, path)
    if len(pieces) <= _EOS:
        raise TokenizerError(f"{path}: holds {len(pieces)} tokens; expected <unk>, BOS, EOS and more")
    if not scores:
        return Llama2cTokenizer(pieces, None, path)
    _check(pieces, scores, path)
    return Llama2cTokenizer(pieces, processor(_model_proto(pieces, scores), path), path)


class Llama2cTokenizer(Tokenizer):
    r"""The tokenizer of a `tokenizer.bin`, which decodes as llama2.c's `decode` in run.c does.

    A token that begins a text or follows BOS loses one leading space. BOS and EOS are text: "\n<s>\n", "\n</s>\n".
    """

    def __init__(self, pieces: Sequence[bytes], sp: SentencePieceProcessor | None, path: Path) -> None:
        super().__init__([_bytes(p) for p in pieces], bos=_BOS, eos=_EOS)
        self._sp = sp
        self._path = path

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. A character that has no piece becomes its UTF-8 bytes' pieces.

        Raises:
          TokenizerError: the file has no scores, or `text` holds a lone surrogate.
        """
        if text and self._sp is None:
            raise TokenizerError(f"{self._path}: old layout, which has no scores to encode with; expected the new one")
        return encode(self._sp, text) if self._sp else []

    def first_after(self, token: int, *, first: bool) -> bool:
        """Whether `token` is BOS."""
        return token == self.bos


def _bytes(piece: bytes) -> tuple[bytes, bytes]:
    """The bytes of a piece, inside a text and at its start."""
    if match := _BYTE.fullmatch(piece):
        byte = bytes([int(match[1], 16)])
        return byte, byte
    return piece, piece.removeprefix(b" ")


def _parse(data: bytes, path: Path) -> tuple[list[bytes], list[float]]:
    """The tokens and their scores; no scores in the old layout."""
    new = _is_new(data)
    head = struct.Struct("<fi" if new else "<i")
    pieces: list[bytes] = []
    scores: list[float] = []
    at = 4 if new else 0
    while at < len(data):
        where = f"{path}: token {len(pieces)} at byte {at}"
        if len(data) - at < head.size:
            raise TokenizerError(f"{where}: {len(data) - at} bytes are left; expected {head.size} or more, or the end")
        *score, length = head.unpack_from(data, at)
        at += head.size
        if not 0 < length <= len(data) - at:
            raise TokenizerError(f"{where}: length {length}; expected 1 to {len(data) - at}, the bytes left")
        pieces.append(data[at : at + length])
        scores += score
        at += length
    longest, stated = max(map(len, pieces)), int.from_bytes(data[:4], "little", signed=True)
    if new and not longest <= stated <= len(data):
        raise TokenizerError(
            f"{path}: max_token_length {stated}; expected {longest} (the longest token) to {len(data)}"
        )
    return pieces, scores


def _model_proto(pieces: Sequence[bytes], scores: Sequence[float]) -> bytes:
    """The tokens as the SentencePiece model they were exported from, so that its library can encode.

    Field numbers and values are those of google/sentencepiece, src/sentencepiece_model.proto.
    """
    normal, unknown, control, byte = 1, 2, 3, 6  # SentencePiece.Type
    # The library takes byte pieces only with byte fallback, and that only with all of them.
    byte_fallback = sum(1 for p in pieces if _BYTE.fullmatch(p)) == 256
    kinds = {0: unknown, _BOS: control, _EOS: control}
    fields = []
    for i, (piece, score) in enumerate(zip(pieces, scores, strict=True)):
        kind = kinds.get(i, normal)
        if _BYTE.fullmatch(piece):
            kind = byte if byte_fallback else control
        fields.append(_field(1, _field(1, piece) + _field(2, score) + _field(3, kind)))  # pieces: piece, score, type
    bpe = 2
    trainer = _field(3, bpe) + _field(35, byte_fallback)  # model_type, byte_fallback
    # name, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces: these pieces hold plain spaces
    normalizer = _field(1, b"identity") + _field(3, True) + _field(4, False) + _field(5, False)
    return b"".join(fields) + _field(2, trainer) + _field(3, normalizer)


def _check(pieces: Sequence[bytes], scores: Sequence[float], path: Path) -> None:
    """Raise `TokenizerError` for tokens that the sentencepiece library refuses or passes over in silence."""
    seen: dict[bytes, int] = {}
    for i, (piece, score) in enumerate(zip(pieces, scores, strict=True)):
        where = f"{path}: token {i} ({piece!r})"
        if not math.isfinite(score):
            raise TokenizerError(f"{where} has score {score}; expected a finite number")
        if b"\0" in piece or not _is_utf8(piece):
            raise TokenizerError(f"{where}; expected UTF-8 text without NUL")
        if (twin := seen.setdefault(piece, i)) != i:
            raise TokenizerError(f"{where} is the same as token {twin}; expected each text once")


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _field(number: int, value: float | bytes) -> bytes:
    """One field of a protobuf message: an int or bool as varint, a float in 4 bytes, bytes after their length."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    return _varint(number << 3) + _varint(value)


def _varint(n: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    out = b""
    while n > 0x7F:
        out += bytes([n & 0x7F | 0x80])
        n >>= 7
    return out + bytes([n])
