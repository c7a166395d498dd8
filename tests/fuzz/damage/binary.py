"""Damage to any bytes, and to llama2.c's files of numbers and records."""

import random
import struct
from collections.abc import Callable

Damaged = tuple[
    bytes, str
]  # the bytes, and what was done; "cut" where they are nothing but a beginning of the good ones

INTS = [0, 1, -1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 4096, 65535, 65536, 10**6, 2**24, 2**26, 2**30, 2**31 - 64]
INTS += [2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64 - 1]


def binary(data: bytes, rng: random.Random, most: int = 4) -> Damaged:
    """Change some bytes, half the time near the beginning."""
    if rng.random() < 0.12:
        return data[
            : rng.randrange(len(data) + 1) if rng.random() < 0.7 else max(len(data) - rng.randrange(1, 80), 0)
        ], "cut"
    out, done = bytearray(data), []
    for _ in range(rng.randrange(1, most + 1)):
        name = rng.choice(list(_BINARY))
        out = bytearray(_BINARY[name](out, rng))
        done.append(name)
    return bytes(out), "+".join(done)


def _at(out: bytearray, rng: random.Random, size: int = 1) -> int:
    end = max(len(out) - size + 1, 1)
    where = rng.random()
    if where < 0.5:
        return rng.randrange(min(end, 320))
    if where < 0.65:
        return rng.randrange(max(end - 320, 0), end)
    return rng.randrange(end)


def _flip(out: bytearray, rng: random.Random) -> bytearray:
    if out:
        out[_at(out, rng)] ^= 1 << rng.randrange(8)
    return out


def _byte(out: bytearray, rng: random.Random) -> bytearray:
    if out:
        out[_at(out, rng)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return out


def _int(out: bytearray, rng: random.Random) -> bytearray:
    size = rng.choice([1, 2, 4, 4, 4, 8, 8])
    at = _at(out, rng, size)
    at = at // size * size if rng.random() < 0.5 else at
    out[at : at + size] = (rng.choice(INTS) % (1 << 8 * size)).to_bytes(size, rng.choice(["little", "little", "big"]))
    return out


def _near(out: bytearray, rng: random.Random) -> bytearray:
    """Change a number that is there a little, or to a multiple."""
    size = rng.choice([1, 2, 4, 8])
    at = _at(out, rng, size)
    value = int.from_bytes(out[at : at + size], "little")
    value = rng.choice([value + 1, value - 1, value * 2, value // 2, -value, value ^ (1 << 8 * size - 1)])
    out[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return out


def _chunk(out: bytearray, rng: random.Random) -> tuple[int, int]:
    a = _at(out, rng)
    return a, min(a + rng.choice([1, 2, 4, 8, 16, 64, 256, 1024]), len(out))


def _delete(out: bytearray, rng: random.Random) -> bytearray:
    a, b = _chunk(out, rng)
    del out[a:b]
    return out


def _double(out: bytearray, rng: random.Random) -> bytearray:
    a, b = _chunk(out, rng)
    return out[:b] + out[a:b] * rng.choice([1, 1, 2, 50]) + out[b:]


def _copy(out: bytearray, rng: random.Random) -> bytearray:
    a, b = _chunk(out, rng)
    at = _at(out, rng)
    out[at : at + b - a] = out[a:b]
    return out


def _swap(out: bytearray, rng: random.Random) -> bytearray:
    (a, b), (c, d) = sorted([_chunk(out, rng), _chunk(out, rng)])
    return out[:a] + out[c:d] + out[b:c] + out[a:b] + out[d:] if b <= c else out


def _fill(out: bytearray, rng: random.Random) -> bytearray:
    a, b = _chunk(out, rng)
    out[a:b] = bytes([rng.choice([0, 0xFF, 0x20, 0x80, 0x5B, 0x28, 0x7B])]) * (b - a)
    return out


def _insert(out: bytearray, rng: random.Random) -> bytearray:
    at = _at(out, rng)
    return out[:at] + rng.randbytes(rng.choice([1, 2, 4, 8, 64])) + out[at:]


def _extend(out: bytearray, rng: random.Random) -> bytearray:
    return out + rng.choice([bytes(1), bytes(32), b"\n", rng.randbytes(rng.randrange(1, 40)), bytes(out[-100:])])


_BINARY: dict[str, Callable[[bytearray, random.Random], bytearray]] = {
    f.__name__[1:]: f for f in (_flip, _byte, _int, _near, _delete, _double, _copy, _swap, _fill, _insert, _extend)
}


def header(data: bytes, rng: random.Random) -> Damaged:
    """llama2.c: mostly the numbers of the header, one or several of them."""
    if rng.random() < 0.35:
        return binary(data, rng)
    out, start = bytearray(data), 8 if data[:4] == b"24ka" else 0
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = start + 4 * rng.randrange(7 + (2 if start else 0)) if rng.random() < 0.85 else rng.randrange(44)
        (value,) = struct.unpack_from("<i", out, at)
        value = rng.choice([*INTS, value + 1, value - 1, value * 2, value // 2, -value, rng.randrange(64)])
        struct.pack_into("<I", out, at, value % 2**32)
    return bytes(out), "header"


def sized(data: bytes, rng: random.Random) -> Damaged:
    """tokenizer.bin: records of a length and bytes; mostly their lengths, order and number."""
    if rng.random() < 0.5:
        return binary(data, rng)
    head = struct.Struct("<fi" if data[12:17] == b"<unk>" else "<i")
    at, records = 4 if head.size == 8 else 0, []
    start = data[:at]
    while at < len(data):
        *score, length = head.unpack_from(data, at)
        records.append([score, data[at + head.size : at + head.size + length]])
        at += head.size + length
    for _ in range(rng.choice([1, 1, 2, 4])):
        kind, i, j = rng.randrange(7), rng.randrange(len(records)), rng.randrange(len(records))
        if kind == 0:
            records[i][1] = rng.choice(
                [
                    b"",
                    b"\0",
                    b"\xff",
                    b"<0x00>",
                    b"<0xG0>",
                    b"a" * 10**5,
                    "é".encode()[:1],
                    b" ",
                    rng.randbytes(3),
                    b"<unk>",
                ]
            )
        elif kind == 1:
            records[i] = records[j]
        elif kind == 2:
            records[i], records[j] = records[j], records[i]
        elif kind == 3:
            del records[i + 1 :]
        elif kind == 4 and records[i][0]:
            records[i][0] = [rng.choice([float("nan"), float("inf"), -1e38, 0.0, 1e-45])]
        elif kind == 5:
            records[i:i] = [records[j]] * rng.choice([1, 300])
        else:
            del records[i]
            records = records or [[[0.0] if head.size == 8 else [], b"x"]]
    return start + b"".join(head.pack(*(s or [0.0] * (head.size == 8)), len(p)) + p for s, p in records), "records"
