"""The server over HTTP: its endpoints by a client that others wrote, its streams to the byte, its errors."""

import asyncio
import json
import math
import shutil
import subprocess
from collections.abc import Iterator

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import JSON, Served, error, events, model, served, strict_client, until

from jllama.llm import LLM

MESSAGES = [{"role": "user", "content": "the cat"}]
ANSWER = {"prompt": "the cat", "max_tokens": 8, "seed": 3}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return model()


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Served]:
    with served(llm) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with strict_client(server) as found:
        yield found


def test_a_completion_is_what_generate_gives(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate(["the cat", "sat on"], max_new_tokens=8, seed=3)
    found = client.completions.create(model="x", prompt=["the cat", "sat on"], max_tokens=8, seed=3)
    assert [choice.text for choice in found.choices] == [each.text for each in expected]
    assert [choice.finish_reason for choice in found.choices] == [each.finish_reason for each in expected]
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.model == "tiny"
    assert found.usage is not None
    prompts = sum(len(llm.tokenizer.prompt_ids(text)) for text in ("the cat", "sat on"))
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (prompts, prompts + found.usage.completion_tokens)


def test_a_chat_is_what_chat_gives(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, max_new_tokens=8, seed=3)
    found = client.chat.completions.create(model="x", messages=MESSAGES, max_tokens=8, seed=3)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == expected.finish_reason


def test_streams_say_what_whole_answers_say(server: Served, client: openai.OpenAI) -> None:
    asked = {"model": "x", "messages": MESSAGES, "max_tokens": 8, "seed": 3, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    texts, reasons, logprobs = ["", ""], {}, [[], []]
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        assert chunk.id.startswith("chatcmpl-")
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {i: choice.finish_reason for i, choice in enumerate(whole.choices)}
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert chunk.choices == []
    assert chunk.usage == whole.usage
    assert texts[0] != texts[1]
    assert texts[1] == client.chat.completions.create(**asked | {"seed": 4, "n": 1}).choices[0].message.content

    asked = {"model": "x", "prompt": "the cat", "max_tokens": 8, "seed": 3, "n": 2, "echo": True}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    # Its models of texts want a finish_reason in every chunk, so they are not asked to be strict.
    loose = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for chunk in loose.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert all(text.startswith("the cat") for text in texts)


def test_an_asynchronous_client(server: Served) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked = [client.completions.create(model="x", **ANSWER | {"seed": i % 2}) for i in range(6)]
            found = [each.choices[0].text for each in await asyncio.gather(*asked)]
            stream = await client.completions.create(model="x", **ANSWER | {"seed": 0}, stream=True)
            return [*found, "".join([chunk.choices[0].text async for chunk in stream])]

    texts = asyncio.run(ask())
    assert texts[0::2] == [texts[0]] * 4
    assert texts[1::2] == [texts[1]] * 3


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"temperature": "hot"}, openai.BadRequestError),
        ({"prompt": "x" * 400}, openai.BadRequestError),
    ],
)
def test_errors_are_raised_as_their_types(client: openai.OpenAI, fields: dict, kind: type[openai.APIError]) -> None:
    with pytest.raises(kind) as e:
        client.completions.create(model="x", prompt="a", extra_body=fields)
    assert e.value.body is not None


def test_the_model_is_listed(client: openai.OpenAI, server: Served) -> None:
    (card,) = client.models.list()
    assert (card.id, card.owned_by) == ("tiny", "jllama")
    assert client.models.retrieve("tiny") == card
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/model")
    assert server.client.get("/v1/models/tiny").json()["meta"]["n_ctx_train"] == 256


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here: it is not tried on the server")
def test_curl(server: Served) -> None:
    command = ["curl", "-sSN", "-m", "60", f"{server.url}/v1/completions", "-H", "Content-Type: application/json"]
    done = subprocess.run([*command, "-d", json.dumps(ANSWER | {"stream": True})], capture_output=True, timeout=60)
    text = "".join(event["choices"][0]["text"] for event in events(done.stdout))
    done = subprocess.run([*command, "-d", json.dumps(ANSWER)], capture_output=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["text"] == text
    done = subprocess.run([*command[:5], "-d", json.dumps(ANSWER)], capture_output=True, timeout=60)
    assert "application/json" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.parametrize("usage", [None, False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_to_the_byte(server: Served, path: str, usage: bool | None) -> None:
    chat = "chat" in path
    asked = {"messages": MESSAGES} if chat else {"prompt": "the cat"}
    options = {} if usage is None else {"stream_options": {"include_usage": usage}}
    head, _, body = server.raw(path, {**asked, "max_tokens": 6, "seed": 3, "stream": True, **options}).partition(
        b"\r\n\r\n"
    )
    headers = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:])
    assert head.startswith(b"HTTP/1.1 200 ")
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    chunks = events(unchunked(body))
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == ("chat.completion.chunk" if chat else "text_completion")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all({"index", "logprobs", "finish_reason"} < choice.keys() for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    if chat:
        first, *middle, end = [choice["delta"] for choice in choices]
        assert first == {"role": "assistant", "content": None}
        assert end == {}
        assert middle
        assert all(delta.keys() == {"content"} and delta["content"] for delta in middle)
    else:
        assert all(choice["text"] for choice in choices[:-1])
        assert choices[-1]["text"] == ""


def unchunked(body: bytes) -> bytes:
    """Return the content of a body in chunks."""
    found = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        if not (length := int(size, 16)):
            return found
        found, body = found + body[:length], body[length + 2 :]


def test_logprobs_of_a_chat(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate([llm_prompt(llm)], batch_size=1)
    asked = {"model": "x", "messages": MESSAGES, "max_tokens": 12, "seed": 3, "logprobs": True}
    for count in (None, 0, 5):
        top = {} if count is None else {"top_logprobs": count}
        (choice,) = client.chat.completions.create(**asked, **top).choices
        entries = choice.logprobs.content
        assert [entry.logprob for entry in entries] == pytest.approx(expected.logprobs, abs=1e-5)
        assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == choice.message.content
        assert all(len(entry.top_logprobs) == (count or 0) for entry in entries)
        for entry in entries if count else ():
            values = [each.logprob for each in entry.top_logprobs]
            assert values == sorted(values, reverse=True)
            assert entry.logprob <= values[0] + 1e-5
    assert client.chat.completions.create(**asked | {"logprobs": False}).choices[0].logprobs is None


def llm_prompt(llm: LLM):  # type: ignore[no-untyped-def]
    from jllama import Prompt, Settings

    ids = llm.template.render(MESSAGES)
    return Prompt("", Settings(max_new_tokens=12, seed=3), tuple(ids))


def test_logprobs_of_a_completion(client: openai.OpenAI, llm: LLM) -> None:
    for count in (0, 1, 5):
        (choice,) = client.completions.create(model="x", **ANSWER, logprobs=count).choices
        lists = choice.logprobs
        assert "".join(lists.tokens) == choice.text or "�" in choice.text
        assert len(lists.token_logprobs) == len(lists.tokens) == len(lists.top_logprobs) == len(lists.text_offset)
        for token, logprob, top in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True):
            assert top[token] == logprob
            assert 1 <= len(top) <= count + 1
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        client.completions.create(model="x", **ANSWER, logprobs=21)


def test_echo_without_new_tokens_scores_the_prompt(server: Served, llm: LLM) -> None:
    text = "the cat sat on the mat, é 🦙"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)  # strictly, there is no null
    (choice,) = client.completions.create(model="x", prompt=text, max_tokens=0, echo=True, logprobs=1).choices
    lists, score = choice.logprobs, llm.score(text)
    assert choice.text == text
    assert choice.finish_reason == "length"
    assert lists.token_logprobs[0] is None
    assert lists.top_logprobs[0] is None
    assert lists.token_logprobs[1:] == pytest.approx(score.logprobs.tolist(), abs=1e-5)
    best = [max(top, key=top.get) for top in lists.top_logprobs[1:]]
    ids = llm.tokenizer.prompt_ids(text)
    hits = [token == found for token, found in zip(lists.tokens[1:], best, strict=True) if "�" not in token]
    expected = zip(score.best.tolist(), ids[1:], lists.tokens[1:], strict=True)
    assert hits == [a == b for a, b, token in expected if "�" not in token]
    starts = [len(llm.tokenizer.decode(ids[:i])) for i in range(len(ids))]
    assert all(0 <= a - b <= 1 for a, b in zip(starts, lists.text_offset, strict=True))  # half a character counts later
    (both,) = client.completions.create(model="x", prompt=text, max_tokens=4, seed=1, echo=True, logprobs=0).choices
    assert both.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(lists.token_logprobs[1:], abs=1e-6)
    assert len(both.logprobs.tokens) == len(ids) + 4


@pytest.mark.parametrize("prompt", ["the cat", ["the cat"], "IDS", ["IDS"]])
def test_prompts_of_every_kind(server: Served, llm: LLM, prompt: object) -> None:
    ids = llm.tokenizer.prompt_ids("the cat")
    prompt = ids if prompt == "IDS" else [ids] if prompt == ["IDS"] else prompt
    (expected,) = llm.generate(["the cat"], max_new_tokens=16, seed=3)
    found = server.post("/v1/completions", prompt=prompt, seed=3).json()
    assert [choice["text"] for choice in found["choices"]] == [expected.text]


def test_what_asks_for_nothing_changes_nothing(server: Served) -> None:
    plain = server.post("/v1/completions", **ANSWER).json()["choices"]
    nothing = {
        "model": "gpt", "user": "me", "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0,
        "logit_bias": {}, "logprobs": None, "suffix": None, "echo": False, "stream": False, "metadata": {"a": 1},
        "tools": [], "response_format": {"type": "text"}, "whatever": 7, "stop": [], "top_k": None,
    }  # fmt: skip
    assert server.post("/v1/completions", **ANSWER, **nothing).json()["choices"] == plain
    chat = {"messages": MESSAGES, "max_tokens": 4, "seed": 1}
    plain = server.post("/v1/chat/completions", **chat).json()["choices"]
    nothing = {
        "max_completion_tokens": None, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none",
        "parallel_tool_calls": True, "reasoning_effort": "low", "store": True, "modalities": ["text"],
        "stream_options": None, "service_tier": "auto", "chat_template_kwargs": {},
    }  # fmt: skip
    assert server.post("/v1/chat/completions", **chat, **nothing).json()["choices"] == plain


def test_settings_reach_the_model(server: Served, llm: LLM) -> None:
    texts = {"temperature": 0, "max_tokens": 12}
    (expected,) = llm.generate(["the cat"], max_new_tokens=12, temperature=0)
    assert server.post("/v1/completions", prompt="the cat", **texts).json()["choices"][0]["text"] == expected.text
    given = {"temperature": 1.5, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "seed": 5}
    (expected,) = llm.generate(["the cat"], max_new_tokens=12, repetition_penalty=1.3, **given)
    for name in ("repetition_penalty", "repeat_penalty"):
        found = server.post("/v1/completions", prompt="the cat", max_tokens=12, **given, **{name: 1.3}).json()
        assert found["choices"][0]["text"] == expected.text
    bias = {str(i): -100 for i in expected.tokens[:3]}
    penalties = {"presence_penalty": 1.5, "frequency_penalty": -0.5}
    (other,) = llm.generate(["the cat"], max_new_tokens=12, logit_bias=bias, **penalties, **given)
    asked = {"prompt": "the cat", "max_tokens": 12, "logit_bias": bias, **penalties, **given}
    assert server.post("/v1/completions", **asked).json()["choices"][0]["text"] == other.text != expected.text
    asked = {
        "prompt": "the cat",
        "max_tokens": 12,
        "repeat_penalty": 1.3,
        **given,
        "stop_token_ids": expected.tokens[4:5],
    }
    (choice,) = server.post("/v1/completions", **asked).json()["choices"]
    assert (expected.text.startswith(choice["text"]), choice["finish_reason"]) == (True, "stop")
    stop = expected.text[2:4]
    found = server.post("/v1/completions", prompt="the cat", max_tokens=12, **given, repeat_penalty=1.3, stop=stop)
    (choice,) = found.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text[: expected.text.index(stop)], "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"n": True}, "n"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [330]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 21}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": "1"}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 200}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": [[5, 1]]}, "logit_bias"),
        ({"logit_bias": {"330": 1}}, "logit_bias"),
        ({"stop_token_ids": [330]}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"model": 7}, "model"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(server: Served, fields: dict, param: str) -> None:
    found = error(server.post("/v1/completions", **{"prompt": "a", "max_tokens": 1, **fields}), 400, param)
    assert found["type"] == "invalid_request_error"
    assert param.partition(".")[0] in found["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),  # the template's own word
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
         "messages[0].content[0]"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[1].content[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_chats_that_can_not_be_answered(server: Served, fields: dict, param: str) -> None:
    error(server.post("/v1/chat/completions", **{"messages": MESSAGES, "max_tokens": 1, **fields}), 400, param)


def test_contents_of_every_form(server: Served) -> None:
    def answer(*messages: dict) -> str:
        asked = {"messages": messages, "max_tokens": 6, "seed": 1}
        return server.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"]

    plain = [
        {"role": "system", "content": "be"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "ab"},
    ]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert answer(*plain) == answer(*parts)
    assert answer(*plain) != answer(*plain[:-1], {"role": "user", "content": "ba"})


def test_variables_of_the_template(server: Served, llm: LLM) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 1}
    usage = [
        server.post("/v1/chat/completions", **asked, **more).json()["usage"]["prompt_tokens"]
        for more in ({}, {"chat_template_kwargs": {"extra": "zz"}})
    ]
    assert usage == [len(llm.template.render(MESSAGES)), len(llm.template.render(MESSAGES, extra="zz"))]


def test_texts_to_ids_and_back(server: Served, llm: LLM) -> None:
    text = "the cat é🦙"
    ids = server.post("/tokenize", content=text).json()["tokens"]
    assert ids == llm.tokenizer.encode(text)
    assert server.post("/tokenize", content=text, add_special=True).json()["tokens"] == llm.tokenizer.prompt_ids(text)
    assert server.post("/detokenize", tokens=ids).json() == {"content": text}
    pieces = server.post("/tokenize", content=text, with_pieces=True).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    spelled = [p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces]
    assert b"".join(spelled).decode() == text
    error(server.post("/tokenize"), 400, "content")
    error(server.post("/detokenize", tokens=[330]), 400, "tokens")
    error(server.post("/detokenize", tokens=["a"]), 400, "tokens")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/models/", 405),
    ],
)
def test_the_routers_errors_are_in_the_envelope(server: Served, method: str, path: str, status: int) -> None:
    error(server.client.request(method, path, headers=JSON), status)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", JSON, 400),
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b"7", JSON, 400),
        (b"\xff", JSON, 400),
        (b'{"a": NaN}', JSON, 400),
        (b'{"a": ' + b"9" * 5000 + b"}", JSON, 400),
        (b'{"a":' * 99 + b"1" + b"}" * 99, JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (b'{"prompt": "a"}', {"Content-Type": "text/plain"}, 415),
        (b'{"prompt": "a"}', {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (b'{"prompt": "a"}', {}, 415),
        (b" " * (4 * 2**20 + 1), JSON, 413),
    ],
)
def test_bodies_that_are_none(server: Served, body: bytes, headers: dict, status: int) -> None:
    deep = "a" if body.startswith(b'{"a":{') else None
    found = error(server.client.post("/v1/completions", content=body, headers=headers), status, deep)
    assert len(found["message"]) < 400


def test_a_body_in_chunks_has_the_same_limit(server: Served) -> None:
    def body() -> Iterator[bytes]:
        for _ in range(80):
            yield b" " * 65536

    error(server.client.post("/v1/completions", content=body(), headers=JSON), 413)
    assert server.post("/v1/completions", **ANSWER).status_code == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.text(st.characters(categories=["Cs"]), max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FIELDS = [
    "model", "messages", "prompt", "n", "stream", "stream_options",
    "logprobs", "top_logprobs", "echo", "logit_bias", "max_tokens", "response_format",
    "max_completion_tokens", "tools", "tool_choice", "chat_template_kwargs", "cache_salt", "temperature",
    "top_p", "top_k", "min_p", "seed", "stop", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "best_of",
    "suffix", "user", "functions", "modalities", "metadata", "content",
    "tokens", "add_special", "with_pieces", "parse_special", "anything",
]  # fmt: skip
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), name=st.sampled_from(FIELDS), value=json_values)
def test_no_field_is_a_fault_of_the_server(server: Served, path: str, name: str, value: object) -> None:
    plain = {"prompt": "a", "messages": MESSAGES, "content": "a", "tokens": [5], "max_tokens": 1}
    body = json.dumps(plain | {name: value}).encode()
    answer = server.client.post(path, content=body, headers=JSON)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        found = answer.json()["error"]
        assert found["type"] in ("invalid_request_error", "exceed_context_size_error")
        assert found["param"] is None or found["param"].startswith(name)


def test_metrics_are_prometheus_text(server: Served) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    server.post("/v1/completions", **ANSWER)
    until(lambda: server.service.engine.status.running == 0)
    text = server.client.get("/metrics").text
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert {"jllama_requests", "jllama_finished", "jllama_running", "jllama_waiting"} <= found.keys()
    assert {"jllama_time_to_first_token_seconds", "jllama_inter_token_seconds", "jllama_queue_seconds"} <= found.keys()
    assert ":" not in "".join(found)
    counted = {(s.labels.get("endpoint"), s.labels.get("code")): s.value for s in found["jllama_requests"].samples}
    assert counted["/v1/completions", "200"] >= 1
    assert all(endpoint is None or endpoint == "other" or endpoint.startswith("/") for endpoint, _ in counted)
    assert math.isclose(next(iter(found["jllama_running"].samples)).value, 0)
    assert isinstance(httpx.Headers(server.client.get("/health").headers)["x-request-id"], str)
