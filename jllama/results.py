"""A file of results, one JSON line a prompt, that a run which was broken off can go on with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from jllama.generation import Prompt


def check(path: Path, *, resume: bool) -> None:
    """Raise ValueError where results would mix with those of another run, OSError where there can't be a file."""
    if path.is_file() and not resume:
        raise ValueError(f"{path}: exists; expected a new file, or --resume to go on after what is in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder")


def count(path: Path, prompts: Iterable[Prompt], fields: Iterable[str]) -> int:
    """Count the results in a file, if it is there, and take off a last line that is not complete.

    Args:
      path: the file.
      prompts: those that the results are of, in order, and more.
      fields: that each result has.

    Raises:
      ValueError: a line is no result, or that of another prompt.
      OSError: the file can't be read or written.
    """
    if not path.exists():
        return 0
    wanted, found, good = iter(prompts), 0, 0
    with open(path, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(good)
                break
            prompt = next(wanted, None)
            try:
                result = json.loads(line)
            except (ValueError, RecursionError):
                result = None
            if not isinstance(result, dict) or result.keys() != set(fields):
                raise ValueError(f"{path}, line {found + 1}: no result of such a run: expected {', '.join(fields)}")
            if prompt is None or result["prompt"] != prompt.text:
                raise ValueError(
                    f"{path}, line {found + 1}: the result of another prompt than line {found + 1} of the file has"
                )
            found, good = found + 1, good + len(line)
    return found
