"""Errors as OpenAI's clients know them: a status, and an envelope that says what was wrong with which field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jllama.errors import printable
from jllama.server.jobs import Dead, Draining, Full

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
FAULTS = (Full, Draining, Dead, FloatingPointError, ValueError)  # that a request can meet, and is told of
_RETRY_SECONDS = 5  # of a server that is loading, or about to be replaced
_LONGEST = 800  # characters of a message


class ApiError(Exception):
    """What a request is answered with in place of what it asked for.

    Args:
      status: of HTTP.
      message: for a person.
      param: the field that is wrong, None where it is none in particular.
      code: a word for programs.
      kind: the envelope's `type`; None: that of the status.
      headers: of the answer.
      **more: further fields of the envelope.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        message = printable(message)
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_LONGEST]}...")
        self.status = status
        self.headers = dict(headers or {})
        kind = kind or _TYPES.get(status, "invalid_request_error")
        self.envelope = {"error": {"message": str(self), "type": kind, "param": param, "code": code, **more}}


def refusal(param: str | None, message: str, **more: Any) -> ApiError:
    """Return the error for a field that can't be used."""
    return ApiError(400, message, param=param, **more)


def unavailable(message: str, code: str) -> ApiError:
    """Return the error of a server that doesn't answer now."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(_RETRY_SECONDS)})


def from_fault(fault: Exception) -> ApiError:
    """Return what a client is told of a fault; of our own ones no more than that there was one."""
    match fault:
        case ApiError():
            return fault
        case Full():
            seconds = max(1, round(fault.retry_after))
            headers = {"Retry-After": str(seconds)}
            return ApiError(429, f"the queue is full: try again in {seconds} s", code="queue_full", headers=headers)
        case Draining():
            return unavailable("the server is about to end", "draining")
        case Dead():
            return unavailable("the engine has died", "dead")
        case FloatingPointError():
            return ApiError(500, str(fault), code="non_finite")
        case ValueError():
            return refusal(None, str(fault))
        case MemoryError():
            return ApiError(500, "out of memory", code="out_of_memory")
    return ApiError(500, "the server has a fault; its log says more", code="internal_error")
