"""llama2.c's `tokenizer.bin`.

New layout: int32 max_token_length, then for each token float32 score, int32 length, bytes. Old layout: for each token
int32 length, bytes. Both are little-endian, and the number of tokens is not stored: they go on to the end of the file.
Source: `export` in karpathy/llama2.c, tokenizer.py; the old layout is the one before scores came in.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from jllama.tokenizer.base import Tokenizer, TokenizerError
from jllama.tokenizer.pieces import BYTE_KIND, CONTROL, NORMAL, UNKNOWN, byte_of
from jllama.tokenizer.sentencepiece import build, encode
from jllama.tokenizer.special import Special

_UNK = b"<unk>"  # token 0 of every file, so it tells the layouts apart
_BOS, _EOS = 1, 2


def recognises(head: bytes) -> bool:
    """Whether a file that begins with `head` is of the new or the old layout."""
    return _is_new(head) or head[4:9] == _UNK


def _is_new(head: bytes) -> bool:
    return head[12:17] == _UNK


def read(path: Path) -> Tokenizer:
    """Read a `tokenizer.bin` of either layout.

    Raises:
      TokenizerError: the file is damaged, or its tokens make no tokenizer.
    """
    pieces, scores = _parse(path.read_bytes(), path)
    if len(pieces) <= _EOS:
        raise TokenizerError(f"{path}: holds {len(pieces)} tokens; expected <unk>, BOS, EOS and more")
    if not scores:
        return Llama2cTokenizer(pieces, None, path)
    special = {0: UNKNOWN, _BOS: CONTROL, _EOS: CONTROL}
    kinds = [special.get(i, NORMAL if byte_of(p) is None else BYTE_KIND) for i, p in enumerate(pieces)]
    return Llama2cTokenizer(pieces, build(pieces, scores, kinds, path), path)


class Llama2cTokenizer(Tokenizer):
    r"""The tokenizer of a `tokenizer.bin`, which decodes as llama2.c's `decode` in run.c does.

    A token that begins a text or follows BOS loses one leading space. BOS and EOS are text: "\n<s>\n", "\n</s>\n".
    """

    def __init__(self, pieces: Sequence[bytes], sp: SentencePieceProcessor | None, path: Path) -> None:
        super().__init__([_bytes(p) for p in pieces], bos=_BOS, eos=_EOS, special=Special({"<s>": _BOS, "</s>": _EOS}))
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
    if byte := byte_of(piece):
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
