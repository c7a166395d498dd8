"""Reads files of prompts: plain text with a prompt a line, or JSON lines that bring settings of their own."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO

from jllama.generation import Prompt
from jllama.settings import Settings


def read(path: str, default: Settings, check: Callable[[Prompt], object]) -> Iterator[Prompt]:
    """Read prompts lazily from `path`, or from standard input if it is `-`.

    In a `.jsonl` file every line is an object with a `prompt` and, if it likes, fields of `Settings` that override
    `default`; blank lines are passed over. In any other file every line is a prompt, an empty one too. `check` is
    called with each prompt and raises ValueError where it can't be continued.

    Raises:
      ValueError: a line that is not what it should be, by number.
      OSError: the file can't be read.
    """
    parse = _json_line if path.endswith(".jsonl") else Prompt
    with contextlib.ExitStack() as stack:
        file = standard_input() if path == "-" else stack.enter_context(open(path, "rb"))
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if parse is _json_line and not line.strip():
                    continue
                prompt = parse(line, default)
                check(prompt)
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{path}, line {number}: {e}") from e
            yield prompt


def standard_input() -> BinaryIO:
    """Return standard input as bytes.

    Raises:
      ValueError: it is closed.
    """
    if sys.stdin is None:
        raise ValueError("standard input is closed: expected something to read")
    return sys.stdin.buffer


def _json_line(line: str, default: Settings) -> Prompt:
    fields = json.loads(line)
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise ValueError('expected an object with a "prompt" that is a string')
    text = fields.pop("prompt")
    return Prompt(text, default.override(fields))
