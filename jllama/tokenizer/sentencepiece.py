"""SentencePiece models (`tokenizer.model`), by the sentencepiece library."""

from __future__ import annotations

from pathlib import Path

from sentencepiece import SentencePieceProcessor

from jllama.tokenizer import Tokenizer, TokenizerError

SPACE = "\u2581"  # stands for a space inside pieces


def recognises(head: bytes) -> bool:
    """Whether a file that begins with `head` is a `ModelProto`: its field 1, a short piece, begins with its own."""
    return head[:1] == head[2:3] == b"\x0a"


def read(data: bytes, path: Path) -> Tokenizer:
    """Read a `tokenizer.model`.

    Raises:
      TokenizerError: the file is damaged, or has no BOS and EOS.
    """
    return SentencePieceTokenizer(processor(data, path), path)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Control pieces have no bytes, and the first other token of a text loses one space."""

    def __init__(self, sp: SentencePieceProcessor, path: Path) -> None:
        bos, eos = sp.bos_id(), sp.eos_id()
        if min(bos, eos) < 0:
            raise TokenizerError(f"{path}: BOS is {bos} and EOS is {eos}; expected a model that has both")
        super().__init__(_pieces(sp), bos=bos, eos=eos)
        self._sp = sp
        self._control = frozenset(i for i in range(self.vocab_size) if sp.is_control(i))

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, as the library does."""
        return encode(self._sp, text)

    def first_after(self, token: int, *, first: bool) -> bool:
        """Whether only control pieces came so far."""
        return first and token in self._control


def _pieces(sp: SentencePieceProcessor) -> list[tuple[bytes, bytes]]:
    """The bytes of every id, inside a text and at its start."""
    prefix = b" " if sp.normalize("a").startswith(SPACE) else b""
    pieces = []
    for i in range(sp.vocab_size()):
        if sp.is_control(i):
            piece = start = b""
        elif sp.is_byte(i):
            piece = start = bytes([int(sp.id_to_piece(i)[3:5], 16)])  # <0xNN>
        elif sp.is_unknown(i):
            piece = start = str(sp.decode([i])).encode()
        else:
            piece = sp.id_to_piece(i).replace(SPACE, " ").encode()
            start = piece.removeprefix(prefix)
        pieces.append((piece, start))
    return pieces


def processor(model: bytes, path: Path) -> SentencePieceProcessor:
    """Make the library's processor of a serialised `ModelProto`.

    Raises:
      TokenizerError: the library refuses the model.
    """
    sp = SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(model)
    except RuntimeError as e:
        size = len(model)
        raise TokenizerError(f"{path}: damaged or cut short: sentencepiece refuses its {size} bytes: {e}") from e
    return sp


def encode(sp: SentencePieceProcessor, text: str) -> list[int]:
    """Return the ids of `text`.

    Raises:
      TokenizerError: `text` holds a lone surrogate, which no UTF-8 can express.
    """
    try:
        ids: list[int] = sp.encode(text.encode(), out_type=int)
    except UnicodeEncodeError as e:
        raise TokenizerError(f"text has {text[e.start]!r} at character {e.start}; expected valid Unicode") from e
    return ids
