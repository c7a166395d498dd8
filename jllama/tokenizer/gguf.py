"""The tokenizer inside a GGUF checkpoint.

Source of the keys: docs/gguf.md in ggml-org/ggml. Source of the splits and ends: src/llama-vocab.cpp in
ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from jllama import gguf_file
from jllama.errors import quoted
from jllama.gguf_file import GGUFError, Header
from jllama.tokenizer import sentencepiece
from jllama.tokenizer.base import Tokenizer, TokenizerError, raise_all
from jllama.tokenizer.bpe import GPT2_SPLIT, LLAMA3_SPLIT, BPETokenizer, build, parse_merges
from jllama.tokenizer.pieces import (
    BYTE_KIND,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    BytePieces,
    byte_of,
)
from jllama.tokenizer.special import ENDS, LOOKS_CONTROL, LOOKS_NAME, Special

_KEY = "tokenizer.ggml."
_IDS = ("eos_token_id", "eot_token_id", "eom_token_id", "bos_token_id")
# What llama.cpp ends an answer at wherever a vocabulary holds it, of whatever type.
_MORE_ENDS = (
    "<|end|> <|return|> <|call|> <end_of_turn> <end_of_utterance> </s> <EOT> _<EOT> [EOT] <|fim_pad|> <fim-pad> "
    "<fim_pad> <PAD> <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
)
_ENDS = dict.fromkeys([*ENDS, *_MORE_ENDS.split()])


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
    made = {"gpt2": _bpe, "llama": _sentencepiece}
    model = metadata.get(_KEY + "model")
    if not isinstance(model, str) or model not in made:
        raise TokenizerError(f"{path}: {_KEY}model is {quoted(model)}; expected {' or '.join(map(repr, made))}")
    return made[model](_fields(metadata, path), path)


class _Fields(NamedTuple):
    """What the metadata say, checked.

    Args:
      tokens: their texts.
      kinds: of the tokens; BOS and what ends an answer are control tokens even where the file forgets it.
      scores: of the tokens, None for none.
      bos: the id that begins a text.
      ends: the ids that end an answer, EOS first where the file names it.
      eos: the id that ends a text.
      metadata: everything.
    """

    tokens: list[str]
    kinds: list[int]
    scores: list[float] | None
    bos: int | None
    ends: list[int]
    eos: int | None
    metadata: Mapping[str, Any]

    def get(self, name: str, otherwise: Any = None) -> Any:
        return self.metadata.get(_KEY + name, otherwise)


def _fields(metadata: Mapping[str, Any], path: Path) -> _Fields:
    tokens = metadata.get(_KEY + "tokens")
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or not all(isinstance(t, str) for t in tokens):
        raise TokenizerError(f"{path}: {_KEY}tokens is {type(tokens).__name__}; expected a list of strings")
    tokens = list(tokens)
    problems: list[str] = []
    kinds = _numbers(metadata, "token_type", "iu", len(tokens), problems)
    scores = _numbers(metadata, "scores", "f", len(tokens), problems)
    for name in _IDS:
        found = metadata.get(_KEY + name, 0)
        if type(found) is not int or not 0 <= found < len(tokens):
            if name == "bos_token_id" and type(found) is int and not metadata.get(_KEY + "add_bos_token", True):
                logging.warning("%s: %s%s is %d, which is no token: done without", path, _KEY, name, found)
            else:
                problems.append(f"{_KEY}{name} is {quoted(found)}; expected 0 to {len(tokens) - 1}")
    for name in ("add_bos_token", "add_space_prefix"):
        if not isinstance(found := metadata.get(_KEY + name, True), bool):
            problems.append(f"{_KEY}{name} is {quoted(found)}; expected true or false")
    raise_all(problems, path)
    eos, *others, bos = (metadata.get(_KEY + name) for name in _IDS)
    bos = bos if bos is not None and bos < len(tokens) else None
    ends = [i for i in (eos, *others) if i is not None]
    kinds = [_kind(token) for token in tokens] if kinds is None else kinds
    for i in [*ends, *([] if bos is None else [bos])]:
        kinds[i] = CONTROL if LOOKS_NAME.fullmatch(tokens[i]) else kinds[i]
    named = {token: i for i, token in enumerate(tokens) if token in _ENDS}
    for i in named.values():
        kinds[i] = CONTROL
    if {"<|return|>", "<|call|>"} <= named.keys():  # of gpt-oss, where <|end|> ends but a part of an answer
        named.pop("<|end|>", None)
    ends += [named[token] for token in _ENDS if token in named]
    if not ends:
        logging.warning("%s: nothing says which token ends a text: answers go on to their limit", path)
    return _Fields(tokens, kinds, scores, bos, list(dict.fromkeys(ends)), eos, metadata)


def _numbers(metadata: Mapping[str, Any], name: str, kinds: str, size: int, problems: list[str]) -> list[Any] | None:
    """A list of as many numbers as there are tokens, None where there is none; `kinds` as NumPy names them."""
    if (found := metadata.get(_KEY + name)) is None:
        return None
    if not isinstance(found, np.ndarray | Sequence) or isinstance(found, str) or len(found) != size:
        problems.append(f"{_KEY}{name} has not the {size} entries of {_KEY}tokens")
        return None
    array = np.asarray(found)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in kinds or (kinds == "iu" and array.min() < 0))):
        problems.append(f"{_KEY}{name} has something else than the numbers that were expected")
        return None
    numbers: list[Any] = array.tolist()
    return numbers


def _kind(token: str) -> int:
    """The kind of a token in a file that doesn't say it."""
    if token == "<unk>":
        return UNKNOWN
    byte = token.startswith("<0x") and byte_of(token.encode("utf-8", "replace")) is not None
    return BYTE_KIND if byte else NORMAL


def _bpe(fields: _Fields, path: Path) -> Tokenizer:
    pre = _pre(fields, path)
    vocab: dict[str, int] = {}
    visible: dict[str, int] = {}
    control: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(fields.tokens, fields.kinds, strict=True)):
        if kind == CONTROL or (kind == USER_DEFINED and LOOKS_CONTROL.fullmatch(token)):
            control[token] = i
        elif kind != UNUSED:
            vocab[token] = i
            if kind == USER_DEFINED:
                visible[token] = i
    merges = fields.get("merges", ())
    if not isinstance(merges, Sequence) or isinstance(merges, str) or not all(isinstance(m, str) for m in merges):
        raise TokenizerError(f"{path}: {_KEY}merges is {type(merges).__name__}; expected a list of strings")
    pairs = parse_merges(merges, path, f"{_KEY}merges: entry")
    pieces = BytePieces(vocab, visible | control, len(fields.tokens))
    add_bos = fields.get("add_bos_token", pre.add_bos)
    return BPETokenizer(
        build(vocab, pairs, path, splits=pre.splits, visible=visible, ignore_merges=pre.ignore_merges),
        pieces,
        missing=pieces.missing,
        bos=fields.bos,
        eos=fields.eos,
        special=Special(control),
        prefix=_prefix(fields, add_bos),
        stop_ids=tuple(fields.ends),
        unused=pieces.unused,
    )


def _prefix(fields: _Fields, add_bos: bool) -> tuple[int, ...]:
    """What a text begins with: EOS where BOS is wanted and the file names none."""
    begin = fields.eos if fields.bos is None else fields.bos
    return (begin,) if add_bos and begin is not None else ()


def _pre(fields: _Fields, path: Path) -> _Pre:
    """How text is split. GPT-2's own files came before the key did."""
    name = fields.get("pre", "gpt-2" if fields.metadata.get("general.architecture") == "gpt2" else None)
    if not isinstance(name, str) or name not in _PRE:
        raise TokenizerError(f"{path}: {_KEY}pre is {quoted(name)}; expected one of {', '.join(_PRE)}")
    return _PRE[name]


def _sentencepiece(fields: _Fields, path: Path) -> Tokenizer:
    # With plain spaces a U+2581 in a text stays itself.
    pieces = [token.replace(SPACE, " ").encode("utf-8", "surrogateescape") for token in fields.tokens]
    # The library would let any text become a user-defined token.
    kinds = [
        CONTROL if kind == USER_DEFINED and sentencepiece.looks_control(piece) else kind
        for piece, kind in zip(pieces, fields.kinds, strict=True)
    ]
    scores = fields.scores
    if scores is None:
        logging.warning("%s: no %sscores: the first pair in a text is joined first, as by llama.cpp", path, _KEY)
        scores = [0.0] * len(pieces)
    sp = sentencepiece.build(pieces, scores, kinds, path, prefix=fields.get("add_space_prefix", True))
    return sentencepiece.SentencePieceTokenizer(
        sp,
        pieces,
        kinds,
        bos=fields.bos,
        eos=fields.eos,
        prefix=_prefix(fields, fields.get("add_bos_token", True)),
        stop_ids=tuple(dict.fromkeys(i for i in (fields.bos, *fields.ends) if i is not None)),
    )
