"""The engine of a server: one thread that reads prompts and generates answers, many in turn.

Jobs come from any thread. A turn of the engine's thread reads a block of one prompt, generates a few tokens in all rows
that run, and hands out what came of it: nobody's text stands still for longer than that, and a job that is cancelled
is gone by the next turn. What a job gets doesn't depend on the others: `pages` and `pool` see to that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from jllama.llm import LLM
from jllama.pool import common_prefix
from jllama.server.intake import Intake
from jllama.server.jobs import (
    Dead,
    Draining,
    Event,
    Failed,
    Finished,
    Full,
    Job,
    Piece,
    Started,
    State,
    Status,
    Timings,
)
from jllama.server.memory import READERS, Budget, available
from jllama.server.pace import Pace
from jllama.server.pages import PagedPool
from jllama.server.store import Store
from jllama.server.task import Task
from jllama.settings import Settings

__all__ = [
    "Dead", "Draining", "Engine", "Event", "Failed", "Finished", "Full", "Job", "Piece", "Started", "State", "Status",
    "Timings",
]  # fmt: skip

LOG = logging.getLogger("jllama.engine")

_SHRINK_SECONDS = 1.0  # how long a state is too large before it is copied to a smaller one


class Engine(Intake):
    """A model that answers jobs.

    Attributes:
      status: how it is, and what it has done.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_rows: int = 8,
        max_queue: int = 64,
        prefix_cache: int = 2**30,
        memory: int | None = None,
        on_death: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """Take a model, which is the engine's alone from now on.

        Args:
          llm: the model.
          max_rows: how many answers are generated together.
          max_queue: how many jobs may wait beside them.
          prefix_cache: the most bytes of caches that are kept for prompts which begin alike; 0: none.
          memory: the most bytes of caches of what runs; None: most of what there is.
          on_death: called once, on the engine's thread, with the fault that has ended it.

        Raises:
          ValueError: a wrong number, or a model that lies on several processes or is divided by rows.
        """
        for name, value, least in (
            ("max_rows", max_rows, 1),
            ("max_queue", max_queue, 0),
            ("prefix_cache", prefix_cache, 0),
        ):
            if value < least:
                raise ValueError(f"{name} = {value}: expected {least} or more")
        there = available()
        self._pool = PagedPool(llm.runner, llm.tokenizer.stop_ids, max_rows)
        self._store = Store(min(prefix_cache, there // 4))
        budget = Budget(self._pool, max(there * 3 // 4 - prefix_cache, there // 4) if memory is None else memory)
        super().__init__(llm, budget, max_rows, max_queue)
        self._on_death = on_death
        self._reading = deque[Task]()
        self._running: list[Task] = []
        self._pace = Pace()
        self._large_since: float | None = None

    def start(self) -> None:
        """Compile, or load, all that will be needed, and begin to take jobs."""
        began = time.monotonic()
        self._pool.warm_up(Settings(temperature=0.0), self._budget.bytes)
        self._note()
        LOG.info("%d programs in %.1f s", self.status.programs, time.monotonic() - began)
        self._thread = threading.Thread(target=self._run, name="jllama-engine", daemon=True)
        self.status.state = "serving"
        self._thread.start()

    def close(self) -> None:
        """End all jobs as `drain` does without grace, and the thread; the caches are given back."""
        with self._changed:
            self._closing = True
        self.drain(0.0)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.status.state = "dead"

    def _run(self) -> None:
        try:
            while self._wait():
                self._sweep()
                self._begin()
                self._read()
                self._generate()
                self._shrink()
                self._note()
        except Exception as e:
            self._die(e)
        finally:
            self._store.clear()
            for task in (*self._reading, *self._running):
                self._pool.end(task.row)
            self._reading.clear()
            self._running.clear()
            self._note()

    def _sweep(self) -> None:
        """Let go of what was cancelled, and of all when the time to drain is over."""
        with self._changed:
            over = self._deadline is not None and time.monotonic() >= self._deadline
            tasks = [task for task in self._tasks.values() if task.cancelled or over]
        for task in tasks:
            if task.cancelled:
                self._leave(task, "cancelled")
            elif task in self._running:
                task.answer.cut()
                self._finish(task)
            else:
                self._fail(task, Draining("the engine is about to end"))

    def _begin(self) -> None:
        """Begin to read prompts that wait, as many as there are rows, readers and memory for."""
        with self._changed:
            waiting = list(self._waiting)
        for task in waiting:
            if len(self._reading) >= READERS or not self._pool.free:
                return
            if not self._budget.fits([*self._reading, *self._running, task]):
                return  # and nobody overtakes it
            known = self._store.find(task.job.ids, task.job.salt)
            if self._is_being_read(task, 0 if known is None else common_prefix(known.ids, task.job.ids)):
                continue
            with self._changed:
                self._waiting.remove(task)
            try:
                task.begin(self._pool, known)
            except ValueError as e:
                self._fail(task, e)
                continue
            self._reading.appendleft(task)  # a short one waits for no other, and then it is each one's turn
            self.status.prompt_tokens += len(task.job.ids)
            self.status.cached_prompt_tokens += task.reading.cached
            self._emit(task, Started(task.reading.cached))

    def _is_being_read(self, task: Task, known: int) -> bool:
        """Whether more of a prompt than is known is about to be, as it is most of another's."""
        if not self._store.budget:
            return False
        common = (
            (common_prefix(other.job.ids, task.job.ids), other)
            for other in self._reading
            if other.job.salt == task.job.salt
        )
        return any(n > known and 2 * n >= len(other.job.ids) for n, other in common)

    def _read(self) -> None:
        """Read a block of the prompt whose turn it is, or narrow ones of several that are no wider together."""
        began, left = time.perf_counter(), 1.0
        while self._reading and self._reading[0].reading.share <= left:
            task = self._reading.popleft()
            left -= task.reading.share
            if not task.reading.advance():
                self._reading.append(task)
                continue
            self._running.append(task)
            self._deliver(task)
            if task.row.place is not None:  # not ended already
                self._keep(task)
        self._pace.read_seconds = time.perf_counter() - began

    def _generate(self) -> None:
        """Generate a few tokens in the rows that run."""
        if not self._running:
            return
        # Where it is known when a row ends, its place is filled again at once.
        full = bool(self._waiting) and not self._pool.free
        room = min(task.answer.room for task in self._running) if full else None
        before = {task: task.row.taken for task in self._running}
        with self._pace.generating():
            self._pool.advance(self._pace.steps(room, reading=bool(self._reading)))
        for task in list(self._running):
            self._deliver(task)
        self._pace.note(max(task.row.taken - n for task, n in before.items()))

    def _deliver(self, task: Task) -> None:
        """Hand out what is new of an answer."""
        try:
            new = task.update(self._pool)
        except (ValueError, FloatingPointError) as e:  # of this row alone
            self._fail(task, e)
            return
        self.status.generated_tokens += new
        if task.answer.finish_reason is not None:
            self._finish(task)
        elif (piece := task.piece()) is not None:
            self._emit(task, piece)

    def _finish(self, task: Task) -> None:
        if (piece := task.piece()) is not None:
            self._emit(task, piece)
        completion = task.answer.completion()
        timings = task.timings()
        self.job_seconds += 0.1 * (timings.request - timings.queue - self.job_seconds)
        self._leave(task, completion.finish_reason, Finished(completion, task.reading.cached, timings))

    def _fail(self, task: Task, error: Exception) -> None:
        task.faulty = True
        self._leave(task, "failed", Failed(error))

    def _leave(self, task: Task, how: str, event: Event | None = None) -> None:
        """Let go of a task; what was read and written is kept for others, unless it is wrong."""
        if event is not None:
            self._emit(task, event)
        if task.started and not task.faulty:
            self._keep(task)
        if task.started:
            self._pool.end(task.row)
        for here in (self._reading, self._running):
            if task in here:
                here.remove(task)
        self._let_go(task, how)

    def _keep(self, task: Task) -> None:
        """Put what is cached of a task into the store."""
        if self._store.budget:
            task.known = task.reading.pages() if task.row.place is None else self._pool.pages(task.row, task.known)
            self._store.add(task.known, task.job.salt)

    def _emit(self, task: Task, event: Event) -> None:
        if task.cancelled:
            return
        try:
            task.job.emit(event)
        except Exception:  # nobody listens any more
            LOG.exception("an event could not be handed out")
            task.cancelled = True

    def _shrink(self) -> None:
        """Copy the rows to a smaller state where few are left for a while."""
        rows, _ = self._pool.shape
        now = time.monotonic()
        if not self._running or 4 * (len(self._running) + len(self._reading)) > rows:
            self._large_since = None
        elif self._large_since is None:
            self._large_since = now
        elif now - self._large_since > _SHRINK_SECONDS:
            self._pool.shrink()
            self._large_since = None

    def _die(self, fault: Exception) -> None:
        """Fail all jobs: nothing that runs can be trusted."""
        LOG.error("the engine has died", exc_info=fault)
        for task in self._let_go_of_all(fault):
            self._emit(task, Failed(fault))
        self._on_death(fault)

    def _note(self) -> None:
        """Bring the numbers of the status up to date."""
        rows, slots = self._pool.shape
        runner, status = self._llm.runner, self.status
        status.cache_bytes = rows * slots * self._pool.token_bytes
        status.stored_bytes, status.stored = self._store.bytes, len(self._store)
        status.programs, status.compile_seconds = runner.programs, runner.timings.compile_seconds
        with self._changed:
            status.running = len(self._running)
            status.waiting = len(self._tasks) - len(self._running)
