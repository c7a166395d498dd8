"""A turn of a conversation in which functions may be called: what the model reads, and how its answer is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jllama.chat import ChatError, Message, Template
from jllama.settings import Settings
from jllama.tools.calls import CallParser
from jllama.tools.families import call_format, family_of
from jllama.tools.request import Tools, with_arguments


class Turn(NamedTuple):
    """What is to be answered.

    Args:
      ids: what the model reads.
      settings: how it answers, in the form of calls where those are enforced.
      parser: tells calls from text in the answer; None: all is text.
    """

    ids: list[int]
    settings: Settings
    parser: CallParser | None


def turn(template: Template, messages: Sequence[Message], settings: Settings, tools: Tools | None) -> Turn:
    """Render messages, among them calls and their results, and the functions that may be called.

    Raises:
      ChatError: the template refuses the messages, or has no place for functions; or calls are to be enforced, and how
        the model writes them isn't known.
      TokenizerError: a message can't be encoded.
      ValueError: a call in the messages is none; a response_format beside functions.
    """
    messages = with_arguments(messages)
    if tools is None:
        return Turn(template.render(messages), settings, None)
    if settings.form is not None:
        raise ValueError("response_format and tools: expected one of them, as the one excludes the other")
    source = template.source(tools=True)
    if "tools" not in source:
        raise ChatError(f"{template.name} has no place for tools")
    family = family_of(source)
    if family is not None:
        form = call_format(family, tools, template.tokenizer.special.ids)
        settings = settings if form is None else dataclasses.replace(settings, response_format=form)
    elif tools.enforced:
        raise ChatError(f"{template.name} writes calls in a way that can't be enforced: expected tool_choice auto")
    ids = template.render(messages, tools=tools.given)
    return Turn(ids, settings, None if family is None else CallParser(family, tools.names))
