"""Texts to ids and back, as llama.cpp's server has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jllama.errors import quoted
from jllama.server.errors import refusal
from jllama.server.fields import Fields
from jllama.server.logprobs import Spelling
from jllama.tokenizer import Tokenizer, TokenizerError

Conversion = Callable[[Tokenizer, Fields], dict[str, Any]]


def tokenize(tokenizer: Tokenizer, fields: Fields) -> dict[str, Any]:
    """Return the ids of `content`; with `with_pieces` each with its text, or its bytes where they are no text.

    Control tokens in it are taken for what they look like, unless `parse_special` is false; with `add_special` the ids
    begin with what the model wants before a text.

    Raises:
      ApiError: a field is wrong.
    """
    content = fields.get("content", str)
    if content is None:
        raise fields.wrong("content", "a text")
    try:
        literal = fields.get("parse_special", bool) is False
        ids = tokenizer.encode(content) if literal else tokenizer.encode_template(content)
    except TokenizerError as e:
        raise refusal("content", str(e)) from e
    if fields.get("add_special", bool):
        ids = [*tokenizer.prefix, *ids]
    if not fields.get("with_pieces", bool):
        return {"tokens": ids}
    spelling = Spelling(tokenizer)
    return {"tokens": [{"id": i, "piece": _piece(spelling.next(i))} for i in ids]}


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def detokenize(tokenizer: Tokenizer, fields: Fields) -> dict[str, Any]:
    """Return the text of `tokens`.

    Raises:
      ApiError: they are no ids.
    """
    ids = fields.get("tokens", list)
    if ids is None:
        raise fields.wrong("tokens", "an array of token ids")
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < tokenizer.vocab_size]:
        raise refusal("tokens", f"token id {quoted(wrong[0])}: expected 0 to {tokenizer.vocab_size - 1}")
    return {"content": tokenizer.decode(ids)}
