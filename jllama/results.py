"""A file of results, one JSON line a prompt, that a run which was broken off can go on with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jllama.prompts import Request


def check(path: Path, *, resume: bool) -> None:
    """Raise ValueError where results would mix with those of another run, OSError where there can't be a file."""
    if path.is_file() and not resume:
        raise ValueError(f"{path}: exists; expected a new file, or --resume to go on after what is in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder")


def line(answer: dict[str, Any]) -> bytes:
    """Return a result as it stands in a file."""
    return json.dumps(answer, ensure_ascii=False).encode() + b"\n"


def count(path: Path, requests: Iterable[Request], fields: Iterable[str]) -> int:
    """Count the results in a file, if it is there, and take off a last line that is not complete.

    Args:
      path: the file.
      requests: those that the results are of, in order, and more.
      fields: that each result has, beside the `id` and `top_logprobs` of those that have them.

    Raises:
      ValueError: a line is no result, or that of another prompt.
      OSError: the file can't be read or written.
    """
    if not path.exists():
        return 0
    wanted, found, good = iter(requests), 0, 0
    with open(path, "r+b") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                file.truncate(good)
                break
            request = next(wanted, None)
            try:
                result = json.loads(raw)
            except (ValueError, RecursionError):
                result = None
            if not isinstance(result, dict) or result.keys() - {"id", "top_logprobs"} != set(fields):
                raise ValueError(f"{path}, line {found + 1}: no result of such a run: expected {', '.join(fields)}")
            if request is None or (result["prompt"], result.get("id")) != (request.prompt.text, request.id):
                raise ValueError(
                    f"{path}, line {found + 1}: the result of another prompt than line {found + 1} of the file has"
                )
            found, good = found + 1, good + len(raw)
    return found
