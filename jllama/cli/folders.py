"""The user's own folders, and the compiled programs that JAX keeps in one of them."""

from __future__ import annotations

import contextlib
import os
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

_CACHE_BYTES = 10**9
_DAMAGED = "Error reading persistent compilation cache entry"


def user_folder(variable: str, default: str) -> Path | None:
    """Return jllama's folder in the one that an environment variable names, or in `default` of the user's home.

    None where there is no home: programs in containers run as users that nobody made.
    """
    if base := os.environ.get(variable):
        return Path(base) / "jllama"
    try:
        return Path.home() / default / "jllama"
    except RuntimeError:
        return None


def expanded(path: str) -> Path:
    """Return a path with `~` as a shell would have it: after `--flag=` a shell leaves it alone."""
    return Path(os.path.expanduser(path))


def for_programs(folder: str | None) -> Path | None:
    """Return the folder for compiled programs: none for "", for None the one in the user's cache if that can be.

    Raises:
      OSError: the folder that was named can't be made.
    """
    if folder == "":
        return None
    if folder is None:
        if (cache := user_folder("XDG_CACHE_HOME", ".cache")) is None:
            return None
        path = cache / f"jaxlib-{version('jaxlib')}"  # another jaxlib can't use them
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            return None
    else:
        path = expanded(folder)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def keep_programs(path: Path) -> None:
    """Let JAX keep the programs there that `Programs` doesn't: those of a mesh and of the benchmark."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(path))  # type: ignore[no-untyped-call]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # type: ignore[no-untyped-call]
    _prune(path)
    _replace_damaged(path)


def _prune(folder: Path) -> None:
    """Remove the oldest programs where there are too many: JAX itself bounds them only with another library."""
    found = []
    for file in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            found.append((file.stat().st_mtime, file.stat().st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total > _CACHE_BYTES:
            file.unlink(missing_ok=True)
            total -= size


def _replace_damaged(folder: Path) -> None:
    """Clear the folder when JAX meets a damaged program: it warns of it at every start, and never replaces one."""
    show = warnings.showwarning

    def showwarning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if str(message).startswith(_DAMAGED):
            for file in folder.glob("*-cache"):
                file.unlink(missing_ok=True)
        else:
            show(message, *args, **kwargs)

    warnings.showwarning = showwarning
