"""The life of a server: it listens, loads its model, serves, drains, and ends."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from jllama.llm import LLM
from jllama.server.app import build
from jllama.server.service import Service

_END_SECONDS = 5  # that open connections get after everything has been said
_DEAD_SECONDS = 1.0  # in which a dead server still says that it is
_KEEP_ALIVE_SECONDS = 75  # of a silent connection: longer than clients keep theirs


class Server(uvicorn.Server):
    """A server of a service. The first signal lets what runs come to its end, the second ends it at once.

    Args:
      service: what it serves.
      grace: how many seconds what runs gets to end after the first signal.
    """

    def __init__(self, service: Service, grace: float) -> None:
        self._service = service
        self._grace = grace
        self._draining = False
        service.on_end = self._end_soon
        config = uvicorn.Config(
            build(service),
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_END_SECONDS,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain, or leave."""
        # Nothing can break off what XLA is compiling, and an orderly end would wait for it.
        if self._draining or self._service.state == "loading":
            os._exit(128 + sig)
        self._draining = True
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        if self._service.engine is not None:
            self._service.engine.drain(self._grace)
        self.should_exit = True

    def _end_soon(self) -> None:
        def end() -> None:
            self.should_exit = True

        timer = threading.Timer(_DEAD_SECONDS if self._service.engine else 0, end)
        timer.daemon = True
        timer.start()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 is any that is free.

    Raises:
      ValueError: that can't be.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as e:
        raise ValueError(f"can't listen at {host}, port {port}: {e.strerror or e}") from e


def serve(
    service: Service,
    make: Callable[[], LLM],
    at: socket.socket,
    *,
    grace: float,
    starting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal comes.

    Args:
      service: what is served.
      make: loads the model.
      at: the socket.
      grace: how many seconds what runs gets to end.
      starting: what lasts until the model is there.
      ready: called, on another thread, as the model is there.

    Raises:
      Exception: what the model could not be loaded for, or what the engine died of.
    """
    server = Server(service, grace)

    def load() -> None:
        with starting():
            service.load(make)
        if service.fault is None:
            ready()

    threading.Thread(target=load, daemon=True).start()
    server.run(sockets=[at])
    if service.fault is not None:
        raise service.fault
    if service.engine is not None:
        service.engine.close()
