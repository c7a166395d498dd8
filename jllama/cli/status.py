"""What a person at a terminal sees while a model is loaded and compiled."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

import jax

_PATIENCE = 0.7  # seconds without a word
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on a terminal, in a line that goes again, that `what` takes long, or that a program is being compiled."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    began = time.monotonic()
    compiling: list[float] = []  # when it began

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _LOWERED:
            compiling[:] = [time.monotonic()]
        elif event == _COMPILED:
            compiling.clear()

    def show() -> None:
        shown = False
        while not done.wait(_PATIENCE if not shown else 0.1):
            now = time.monotonic()
            text = f"{what} {now - began:.0f} s"
            if compiling and now - compiling[0] > _PATIENCE:
                text = f"compiling for this model: {now - began:.0f} s (once; the next start is faster)"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            shown = True
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    jax.monitoring.register_event_duration_secs_listener(listen)
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        jax.monitoring.unregister_event_duration_listener(listen)
