"""What is guessed when, and how much: the side of speculative decoding that looks at texts and clocks.

Nothing here changes a text, wherever a row's numbers don't depend on how many tokens are read at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Literal, Protocol, get_args

import jax
import numpy as np

from jllama import kernels
from jllama.decode import State, Stop
from jllama.errors import quoted
from jllama.mesh import ROWS, mesh_of
from jllama.model import Cache, Params, init_cache
from jllama.programs import DECODE, DRAFT, LOOKUP, Program
from jllama.sampling import Sampling
from jllama.speculation import SHORTEST
from jllama.weights import Weight

Speculate = Literal["auto", "off", "lookup", "draft"]

_COUNTS = (1, 3, 7, 15)  # tokens guessed for a pass: with the row's own last one as many as kernels take at a time
_MOST = 128  # tokens of a pass, all rows together: bounds the memory of their logits
_WARM_COUNTS, _WARM_MOST = (3, 15), 32  # what a server compiles of them before it serves
_WINDOW = 24  # of a row's last tokens, by which a look-up is judged
_EVIDENCE = 8  # the fewest
_GAIN = 1.1  # how much faster guessing must promise to be than plain steps
_NEW_GAIN = 1.3  # the same where the program is yet to be compiled


class Caller(Protocol):
    """What runs programs: `runner.Runner`."""

    timings: Any

    def call(self, program: Program, *args: Any, **static: Any) -> Any:
        """Run a program."""

    def put(self, tree: Any, where: Any) -> Any:
        """Lay host arrays out."""

    def get(self, tree: Any) -> Any:
        """Fetch small arrays."""

    def agree(self, tree: Any) -> Any:
        """Return what the first of several processes has."""


class Speculator:
    """Guesses tokens where that is worth it."""

    def __init__(self, method: Speculate, draft: Params | None = None, share: float = 0.1) -> None:
        """Choose a method.

        Args:
          method: "lookup": from the text so far; "draft": by the draft model; "auto": by either, wherever plain steps
            would be slower.
          draft: a small model of the same vocabulary.
          share: of a step with one row that a guess is expected to cost, before it is measured.
        """
        self._may_rest = method == "auto"
        self._drafts = None if draft is None else _Drafts(draft)
        self._traces: dict[Hashable, _Trace] = {}
        self._costs = _Costs(share)
        self._ready: set[tuple[int, int, int]] | None = None  # rows, slots and guesses; None: any

    def decode(
        self,
        runner: Caller,
        state: State,
        sampling: Sampling,
        stop: Stop,
        steps: int,
        live: Sequence[Hashable | None],
        tokens: np.ndarray,
        pos: np.ndarray,
    ) -> State:
        """Do what `decode.decode` does, with guesses or without.

        Args:
          runner: of the model.
          state: its rows.
          sampling: as for `decode`.
          stop: as for `decode`.
          steps: as for `decode`.
          live: for each row what stands for its text, None where nothing more is generated.
          tokens: int32 `[B, S]`, those of the state.
          pos: int32 `[B]`, that of the state.
        """
        count = int(runner.agree(np.int32(self._choose(live, tokens, pos))))
        compiling, began = runner.timings.compile_seconds, time.perf_counter()
        state, passes = self._run(runner, count, state, sampling, stop, steps, tokens, pos)
        if passes and runner.timings.compile_seconds == compiling:
            self._costs.add(len(live), count, time.perf_counter() - began, passes)
        return state

    def warm_up(
        self, runner: Caller, state: State, sampling: Sampling, stop: Stop, tokens: np.ndarray, pos: np.ndarray
    ) -> State:
        """Compile what guesses in a state of this size: from now on only what was compiled like this is used."""
        rows, slots = tokens.shape
        for count in (count for count in _WARM_COUNTS if rows * (count + 1) <= _WARM_MOST):
            state, _ = self._run(runner, count, state, sampling, stop, 0, tokens, pos)
            self._ready = {*(self._ready or ()), (rows, slots, count)}
        return state

    def _run(
        self,
        runner: Caller,
        count: int,
        state: State,
        sampling: Sampling,
        stop: Stop,
        steps: int,
        tokens: np.ndarray,
        pos: np.ndarray,
    ) -> tuple[State, int]:
        """Decode with `count` guesses a pass, or none; tells the number of passes too."""
        if not count:
            state = runner.call(DECODE, state, sampling, stop, np.int32(steps))
            return state, int((runner.get(state.pos) - pos).max())
        if self._drafts is None:
            state, tally = runner.call(LOOKUP, state, sampling, stop, np.int32(steps), guesses=count)
        else:
            drafts = self._drafts
            cache, known = drafts.cache(tokens), runner.put(drafts.known(tokens, pos), ROWS)
            state, tally, cache = runner.call(
                DRAFT, state, drafts.params, cache, known, sampling, stop, np.int32(steps), guesses=count
            )
            drafts.keep(cache, *runner.get((state.tokens, state.pos)))
        passes, guessed, examined, accepted = runner.get(tally)
        if self._drafts is not None:
            self._drafts.learn(int(examined.sum()), int(accepted.sum()))
        runner.timings.guesses += int(guessed.sum())
        runner.timings.accepted += int(accepted.sum())
        return state, int(passes.max())

    def _choose(self, live: Sequence[Hashable | None], tokens: np.ndarray, pos: np.ndarray) -> int:
        """Return how many tokens to guess for a pass; 0: plain steps."""
        rows, slots = tokens.shape
        self._follow(live, tokens, pos)
        counts = [k for k in _COUNTS if pos.max() + 1 + k < slots and rows * (k + 1) <= _MOST]
        if self._ready is not None:
            counts = [k for k in counts if (rows, slots, k) in self._ready]
        if not counts:
            return 0
        gains = {k: self._tokens(k) / self._costs.of(rows, k) for k in counts}
        best = max(counts, key=gains.__getitem__)
        enough = _GAIN if self._costs.has(rows, best) else _NEW_GAIN
        return 0 if self._may_rest and gains[best] < enough else best

    def _follow(self, live: Sequence[Hashable | None], tokens: np.ndarray, pos: np.ndarray) -> None:
        """See what is new in each text."""
        if self._drafts is not None:
            return
        self._traces = {key: self._traces.get(key) or _Trace() for key in live if key is not None}
        for row, key in enumerate(live):
            if key is not None:
                self._traces[key].read(tokens[row], int(pos[row]))

    def _tokens(self, count: int) -> float:
        """Estimate how many tokens a pass with so many guesses gives a row."""
        if self._drafts is not None:
            return self._drafts.tokens(count)
        return sum(trace.tokens(count) for trace in self._traces.values()) / len(self._traces)


class _Trace:
    """Which of a text's last tokens a look-up would have guessed; known without any guessing."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], int] = {}  # the place after each n-gram's last occurrence
        self._length = 0
        self._hits = deque[bool](maxlen=_WINDOW)

    def read(self, tokens: np.ndarray, pos: int) -> None:
        """Take in the ids up to `pos`; those of the first call are the prompt's."""
        first = max(self._length, SHORTEST)
        begin = first - SHORTEST
        ids = tokens[begin : pos + 1].tolist()
        is_new = self._length > 0
        for i in range(first - begin, len(ids)):
            gram = tuple(ids[i - SHORTEST : i])
            if is_new:
                found = self._seen.get(gram)
                self._hits.append(found is not None and int(tokens[found]) == ids[i])
            self._seen[gram] = begin + i
        self._length = pos + 1

    def tokens(self, count: int) -> float:
        """Say how many tokens a pass with `count` guesses would have given in the last ones."""
        if len(self._hits) < _EVIDENCE:
            return 1.0
        passes = right = 0
        for hit in self._hits:
            if hit and right < count:
                right += 1
            else:
                passes, right = passes + 1, 0
        return len(self._hits) / (passes + (right > 0))


class _Costs:
    """How long passes take beside plain steps, as measured."""

    def __init__(self, share: float) -> None:
        """Take the share of a step that a guess is expected to cost, before it is known."""
        self._share = share
        self._seconds: dict[tuple[int, int], float] = {}  # of a pass, by rows and guesses

    def has(self, rows: int, count: int) -> bool:
        """Whether it was measured."""
        return (rows, count) in self._seconds

    def add(self, rows: int, count: int, seconds: float, passes: int) -> None:
        """Take in a measurement; few passes say little."""
        old = self._seconds.get((rows, count), seconds / passes)
        weight = min(0.5, passes / 16)
        self._seconds[rows, count] = (1 - weight) * old + weight * seconds / passes

    def of(self, rows: int, count: int) -> float:
        """Estimate how many plain steps a pass with `count` guesses takes as long as."""
        measured = {k: seconds for (n, k), seconds in self._seconds.items() if n == rows}
        share = self._share * rows
        if not measured:
            return 1 + share * count
        least = min(measured)
        step = measured[least] / (1 + share * least)
        if count in measured:
            return measured[count] / step
        if most := max(measured):
            share = max(measured[most] / step - 1, 0) / most
        return 1 + share * count


class _Drafts:
    """A draft model, what it has read, and how often it was right."""

    def __init__(self, params: Params) -> None:
        self.params = params
        self._cache: Cache | None = None
        self._read = np.zeros((0, 0), np.int32)  # the ids that the cache is of
        self._lengths = np.zeros(0, np.int32)
        self._examined, self._accepted = 4.0, 3.0  # in the mean of late

    def cache(self, tokens: np.ndarray) -> Cache:
        """Return the cache, an empty one where the state has another shape."""
        lost = self._cache is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(self._cache))
        if lost or self._read.shape != tokens.shape:
            self._cache = init_cache(self.params, *tokens.shape)
            self._read, self._lengths = np.zeros_like(tokens), np.zeros(len(tokens), np.int32)
        assert self._cache is not None
        return self._cache

    def known(self, tokens: np.ndarray, pos: np.ndarray) -> np.ndarray:
        """Return how many of each row's first tokens are in the cache, int32 `[B]`."""
        differs = self._read != tokens
        same = np.where(differs.any(axis=1), differs.argmax(axis=1), tokens.shape[1])
        known: np.ndarray = np.minimum(same, np.minimum(self._lengths, pos)).astype(np.int32)
        return known

    def keep(self, cache: Cache, tokens: np.ndarray, pos: np.ndarray) -> None:
        """Take the cache back, in which all but the last two tokens of each row are."""
        self._cache, self._read, self._lengths = cache, np.array(tokens), np.maximum(pos - 1, 0)

    def learn(self, examined: int, accepted: int) -> None:
        """Take in how many guesses were right; none were made in plain steps, and what is known fades."""
        keep = 0.8
        self._examined = keep * self._examined + (1 - keep) * 4 + examined
        self._accepted = keep * self._accepted + (1 - keep) * 3 + accepted

    def tokens(self, count: int) -> float:
        """Estimate the tokens of a pass with `count` guesses, each of which is right as often as of late."""
        rate = self._accepted / self._examined
        return sum(rate**n for n in range(count + 1))


def is_exact(params: Params) -> bool:
    """Whether a row's numbers are the same to the bit, however many tokens and rows a pass has."""
    products = {"groups" if form in kernels.GROUPS else form for form in _forms(params)}
    return (
        params.run.kernels
        and not params.config.attention_cap
        and products <= {"float32", "bfloat16", "groups"}
        and all(kernels.has(name) for name in ("attention", *products))
    )


def _forms(params: Params) -> set[str]:
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Weight))
    return {leaf.dtype for leaf in leaves if isinstance(leaf, Weight)}


def choose(method: Speculate, params: Params, draft: Params | None = None) -> Speculator | None:
    """Make what guesses for a model, by a way to speculate as `LLM.load` takes it; None where nothing does.

    Raises:
      ValueError: another word, or one that doesn't go with a draft model, or without.
    """
    if method not in get_args(Speculate):
        raise ValueError(f"speculate = {quoted(method)}: expected auto, off, lookup or draft")
    if method == "draft" and draft is None:
        raise ValueError("speculate = draft: expected a draft model too (draft=, --draft)")
    if method in ("off", "lookup") and draft is not None:
        raise ValueError(f"speculate = {method}: expected no draft model, or speculate = draft or auto")
    if draft is not None and mesh_of(params) is not None:
        raise ValueError("a draft model runs on a single device: expected no mesh, or speculate = lookup")
    if method == "off" or (method == "auto" and draft is None and not is_exact(params)):
        return None
    # Products with weights in groups are bound by computing, even those of few rows.
    grouped = any(form in kernels.GROUPS for form in _forms(params))
    return Speculator(method, draft, share=0.3 if grouped else 0.05 if draft is None else 0.2)
