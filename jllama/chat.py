"""Chat: messages to ids by the model's own template, and a conversation as it grows.

A template is trusted and messages are not: control tokens come from the template alone, whatever a message looks like.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jllama import gguf_file
from jllama.errors import InputError, quoted
from jllama.gguf_file import Header
from jllama.tokenizer import Tokenizer, TokenizerError
from jllama.tokenizer.base import valid
from jllama.tokenizer.beside import Beside, is_gguf

if TYPE_CHECKING:
    from jllama.sandbox import Program

Message = Mapping[str, Any]

_ROLE = re.compile("[a-z_]+")
_NAME = re.compile(r"\w+")

_BUDGET = 4_000_000  # what a template may spend beside what its messages bring, as `sandbox` counts

_LLAMA2 = """\
{%- if messages[0].role == 'system' -%}
  {%- set system = '<<SYS>>\n' + messages[0].content | trim + '\n<</SYS>>\n\n' -%}
  {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role != ('assistant' if loop.index0 % 2 else 'user') -%}
    {{- raise_exception('expected user and assistant in turns, and a system message only first') -}}
  {%- elif message.role == 'user' -%}
    {{- bos_token + '[INST] ' + (system or '' if loop.first else '') + message.content | trim + ' [/INST]' -}}
  {%- else -%}
    {{- ' ' + message.content | trim + ' ' + eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""
_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
  {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}
"""
_CHATML = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""
_BUILT_IN = (("<|start_header_id|>", _LLAMA3), ("<|im_start|>", _CHATML), ("</s>", _LLAMA2))  # by a control token


class ChatError(InputError):
    """A template that is none, or messages that it doesn't take."""


class Template:
    """A chat template in Jinja, compiled in a sandbox.

    Args:
      source: the template.
      tokenizer: turns what it renders to ids.
      name: where the template comes from, for messages.
      add_bos: whether the ids begin with what the tokenizer puts before a text, whatever the template writes; None is
        whether the model wants that.
      guessed: whether the checkpoint has no template, and this one is taken because of its control tokens.
      tool_use: the template where there are tools, if the checkpoint has one of its own for that.

    Raises:
      ChatError: `source` is no Jinja template.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        name: str = "chat template",
        *,
        add_bos: bool | None = None,
        guessed: bool = False,
        tool_use: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.guessed = guessed
        self._prefix = tokenizer.prefix if add_bos is None or add_bos else ()
        self._sources = source, tool_use or source
        self._programs: dict[tuple[str, int], Program] = {}
        self._program(source, 0)

    def source(self, *, tools: bool = False) -> str:
        """The text of the template, or of the one where there are tools."""
        return self._sources[tools]

    def _program(self, source: str, marked: int) -> Program:
        """A template: as it is, with marks in what it looks for in messages, and with marks in words of that too."""
        from jllama.sandbox import Program  # not at the top: jinja2 takes time, and most runs are no chats

        hide = self.tokenizer.special.guard if marked else None
        try:
            if (source, marked) not in self._programs:
                self._programs[source, marked] = Program(source, hide, words=marked > 1)
            return self._programs[source, marked]
        except ValueError as e:
            raise ChatError(f"{self.name}: {e}") from e

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of `messages`, each a `role` and a `content`; BOS is there once where the model wants it.

        With `add_generation_prompt` they end where the answer begins. Templates see `tools` and `variables` too.

        Raises:
          ChatError: the template doesn't take these messages.
          TokenizerError: a message can't be encoded.
        """
        given = _each_text({"messages": messages, "tools": tools, **variables}, valid)
        for message in given["messages"]:
            if not isinstance(message, Mapping):
                raise ChatError(f"a message is {quoted(message)}; expected a role and a content")
            if not isinstance(role := message.get("role", ""), str) or not _ROLE.fullmatch(role):
                raise ChatError(f"a message's role is {quoted(role)}; expected a word like 'user'")
        ids = self.tokenizer.encode_template(self._text(given | {"add_generation_prompt": add_generation_prompt}))
        if self._prefix:
            bos, *more = self._prefix
            ids = list(itertools.dropwhile(lambda i: i == bos, ids))
            ids = [bos, *([] if ids[: len(more)] == more else more), *ids]
        return ids

    def _text(self, given: dict[str, Any]) -> str:
        """What the template writes, with marks in what came from messages and looks like a control token."""
        size, now = _weight(given), datetime.datetime.now()
        budget = _BUDGET + size * (50 + 4 * len(given["messages"]))
        source = self.source(tools=bool(given["tools"]))
        constants = {"documents": None, **self.tokenizer.names}

        def run(program: Program, variables: Mapping[str, Any]) -> str:
            return program.render(budget, now, **{**constants, **variables})

        try:
            text = run(self._program(source, 0), given)
        except ValueError as e:
            raise ChatError(f"{self.name} refuses the messages: {e}") from e
        if (guarded := _each_text(given, self.tokenizer.special.guard)) == given:
            return text
        # The template must write the same with the marks. Where it looks for what is marked, that is marked as well.
        for level in range(3):
            with contextlib.suppress(ValueError):
                marked = run(self._program(source, level), guarded)
                if self.tokenizer.special.show(marked) == text:
                    return marked
        raise ChatError(f"{self.name} changes what looks like a control token in a message: it can't stay text there")


def _each_text(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    """`value` with all texts in it changed but for roles and names, which templates compare and glue."""
    if isinstance(value, str):
        return value if key == "role" and _ROLE.fullmatch(value) else change(value)
    if isinstance(value, Mapping):
        return {k if _NAME.fullmatch(k) else change(k): _each_text(v, change, k) for k, v in value.items()}
    return [_each_text(v, change) for v in value] if isinstance(value, list | tuple) else value


def _weight(value: Any) -> int:
    """How many characters and items a value holds."""
    if isinstance(value, Mapping):
        return 1 + sum(map(_weight, value.values()))
    if isinstance(value, list | tuple):
        return 1 + sum(map(_weight, value))
    return 1 + len(value) if isinstance(value, str) else 1


def find_template(checkpoint: str | Path, tokenizer: Tokenizer, *, header: Header | None = None) -> Template:
    """Return the chat template of a checkpoint: its own, else the one that the control tokens tell.

    Its own is in a GGUF file, or in `chat_template.jinja` or `tokenizer_config.json` beside or in the checkpoint: those
    of Hugging Face say themselves where BOS is. `header` is that of a GGUF file which was read already.

    Raises:
      ChatError: there is none, or it is no Jinja template.
      GGUFError: a GGUF file is damaged.
      OSError: a file can't be read.
    """
    path = Path(checkpoint)
    if is_gguf(path) and (source := _of_gguf(path, header)) is not None:
        tool_use = _of_gguf(path, header, ".tool_use")
        return Template(source, tokenizer, f"{path}: tokenizer.chat_template", tool_use=tool_use)
    beside = Beside(path if path.is_dir() else path.parent)
    try:
        found, tool_use = beside.template(), beside.tool_template()
    except TokenizerError as e:
        raise ChatError(f"no chat template: {e}") from e
    if found is not None:
        return Template(found[0], tokenizer, found[1], add_bos=False, tool_use=tool_use)
    for control, source in _BUILT_IN:
        if control in tokenizer.special.ids:
            return Template(source, tokenizer, f"built-in template for {control}", guessed=True)
    raise ChatError(f"{checkpoint}: no chat template; expected one in the checkpoint, or control tokens of a known one")


def _of_gguf(path: Path, header: Header | None, which: str = "") -> str | None:
    source = (header or gguf_file.read(path)).metadata.get(f"tokenizer.chat_template{which}")
    return source if isinstance(source, str) else None


class Asked(NamedTuple):
    """What `Conversation.ask` returns.

    Args:
      ids: what the model is given to answer.
      kept: the conversation before the question, without the turns that were dropped.
      dropped: how many those are.
    """

    ids: list[int]
    kept: Conversation
    dropped: int


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The turns so far. It is a value: whatever changes it returns a new one.

    Args:
      template: turns messages to ids.
      system: the system message, "" for none.
      turns: questions and their answers.
    """

    template: Template
    system: str = ""
    turns: tuple[tuple[str, str], ...] = ()

    def ask(self, question: str, limit: int) -> Asked:
        """Return the ids that end in a question, with the oldest whole turns left out until they are `limit` at most.

        Without such a loss they extend those of the question before, as far as the template and the tokenizer allow.

        Raises:
          ChatError: the question alone is longer, or the template doesn't take these messages.
          TokenizerError: a message can't be encoded.
        """
        for dropped in range(len(self.turns) + 1):
            kept = dataclasses.replace(self, turns=self.turns[dropped:])
            ids = self.template.render([*kept.messages(), {"role": "user", "content": question}])
            if len(ids) <= limit:
                return Asked(ids, kept, dropped)
        raise ChatError(f"the question has {len(ids)} tokens with the system message and the template; {limit} fit")

    def add(self, question: str, answer: str) -> Conversation:
        """Return the conversation with one more turn."""
        return dataclasses.replace(self, turns=(*self.turns, (question, answer)))

    def messages(self) -> list[Message]:
        """Return the system message and the turns, each a `role` and a `content`."""
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for user, assistant in self.turns:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return messages
