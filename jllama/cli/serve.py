"""`jllama serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from jllama.checkpoint import hub
from jllama.cli import output
from jllama.cli.flags import FLAGS
from jllama.cli.folders import expanded
from jllama.cli.loading import check_source, load
from jllama.cli.settings import from_flags
from jllama.cli.status import waiting

if TYPE_CHECKING:
    from jllama.server.service import Service

_KEYS = "JLLAMA_API_KEY"  # in the environment
_PROGRESS_SECONDS = 1.0


def main() -> None:
    """Serve a model until Ctrl-C or SIGTERM."""
    try:
        from jllama.server import serving
        from jllama.server.service import Options, Service
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("jllama"):
            raise
        raise ValueError(
            f"serve needs the Python package {(e.name or '').partition('.')[0]}: pip install 'jllama[serve]'"
        ) from e
    if FLAGS.coordinator:
        raise ValueError("serve runs in one process: expected no --coordinator")
    check_source()
    settings = from_flags()
    options = Options(
        model=_name(),
        settings=settings,
        most=FLAGS.max_new_tokens if FLAGS["max_new_tokens"].present else None,
        max_rows=FLAGS.max_rows,
        max_queue=FLAGS.max_queue,
        prefix_cache=FLAGS.prefix_cache,
        strict_model=FLAGS.strict_model,
        keys=_keys(),
        host=FLAGS.host,
        origins=tuple(origin.rstrip("/") for origin in FLAGS.cors_origin),
    )
    at = serving.listen(FLAGS.host, FLAGS.port)
    host, port = at.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    service = Service(options)
    _log(service)
    if not options.keys and not _is_loopback(host):
        output.note(f"anyone who can reach {host} can use this server: --api_key_file makes them bring a key")

    def ready() -> None:
        output.note(f"{options.model} is served at {address} (Ctrl-C ends it)")

    def starting() -> contextlib.AbstractContextManager[None]:
        return waiting("starting")

    serving.serve(service, lambda: load()[0], at, grace=FLAGS.grace, starting=starting, ready=ready)


def _name() -> str:
    """The model's name in answers: what was asked for, of a path its last part."""
    source: str = FLAGS.config or FLAGS.checkpoint
    if not FLAGS.config and hub.is_name(source):
        return source.removeprefix("hf://")
    return expanded(source).resolve().name


def _keys() -> tuple[str, ...]:
    """The keys of a file, one a line, and that of the environment."""
    lines = [os.environ.get(_KEYS, "")]
    if FLAGS.api_key_file:
        path = expanded(FLAGS.api_key_file)
        try:
            lines += path.read_text("utf-8").splitlines()
        except UnicodeDecodeError as e:
            raise ValueError(f"{path}: expected keys, one a line, in UTF-8") from e
    keys = tuple(filter(None, map(str.strip, lines)))
    if FLAGS.api_key_file and not keys:
        raise ValueError(f"{FLAGS.api_key_file}: no key in it: expected one a line")
    return keys


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


class _Lines(logging.Handler):
    """Lines on standard error, in the place of whatever says there how far things are."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        text = self.format(record)
        print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _log(service: Service) -> None:
    """Log to standard error: warnings of the libraries, what is answered, and on a terminal what runs."""
    handler = _Lines()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for name, level in (("jllama", logging.DEBUG if FLAGS.verbose else logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    if sys.stderr.isatty():
        threading.Thread(target=_show, args=(service,), daemon=True).start()


def _show(service: Service) -> None:
    """Say in the last line of a terminal what runs, for as long as anything does."""
    before, shown = 0, False
    while True:
        time.sleep(_PROGRESS_SECONDS)
        status = None if service.engine is None else service.engine.status
        if status is None or not (status.running or status.waiting or shown):
            continue
        rate = (status.generated_tokens - before) / _PROGRESS_SECONDS
        before, shown = status.generated_tokens, bool(status.running or status.waiting)
        text = f"{status.running} running, {status.waiting} waiting, {rate:.0f} tokens/s" if shown else ""
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
