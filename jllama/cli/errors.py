"""Errors as one sentence for whoever typed the command."""

from __future__ import annotations

import os
import re
import sys

from absl import flags

_MEMORY = re.compile("RESOURCE_EXHAUSTED|bad_alloc|out of memory", re.IGNORECASE)
_ADDRESS_SPACE = 1_900_000_000  # bytes: with less, JAX's libraries end the process while they are imported


def sentence(e: Exception) -> str | None:
    """Say what went wrong; None for a fault of jllama itself, whose traceback is wanted."""
    text = str(e)
    if isinstance(e, MemoryError) or (_is_jax(e) and _MEMORY.search(text)):
        return f"out of memory: {_memory_hint(text)}"
    if _is_jax(e) and sys.modules["jax"].process_count() > 1:
        return f"another process ended, or can't be reached: {text}"
    if isinstance(e, ModuleNotFoundError) and not (e.name or "").startswith("jllama"):
        return (
            f"the Python package {e.name} is missing: `pip install .` installs jllama and what it needs, from a clone"
        )
    if isinstance(e, OSError) and e.strerror and isinstance(e.filename, str):
        return f"{e.filename}: {e.strerror}"
    if isinstance(e, flags.Error | ValueError | OSError | FloatingPointError):
        return text
    return None


def _is_jax(e: Exception) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(e, jax.errors.JaxRuntimeError)


def _memory_hint(text: str) -> str:
    tried = f" ({found[0]})" if (found := re.search(r"\b[\d.]+ ?[KMGT]i?B|\b\d+ bytes", text)) else ""
    return f"the model and its cache don't fit{tried}: try --dtype=int8, a smaller --batch_size or a smaller model"


def check_address_space() -> None:
    """Raise ValueError where the system gives a process less memory than JAX takes to start, which would abort."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _ADDRESS_SPACE:
        raise ValueError(
            f"out of memory: `ulimit -v` allows {limit / 1e9:.1f} GB of address space, and JAX alone takes 2 GB"
        )


def check_devices() -> None:
    """Raise ValueError where JAX finds no device to run on."""
    import jax

    try:
        jax.devices()
    # What JAX raises depends on the platform, down to assertions.
    except (RuntimeError, AssertionError) as e:
        names = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
        asked = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
        expected = f"{asked[0]} names a device that is not here" if asked else "no device was found"
        raise ValueError(f"JAX can't start: {expected} {str(e)[:200]}".strip()) from e
