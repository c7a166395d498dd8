"""Damage to JSON, to lines of it or of other text, and to the header of safetensors files."""

import json
import random
import struct

from fuzz.damage.binary import INTS, Damaged, binary

_DEPTHS = (50, 900, 100_000)
_DEEP = ["[" * n + "]" * n for n in _DEPTHS] + ['{"a":' * n + "1" + "}" * n for n in _DEPTHS]
RAW = [
    "1" + "0" * 400,
    "-1" + "0" * 400,
    "9" * 4301,
    "-" + "9" * 5000,
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "-Infinity",
    "1E-400",
    "0.1e1",
    *_DEEP,
]
ODD = [
    None,
    True,
    False,
    "",
    "x",
    " ",
    "a" * 1000,
    "a" * 200_000,
    "\ud800",
    "\udc80",
    "\0",
    "\x1b[2J\x07",
    "\n",
    "../x",
    "/etc/passwd",
    "..",
    ".",
    "a/b",
    "\\",
    "é",
    "\u2581",
]
ODD += [
    0.5,
    -0.0,
    1e308,
    1e-320,
    3.0,
    [],
    [0],
    [None],
    ["a"],
    [[]],
    {},
    {"a": 1},
    {"": ""},
    {"type": "Sequence"},
    {"content": "x"},
    {"id": -1},
    [1] * 40,
    "int8",
    "default",
]


class _Raw(str):
    pass


def _value(rng: random.Random) -> object:
    kind = rng.random()
    if kind < 0.15:
        return _Raw(rng.choice(RAW))
    return rng.choice(INTS) if kind < 0.5 else rng.choice(ODD)


def _places(node: object, path: tuple = ()) -> list[tuple]:
    """Paths to nodes of a JSON value: of large objects and lists only some."""
    found = [path]
    keys: list = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    for key in keys if len(keys) <= 30 else [*keys[:4], *keys[-4:]]:
        found += _places(node[key], (*path, key))  # type: ignore[index]
    return found


def _dump(node: object, rng: random.Random) -> str:
    """JSON with raw parts, and now and then a key twice."""
    if isinstance(node, _Raw):
        return str(node)
    if isinstance(node, dict):
        pairs = [f"{json.dumps(k)}: {_dump(v, rng)}" for k, v in node.items()]
        if pairs and rng.random() < 0.01:
            pairs.append(rng.choice(pairs))
        return "{" + ", ".join(pairs) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(_dump(v, rng) for v in node) + "]"
    return json.dumps(node, ensure_ascii=rng.random() < 0.9 or not _encodable(node))


def _encodable(node: object) -> bool:
    try:
        str(node).encode()
    except UnicodeEncodeError:
        return False
    return True


def _changed(root: object, rng: random.Random) -> object:
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = _places(root)
        path = rng.choice(places)
        if not path:
            if rng.random() < 0.2:
                return _value(rng)
            continue
        parent = root
        for key in path[:-1]:
            parent = parent[key]  # type: ignore[index]
        kind, key = rng.random(), path[-1]
        if kind < 0.55:
            parent[key] = _value(rng)  # type: ignore[index]
        elif kind < 0.65:
            del parent[key]  # type: ignore[attr-defined]
        elif kind < 0.75:
            other: object = root
            for step in rng.choice(places):
                other = other[step]  # type: ignore[index]
            parent[key] = json.loads(_plain(other))  # type: ignore[index]
        elif kind < 0.85 and isinstance(parent, dict):
            parent[
                rng.choice(
                    [
                        "",
                        "type",
                        "id",
                        "content",
                        "\ud800",
                        "<|x|>",
                        "model_type",
                        "a\x1b[2J",
                        "decoders",
                        "pretokenizers",
                        "processors",
                        "single",
                    ]
                )
            ] = _value(rng)
        elif kind < 0.92 and isinstance(parent, list):
            parent[key:key] = [parent[key]] * rng.choice([1, 3, 300])
        else:
            parent[key] = rng.choice([[parent[key]], {"a": parent[key]}, str(parent[key])])  # type: ignore[index]
    return root


def _plain(node: object) -> str:
    return json.dumps(node, default=str)


def json_(data: bytes, rng: random.Random) -> Damaged:
    """Change values of JSON, at times its bytes too."""
    if rng.random() < 0.25:
        return binary(data, rng)
    text = _dump(_changed(json.loads(data), rng), rng).encode("utf-8", "surrogatepass")
    return (binary(text, rng, 2)[0], "json+bytes") if rng.random() < 0.1 else (text, "json")


def jsonl(data: bytes, rng: random.Random) -> Damaged:
    """One of the lines."""
    if rng.random() < 0.3:
        return binary(data, rng)
    lines = data.split(b"\n")
    full = [i for i, line in enumerate(lines) if line]
    i = rng.choice(full)
    kind = rng.random()
    if kind < 0.8:
        lines[i] = json_(lines[i], rng)[0]
    elif kind < 0.9:
        lines[i:i] = [lines[rng.choice(full)]] * rng.choice([1, 3])
    else:
        lines[i] = rng.choice(
            [b"", b" ", b"[]", b"null", b"{}", b"\xff", b"\xef\xbb\xbf" + lines[i], lines[i] + b"\r", b"[" * 100_000]
        )
    return b"\n".join(lines), "jsonl"


def lines(data: bytes, rng: random.Random) -> Damaged:
    """Lines of text."""
    if rng.random() < 0.5:
        return binary(data, rng)
    rows = data.split(b"\n")
    for _ in range(rng.choice([1, 1, 2, 5])):
        i, j = rng.randrange(len(rows)), rng.randrange(len(rows))
        odd = [
            b"",
            b" ",
            b"a",
            b"a b c",
            b"  ",
            b"\0",
            b"\xff\xfe",
            b"\xed\xa0\x80",
            b"a " * 1000,
            b"x" * 200_000,
            b"\r",
            b"IQ==",
            b"IQ== " + b"9" * 5000,
        ]
        odd += [
            rows[i] + b" ",
            b"#" + rows[i],
            rows[i] + b"\r",
            rows[i][:-1],
            rows[i].replace(b"=", b""),
            rows[i] + b"0",
            rows[i] * 2,
            rows[j],
            b"= 1",
            rng.randbytes(4),
        ]
        kind = rng.random()
        if kind < 0.6:
            rows[i] = rng.choice(odd)
        elif kind < 0.7:
            rows[i], rows[j] = rows[j], rows[i]
        elif kind < 0.8:
            rows[i:i] = [rows[j]] * rng.choice([1, 200])
        else:
            del rows[i]
            rows = rows or [b""]
    return b"\n".join(rows), "lines"


def safetensors(data: bytes, rng: random.Random) -> Damaged:
    """The header's JSON, its length, or any bytes."""
    if rng.random() < 0.35:
        return binary(data, rng)
    (size,) = struct.unpack_from("<Q", data)
    head, rest = data[8 : 8 + size], data[8 + size :]
    fields = json.loads(head)
    kind = rng.random()
    if kind < 0.3:  # what stays plausible: shapes that fit, swapped tensors
        names = [n for n in fields if n != "__metadata__"]
        a, b = rng.choice(names), rng.choice(names)
        if rng.random() < 0.5:
            fields[a]["shape"] = rng.choice(
                [
                    fields[a]["shape"][::-1],
                    [1, *fields[a]["shape"]],
                    [*fields[a]["shape"], 0],
                    [0, 2**62, 2**62],
                    [],
                    [1] * 33,
                    fields[b]["shape"],
                ]
            )
        else:
            fields[a]["data_offsets"] = rng.choice(
                [fields[b]["data_offsets"], fields[a]["data_offsets"][::-1], [0, 0], [2**63, 2**63]]
            )
        if rng.random() < 0.3:
            fields[a]["dtype"] = rng.choice(["F4", "F64", "F16", "BF16", "I64", "BOOL", "C64", "f32", ""])
        text = json.dumps(fields).encode()
    elif kind < 0.9:
        text = json_(head, rng)[0]
    else:
        text = head + rng.choice([b" ", b"\0", b"{}", b" " * 1000])
    length = len(text) if rng.random() < 0.93 else rng.choice([abs(i) % 2**64 for i in INTS])
    return struct.pack("<Q", length) + text + rest, "safetensors"
