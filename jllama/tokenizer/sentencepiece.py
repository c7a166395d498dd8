"""SentencePiece models (`tokenizer.model`), by the sentencepiece library."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from jllama.tokenizer import Tokenizer, TokenizerError, utf8
from jllama.tokenizer.special import Special

SPACE = "\u2581"  # stands for a space inside pieces
BYTE = re.compile(rb"<0x([0-9A-F]{2})>")  # the piece of a byte
NORMAL, UNKNOWN, CONTROL, BYTE_KIND = 1, 2, 3, 6  # kinds of pieces: SentencePiece.Type in its .proto


def recognises(head: bytes) -> bool:
    """Whether a file that begins with `head` is a `ModelProto`: its field 1, a short piece, begins with its own."""
    return head[:1] == head[2:3] == b"\x0a"


def read(path: Path) -> Tokenizer:
    """Read a `tokenizer.model`.

    Raises:
      TokenizerError: the file is damaged, or has no BOS and EOS.
    """
    sp = processor(path.read_bytes(), path)
    bos, eos = sp.bos_id(), sp.eos_id()
    if min(bos, eos) < 0:
        raise TokenizerError(f"{path}: BOS is {bos} and EOS is {eos}; expected a model that has both")
    return SentencePieceTokenizer(sp, bos=bos, eos=eos)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Control pieces have no bytes, and the first other token of a text loses one space."""

    def __init__(
        self, sp: SentencePieceProcessor, *, bos: int, eos: int, add_bos: bool = True, stop_ids: tuple[int, ...] = ()
    ) -> None:
        self._sp = sp
        self._control = frozenset(i for i in range(sp.vocab_size()) if sp.is_control(i))
        special = Special({sp.id_to_piece(i): i for i in self._control})
        stops = special.stop_ids(bos, eos, *stop_ids)
        super().__init__(_pieces(sp), bos=bos, eos=eos, special=special, add_bos=add_bos, stop_ids=stops)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, as the library does."""
        return encode(self._sp, text)

    def first_after(self, token: int, *, first: bool) -> bool:
        """Whether only control pieces came so far."""
        return first and token in self._control


def _pieces(sp: SentencePieceProcessor) -> list[tuple[bytes, bytes]]:
    """The bytes of every id, inside a text and at its start."""
    prefix = b" " if sp.normalize("a").startswith((SPACE, " ")) else b""
    pieces = []
    for i in range(sp.vocab_size()):
        if sp.is_control(i):
            piece = start = b""
        elif sp.is_byte(i):
            piece = start = bytes([int(sp.id_to_piece(i)[3:5], 16)])  # <0xNN>
        elif sp.is_unknown(i):
            piece = start = str(sp.decode([i])).encode()
        else:
            piece = sp.id_to_piece(i).replace(SPACE, " ").encode()
            start = piece.removeprefix(prefix)
        pieces.append((piece, start))
    return pieces


def processor(model: bytes, path: Path) -> SentencePieceProcessor:
    """Make the library's processor of a serialised `ModelProto`.

    Raises:
      TokenizerError: the library refuses the model.
    """
    sp = SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(model)
    except RuntimeError as e:
        size = len(model)
        raise TokenizerError(f"{path}: damaged or cut short: sentencepiece refuses its {size} bytes: {e}") from e
    return sp


def encode(sp: SentencePieceProcessor, text: str) -> list[int]:
    """Return the ids of `text`.

    Raises:
      TokenizerError: `text` holds a lone surrogate, which no UTF-8 can express.
    """
    ids: list[int] = sp.encode(utf8(text), out_type=int)
    return ids


def build(
    pieces: Sequence[bytes], scores: Sequence[float], kinds: Sequence[int], path: Path, *, prefix: bool = True
) -> SentencePieceProcessor:
    """Make the library's processor of pieces that were exported from a BPE model, with plain spaces.

    Field numbers and values are those of google/sentencepiece, src/sentencepiece_model.proto.

    Args:
      pieces: their texts.
      scores: the higher, the earlier two pieces are joined to this one.
      kinds: `NORMAL`, `UNKNOWN`, `CONTROL`, `BYTE_KIND` or another of the .proto.
      path: where they come from.
      prefix: whether a text gets a space in front.

    Raises:
      TokenizerError: pieces that make no tokenizer.
    """
    _check(pieces, scores, path)
    # The library takes byte pieces only with byte fallback, and that only with all of them.
    byte_fallback = sum(1 for p, kind in zip(pieces, kinds, strict=True) if kind == BYTE_KIND and BYTE.match(p)) == 256
    fields = []
    for piece, score, kind in zip(pieces, scores, kinds, strict=True):
        kind = CONTROL if kind == BYTE_KIND and not byte_fallback else kind
        fields.append(_field(1, _field(1, piece) + _field(2, score) + _field(3, kind)))  # pieces: piece, score, type
    bpe = 2
    trainer = _field(3, bpe) + _field(35, byte_fallback)  # model_type, byte_fallback
    # name, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces: these pieces hold plain spaces
    normalizer = _field(1, b"identity") + _field(3, prefix) + _field(4, False) + _field(5, False)
    return processor(b"".join(fields) + _field(2, trainer) + _field(3, normalizer), path)


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
