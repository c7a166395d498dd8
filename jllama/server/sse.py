"""Server-sent events as OpenAI's clients read them: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from __future__ import annotations

import json
from typing import Any

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events
}
KEEP_ALIVE = b":\n\n"  # a comment, without an id or a name: some parsers take those for an event
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Write a value as an event: JSON in ASCII, as there are clients that take U+2028 for the end of a line."""
    return b"data: " + json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
