"""Chat: messages to ids by the model's own template, and a conversation as it grows.

A template is trusted and messages are not: control tokens come from the template alone, whatever a message looks like.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jllama import gguf_file
from jllama.gguf_file import Header
from jllama.tokenizer import Tokenizer

Message = Mapping[str, str]

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


class ChatError(ValueError):
    """A template that is none, or messages that it doesn't take."""


class Template:
    """A chat template in Jinja, compiled in a sandbox.

    Args:
      source: the template.
      tokenizer: turns what it renders to ids.
      name: where the template comes from, for messages.

    Raises:
      ChatError: `source` is no Jinja template.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, name: str = "chat template") -> None:
        self.tokenizer = tokenizer
        self.name = name
        texts = {i: text for text, i in tokenizer.special.ids.items()}
        self._names = {"bos_token": texts.get(tokenizer.bos, ""), "eos_token": texts.get(tokenizer.eos, "")}
        try:
            self._jinja = _environment().from_string(_without_generation_tags(source))
        except jinja2.TemplateSyntaxError as e:
            raise ChatError(f"{name}, line {e.lineno}: {e.message}") from e

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of `messages`, each a `role` and a `content`; BOS is there once where the model wants it.

        With `add_generation_prompt` they end where the answer begins.

        Raises:
          ChatError: the template doesn't take these messages.
          TokenizerError: a message can't be encoded.
        """
        guarded = [self._guard(message) for message in messages]
        try:
            text = self._jinja.render(
                messages=guarded,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._names,
            )
        except Exception as e:  # a template is a program, and not ours
            raise ChatError(f"{self.name} refuses the messages: {e}") from e
        ids, bos = self.tokenizer.encode_template(text), self.tokenizer.bos
        if self.tokenizer.add_bos:
            begins = next((at for at, i in enumerate(ids) if i != bos), len(ids))
            ids = [bos, *ids[begins:]]
        return ids

    def _guard(self, message: Message) -> dict[str, str]:
        """The message, with nothing in it that could become a control token; templates compare and glue its role."""
        if not re.fullmatch("[a-z_]+", role := message.get("role", "")):
            raise ChatError(f"a message's role is {role!r}; expected a word like 'user'")
        return {key: text if key == "role" else self.tokenizer.guard(text) for key, text in message.items()}


def find_template(checkpoint: str | Path, tokenizer: Tokenizer, *, header: Header | None = None) -> Template:
    """Return the chat template of a checkpoint: its own, else the one that the control tokens tell.

    Its own is in a GGUF file, or in `chat_template.jinja` or `tokenizer_config.json` beside or in the checkpoint.
    `header` is that of a GGUF file which was read already.

    Raises:
      ChatError: there is none, or it is no Jinja template.
      GGUFError: a GGUF file is damaged.
      OSError: a file can't be read.
    """
    path = Path(checkpoint)
    folder = path if path.is_dir() else path.parent
    if path.is_file() and (source := _of_gguf(path, header)) is not None:
        return Template(source, tokenizer, f"{path}: tokenizer.chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        return Template(file.read_text("utf-8"), tokenizer, str(file))
    if (file := folder / "tokenizer_config.json").is_file() and (source := _of_config(file)) is not None:
        return Template(source, tokenizer, f"{file}: chat_template")
    for control, source in _BUILT_IN:
        if control in tokenizer.special.ids:
            return Template(source, tokenizer, f"built-in template for {control}")
    raise ChatError(f"{checkpoint}: no chat template; expected one in the checkpoint, or control tokens of a known one")


def _of_gguf(path: Path, header: Header | None) -> str | None:
    if header is None:
        with path.open("rb") as file:
            if not gguf_file.recognises(file.read(4)):
                return None
        header = gguf_file.read(path)
    source = header.metadata.get("tokenizer.chat_template")
    return source if isinstance(source, str) else None


def _of_config(path: Path) -> str | None:
    """The template in a tokenizer_config.json; of several named ones the default."""
    try:
        found = json.loads(path.read_text("utf-8")).get("chat_template")
        if isinstance(found, list):
            found = {each["name"]: each["template"] for each in found}.get("default")
    except (ValueError, AttributeError, KeyError, TypeError) as e:
        raise ChatError(f"{path}: chat_template can't be read: {e}") from e
    return found if isinstance(found, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates may use, as in transformers, utils/chat_template_utils.py."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _without_generation_tags(source: str) -> str:
    """`source` with the tags that mark answers for training replaced by ones that do nothing."""
    source = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", source)
    return re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", source)


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
