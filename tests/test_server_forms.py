"""The server's answers of a given form, and its tool calls, as OpenAI's own client sees them."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
import tiny
from servers import Served, error, served, strict_client

from jllama import LLM
from jllama.chat import Template

SAID = [b"I", b" look.", b"\n<tool_call>", b'{"name": "now", ', b'"arguments": {"zone": "CET"}}', b"</tool_call>"]
TEMPLATE = "{# <tool_call> #}{% if tools %}t{% endif %}{{ messages[-1].content }}"
ZONE = {
    "type": "object",
    "properties": {"zone": {"type": "string"}},
    "required": ["zone"],
    "additionalProperties": False,
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": ZONE}}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "strict": True,
    },
}
ASK: Any = [{"role": "user", "content": "a"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Bytes(tiny.Letters):
    def encode(self, text: str) -> list[int]:
        return [b + 3 for b in text.encode()]


def model() -> LLM:
    """A model that answers an a with what is `SAID`; otherwise it ends strings and objects as soon as it may."""
    pieces = [b"", b"", b"", *(bytes([b]) for b in range(256)), *SAID]
    successor = [ord('"') + 3] * len(pieces)
    successor[ord("a") + 3] = 259
    successor[259:] = [*range(260, len(pieces)), 2]
    tokenizer = Bytes(pieces)
    weights = tiny.chain(successor, 256, unlikely=[b + 3 for b in b" \n,"])
    return LLM(weights, tokenizer, template=Template(TEMPLATE, tokenizer, add_bos=False))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(model()) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with strict_client(server) as found:
        yield found


def schema(value: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value, "strict": True}}


def test_an_answer_fits_its_schema(client: openai.OpenAI, server: Served) -> None:
    engine = server.service.engine
    assert engine is not None
    programs = engine.status.programs
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 100}
    answer = client.chat.completions.create(**asked, response_format=schema(PERSON)).choices[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content or ""), PERSON)
    stream = client.chat.completions.create(**asked, response_format=schema(PERSON), stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == answer.message.content
    assert chunks[-1].finish_reason == "stop"
    cut = client.chat.completions.create(**(asked | {"max_tokens": 5}), response_format=schema(PERSON)).choices[0]
    assert cut.finish_reason == "length"
    assert (answer.message.content or "").startswith(cut.message.content or "")
    assert engine.status.programs == programs  # nothing was compiled


def test_the_clients_own_parser_reads_it(client: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    found = client.chat.completions.parse(
        model="tiny", messages=ASK, temperature=0, max_tokens=100, response_format=Person
    )
    assert isinstance(found.choices[0].message.parsed, Person)


def test_forms_beside_openais(client: openai.OpenAI) -> None:
    form = {"response_format": {"type": "regex", "regex": "(yes|no)!"}}
    found = client.completions.create(model="tiny", prompt="a", extra_body=form, temperature=0)
    assert found.choices[0].text in ("yes!", "no!")
    plain = client.completions.create(
        model="tiny", prompt="a", extra_body={"response_format": {"type": "text"}}, temperature=0
    )
    assert plain.choices[0].text == b"".join(SAID).decode()
    json_object: Any = {"type": "json_object"}
    answers = client.chat.completions.create(
        model="tiny", messages=ASK, response_format=json_object, n=2, max_tokens=60, temperature=0
    )
    for choice in answers.choices:
        assert isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema({"type": "nope"})}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "["}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [NOW]}, "response_format"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [NOW], "tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
          "tool_choice": "required"}, "tools"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]}, "messages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_not_be_promised_is_refused(server: Served, fields: dict, param: str, stream: bool) -> None:
    asked = {"messages": ASK, "max_tokens": 1, "stream": stream, **fields}
    error(server.post("/v1/chat/completions", **asked), 400, param)


def test_tools_are_for_chats(server: Served) -> None:
    error(server.post("/v1/completions", prompt="a", tools=[NOW]), 400, "tools")


# Calls.


def call(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "tiny", "messages": ASK, "tools": [NOW, ADD], "temperature": 0, "max_tokens": 150, **fields}
    return client.chat.completions.create(**asked)


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    answer = call(client, tools=[NOW])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    (made,) = choice.message.tool_calls
    assert (made.type, made.function.name, json.loads(made.function.arguments)) == ("function", "now", {"zone": "CET"})
    assert answer.usage.completion_tokens == len(SAID) + 1  # the end
    result = {"role": "tool", "tool_call_id": made.id, "content": "noon a"}
    again = call(client, tools=[NOW], messages=[*ASK, choice.message.to_dict(), result])
    assert again.choices[0].message.tool_calls[0].function.name == "now"


def test_a_stream_has_text_and_then_the_call(client: openai.OpenAI) -> None:
    chunks = [chunk.choices[0] for chunk in call(client, tools=[NOW], stream=True, logprobs=True)]
    assert [chunk.delta.content for chunk in chunks if chunk.delta.content] == ["I", " look."]
    (made,) = [chunk.delta.tool_calls[0] for chunk in chunks if chunk.delta.tool_calls]
    assert (made.index, made.function.name, json.loads(made.function.arguments)) == (0, "now", {"zone": "CET"})
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    tokens = [entry.token for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert "".join(tokens) == b"".join(SAID).decode()


def test_no_call_where_none_is_wanted(client: openai.OpenAI) -> None:
    (choice,) = call(client, tools=[NOW], tool_choice="none").choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == b"".join(SAID).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls(client: openai.OpenAI, stream: bool) -> None:
    only = {"type": "function", "function": {"name": "add"}}
    for choice, parallel, names in (
        ("required", False, {"now", "add"}),
        (only, True, {"add"}),
        ("required", True, None),
    ):
        found = call(client, tool_choice=choice, parallel_tool_calls=parallel, stream=stream)
        if stream:
            chunks = [chunk.choices[0] for chunk in found]
            assert not any(chunk.delta.content for chunk in chunks)
            made, reason = [c for chunk in chunks for c in chunk.delta.tool_calls or []], chunks[-1].finish_reason
            assert [c.index for c in made] == list(range(len(made)))
        else:
            made, reason = found.choices[0].message.tool_calls or [], found.choices[0].finish_reason
            assert found.choices[0].message.content is None or not made
        for each in made:
            checks = {"now": ZONE, "add": ADD["function"]["parameters"]}
            jsonschema.validate(json.loads(each.function.arguments), checks[each.function.name])
        if names is not None:
            assert reason == "tool_calls"
            assert len(made) == 1
            assert made[0].function.name in names


def test_a_strict_function_is_enforced_where_it_is_called(client: openai.OpenAI) -> None:
    wrong = {**NOW["function"], "strict": True, "parameters": {**ZONE, "properties": {"zone": {"enum": ["UTC"]}}}}
    (choice,) = call(client, tools=[{"type": "function", "function": wrong}]).choices
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [{"zone": "UTC"}]


def test_a_call_that_the_limit_breaks(client: openai.OpenAI) -> None:
    for most in range(1, len(SAID)):
        (choice,) = call(client, tools=[NOW], max_tokens=most).choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
        assert choice.message.content == b"".join(SAID[:most]).decode()
    (choice,) = call(client, tool_choice="required", max_tokens=20).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


def test_several_answers_have_calls_of_their_own(client: openai.OpenAI) -> None:
    answer = call(client, tools=[NOW], n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 2
    ids = {choice.message.tool_calls[0].id for choice in answer.choices}
    assert len(ids) == 2
