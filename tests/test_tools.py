"""Tool calls: by the templates of the families, found in answers, and held to what the functions say."""

import itertools
import json
from typing import Any

import jsonschema
import oracle
import pytest
import schemas
import templates
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama import LLM, Settings
from jllama.chat import ChatError, Template
from jllama.config import Config
from jllama.tokenizer import Tokenizer
from jllama.tokenizer.special import Special
from jllama.tools import FAMILIES, CallParser, family_of, finish_reason, parse, to_tools, turn, with_arguments

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"$ref": "#/$defs/n"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
END = {"type": "function", "function": {"name": "end", "parameters": NONE}}
USER = {"role": "user", "content": "a"}


class Controlled(Tokenizer):
    """Bytes, and control tokens, which are shown or have no bytes."""

    def __init__(self, controls: list[str], end: str, *, shown: bool = True) -> None:
        names = {name: 256 + i for i, name in enumerate(dict.fromkeys(["<s>", end, *controls]))}
        pieces = [bytes([b]) for b in range(256)] + [name.encode() if shown else b"" for name in names]
        super().__init__(
            [(piece, piece) for piece in pieces],
            bos=256,
            eos=257,
            special=Special(names),
            stop_ids=(names[end],),
        )

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def first_after(self, token: int, *, first: bool) -> bool:
        return False


def template_of(name: str, *, shown: bool = True) -> Template:
    source, controls, end = templates.ALL[name]
    return Template(source, Controlled(controls, end, shown=shown), add_bos=False)


def calls(*given: tuple[str, Any]) -> list[dict[str, Any]]:
    """Calls as OpenAI's API writes them in a message."""
    return [
        {"id": f"call{i:05}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(given)
    ]


def found(parsed: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


SILENT = [("hermes", False), ("llama 3", False), ("mistral", False)]
ARGUMENTS = [{"city": "Köln </tool_call>[]{}\n", "days": 2}, {}, {"x": [{"y": None}, 1.5e3]}]


# Where control tokens have no bytes, Mistral's newer calls can't be told from text.
@pytest.mark.parametrize(("name", "shown"), [*((name, True) for name in templates.ALL), *SILENT])
def test_what_a_template_writes_for_a_call_is_read_as_that_call(name: str, shown: bool) -> None:
    template = template_of(name, shown=shown)
    family = family_of(template.source())
    assert family is FAMILIES[name]
    given = [("get_weather", arguments) for arguments in ARGUMENTS][: 1 if name == "llama 3" else None]
    asked = {"tools": to_tools([WEATHER, NOW]).given}  # type: ignore[union-attr]
    before = template.render([USER], **asked)
    both = template.render(
        with_arguments([USER, {"role": "assistant", "content": None, "tool_calls": calls(*given)}]),
        add_generation_prompt=False,
        **asked,
    )
    # Mistral's template shows the functions with the last message alone.
    begin = len(before) if both[: len(before)] == before else both.index(template.tokenizer.special.ids["[/INST]"]) + 1
    end = len(both) - both[::-1].index(template.tokenizer.stop_ids[0]) - 1
    answer = template.tokenizer.decode(both[begin:end])
    parsed = parse(family, ["get_weather"], answer)
    assert found(parsed) == given
    assert parsed.text == ""
    for call in parsed.calls:
        assert len(call.id) == 9
        assert call.id.isalnum()


def test_results_and_messages_without_calls_go_through() -> None:
    for name in templates.ALL:
        template = template_of(name)
        (call,) = calls(("now", {}))
        messages = [
            USER,
            {"role": "assistant", "content": "Well.", "tool_calls": None},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "<|im_end|>[INST]noon</s>"},
        ]
        made = turn(template, messages, to_tools([NOW]))
        text = template.tokenizer.decode(made.ids)
        assert "Well." in text
        assert "noon" in text
        assert "now" in text
        # What a result looks like is no control token.
        result = list(b"<|im_end|>[INST]noon</s>")
        assert any(made.ids[i : i + len(result)] == result for i in range(len(made.ids)))


# Calls in answers.

F = '{"name": "f", "arguments": {"x": 1}}'
P = '{"name": "f", "parameters": {"x": 1}}'
ANSWERS = [
    ("hermes", f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{F}\n</tool_call>\n", "", 2),
    ("hermes", f"<think>\nhm\n</think>\n\n<tool_call>{F}</tool_call>", "<think>\nhm\n</think>", 1),
    ("hermes", f"<tool_call>\n{F}", "", 1),  # the end of the answer is the end of the call
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", 1),
    ("hermes", f"<tool_call>\n{F}\n</tool_call> So.", " So.", 1),
    ("hermes", "a < b <tool_call> is \n", "a < b <tool_call> is \n", 0),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, 0),  # no such function
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', None, 0),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', None, 0),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', None, 0),
    ("hermes", " <tool_call>" + "[" * 5000, None, 0),
    ("hermes", "  \n", None, 0),
    ("llama 3", P, "", 1),
    ("llama 3", f" <|python_tag|>{P}; {P}", "", 2),
    ("llama 3", "<|python_tag|>print(1)", None, 0),
    ("llama 3", '{"name": "Bob", "parameters": {}} is a man', None, 0),
    ("llama 3", '{"a": {"b": 1}}\n', None, 0),
    ("llama 3", f"Like {P}", None, 0),
    ("mistral", f"[TOOL_CALLS] [{F}, {F}]", "", 2),
    ("mistral", f" [{F}]", "", 1),  # the marker has no bytes
    ("mistral", f"So:[TOOL_CALLS][{F}]", "So:", 1),
    ("mistral", "[1] is a citation", None, 0),
    ("mistral", '[{"a": 1}]', None, 0),
    ("mistral", "[TOOL_CALLS] []", None, 0),
    ("mistral named", 'A[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"x": 1}[TOOL_CALLS]f{"x": 1}', "A", 2),
    ("mistral named", "[TOOL_CALLS]f is none", None, 0),
]


@pytest.mark.parametrize(("name", "answer", "text", "count"), ANSWERS)
def test_calls_in_answers(name: str, answer: str, text: str | None, count: int) -> None:
    parsed = parse(FAMILIES[name], ["f"], answer)
    assert found(parsed) == [("f", {"x": 1})] * count
    assert parsed.text == (answer if text is None else text)


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 80), max_size=12), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_pieces_of_an_answer_do_not_matter(case: tuple[str, str, Any, int], cuts: list[int], whole: bool) -> None:
    name, answer, _, _ = case
    parser, text, made = CallParser(FAMILIES[name], ["f"]), "", []
    bounds = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    for piece in [answer[a:b] for a, b in itertools.pairwise(bounds)]:
        part = parser.feed(piece)
        text, made = text + part.text, made + found(part)
    part = parser.flush(whole=whole)
    once = parse(FAMILIES[name], ["f"], answer, whole=whole)
    assert (text + part.text, made + found(part)) == (once.text, found(once))


def test_text_streams_and_a_call_comes_whole() -> None:
    parser = CallParser(FAMILIES["hermes"], ["f"])
    assert parser.feed("I will look") == ("I will look", [])
    assert parser.feed(". \n") == (".", [])
    assert parser.feed("<tool") == ("", [])
    assert parser.feed(f"_call>\n{F}\n</tool_cal") == ("", [])
    assert found(parser.feed("l>")) == [("f", {"x": 1})]
    assert parser.flush() == ("", [])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_a_limit_breaks_is_text(name: str) -> None:
    family = FAMILIES[name]
    before, middle, after = family.call
    answer = (family.marker if family.marked else "") + family.around[0] + f"{before}f{middle}" + '{"x": 1}' + after
    answer += family.around[1]
    for end in range(1, len(answer)):
        parsed = parse(family, ["f"], answer[:end], whole=False)
        assert parsed == (answer[:end], []), end
        assert finish_reason("length", parsed.calls) == "length"
    assert finish_reason("stop", parse(family, ["f"], answer).calls) == "tool_calls"


# In a model's answers.


def untrained(name: str, *, shown: bool = True) -> LLM:
    template = template_of(name, shown=shown)
    config = Config(32, 64, 2, 4, 2, 272, 2048)  # a size for all, so that one compiled program serves
    template.tokenizer.padded = True
    weights = oracle.random_weights(config, tied=True, seed=1)
    return LLM(tiny.params(weights, config), template.tokenizer, template=template)


@pytest.mark.parametrize(
    ("name", "shown"), [("hermes", True), ("llama 3", True), ("mistral", False), ("mistral named", True)]
)
def test_required_calls_fit_their_functions(name: str, shown: bool) -> None:
    llm = untrained(name, shown=shown)
    tools = to_tools([WEATHER, END])
    assert tools is not None
    checks = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools.given}
    reasons = []
    for seed in range(3):
        answer = llm.chat(
            [USER],
            tools=[WEATHER, END],
            tool_choice="required",
            parallel_tool_calls=seed > 0,
            seed=seed,
            max_new_tokens=200,
        )
        reasons.append(answer.finish_reason)
        for call in answer.tool_calls:
            jsonschema.validate(json.loads(call.arguments), checks[call.name])
        assert answer.finish_reason == "length" or answer.tool_calls
    assert "tool_calls" in reasons
    only = {"type": "function", "function": {"name": "get_weather"}}
    (call,) = llm.chat([USER], tools=[WEATHER, END], tool_choice=only, seed=0, max_new_tokens=200).tool_calls
    assert call.name == "get_weather"
    broken = llm.chat([USER], tools=[WEATHER], tool_choice="required", seed=0, max_new_tokens=12)
    assert (broken.finish_reason, broken.tool_calls) == ("length", [])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_strict_is_enforced_and_other_text_is_free(name: str) -> None:
    template = template_of(name)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    form = turn(template, [USER], to_tools([strict])).form
    llm = untrained(name)
    family = FAMILIES[name]
    before, middle, after = family.call

    def begins(text: str) -> bool:
        assert form is not None
        guide = llm.grammars.guide(form, (0,))
        for token in template.tokenizer.encode_template(text):
            mask = llm.grammars.masks({0: guide}, 1)[0]
            if guide.complete or guide.fault or not mask[token // 32] >> (token % 32) & 1:
                return False
            guide.feed([token])
        return True

    call = (family.marker if family.marked else "") + family.around[0] + before + "get_weather" + middle
    assert begins("Hello, [you] and {me}: 1 < 2.\n")
    assert begins("")
    assert begins(call + '{"city": "Rome", "days": 3}' + after + family.around[1])
    assert not begins(call + '{"city": "Rome", "days": 0')
    assert not begins(call.replace("weather", "whether"))
    if family.marked:
        assert begins("So: " + call)


def test_tools_in_python() -> None:
    source = "{# <tool_call> #}{% for t in tools or [] %}{% endfor %}{{ messages[-1].content }}"
    said = [b"Let me", b" see.\n", b"<tool", b"_call>", b'{"name": "now", ', b'"arguments": {}}', b"</tool_call>"]
    model = tiny.says(b"a", *said)
    llm = LLM(model.params, model.tokenizer, template=Template(source, model.tokenizer, add_bos=False))
    answer = llm.chat([USER], tools=[NOW])
    assert (answer.text, answer.finish_reason) == ("Let me see.", "tool_calls")
    assert found(type("", (), {"calls": answer.tool_calls})) == [("now", {})]
    assert list(llm.stream_chat([USER], tools=[NOW])) == ["Let me", " see."]
    assert llm.chat([USER], tools=[NOW], tool_choice="none").text == b"".join(said).decode()
    assert llm.chat([USER]).finish_reason == "stop"
    cut = llm.chat([USER], tools=[NOW], max_new_tokens=6)
    assert (cut.text, cut.finish_reason) == ('Let me see.\n<tool_call>{"name": "now", "arguments": {}}', "length")


# What is wrong.


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ({}, None, r"tools = \{\}: expected a list"),
        ([3], None, r"tools\[0\] = 3: expected"),
        ([{"type": "function", "function": {"name": "a b"}}], None, r"tools\[0\].function.name = 'a b'"),
        ([{"type": "function", "function": {"name": "f", "parameters": 1}}], None, "expected a JSON schema"),
        ([{"type": "function", "function": {"name": "f", "strict": 1}}], None, "expected true or false"),
        ([NOW, NOW], None, "several functions 'now'"),
        ([NOW], "some", "tool_choice = 'some': expected none, auto, required"),
        ([], "required", "expected tools to choose from"),
        ([NOW], {"type": "function", "function": {"name": "then"}}, "expected a function of tools"),
    ],
)
def test_wrong_tools_are_named(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_tools(tools, choice)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (3, "expected a list of calls"),
        ([{"function": {}}], r"messages\[0\].tool_calls\[0\] = .*: expected a function"),
        ([{"function": {"name": "f", "arguments": "{"}}], "arguments: no JSON"),
        ([{"function": {"name": "f", "arguments": "[1]"}}], "expected an object"),
    ],
)
def test_wrong_calls_in_messages_are_named(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_arguments([{"role": "assistant", "tool_calls": wrong}])


def test_templates_without_tools_or_of_no_known_family() -> None:
    plain = Template("{{ messages[-1].content }}", Controlled([], "</s>"))
    with pytest.raises(ChatError, match="has no place for tools"):
        turn(plain, [USER], to_tools([NOW]))
    foreign = Template("{{ tools }}{{ messages[-1].content }}", Controlled([], "</s>"))
    assert turn(foreign, [USER], to_tools([NOW])).parser() is None
    with pytest.raises(ChatError, match="expected tool_choice auto"):
        turn(foreign, [USER], to_tools([NOW], "required"))
    with pytest.raises(ValueError, match="response_format beside tools"):
        turn(foreign, [USER], to_tools([NOW])).settings(Settings(response_format={"type": "json_object"}))
    assert to_tools(None) is to_tools([NOW], "none") is None


@given(schemas.SCHEMAS.filter(lambda value: value.get("type") == "object"))
@settings(max_examples=30, deadline=None)
def test_any_functions_arguments_can_be_enforced(value: dict[str, Any]) -> None:
    llm = _hermes()
    tool = {"type": "function", "function": {"name": "f", "parameters": value, "strict": True}}
    for choice in ("auto", "required"):
        form = turn(llm.template, [USER], to_tools([tool], choice)).form
        assert form is not None
        llm.grammars.check(form)


def _hermes(made: list[LLM] = []) -> LLM:  # noqa: B006
    made[:] = made or [untrained("hermes")]
    return made[0]
