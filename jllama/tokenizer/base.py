"""`Tokenizer`, what every format makes; its errors."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Required, TypedDict

from absl import logging

from jllama.errors import InputError, listed, quoted
from jllama.text import StreamDecoder
from jllama.tokenizer.special import Special

Pieces = Sequence[tuple[bytes, bytes]]

_LONE = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")


class TokenizerError(InputError):
    """A file that makes no tokenizer, or a text or token id that a tokenizer can't take."""


class Ids(TypedDict, total=False):
    """What a format tells `Tokenizer` besides the pieces."""

    bos: Required[int | None]
    eos: Required[int | None]
    special: Special
    prefix: tuple[int, ...] | None
    bos_token: str | None
    stop_ids: tuple[int, ...]
    unused: Collection[int]
    padded: bool


class Tokenizer(ABC):
    """Text to token ids 0 .. V-1 and back.

    Args:
      pieces: for each id its bytes inside a text, and its bytes as the first token of a text. The two differ where
        the encoder puts a space before a text, which has to go again.
      bos: id that begins a text, None for none.
      eos: id that ends one, None for none.
      special: the control tokens, None for none.
      prefix: ids that the model wants before every text; None is BOS.
      bos_token: what templates write for BOS; None is the text of that control token.
      stop_ids: ids that end a generation and are never shown; None is BOS and EOS, as llama2.c's models end a story
        with BOS.
      unused: ids that stand for nothing: a model should never draw one.
      padded: whether the model may have more ids than V, which stand for nothing either.

    Attributes:
      vocab_size: number of ids V.
      bos: as given; a model without one begins with EOS, or with id 0.
    """

    def __init__(
        self,
        pieces: Pieces,
        *,
        bos: int | None,
        eos: int | None,
        special: Special | None = None,
        prefix: tuple[int, ...] | None = None,
        bos_token: str | None = None,
        stop_ids: tuple[int, ...] | None = None,
        unused: Collection[int] = (),
        padded: bool = False,
    ) -> None:
        self._pieces = pieces
        self.vocab_size = len(pieces)
        self.bos = next((i for i in (bos, eos) if i is not None), 0)
        self.eos = eos
        self.special = special or Special({})
        self.prefix = (self.bos,) if prefix is None else prefix
        self.stop_ids = tuple(i for i in (bos, eos) if i is not None) if stop_ids is None else stop_ids
        self.unused = frozenset(unused)
        self.padded = padded
        self.names = {
            "bos_token": self.special.text(bos) if bos_token is None else bos_token,
            "eos_token": self.special.text(eos),
        }

    @property
    def add_bos(self) -> bool:
        """Whether the model wants anything before every text."""
        return bool(self.prefix)

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
        """Return the bytes of a token: as the first of a text, or inside one. An unused id has none.

        Raises:
          TokenizerError: `token` is not in the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"token id {token}: expected 0 to {self.vocab_size - 1}")
        inside, at_start = self._pieces[token]
        return at_start if first else inside

    def prompt_ids(self, text: str) -> list[int]:
        """Return the ids that a model is given to continue `text`: its prefix first; BOS where there is nothing."""
        return [*self.prefix, *self.encode(text)] or [self.bos]

    def guard(self, text: str) -> str:
        """Return `text` marked so that inside a template it stays text, whatever it looks like.

        Raises:
          TokenizerError: `text` can't be encoded.
        """
        return self.special.guard(valid(text))

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
        """Return the text of `tokens`, just as `StreamDecoder` gives it piece by piece.

        Raises:
          TokenizerError: one is not in the vocabulary.
        """
        decoder = StreamDecoder(self)
        return "".join([*map(decoder.feed, tokens), decoder.flush()])

    def fit(self, size: int) -> Tokenizer:
        """Return the tokenizer for a model of `size` ids, which may be padded, or lack rows for some control tokens.

        What the model has no row for becomes text; rows that no token stands for are among `unused`.

        Raises:
          ValueError: the model needs another tokenizer.
        """
        if self.vocab_size == size:
            return self
        fitting = copy.copy(self)
        if self.vocab_size < size and self.padded:
            fitting.unused = self.unused | frozenset(range(self.vocab_size, size))
            return fitting
        extra = set(range(size, self.vocab_size)) - self.unused
        if not self.padded or not extra <= set(self.special.ids.values()) or extra & {self.bos, self.eos, *self.prefix}:
            raise ValueError(
                f"the tokenizer has {self.vocab_size} tokens and the model {size}: "
                "expected the tokenizer that the model was trained with"
            )
        logging.warning("the model has %d tokens: the tokenizer's %d more are left out", size, self.vocab_size - size)
        fitting.vocab_size = size
        fitting.special = self.special.below(size)
        fitting.stop_ids = tuple(i for i in self.stop_ids if i < size)
        fitting.unused = frozenset(i for i in self.unused if i < size)
        return fitting

    def first_difference(self, other: Tokenizer) -> str | None:
        """Say which id means one thing here and another in `other`, None if there is none; unused ids mean nothing."""
        if self.special.ids != other.special.ids:
            return "other control tokens"
        for i in range(min(self.vocab_size, other.vocab_size)):
            if i not in self.unused and i not in other.unused and self._pieces[i] != other._pieces[i]:
                return f"token {i} is {quoted(other._pieces[i][0])} in place of {quoted(self._pieces[i][0])}"
        mine, others = (t.vocab_size - len(t.unused) for t in (self, other))
        return None if mine == others else f"{others} tokens in place of {mine}"


def valid(text: str) -> str:
    """Return `text` with surrogate pairs joined to the characters that they stand for, as in JSON.

    Raises:
      TokenizerError: it holds a lone surrogate, which no UTF-8 can express.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        if lone := _LONE.search(text):
            raise TokenizerError(f"text has {lone[0]!r} at character {lone.start()}; expected valid Unicode") from None
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    return text


def is_id(value: object) -> bool:
    """Whether a value from a file can be a token id."""
    return type(value) is int and 0 <= value < 2**22  # far above any vocabulary's, and a list so long still fits


def raise_all(problems: Sequence[str], path: object) -> None:
    """Raise one `TokenizerError` for the problems of a file, if there are any."""
    if problems:
        raise TokenizerError(f"{path}: {listed(problems)}")
