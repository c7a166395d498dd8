"""Text to token ids and back: `Tokenizer`, and `load`, which knows a file by its content.

A format is one module with `recognises(head)` and `read(data, path)`, and one row of the table in `load`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from jllama.text import StreamDecoder


class TokenizerError(ValueError):
    """A file that makes no tokenizer, or a text or token id that a tokenizer can't take."""


class Tokenizer(ABC):
    """Text to token ids 0 .. V-1 and back.

    Args:
      pieces: for each id its bytes inside a text, and its bytes as the first token of a text. The two differ where
        the encoder puts a space before a text, which has to go again.
      bos: id that begins a text.
      eos: id that ends one.

    Attributes:
      vocab_size: number of ids V.
      stop_ids: ids that end a generation and are never shown. BOS is one: llama2.c's models end a story with it.
    """

    def __init__(self, pieces: Sequence[tuple[bytes, bytes]], *, bos: int, eos: int) -> None:
        self._pieces = pieces
        self.vocab_size = len(pieces)
        self.bos = bos
        self.eos = eos
        self.stop_ids: tuple[int, ...] = (bos, eos)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without BOS; "" has none. No text yields a control id.

        Raises:
          TokenizerError: `text` can't be encoded.
        """

    @abstractmethod
    def first_after(self, token: int, *, first: bool) -> bool:
        """Whether the token after `token` counts as the first of a text, given whether `token` does."""

    def piece(self, token: int, *, first: bool) -> bytes:
        """Return the bytes of a token: as the first of a text, or inside one.

        Raises:
          TokenizerError: `token` is not in the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"token id {token}: expected 0 to {self.vocab_size - 1}")
        inside, at_start = self._pieces[token]
        return at_start if first else inside

    def prompt_ids(self, text: str) -> list[int]:
        """Return BOS and the ids of `text`: what a model is given to continue."""
        return [self.bos, *self.encode(text)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`, just as `StreamDecoder` gives it piece by piece."""
        decoder = StreamDecoder(self)
        return "".join([*map(decoder.feed, tokens), decoder.flush()])


_BESIDE_A_CHECKPOINT = ("tokenizer.bin", "tok512.bin", "tokenizer.model")

_FOREIGN = (
    (re.compile(rb"version https://git-lfs"), "a Git LFS pointer in place of the file itself (`git lfs pull` gets it)"),
    (re.compile(rb"\s*[{\[]"), "JSON, like Hugging Face's tokenizer.json"),
    (re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n"), "tiktoken's base64 format"),
)


def load(path: str | Path) -> Tokenizer:
    """Read a tokenizer: a SentencePiece model, or a llama2.c `tokenizer.bin` of the new or the old layout.

    The content decides, not the name.

    Raises:
      TokenizerError: the file can't be read, is of another kind, or is damaged.
    """
    # Not at the top, because the formats build on this module.
    from jllama.tokenizer import llama2c, sentencepiece

    formats = (
        ("a SentencePiece model", sentencepiece.recognises, sentencepiece.read),
        ("a llama2.c tokenizer.bin", llama2c.recognises, llama2c.read),
    )
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(256)
            for _, recognises, read in formats:
                if recognises(head):
                    return read(head + file.read(), path)
    except OSError as e:
        raise TokenizerError(f"{path}: cannot be read: {e.strerror}") from e
    expected = " or ".join(name for name, *_ in formats)
    found = next((f"looks like {name}" for pattern, name in _FOREIGN if pattern.match(head)), f"begins {head[:16]!r}")
    raise TokenizerError(f"{path}: {found if head else 'is empty'}; expected {expected}")


def find(checkpoint: str | Path) -> Path:
    """Return the tokenizer that lies beside a checkpoint, or in it where that is a folder.

    Raises:
      TokenizerError: there is none.
    """
    checkpoint = Path(checkpoint)
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    for name in _BESIDE_A_CHECKPOINT:
        if (folder / name).is_file():
            return folder / name
    raise TokenizerError(f"{folder}: no tokenizer here; expected one of {', '.join(_BESIDE_A_CHECKPOINT)}")
