"""What an engine is asked, and what it says: jobs, the events of each, and the engine's own numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from jllama.generation import Completion
from jllama.settings import Settings

State = Literal["loading", "serving", "draining", "dead"]


class Full(Exception):
    """No more jobs can wait; there may be room after `retry_after` seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the queue is full: try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Draining(Exception):
    """The engine takes no jobs: it isn't ready yet, or about to end."""


class Dead(Exception):
    """The engine has ended, by a fault or because it was closed."""


@dataclasses.dataclass(frozen=True)
class Timings:
    """When what happened to a job, in seconds since it was submitted.

    Args:
      queue: its prompt began to be read.
      first_token: the first token was there.
      request: it ended.
    """

    queue: float
    first_token: float
    request: float


@dataclasses.dataclass(frozen=True)
class Started:
    """A prompt begins to be read, of which so many tokens were known from others."""

    cached_tokens: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text, and the tokens that it begins or ends with; joined, those of the completion.

    Args:
      text: "" only in a last piece, where tokens are left whose text was cut off.
      tokens: whose text begins in it.
      logprobs: theirs, as in `Completion`.
      top_logprobs: the same.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]


@dataclasses.dataclass(frozen=True)
class Finished:
    """The whole answer."""

    completion: Completion
    cached_tokens: int
    timings: Timings


@dataclasses.dataclass(frozen=True)
class Failed:
    """Why there is no whole answer."""

    error: Exception


Event = Started | Piece | Finished | Failed


@dataclasses.dataclass(eq=False)
class Job:
    """A prompt to continue.

    Args:
      ids: of the prompt.
      settings: how it is continued.
      emit: called with each event, on the engine's thread; it must not wait for anything.
      salt: what was read of a prompt is used again for jobs of the same salt alone.
      prompt: its text, for the completion.
    """

    ids: list[int]
    settings: Settings
    emit: Callable[[Event], None]
    salt: str = ""
    prompt: str = ""


@dataclasses.dataclass
class Status:
    """How an engine is, and what it has done; read it from any thread.

    Args:
      state: "loading" until it has started; "dead" after a fault, or once it is closed.
      running: answers being generated.
      waiting: prompts that wait or are being read.
      cache_bytes: of the caches of what runs.
      stored_bytes: of what is kept for prompts to come.
      stored: how many prompts or answers are kept.
      prompt_tokens: of prompts that were begun, with those that were known.
      cached_prompt_tokens: those that were known.
      generated_tokens: handed out.
      finished: answers by their finish_reason, and "failed" and "cancelled".
      programs: compiled or loaded.
      compile_seconds: which that took.
    """

    state: State = "loading"
    running: int = 0
    waiting: int = 0
    cache_bytes: int = 0
    stored_bytes: int = 0
    stored: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "failed", "cancelled"), 0)
    )
    programs: int = 0
    compile_seconds: float = 0.0
