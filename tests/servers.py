"""What the tests of the server share: a model small enough to start one in a moment, and servers on threads."""

import contextlib
import copy
import functools
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import oracle
import tiny
from trained import write_tokenizer

from jllama import tokenizer as tokenizers
from jllama.chat import Template
from jllama.config import Config
from jllama.llm import LLM
from jllama.server import serving
from jllama.server.service import Options, Service

CONFIG = Config(16, 24, 1, 2, 1, 330, 256)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}{{ extra }}"
)
JSON = {"Content-Type": "application/json"}


@functools.cache
def model() -> LLM:
    """A model with random weights, whose tokenizer knows every byte. The last token, all NaN, is never drawn."""
    weights = oracle.random_weights(CONFIG, tied=False)
    weights["tok_embeddings.weight"][-1] = np.nan
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder) / "tokenizer.bin", CONFIG.vocab_size)
        found = tokenizers.load(Path(folder) / "tokenizer.bin")
    found.unused = frozenset({CONFIG.vocab_size - 1})
    return LLM(tiny.params(weights, CONFIG), found, template=Template(TEMPLATE, found))


def changed(llm: LLM, before: Callable[[Any, Any], object]) -> LLM:
    """Return a model whose programs are the same, but for what comes before each, and that doesn't end a text."""
    llm = copy.copy(llm)
    call, llm.runner, llm.tokenizer = llm.runner.call, copy.copy(llm.runner), copy.copy(llm.tokenizer)

    def calling(program: Any, *args: Any, **static: Any) -> Any:
        before(program, args)
        return call(program, *args, **static)

    llm.runner.call = calling  # type: ignore[method-assign]
    llm.tokenizer.stop_ids = (CONFIG.vocab_size - 1,) * len(llm.tokenizer.stop_ids)
    return llm


class Served:
    """A server on a thread.

    Attributes:
      url: where it is.
      client: one of httpx's, for it.
    """

    def __init__(self, llm: LLM | None, options: Options, grace: float = 5.0) -> None:
        self.service = Service(options)
        self.server = serving.Server(self.service, grace)
        if llm is not None:
            self.service.load(lambda: llm)
            if self.service.fault:
                raise self.service.fault
        at = serving.listen("127.0.0.1", 0)
        self.port = at.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [at]}, daemon=True)
        self.thread.start()

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields)

    def raw(self, path: str, fields: Any, *, headers: dict[str, str] | None = None) -> bytes:
        """Return the very bytes of an answer, headers first, up to where the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(request(path, fields, {"Connection": "close", **(headers or {})}))
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def close(self) -> None:
        self.client.close()
        if self.service.engine is not None:
            self.service.engine.close()
        self.server.should_exit = True
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


def request(path: str, fields: Any, headers: dict[str, str]) -> bytes:
    """Return a POST of JSON as it goes over the wire."""
    body = json.dumps(fields).encode()
    lines = {"Host": "127.0.0.1", **JSON, "Content-Length": str(len(body)), **headers}
    return "\r\n".join([f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in lines.items()), "", ""]).encode() + body


@contextlib.contextmanager
def served(llm: LLM | None, grace: float = 5.0, **options: Any) -> Iterator[Served]:
    """Serve a model for as long as this lasts."""
    server = Served(llm, Options(**{"model": "tiny", "max_rows": 2, "max_queue": 16, **options}), grace)
    try:
        yield server
    finally:
        server.close()


def events(body: bytes) -> list[Any]:
    """Return the JSON of a stream's events, after a look at every byte: one [DONE], last, and nothing but data."""
    *found, rest = body.split(b"\n\n")
    assert rest == b""
    found = [event for event in found if event != b":"]
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in found), body
    assert found.pop() == b"data: [DONE]"
    return [json.loads(event[6:]) for event in found]


def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def error(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """Return the envelope of an error, after a look at its form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= found.keys()
    assert found["param"] == param
    assert isinstance(found["message"], str)
    assert found["message"]
    return found


def strict_client(server: Served) -> openai.OpenAI:
    """OpenAI's client, which takes nothing but what its models describe, and asks once."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
