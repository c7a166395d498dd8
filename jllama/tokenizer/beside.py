"""The files of a checkpoint that say how text becomes tokens, and what they say: known here alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from absl import logging

from jllama import gguf_file
from jllama.errors import quoted
from jllama.tokenizer.base import TokenizerError, is_id
from jllama.tokenizer.special import ENDS

TOKENIZERS = ("tokenizer.bin", "tok512.bin", "tokenizer.json", "tokenizer.model", "vocab.json")


def find(checkpoint: str | Path) -> Path:
    """Return the tokenizer of a checkpoint: inside a GGUF file, else beside it, or in it where that is a folder.

    Raises:
      TokenizerError: there is none.
    """
    checkpoint = Path(checkpoint)
    if is_gguf(checkpoint):
        return checkpoint
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    for name in TOKENIZERS:
        if (folder / name).is_file():
            return folder / name
    if checkpoint.is_dir() and len(inside := sorted(folder.glob("*.gguf"))) == 1:
        return inside[0]
    if not checkpoint.exists():
        raise TokenizerError(f"{checkpoint}: no such file or folder, and none of {', '.join(TOKENIZERS)} there")
    raise TokenizerError(f"{checkpoint}: no tokenizer in {folder}; expected one of {', '.join(TOKENIZERS)}")


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do; one that can't be read doesn't."""
    try:
        with path.open("rb") as file:
            return gguf_file.recognises(file.read(4))
    except OSError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
      TokenizerError: it holds something else.
      OSError: it can't be read.
    """
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as e:
        raise e if isinstance(e, TokenizerError) else TokenizerError(f"{path}: damaged JSON: {e}") from e
    if not isinstance(found, dict):
        raise TokenizerError(f"{path}: holds a JSON {type(found).__name__}; expected an object")
    return found


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text.

    Raises:
      TokenizerError: it is none.
      OSError: it can't be read.
    """
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as e:
        raise TokenizerError(f"{path}: byte {e.start} is no UTF-8: {e.reason}") from e


class Beside:
    """What the files beside a tokenizer say of it.

    Args:
      folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of tokenizer_config.json."""
        return self._json("tokenizer_config.json")

    @cached_property
    def _models(self) -> dict[str, dict[str, Any]]:
        """What is said of the model; all is read, so that a damaged file is named whatever the other says."""
        return {name: self._json(name) for name in ("generation_config.json", "config.json")}

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(file) if (file := self.folder / name).is_file() else {}

    def ids(self, name: str, vocab: Mapping[str, int]) -> list[int]:
        """Return the ids of "bos" or "eos" in `vocab`, the main one first.

        Raises:
          TokenizerError: something else stands where an id should.
        """
        token = self.config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        first = [vocab[text]] if isinstance(text, str) and text in vocab else []
        return list(dict.fromkeys([*first, *self._numbers(f"{name}_token_id")]))

    def _numbers(self, key: str) -> list[int]:
        """The ids that generation_config.json states, else config.json."""
        for name, fields in self._models.items():
            found = fields.get(key)
            numbers = found if isinstance(found, list) else [] if found is None else [found]
            if not all(map(is_id, numbers)):
                raise TokenizerError(f"{self.folder / name}: {key} is {quoted(found)}; expected a token id, or some")
            if numbers:
                return numbers
        return []

    def ends(self, vocab: Mapping[str, int], otherwise: Iterable[int] = ()) -> list[int]:
        """Return the ids that end a text, EOS first; none, with a warning, where nothing tells."""
        named = [vocab[text] for text in (*ENDS, "</s>") if text in vocab][:1]
        ends = self.ids("eos", vocab) or list(otherwise) or named
        if not ends:
            logging.warning("%s: nothing says which token ends a text: answers go on to their limit", self.folder)
        return ends

    @property
    def bos_token(self) -> str | None:
        """What templates write for BOS: "" where tokenizer_config.json says there is none, None if it is silent."""
        return "" if "bos_token" in self.config and self.config["bos_token"] is None else None

    @property
    def add_bos(self) -> bool | None:
        """Whether tokenizer_config.json wants BOS before a text, None if it is silent."""
        stated = self.config.get("add_bos_token")
        return stated if isinstance(stated, bool) else None

    def added(self) -> dict[int, dict[str, Any]]:
        """Return the tokens that were added to a vocabulary, by id: each with its `content`, and what else is known.

        Raises:
          TokenizerError: a file lists something else.
        """
        plain, listed = self._json("added_tokens.json"), self.config.get("added_tokens_decoder", {})
        try:
            found = {i: {"content": text} for text, i in plain.items()}
            found |= {int(i): {**token} for i, token in listed.items()}
        except (AttributeError, TypeError, ValueError) as e:
            raise TokenizerError(f"{self.folder}: the list of added tokens is damaged: {e}") from e
        for i, token in found.items():
            if not is_id(i) or not isinstance(token.get("content"), str):
                raise TokenizerError(f"{self.folder}: {quoted(token.get('content'))} was added with the id {quoted(i)}")
        return found

    def template(self) -> tuple[str, str] | None:
        """Return the chat template and where it stands: chat_template.jinja, or the default in tokenizer_config.json.

        Raises:
          TokenizerError: it can't be read.
          OSError: a file can't be read.
        """
        if (file := self.folder / "chat_template.jinja").is_file():
            return read_text(file), str(file)
        origin = f"{self.folder / 'tokenizer_config.json'}: chat_template"
        found = self._templates(origin).get("default")
        return (found, origin) if isinstance(found, str) else None

    def tool_template(self) -> str | None:
        """Return the template for conversations with tools, where tokenizer_config.json has one of its own for them.

        Raises:
          TokenizerError: it can't be read.
        """
        if (self.folder / "chat_template.jinja").is_file():
            return None
        found = self._templates(f"{self.folder / 'tokenizer_config.json'}: chat_template").get("tool_use")
        return found if isinstance(found, str) else None

    def _templates(self, origin: str) -> dict[str, Any]:
        found = self.config.get("chat_template")
        try:
            return {each["name"]: each["template"] for each in found} if isinstance(found, list) else {"default": found}
        except (KeyError, TypeError) as e:
            raise TokenizerError(f"{origin}: a list without names and templates") from e
