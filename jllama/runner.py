"""A model with its programs, the time that they took, and the sizes of the arrays that they are run on."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jllama import mesh, processes
from jllama.grammar import Grammars, Guide
from jllama.model import Params
from jllama.programs import Program, Programs
from jllama.settings import Settings
from jllama.speculator import Speculator

_MIN_SLOTS = 256  # of a cache; it doubles when it is full
_MIN_WIDTH = 16  # of a block of prompt tokens; sizes are powers of two, so that few programs serve all lengths
_MAX_WIDTH = 512
_BLOCK_TOKENS = 4096  # the most tokens in a block, all rows together: bounds the memory of long prompts
_BLOCK_SCORES = 2**26  # the most scores of a block in one layer, float32


@dataclasses.dataclass
class Timings:
    """Where the time went, in seconds, and the tokens that came of it."""

    compile_seconds: float = 0.0
    prompt_seconds: float = 0.0
    prompt_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    guesses: int = 0  # tokens that were guessed and verified
    accepted: int = 0  # of them right


class Runner:
    """A model with its programs, and the time that they took.

    Attributes:
      speculator: what guesses tokens, None where nothing does.
    """

    def __init__(
        self,
        params: Params,
        compile_cache: str | Path | None = None,
        banned: Collection[int] = (),
        grammars: Grammars | None = None,
    ) -> None:
        """Take a model.

        Args:
          params: the model.
          compile_cache: the folder where programs are kept; None: in memory alone.
          banned: ids that are never drawn.
          grammars: those of its tokenizer; None: no row can have one.
        """
        self.params = params
        self.grammars = grammars
        self.banned: np.ndarray | None = None
        if banned:
            self.banned = np.isin(np.arange(params.config.vocab_size), list(banned))
        self.mesh = mesh.mesh_of(params)
        self.shards, self.parts = mesh.shape_of(self.mesh)  # of the rows of a batch, and of the model
        self.timings = Timings()
        self.speculator: Speculator | None = None
        self._programs = Programs(params, compile_cache)

    def check(self, ids: Sequence[int], settings: Settings) -> None:
        """Raise ValueError for a prompt that the model can't read, or ids in its settings that it hasn't."""
        config = self.params.config
        if not 1 <= len(ids) <= config.max_seq_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens: expected 1 to {config.max_seq_len}, the model's context"
            )
        self.check_ids([*ids, *settings.logit_bias, *settings.stop_token_ids])

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raise ValueError for token ids that the model hasn't."""
        vocab = self.params.config.vocab_size
        if wrong := [i for i in ids if not 0 <= i < vocab]:
            raise ValueError(f"token id {wrong[0]}: expected 0 to {vocab - 1}, the model's vocabulary")

    def call(self, program: Program, *args: Any, **static: Any) -> Any:
        """Run a program of `programs` on arrays; it adds the model."""
        result = self._programs.call(program, *args, **static)
        self.timings.compile_seconds = self._programs.seconds
        return result

    def guide(self, ids: Sequence[int], settings: Settings) -> Guide | None:
        """Return what follows the text after a prompt, where it is to have a format.

        Raises:
          ValueError: the format can't be compiled.
        """
        if (form := settings.form) is None:
            return None
        if self.grammars is None:
            raise ValueError("a response_format: expected none, as the model has no tokenizer here")
        return self.grammars.guide(form, ids, ends=not settings.ignore_eos)

    def masks(self, guides: Mapping[int, Guide], rows: int) -> np.ndarray:
        """Return which tokens may come next in each row, as `Stop.allowed` has it; without a guide all may."""
        if self.grammars is None or not guides:
            return np.full((rows, -(-self.params.config.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        return self.grammars.masks(guides, rows)

    @property
    def programs(self) -> int:
        """How many programs were compiled or loaded."""
        return len(self._programs)

    def put(self, tree: Any, where: Any) -> Any:
        """Lay host arrays out as `where` says: a tree of specs, or one for all."""
        return mesh.put(self.mesh, tree, where)

    def get(self, tree: Any) -> Any:
        """Fetch small arrays as NumPy's."""
        return processes.get(tree)

    def agree(self, tree: Any) -> Any:
        """Return what the first of several processes has: all of them must do the same."""
        return processes.agree(self.mesh, tree)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of the block, compiling apart, to `timings.{phase}_seconds`."""
        began, compiling = time.perf_counter(), self.timings.compile_seconds
        yield
        spent = time.perf_counter() - began - (self.timings.compile_seconds - compiling)
        setattr(self.timings, f"{phase}_seconds", getattr(self.timings, f"{phase}_seconds") + spent)


def batch_rows(prompts: int, shards: int) -> int:
    """Return how many rows of a batch each of `shards` gets."""
    return power_of_two(-(-prompts // shards))


def block_width(rows: int, longest: int, scores: int) -> int:
    """Return how many tokens of each of `rows` prompts are read at a time.

    Args:
      rows: on a device.
      longest: the tokens of the longest prompt.
      scores: of a token, in one layer on a device: slots times query heads. They bound the memory of long contexts.
    """
    most = max(min(_BLOCK_TOKENS, _BLOCK_SCORES // scores) // power_of_two(rows), 1)
    return min(power_of_two(longest, _MIN_WIDTH), _MAX_WIDTH, max(_MIN_WIDTH, 1 << (most.bit_length() - 1)))


def cache_slots(tokens: int, context: int | None = None) -> int:
    """Return the slots of a cache for rows of up to `tokens` tokens, of a model with such a context."""
    slots = power_of_two(tokens, _MIN_SLOTS)
    return slots if context is None else min(slots, -(-context // _MIN_WIDTH) * _MIN_WIDTH)


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())
