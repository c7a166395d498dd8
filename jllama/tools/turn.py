"""A turn of a conversation in which functions may be called: what the model reads, and how its answer is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jllama.chat import ChatError, Message, Template
from jllama.response_format import Format
from jllama.settings import Settings
from jllama.tools.calls import CallParser
from jllama.tools.families import Family, call_format, family_of
from jllama.tools.request import Tools, with_arguments


class ToolsError(ChatError):
    """Functions that the template, or what is known of how its model writes calls, has no way for."""


class Turn(NamedTuple):
    """What is to be answered.

    Args:
      ids: what the model reads.
      tools: the functions that may be called.
      family: how calls are written; None: in no way that is known, and all is text.
      form: that of an answer whose calls are enforced.
    """

    ids: list[int]
    tools: Tools | None = None
    family: Family | None = None
    form: Format | None = None

    def settings(self, given: Settings) -> Settings:
        """Return how the turn is answered.

        Raises:
          ValueError: a response_format beside functions.
        """
        if self.tools is not None and given.form is not None:
            raise ValueError("response_format beside tools: expected one of them, as each settles what an answer is")
        return given if self.form is None else dataclasses.replace(given, response_format=self.form)

    def parser(self) -> CallParser | None:
        """Return what tells calls from text in one answer; None: all is text."""
        return CallParser(self.family, self.tools.names) if self.tools and self.family else None


def turn(template: Template, messages: Sequence[Message], tools: Tools | None, **variables: Any) -> Turn:
    """Render messages, among them calls and their results, and the functions that may be called.

    Raises:
      ToolsError: the template has no place for functions; or calls are to be enforced, and how the model writes them
        isn't known.
      ChatError: the template refuses the messages.
      TokenizerError: a message can't be encoded.
      ValueError: a call in the messages is none.
    """
    messages = with_arguments(messages)
    if tools is None:
        return Turn(template.render(messages, **variables))
    source = template.source(tools=True)
    if "tools" not in source:
        raise ToolsError(f"{template.name} has no place for tools")
    family = family_of(source)
    if family is None and tools.enforced:
        raise ToolsError(f"{template.name} writes calls in a way that can't be enforced: expected tool_choice auto")
    form = None if family is None else call_format(family, tools, template.tokenizer.special.ids)
    return Turn(template.render(messages, tools=tools.given, **variables), tools, family, form)
