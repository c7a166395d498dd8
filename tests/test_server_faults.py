"""What has gone wrong in other servers: clients that leave, halves of characters, full queues, engines that die."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import tiny
from servers import Served, changed, error, events, model, request, served, until

from jllama.llm import LLM
from jllama.programs import DECODE
from jllama.server import serving, streams
from jllama.server.logprobs import finite

MESSAGES = [{"role": "user", "content": "the cat"}]
LONG = {"prompt": "the cat", "max_tokens": 240, "temperature": 0}


def slowed(step: float) -> LLM:
    """A model that takes its time: seconds a token."""
    return changed(model(), lambda program, args: time.sleep(step * int(args[-1])) if program is DECODE else None)


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    """A server of two rows, which takes 5 ms a token: the longest answer takes more than a second."""
    with served(slowed(0.005), max_queue=4) as found:
        yield found


def ended(server: Served) -> int:
    """Return how many answers have come to their end."""
    finished = server.service.engine.status.finished
    return finished["stop"] + finished["length"]


def idle(server: Served) -> bool:
    status = server.service.engine.status
    return status.running == status.waiting == 0


def opened(server: Served, fields: dict[str, Any], n: int) -> socket.socket:
    """Ask for a stream and read until `n` events are there."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(request("/v1/completions", fields | {"stream": True}, {}))
    found = b""
    while found.count(b"data: ") < n:
        part = connection.recv(4096)
        assert part, found
        found += part
    return connection


@pytest.mark.parametrize("after", [3, 0])
def test_a_stream_ends_when_its_reader_goes(slow: Served, after: int) -> None:
    before = ended(slow)
    opened(slow, LONG, after).close()
    until(lambda: idle(slow), 1.0)
    assert ended(slow) == before


def test_an_answer_that_nobody_waits_for_ends(slow: Served) -> None:
    before = ended(slow)
    connection = socket.create_connection(("127.0.0.1", slow.port))
    connection.sendall(request("/v1/completions", LONG, {}))
    until(lambda: not idle(slow))
    connection.close()
    until(lambda: idle(slow), 1.0)
    assert ended(slow) == before


def test_who_leaves_the_queue_is_never_served(slow: Served) -> None:
    before = ended(slow)
    status = slow.service.engine.status
    first = [opened(slow, LONG, 1) for _ in range(2)]
    second = socket.create_connection(("127.0.0.1", slow.port))
    second.sendall(request("/v1/completions", LONG, {}))
    until(lambda: status.waiting == 1)
    with ThreadPoolExecutor() as pool:
        third = pool.submit(slow.post, "/v1/completions", **LONG | {"max_tokens": 3})
        until(lambda: status.waiting == 2)
        second.close()
        until(lambda: status.waiting == 1, 1.0)
        for each in first:
            each.close()
        assert third.result().json()["usage"]["completion_tokens"] == 3
    assert ended(slow) == before + 1


def test_a_full_queue_says_so_at_once(slow: Served) -> None:
    def ask(i: int) -> tuple[int, float, str]:
        began = time.monotonic()
        answer = slow.post("/v1/completions", **LONG | {"max_tokens": 60, "prompt": f"{i}"})
        return answer.status_code, time.monotonic() - began, answer.headers.get("retry-after", "")

    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(ask, range(40)))
    served_ = [each for each in found if each[0] == 200]
    refused = [each for each in found if each[0] == 429]
    assert {status for status, _, _ in found} == {200, 429}
    assert 4 <= len(served_) <= 10
    assert all(int(retry) >= 1 for _, _, retry in refused)
    assert max(seconds for _, seconds, _ in refused) < 1.0  # of 40 clients on threads; the server itself takes less
    until(lambda: idle(slow))
    status, waiting = slow.service.engine.status, []
    for i in range(6):
        waiting.append(opened(slow, LONG, 0))
        until(lambda i=i: status.running + status.waiting == i + 1)
    client = openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="x", prompt="a", max_tokens=1)
    for connection in waiting:
        connection.close()
    until(lambda: idle(slow))


def test_comments_keep_a_silent_stream_alive(slow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.02)
    first = [opened(slow, LONG | {"max_tokens": 60}, 1) for _ in range(2)]
    client = openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0)
    with ThreadPoolExecutor() as pool:
        asked = {"model": "x", "prompt": "a", "max_tokens": 2, "stream": True}
        chunks = pool.submit(lambda: list(client.completions.create(**asked)))
        body = slow.raw("/v1/completions", asked)
        assert chunks.result()[-1].choices[0].finish_reason == "length"
    assert body.count(b"\r\n:\n\n\r\n") >= 2  # a chunk each, while the first two were served
    for each in first:
        each.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(changed(model(), lambda program, args: None)) as found:
        yield found


def test_a_row_that_is_not_finite_fails_alone(server: Served) -> None:
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(server.post, "/v1/completions", prompt="a", max_tokens=100, seed=i) for i in range(3)]
        found = error(server.post("/v1/completions", prompt=[5, 329], max_tokens=4), 500)
        assert "non-finite" in found["message"]
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="x", prompt=[5, 329], max_tokens=4)
        with pytest.raises(openai.APIError, match="non-finite"):
            list(client.completions.create(model="x", prompt=[5, 329], max_tokens=4, stream=True))
        assert all(other.result().status_code == 200 for other in others)
    body = server.raw("/v1/completions", {"prompt": [5, 329], "max_tokens": 4, "stream": True})
    assert b'data: {"error":' in body
    assert b"[DONE]" not in body
    assert body.endswith(b"\r\n0\r\n\r\n")
    error(server.post("/v1/completions", prompt=[5, 329], max_tokens=0, echo=True, logprobs=1), 500)
    assert server.client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_refused_before_the_stream(server: Served, stream: bool) -> None:
    for length in (257, 256):
        found = error(server.post("/v1/completions", prompt=[5] * length, max_tokens=1, stream=stream), 400)
        assert (found["type"], found["n_prompt_tokens"], found["n_ctx"]) == ("exceed_context_size_error", length, 256)
        assert str(length) in found["message"]
        assert "256" in found["message"]
    found = server.post("/v1/completions", prompt=[5] * 255, max_tokens=9).json()
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 1
    assert server.post("/v1/completions", prompt=[5] * 256, max_tokens=0).json()["choices"][0]["text"] == ""
    error(server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x y" * 200}]), 400)


def test_a_chat_may_fill_the_context(server: Served) -> None:
    usage = server.post("/v1/chat/completions", messages=MESSAGES).json()["usage"]
    assert usage["total_tokens"] == 256
    usage = server.post("/v1/completions", prompt="a").json()["usage"]
    assert usage["completion_tokens"] == 16


def test_max_completion_tokens_goes_before_max_tokens(server: Served) -> None:
    for fields, expected in (({"max_completion_tokens": 2, "max_tokens": 5}, 2), ({"max_tokens": 1}, 1)):
        found = server.post("/v1/chat/completions", messages=MESSAGES, **fields).json()
        assert found["usage"]["completion_tokens"] == expected
        assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_ends_at_once(server: Served, stream: bool) -> None:
    eos = server.service.llm.tokenizer.eos
    asked = {"messages": MESSAGES, "logit_bias": {str(eos): 100}, "temperature": 0, "stop_token_ids": [eos]}
    answer = server.post("/v1/chat/completions", **asked, stream=stream)
    choices = [c for event in events(answer.content) for c in event["choices"]] if stream else answer.json()["choices"]
    assert choices[-1]["finish_reason"] == "stop"
    assert [c["delta"] for c in choices] == [{"role": "assistant", "content": None}, {}] if stream else True


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a\ud800"}, "prompt"),
        ({"prompt": ["a", "\udfff"]}, "prompt"),
        ({"stop": "\ud800"}, "stop"),
        ({"model": "\ud800"}, "model"),
        ({"user": "\ud800"}, "user"),
        ({"metadata": {"\ud800": 1}}, "metadata"),
        ({"messages": [{"role": "user\ud800", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]}, "messages"),
    ],
)
def test_half_a_character_is_refused(server: Served, fields: dict, param: str) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, **fields})
    for path in ("/v1/completions", "/v1/chat/completions"):
        error(server.client.post(path, content=body, headers={"Content-Type": "application/json"}), 400, param)


def test_a_name_that_is_no_text_is_refused(server: Served) -> None:
    body = b'{"prompt": "a", "\\ud800": 1}'
    error(server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}), 400)


def test_infinity_is_a_number_of_json() -> None:
    assert (finite(-np.inf), finite(-0.5)) == (-9999.0, -0.5)


def texts(server: Served, **fields: Any) -> list[str]:
    """Return the texts of a stream's chunks."""
    return [
        c["text"] for e in events(server.post("/v1/completions", stream=True, **fields).content) for c in e["choices"]
    ]


def test_characters_come_whole_and_stop_strings_not_at_all() -> None:
    family = "👩‍👩‍👧"
    llm = tiny.says(b"p", *[bytes([byte]) for byte in family.encode()], b"\n\nUs", b"e", b"r:", b"!")
    with served(llm) as server:
        whole = texts(server, prompt="p", temperature=0, max_tokens=64)
        assert "".join(whole) == family + "\n\nUser:!"
        assert "�" not in "".join(whole)
        cut = texts(server, prompt="p", temperature=0, max_tokens=6)
        assert "".join(cut) == family.encode()[:6].decode(errors="replace")
        for size, expected in ((64, family), (len(family.encode()) + 2, family + "\n\nUse")):
            asked = {"prompt": "p", "temperature": 0, "max_tokens": size, "stop": ["\n\nUser:"]}
            found = texts(server, **asked)
            assert "".join(found) == expected
            (choice,) = server.post("/v1/completions", **asked).json()["choices"]
            assert choice["text"] == expected
            assert choice["finish_reason"] == ("stop" if size == 64 else "length")
        (choice,) = server.post("/v1/completions", prompt="p", temperature=0, logprobs=0, max_tokens=6).json()[
            "choices"
        ]
        assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 1]
        error(server.post("/v1/chat/completions", messages=MESSAGES), 400, "messages")


def test_an_engine_that_dies_fails_all_and_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_DEAD_SECONDS", 1.5)
    broken = threading.Event()

    def breaking(program: object, args: Any) -> None:
        if program is DECODE:
            time.sleep(0.005 * int(args[-1]))
            if broken.is_set():
                raise RuntimeError("kaputt")

    with served(changed(model(), breaking)) as server:
        with ThreadPoolExecutor() as pool:
            found = [pool.submit(server.post, "/v1/completions", **LONG) for _ in range(3)]
            bodies = [pool.submit(server.post, "/v1/completions", **LONG, stream=True) for _ in range(2)]
            status = server.service.engine.status
            until(lambda: status.running + status.waiting == 5)
            broken.set()
            for each in found:
                error(each.result(), each.result().status_code)
                assert each.result().status_code in (500, 503)
                assert "kaputt" not in each.result().text
            for each in bodies:
                assert '"error"' in each.result().text
                assert "[DONE]" not in each.result().text
        health = server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        error(server.post("/v1/completions", prompt="a"), 503)
        server.thread.join(timeout=10)
        assert not server.thread.is_alive()
        assert str(server.service.fault) == "kaputt"


def test_before_the_model_is_there() -> None:
    with served(None) as server:
        health = server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert int(health.headers["retry-after"]) >= 1
        for path in ("/v1/completions", "/tokenize"):
            assert error(server.post(path, prompt="a"), 503)["code"] == "loading"
        assert server.client.get("/v1/models").status_code == 503
        assert server.client.get("/metrics").status_code == 200
        assert server.client.get("/").status_code == 200


def test_draining() -> None:
    with served(slowed(0.005), grace=0.3) as server:
        with ThreadPoolExecutor() as pool:
            found = [pool.submit(server.post, "/v1/completions", **LONG, stream=True) for _ in range(2)]
            until(lambda: server.service.engine.status.running == 2)
            began = time.monotonic()
            server.server.handle_exit(signal.SIGTERM, None)
            until(lambda: server.service.state == "draining")
            health = server.client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            refused = server.post("/v1/completions", prompt="a")
            assert error(refused, 503)["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1
            for each in found:
                last = events(each.result().content)[-1]["choices"][0]
                assert last["finish_reason"] == "length"
        server.thread.join(timeout=10)
        assert not server.thread.is_alive()
        assert time.monotonic() - began < 3


def test_the_second_signal_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    with served(None) as server:
        server.server.handle_exit(signal.SIGINT, None)  # nothing can break off what is being compiled
        assert codes == [130]
    with served(model()) as server:
        server.server.handle_exit(signal.SIGTERM, None)
        assert codes == [130]
        server.server.handle_exit(signal.SIGTERM, None)
        assert codes == [130, 143]


KEYS = ("sesame", "ключ")


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with served(model(), keys=KEYS, origins=("https://page.example",)) as found:
        yield found


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer sesam"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Basic sesame"}, 401),
        ({"X-Api-Key": "wrong"}, 401),
        ({"Authorization": "Bearer sesame"}, 200),
        ({"Authorization": "bearer sesame"}, 200),
        ({"Authorization": "Bearer ключ".encode()}, 200),
        ({"X-Api-Key": "sesame"}, 200),
        ({"api-key": "sesame"}, 200),
        ({"Authorization": "Bearer sesame", "Host": "anywhere.example"}, 200),
    ],
)
def test_keys(locked: Served, headers: dict, status: int) -> None:
    answer = locked.client.get("/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 401:
        found = error(answer, 401)
        assert (found["type"], found["code"]) == ("authentication_error", "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert not any(key in answer.text for key in KEYS)


def test_what_needs_no_key(locked: Served) -> None:
    assert [locked.client.get(path).status_code for path in ("/", "/health", "/metrics", "/nowhere")] == [
        200,
        200,
        401,
        401,
    ]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_cached_prompts_are_not_shared_between_keys(locked: Served) -> None:
    def cached(key: str, **more: Any) -> int:
        body = {"prompt": "the cat sat on the mat " * 4, "max_tokens": 4, **more}
        answer = locked.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}".encode()})
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached("sesame"), cached("sesame") > 0] == [0, True]
    assert [cached("ключ"), cached("sesame", cache_salt="a")] == [0, 0]


def test_a_page_elsewhere_asks_before_it_brings_its_key(locked: Served, server: Served) -> None:
    asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    wants = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
    answer = locked.client.options("/v1/completions", headers=asks | wants)
    assert answer.is_success
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    refused = locked.client.get("/v1/models", headers={"Origin": "https://page.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
    for other in (locked, server):
        answer = other.client.options("/v1/completions", headers=asks | {"Origin": "https://evil.example"})
        assert answer.is_client_error
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example:80"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "192.168.1.5"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:99", "Origin": "http://localhost:99"}, 200),
        ({"Host": "localhost:99", "Origin": "http://localhost:98"}, 403),
    ],
)
def test_without_a_key_pages_elsewhere_have_no_way_in(server: Served, headers: dict, status: int) -> None:
    answer = server.client.get("/v1/models", headers=headers)
    assert answer.status_code == status, answer.text


def test_the_page_runs_its_own_scripts_alone(server: Served) -> None:
    answer = server.client.get("/")
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_name_is_asked_for_strictly_where_that_is_wanted() -> None:
    with served(model(), strict_model=True) as server:
        assert server.post("/v1/completions", prompt="a", max_tokens=1, model="tiny").status_code == 200
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
        found = error(server.post("/v1/completions", prompt="a", max_tokens=1, model="gpt-4"), 404, "model")
        assert found["code"] == "model_not_found"
