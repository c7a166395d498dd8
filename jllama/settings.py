"""What a caller may ask for a prompt, checked, and its form as arrays for the compiled loop."""

from __future__ import annotations

import dataclasses
import numbers
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from jllama.errors import listed, quoted, shown
from jllama.response_format import Format, to_format

if TYPE_CHECKING:
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
    response_format: Format | Mapping[str, Any] | None


class About(NamedTuple):
    """What there is to know of a setting, in its field's metadata under "about"."""

    kind: type  # int, float, Format, or str, of which there are several
    allows: Callable[[Any], bool]  # whether a value of that kind will do
    expected: str  # what to give, for messages
    help: str  # what it does, for people
    dtype: str | None = None  # that of its array in `Sampling`, where it is in there as it is


def _int(default: int | None, low: int, high: int, expected: str, help: str, dtype: str | None = None) -> Any:
    about = About(int, lambda x: low <= x <= high, expected, help, dtype)
    return dataclasses.field(default=default, metadata={"about": about})


def _float(default: float, low: float, high: float, expected: str, help: str) -> Any:
    about = About(float, lambda x: low <= x <= high, expected, help, "float32")  # NaN is in no range
    return dataclasses.field(default=default, metadata={"about": about})


def _strings(expected: str, help: str) -> Any:
    return dataclasses.field(default=(), metadata={"about": About(str, bool, expected, help)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a prompt is continued.

    Every field says in its metadata what it does and which values it takes; NumPy's numbers will do for Python's.

    Raises:
      ValueError: with every field that is wrong, by name.
    """

    max_new_tokens: int = _int(256, 0, _INT32, f"an integer from 0 to {_INT32}", "the most tokens to generate")
    temperature: float = _float(
        0.8,
        0.0,
        1e30,
        "a number from 0 to 1e30",
        "divides the logits; 0: always the most probable token; 1: as trained",
    )
    top_k: int = _int(
        0, 0, _INT32, f"an integer from 0 (off) to {_INT32}", "sample from the k most probable tokens; 0: off", "int32"
    )
    top_p: float = _float(
        0.9,
        0.0,
        1.0,
        "a number from 0 to 1 (off)",
        "sample from the fewest tokens whose probabilities reach p together, at least one; 1: off",
    )
    min_p: float = _float(
        0.0,
        0.0,
        1.0,
        "a number from 0 (off) to 1",
        "sample from tokens with at least p times the top probability; 0: off",
    )
    repetition_penalty: float = _float(
        1.0,
        1e-3,
        1e3,
        "a number from 0.001 to 1000, 1 being off",
        "above 1: repeat tokens of the prompt and the text so far less; 1: off",
    )
    seed: int | None = _int(
        None, -(2**63), 2**64 - 1, "an integer of 64 bits", "same seed, same text; None: a new text every time"
    )
    stop: Sequence[str] = _strings("a list of strings, none of them empty", "end the text before any of these strings")
    response_format: Format | Mapping[str, Any] | None = dataclasses.field(  # a Format or None, once it is here
        default=None,
        metadata={"about": About(Format, bool, "a format", "what the whole text must be like: JSON, or a grammar's")},
    )

    def __post_init__(self) -> None:
        problems = []
        for field in dataclasses.fields(self):
            value, about = getattr(self, field.name), field.metadata["about"]
            if about.kind is Format:
                try:
                    object.__setattr__(self, field.name, to_format(value))
                except ValueError as e:
                    problems.append(str(e))
                continue
            found = _plain(value, about, optional=field.default is None)
            if found is _WRONG:
                problems.append(f"{field.name} = {quoted(value)}: expected {about.expected}")
            object.__setattr__(self, field.name, found)
        if problems:
            raise ValueError(listed(problems))

    @property
    def form(self) -> Format | None:
        """What the whole text must be like."""
        return to_format(self.response_format)

    def override(self, fields: dict[str, Any]) -> Settings:
        """Return these settings with some fields replaced.

        Raises:
          ValueError: a field that there isn't, or a wrong value.
        """
        if unknown := sorted(set(fields) - set(Overrides.__annotations__)):
            names = ", ".join(map(shown, unknown[:8]))
            raise ValueError(f"unknown settings {names}: expected {', '.join(Overrides.__annotations__)}")
        return dataclasses.replace(self, **fields)


_WRONG = object()


def _plain(value: Any, about: About, *, optional: bool) -> Any:
    """Return a value as Python's own, `_WRONG` where it isn't allowed."""
    if about.kind is str:
        strings = (value,) if isinstance(value, str) else value
        is_list = isinstance(strings, Sequence) and not isinstance(strings, bytes)
        return strings if is_list and all(isinstance(s, str) and about.allows(s) for s in strings) else _WRONG
    if value is None and optional:
        return None
    number = numbers.Integral if about.kind is int else numbers.Real
    if isinstance(value, bool) or not isinstance(value, number) or not about.allows(value):
        return _WRONG
    return about.kind(value)


def to_sampling(rows: Sequence[Settings]) -> Sampling:
    """Gather the sampling settings of a batch; a seed of None becomes a random one."""
    import numpy as np  # not at the top, because --help wants the settings alone

    from jllama.sampling import Sampling

    def array(field: str, dtype: str) -> Any:
        return np.array([getattr(row, field) for row in rows], dtype)

    dtypes = {field.name: field.metadata["about"].dtype for field in dataclasses.fields(Settings)}
    seeds = [secrets.randbits(64) if row.seed is None else row.seed % 2**64 for row in rows]
    return Sampling(
        **{name: array(name, dtype) for name, dtype in dtypes.items() if dtype},
        seed=np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32),  # type: ignore[arg-type]
    )
