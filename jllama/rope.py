"""How rotary frequencies are stretched for contexts longer than those a model was first trained on.

Each formula is a frozen dataclass with one method; `FORMULAS` names them as Hugging Face's files do.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from jllama.errors import quoted

Frequencies = np.ndarray[Any, np.dtype[np.float64]]


def _is_positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < 1e38  # float32 holds it; NaN isn't


@dataclasses.dataclass(frozen=True)
class RopeScaling(ABC):
    """A formula that stretches the frequencies of rotary pairs."""

    @abstractmethod
    def stretch(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """Stretch the angles `[R/2]` by which the pairs turn a position, `theta ** (-2j / R)`."""

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied with beside."""
        return 1.0

    def problems(self) -> list[str]:
        """Name the fields that make no sense."""
        fields = {
            name: value
            for name, value in vars(self).items()
            if not isinstance(value, bool | tuple) and value is not None and not _is_positive(value)
        }
        return [f"rope_scaling.{name} = {quoted(value)}: expected a positive number" for name, value in fields.items()]


@dataclasses.dataclass(frozen=True)
class Linear(RopeScaling):
    """Positions are divided by `factor`. Source: Chen et al., arXiv 2306.15595."""

    factor: float

    def stretch(self, frequencies: Frequencies, theta: float) -> Frequencies:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3(RopeScaling):
    """Llama 3.1's blend of stretched and kept frequencies.

    Wavelengths over `original_max_seq_len / low_freq_factor` are divided by `factor`, those under
    `original_max_seq_len / high_freq_factor` are kept, and the ones between are blended.
    Source: `apply_scaling` in meta-llama/llama-models, models/llama3/model.py.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def stretch(self, frequencies: Frequencies, theta: float) -> Frequencies:
        turns = self.original_max_seq_len * frequencies / (2 * np.pi)
        keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        stretched: Frequencies = frequencies * (keep + (1.0 - keep) / self.factor)
        return stretched

    def problems(self) -> list[str]:
        found = super().problems()
        if not found and self.low_freq_factor >= self.high_freq_factor:
            found.append(
                f"rope_scaling.low_freq_factor = {self.low_freq_factor}: "
                f"expected less than high_freq_factor = {self.high_freq_factor}"
            )
        return found


@dataclasses.dataclass(frozen=True)
class Yarn(RopeScaling):
    """YaRN: pairs that turn less than `beta_slow` times in the old context are stretched, those over `beta_fast` kept.

    Those between are blended by the number of the pair, whole numbers where `truncate`. `attention_factor` None stands
    for `0.1 ln(factor) + 1`. Source: Peng et al., arXiv 2309.00071.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def stretch(self, frequencies: Frequencies, theta: float) -> Frequencies:
        n = len(frequencies)

        def pair(turns: float) -> float:
            return n * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * n - 1)
        ramp = np.clip((np.arange(n) - low) / ((high - low) or 0.001), 0.0, 1.0)
        stretched: Frequencies = frequencies * (ramp / self.factor + 1.0 - ramp)
        return stretched

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Divided(RopeScaling):
    """Each frequency is divided by a number of its own."""

    divisors: tuple[float, ...]

    def stretch(self, frequencies: Frequencies, theta: float) -> Frequencies:
        return frequencies / np.array(self.divisors, np.float64)

    def problems(self) -> list[str]:
        return _not_positive("divisors", self.divisors)


@dataclasses.dataclass(frozen=True)
class LongRope(RopeScaling):
    """Each frequency is divided by a number of its own: `long` ones in contexts over `original_max_seq_len` tokens.

    `longest` is the longest context, and `is_long` whether this one is long. Source: Ding et al., arXiv 2402.13753.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_seq_len: int
    longest: int
    attention_factor: float = 1.0
    is_long: bool = False

    @property
    def divisors(self) -> tuple[float, ...]:
        """Those for this context."""
        return self.long if self.is_long else self.short

    def stretch(self, frequencies: Frequencies, theta: float) -> Frequencies:
        return frequencies / np.array(self.divisors, np.float64)

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def problems(self) -> list[str]:
        found = super().problems() + _not_positive("short", self.short) + _not_positive("long", self.long)
        if len(self.short) != len(self.long):
            found.append(
                f"rope_scaling has {len(self.short)} short and {len(self.long)} long factors: expected as many"
            )
        return found


def _not_positive(name: str, values: tuple[float, ...]) -> list[str]:
    wrong = [value for value in values if not _is_positive(value)]
    return [f"rope_scaling.{name} = {quoted(value)}: expected positive numbers" for value in wrong]


FORMULAS: dict[str, type[RopeScaling]] = {
    "linear": Linear,
    "llama3": Llama3,
    "yarn": Yarn,
    "divided": Divided,
    "longrope": LongRope,
}
