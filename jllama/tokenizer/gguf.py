"""The tokenizer inside a GGUF checkpoint.

Source of the keys: docs/gguf.md in ggml-org/ggml. Source of the splits: src/llama-vocab.cpp in ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jllama import gguf_file
from jllama.gguf_file import GGUFError, Header
from jllama.tokenizer import Tokenizer, TokenizerError
from jllama.tokenizer.bpe import (
    GPT2_SPLIT,
    LLAMA3_SPLIT,
    BPETokenizer,
    Merges,
    build,
    byte_pieces,
    parse_merges,
    raise_all,
)
from jllama.tokenizer.sentencepiece import CONTROL, NORMAL, SPACE, SentencePieceTokenizer
from jllama.tokenizer.sentencepiece import build as build_sentencepiece
from jllama.tokenizer.special import LOOKS_CONTROL, LOOKS_NAME, Special

_USER_DEFINED, _UNUSED = 4, 5  # kinds of tokens, beside those of SentencePiece
_KEY = "tokenizer.ggml."


class _Pre(NamedTuple):
    """What a name under `tokenizer.ggml.pre` means."""

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = _Pre((GPT2_SPLIT,))
_DIGITS = _Pre((r"\p{N}", GPT2_SPLIT))
_LLAMA3 = _Pre((LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
_QWEN2 = _Pre((LLAMA3_SPLIT.replace("{1,3}", ""),))
_TEKKEN = _Pre(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ignore_merges=True,
    add_bos=True,
)
_PRE = {
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Pre((LLAMA3_SPLIT,))),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
}


def recognises(head: bytes) -> bool:
    """Whether a file that begins with `head` is a GGUF file."""
    return gguf_file.recognises(head)


def read(path: Path, header: Header | None = None) -> Tokenizer:
    """Read the tokenizer of a checkpoint, of which `header` is the header where that is known already.

    Raises:
      TokenizerError: the file is damaged, or its tokenizer is of an unknown kind.
    """
    try:
        return from_metadata((header or gguf_file.read(path)).metadata, path)
    except GGUFError as e:
        raise TokenizerError(str(e)) from e


def from_metadata(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Make the tokenizer that a GGUF file's metadata describe.

    Args:
      metadata: by key, arrays as sequences.
      path: where they come from.

    Raises:
      TokenizerError: there is none, it is of an unknown kind, or a field is not what it should be.
    """
    kinds = {"gpt2": _bpe, "llama": _sentencepiece}
    model = metadata.get(_KEY + "model")
    if model not in kinds:
        raise TokenizerError(f"{path}: {_KEY}model is {model!r}; expected {' or '.join(map(repr, kinds))}")
    _check(metadata, path)
    return kinds[model](metadata, path)


def _check(metadata: Mapping[str, Any], path: Path) -> None:
    """Raise for lists of different lengths, and for ids that are none."""
    tokens = metadata.get(_KEY + "tokens")
    if not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
        raise TokenizerError(f"{path}: {_KEY}tokens is {type(tokens).__name__}; expected a list of strings")
    problems = []
    for name in ("token_type", "scores"):
        found = metadata.get(_KEY + name)
        if found is not None and (not hasattr(found, "__len__") or len(found) != len(tokens)):
            problems.append(f"{_KEY}{name} has not the {len(tokens)} entries of {_KEY}tokens")
    for name in ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"):
        found = metadata.get(_KEY + name, 0)
        if not isinstance(found, int) or not 0 <= found < len(tokens):
            problems.append(f"{_KEY}{name} is {found!r}; expected 0 to {len(tokens) - 1}")
    if _KEY + "eos_token_id" not in metadata:
        problems.append(f"{_KEY}eos_token_id is missing")
    raise_all(problems, path)


def _kinds(metadata: Mapping[str, Any]) -> list[int]:
    """The kind of every token, with BOS and EOS as control tokens even where the file forgets it."""
    tokens = metadata[_KEY + "tokens"]
    kinds = [int(kind) for kind in metadata.get(_KEY + "token_type", [NORMAL] * len(tokens))]
    for i in (_bos(metadata), *_ends(metadata)):
        kinds[i] = CONTROL if LOOKS_NAME.fullmatch(tokens[i]) else kinds[i]
    return kinds


def _bos(metadata: Mapping[str, Any]) -> int:
    """The id that begins a text: the one that ends it where the file names no other."""
    bos: int = metadata.get(_KEY + "bos_token_id", metadata[_KEY + "eos_token_id"])
    return bos


def _ends(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that the file names as ends of a text, a turn or a message."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    return [metadata[_KEY + name] for name in names if _KEY + name in metadata]


def _bpe(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    pre = _pre(metadata, path)
    tokens, ends = metadata[_KEY + "tokens"], _ends(metadata)
    vocab: dict[str, int] = {}
    visible: dict[str, int] = {}
    control: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(tokens, _kinds(metadata), strict=True)):
        if kind == CONTROL or (kind == _USER_DEFINED and LOOKS_CONTROL.fullmatch(token)):
            control[token] = i
        elif kind != _UNUSED:
            vocab[token] = i
            if kind == _USER_DEFINED:
                visible[token] = i
    library = build(
        vocab, _merges(metadata, path), path, splits=pre.splits, visible=visible, ignore_merges=pre.ignore_merges
    )
    special = Special(control)
    pieces = byte_pieces(vocab, visible, control)
    return BPETokenizer(
        library,
        pieces + [(b"", b"")] * (len(tokens) - len(pieces)),
        bos=_bos(metadata),
        eos=ends[0],
        special=special,
        add_bos=bool(metadata.get(_KEY + "add_bos_token", pre.add_bos)),
        stop_ids=special.stop_ids(*ends),
    )


def _pre(metadata: Mapping[str, Any], path: Path) -> _Pre:
    """How text is split. GPT-2's own files came before the key did."""
    name = metadata.get(_KEY + "pre", "gpt-2" if metadata.get("general.architecture") == "gpt2" else None)
    if name not in _PRE:
        raise TokenizerError(f"{path}: {_KEY}pre is {name!r}; expected one of {', '.join(_PRE)}")
    return _PRE[name]


def _merges(metadata: Mapping[str, Any], path: Path) -> Merges:
    given = metadata.get(_KEY + "merges", ())
    return parse_merges(((f"{_KEY}merges: entry {i}", merge) for i, merge in enumerate(given)), path)


def _sentencepiece(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    if _KEY + "scores" not in metadata:
        raise TokenizerError(f"{path}: {_KEY}scores is missing")
    ends = _ends(metadata)
    # With plain spaces a U+2581 in a text stays itself.
    pieces = [t.replace(SPACE, " ").encode("utf-8", "surrogateescape") for t in metadata[_KEY + "tokens"]]
    scores = [float(score) for score in metadata[_KEY + "scores"]]
    prefix = bool(metadata.get(_KEY + "add_space_prefix", True))
    return SentencePieceTokenizer(
        build_sentencepiece(pieces, scores, _kinds(metadata), path, prefix=prefix),
        bos=_bos(metadata),
        eos=ends[0],
        add_bos=bool(metadata.get(_KEY + "add_bos_token", True)),
        stop_ids=tuple(ends),
    )
