"""The engine of a server: what a job gets is what it gets alone, and no job hangs, whatever the others do."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import oracle
import pytest
import tiny
from hypothesis import HealthCheck, given, settings, strategies

from jllama import kernels
from jllama.config import Config
from jllama.generation import Completion, Prompt
from jllama.llm import LLM
from jllama.programs import DECODE, READ_PROMPT, Programs
from jllama.run import Run
from jllama.server import engine as engines
from jllama.server import pages
from jllama.server.engine import Dead, Draining, Engine, Event, Failed, Finished, Full, Job, Piece, Started
from jllama.settings import Settings

CONFIG = Config(16, 24, 1, 4, 2, 97, 96)
WEIGHTS = oracle.random_weights(CONFIG, tied=False)
TOKENIZER = tiny.Letters([b"", b"", b"", *(bytes([32 + i]) for i in range(94))])
SECONDS = 60  # more than anything here takes on a busy machine

LONG = tiny.ids(CONFIG, 80, seed=1).tolist()
PROMPTS = [LONG[:1], LONG[:40], LONG, [*LONG[:40], *LONG[:30]], LONG[5:20], [*LONG[:33], 7, 8, 9]]
PROMPTS = [[min(i, 95) for i in ids] for ids in PROMPTS]


@pytest.fixture(autouse=True, scope="module")
def small_arrays() -> Iterator[None]:
    """Let blocks, pages and caches be small, so that little is compiled and much happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "_MIN_SLOTS", 32)
        patch.setattr(pages, "_PAGE", 8)
        patch.setattr(pages, "_NARROW", 16)
        patch.setattr(pages, "_WIDEST", 32)
        yield


def load(run: Run | None = None, weights: oracle.Weights = WEIGHTS) -> LLM:
    return LLM(tiny.params(weights, CONFIG, run=run), TOKENIZER)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load()


class Listener:
    """A job, and what came of it."""

    def __init__(self, ids: list[int], then: Callable[[Event], None] = lambda event: None, salt: str = "", **s) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        self.then = then
        self.job = Job(ids, Settings(**({"temperature": 0.0} | s)), self.emit, salt, "prompt")

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self.then(event)
        if isinstance(event, Finished | Failed):
            self.ended.set()

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def result(self) -> Completion:
        """Wait for the answer, whose pieces are the whole."""
        assert self.ended.wait(SECONDS)
        last = self.events[-1]
        assert isinstance(last, Finished), last
        found = self.of(Piece)
        assert "".join(piece.text for piece in found) == last.completion.text
        assert [t for piece in found for t in piece.tokens] == last.completion.tokens
        assert [x for piece in found for x in piece.logprobs] == last.completion.logprobs
        assert all(piece.text for piece in found[:-1])
        return last.completion

    def error(self) -> Exception:
        assert self.ended.wait(SECONDS)
        (failed,) = self.of(Failed)
        assert self.events[-1] is failed
        return failed.error


def eventually(true: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def started(llm: LLM) -> Iterator[Callable[..., Engine]]:
    """Start engines, which are closed in the end."""
    running = []

    def start(**options) -> Engine:
        engine = Engine(options.pop("llm", llm), **({"max_rows": 4} | options))
        engine.start()
        running.append(engine)
        return engine

    yield start
    for engine in running:
        engine.close()
        assert (engine.status.running, engine.status.waiting) == (0, 0)
        assert (engine.status.cache_bytes, engine.status.stored_bytes) == (0, 0)


wishes = strategies.tuples(
    strategies.integers(0, len(PROMPTS) - 1),
    strategies.sampled_from([0, 1, 5, 30, 200]),
    strategies.sampled_from([0.0, 1.0]),
    strategies.integers(0, 2),  # seed
    strategies.sampled_from(["", "other"]),
    strategies.sampled_from([None, None, None, 0, 1, 3]),  # cancelled at this event, counted from 0
    strategies.sampled_from([0, 0, 1, 4]),  # events of the one before that are waited for
)


class Checked:
    """An engine, and what each job gets from the model alone."""

    def __init__(self, run: Run | None) -> None:
        self.llm = load(run)
        self.engine = Engine(self.llm, max_rows=4, prefix_cache=20000)
        self.engine.start()
        self.alone: dict[tuple, Completion] = {}

    def expected(self, listener: Listener) -> Completion:
        ids, settings = listener.job.ids, listener.job.settings
        key = (tuple(ids), settings)
        if key not in self.alone:
            (self.alone[key],) = self.llm.generate([Prompt("prompt", settings, tuple(ids))])
        return self.alone[key]

    def run(self, wanted: list[tuple]) -> None:
        """Run jobs that come and go, and compare."""
        listeners: list[tuple[Listener, bool]] = []
        programs = self.llm.runner.programs
        for prompt, limit, temperature, seed, salt, leaves, wait in wanted:
            if wait and listeners and not listeners[-1][1]:
                before = listeners[-1][0]
                eventually(lambda before=before, wait=wait: len(before.events) >= wait or before.ended.is_set())
            one = Listener(
                PROMPTS[prompt], salt=salt, max_new_tokens=limit, temperature=temperature, seed=seed, stop=("!?",)
            )
            if leaves:
                one.then = lambda event, one=one, n=leaves: (
                    self.engine.cancel(one.job) if len(one.events) >= n else None
                )
            self.engine.submit(one.job)
            if leaves == 0:
                self.engine.cancel(one.job)
            listeners.append((one, leaves is not None))
        status = self.engine.status
        eventually(lambda: status.running == status.waiting == 0)
        assert self.llm.runner.programs == programs
        assert status.cache_bytes == 0
        assert status.stored_bytes <= 20000
        for one, left in listeners:
            expected = self.expected(one)
            if left:
                text = "".join(piece.text for piece in one.of(Piece))
                assert expected.text.startswith(text)
            else:
                found = one.result()
                assert (found.text, found.tokens) == (expected.text, expected.tokens)
                assert found.finish_reason == expected.finish_reason
                np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


@pytest.fixture(scope="module", params=["xla", pytest.param("native", marks=pytest.mark.slow)])
def checked(request: pytest.FixtureRequest) -> Iterator[Checked]:
    if request.param == "native" and not kernels.available():
        pytest.skip("the kernels are not built for this processor")
    made = Checked(Run(kernels=True, stacked=True) if request.param == "native" else None)
    yield made
    made.engine.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.lists(wishes, min_size=1, max_size=14))
def test_a_job_gets_what_it_gets_alone_whatever_the_others_do_and_nothing_is_compiled(checked, wanted) -> None:
    checked.run(wanted)


def test_nothing_is_compiled_by_jax_either_once_it_has_started(started) -> None:
    engine = started()
    compiled: list[str] = []

    def heard(name: str, seconds: float, **more: object) -> None:
        if "compile" in name:
            compiled.append(name)
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        for round in range(2):
            listeners = [Listener(ids, max_new_tokens=n + round) for ids in PROMPTS for n in (1, 20)]
            for one in listeners:
                engine.submit(one.job)
            for one in listeners:
                one.result()
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


def test_a_stream_that_is_left_frees_its_row(started) -> None:
    engine = started()

    def leave(event: Event) -> None:
        if len(one.events) == 3:
            engine.cancel(one.job)
            engine.cancel(one.job)

    one = Listener(LONG[:3], leave, max_new_tokens=80)
    engine.submit(one.job)
    eventually(lambda: engine.status.finished["cancelled"] == 1)
    assert (engine.status.running, len(one.events)) == (0, 3)
    engine.cancel(one.job)  # long gone
    assert engine.status.generated_tokens < 80


def test_a_job_that_is_left_in_the_queue_is_never_read(started) -> None:
    engine = started(max_rows=1, prefix_cache=0)
    queued, last = Listener(LONG[:9]), Listener(LONG[:5], max_new_tokens=2)

    def leave(event: Event) -> None:
        if isinstance(event, Started):
            engine.submit(queued.job)
            engine.submit(last.job)
            engine.cancel(queued.job)

    first = Listener(LONG[:4], leave, max_new_tokens=2)
    engine.submit(first.job)
    last.result()
    assert queued.events == []
    assert engine.status.prompt_tokens == 4 + 5


def test_a_prompt_that_is_left_is_read_no_further(started, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started()
    blocks = []
    call = Programs.call

    def counted(self, program, *args, **static):
        if program is READ_PROMPT:
            blocks.append(static["width"])
            engine.cancel(one.job)
        return call(self, program, *args, **static)

    monkeypatch.setattr(Programs, "call", counted)
    one = Listener(LONG, max_new_tokens=80)
    engine.submit(one.job)
    eventually(lambda: engine.status.finished["cancelled"] == 1)
    assert [type(event) for event in one.events] == [Started]
    assert blocks == [32]
    again = Listener(LONG, max_new_tokens=1)
    engine.submit(again.job)
    again.result()
    assert again.of(Started) == [Started(32)]  # what was read is not read again


def test_streams_go_on_between_two_blocks_of_a_long_prompt(started, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started()
    calls: list[int] = []  # the width of a block, or 0 for a step
    call = Programs.call

    def noted(self, program, *args, **static):
        if program in (READ_PROMPT, DECODE):
            calls.append(static.get("width", 0))
        return call(self, program, *args, **static)

    def follow(event: Event) -> None:
        if isinstance(event, Started):
            engine.submit(long.job)
            engine.submit(short.job)

    monkeypatch.setattr(Programs, "call", noted)
    long, short = Listener(PROMPTS[2], max_new_tokens=1), Listener(LONG[7:12], max_new_tokens=1)
    stream = Listener(LONG[:3], follow, max_new_tokens=90, stop=[])
    ended: list[str] = []
    long.then = lambda event: ended.append("long") if isinstance(event, Finished) else None
    short.then = lambda event: ended.append("short") if isinstance(event, Finished) else None
    monkeypatch.setattr(engines, "_MAX_CHUNK", 1)
    engine.submit(stream.job)
    for one in (stream, long, short):
        one.result()
    assert sum(calls) == 16 + 32 + 32 + 16 + 16
    turns = [sum(blocks) for step, blocks in itertools.groupby(calls, bool) if step]
    assert max(turns) <= 32
    assert ended == ["short", "long"]  # though it came later


def test_a_prompt_is_read_once_for_jobs_that_come_together(started) -> None:
    engine = started()
    jobs = [Listener(PROMPTS[2], max_new_tokens=4, temperature=1.0, seed=seed) for seed in range(4)]
    for one in jobs:
        engine.submit(one.job)
    assert len({one.result().text for one in jobs}) > 1
    assert [one.of(Started)[0].cached_tokens for one in jobs] == [0, 79, 79, 79]
    status = engine.status
    assert (status.prompt_tokens, status.cached_prompt_tokens) == (4 * 80, 3 * 79)


def test_an_answer_is_known_when_the_chat_goes_on_but_not_to_others(started) -> None:
    engine = started()
    one = Listener(LONG[:20], max_new_tokens=20)
    engine.submit(one.job)
    told = one.result().tokens
    for salt, known in (("", 20 + len(told) - 1), ("other", 0)):
        again = Listener([*LONG[:20], *told, 5, 6], salt=salt, max_new_tokens=1)
        engine.submit(again.job)
        again.result()
        assert again.of(Started)[0].cached_tokens in (known, known + bool(known))  # the last may end the text
    edited = Listener([*LONG[:12], 50, *LONG[13:20]], max_new_tokens=1)
    engine.submit(edited.job)
    edited.result()
    assert edited.of(Started) == [Started(12)]


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(started) -> None:
    engine = started()
    with pytest.raises(ValueError, match=r"97 tokens: expected 1 to 96"):
        engine.submit(Listener([4] * 97).job)
    with pytest.raises(ValueError, match=r"0 tokens"):
        engine.submit(Listener([]).job)
    full = Listener([4] * 96)
    engine.submit(full.job)
    assert full.result() == Completion("prompt", "", [], [], "length")


def test_a_row_whose_logits_are_not_finite_fails_alone(started) -> None:
    embedding = WEIGHTS["tok_embeddings.weight"].copy()
    embedding[96] = np.nan
    engine = started(llm=load(weights=WEIGHTS | {"tok_embeddings.weight": embedding}))
    good, bad = Listener(PROMPTS[1], max_new_tokens=20), Listener([*PROMPTS[1], 96], max_new_tokens=20)
    for one in (good, bad):
        engine.submit(one.job)
    assert isinstance(bad.error(), FloatingPointError)
    assert good.result().tokens
    again = Listener([*PROMPTS[1], 96], max_new_tokens=20)
    engine.submit(again.job)
    again.error()
    assert again.of(Started) == [Started(40)]  # nothing of what was wrong is known
    assert engine.status.state == "serving"


def test_a_fault_fails_all_jobs_and_is_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[Exception] = []
    engine = Engine(llm, max_rows=2, on_death=deaths.append)
    engine.start()
    steps = []
    call = Programs.call

    def broken(self, program, *args, **static):
        if program is DECODE:
            steps.append(program)
            if len(steps) == 3:
                raise RuntimeError("out of order")
        return call(self, program, *args, **static)

    monkeypatch.setattr(Programs, "call", broken)
    jobs = [Listener(LONG[: 4 + n], max_new_tokens=90) for n in range(4)]
    gate = threading.Event()
    jobs[0].then = lambda event: gate.wait(SECONDS) and None  # until all are there
    for one in jobs:
        engine.submit(one.job)
    gate.set()
    for one in jobs:
        assert str(one.error()) == "out of order"
    eventually(lambda: bool(deaths))
    assert [str(e) for e in deaths] == ["out of order"]
    assert engine.status.state == "dead"
    with pytest.raises(Dead):
        engine.submit(Listener(LONG[:4]).job)
    engine.drain(10)
    engine.close()
    assert (engine.status.running, engine.status.waiting, engine.status.stored) == (0, 0, 0)


def test_more_than_the_queue_holds_are_refused_at_once(started) -> None:
    engine = started(max_rows=1, max_queue=2)
    gate = threading.Event()
    first = Listener(LONG[:4], lambda event: gate.wait(SECONDS) and None, max_new_tokens=3)
    others = [Listener(LONG[:5], max_new_tokens=3) for _ in range(3)]
    engine.submit(first.job)
    engine.submit(others[0].job)
    engine.submit(others[1].job)
    with pytest.raises(Full) as refused:
        engine.submit(others[2].job)
    assert 1 <= refused.value.retry_after < 600
    with pytest.raises(ValueError, match="submitted before"):
        engine.submit(first.job)
    gate.set()
    for one in (first, *others[:2]):
        one.result()
    engine.submit(others[2].job)
    others[2].result()


def test_draining_lets_jobs_end(started) -> None:
    engine = started(max_rows=1)
    jobs = [Listener(LONG[: 3 + n], max_new_tokens=12) for n in range(3)]
    for one in jobs:
        engine.submit(one.job)
    engine.drain(SECONDS)
    assert all(one.ended.is_set() for one in jobs)
    assert engine.status.state == "draining"
    with pytest.raises(Draining):
        engine.submit(Listener(LONG[:4]).job)


def test_after_the_grace_what_runs_ends_with_what_it_has_and_what_waits_fails(
    started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_MAX_CHUNK", 1)
    engine = started(max_rows=1)
    drained = threading.Event()

    def drain(event: Event) -> None:
        if len(runs.events) == 4:
            thread = threading.Thread(target=lambda: (engine.drain(0), drained.set()))
            thread.start()
            eventually(lambda: engine.status.state == "draining")

    runs, waits = Listener(LONG[:3], drain, max_new_tokens=90), Listener(LONG[:4], max_new_tokens=90)
    engine.submit(runs.job)
    engine.submit(waits.job)
    found = runs.result()
    assert found.finish_reason == "length"
    assert 3 <= len(found.tokens) < 10
    assert isinstance(waits.error(), Draining)
    assert drained.wait(SECONDS)


def test_an_engine_that_has_not_started_takes_nothing(llm: LLM) -> None:
    engine = Engine(llm)
    assert engine.status.state == "loading"
    with pytest.raises(Draining, match="loading"):
        engine.submit(Listener(LONG[:4]).job)
    engine.drain(0)
    engine.close()
    assert engine.status.state == "dead"


def test_whoever_listens_no_more_harms_nobody(started) -> None:
    engine = started()

    def fail(event: Event) -> None:
        raise OSError("nobody is there")

    gone, here = Listener(LONG[:3], fail, max_new_tokens=50), Listener(LONG[:4], max_new_tokens=5)
    engine.submit(gone.job)
    engine.submit(here.job)
    here.result()
    eventually(lambda: engine.status.finished["cancelled"] == 1)
    assert len(gone.events) == 1


def test_many_rows_are_given_up_when_few_are_left(started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_SHRINK_SECONDS", 0.0)
    monkeypatch.setattr(engines, "_MAX_CHUNK", 1)
    engine = started()
    sizes: list[int] = []
    jobs = [Listener(LONG[: 3 + n], max_new_tokens=limit) for n, limit in enumerate((60, 3, 3, 3))]
    jobs[0].then = lambda event: sizes.append(engine.status.cache_bytes)
    for one in jobs:
        engine.submit(one.job)
    for one in jobs:
        one.result()
    largest = sizes.index(max(sizes))
    assert min(sizes[largest:]) < max(sizes) // 2
    eventually(lambda: engine.status.cache_bytes == 0)


def test_jobs_wait_for_memory_and_what_never_fits_is_refused(started, llm: LLM) -> None:
    slot = started().status and 2 * 2 * 4 * 4  # keys and values of two heads of four, float32
    engine = started(memory=3 * 96 * slot)  # of one row of 96 slots with its copies, not of four
    sizes: list[int] = []
    jobs = [
        Listener(LONG[: 3 + n], lambda event: sizes.append(engine.status.running), max_new_tokens=60) for n in range(3)
    ]
    for one in jobs:
        engine.submit(one.job)
    for one in jobs:
        one.result()
    assert max(sizes) == 1
    poor = started(memory=2 * 32 * slot)
    with pytest.raises(ValueError, match="of cache: expected at most"):
        poor.submit(Listener(LONG[:40]).job)


def test_pieces_bring_the_tokens_whose_text_begins_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_MAX_CHUNK", 1)
    llm = tiny.says(b"a", b"One", b"\xf0\x9f", b"\x98\x80", b" sto", b"ne", b" stop", b"ped", max_seq_len=16)
    engine = Engine(llm, max_rows=1)
    engine.start()
    one = Listener([3], stop=[" stop"])
    engine.submit(one.job)
    found = one.result()
    engine.close()
    assert (found.text, found.tokens, found.finish_reason) == ("One😀 stone", [4, 5, 6, 7, 8, 9], "stop")
    assert [(p.text, p.tokens) for p in one.of(Piece)] == [("One", [4]), ("😀", [5, 6]), (" stone", [7, 8]), ("", [9])]
    (last,) = one.of(Finished)
    assert 0 <= last.timings.queue <= last.timings.first_token <= last.timings.request


def test_wrong_numbers_are_named(llm: LLM) -> None:
    for wrong in ({"max_rows": 0}, {"max_queue": -1}, {"prefix_cache": -1}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name} = {value}"):
            Engine(llm, **wrong)
