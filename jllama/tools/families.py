"""How the families of models write tool calls: an entry a family. What no entry knows stays text.

Sources: the chat templates of the families; for Mistral's calls by name the tokenizers of mistral-common.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jllama.response_format import Format
from jllama.tools.request import Tools

Call = tuple[str, Any]  # a name and its arguments
# Reads the calls that a text begins with, and returns them and how long they are; None where it takes more to tell. It
# is also told whether no more will come. Raises ValueError where there are none.
Read = Callable[[str, bool], tuple[list[Call], int] | None]

_MOST = 16  # calls of one answer, where they are enforced
_LITERAL = 10  # characters of the longest word that JSON may break off in
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAMED_BEGIN = re.compile(r"\s*[\w.-]*\s*(\[[\w\]]*\s*\w*\s*){0,2}")


class Family(NamedTuple):
    """A way to write tool calls.

    Args:
      marker: what begins calls wherever it stands in an answer.
      opening: what an answer begins with that has calls and no marker, as a regular expression.
      read: reads what begins so.
      call: what stands before the name of a function, between name and arguments, and after them.
      around: what stands around all calls, after the marker.
      between: what stands between two calls; None where there can't be two.
      marked: whether enforced calls have the marker.
    """

    marker: str
    opening: str
    read: Read
    call: tuple[str, str, str]
    around: tuple[str, str] = ("", "")
    between: str | None = None
    marked: bool = True


def _json(text: str, at: int, final: bool) -> tuple[Any, int] | None:
    """The JSON value at a place in a text, and where it ends; None where it may go on after the text."""
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as e:
        if not final and (len(text) - e.pos < _LITERAL or e.msg.startswith("Unterminated string")):
            return None
        raise
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _spaces(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _call(value: Any) -> Call:
    """The call that an object describes."""
    if isinstance(value, dict):
        for key in ("arguments", "parameters"):
            if isinstance(arguments := value.get(key), str):  # some models write JSON in JSON
                arguments = json.loads(arguments)
            if isinstance(value.get("name"), str) and isinstance(arguments, dict):
                return value["name"], arguments
    raise ValueError("no call")


def _read_hermes(text: str, final: bool) -> tuple[list[Call], int] | None:
    end = "</tool_call>"
    found = _json(text, _spaces(text, len("<tool_call>")), final)
    if found is None:
        return None
    at = _spaces(text, found[1])
    if text.startswith(end, at):
        return [_call(found[0])], at + len(end)
    if final and at == len(text):  # an answer may end without it
        return [_call(found[0])], at
    if not final and end.startswith(text[at:]):
        return None
    raise ValueError("no end")


def _read_llama(text: str, final: bool) -> tuple[list[Call], int] | None:
    found = _json(text, _spaces(text, len("<|python_tag|>") if text.startswith("<") else 0), final)
    return found and ([_call(found[0])], found[1])


def _read_mistral(text: str, final: bool) -> tuple[list[Call], int] | None:
    at = _spaces(text, len("[TOOL_CALLS]") if text.startswith("[TOOL_CALLS]") else 0)
    if text[at : at + 1] in ("[", ""):
        found = _json(text, at, final)
        if found is None:
            return None
        if not isinstance(found[0], list) or not found[0]:
            raise ValueError("no calls")
        return [_call(value) for value in found[0]], found[1]
    if named := _NAMED.match(text, at):
        found = _json(text, named.end(), final)
        return found and ([_call({"name": named[1], "arguments": found[0]})], found[1])
    if not final and _NAMED_BEGIN.fullmatch(text, at):
        return None
    raise ValueError("no call")


_MISTRAL = Family(
    marker="[TOOL_CALLS]",
    opening=r"\[\s*\{",  # where the marker is a token without bytes
    read=_read_mistral,
    call=('{"name": "', '", "arguments": ', "}"),
    around=("[", "]"),
    between=", ",
)
FAMILIES = {
    "hermes": Family(
        marker="<tool_call>",
        opening="",
        read=_read_hermes,
        call=('\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        between="\n<tool_call>",
    ),
    "llama 3": Family(
        marker="<|python_tag|>",
        opening=r"\{",
        read=_read_llama,
        call=('{"name": "', '", "parameters": ', "}"),
        marked=False,
    ),
    "mistral": _MISTRAL,
    "mistral named": _MISTRAL._replace(call=("", "[ARGS]", ""), around=("", ""), between="[TOOL_CALLS]"),
}


def family_of(template: str) -> Family | None:
    """Return how a model writes calls, by the source of its chat template; None for no way that is known here."""
    if "[TOOL_CALLS]" in template:
        return FAMILIES["mistral named" if "[ARGS]" in template else "mistral"]
    if "<tool_call>" in template:
        return FAMILIES["hermes"]
    if "<|start_header_id|>" in template and "parameters" in template:
        return FAMILIES["llama 3"]
    return None


def call_format(family: Family, tools: Tools, controls: Mapping[str, int]) -> Format | None:
    """Return the form that an answer must have for its calls to fit the functions; None where it may have any.

    Args:
      family: how calls are written.
      tools: what may be called.
      controls: the control tokens of the tokenizer by their texts, which no other tokens make.
    """
    if not tools.enforced:
        return None
    before, middle, after = family.call
    calls, arguments = [], []
    for i, (name, schema) in enumerate(tools.schemas().items()):
        calls.append(f"{_text(before + name + middle, controls)} args_{i} {_text(after, controls)}")
        options = {"whitespace_pattern": " ", **schema.get("x-guidance", {})}
        arguments.append(f"args_{i}: %json {json.dumps({**schema, 'x-guidance': options})}")
    several = tools.parallel and family.between is not None
    more = f"({_text(family.between or '', controls)} call){{0,{_MOST - 1}}}" if several else ""
    marker = _text(family.marker, controls)
    if tools.choice == "required":
        start = [f"start: {marker if family.marked else ''} calls"]
    elif family.marked:
        head = f"head: TEXT {marker}" if family.marker in controls else f"head[lazy]: TEXT {marker}"
        start = ["start: (head calls)* TEXT" if several else "start: TEXT | head calls", "TEXT: /(.|\\n)*/", head]
    else:  # no other answer begins like a call
        start = ["start: calls | OTHER", r"OTHER: /([^{\s](.|\n)*)?/"]
    around = [_text(text, controls) for text in family.around]
    rules = [*start, f"calls: {around[0]} call {more} {around[1]}", f"call: {' | '.join(calls)}", *arguments]
    return Format("lark", "\n".join(rules))


def _text(text: str, controls: Mapping[str, int]) -> str:
    """A text in a Lark grammar, of which control tokens are parts."""
    names = [re.escape(name) for name in controls if name in text]
    parts = re.split(f"({'|'.join(names)})", text) if names else [text]
    return " ".join(f"<[{controls[part]}]>" if part in controls else json.dumps(part) for part in parts if part)
