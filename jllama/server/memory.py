"""How much memory there is for caches, and how much of it jobs take."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jllama.server.jobs import Job
from jllama.server.pages import PagedPool
from jllama.server.task import Task

READERS = 4  # prompts that are read in turn: a short one needn't wait for the end of a long one


class Budget:
    """What the rows of a pool may take, those whose prompts are read too.

    Attributes:
      bytes: at most.
    """

    def __init__(self, pool: PagedPool, most: int) -> None:
        self.bytes = most
        self._pool = pool

    def slots(self, job: Job) -> int:
        """Return the slots of a cache that holds a job to its end."""
        context = self._pool.runner.params.config.max_seq_len
        return self._pool.slots_for(min(len(job.ids) + job.settings.max_new_tokens, context) + 1)

    def fits(self, tasks: list[Task]) -> bool:
        """Whether there is memory for tasks up to the end of all."""
        if self.needed(tasks, self._pool.shape[1]) > self.bytes:
            self._pool.shrink()  # longer rows have gone
        return self.needed(tasks, self._pool.shape[1]) <= self.bytes

    def needed(self, tasks: list[Task], slots: int = 0) -> int:
        """Return the bytes of tasks, in a state of `slots` or more that may be copied to a larger one."""
        rows, slots = self._pool.local_rows(len(tasks)), max(slots, *(task.slots for task in tasks))
        reading = sum(task.slots for task in tasks[:READERS])
        tokens: int = rows * slots + rows * slots // 2 + reading
        return tokens * self._pool.token_bytes


def available() -> int:
    """Return the bytes that can still be had where arrays lie: on the accelerator, or of the machine."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"]) - int(statistics["bytes_in_use"])
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
        there = int(fields["MemAvailable"].split()[0]) * 1024
        return min([there, *_group()])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _group() -> list[int]:
    """Return what the control group of this process, such as a container's, lets it have beside what it has."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return []
    return [] if limit == "max" else [int(limit) - int(used)]
