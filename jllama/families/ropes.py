"""What files say of rotary positions, and what to write into a config.json of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from absl import logging

from jllama import rope
from jllama.config import Config
from jllama.errors import shown
from jllama.families.fields import Fields

_THETA = 10000.0  # transformers' default, and llama.cpp's
# By the fields of the formulas in `rope`.
_NAMES = {"original_max_seq_len": "original_max_position_embeddings"}
_TYPES = {"original_max_seq_len": int, "truncate": bool}


def from_huggingface(fields: Fields, values: dict[str, Any], *, part: float | None = None) -> dict[str, Any]:
    """Read from a config.json how positions are rotated.

    Args:
      fields: the config.json's.
      values: the sizes, as arguments of `Config`.
      part: which part of each head the family rotates where the file doesn't say it; None: always all.

    Returns:
      `values` with rope_theta, rotary_dim, rope_scaling, and the context that these make of theirs.
    """
    # transformers 4 writes rope_theta and rope_scaling, 5 rope_parameters with both in it; some tools write all.
    places = ("rope_scaling", "rope_parameters")
    tables = {place: {k: v for k, v in fields.get(place, dict, {}).items() if v is not None} for place in places}

    def number(name: str, default: float) -> float:
        said = {name: fields.peek(name)} | {f"{at}.{name}": table.pop(name, None) for at, table in tables.items()}
        value = fields.agree(said)
        if value is None and name == "rope_theta":
            logging.warning("%s: no rope_theta, taking %g", fields.origin, _THETA)
        found: float = fields.within("", {name: value}).get(name, float, default)
        return found

    theta, factor = number("rope_theta", _THETA), number("partial_rotary_factor", part or 1.0)
    if not 0 < factor <= 1 or (part is None and factor != 1):
        fields.problems.append(f"partial_rotary_factor = {factor:g}: not supported; expected 1")
    original = fields.peek("original_max_position_embeddings")
    if original is not None:
        tables = {at: table and table | {"original_max_position_embeddings": original} for at, table in tables.items()}
    scalings = [_scaling(fields.within(f"{at}.", table), values) for at, table in tables.items() if table]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        fields.problems.append(f"rope_scaling = {scalings[0]} and rope_parameters = {scalings[1]}: expected one value")
    values = values | {"rope_theta": theta, "rotary_dim": int(_head_dim(values) * factor)}
    return _stretched(values, scalings[0] if scalings else None)


def to_huggingface(config: Config) -> dict[str, Any]:
    """Give the fields that `from_huggingface` reads, in the layout of transformers 4, which 5 reads too."""
    scaling, table = config.rope_scaling, None
    if scaling is not None:
        kind = next(name for name, formula in rope.FORMULAS.items() if isinstance(scaling, formula))
        table = {"rope_type": kind} | {_NAMES.get(name, name): value for name, value in vars(scaling).items()}
    fields = {"rope_theta": config.rope_theta, "rope_scaling": table}
    return fields if not config.rotary_dim else fields | {"partial_rotary_factor": config.rotary_dim / config.head_dim}


def from_gguf(fields: Fields, values: dict[str, Any], *, is_partial: bool = False) -> dict[str, Any]:
    """Do what `from_huggingface` does, from the keys of a GGUF file; heads may be rotated in part if `is_partial`."""
    values = values | {"rope_theta": fields.get("rope.freq_base", float, _THETA)}
    if is_partial:
        values["rotary_dim"] = fields.get("rope.dimension_count", int, _head_dim(values))
    elif not fields.problems:
        fields.only("rope.dimension_count", _head_dim(values))
    original = fields.get("rope.scaling.original_context_length", int, values["max_seq_len"])
    if isinstance(fields.values.get("rope_factors"), tuple):  # from tensors: no key of a file is one
        factors = fields.peek("rope_factors")
        fields.only("rope.scaling.type", "none", "longrope")
        magnitude = fields.get("rope.scaling.attn_factor", float, 1.0)
        longest = max(values["max_seq_len"], original)
        return _stretched(values, rope.LongRope(factors[0], factors[1], original, longest, magnitude))
    factor = fields.get("rope.scaling.factor", float, fields.get("rope.scale_linear", float, 0.0)) or 1.0
    fields.only("rope.scaling.type", "none", "linear", "yarn")
    kind = fields.get("rope.scaling.type", str, "linear")  # llama.cpp's default
    if kind == "yarn":
        fields.only("rope.scaling.yarn_ext_factor", 1.0)
        fields.only("rope.scaling.yarn_attn_factor", 1.0)
        fast = fields.get("rope.scaling.yarn_beta_fast", float, rope.Yarn.beta_fast)
        slow = fields.get("rope.scaling.yarn_beta_slow", float, rope.Yarn.beta_slow)
        scaling = rope.Yarn(factor, original, fast, slow)
        magnitude = scaling.magnitude * fields.get("rope.scaling.attn_factor", float, 1.0)
        return _stretched(values, dataclasses.replace(scaling, attention_factor=magnitude))
    fields.only("rope.scaling.attn_factor", 1.0)
    return _stretched(values, rope.Linear(factor) if kind == "linear" and factor != 1 else None)


def _head_dim(values: dict[str, Any]) -> int:
    found: int = values["head_dim"] or values["dim"] // max(values["n_heads"], 1)
    return found


def _scaling(table: Fields, values: dict[str, Any]) -> rope.RopeScaling | None:
    """Read one table of rotary settings."""
    kind = table.agree({name: table.peek(name) for name in ("rope_type", "type")})
    if kind in ("default", "none"):
        return None
    if kind == "dynamic":  # what it stretches lies past max_position_embeddings, where the context ends
        table.get("factor", float)
        return None
    if kind in ("longrope", "su") or (kind == "yarn" and "short_factor" in table.values):  # Phi-3's names of it
        return _longrope(table, values)
    if kind not in ("linear", "llama3", "yarn"):
        key = "type" if "type" in table.values else "rope_type"
        expected = "default, linear, dynamic, llama3, yarn or longrope"
        table.problems.append(f"{table.prefix}{key} = {shown(kind)}: not supported; expected {expected}")
        return None
    formula, before = rope.FORMULAS[kind], len(table.problems)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(formula):
        name = _NAMES.get(field.name, field.name)
        default = None if field.default is dataclasses.MISSING else field.default
        if field.name == "original_max_seq_len" and kind == "yarn":
            default = values["max_seq_len"]
        if table.peek(name) is not None or field.default is not None:
            found[field.name] = table.get(name, _TYPES.get(field.name, float), default)
    if kind == "yarn" and "attention_factor" not in found:
        found["attention_factor"] = _magnitude(table, found["factor"])
    return None if len(table.problems) > before else formula(**found)


def _longrope(table: Fields, values: dict[str, Any]) -> rope.RopeScaling:
    """Read LongRoPE's divisors: those of long contexts apply to all positions, so a context is one or the other."""
    original = table.get("original_max_position_embeddings", int, values["max_seq_len"])
    factor = table.get("factor", float, values["max_seq_len"] / max(original, 1))
    plain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    magnitude = table.get("attention_factor", float, plain)
    short, long = (
        tuple(x if isinstance(x, int | float) else 0 for x in table.get(f"{name}_factor", list))
        for name in ("short", "long")
    )
    longest = max(values["max_seq_len"], original)
    logging.warning("%s: longrope: up to %d tokens, or %d with a context of so many", table.origin, original, longest)
    return rope.LongRope(short, long, original, longest, magnitude)


def _magnitude(table: Fields, factor: float) -> float | None:
    """Read DeepSeek's two numbers, which stand for YaRN's attention factor."""
    one, other = (table.get(name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    if not (one and other and factor > 1):
        return None
    return float((0.1 * one * math.log(factor) + 1) / (0.1 * other * math.log(factor) + 1))


def _stretched(values: dict[str, Any], scaling: rope.RopeScaling | None) -> dict[str, Any]:
    """Add the scaling, and what it makes of the context: some files of YaRN's say only the length before it."""
    if isinstance(scaling, rope.Yarn) and not scaling.problems():
        context = max(values["max_seq_len"], round(scaling.factor * scaling.original_max_seq_len))
        values = values | {"max_seq_len": context}
    if isinstance(scaling, rope.LongRope):
        values = values | {"max_seq_len": min(values["max_seq_len"], scaling.original_max_seq_len)}
    return values | {"rope_scaling": scaling}
