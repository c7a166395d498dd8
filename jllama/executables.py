"""A folder of compiled programs, kept from one start to the next: what is in it need not be traced or compiled again.

What is loaded from it is run, so a folder that others can write to is not used.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import stat
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax.experimental import serialize_executable

from jllama import kernels

_MAGIC = b"jllama executable 1\n"
_DIGEST = hashlib.sha256().digest_size
_SUFFIX = ".executable"
_PART = ".part"  # of an entry that is being written, or never was to its end
_LIMIT = 10**9  # bytes of a folder; the entries that were not used for the longest time go
# What JAX is told that doesn't change a program, by the beginning of its names.
_NO_MATTER = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_logging", "jax_enable_compilation_cache")


def open_folder(path: str | Path) -> Executables | None:
    """Open a folder of programs, made if it isn't there; None, with a warning, if it can't be used or trusted."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = _distrust(folder.resolve(strict=True))
    except OSError as e:
        fault = str(e)
    if fault:
        logging.log_first_n(logging.WARNING, "compiled programs are not kept: %s", 1, fault)
        return None
    return Executables(folder)


def _distrust(folder: Path) -> str | None:
    """Say why others could put programs into a folder; None if they can't."""
    if not hasattr(os, "getuid"):
        return "this system doesn't tell who may write to a folder"
    for place in (folder, *folder.parents):
        status = place.stat()
        if status.st_uid not in ((os.getuid(),) if place == folder else (os.getuid(), 0)):
            return f"{place} belongs to another user: expected a folder of your own"
        writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if writable and (place == folder or not status.st_mode & stat.S_ISVTX):
            return f"{place} can be written to by others: expected a folder that only you can write to"
    return None


class Executables:
    """Compiled programs of a single device, in a folder that can be trusted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def key(self, name: str, args: Any, static: dict[str, Any], device: jax.Device) -> str:
        """Name a program after everything that it depends on."""
        leaves, tree = jax.tree.flatten(args)
        shapes = [(leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False)) for leaf in leaves]
        parts = (name, str(tree), shapes, sorted(static.items()), str(device), *environment(device))
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    def get(self, key: str, device: jax.Device) -> Any | None:
        """Load a program; None where it isn't there, or the file is damaged or foreign."""
        try:
            path = self.folder / (key + _SUFFIX)
            raw = path.read_bytes()
            head, body = raw[: len(_MAGIC) + _DIGEST], raw[len(_MAGIC) + _DIGEST :]
            if head != _MAGIC + hashlib.sha256(body).digest():
                return None
            kernels.available()  # which makes them known to XLA, before a program that uses them is loaded
            payload, arguments, result = pickle.loads(body)
            program = serialize_executable.deserialize_and_load(
                payload, arguments, result, backend=device.client, execution_devices=[device]
            )
            os.utime(path)
        except Exception:  # whatever is wrong with it, the program is compiled and the file replaced
            return None
        return program

    def put(self, key: str, compiled: Any) -> None:
        """Keep a program. A backend that can't hand it out, or a full disk, is no error."""
        if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
            return  # it has come out of JAX's own cache, perhaps: such a program would be written without its code
        try:
            body = pickle.dumps(serialize_executable.serialize(compiled))
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=_PART, delete=False) as file:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
            os.replace(file.name, self.folder / (key + _SUFFIX))
            self._shrink()
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as e:
            logging.log_first_n(logging.WARNING, "a compiled program is not kept: %s", 1, e)

    def _shrink(self) -> None:
        found = sorted(((s.st_mtime, s.st_size, path) for path, s in self._entries()), reverse=True)
        total = 0
        for _, size, path in found:
            total += size
            if total > _LIMIT:
                path.unlink(missing_ok=True)

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in (p for p in self.folder.iterdir() if p.suffix in (_SUFFIX, _PART)):
            try:
                yield path, path.stat()
            except FileNotFoundError:  # another process has removed it
                continue


@functools.cache
def environment(device: jax.Device) -> tuple[str, ...]:
    """Return what programs of a device depend on beside their own function and arguments."""
    settings = {n: v for n, v in jax.config.values.items() if not n.startswith(_NO_MATTER)}
    variables = {n: v for n, v in os.environ.items() if n in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    versions = (sys.version_info[:2], jax.__version__, version("jaxlib"), device.client.platform_version)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = (device.platform, device.device_kind, jax.device_count(), jax.process_count(), os.cpu_count(), threads)
    # Naming the kernels makes them known to XLA too, as it must be before a program that uses them is loaded.
    code = (_source(), kernels.build(), _processor())
    parts = (*code, versions, devices, sorted(settings.items()), sorted(variables.items()))
    return tuple(map(str, parts))


def _source() -> str:
    """Return a digest of the package's Python."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _processor() -> str:
    """Return what machine code may rely on; where the system doesn't tell, the machine's own name."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return str(platform.uname())
    wanted = ("model name", "flags", "Features", "CPU part", "isa")
    lines = {line for line in info.read_text().splitlines() if line.split("\t")[0].strip() in wanted}
    return "\n".join([platform.machine(), *sorted(lines)])
