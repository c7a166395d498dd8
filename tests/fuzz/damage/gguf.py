"""Damage to GGUF files: their metadata, their list of tensors, their counts."""

import random
import struct

import gguf_writer

from fuzz.damage.binary import INTS, Damaged, binary

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _typed(rng: random.Random, count: int) -> bytes:
    """A typed value of GGUF that is odd: a number, a string, an array of either."""
    code = rng.choice([*_CODES, 8, 8, 9, 13, 2**31])

    def number(code: int) -> bytes:
        kind = _CODES[code]
        if kind in "fd":
            return struct.pack(
                f"<{kind}",
                rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e-40, 1.5, 1e300 if kind == "d" else 1e30]),
            )
        size = struct.calcsize(kind)
        return (
            (rng.choice([*INTS, rng.randrange(8)]) % (1 << 8 * size)).to_bytes(size, "little")
            if kind != "?"
            else rng.choice([b"\0", b"\1", b"\2"])
        )

    def string() -> bytes:
        return gguf_writer.string(
            rng.choice(
                [
                    b"",
                    b"a",
                    b"a b",
                    b"a b c",
                    b"\xff\xfe",
                    b"\0",
                    b"llama",
                    b"gpt2",
                    b"x" * 100_000,
                    b"\x1b[2J",
                    "é▁".encode(),
                    b"\xed\xa0\x80",
                    b"<|a|>",
                    b"<s>",
                    b"1",
                    b"nan",
                ]
            )
        )

    if code in _CODES:
        return struct.pack("<I", code) + number(code)
    if code == 8:
        return struct.pack("<I", 8) + string()
    if code == 9:
        inner = rng.choice([*_CODES, 8, 8, 8, 9, 13])
        n = rng.choice([0, 1, 2, count, count, count, count, count + 1, 2**31, 2**60, 2**63])
        some = min(n, 2 * count + 2)
        body = b"".join(string() if inner == 8 else number(inner) if inner in _CODES else bytes(8) for _ in range(some))
        return struct.pack("<IIQ", 9, inner, n) + body
    return struct.pack("<I", code) + bytes(8)


class Gguf:
    """A file taken apart: keys with their typed values as bytes; tensors with dimensions, type, offset; the rest."""

    def __init__(self, data: bytes) -> None:
        self.version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
        self.counts = [tensors, keys]
        self.data, self.at = data, 24
        self.keys = []
        for _ in range(keys):
            key, start = self._string(), self.at
            self._skip(self._number("I"))
            self.keys.append([key, data[start : self.at]])
        self.tensors = []
        for _ in range(tensors):
            name, n = self._string(), self._number("I")
            dims = [self._number("Q") for _ in range(n)]
            self.tensors.append([name, n, dims, self._number("I"), self._number("Q")])
        self.rest = data[-(-self.at // 32) * 32 :]

    def _number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def _string(self) -> bytes:
        n = self._number("Q")
        self.at += n
        return self.data[self.at - n : self.at]

    def _skip(self, kind: int) -> None:
        if kind == 8:
            self._string()
        elif kind == 9:
            inner, n = self._number("I"), self._number("Q")
            if inner == 8:
                for _ in range(n):
                    self._string()
            else:
                self.at += n * struct.calcsize(f"<{_CODES[inner]}")
        else:
            self.at += struct.calcsize(f"<{_CODES[kind]}")

    def packed(self) -> bytes:
        out = b"GGUF" + struct.pack("<IQQ", self.version % 2**32, *(c % 2**64 for c in self.counts))
        out += b"".join(gguf_writer.string(k) + v for k, v in self.keys)
        for name, n, dims, kind, offset in self.tensors:
            out += gguf_writer.string(name) + struct.pack("<I", n % 2**32)
            out += b"".join(struct.pack("<Q", d % 2**64) for d in dims) + struct.pack(
                "<IQ", kind % 2**32, offset % 2**64
            )
        return out + bytes(-len(out) % 32) + self.rest


def gguf(data: bytes, rng: random.Random) -> Damaged:
    """Metadata of other types, tensors of other shapes, types and places, wrong counts, or any bytes."""
    if rng.random() < 0.3:
        return binary(data, rng)
    file = Gguf(data)
    n_tokens = next((struct.unpack_from("<Q", v, 8)[0] for k, v in file.keys if k == b"tokenizer.ggml.tokens"), 3)
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.random()
        i = rng.randrange(len(file.keys)) if file.keys else 0
        if kind < 0.4 and file.keys:
            file.keys[i][1] = _typed(rng, n_tokens)
            done.append("value")
        elif kind < 0.47 and file.keys:
            j = rng.randrange(len(file.keys))
            file.keys[i][1] = file.keys[j][1]
            done.append("copied value")
        elif kind < 0.54 and file.keys:
            del file.keys[i]
            file.counts[1] -= 1
            done.append("no key")
        elif kind < 0.6:
            prefix = rng.choice([b"llama.", b"tokenizer.ggml.", b"general.", b"tokenizer."])
            more = [
                b"alignment",
                b"pre",
                b"merges",
                b"expert_count",
                b"attention.key_length",
                b"attention.value_length",
                b"rope.scaling.type",
                b"rope.scale_linear",
                b"rope.dimension_count",
                b"eom_token_id",
                b"add_bos_token",
                b"scores",
                b"token_type",
                b"chat_template",
                b"add_space_prefix",
            ]
            file.keys.append([prefix + rng.choice(more), _typed(rng, n_tokens)])
            file.counts[1] += 1
            done.append("new key")
        elif kind < 0.65 and file.keys:
            file.keys.append(list(file.keys[i]))
            file.counts[1] += 1
            done.append("key twice")
        elif kind < 0.7:
            file.counts[rng.randrange(2)] = rng.choice(INTS)
            done.append("count")
        elif kind < 0.72:
            file.version = rng.choice(INTS)
            done.append("version")
        elif file.tensors:
            t, u = rng.choice(file.tensors), rng.choice(file.tensors)
            what = rng.randrange(7)
            if what == 0:
                t[2][rng.randrange(len(t[2]))] = rng.choice([*INTS, 2**32 + 1])
            elif what == 1:
                t[3] = rng.choice([0, 1, 2, 3, 8, 10, 12, 16, 19, 24, 27, 30, 34, 39, 40, *INTS])
            elif what == 2:
                t[4] = rng.choice([u[4], t[4] + 32, t[4] + 1, *INTS])
            elif what == 3:
                t[1] = rng.choice(INTS)
            elif what == 4:
                t[0] = rng.choice(
                    [
                        u[0],
                        b"",
                        b"\xff",
                        b"a\x1b[2J",
                        b"x" * 100_000,
                        b"blk.0.attn_qkv.weight",
                        b"output.weight",
                        b"rope_freqs.weight",
                        b"blk.99999999999.attn_q.weight",
                    ]
                )
            elif what == 5:
                t[2] = rng.choice([t[2][::-1], [*t[2], 1], [*t[2], 1, 1, 1], [2**32, 2**32], [0], [1]])
                t[1] = len(t[2])
            else:
                t[2], u[2], t[1], u[1] = u[2], t[2], u[1], t[1]
            done.append("tensor")
    out = file.packed()
    return (binary(out, rng, 2)[0], "gguf+bytes") if rng.random() < 0.07 else (out, "+".join(done) or "same")
