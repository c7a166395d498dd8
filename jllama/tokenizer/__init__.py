"""Text to token ids and back: `Tokenizer`, and `load`, which knows a file by its content.

A format is one module with `recognises(head)` and `read(path)`, and one row of the table in `load`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from jllama import gguf_file
from jllama.gguf_file import Header
from jllama.text import StreamDecoder
from jllama.tokenizer.special import Special


class TokenizerError(ValueError):
    """A file that makes no tokenizer, or a text or token id that a tokenizer can't take."""


class Tokenizer(ABC):
    """Text to token ids 0 .. V-1 and back.

    Args:
      pieces: for each id its bytes inside a text, and its bytes as the first token of a text. The two differ where
        the encoder puts a space before a text, which has to go again.
      bos: id that begins a text.
      eos: id that ends one.
      special: the control tokens, None for none.
      add_bos: whether the model wants BOS before every text.
      stop_ids: ids that end a generation and are never shown; None is BOS and EOS, as llama2.c's models end a story
        with BOS.

    Attributes:
      vocab_size: number of ids V.
      padded: whether the model may have more ids than V, which mean nothing.
    """

    padded = False

    def __init__(
        self,
        pieces: Sequence[tuple[bytes, bytes]],
        *,
        bos: int,
        eos: int,
        special: Special | None = None,
        add_bos: bool = True,
        stop_ids: tuple[int, ...] | None = None,
    ) -> None:
        self._pieces = pieces
        self.vocab_size = len(pieces)
        self.bos = bos
        self.eos = eos
        self.special = special or Special({})
        self.add_bos = add_bos
        self.stop_ids = (bos, eos) if stop_ids is None else stop_ids

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
        """Return the bytes of a token: as the first of a text, or inside one. A padding id has none.

        Raises:
          TokenizerError: `token` is not in the vocabulary.
        """
        if self.padded and token >= self.vocab_size:
            return b""
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"token id {token}: expected 0 to {self.vocab_size - 1}")
        inside, at_start = self._pieces[token]
        return at_start if first else inside

    def prompt_ids(self, text: str) -> list[int]:
        """Return the ids that a model is given to continue `text`: BOS first if it wants that, or gets nothing else."""
        ids = self.encode(text)
        return [self.bos, *ids] if self.add_bos or not ids else ids

    def guard(self, text: str) -> str:
        """Return `text` marked so that inside a template it stays text, whatever it looks like.

        Raises:
          TokenizerError: `text` can't be encoded.
        """
        utf8(text)
        return self.special.guard(text)

    def encode_template(self, text: str) -> list[int]:
        """Return the ids of a template's text: what looks like a control token is one, unless it was guarded.

        Raises:
          TokenizerError: `text` can't be encoded.
        """
        ids: list[int] = []
        for part in self.special.split(text):
            ids += [part] if isinstance(part, int) else self._encode_part(part, first=not ids)
        return ids

    def _encode_part(self, text: str, *, first: bool) -> list[int]:
        """The ids of a template's text between two control tokens; `first` if nothing stands before it."""
        return self.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`, just as `StreamDecoder` gives it piece by piece."""
        decoder = StreamDecoder(self)
        return "".join([*map(decoder.feed, tokens), decoder.flush()])


_BESIDE_A_CHECKPOINT = ("tokenizer.bin", "tok512.bin", "tokenizer.json", "tokenizer.model", "vocab.json")
_LFS = b"version https://git-lfs"


def load(path: str | Path, *, header: Header | None = None) -> Tokenizer:
    """Read a tokenizer: the content decides which, not the name.

    A SentencePiece model, a llama2.c `tokenizer.bin` of the new or the old layout, Hugging Face's `tokenizer.json` or
    `vocab.json` with its `merges.txt`, Llama 3's `tokenizer.model`, or the one inside a GGUF checkpoint.

    Args:
      path: the file.
      header: that of `path` where it is a GGUF file and was read already.

    Raises:
      TokenizerError: the file can't be read, is of another kind, or is damaged.
    """
    # Not at the top, because the formats build on this module.
    from jllama.tokenizer import gguf, huggingface, llama2c, sentencepiece, tiktoken

    formats = (
        ("a SentencePiece model", sentencepiece.recognises, sentencepiece.read),
        ("a llama2.c tokenizer.bin", llama2c.recognises, llama2c.read),
        ("Hugging Face's tokenizer.json or vocab.json", huggingface.recognises, huggingface.read),
        ("Llama 3's tokenizer.model", tiktoken.recognises, tiktoken.read),
        ("a GGUF file", gguf.recognises, gguf.read),
    )
    path = Path(path)
    try:
        if header is not None:
            return gguf.read(path, header)
        with path.open("rb") as file:
            head = file.read(256)
        for _, recognises, read in formats:
            if recognises(head):
                return read(path)
    except OSError as e:
        raise TokenizerError(f"{e.filename or path}: cannot be read: {e.strerror}") from e
    expected = " or ".join(name for name, *_ in formats)
    found = f"begins {head[:16]!r}" if head else "is empty"
    if head.startswith(_LFS):
        found = "looks like a Git LFS pointer in place of the file itself (`git lfs pull` gets it)"
    raise TokenizerError(f"{path}: {found}; expected {expected}")


def find(checkpoint: str | Path) -> Path:
    """Return the tokenizer of a checkpoint: inside a GGUF file, else beside it, or in it where that is a folder.

    Raises:
      TokenizerError: there is none.
    """
    checkpoint = Path(checkpoint)
    if _is_gguf(checkpoint):
        return checkpoint
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    for name in _BESIDE_A_CHECKPOINT:
        if (folder / name).is_file():
            return folder / name
    raise TokenizerError(f"{folder}: no tokenizer here; expected one of {', '.join(_BESIDE_A_CHECKPOINT)}")


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return gguf_file.recognises(file.read(4))
    except OSError:
        return False


def utf8(text: str) -> bytes:
    """Return `text` in UTF-8.

    Raises:
      TokenizerError: it holds a lone surrogate, which no UTF-8 can express.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise TokenizerError(f"text has {text[e.start]!r} at character {e.start}; expected valid Unicode") from e
