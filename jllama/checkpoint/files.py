"""What formats share below tensors: strict JSON, and files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jllama.checkpoint.build import CheckpointError
from jllama.errors import shown


def parse_json(data: bytes, origin: str) -> dict[str, Any]:
    """Parse an object of JSON in UTF-8, in which no key comes twice.

    Raises:
      CheckpointError: `data` is something else; `origin` says where it is from.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = sorted({key for key in keys if keys.count(key) > 1}) if len(keys) < 1000 else []
            raise ValueError(f"a key comes twice: {', '.join(map(shown, twice)) or 'among thousands'}")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{origin}: no JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin}: JSON of type {type(value).__name__}, expected an object")
    return value


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path` that takes its name at the end, or is removed if something fails.

    Raises:
      CheckpointError: `path` is there and no regular file, such as a device or a folder.
      OSError: the file cannot be written.
    """
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: exists; expected a regular file, or none")
    part = _part(path)
    part.unlink(missing_ok=True)  # of a run that was killed; or a link that someone planted
    try:
        with open(part, "xb") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder beside `path` that takes its name at the end, or is removed if something fails.

    Raises:
      CheckpointError: `path` exists, and is not an empty folder.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path}: exists; expected a new folder, or an empty one")
    part = _part(path)
    part.mkdir()
    try:
        yield part
        if path.exists():
            path.rmdir()  # empty; not every system renames onto it
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _part(path: Path) -> Path:
    path = path.absolute()
    return path.with_name(f".{path.name}.{os.getpid()}.part")
