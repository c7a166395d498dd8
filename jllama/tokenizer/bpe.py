"""Byte-pair encoding by the tokenizers library: what the formats that hold a vocabulary and merges have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from jllama.tokenizer import Tokenizer, TokenizerError, utf8
from jllama.tokenizer.special import Special

Merges = list[tuple[str, str]]
Pieces = list[tuple[bytes, bytes]]

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
_SHOWN = 5  # problems of a file that a message names


class BPETokenizer(Tokenizer):
    """A tokenizer of the tokenizers library, without control tokens, which stand apart in `special`.

    Args:
      library: encodes a text.
      continuing: encodes what follows a control token, where that differs.
      strips: whether the first token of a text loses a space, as that of SentencePiece does.
      padded: whether the model may have more ids.
      **ids: as `Tokenizer` has them.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        pieces: Pieces,
        *,
        bos: int,
        eos: int,
        special: Special,
        add_bos: bool,
        stop_ids: tuple[int, ...],
        continuing: tokenizers.Tokenizer | None = None,
        strips: bool = False,
        padded: bool = False,
    ) -> None:
        super().__init__(pieces, bos=bos, eos=eos, special=special, add_bos=add_bos, stop_ids=stop_ids)
        self.padded = padded
        self._library = library
        self._continuing = continuing or library
        # Only tokens without bytes leave the next one the first; none does where no space is stripped.
        self._control = frozenset(special.ids.values()) if strips else frozenset()
        self._missing = None if strips else _missing_bytes(pieces)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`.

        Raises:
          TokenizerError: `text` holds a lone surrogate, or a byte that the vocabulary has no token for.
        """
        return self._encode_part(text, first=True)

    def _encode_part(self, text: str, *, first: bool) -> list[int]:
        data = utf8(text)
        if self._missing and (match := self._missing.search(data)):
            char = text[len(data[: match.start()].decode(errors="ignore"))]
            raise TokenizerError(f"text has {char!r}, and the vocabulary has no token for its byte {match[0].hex()}")
        library = self._library if first else self._continuing
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids

    def first_after(self, token: int, *, first: bool) -> bool:
        """Whether only control tokens came so far; it matters where a text loses a space."""
        return first and token in self._control


def build(
    vocab: Mapping[str, int],
    merges: Merges,
    path: Path,
    *,
    splits: Sequence[str],
    visible: Iterable[str] = (),
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    r"""Make the library's tokenizer of a byte-level vocabulary.

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
    try:
        library = tokenizers.Tokenizer(models.BPE(dict(vocab), merges, ignore_merges=ignore_merges))
    except Exception as e:  # the library raises nothing narrower
        raise TokenizerError(f"{path}: {e}") from e
    words = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.add_tokens([AddedToken(text, normalized=False) for text in visible])
    return library


def byte_pieces(vocab: Mapping[str, int], visible: Mapping[str, int], special: Mapping[str, int]) -> Pieces:
    """Return the bytes of every id: those of a byte-level token, the text of another one, none for a gap."""
    pieces = [b""] * (1 + max([*vocab.values(), *visible.values(), *special.values()], default=-1))
    for token, i in vocab.items():
        try:
            pieces[i] = bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # not in the alphabet
            pieces[i] = token.encode()
    for token, i in [*visible.items(), *special.items()]:
        pieces[i] = token.encode()
    return [(piece, piece) for piece in pieces]


def parse_merges(lines: Iterable[tuple[str, str]], path: Path) -> Merges:
    """Split merges, each given with the name of its place in the file, at the space between their two tokens.

    Raises:
      TokenizerError: some are no two tokens; they are named.
    """
    merges: Merges = []
    problems = []
    for place, line in lines:
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            problems.append(f"{place} is {line[:40]!r}, expected two tokens and a space between them")
        merges.append((left, right))
    raise_all(problems, path)
    return merges


def raise_all(problems: Sequence[str], path: Path) -> None:
    """Raise one `TokenizerError` for the problems of a file, if there are any."""
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise TokenizerError(f"{path}: {'; '.join(problems[:_SHOWN])}{more}")


def alphabet() -> list[str]:
    """Return the character that stands for each byte: itself if it is printable, else one from U+0100 on.

    Source: `bytes_to_unicode` in openai/gpt-2, src/encoder.py.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(0x100)]


_BYTES = {char: b for b, char in enumerate(alphabet())}


def _missing_bytes(pieces: Pieces) -> re.Pattern[bytes] | None:
    """What finds a byte that no token stands for: the library would drop it in silence."""
    found = {piece[0] for piece, _ in pieces if len(piece) == 1}
    missing = set(range(0x100)) - found - _NEVER_IN_UTF8
    return re.compile(b"[%s]" % b"".join(rb"\x%02x" % b for b in sorted(missing))) if missing else None
