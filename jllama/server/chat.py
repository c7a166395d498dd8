"""Chat completions: messages to a prompt, and an answer as a message."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jllama.chat import Template
from jllama.errors import quoted
from jllama.server.errors import refusal
from jllama.server.fields import Fields
from jllama.server.logprobs import ChatLogprobs
from jllama.server.requests import Given, top_logprobs
from jllama.tools import ToolCall, Tools, ToolsError, to_tools, turn

_MOST_MESSAGES = 4096
_ROLES = {role: role for role in ("system", "user", "assistant", "tool", "function")} | {"developer": "system"}
_PARTS = {"text": "text", "refusal": "refusal"}  # kinds of parts -> the field of their text
_KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content")  # what templates look at, beside role and content
_NOT_VARIABLES = {"messages", "tools", "add_generation_prompt"}


class Shape:
    """How a chat's answer is written."""

    endpoint = "chat"
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    logprobs = ChatLogprobs

    @staticmethod
    def first() -> dict[str, Any] | None:
        """Return the beginning of a choice."""
        return {"delta": {"role": "assistant", "content": None}}

    @staticmethod
    def part(text: str, calls: Sequence[ToolCall] = (), first: int = 0) -> dict[str, Any]:
        """Return a part of a choice, "" without calls for its end; `first` is the index of the first call."""
        written = [{"index": i, **_written(call)} for i, call in enumerate(calls, first)]
        return {"delta": ({"content": text} if text else {}) | ({"tool_calls": written} if written else {})}

    @staticmethod
    def full(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return a choice."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [_written(call) for call in calls]}
        return {"message": message}


def _written(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def prompts(fields: Fields, template: Template | None) -> list[Given]:
    """Render the messages of a request.

    Raises:
      ApiError: there is no template, or the messages are none that it takes.
    """
    if template is None:
        raise refusal("messages", "this model has no chat template: /v1/completions continues texts")
    if fields.get("echo", bool):
        raise refusal("echo", "echo is for /v1/completions: leave it out")
    given = fields.get("messages", list)
    if not given or len(given) > _MOST_MESSAGES:
        raise fields.wrong("messages", f"1 to {_MOST_MESSAGES} messages")
    messages = [message(each, f"messages[{i}]") for i, each in enumerate(given)]
    variables = fields.get("chat_template_kwargs", dict) or {}
    if reserved := sorted(_NOT_VARIABLES & variables.keys()):
        raise refusal("chat_template_kwargs", f"chat_template_kwargs can't set {reserved[0]}")
    tools = _tools(fields)
    try:
        asked = turn(template, messages, tools, **variables)
    except ValueError as e:
        param = "tools" if isinstance(e, ToolsError) else "messages"
        raise refusal(param, str(e).replace(template.name, "the chat template", 1)) from e
    return [Given(messages[-1]["content"], asked.ids, asked)]


def _tools(fields: Fields) -> Tools | None:
    """Return the functions that may be called."""
    try:
        return to_tools(*(fields.values.get(name) for name in ("tools", "tool_choice", "parallel_tool_calls")))
    except ValueError as e:
        raise refusal(re.split(r"\W", str(e))[0], str(e)) from e  # which begins with the field


def message(value: Any, where: str) -> dict[str, Any]:
    """Return a message as templates want it: a role and a text.

    Raises:
      ApiError: it is none.
    """
    if not isinstance(value, dict):
        raise refusal(where, f"{where} is {quoted(value)}: expected an object with a role and a content")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refusal(f"{where}.role", f"{where}.role = {quoted(role)}: expected one of {', '.join(_ROLES)}")
    kept = {name: value[name] for name in _KEPT if value.get(name) is not None}
    return {"role": _ROLES[role], "content": _content(value.get("content"), f"{where}.content"), **kept}


def _content(value: Any, where: str) -> str:
    """Return the text of a content: one string, or the parts of a list joined."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise refusal(where, f"{where} = {quoted(value)}: expected a string, or an array of text parts")
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(value))


def _part(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in _PARTS:
        raise refusal(where, f"{where} has the type {quoted(kind)}: expected text, as this model reads nothing else")
    text = value.get(_PARTS[kind])
    if not isinstance(text, str):
        raise refusal(where, f"{where}.{_PARTS[kind]} = {quoted(text)}: expected a string")
    return text


def wants_logprobs(fields: Fields) -> int | None:
    """Return how many likely tokens are wanted beside each; None: no log-probabilities."""
    count = top_logprobs(fields, "top_logprobs")
    if fields.get("logprobs", bool):
        return count
    if count:
        raise refusal("top_logprobs", "top_logprobs goes with logprobs: expected logprobs = true beside it")
    return None
