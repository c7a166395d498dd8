"""Ways to damage a file: each takes the good bytes and a random.Random, and returns bytes and what was done."""

import random
from collections.abc import Callable

from fuzz.damage.arrays import npy, pth
from fuzz.damage.binary import Damaged, binary, header, sized
from fuzz.damage.gguf import gguf
from fuzz.damage.jsons import json_, jsonl, lines, safetensors
from fuzz.damage.protobuf import proto
from fuzz.damage.texts import template, toml

DAMAGE: dict[str, Callable[[bytes, random.Random], Damaged]] = {
    "binary": binary,
    "header": header,
    "sized": sized,
    "json": json_,
    "jsonl": jsonl,
    "lines": lines,
    "safetensors": safetensors,
    "proto": proto,
    "gguf": gguf,
    "pth": pth,
    "npy": npy,
    "toml": toml,
    "template": template,
}
