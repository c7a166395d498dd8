"""What a caller may ask for a prompt, checked, and its form as arrays for the compiled loop."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import jax

    from jllama.sampling import Sampling

_INT32 = 2**31 - 1


class Overrides(TypedDict, total=False):
    """The fields of `Settings`, each of them optional: the keyword arguments of `LLM.generate`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a prompt is continued.

    Args:
      max_new_tokens: the most tokens to generate.
      temperature: divides the logits; 0 takes the most probable token each time.
      top_k: keep the k most probable tokens; 0 is off.
      top_p: keep the fewest tokens whose probabilities sum to p, at least one; 1 is off.
      min_p: keep the tokens of at least min_p times the largest probability; 0 is off.
      repetition_penalty: makes tokens of the prompt and the text so far less probable; 1 is off.
      seed: equal seeds give equal text; any integer of 64 bits, None for a new one each time.
      stop: strings that end the text, and aren't part of it.

    Raises:
      ValueError: with every field that is wrong, by name.
    """

    max_new_tokens: int = 256
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.9
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        checks: list[tuple[str, bool, str]] = [
            ("max_new_tokens", _is_int(self.max_new_tokens, 0, _INT32), f"an integer from 0 to {_INT32}"),
            ("temperature", _is_float(self.temperature, 0.0, 1e30), "a number from 0 to 1e30"),
            ("top_k", _is_int(self.top_k, 0, _INT32), f"an integer from 0 (off) to {_INT32}"),
            ("top_p", _is_float(self.top_p, 0.0, 1.0), "a number from 0 to 1 (off)"),
            ("min_p", _is_float(self.min_p, 0.0, 1.0), "a number from 0 (off) to 1"),
            (
                "repetition_penalty",
                _is_float(self.repetition_penalty, 1e-3, 1e3),
                "a number from 0.001 to 1000, 1 being off",
            ),
            ("seed", self.seed is None or _is_int(self.seed, -(2**63), 2**64 - 1), "an integer of 64 bits"),
            ("stop", _is_strings(self.stop), "a list of strings, none of them empty"),
        ]
        problems = [f"{name} = {getattr(self, name)!r}: expected {what}" for name, ok, what in checks if not ok]
        if problems:
            raise ValueError("; ".join(problems))

    def override(self, fields: dict[str, Any]) -> Settings:
        """Return these settings with some fields replaced.

        Raises:
          ValueError: a field that there isn't, or a wrong value.
        """
        if unknown := sorted(set(fields) - set(Overrides.__annotations__)):
            raise ValueError(f"unknown settings {', '.join(unknown)}: expected {', '.join(Overrides.__annotations__)}")
        return dataclasses.replace(self, **fields)


def _is_int(x: object, low: int, high: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and low <= x <= high


def _is_float(x: object, low: float, high: float) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and low <= x <= high  # NaN isn't


def _is_strings(x: object) -> bool:
    return isinstance(x, Sequence) and all(isinstance(s, str) and s for s in x)


def to_sampling(rows: Sequence[Settings]) -> Sampling:
    """Gather the sampling settings of a batch; a seed of None becomes a random one."""
    import jax.numpy as jnp  # not at the top, because the command line's --help wants the settings alone

    from jllama.sampling import Sampling

    def array(field: str, dtype: type) -> jax.Array:
        return jnp.array([getattr(row, field) for row in rows], dtype)

    seeds = [secrets.randbits(64) if row.seed is None else row.seed % 2**64 for row in rows]
    return Sampling(
        temperature=array("temperature", jnp.float32),
        top_k=array("top_k", jnp.int32),
        top_p=array("top_p", jnp.float32),
        min_p=array("min_p", jnp.float32),
        repetition_penalty=array("repetition_penalty", jnp.float32),
        seed=jnp.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], jnp.uint32),
    )
