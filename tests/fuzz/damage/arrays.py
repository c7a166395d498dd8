"""Damage to `.pth` files, the archive and the pickle in it, and to the headers of `.npy` files."""

import ast
import io
import pickle
import random
import re
import struct
import sys
import zipfile
from unittest import mock

import meta_writer
import numpy as np

from fuzz.damage.binary import _BINARY, INTS, Damaged, binary


def _views(rng: random.Random) -> dict[str, object]:
    """A tree of tensors with odd storages, offsets, shapes and strides."""
    huge = [*INTS, 2**70, 10**4400]

    def numbers(n: int) -> object:
        odd = rng.random()
        if odd < 0.1:
            return rng.choice([None, 3, "8", [8], (), (1,) * 70, (0, 2**70), (2**70, 0), (8, None), (True,), (1.0,)])
        return tuple(rng.choice([1, 2, 4, 8, 0, rng.choice(huge)]) for _ in range(n))

    def view() -> object:
        storage = meta_writer.Storage(np.ones(8, np.float32), rng.choice(["", "", "", "Half", "BFloat16", "Int"]))
        n = rng.choice([1, 1, 2, 3])
        return meta_writer.View(storage, rng.choice([0, 0, 0, 1, rng.choice(huge)]), numbers(n), numbers(n))

    odd = [3, "x", None, [1], {"a": 1}, (1, 2)]
    names = ["norm.weight", "rope.freqs", "a\x1b[2J", "", "layers.0.attention.wq.weight", "tok_embeddings.weight"]
    return {
        rng.choice(names): rng.choice([view, view, view, view, lambda: rng.choice(odd)])()
        for _ in range(rng.randrange(1, 4))
    }


def pth(data: bytes, rng: random.Random) -> Damaged:
    """The zip archive's bytes, mostly those of its directory; the pickle in it; or another tree of tensors."""
    kind = rng.random()
    if kind < 0.2:
        return binary(data, rng)
    if kind < 0.5:  # the directory at the end, or the headers of files
        out = bytearray(data)
        starts = [m.start() for m in re.finditer(rb"PK[\1\3\5]", data)]
        for _ in range(rng.choice([1, 1, 2, 3])):
            at, size = rng.choice(starts) + rng.randrange(46), rng.choice([1, 2, 4])
            out[at : at + size] = (rng.choice([*INTS, rng.randrange(256)]) % (1 << 8 * size)).to_bytes(size, "little")
        return bytes(out[: len(data)]), "directory"
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in parts if name.endswith("data.pkl"))
    if kind < 0.8:
        parts[pickled] = _pickle(parts[pickled], rng)
    else:
        with mock.patch.dict(sys.modules, meta_writer.fake_torch()):
            try:
                pickler = meta_writer.Pickler(file := io.BytesIO())
                pickler.dump(_views(rng))
                parts[pickled] = file.getvalue()
            except (OverflowError, pickle.PicklingError, ValueError):
                pass
    if rng.random() < 0.1:
        name = rng.choice(list(parts))
        new = rng.choice(["../../x", "/etc/passwd", "a" * 1000, "", "consolidated.00/data/../data.pkl", name])
        parts[new] = rng.choice([parts.get(name, b""), b"", b"big"])
    if rng.random() < 0.05:
        del parts[rng.choice(list(parts))]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice([0, 0, 0, 0, 0, 0, 8])) as archive:
        for name, blob in parts.items():
            archive.writestr(zipfile.ZipInfo(name or "x"), blob)
    return out.getvalue(), "pickle"


_OPCODES = [
    bytes([getattr(pickle, n)[0]])
    for n in dir(pickle)
    if n.isupper() and isinstance(getattr(pickle, n), bytes) and len(getattr(pickle, n)) == 1
]


def _pickle(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        kind, at = rng.random(), rng.randrange(len(out) or 1)
        if kind < 0.4:
            out = bytearray(_BINARY[rng.choice(list(_BINARY))](out, rng))
        elif kind < 0.6:
            out[at:at] = rng.choice(_OPCODES)
        elif kind < 0.7:
            out[at:at] = rng.choice(
                [
                    b"cos\nsystem\n",
                    b"(Vtouch x\ntR",
                    b"cbuiltins\neval\n",
                    b"ccollections\nOrderedDict\n",
                    b"2\x86" * 8,
                    b"]2a",
                    b"}",
                    b"Nb",
                    b"Q",
                    b"\x8b\xff\xff\xff\x7f",
                    b"I" + b"9" * 5000 + b"\n",
                    b"\x8a\xff" + b"\xff" * 254 + b"\x01",
                    b"\x8b\x00\x20\x00\x00" + b"\1" * 8192,
                ]
            )
        else:
            opcode = rng.choice([b"K", b"M", b"J", b"q", b"h", b"X"])
            found = [m.start() for m in re.finditer(re.escape(opcode), out)]
            if found:
                at = rng.choice(found)
                out[at + 1 : at + 2] = bytes([rng.choice([0, 1, 2, 8, 32, 0x7F, 0xFF])])
    return bytes(out)


def npy(data: bytes, rng: random.Random) -> Damaged:
    """The header's text, or any bytes."""
    if rng.random() < 0.4:
        return binary(data, rng)
    (size,) = struct.unpack_from("<H", data, 8)
    fields, rest = ast.literal_eval(data[10 : 10 + size].decode()), data[10 + size :]
    texts = {k: repr(v) for k, v in fields.items()}
    odd = [
        "0",
        "-1",
        "None",
        "''",
        "()",
        "(0,)",
        "(-1,)",
        "(1,)",
        "(2**62,)",
        "(4611686018427387904, 4)",
        "(9223372036854775808,)",
        "(1e3,)",
        "(True,)",
        "(8, 8, 1)",
        "(8,)*70",
        "[8]",
        "{}",
        "{[]: 1}",
        "'<f4'",
        "'>f4'",
        "'|O'",
        "'<f2'",
        "'<U9'",
        "[('a', '<f4')]",
        "'(1000000000,)f4'",
        "'V0'",
        "b'x'",
        "'<c8'",
        "'m8[ns]'",
        "1L",
        "(8L, 8L)",
        "-" * 3000 + "1",
        "(" * 150 + ")" * 150,
        "[" * 199 + "]" * 199,
        "9" * 5000,
        "'\\ud800'",
        "'\\0'",
        "(1" + ",1" * 69 + ")",
    ]
    for _ in range(rng.choice([1, 1, 2])):
        key = rng.choice(list(texts))
        kind = rng.random()
        if kind < 0.8:
            texts[key] = rng.choice(odd)
        elif kind < 0.9:
            del texts[key]
            texts = texts or {"descr": "1"}
        else:
            texts[rng.choice(["x", "descr'", "3", "fortran"])] = "1"
    text = (
        "{"
        + ", ".join(f"'{k}': {v}" for k, v in texts.items())
        + rng.choice(["}", "}", "}", "}", "", ")", "}}", "\n  }", "} #", "\\"])
    )
    text += " " * (-(len(text) + 11) % 64) + "\n"
    version = rng.choice([b"\1\0", b"\1\0", b"\1\0", b"\2\0", b"\3\0", b"\4\0", b"\0\0"])
    length = struct.pack("<H" if version == b"\1\0" else "<I", len(text) % 2**16)
    return data[:6] + version + length + text.encode() + rest, "npy"
