"""Llama 3's `tokenizer.model`, in tiktoken's format: on every line the bytes of a token in base64, and its id.

The file says neither how text is split into words nor what the control tokens are, so this is Llama 3's only. Source:
llama3/tokenizer.py in meta-llama/llama-models.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

from jllama.errors import quoted
from jllama.tokenizer.base import Tokenizer, TokenizerError, raise_all
from jllama.tokenizer.bpe import LLAMA3_SPLIT, BPETokenizer, Merges, build
from jllama.tokenizer.pieces import BytePieces, alphabet
from jllama.tokenizer.special import Special

_LINE = re.compile(rb"([A-Za-z0-9+/]+=*) (\d+)")
_N_TOKENS = 128_000
_LONGEST = 1000  # bytes of a token: they are tried in all parts, and Llama 3's longest has 128
_N_CONTROL = 256  # they follow the tokens of the file
_CONTROL = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}


def recognises(head: bytes) -> bool:
    """Whether a file that begins with `head` has lines of base64 and a number."""
    return re.match(_LINE.pattern + rb"\r?\n", head) is not None


def read(path: Path) -> Tokenizer:
    """Read a `tokenizer.model`.

    Raises:
      TokenizerError: the file is damaged.
    """
    tokens = _parse(path)
    chars = alphabet()
    vocab = {"".join(chars[b] for b in token): i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise TokenizerError(f"{path}: {len(tokens) - len(vocab)} tokens occur twice; expected each once")
    library = build(vocab, _merges(vocab), path, splits=[LLAMA3_SPLIT], ignore_merges=True)
    reserved = (f"<|reserved_special_token_{n}|>" for n in range(_N_CONTROL))
    special = Special({_CONTROL.get(i) or next(reserved): len(tokens) + i for i in range(_N_CONTROL)})
    bos, eos = len(tokens), len(tokens) + 1
    pieces = BytePieces(vocab, special.ids)
    return BPETokenizer(
        library,
        pieces,
        missing=pieces.missing,
        bos=bos,
        eos=eos,
        special=special,
        stop_ids=special.stop_ids(eos),
    )


def _parse(path: Path) -> list[bytes]:
    """The bytes of every token, in order."""
    tokens: list[bytes] = []
    problems = []
    for number, line in enumerate(path.read_bytes().splitlines()):
        if not (match := _LINE.fullmatch(line)):
            problems.append(f"line {number + 1} is {quoted(line)}, expected base64 and a number")
            continue
        if match[2] != b"%d" % number:
            problems.append(f"line {number + 1} has the id {quoted(match[2].decode())}, expected {number}")
        try:
            tokens.append(base64.b64decode(match[1], validate=True))
        except ValueError as e:
            problems.append(f"line {number + 1} has {quoted(match[1])}, expected base64: {e}")
            continue
        if len(tokens[-1]) > _LONGEST:
            problems.append(f"line {number + 1} has a token of {len(tokens[-1])} bytes, expected {_LONGEST} at most")
    raise_all(problems, path)
    if len(tokens) != _N_TOKENS:
        raise TokenizerError(f"{path}: {len(tokens)} tokens in tiktoken's format; expected Llama 3's, {_N_TOKENS}")
    return tokens


def _merges(vocab: dict[str, int]) -> Merges:
    """Every way to make a token of two others: the format joins the pair that makes the token of the lowest id."""
    merges: Merges = []
    for token in vocab:
        pairs = ((token[:n], token[n:]) for n in range(1, len(token)))
        merges += sorted(
            (p for p in pairs if p[0] in vocab and p[1] in vocab), key=lambda p: (vocab[p[0]], vocab[p[1]])
        )
    return merges
