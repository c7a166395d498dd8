"""Several processes of one run: joining them, agreeing, and fetching what they have between them."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

# Seconds without a sign of life after which a process counts as dead, and for which the end of the others is awaited.
_HEARTBEAT = 20
_SHUTDOWN = 30


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None) -> bool:
    """Join the other processes of a run, whose devices then are one set; when one of them dies, the others end.

    Args:
      coordinator: HOST:PORT where process 0 listens; or "auto", where JAX finds all three out by itself (TPU pods,
        SLURM, Open MPI, Kubernetes).
      num_processes: how many there are.
      process_id: which of them this is, from 0.

    Returns:
      Whether there are others to join: not if all three are None.

    Raises:
      ValueError: the three don't go together, or the processes don't find each other.
    """
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        return False
    auto = coordinator == "auto" and given[1:] == (None, None)
    if not auto and not (
        coordinator
        and re.fullmatch(r".+:\d+", coordinator)
        and num_processes is not None
        and process_id is not None
        and 0 <= process_id < num_processes
    ):
        raise ValueError(
            f"coordinator, num_processes, process_id = {', '.join(map(str, given))}: expected HOST:PORT, the number of "
            'processes and which of them this is, from 0; or "auto" alone'
        )
    try:
        jax.distributed.initialize(
            None if auto else coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=_SHUTDOWN,
        )
    except (ValueError, RuntimeError) as e:
        hint = ": expected a TPU pod, SLURM, Open MPI or Kubernetes" if auto else ""
        raise ValueError(f"coordinator = {coordinator}: can't connect to the other processes{hint} ({e})") from e
    return True


def agree(mesh: Mesh | None, tree: Any) -> Any:
    """Return the host arrays that the first process has, on all processes of a mesh."""
    return tree if mesh is None or jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def get(tree: Any) -> Any:
    """Fetch small arrays as NumPy's, whole on every process."""
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
