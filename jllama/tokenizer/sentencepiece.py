"""SentencePiece models (`tokenizer.model`), by the sentencepiece library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
from sentencepiece import SentencePieceProcessor

from jllama.errors import quoted
from jllama.tokenizer import proto
from jllama.tokenizer.base import Ids, Tokenizer, TokenizerError, raise_all, valid
from jllama.tokenizer.beside import Beside
from jllama.tokenizer.pieces import BYTE_KIND, CONTROL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, SpacedPieces, byte_of
from jllama.tokenizer.special import LOOKS_CONTROL, Special


def recognises(head: bytes) -> bool:
    """Whether a file that begins with `head` is a `ModelProto`: its field 1, a short piece, begins with its own."""
    return head[:1] == head[2:3] == b"\x0a"


def read(path: Path) -> Tokenizer:
    """Read a `tokenizer.model`, with what the files beside it say: added tokens, BOS, and what ends a text.

    Raises:
      TokenizerError: the file is damaged, or doesn't fit those beside it.
    """
    data = path.read_bytes()
    model = proto.parse(data, path)
    # The library would let any text become a token of this kind.
    forged = [i for i, kind in enumerate(model.kinds) if kind == USER_DEFINED and looks_control(model.pieces[i])]
    sp = processor(proto.with_kind(data, model, forged, CONTROL) if forged else data, path)
    kinds = list(model.kinds)
    for i in forged:
        kinds[i] = CONTROL
    texts = [piece.decode(errors="replace") for piece in model.pieces]
    beside = Beside(path.parent)
    added = _Added.of(beside, texts, path)
    names = {text: i for i, text in enumerate(texts)} | {**added.control, **added.visible}
    bos = next((i for i in (*beside.ids("bos", names), sp.bos_id()) if i >= 0), None)
    own = [sp.eos_id()] if sp.eos_id() >= 0 else []
    ends = beside.ends(names, own)
    space = SPACE.encode()
    spaced = [piece.replace(space, b" ") for piece in model.pieces]
    return SentencePieceTokenizer(
        sp,
        spaced,
        kinds,
        added,
        bos=bos,
        eos=ends[0] if ends else None,
        prefix=() if bos is None or beside.add_bos is False else (bos,),
        bos_token=beside.bos_token,
        stop_ids=tuple(dict.fromkeys(i for i in (bos, *ends, *own) if i is not None)),
        padded=True,
    )


def looks_control(piece: bytes) -> bool:
    """Whether a piece is written like a control token."""
    return LOOKS_CONTROL.fullmatch(piece.decode(errors="replace")) is not None


class _Added(NamedTuple):
    """Tokens that files beside a model add to it."""

    control: Mapping[str, int] = {}
    visible: Mapping[str, int] = {}

    @classmethod
    def of(cls, beside: Beside, pieces: Sequence[str], path: Path) -> _Added:
        """Return those that `pieces` doesn't hold.

        Raises:
          TokenizerError: one stands for an id that another token has.
        """
        control, visible, problems = {}, {}, []
        for i, token in beside.added().items():
            text = token["content"]
            if i < len(pieces):
                if pieces[i] != text:
                    problems.append(f"token {i} is {quoted(pieces[i])}, and {quoted(text)} in the files beside it")
            elif token.get("special") or LOOKS_CONTROL.fullmatch(text):
                control[text] = i
            else:
                visible[text] = i
        raise_all(problems, path)
        return cls(control, visible)


_NONE = _Added()


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Control pieces have no bytes, and the first other token of a text loses one space.

    Args:
      sp: the library's processor.
      texts: of its pieces, with plain spaces.
      kinds: of its pieces.
      added: tokens that it doesn't know.
      **ids: as `Tokenizer` has them, without `special`.
    """

    def __init__(
        self,
        sp: SentencePieceProcessor,
        texts: Sequence[bytes],
        kinds: Sequence[int],
        added: _Added = _NONE,
        **ids: Unpack[Ids],
    ) -> None:
        self._sp = sp
        control = {texts[i].decode(errors="replace"): i for i, kind in enumerate(kinds) if kind == CONTROL}
        special = Special({**control, **added.control})
        gap = max([len(texts) - 1, *added.control.values(), *added.visible.values()]) + 1 - len(texts)
        texts, kinds = [*texts, *[b""] * gap], [*kinds, *[UNUSED] * gap]
        for text, i in [*added.control.items(), *added.visible.items()]:
            texts[i], kinds[i] = text.encode(), CONTROL if text in added.control else USER_DEFINED
        for i, kind in enumerate(kinds[: len(kinds) - gap]):
            if kind == UNKNOWN:
                texts[i] = str(sp.decode([i])).encode()
        prefix = sp.normalize("a").startswith((SPACE, " "))
        plain = frozenset(added.visible.values())
        ids["special"], ids["stop_ids"] = special, special.stop_ids(*ids.get("stop_ids", ()))
        ids["unused"] = [i for i, kind in enumerate(kinds) if kind == UNUSED]
        super().__init__(SpacedPieces(texts, kinds, prefix=prefix, plain=plain), **ids)
        self._control = frozenset(i for i, kind in enumerate(kinds) if kind == CONTROL)
        self._added = Special(added.visible) if added.visible else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, as the library does; added tokens are found first."""
        if self._added is None:
            return encode(self._sp, text)
        ids: list[int] = []
        for part in self._added.split(valid(text)):
            ids += [part] if isinstance(part, int) else encode(self._sp, part)
        return ids

    def first_after(self, token: int, *, first: bool) -> bool:
        """Whether only control pieces came so far."""
        return first and token in self._control


def processor(model: bytes, path: object) -> SentencePieceProcessor:
    """Make the library's processor of a serialised `ModelProto`.

    Raises:
      TokenizerError: the library refuses the model.
    """
    sp = SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(model)
    except RuntimeError as e:
        raise TokenizerError(f"{path}: damaged or cut short: sentencepiece refuses its {len(model)} bytes: {e}") from e
    return sp


def encode(sp: SentencePieceProcessor, text: str) -> list[int]:
    """Return the ids of `text`.

    Raises:
      TokenizerError: `text` holds a lone surrogate, which no UTF-8 can express.
    """
    ids: list[int] = sp.encode(valid(text).encode(), out_type=int)
    return ids


def build(
    pieces: Sequence[bytes], scores: Sequence[float], kinds: Sequence[int], path: object, *, prefix: bool = True
) -> SentencePieceProcessor:
    """Make the library's processor of pieces that were exported from a BPE model, with plain spaces.

    Args:
      pieces: their texts.
      scores: the higher, the earlier two pieces are joined to this one.
      kinds: `NORMAL`, `UNKNOWN`, `CONTROL`, `BYTE_KIND` or another of the .proto.
      path: where they come from.
      prefix: whether a text gets a space in front.

    Raises:
      TokenizerError: pieces that make no tokenizer.
    """
    raise_all([*_problems(pieces, scores)], path)
    # The library takes byte pieces only with byte fallback, and that only with all of them.
    byte_fallback = (
        sum(kind == BYTE_KIND and byte_of(p) is not None for p, kind in zip(pieces, kinds, strict=True)) == 256
    )
    if not byte_fallback:
        kinds = [CONTROL if kind == BYTE_KIND else kind for kind in kinds]
    return processor(proto.model(pieces, scores, kinds, byte_fallback=byte_fallback, prefix=prefix), path)


def _problems(pieces: Sequence[bytes], scores: Sequence[float]) -> Iterator[str]:
    """What the sentencepiece library refuses without a name, or passes over in silence."""
    if not np.isfinite(np.asarray(scores, np.float64)).all() or len(set(pieces)) < len(pieces) or not _plain(pieces):
        seen: dict[bytes, int] = {}
        for i, (piece, score) in enumerate(zip(pieces, scores, strict=True)):
            if not math.isfinite(score):
                yield f"token {i} ({quoted(piece)}) has score {score}; expected a finite number"
            if not _plain([piece]):
                yield f"token {i} ({quoted(piece)}); expected UTF-8 text without NUL"
            if (twin := seen.setdefault(piece, i)) != i:
                yield f"token {i} ({quoted(piece)}) is the same as token {twin}; expected each text once"


def _plain(pieces: Sequence[bytes]) -> bool:
    """Whether all pieces are UTF-8 without NUL."""
    joined = b"\0".join(pieces)
    try:
        joined.decode()
    except UnicodeDecodeError:
        return False
    return joined.count(b"\0") == max(0, len(pieces) - 1)
