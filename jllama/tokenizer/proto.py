"""SentencePiece's `ModelProto`, as much of it as is needed: its pieces, and whether it is whole.

Field numbers and values are those of google/sentencepiece, src/sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from jllama.tokenizer.base import TokenizerError

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of the model
_PIECE, _SCORE, _KIND = 1, 2, 3  # fields of a piece
_NORMAL = 1


class Model(NamedTuple):
    """The pieces of a model.

    Args:
      pieces: their texts.
      kinds: what each is.
      spans: where each lies in the file.
    """

    pieces: list[bytes]
    kinds: list[int]
    spans: list[tuple[int, int]]


def parse(data: bytes, path: object) -> Model:
    """Read the pieces of a serialised model.

    Raises:
      TokenizerError: it is damaged, or cut short: the settings of the trainer and the normalizer come last.
    """
    model, found, at = Model([], [], []), set(), 0
    try:
        while at < len(data):
            if plain := _plain(data, at):
                text, what, end = plain
                model.pieces.append(text)
                model.kinds.append(what)
                model.spans.append((at, end))
                found.add(_PIECES)
                at = end
                continue
            begin, (number, kind), at = at, *_key(data, at)
            found.add(number)
            end = _after(data, at, kind)
            if number == _PIECES and kind == 2:
                _, at = _varint(data, at)
                piece, what = _piece(data, at, end)
                model.pieces.append(piece)
                model.kinds.append(what)
                model.spans.append((begin, end))
            at = end
    except (IndexError, ValueError) as e:
        raise TokenizerError(f"{path}: damaged or cut short after {len(model.pieces)} pieces") from e
    if not {_TRAINER, _NORMALIZER} <= found:
        missing = "how it was trained" if _TRAINER not in found else "how text is normalised"
        raise TokenizerError(f"{path}: cut short: nothing after its {len(model.pieces)} pieces says {missing}")
    return model


def _plain(data: bytes, at: int) -> tuple[bytes, int, int] | None:
    """The text, the kind and the end of a short piece that is written as they all are: its text, score, kind."""
    body = at + 2
    if len(data) < body + 2 or data[at] != 0x0A or data[body] != 0x0A or data[at + 1] > 0x7F or data[body + 1] > 0x7F:
        return None
    end, score = body + data[at + 1], body + 2 + data[body + 1]
    if len(data) < end or end - score not in (5, 7) or data[score] != 0x15:
        return None
    if end - score == 5:
        return data[body + 2 : score], _NORMAL, end
    return (data[body + 2 : score], data[end - 1], end) if data[end - 2] == 0x18 and data[end - 1] < 0x80 else None


def _piece(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    """The text and the kind of a piece."""
    text, what = b"", _NORMAL
    while at < end:
        (number, kind), at = _key(data, at)
        after = _after(data, at, kind)
        if after > end:
            raise ValueError
        if number == _PIECE and kind == 2:
            text = data[_varint(data, at)[1] : after]
        elif number == _KIND and kind == 0:
            what = _varint(data, at)[0]
        at = after
    return text, what


def _key(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """The number of a field and how its value is written, and where that begins."""
    key, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at)
    return (key >> 3, key & 7), at


def _after(data: bytes, at: int, kind: int) -> int:
    """Where a value ends."""
    if kind == 2:
        length, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at)
        at += length
    elif kind == 0:
        at = _varint(data, at)[1]
    else:
        at += {1: 8, 5: 4}[kind] if kind in (1, 5) else len(data) + 1
    if at > len(data):
        raise ValueError
    return at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits a byte, and where it ends."""
    n = shift = 0
    while (byte := data[at]) > 0x7F:
        n |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise ValueError
    return n | byte << shift, at + 1


def with_kind(data: bytes, model: Model, ids: Sequence[int], kind: int) -> bytes:
    """Return a serialised model in which the pieces `ids`, in order, are of another kind."""
    out, at = [], 0
    for i in ids:
        begin, end = model.spans[i]
        out += [
            data[at:begin],
            field(_PIECES, field(_PIECE, model.pieces[i]) + field(_SCORE, 0.0) + field(_KIND, kind)),
        ]
        at = end
    return b"".join([*out, data[at:]])


def model(
    pieces: Sequence[bytes], scores: Sequence[float], kinds: Sequence[int], *, byte_fallback: bool, prefix: bool
) -> bytes:
    """Return a serialised BPE model whose pieces hold plain spaces; `prefix`: a text gets one in front."""
    numbers = struct.pack(f"<{len(scores)}f", *scores)
    keys = [bytes([number << 3 | kind]) for number, kind in ((_PIECE, 2), (_SCORE, 5), (_KIND, 0), (_PIECES, 2))]
    lengths = [varint(n) for n in range(256)]
    out = []
    for i, piece in enumerate(pieces):
        size = lengths[len(piece)] if len(piece) < 256 else varint(len(piece))
        body = b"".join((keys[0], size, piece, keys[1], numbers[4 * i : 4 * i + 4], keys[2], varint(kinds[i])))
        out += [keys[3], lengths[len(body)] if len(body) < 256 else varint(len(body)), body]
    bpe = 2
    trainer = field(3, bpe) + field(35, byte_fallback)  # model_type, byte_fallback
    # name, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces: these pieces hold plain spaces
    normalizer = field(1, b"identity") + field(3, prefix) + field(4, False) + field(5, False)
    return b"".join(out) + field(_TRAINER, trainer) + field(_NORMALIZER, normalizer)


def field(number: int, value: float | bytes) -> bytes:
    """One field of a message: an int or bool as varint, a float in 4 bytes, bytes after their length."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def varint(n: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    out = b""
    while n > 0x7F:
        out += bytes([n & 0x7F | 0x80])
        n >>= 7
    return out + bytes([n])
