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
_MOST_BIASES = 1024  # for a prompt: all settings have arrays of one shape, so that none of them compiles anything
_MOST_STOP_IDS = 64
MOST_LIKELY = 20  # tokens in each place of `Completion.top_logprobs`


class Overrides(TypedDict, total=False):
    """The fields of `Settings`, each of them optional: the keyword arguments of `LLM.generate`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_new_tokens: int
    top_logprobs: int
    seed: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    response_format: Format | Mapping[str, Any] | None


class About(NamedTuple):
    """What there is to know of a setting, in its field's metadata under "about"."""

    kind: type  # int, float, bool, str or Format
    allows: Callable[[Any], bool]  # whether a value of that kind will do
    expected: str  # what to give, for messages
    help: str  # what it does, for people
    dtype: str | None = None  # that of its array in `Sampling`, where it is in there as it is
    several: type | None = None  # tuple: a list of that kind; dict: token ids of that kind, and numbers


def _int(default: int | None, low: int, high: int, expected: str, help: str, dtype: str | None = None) -> Any:
    about = About(int, lambda x: low <= x <= high, expected, help, dtype)
    return dataclasses.field(default=default, metadata={"about": about})


def _float(default: float, low: float, high: float, expected: str, help: str) -> Any:
    about = About(float, lambda x: low <= x <= high, expected, help, "float32")  # NaN is in no range
    return dataclasses.field(default=default, metadata={"about": about})


def _bool(help: str) -> Any:
    return dataclasses.field(default=False, metadata={"about": About(bool, lambda x: True, "true or false", help)})


def _list(kind: type, allows: Callable[[Any], bool], most: int, expected: str, help: str) -> Any:
    about = About(kind, lambda x: len(x) <= most and all(map(allows, x)), expected, help, several=tuple)
    return dataclasses.field(default=(), metadata={"about": about})


def _biases(most: int, expected: str, help: str) -> Any:
    def allows(biases: dict[int, float]) -> bool:
        return len(biases) <= most and all(0 <= i <= _INT32 and -100 <= x <= 100 for i, x in biases.items())

    about = About(int, allows, expected, help, several=dict)
    return dataclasses.field(default_factory=dict, hash=False, metadata={"about": about})


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
    presence_penalty: float = _float(
        0.0,
        -2.0,
        2.0,
        "a number from -2 to 2, 0 being off",
        "taken off the logits of tokens that were generated before; 0: off",
    )
    frequency_penalty: float = _float(
        0.0,
        -2.0,
        2.0,
        "a number from -2 to 2, 0 being off",
        "taken off a token's logit for each time that it was generated before; 0: off",
    )
    logit_bias: Mapping[int, float] = _biases(
        _MOST_BIASES,
        f"token ids, at most {_MOST_BIASES} of them, each with a number from -100 to 100",
        "is added to the logit of a token: ID:BIAS, from -100 to 100",
    )
    min_new_tokens: int = _int(
        0, 0, _INT32, f"an integer from 0 to {_INT32}", "no token ends the text before so many were generated", "int32"
    )
    top_logprobs: int = _int(
        0,
        0,
        MOST_LIKELY,
        f"an integer from 0 (off) to {MOST_LIKELY}",
        "tell the most probable tokens in each place, so many, with their log-probabilities; 0: off",
        "int32",
    )
    seed: int | None = _int(
        None, -(2**63), 2**64 - 1, "an integer of 64 bits", "same seed, same text; None: a new text every time"
    )
    stop: Sequence[str] = _list(
        str, bool, _INT32, "a list of strings, none of them empty", "end the text before any of these strings"
    )
    stop_token_ids: Sequence[int] = _list(
        int,
        lambda x: 0 <= x <= _INT32,
        _MOST_STOP_IDS,
        f"a list of at most {_MOST_STOP_IDS} token ids",
        "end the text before any of these tokens",
    )
    ignore_eos: bool = _bool("go on after the tokens with which the model ends a text")
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

    def ends(self, of_model: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that end the text, where those of the model are `of_model`."""
        return (*self.stop_token_ids, *(() if self.ignore_eos else of_model))

    def of_answer(self, j: int) -> Settings:
        """Return the settings of answer `j` to a prompt: its seed is `seed + j`; None stays None."""
        return self if self.seed is None else dataclasses.replace(self, seed=(self.seed + j) % 2**64)

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
    if value is None and optional:
        return None
    if about.several is tuple:
        found: Any = _items((value,) if isinstance(value, str) else value, about.kind)
    elif about.several is dict:
        found = _pairs(value)
    else:
        found = _one(value, about.kind)
    return found if found is not _WRONG and about.allows(found) else _WRONG


def _one(value: Any, kind: type) -> Any:
    accepted = {bool: bool, str: str, int: numbers.Integral, float: numbers.Real}[kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        return _WRONG
    try:
        return kind(value)
    except OverflowError:  # no float is as large
        return _WRONG


def _items(values: Any, kind: type) -> Any:
    if not isinstance(values, Sequence) or isinstance(values, bytes):
        return _WRONG
    found = tuple(_one(value, kind) for value in values)
    return _WRONG if _WRONG in found else found


def _pairs(value: Any) -> Any:
    """Return a mapping, or pairs, of ids and numbers; JSON has the ids as strings."""
    try:
        given = dict(value)
    except (TypeError, ValueError):
        return _WRONG
    ids = [int(i) if isinstance(i, str) and i.isascii() and i.isdecimal() and len(i) < 11 else i for i in given]
    found = {_one(i, int): _one(x, float) for i, x in zip(ids, given.values(), strict=True)}
    return _WRONG if _WRONG in found or _WRONG in found.values() else found


def to_sampling(rows: Sequence[Settings], lengths: Sequence[int] | None = None) -> Sampling:
    """Gather the sampling settings of a batch; a seed of None becomes a random one.

    Args:
      rows: the settings.
      lengths: the tokens of each prompt, which are not counted as generated; None: 0.
    """
    import numpy as np  # not at the top, because --help wants the settings alone

    from jllama.sampling import Sampling

    def array(field: str, dtype: str) -> Any:
        return np.array([getattr(row, field) for row in rows], dtype)

    dtypes = {field.name: field.metadata["about"].dtype for field in dataclasses.fields(Settings)}
    seeds = [secrets.randbits(64) if row.seed is None else row.seed % 2**64 for row in rows]
    bias_ids = np.full((len(rows), _MOST_BIASES), _INT32, np.int32)  # outside of every vocabulary
    biases = np.zeros(bias_ids.shape, np.float32)
    for i, row in enumerate(rows):
        bias_ids[i, : len(row.logit_bias)] = list(row.logit_bias)
        biases[i, : len(row.logit_bias)] = list(row.logit_bias.values())
    return Sampling(
        **{name: array(name, dtype) for name, dtype in dtypes.items() if dtype},
        start=np.array([0] * len(rows) if lengths is None else lengths, np.int32),  # type: ignore[arg-type]
        bias_ids=bias_ids,  # type: ignore[arg-type]
        biases=biases,  # type: ignore[arg-type]
        seed=np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32),  # type: ignore[arg-type]
    )
