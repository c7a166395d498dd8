"""How much memory there is for caches."""

from __future__ import annotations

import os
from pathlib import Path

import jax


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
