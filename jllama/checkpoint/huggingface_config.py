"""Hugging Face's `config.json`: which family it is of, what it says of a model, and what to write into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import logging

from jllama.checkpoint import quantized
from jllama.checkpoint.contents import CheckpointError
from jllama.checkpoint.quantized import Quantization
from jllama.config import Config, ConfigError
from jllama.errors import listed, shown
from jllama.families import HUGGINGFACE, Fields, config_of
from jllama.families.family import HuggingFace


class Description(NamedTuple):
    """What a config.json says of a model."""

    family: HuggingFace
    config: Config
    tied: bool | None  # None: it does not say, so that the tensors do
    quantization: Quantization | None = None


def is_model(fields: Mapping[str, Any]) -> bool:
    """Whether the fields of a JSON object are those of a model's config.json."""
    return "model_type" in fields or "architectures" in fields


def parse(fields: Mapping[str, Any], origin: str) -> Description:
    """Read the fields of a config.json, in the layout of transformers 4 or 5.

    Raises:
      CheckpointError: another family, or missing, wrong or contradicting fields; all are named.
    """
    key = "architectures" if fields.get("model_type") is None else "model_type"
    families = {str([row.architecture]) if key == "architectures" else name: row for name, row in HUGGINGFACE.items()}
    if (found := str(fields.get(key))) not in families:
        raise CheckpointError(f"{origin}: {key} = {shown(found)}: not supported; expected {', '.join(families)}")
    checked = Fields(fields, origin)
    _check_dtype(checked)
    quantization = quantized.parse(checked)
    try:
        config, tied = config_of(families[found].config, checked)
    except ConfigError as e:
        raise CheckpointError(f"{origin}: {e}") from e
    return Description(families[found], config, tied, quantization)


def describe(config: Config, dtype: str, origin: str) -> tuple[HuggingFace, dict[str, Any]]:
    """Find the family that has everything that a model has, and the fields of its config.json.

    Args:
      config: the model's.
      dtype: what its matrices are stored in, for `torch_dtype`.
      origin: where to, for messages.

    Raises:
      CheckpointError: there is none; what the nearest lacks is named.
    """
    nearest: tuple[list[str], str] | None = None
    for row in HUGGINGFACE.values():
        if row.fields is None:
            continue
        head = {"architectures": [row.architecture], "model_type": row.model_type}
        fields = head | row.fields(config) | {"torch_dtype": dtype}
        try:
            kept = vars(parse(fields, origin).config)
            lost = [f"{name} = {value}" for name, value in vars(config).items() if kept[name] != value]
        except CheckpointError as e:
            lost = [str(e).removeprefix(f"{origin}: ")]
        if not lost:
            return row, fields
        nearest = min(nearest or (lost, row.model_type), (lost, row.model_type), key=lambda found: len(found[0]))
    assert nearest is not None
    raise CheckpointError(f"{origin}: a Hugging Face folder of type {nearest[1]} cannot hold {listed(nearest[0])}")


def _check_dtype(fields: Fields) -> None:
    # Each tensor tells its own dtype, so the field is not needed; but two that differ are worth a word.
    dtypes = {name: fields.peek(name) for name in ("dtype", "torch_dtype")}
    if None not in dtypes.values() and dtypes["dtype"] != dtypes["torch_dtype"]:
        both = " and ".join(f"{name} = {shown(value)}" for name, value in dtypes.items())
        logging.warning("%s: %s: each tensor is read as what it is stored in", fields.origin, both)
