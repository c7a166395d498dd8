"""What a model is given to call, as OpenAI's API writes it, checked."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jllama.errors import quoted

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MOST = 128


@dataclasses.dataclass(frozen=True)
class Tools:
    """Functions that a model may call.

    Args:
      given: each `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`, for templates.
      choice: "auto", or "required" where there must be a call.
      only: the name of the function that must be called, None for any.
      parallel: whether there may be several calls in one answer.
    """

    given: tuple[Mapping[str, Any], ...]
    choice: str = "auto"
    only: str | None = None
    parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions."""
        return tuple(tool["function"]["name"] for tool in self.given)

    @property
    def enforced(self) -> bool:
        """Whether what is called and with which arguments is to be held to what the functions say."""
        return self.choice == "required" or any(tool["function"].get("strict") is True for tool in self.given)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schema of the arguments of each function that can be called.

        With "auto" those of functions that are not strict may be anything.
        """
        functions = [tool["function"] for tool in self.given]
        return {
            f["name"]: _parameters(f) if self.choice == "required" or f.get("strict") is True else {"type": "object"}
            for f in functions
            if self.only in (None, f["name"])
        }


def to_tools(tools: Any, choice: Any = None, parallel: Any = None) -> Tools | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`, as OpenAI's API writes them; None: nothing can be called.

    Raises:
      ValueError: they are wrong, by name.
    """
    if not (tools is None or (isinstance(tools, Sequence) and not isinstance(tools, str | bytes))):
        raise ValueError(f"tools = {quoted(tools)}: expected a list of functions")
    if not (parallel is None or isinstance(parallel, bool)):
        raise ValueError(f"parallel_tool_calls = {quoted(parallel)}: expected true or false")
    tools = tools or ()
    if len(tools) > _MOST:
        raise ValueError(f"tools has {len(tools)} functions: expected {_MOST} at most")
    given = tuple(_checked(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in given]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"tools has several functions {quoted(twice[0])}: expected each name once")
    if isinstance(choice, Mapping):
        function = choice.get("function")
        only = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or only not in names:
            raise ValueError(f"tool_choice = {quoted(choice)}: expected a function of tools")
        return Tools(given, "required", only, parallel=False)
    if choice not in (None, "none", "auto", "required"):
        raise ValueError(f"tool_choice = {quoted(choice)}: expected none, auto, required or a function of tools")
    if choice == "required" and not given:
        raise ValueError("tool_choice = 'required': expected tools to choose from")
    return Tools(given, choice or "auto", None, parallel is not False) if given and choice != "none" else None


def _checked(tool: Any, where: str) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise ValueError(f'{where} = {quoted(tool)}: expected {{"type": "function", "function": {{"name": ...}}}}')
    if not isinstance(name := function.get("name"), str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}.function.name = {quoted(name)}: expected up to 64 letters, digits, _, . or -")
    if not isinstance(parameters := function.get("parameters"), Mapping | None):
        raise ValueError(f"{where}.function.parameters = {quoted(parameters)}: expected a JSON schema")
    if not isinstance(strict := function.get("strict"), bool | None):
        raise ValueError(f"{where}.function.strict = {quoted(strict)}: expected true or false")
    # Templates differ in what they do without these.
    filled = {"description": "", **{k: v for k, v in function.items() if v is not None}}
    return {"type": "function", "function": filled | {"parameters": _parameters(function)}}


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {}} | dict(function.get("parameters") or {})


def with_arguments(messages: Sequence[Any]) -> list[Any]:
    """Return messages as templates want them: the arguments of tool calls as objects, not as JSON in a string.

    Raises:
      ValueError: a tool call is none.
    """
    return [
        _opened(message, f"messages[{i}]") if isinstance(message, Mapping) and "tool_calls" in message else message
        for i, message in enumerate(messages)
    ]


def _opened(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    calls = message["tool_calls"]
    if not calls:  # templates ask whether there is such a field, not what is in it
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError(f"{where}.tool_calls = {quoted(calls)}: expected a list of calls")
    opened = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}.tool_calls[{i}] = {quoted(call)}: expected a function with a name and arguments")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{where}.tool_calls[{i}].function.arguments: no JSON: {e}") from e
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{where}.tool_calls[{i}].function.arguments = {quoted(arguments)}: expected an object")
        opened.append({**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": opened}
