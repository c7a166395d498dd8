"""Tokens that are guessed: the text is what it is without, token by token, whatever is guessed."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from console import Run
from hypothesis import HealthCheck, example, given, settings, strategies

from jllama import decode, kernels, speculation, speculator
from jllama import runner as runner_module
from jllama.config import Config
from jllama.decode import State, Stop
from jllama.model import Params, init_cache
from jllama.pool import Pool, Row, Taken
from jllama.run import Run as How
from jllama.runner import Runner
from jllama.settings import Settings, to_sampling
from jllama.speculation import Tally, lookup
from jllama.speculator import Speculate, Speculator

CONFIG = Config(64, 96, 2, 4, 2, 61, 96)
FORMS = ("float32", "int4", *(pytest.param(form, marks=pytest.mark.slow) for form in ("bfloat16", "int8")))
ROWS, WIDTH, SLOTS = 4, 16, 96
NONE, FAR = jnp.array([-1]), jnp.array([99])
native = pytest.mark.skipif(
    not kernels.available(), reason="without native kernels sums depend on how many rows there are"
)


@functools.cache
def model(form: str, seed: int = 0) -> Params:
    weights = oracle.random_weights(CONFIG, tied=True, seed=seed)
    return tiny.params(weights, CONFIG, form, How(kernels=kernels.available(), stacked=kernels.available()))


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
        "frequency_penalty": strategies.sampled_from([0.0, 0.0, 0.5]),
        "min_new_tokens": strategies.sampled_from([0, 12]),
        "top_logprobs": strategies.sampled_from([0, 3]),
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
    sampling = to_sampling([Settings(**one) for one, _, _ in wanted], length.tolist())
    return tokens, length, sampling, Stop(jnp.array([stop_id]), jnp.asarray(limit))


def assert_same(found: State, expected: State) -> None:
    np.testing.assert_array_equal(found.pos, expected.pos)
    np.testing.assert_array_equal(found.done, expected.done)
    for row, pos in enumerate(np.asarray(expected.pos)):
        np.testing.assert_array_equal(found.tokens[row, : pos + 1], expected.tokens[row, : pos + 1])
        np.testing.assert_array_equal(found.logprobs[row, : pos + 1], expected.logprobs[row, : pos + 1])
        for mine, right in zip(found.likely, expected.likely, strict=True):
            np.testing.assert_array_equal(mine[row, : pos + 1], right[row, : pos + 1])


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


def speculating(method: Speculate, draft: Params | None = None) -> Runner:
    runner = Runner(model("float32"))
    runner.speculator = speculator.choose(method, runner.params, draft)
    return runner


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be one size of cache and one of passes with guesses, so that little is compiled."""
    monkeypatch.setattr(runner_module, "_MIN_SLOTS", SLOTS)
    monkeypatch.setattr(speculator, "_COUNTS", (3,))


def texts(runner: Runner, most: int, steps: Sequence[int]) -> list[Taken]:
    """Continue prompts in a pool, each of which joins as soon as there is room, and ends at a limit of its own."""
    pool, running, done = Pool(runner, [7], most), dict[int, Row](), dict[int, Taken]()
    waiting = list(enumerate((4, 9, 5, 12, 3, 16)))
    while waiting or running:
        while waiting and pool.free:
            number, length = waiting.pop(0)
            prompt = np.tile(tiny.ids(CONFIG, 4, seed=number), 4)[:length].tolist()
            how = Settings(
                temperature=(0.0, 0.3, 1.0)[number % 3], seed=number, max_new_tokens=(90, 11, 40)[number % 3]
            )
            (running[number],) = pool.join([(prompt, how)]).finish()
        pool.advance(steps[len(done) % len(steps)])
        for number in [number for number, row in running.items() if row.done]:
            row = running.pop(number)
            done[number] = pool.take(row)
            pool.end(row)
    return [done[number] for number in sorted(done)]


@native
@pytest.mark.usefixtures("few_programs")
def test_rows_come_and_go_as_they_do_without_guesses() -> None:
    expected = texts(Runner(model("float32")), 1, [64])
    for runner in (speculating("lookup"), speculating("draft", model("float32"))):
        assert texts(runner, 2, [1, 5, 64]) == expected
        assert 0 < runner.timings.accepted <= runner.timings.guesses
    assert runner.timings.accepted > 0.8 * runner.timings.guesses  # the rest are guesses of what comes after an end


def broken() -> tuple[Params, State]:
    """A model without an embedding for token 11, and the beginning of a text."""
    weights = oracle.random_weights(CONFIG, tied=False)
    weights["tok_embeddings.weight"][11] = np.nan
    weights["output.weight"][11] = 0  # which is never the largest
    params = tiny.params(weights, CONFIG)
    return params, decode.start(params, jnp.array([[4] + [0] * 31]), jnp.array([1]), Stop(NONE, FAR))


def test_a_guess_that_gives_no_finite_numbers_is_only_wrong() -> None:
    params, state = broken()
    draft = tiny.chain([11] * CONFIG.vocab_size)
    cache = init_cache(draft, 1, 32)
    found, tally, _ = drafted(
        params, state, draft, cache, jnp.array([0]), tiny.greedy(1), Stop(NONE, FAR), 3, guesses=3
    )
    expected = decoded(params, state, tiny.greedy(1), Stop(NONE, FAR), 3)
    assert tally == Tally(jnp.array([3]), jnp.array([0]), jnp.array([0]), jnp.array([0]))
    assert found.pos.tolist() == [3]
    assert np.isfinite(found.logprobs).all()
    assert found.tokens.tolist() == expected.tokens.tolist()


def test_logits_that_are_not_finite_end_a_row() -> None:
    params, state = broken()
    state = state._replace(tokens=state.tokens.at[0, 0].set(11))
    state, _ = looked_up(params, state, tiny.greedy(1), Stop(NONE, FAR), 9, guesses=3)
    assert state.done.tolist() == [True]
    assert state.pos.tolist() == [1]
    assert np.isnan(state.logprobs[0, 1])


def chosen(text: Sequence[int], cost: float, method: Speculate = "auto") -> list[int]:
    """How many tokens are guessed at each place of a text whose first 4 are the prompt, at a cost for each of them."""
    guesser, key = Speculator(method), object()
    for count in (0, 1, 3, 7, 15):
        guesser._costs.add(1, count, 16 * (1 + cost * count), 16)
    tokens = np.pad(np.array([text], np.int32), ((0, 0), (0, 64)))
    return [guesser._choose([key], tokens, np.array([pos])) for pos in range(4, len(text))]


def test_tokens_are_guessed_where_it_pays() -> None:
    rng = np.random.default_rng(0)
    new, again = rng.permutation(40).tolist(), list(range(50, 60)) * 5
    assert set(chosen(new, 0.01)) == {0}
    assert chosen(again, 0.05)[-1] == 15
    assert chosen(again, 0.2)[-1] == 7
    assert set(chosen(again, 0.95)) == {0}
    # As soon as it is worth it, and no longer than that.
    both = chosen(again + new, 0.1)
    assert next(n for n, count in enumerate(both) if count) < 20
    assert both[len(again) - 5] == 15
    assert both[-1] == 0
    assert set(chosen(new, 0.01, "lookup")) == {1}


def test_no_more_is_guessed_than_there_are_slots_for() -> None:
    guesser, key, tokens = Speculator("lookup"), object(), np.zeros((1, 32), np.int32)
    counts = {pos: guesser._choose([key], tokens, np.array([pos])) for pos in range(4, 32)}
    assert [counts[pos] for pos in (4, 15, 16, 23, 24, 27, 28, 29, 30, 31)] == [1, 15, 7, 7, 3, 3, 1, 1, 0, 0]


def test_a_draft_model_reads_again_only_what_differs() -> None:
    drafts = speculator._Drafts(model("float32"))
    tokens = np.arange(32, dtype=np.int32).reshape(2, 16)
    cache = drafts.cache(tokens)
    assert drafts.known(tokens, np.array([9, 3])).tolist() == [0, 0]
    drafts.keep(cache, tokens, np.array([9, 3]))
    other = tokens.copy()
    other[0, 5:] = 60
    assert drafts.known(tokens, np.array([12, 2])).tolist() == [8, 2]
    assert drafts.known(other, np.array([12, 2])).tolist() == [5, 2]
    assert drafts.cache(other) is cache
    assert drafts.cache(np.zeros((2, 32), np.int32)) is not cache
    assert drafts.known(np.zeros((2, 32), np.int32), np.array([9, 3])).tolist() == [0, 0]


def test_ways_to_speculate_that_there_are_not() -> None:
    params = tiny.params(oracle.random_weights(CONFIG, tied=True), CONFIG)
    assert speculator.choose("auto", params) is None  # its sums are XLA's
    assert speculator.choose("off", params) is None
    assert speculator.choose("lookup", params) is not None
    for method, draft, message in (
        ("often", None, "speculate = 'often': expected auto, off, lookup or draft"),
        ("draft", None, "expected a draft model too"),
        ("lookup", params, "expected no draft model"),
        ("off", params, "expected no draft model"),
    ):
        with pytest.raises(ValueError, match=message):
            speculator.choose(method, params, draft)  # type: ignore[arg-type]


@pytest.mark.usefixtures("few_programs")
def test_the_command_line_guesses_and_says_how_many_were_right(run: Run) -> None:
    words = (
        "run",
        "stories",
        "The cat sat. The cat sat. The cat",
        "--temperature=0",
        "--max_new_tokens=40",
        "--dtype=float32",
    )
    _, expected, _ = run(*words, "--speculate=off")
    for how in (("--speculate=lookup",), ("--draft=stories",)):
        code, out, err = run(*words, *how, "--verbose")
        assert (code, out) == (0, expected)
        right, guesses = map(int, re.findall(r"(\d+) of (\d+) guesses right", err)[0])
        assert 0 < right <= guesses


def test_a_draft_model_has_the_tokenizer_of_the_model(run: Run, shared: Path) -> None:
    code, _, err = run(
        "run", "stories", f"--draft={shared / 'models' / 'stories260K' / 'stories260K.F32.gguf'}", "--max_new_tokens=1"
    )
    assert code != 0
    assert "expected a model with the same tokenizer" in err
    code, _, err = run("run", "stories", "--draft=stories", "--mesh=data:1", "--max_new_tokens=1")
    assert code != 0
    assert "a draft model runs on a single device: expected no mesh" in err
