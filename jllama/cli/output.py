"""What goes to standard output and standard error, and in which form."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from jllama.errors import printable

if TYPE_CHECKING:
    from jllama.llm import LLM

# Control characters, but for tabs and line ends: on a terminal they could move the cursor, or worse.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def prepare() -> None:
    """Make sure that no character is too much for standard output: what its encoding lacks is written as an escape."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def write(text: str) -> None:
    """Print what a model wrote, without a line end; on a terminal its control characters are shown, not obeyed."""
    if sys.stdout.isatty():
        text = _CONTROL.sub(_escape, text.replace("\r\n", "\n"))
    print(text, end="", flush=True)


def json_line(value: Any) -> str:
    """Write a value as one line of JSON that standard output can take."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    line = json.dumps(value, ensure_ascii=not is_utf8)
    return _CONTROL.sub(_escape, line) if sys.stdout.isatty() else line


def one_line(text: str) -> str:
    """Return a message in one line, with what isn't printable escaped."""
    return printable(" ".join(text.split()))


def note(message: object) -> None:
    """Say something in one line on standard error."""
    print(f"jllama: {one_line(str(message))}", file=sys.stderr)


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def timings(llm: LLM, load_seconds: float, *, verbose: bool) -> None:
    """Say on standard error where the time went: briefly to people at a terminal, unless they ask for more."""
    import jax

    if jax.process_index():  # the first of several processes does
        return
    t = llm.timings
    phases = [("prompt", t.prompt_tokens, t.prompt_seconds), ("generation", t.decode_tokens, t.decode_seconds)]
    if verbose or not sys.stderr.isatty():
        rates = [f"{name} {_rate(tokens, seconds)}" for name, tokens, seconds in phases if seconds]
        if t.guesses:
            rates.append(f"{t.accepted} of {t.guesses} guesses right")
        line = ", ".join([f"load {load_seconds:.2f} s", f"compile {t.compile_seconds:.2f} s", *rates])
    else:
        started = load_seconds + t.compile_seconds
        rates = [f"{name} {tokens / seconds:.0f} tokens/s" for name, tokens, seconds in phases if seconds]
        line = f"[{', '.join([f'ready after {started:.1f} s', *rates])}]"
    print(line, file=sys.stderr)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)"
