"""The server behind HTTP: a model with its engine, once they are there, and the requests that run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio

from jllama.chat import ChatError, Template
from jllama.generation import Completion
from jllama.llm import LLM
from jllama.server import chat, completions, requests
from jllama.server.answers import Answers, Shape
from jllama.server.engine import Engine
from jllama.server.errors import ApiError, refusal, unavailable
from jllama.server.fields import Fields
from jllama.server.jobs import Event, Failed, Finished, Full, Job, Piece, Started, State, Timings
from jllama.server.metrics import Metrics
from jllama.server.requests import Asked
from jllama.server.scoring import PromptScores, score
from jllama.settings import Settings

T = TypeVar("T")
LOG = logging.getLogger("jllama.server")

_MOST_NAMES = 256  # of unknown fields that are remembered
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a server is told.

    Args:
      model: the name in answers.
      settings: what holds where a request doesn't say it.
      most: the most tokens of an answer where a request doesn't say it; None: as OpenAI has it, 16 for completions and
        the rest of the context for chats.
      max_rows: how many prompts run together.
      max_queue: how many wait.
      prefix_cache: bytes of cache that are kept for prompts to come.
      strict_model: whether a request for a model of another name is refused.
      keys: any of which opens the server; none: it is open.
      host: the address that it listens at.
      origins: of pages elsewhere that may ask.
    """

    model: str
    settings: Settings = dataclasses.field(default_factory=Settings)
    most: int | None = None
    max_rows: int = 8
    max_queue: int = 64
    prefix_cache: int = 2**30
    strict_model: bool = False
    keys: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    origins: tuple[str, ...] = ()


class Service:
    """A model being loaded, then served.

    Attributes:
      llm: the model, None while it is loaded.
      engine: the same.
      template: its chat template, None where there is none.
      fault: what ended it.
      on_end: called, once, from any thread, as the engine has died or could not start.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.llm: LLM | None = None
        self.engine: Engine | None = None
        self.template: Template | None = None
        self.fault: Exception | None = None
        self.created = int(time.time())
        self.on_end: Callable[[], None] = lambda: None
        self.metrics = Metrics(lambda: self.engine)
        self._preparing = 0  # requests that have not come to the engine yet
        self._threads = anyio.CapacityLimiter(2)  # for texts, so that long ones stop no event
        self._scoring = anyio.CapacityLimiter(1)
        self._unknown: set[str] = set()

    @property
    def state(self) -> State:
        """How far it is."""
        if self.fault is not None:
            return "dead"
        return "loading" if self.engine is None else self.engine.status.state

    def load(self, make: Callable[[], LLM]) -> None:
        """Load the model and start its engine, on a thread of its own; whatever goes wrong is the service's end."""
        try:
            llm = make()
            with contextlib.suppress(ChatError):
                self.template = llm.template
            options = self.options
            engine = Engine(
                llm,
                max_rows=options.max_rows,
                max_queue=options.max_queue,
                prefix_cache=options.prefix_cache,
                on_death=self.end,
            )
            engine.start()
            self.llm, self.engine = llm, engine
        except Exception as e:
            self.end(e)

    def end(self, fault: Exception) -> None:
        """Remember what ended it, and tell."""
        self.fault = self.fault or fault
        self.on_end()

    def loaded(self) -> tuple[LLM, Engine]:
        """Return the model and its engine.

        Raises:
          ApiError: they aren't there yet, or no more.
        """
        match self.state:
            case "loading":
                raise unavailable("the model is being loaded", "loading")
            case "draining":
                raise unavailable("the server is about to end", "draining")
            case "dead":
                raise unavailable("the engine has died", "dead")
        assert self.llm is not None
        assert self.engine is not None
        return self.llm, self.engine

    @contextlib.asynccontextmanager
    async def prepare(self) -> AsyncIterator[Callable[[Callable[[], T]], Awaitable[T]]]:
        """Count a request until the engine has it; yields what runs a function on a thread.

        Raises:
          Full: too many are here already.
        """
        _, engine = self.loaded()
        status, options = engine.status, self.options
        if self._preparing + status.running + status.waiting >= options.max_rows + options.max_queue:
            raise Full(engine.job_seconds * max(1.0, status.waiting / options.max_rows))
        self._preparing += 1
        try:
            yield functools.partial(anyio.to_thread.run_sync, limiter=self._threads)
        finally:
            self._preparing -= 1

    def read(self, shape: Shape, fields: Fields, key: str) -> Asked:
        """Understand a request; slow for a long prompt.

        Raises:
          ApiError: it can't be answered.
        """
        llm, _ = self.loaded()
        options, most, context = self.options, self.options.most, llm.params.config.max_seq_len
        wanted = fields.get("model", str)
        if options.strict_model and wanted not in (None, options.model):
            raise ApiError(404, f"the model here is {options.model}", param="model", code="model_not_found")
        if shape.endpoint == "chat":
            prompts = chat.prompts(fields, self.template)
            logprobs = chat.wants_logprobs(fields)
        else:
            most_prompts = options.max_rows + options.max_queue
            prompts = completions.prompts(fields, llm.tokenizer, most=most_prompts, context=context)
            logprobs = completions.wants_logprobs(fields)
            most = _COMPLETION_TOKENS if most is None else most
        asked = requests.asked(fields, prompts, options.settings, most=most, logprobs=logprobs, n_most=options.max_rows)
        if len(prompts) * asked.n > options.max_rows + options.max_queue:
            raise refusal("n", f"{len(prompts) * asked.n} answers: more than the rows and the queue hold")
        for name in ("logit_bias", "stop_token_ids"):
            try:
                llm.runner.check_ids(getattr(asked.settings, name))
            except ValueError as e:
                raise refusal(name, f"{name}: {e}") from e
        for given in prompts:
            requests.check_length(given.ids, context, asked.most)
            if asked.echo and logprobs is not None and len(given.ids) > llm.window:
                raise refusal("echo", f"log-probabilities of a prompt: expected {llm.window} tokens at most")
        requests.check_form(llm.grammars, asked)
        self._note_unknown(fields)
        salt = hashlib.sha256(f"{key}\0{asked.salt}".encode()).hexdigest() if key or asked.salt else ""
        return dataclasses.replace(asked, salt=salt)

    async def scores(self, asked: Asked) -> list[PromptScores | None]:
        """Return the log-probabilities of what is echoed, for each answer."""
        if not asked.echo or asked.logprobs is None:
            return [None] * (len(asked.prompts) * asked.n)
        llm, _ = self.loaded()
        found = [
            await anyio.to_thread.run_sync(score, llm, given.ids, limiter=self._scoring) for given in asked.prompts
        ]
        return [each for each in found for _ in range(asked.n)]

    def _note_unknown(self, fields: Fields) -> None:
        for name in requests.unknown(fields):
            if name not in self._unknown and len(self._unknown) < _MOST_NAMES:
                self._unknown.add(name)
                LOG.warning("the field %s is unknown, and ignored", name)


class Running:
    """The jobs of a request, and the events that come of them.

    Attributes:
      times: when what happened, by `time.monotonic`.
    """

    def __init__(self, service: Service, asked: Asked, answers: Answers) -> None:
        self.times: dict[str, float] = {"arrived": time.monotonic()}
        llm, self._engine = service.loaded()
        self._metrics = service.metrics
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._jobs: list[Job] = []
        self._last: dict[int, float] = {}
        context = llm.params.config.max_seq_len
        for i, choice in enumerate(answers.choices):
            given, settings = choice.given, asked.settings.of_answer(i % asked.n)
            room = context - len(given.ids)
            limit = room if asked.most is None else min(asked.most, room)
            self._add(i, given, dataclasses.replace(settings, max_new_tokens=limit), asked.salt)

    def _add(self, i: int, given: requests.Given, settings: Settings, salt: str) -> None:
        if not settings.max_new_tokens:
            self._events.put_nowait(
                (i, Finished(Completion(given.text, "", [], [], "length"), 0, Timings(0.0, 0.0, 0.0)))
            )
            return

        def emit(event: Event) -> None:  # on the engine's thread
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._events.put_nowait, (i, event))

        self._jobs.append(Job(given.ids, settings, emit, salt, given.text))

    def start(self) -> None:
        """Hand the jobs to the engine, all or none.

        Raises:
          Full, Draining, Dead: the engine takes no more.
          ValueError: a prompt that can't be read.
        """
        try:
            for job in self._jobs:
                self._engine.submit(job)
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End what still runs."""
        for job in self._jobs:
            self._engine.cancel(job)

    async def next(self) -> list[tuple[int, Event]]:
        """Wait for an event, and return those that are there, each with the number of its answer.

        Raises:
          Exception: what made a job fail; the others are cancelled.
        """
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        now = time.monotonic()
        for i, event in events:
            if isinstance(event, Failed):
                self.cancel()
                raise event.error
            self._note(i, event, now)
        return events

    def _note(self, i: int, event: Event, now: float) -> None:
        arrived = self.times["arrived"]
        if isinstance(event, Started) and "started" not in self.times:
            self.times["started"] = now
            self._metrics.queue_seconds.observe(now - arrived)
        elif isinstance(event, Piece):
            if "first" not in self.times:
                self.times["first"] = now
                self._metrics.time_to_first_token_seconds.observe(now - arrived)
            if i in self._last and event.tokens:
                self._metrics.inter_token_seconds.observe((now - self._last[i]) / len(event.tokens))
            self._last[i] = now

    def timings(self) -> dict[str, Any]:
        """Return how long it took, in seconds, for the log."""
        since = {name: f"{at - self.times['arrived']:.3f}" for name, at in self.times.items() if name != "arrived"}
        return {"queue": since.get("started", "-"), "first": since.get("first", "-")}
