"""Reads files of prompts: plain text with a prompt a line, or JSON lines that bring settings of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeVar

from jllama.errors import quoted
from jllama.generation import Prompt
from jllama.settings import Settings

T = TypeVar("T")
_AHEAD = 1024  # items that are read before they are asked for


class Request(NamedTuple):
    """A prompt of a file, and the name that its answer is to have."""

    prompt: Prompt
    id: str | int | None = None


def read(path: str, default: Settings, encode: Callable[[Prompt], Sequence[int]]) -> Iterator[Request]:
    """Read prompts lazily from `path`, or from standard input if it is `-`.

    In a `.jsonl` file every line is an object with a `prompt` and, if it likes, an `id` and fields of `Settings` that
    override `default`; blank lines are passed over. A `.json` file is an array of such objects or texts, read at once.
    In any other file every line is a prompt, an empty one too. `encode` gives a prompt's ids, and raises
    ValueError where it can't be continued.

    Raises:
      ValueError: a line that is not what it should be, by number.
      OSError: the file can't be read.
    """
    with _open(path) as file:
        is_array = path.endswith(".json")
        for number, raw in enumerate(_array(path, file) if is_array else file, 1):
            try:
                if isinstance(raw, bytes):
                    raw = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                    if path.endswith(".jsonl"):
                        if not raw.strip():
                            continue
                        raw = json.loads(raw)
                request = _request(raw, default)
                prompt = dataclasses.replace(request.prompt, ids=tuple(encode(request.prompt)))
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{path}, {'item' if is_array else 'line'} {number}: {e}") from e
            yield request._replace(prompt=prompt)


def _open(path: str) -> BinaryIO:
    """Open a file; standard input anew, because Python's own must not be in use by a thread when the program ends."""
    if path != "-":
        return open(path, "rb")
    file = standard_input()
    try:
        return open(os.dup(file.fileno()), "rb")
    except OSError:  # it is none of the system's files
        return file


def _array(path: str, file: BinaryIO) -> list[Any]:
    try:
        items = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: {e}") from e
    if not isinstance(items, list):
        raise ValueError(f"{path}: expected an array of prompts; for an object a line, the name ends in .jsonl")
    return items


def _request(entry: Any, default: Settings) -> Request:
    if isinstance(entry, str):
        return Request(Prompt(entry, default))
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ValueError('expected an object with a "prompt" that is a string')
    fields = dict(entry)
    text, name = fields.pop("prompt"), fields.pop("id", None)
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise ValueError(f"id = {quoted(name)}: expected a string or an integer")
    return Request(Prompt(text, default.override(fields)), name)


class Arriving(Iterator[T]):
    """What comes from an iterator that waits, read by a thread of its own, so that others need not wait with it."""

    def __init__(self, items: Iterator[T]) -> None:
        self._queue = queue.Queue[tuple[T | None, BaseException | None]](_AHEAD)
        threading.Thread(target=self._read, args=(items,), daemon=True).start()

    def _read(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._queue.put((item, None))
        except Exception as e:  # raised where it is asked for
            self._queue.put((None, e))
        else:
            self._queue.put((None, StopIteration()))

    def ready(self) -> bool:
        """Whether the next item, or the end, is here."""
        return not self._queue.empty()

    def __next__(self) -> T:
        item, end = self._queue.get()
        if end is not None:
            self._queue.put((None, end))
            raise end
        return item  # type: ignore[return-value]


def standard_input() -> BinaryIO:
    """Return standard input as bytes.

    Raises:
      ValueError: it is closed.
    """
    if sys.stdin is None:
        raise ValueError("standard input is closed: expected something to read")
    return sys.stdin.buffer
