"""Tokens that are guessed: the text is what it is without, token by token, whatever is guessed."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from hypothesis import HealthCheck, example, given, settings, strategies

from jllama import decode, kernels, speculation
from jllama.config import Config
from jllama.decode import State, Stop
from jllama.model import Params, init_cache
from jllama.run import Run
from jllama.settings import Settings, to_sampling
from jllama.speculation import lookup

CONFIG = Config(64, 96, 2, 4, 2, 61, 96)
FORMS = ("float32", "bfloat16", "q8_0", "q4_1")
ROWS, WIDTH, SLOTS = 4, 16, 96
native = pytest.mark.skipif(
    not kernels.available(), reason="without native kernels sums depend on how many rows there are"
)


@functools.cache
def model(form: str, seed: int = 0) -> Params:
    weights = oracle.random_weights(CONFIG, tied=True, seed=seed)
    return tiny.params(weights, CONFIG, form, Run(kernels=kernels.available(), stacked=kernels.available()))


@jax.jit
def plain(params: Params, tokens: Any, length: Any, sampling: Any, stop: Stop) -> State:
    return decode.generate(params, tokens, length, sampling, stop, SLOTS)


@jax.jit
def begin(params: Params, tokens: Any, length: Any, sampling: Any, stop: Stop) -> State:
    state = decode.start(params, jnp.pad(tokens, ((0, 0), (0, SLOTS - WIDTH))), length, stop)
    return decode.read_prompt(params, state, sampling, stop, 0, width=WIDTH)


looked_up = jax.jit(speculation.decode_lookup, static_argnames="guesses")
drafted = jax.jit(speculation.decode_draft, static_argnames="guesses")
decoded = jax.jit(decode.decode)

row = strategies.fixed_dictionaries(
    {
        "temperature": strategies.sampled_from([0.0, 0.3, 1.0]),
        "top_k": strategies.sampled_from([0, 5]),
        "top_p": strategies.sampled_from([1.0, 0.9]),
        "repetition_penalty": strategies.sampled_from([1.0, 1.0, 1.2]),
        "seed": strategies.integers(0, 9),
    }
)
rows = strategies.lists(
    strategies.tuples(row, strategies.integers(1, WIDTH), strategies.integers(1, SLOTS)), min_size=ROWS, max_size=ROWS
)


def arguments(wanted: Sequence[tuple[dict[str, Any], int, int]], stop_id: int) -> tuple[Any, ...]:
    """Prompts that repeat themselves, and how each is continued."""
    tokens = np.stack([np.tile(tiny.ids(CONFIG, 5, seed=n), 4)[:WIDTH] for _, n, _ in wanted])
    length = np.array([n for _, n, _ in wanted], np.int32)
    limit = np.array([limit for _, _, limit in wanted], np.int32)
    sampling = to_sampling([Settings(**one) for one, _, _ in wanted])
    return tokens, length, sampling, Stop(jnp.array([stop_id]), jnp.asarray(limit))


def assert_same(found: State, expected: State) -> None:
    np.testing.assert_array_equal(found.pos, expected.pos)
    np.testing.assert_array_equal(found.done, expected.done)
    for row, pos in enumerate(np.asarray(expected.pos)):
        np.testing.assert_array_equal(found.tokens[row, : pos + 1], expected.tokens[row, : pos + 1])
        np.testing.assert_array_equal(found.logprobs[row, : pos + 1], expected.logprobs[row, : pos + 1])


LONG = [({"temperature": t, "seed": n}, 5 + n, SLOTS - n) for n, t in enumerate((0.0, 0.0, 0.2, 1.0))]
all_settings = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@native
@pytest.mark.parametrize("form", FORMS)
def test_the_text_is_the_same_to_the_bit(form: str) -> None:
    params = model(form)
    accepted = 0

    @all_settings
    @example(LONG, -1)
    @given(rows, strategies.sampled_from([-1, 7]))
    def check(wanted: Any, stop_id: int) -> None:
        nonlocal accepted
        tokens, *rest = arguments(wanted, stop_id)
        expected = plain(params, tokens, *rest)
        state, tally = looked_up(params, begin(params, tokens, *rest), *rest[1:], 1000, guesses=3)
        assert_same(decoded(params, state, *rest[1:], 1000), expected)
        assert (tally.accepted <= tally.examined).all()
        assert (tally.examined <= tally.guessed).all()
        accepted += int(tally.accepted.sum())

    check()
    assert accepted > 10


@native
@pytest.mark.parametrize("seed", [0, 1], ids=["the same model", "another"])
def test_a_draft_model_leaves_the_text_as_it_is(seed: int) -> None:
    params, draft = model("float32"), model("bfloat16" if seed else "float32", seed)

    @all_settings
    @example(LONG, -1)
    @given(rows, strategies.sampled_from([-1, 7]))
    def check(wanted: Any, stop_id: int) -> None:
        tokens, *rest = arguments(wanted, stop_id)
        expected = plain(params, tokens, *rest)
        state = begin(params, tokens, *rest)
        cache, known = init_cache(draft, ROWS, SLOTS), np.zeros(ROWS, np.int32)
        while True:
            pos = state.pos
            state, tally, cache = drafted(params, state, draft, cache, known, *rest[1:], 2, guesses=3)
            known = np.maximum(state.pos - 1, 0)
            assert (state.pos - pos <= 8).all()
            if not seed:
                np.testing.assert_array_equal(tally.accepted, tally.examined)
            if not tally.passes.any():
                break
        assert_same(decoded(params, state, *rest[1:], 1000), expected)

    check()


def test_guesses_are_what_followed_the_same_tokens_the_last_time() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (64, 24), dtype=np.int32)
    pos = rng.integers(0, 24, 64, dtype=np.int32)
    guesses, found = (np.asarray(x) for x in lookup(jnp.asarray(tokens), jnp.asarray(pos), 6))
    for ids, here, guessed, is_found in zip(tokens.tolist(), pos.tolist(), guesses.tolist(), found, strict=True):
        text = ids[: here + 1]
        ends = [
            (n, end) for n in (4, 3, 2) for end in range(here, n - 1, -1) if text[end - n : end] == text[here + 1 - n :]
        ]
        assert is_found == bool(ends)
        if ends:
            _, end = ends[0]
            expected = text[end:]
            while len(expected) < 6:
                expected += text[end:]
            assert guessed == expected[:6]
    assert 0 < found.sum() < 64
