"""Byte-pair encoding by the tokenizers library: what the formats that hold a vocabulary and merges have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from jllama.errors import quoted
from jllama.tokenizer.base import Ids, Pieces, Tokenizer, TokenizerError, raise_all, valid

Merges = list[tuple[str, str]]

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


class BPETokenizer(Tokenizer):
    """A tokenizer of the tokenizers library, without control tokens, which stand apart in `special`.

    Args:
      library: encodes a text.
      pieces: as `Tokenizer` has them.
      continuing: encodes what follows a control token, where that differs.
      strips: whether the first token of a text loses a space, as that of SentencePiece does.
      missing: bytes that the vocabulary has no token for: the library would drop them in silence.
      **ids: as `Tokenizer` has them.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        pieces: Pieces,
        *,
        continuing: tokenizers.Tokenizer | None = None,
        strips: bool = False,
        missing: Iterable[int] = (),
        **ids: Unpack[Ids],
    ) -> None:
        super().__init__(pieces, **ids)
        self._library = library
        self._continuing = continuing or library
        # Only tokens without bytes leave the next one the first; none does where no space is stripped.
        self._control = frozenset(self.special.ids.values()) if strips else frozenset()
        escaped = b"".join(rb"\x%02x" % b for b in sorted(set(missing) - _NEVER_IN_UTF8))
        self._missing = re.compile(b"[%s]" % escaped) if escaped else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`.

        Raises:
          TokenizerError: `text` holds a lone surrogate, or a byte that the vocabulary has no token for.
        """
        return self._encode_part(text, first=True)

    def _encode_part(self, text: str, *, first: bool) -> list[int]:
        text = valid(text)
        if self._missing and (match := self._missing.search(data := text.encode())):
            char = text[len(data[: match.start()].decode(errors="ignore"))]
            raise TokenizerError(f"text has {char!r}, and the vocabulary has no token for its byte {match[0].hex()}")
        library = self._library if first else self._continuing
        with library_errors("a text that the tokenizer can't take"):
            ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids

    def first_after(self, token: int, *, first: bool) -> bool:
        """Whether only control tokens came so far; it matters where a text loses a space."""
        return first and token in self._control


@contextmanager
def library_errors(where: object) -> Iterator[None]:
    """Turn what the tokenizers library raises into `TokenizerError`: it has no errors of its own, and panics."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{where}: {e}") from e


def bpe(vocab: dict[str, int], merges: Merges, path: object, **options: Any) -> tokenizers.Tokenizer:
    """Make the library's tokenizer of a vocabulary without control tokens, and pairs to join, the first ones first.

    Raises:
      TokenizerError: the library refuses them.
    """
    with library_errors(path):
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))


def add_visible(library: tokenizers.Tokenizer, tokens: Sequence[Mapping[str, Any]], path: object) -> None:
    """Let tokens of the vocabulary stand for themselves wherever their text, `content`, occurs."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    with library_errors(path):
        library.add_tokens([AddedToken(t["content"], **{f: bool(t.get(f)) for f in flags}) for t in tokens])


def build(
    vocab: Mapping[str, int],
    merges: Merges,
    path: object,
    *,
    splits: Sequence[str],
    visible: Iterable[str] = (),
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    """Make the library's tokenizer of a byte-level vocabulary.

    Args:
      vocab: the ids of the tokens, written in the byte alphabet, without control tokens.
      merges: pairs to join, the first ones first.
      path: where they come from.
      splits: expressions of words that no merge reaches across, each applied to what the ones before it left.
      visible: tokens that stand for themselves wherever their text occurs; they are in `vocab` too.
      ignore_merges: whether a word that is a token needs no merges.

    Raises:
      TokenizerError: the library refuses them.
    """
    library = bpe(dict(vocab), merges, path, ignore_merges=ignore_merges)
    words = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    add_visible(library, [{"content": text} for text in visible], path)
    return library


def parse_merges(lines: Sequence[str], path: object, place: str, first: int = 0) -> Merges:
    """Split merges at the space between their two tokens; `place` and a number from `first` on say where each stands.

    Raises:
      TokenizerError: some are no two tokens; they are named.
    """
    merges = [tuple(line.split(" ")) for line in lines]
    problems = [
        f"{place} {first + i} is {quoted(lines[i])}, expected two tokens and a space between them"
        for i, merge in enumerate(merges)
        if len(merge) != 2 or not merge[0] or not merge[1]
    ]
    raise_all(problems, path)
    return merges  # type: ignore[return-value]  # each is a pair now
