"""Every request on its way in and out: how many at once, what the log and the metrics say of it. Pure ASGI."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jllama.errors import shown
from jllama.server.errors import ApiError, from_fault, unavailable
from jllama.server.metrics import Metrics

LOG = logging.getLogger("jllama.server")
ACCESS = logging.getLogger("jllama.access")
DETAILS = "jllama.details"  # in a scope: what the log line says beside the status, a function
_MOST_REQUESTS = 1024  # at once: files are what a process has few of
_ALWAYS = ("/health", "/metrics")


class Watch:
    """Count, time and log requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        """Stand before an app; `paths` are those that are counted each."""
        self._app = app
        self._metrics = metrics
        self._paths = paths
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, and remember it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        number = f"req-{secrets.token_hex(8)}"

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = number
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        self._active += 1
        try:
            if self._active > _MOST_REQUESTS and scope["path"] not in _ALWAYS:
                await _answer(unavailable("too many requests at once", "overloaded"), scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        except Exception as e:
            # Uvicorn would close the connection, whether or not its client knows.
            LOG.error("%s failed", number, exc_info=e)
            if status:
                raise
            await _answer(from_fault(e), scope, receive, sending)
        finally:
            self._active -= 1
            self._note(scope, status, time.monotonic() - began, number)

    def _note(self, scope: Scope, status: int, seconds: float, number: str) -> None:
        path = scope["path"]
        endpoint = path if path in self._paths else "other"
        self._metrics.requests_total.labels(endpoint, str(status)).inc()
        details: Callable[[], str] = scope.get(DETAILS, str)
        if details is not str:
            self._metrics.request_seconds.observe(seconds)
        client = (scope.get("client") or ("-",))[0]
        agent = shown(Headers(scope=scope).get("user-agent", "-"))
        level = logging.DEBUG if path in _ALWAYS else logging.INFO
        words = (client, scope["method"], shown(path), status, seconds, details() or number, agent)
        ACCESS.log(level, '%s "%s %s" %d total=%.3f %s "%s"', *words)


async def _answer(fault: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(fault.envelope, fault.status, fault.headers)(scope, receive, send)
