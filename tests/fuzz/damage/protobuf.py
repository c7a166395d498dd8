"""Damage to SentencePiece models, which are messages of protocol buffers."""

import random
import struct

from fuzz.damage.binary import INTS, Damaged, binary


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _varint(n: int) -> bytes:
    n %= 1 << 64
    out = b""
    while n > 0x7F:
        out += bytes([n & 0x7F | 0x80])
        n >>= 7
    return out + bytes([n])


def fields_of(data: bytes) -> list[tuple[int, int, object]]:
    """Fields of a protobuf message: number, wire type, value."""
    at, found = 0, []
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind: int = tag & 7
        value: object
        if kind == 0:
            value, at = _read_varint(data, at)
        elif kind == 2:
            size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            size = 4 if kind == 5 else 8
            value, at = data[at : at + size], at + size
        found.append((tag >> 3, kind, value))
    return found


def packed(fields: list[tuple[int, int, object]]) -> bytes:
    """The message of these fields."""
    out = b""
    for number, kind, value in fields:
        out += _varint(number << 3 | kind)
        if kind == 0:
            out += _varint(value)  # type: ignore[arg-type]
        elif kind == 2:
            out += _varint(len(value)) + value  # type: ignore[arg-type, operator]
        else:
            out += value  # type: ignore[operator]
    return out


def proto(data: bytes, rng: random.Random) -> Damaged:
    """A SentencePiece model: its pieces, and the fields of its trainer and normalizer."""
    if rng.random() < 0.3:
        return binary(data, rng)
    top = fields_of(data)
    if rng.random() < 0.12:
        return packed(top[: rng.randrange(len(top) + 1)]), "cut"
    for _ in range(rng.choice([1, 1, 2, 3])):
        pieces = [i for i, f in enumerate(top) if f[0] == 1]
        kind = rng.random()
        i = rng.choice(pieces) if pieces and kind < 0.6 else rng.randrange(len(top))
        if kind < 0.1:
            top[i:i] = [top[rng.randrange(len(top))]] * rng.choice([1, 300])
        elif kind < 0.15:
            del top[i]
            if not top:
                break
        elif kind < 0.2:
            j = rng.randrange(len(top))
            top[i], top[j] = top[j], top[i]
        elif top[i][1] == 2:
            try:
                inner = fields_of(top[i][2])  # type: ignore[arg-type]
            except IndexError:
                continue
            number = rng.choice([f[0] for f in inner] or [1]) if rng.random() < 0.7 else rng.randrange(1, 60)
            wire = next((f[1] for f in inner if f[0] == number), rng.choice([0, 2, 5]))
            value: object = rng.choice(INTS)
            if wire == 2:
                value = rng.choice(
                    [
                        b"",
                        b"\0",
                        b"\xff\xfe",
                        b"a" * 10**5,
                        b"<0x41>",
                        b"<s>",
                        b"</s>",
                        "▁".encode(),
                        "▁▁".encode(),
                        b" ",
                        b"\xed\xa0\x80",
                        rng.randbytes(rng.randrange(40)),
                        b"nmt_nfkc",
                    ]
                )
            elif wire == 5:
                value = struct.pack("<f", rng.choice([float("nan"), float("inf"), -float("inf"), 1e38, 0.0, -1e-40]))
            elif wire == 1:
                value = rng.randbytes(8)
            elif rng.random() < 0.5:
                value = rng.randrange(8)
            inner = [f for f in inner if f[0] != number or rng.random() < 0.1]
            inner.insert(rng.randrange(len(inner) + 1), (number, wire, value))
            top[i] = (top[i][0], 2, packed(inner))
    return packed(top), "proto"
