"""Text completions: prompts as texts or ids, and what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jllama.errors import quoted
from jllama.server.errors import refusal
from jllama.server.fields import Fields
from jllama.server.logprobs import TextLogprobs
from jllama.server.requests import Given, check_length, top_logprobs
from jllama.tokenizer import Tokenizer, TokenizerError
from jllama.tools import ToolCall


class Shape:
    """How a completion is written."""

    endpoint = "completions"
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"
    logprobs = TextLogprobs

    @staticmethod
    def first() -> dict[str, Any] | None:
        """Return the beginning of a choice: there is none."""
        return None

    @staticmethod
    def part(text: str, calls: Sequence[ToolCall] = (), first: int = 0) -> dict[str, Any]:
        """Return a part of a choice, "" for its end; there are no calls."""
        return {"text": text}

    full = part


def prompts(fields: Fields, tokenizer: Tokenizer, *, most: int, context: int) -> list[Given]:
    """Return the prompts of a request: a text, up to `context` ids, or up to `most` of these.

    Raises:
      ApiError: there is none, or it can't be encoded.
    """
    if fields.get("tools", list) and fields.values.get("tool_choice") != "none":
        raise refusal("tools", "tools are for /v1/chat/completions: leave them out")
    value = fields.values.get("prompt")
    if isinstance(value, list) and value and not _is_id(value[0]):
        if len(value) > most:
            raise refusal("prompt", f"{len(value)} prompts: expected {most} at most, the rows and the queue together")
        return [_prompt(each, tokenizer, context) for each in value]
    return [_prompt(value, tokenizer, context)]


def _prompt(value: Any, tokenizer: Tokenizer, context: int) -> Given:
    if isinstance(value, str):
        try:
            return Given(value, tokenizer.prompt_ids(value))
        except TokenizerError as e:
            raise refusal("prompt", str(e)) from e
    if not isinstance(value, list) or not value or not all(map(_is_id, value)):
        raise refusal(
            "prompt", f"prompt = {quoted(value)}: expected a text, an array of token ids, or an array of these"
        )
    check_length(value, context, 0)
    if wrong := [i for i in value if not 0 <= i < tokenizer.vocab_size]:
        raise refusal("prompt", f"prompt has the token id {quoted(wrong[0])}: expected 0 to {tokenizer.vocab_size - 1}")
    return Given(tokenizer.decode(value), value)


def _is_id(value: Any) -> bool:
    return type(value) is int


def wants_logprobs(fields: Fields) -> int | None:
    """Return how many likely tokens are wanted beside each; None: no log-probabilities."""
    return top_logprobs(fields, "logprobs") if "logprobs" in fields.values else None
