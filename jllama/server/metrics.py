"""What a server counts, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jllama.server.engine import Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """Counters and histograms of one server.

    Args:
      engine: returns what runs, None while there is nothing.
    """

    def __init__(self, engine: Callable[[], Engine | None]) -> None:
        self._registry = CollectorRegistry()

        def histogram(name: str, help: str, bounds: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"jllama_{name}", help, buckets=bounds, registry=self._registry)

        self.requests_total = Counter(
            "jllama_requests", "Requests answered.", ["endpoint", "code"], registry=self._registry
        )
        self.request_seconds = histogram("request_seconds", "From a request's arrival to its end.")
        self.queue_seconds = histogram("queue_seconds", "From a request's arrival to the reading of its prompt.")
        self.time_to_first_token_seconds = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first piece of text."
        )
        self.inter_token_seconds = histogram(
            "inter_token_seconds", "Between two tokens of an answer, on the average of a piece.", _TOKEN_SECONDS
        )
        self._registry.register(_EngineMetrics(engine))

    def text(self) -> bytes:
        """Return all of them as Prometheus reads them."""
        return generate_latest(self._registry)


class _EngineMetrics:
    """The engine's own numbers, as they are when they are asked for."""

    def __init__(self, engine: Callable[[], Engine | None]) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine()
        if engine is None:
            return
        status = engine.status
        for name, help, value in (
            ("running", "Answers being generated.", status.running),
            ("waiting", "Prompts that wait or are being read.", status.waiting),
            ("cache_bytes", "Caches of what runs, and of earlier prompts.", status.cache_bytes + status.stored_bytes),
        ):
            yield GaugeMetricFamily(f"jllama_{name}", help, value)
        for name, help, count in (
            ("prompt_tokens", "Tokens of prompts, those that were cached among them.", status.prompt_tokens),
            ("cached_prompt_tokens", "Tokens of prompts that were cached.", status.cached_prompt_tokens),
            ("generated_tokens", "Tokens of answers.", status.generated_tokens),
            ("compile_seconds", "Seconds of compiling and loading programs.", status.compile_seconds),
        ):
            yield CounterMetricFamily(f"jllama_{name}", help, count)
        finished = CounterMetricFamily("jllama_finished", "Answers that ended, by the reason.", labels=["reason"])
        for reason, number in list(status.finished.items()):
            finished.add_metric([reason], number)
        yield finished
