"""Jobs on their way in, from any thread: they are checked, queued, cancelled, and no more taken in the end."""

from __future__ import annotations

import threading
import time
from collections import deque

from jllama.generation import Answer, Prompt
from jllama.llm import LLM
from jllama.server.jobs import Dead, Draining, Full, Job, Status
from jllama.server.memory import Budget
from jllama.server.task import Task


class Intake:
    """The side of an engine that any thread may use.

    Attributes:
      status: how it is, and what it has done.
      job_seconds: what a job takes, on the average of the last ones.
    """

    def __init__(self, llm: LLM, budget: Budget, rows: int, queue: int) -> None:
        """Take jobs for a model: no more than run in so many rows, and so many beside them."""
        self.status = Status()
        self._llm = llm
        self._budget = budget
        self._rows = rows
        self._most = rows + queue
        self._changed = threading.Condition()  # guards what follows
        self._tasks: dict[Job, Task] = {}
        self._waiting = deque[Task]()
        self._deadline: float | None = None  # when what still runs is ended, once it is draining
        self._closing = False
        self._fault: Exception | None = None
        self._thread: threading.Thread | None = None
        self.job_seconds = 1.0

    def submit(self, job: Job) -> None:
        """Take a job; its events come on the engine's thread, the last of them `Finished` or `Failed`.

        Raises:
          ValueError: a prompt that the model can't read, or for which there is no memory.
          Full: too many wait.
          Draining: the engine isn't ready, or about to end.
          Dead: it has ended.
        """
        self._llm.runner.check(job.ids, job.settings)
        task = Task(
            job, Answer(self._llm.tokenizer, Prompt(job.prompt, job.settings), job.ids), self._budget.slots(job)
        )
        if (needed := self._budget.needed([task])) > self._budget.bytes:
            raise ValueError(
                f"a prompt of {len(job.ids)} tokens and its answer need {needed >> 20} MB of cache: "
                f"expected at most {self._budget.bytes >> 20} MB"
            )
        with self._changed:
            if self.status.state == "dead":
                raise Dead("the engine has ended") from self._fault
            if self.status.state != "serving":
                raise Draining(f"the engine is {self.status.state}")
            if job in self._tasks:
                raise ValueError("the job was submitted before")
            if len(self._tasks) >= self._most:
                raise Full(max(1.0, self.job_seconds * len(self._waiting) / self._rows))
            self._tasks[job] = task
            self._waiting.append(task)
            self.status.waiting += 1
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """End a job, which may have ended or never begun; at most one more event comes."""
        with self._changed:
            if (task := self._tasks.get(job)) is not None:
                task.cancelled = True
                self._changed.notify_all()

    def drain(self, grace: float) -> None:
        """Take no more jobs, and wait for the end of those that are here.

        After `grace` seconds what runs is finished with what it has, for the reason "length", and what waits fails.
        """
        with self._changed:
            deadline = time.monotonic() + grace
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
            if self.status.state in ("loading", "serving"):
                self.status.state = "draining"
            self._changed.notify_all()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._changed.wait_for(lambda: not self._tasks)

    def _wait(self) -> bool:
        """Wait until there is something to do; returns whether there is, or the engine is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._closing)
            return bool(self._tasks)

    def _let_go(self, task: Task, how: str) -> None:
        """Forget a task that has ended."""
        with self._changed:
            if task in self._waiting:
                self._waiting.remove(task)
            self._tasks.pop(task.job, None)
            self.status.finished[how] += 1
            self._changed.notify_all()

    def _let_go_of_all(self, fault: Exception) -> list[Task]:
        """Forget all tasks, take no more because of a fault, and return those that were here."""
        with self._changed:
            self._fault = fault
            self.status.state = "dead"
            tasks = list(self._tasks.values())
            self._tasks.clear()
            self._waiting.clear()
            self.status.finished["failed"] += len(tasks)
            self._changed.notify_all()
        return tasks
