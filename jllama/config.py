"""The sizes and switches of a model: `Config`, its checks, and the reader of `configs/*.toml`."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """Sizes that make no model: every problem found is named in the one message."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies (`rope_type: llama3` in Hugging Face's files).

    Wavelengths over `original_max_seq_len / low_freq_factor` are divided by `factor`, those under
    `original_max_seq_len / high_freq_factor` are kept, and the ones between are blended.
    Source: `apply_scaling` in meta-llama/llama-models, models/llama3/model.py.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a Llama-family model; frozen and hashable, so that it can be static under `jax.jit`.

    Args:
      dim: width D of the residual stream.
      hidden_dim: width F of the feed-forward.
      n_layers: number of layers.
      n_heads: number of query heads N.
      n_kv_heads: number of key and value heads K; divides `n_heads`.
      vocab_size: number of token ids V.
      max_seq_len: the context: tokens of prompt and continuation together.
      head_dim: width H of a head; 0 stands for `dim / n_heads`.
      norm_eps: epsilon of RMSNorm.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how the rotary frequencies are stretched, None where they are not.

    Raises:
      ConfigError: with every field that is wrong, by name.
    """

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int
    head_dim: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.n_heads > 0 and self.dim % self.n_heads == 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if problems := self._problems():
            raise ConfigError("; ".join(problems))

    def _problems(self) -> list[str]:
        positive = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
        problems = [f"{n} = {getattr(self, n)}: expected 1 or more" for n in positive if getattr(self, n) < 1]
        if problems:
            return problems
        if self.n_heads % self.n_kv_heads:
            problems.append(f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}")
        if self.head_dim == 0:
            problems.append(f"dim = {self.dim} is not a multiple of n_heads = {self.n_heads}, and head_dim is not given")
        elif self.head_dim < 0 or self.head_dim % 2:
            problems.append(f"head_dim = {self.head_dim}: rotary pairs need an even number of 2 or more")
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                problems.append(f"{name} = {value}: expected a positive number")
        return problems

    @property
    def q_dim(self) -> int:
        """Width of all query heads together, N * H."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads together, K * H."""
        return self.n_kv_heads * self.head_dim


def from_toml(path: str | Path) -> tuple[Config, bool]:
    """Read a `configs/*.toml` file.

    Returns:
      The config, and whether the output head is tied to the embedding (`tied`, false where absent).

    Raises:
      ConfigError: the file cannot be read, is not TOML, or holds unknown, missing or wrong fields.
    """
    try:
        fields: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read as TOML: {e}") from e
    tied = fields.pop("tied", False)
    try:
        if "rope_scaling" in fields:
            fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        return Config(**fields), tied
    except TypeError as e:
        raise ConfigError(f"{path}: {str(e).replace('.__init__()', '')}") from e
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e
