"""Rows that come and go: whatever happens beside it, a row has the text that it has alone."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import oracle
import pytest
import tiny
from hypothesis import HealthCheck, given, settings, strategies
from test_decode import oracle_greedy

from jllama import runner
from jllama.config import Config
from jllama.pool import Pool
from jllama.row import Kept, Row
from jllama.runner import Runner, block_width, cache_slots
from jllama.server.pages import PagedPool
from jllama.settings import Settings

CONFIG = Config(16, 24, 1, 4, 2, 97, 64)
PARAMS = tiny.params(oracle.random_weights(CONFIG, tied=True), CONFIG)
RUNNER = Runner(PARAMS)
STOP = 7

PROMPTS = [tiny.ids(CONFIG, n, seed=n).tolist() for n in (3, 16, 30, 50)]
SETTINGS = [
    Settings(max_new_tokens=n, temperature=t, seed=seed, repetition_penalty=r)
    for n, t, seed, r in ((0, 0.0, 0, 1.0), (1, 1.0, 1, 1.0), (9, 1.0, 2, 1.0), (25, 0.0, 3, 1.1), (64, 1.0, 4, 1.0))
]
ALONE: dict[tuple[int, int], list[int]] = {}


@pytest.fixture(autouse=True, scope="module")
def small_arrays() -> Iterator[None]:
    """Let blocks be of 16 tokens and caches begin with 32 slots, so that little is compiled and much happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_MAX_WIDTH", 16)
        patch.setattr(runner, "_MIN_SLOTS", 32)
        yield


def alone(prompt: int, setting: int) -> list[int]:
    """The ids of a row by itself."""
    if (prompt, setting) not in ALONE:
        pool = Pool(RUNNER, [STOP], 1)
        (row,) = pool.join([(PROMPTS[prompt], SETTINGS[setting])]).finish()
        while not row.done:
            pool.advance(2**30)
        ALONE[prompt, setting] = pool.take(row)[0]
    return ALONE[prompt, setting]


@dataclasses.dataclass(eq=False)
class Running:
    """A row, which of the prompts and settings it is of, and what came out so far."""

    row: Row
    prompt: int
    setting: int
    ids: list[int] = dataclasses.field(default_factory=list)


def check(pool: Pool, running: Running) -> None:
    """Take what is new in a row, and compare."""
    running.ids += pool.take(running.row)[0]
    expected = alone(running.prompt, running.setting)
    assert running.ids == expected[: len(running.ids)]
    assert not running.row.done or running.ids == expected


choices = strategies.tuples(
    strategies.sampled_from(["join", "join", "block", "block", "advance", "advance", "end", "leave", "shrink"]),
    strategies.lists(
        strategies.tuples(strategies.integers(0, len(PROMPTS) - 1), strategies.integers(0, len(SETTINGS) - 1)),
        min_size=1,
        max_size=4,
    ),
    strategies.integers(0, 99),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.lists(choices, min_size=5, max_size=30))
def test_any_order_of_joining_ending_growing_and_shrinking_leaves_each_row_its_text(steps) -> None:
    pool = Pool(RUNNER, [STOP], 4)
    reading, running = [], []
    kept: list[Kept] = []
    for what, wanted, number in steps:
        here = running[number % len(running)] if running else None
        if what == "join" and pool.free:
            wanted = wanted[: 1 if number % 3 else pool.free]
            of = kept.pop() if kept and len(wanted) == 1 else None
            reading.append((pool.join([(PROMPTS[p], SETTINGS[s]) for p, s in wanted], of), wanted))
        elif what == "block" and reading:
            found, wanted = reading.pop(number % len(reading))
            if found.advance():
                running += [
                    Running(r, p, s) for r, (p, s) in zip(found.rows, wanted, strict=True) if r.place is not None
                ]
            else:
                reading.append((found, wanted))
        elif what == "advance":
            pool.advance((1, 5, 20)[number % 3])
        elif what == "end" and reading and number % 2:
            pool.end(reading[number % len(reading)][0].rows[0])
        elif what in ("end", "leave") and here:
            running.remove(here)
            if what == "leave":
                kept = [k for k in (pool.leave(here.row),) if k is not None]
            pool.end(here.row)
        elif what == "shrink":
            pool.shrink()
        for each in running:
            check(pool, each)
    for found, wanted in reading:
        found.finish()
        running += [Running(r, p, s) for r, (p, s) in zip(found.rows, wanted, strict=True) if r.place is not None]
    while not all(each.row.done for each in running):
        pool.advance(2**30)
    for each in running:
        check(pool, each)
        pool.end(each.row)
    assert pool.free == 4
    assert pool.rows == []


def test_rows_alone_have_the_tokens_of_the_oracle() -> None:
    weights = oracle.random_weights(CONFIG, tied=True)
    ids = list(PROMPTS[0])
    pool = Pool(RUNNER, [-1], 1)
    (row,) = pool.join([(PROMPTS[0], Settings(temperature=0.0, max_new_tokens=6))]).finish()
    pool.advance(10)
    for token in pool.take(row)[0]:
        assert token == int(np.argmax(oracle.forward(weights, CONFIG, np.array(ids))[-1]))
        ids.append(token)
    assert len(ids) == len(PROMPTS[0]) + 6


def test_one_more_row_is_no_more_than_there_is_room_for() -> None:
    pool = Pool(RUNNER, [STOP], 2)
    (first,) = pool.join([(PROMPTS[0], SETTINGS[3])]).finish()
    pool.join([(PROMPTS[0], SETTINGS[3])])
    assert pool.free == 0
    with pytest.raises(AssertionError):
        pool.join([(PROMPTS[0], SETTINGS[3])])
    pool.end(first)
    assert pool.free == 1


def test_the_sizes_of_caches_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_MAX_WIDTH", 512)
    monkeypatch.setattr(runner, "_MIN_SLOTS", 256)
    assert [cache_slots(n, 131072) for n in (1, 257, 1024, 1025, 131072)] == [256, 512, 1024, 2048, 131072]
    assert [cache_slots(n, 40960) for n in (32768, 32769, 40960)] == [32768, 40960, 40960]
    assert [cache_slots(n, 20) for n in (1, 20)] == [32, 32]
    # The scores of a block in one layer take 256 MB at most, but for the smallest block.
    assert [block_width(1, 10**6, slots * 32) for slots in (1024, 4096, 32768, 131072)] == [512, 512, 64, 16]
    assert [block_width(rows, 100, 256) for rows in (1, 8, 32, 64, 512)] == [128, 128, 128, 64, 16]


@pytest.mark.parametrize("paged", [False, True])
def test_what_is_not_finite_reaches_no_later_row_in_its_place(paged: bool) -> None:
    config = Config(16, 24, 1, 4, 2, 97, 512)
    weights = oracle.random_weights(config, tied=False)
    weights["tok_embeddings.weight"][96] = np.nan
    runner = Runner(tiny.params(weights, config))  # XLA's attention multiplies what it doesn't see by 0
    pool = PagedPool(runner, [], 4) if paged else Pool(runner, [], 4)

    def read(ids: list[int], new: int) -> Row:
        asked = Settings(temperature=0.0, max_new_tokens=new)
        if isinstance(pool, PagedPool):
            reading = pool.begin(ids, asked)
            reading.finish()
            return reading.row
        return pool.join([(ids, asked)]).finish()[0]

    def generate() -> list[int]:
        row = read([4, 5, 6], 5)
        pool.advance(10)
        found = pool.take(row).ids
        pool.end(row)
        return found

    read([3 + i for i in range(90)], 300)
    alone = generate()
    spoiled = read([3 + i for i in range(90)] + [96], 5)
    with pytest.raises(FloatingPointError):
        pool.take(spoiled)
    assert pool.leave(spoiled) is None
    assert generate() == alone == oracle_greedy(weights, config, np.array([4, 5, 6]), 5)
