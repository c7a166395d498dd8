"""Hugging Face's `tokenizer.json`, and `vocab.json` with `merges.txt` as GPT-2 has it.

What they don't say is read from the files beside them: tokenizer_config.json, generation_config.json and config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jllama.tokenizer import Tokenizer, TokenizerError
from jllama.tokenizer.bpe import GPT2_SPLIT, BPETokenizer, Merges, Pieces, build, byte_pieces, parse_merges, raise_all
from jllama.tokenizer.sentencepiece import BYTE, SPACE
from jllama.tokenizer.special import ENDS, LOOKS_CONTROL, LOOKS_NAME, Special

_MAX_ID = 2**22  # far above any vocabulary's, and a list so long still fits
_EMPTY = {"type": "BPE", "vocab": {}, "merges": []}


def recognises(head: bytes) -> bool:
    """Whether a file that begins with `head` holds a JSON object."""
    return re.match(rb"(\xef\xbb\xbf)?\s*\{", head) is not None


def read(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, or a `vocab.json` with the `merges.txt` beside it.

    Raises:
      TokenizerError: it is neither, is damaged, or names no end of text.
    """
    spec = _json(path)
    if isinstance(spec.get("model"), dict):
        return _read_tokenizer(spec, path)
    if spec and all(map(_is_id, spec.values())):
        return _read_vocab(spec, path)
    raise TokenizerError(
        f"{path}: JSON with {', '.join(map(repr, list(spec)[:5]))}; expected tokenizer.json or vocab.json"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as e:
        raise TokenizerError(f"{path}: damaged JSON: {e}") from e
    if not isinstance(found, dict):
        raise TokenizerError(f"{path}: holds a JSON {type(found).__name__}; expected an object")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as e:
        raise TokenizerError(f"{path}: byte {e.start} is no UTF-8: {e.reason}") from e


class _Beside:
    """What the files beside a tokenizer say of it."""

    def __init__(self, path: Path, ids: Mapping[str, int]) -> None:
        self._path = path
        self._ids = ids
        self.config, generation, model = (
            _json(file) if (file := path.parent / name).is_file() else {}
            for name in ("tokenizer_config.json", "generation_config.json", "config.json")
        )
        self._numbers = {**model, **generation}

    def ids(self, name: str) -> list[int]:
        """The ids of "bos" or "eos", the main one first."""
        token = self.config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        numbers = self._numbers.get(f"{name}_token_id")
        numbers = numbers if isinstance(numbers, list) else [numbers]
        found = [self._ids.get(text) if isinstance(text, str) else None, *numbers]
        return list(dict.fromkeys(i for i in found if isinstance(i, int)))

    def ends(self, bos: int | None) -> tuple[int, list[int]]:
        """BOS and the ids that end a text, EOS first; `bos` is what the tokenizer itself puts first."""
        ends = self.ids("eos") or [self._ids[t] for t in (*ENDS, "</s>") if t in self._ids][:1]
        if not ends:
            raise TokenizerError(
                f"{self._path}: no end of text; expected eos_token in tokenizer_config.json, or its id in config.json"
            )
        begins = self.ids("bos")
        return next((i for i in (bos, *begins) if i is not None), ends[0]), ends

    def add_bos(self, otherwise: bool) -> bool:
        """Whether a text begins with BOS."""
        stated = self.config.get("add_bos_token")
        return stated if isinstance(stated, bool) else otherwise


def _read_tokenizer(spec: dict[str, Any], path: Path) -> Tokenizer:
    _check(spec, path)
    model, added = spec["model"], spec.get("added_tokens") or []
    listed = {token["content"]: token["id"] for token in added}
    ids = model["vocab"] | listed
    beside = _Beside(path, ids)
    first = _first_of_template(spec.get("post_processor"))
    bos, ends = beside.ends(None if first is None else ids.get(first))
    control = _named((bos, *ends), ids)
    control |= {t["content"]: t["id"] for t in added if t.get("special") or LOOKS_CONTROL.fullmatch(t["content"])}
    visible = {text: i for text, i in listed.items() if text not in control}
    vocab = {text: i for text, i in model["vocab"].items() if text not in control} | visible
    library, continuing = _libraries(spec, vocab, [t for t in added if t["content"] in visible], path)
    byte_level = "ByteLevel" in {*_types(spec.get("pre_tokenizer")), *_types(spec.get("decoder"))}
    special = Special(
        control,
        lstrip=[t["content"] for t in added if t.get("lstrip")],
        rstrip=[t["content"] for t in added if t.get("rstrip")],
    )
    pieces = byte_pieces(vocab, visible, control)
    if not byte_level:
        pieces = _space_pieces(vocab, visible, len(pieces), library, bool(model.get("byte_fallback")))
    return BPETokenizer(
        library,
        pieces,
        bos=bos,
        eos=ends[0],
        special=special,
        add_bos=beside.add_bos(first is not None),
        stop_ids=special.stop_ids(*ends),
        continuing=continuing,
        strips=not byte_level,
        padded=True,
    )


def _check(spec: Mapping[str, Any], path: Path) -> None:
    """Raise for a model that is not byte-pair encoding, and for fields of other types than they should be."""
    model, added = spec["model"], spec.get("added_tokens") or []
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"{path}: model.type is {model['type']!r}; expected 'BPE'")
    problems = []
    vocab, unknown = model.get("vocab"), model.get("unk_token")
    if not isinstance(vocab, dict) or not all(map(_is_id, vocab.values())):
        problems.append("model.vocab is no object of ids")
    elif unknown is not None and (not isinstance(unknown, str) or unknown not in vocab):
        problems.append(f"model.unk_token is {unknown!r}, expected one of model.vocab")
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and _is_id(token.get("id")) for token in added
    ):
        problems.append("added_tokens is no list of objects with an id and a content")
    raise_all(problems, path)
    # The library knows the shapes of all the rest.
    _library({**spec, "added_tokens": [], "model": _EMPTY}, path)
    types = {*_types(spec.get("pre_tokenizer")), *_types(spec.get("decoder"))}
    if "ByteLevel" not in types and not model.get("byte_fallback") and unknown is None:
        raise TokenizerError(f"{path}: neither bytes, model.byte_fallback nor model.unk_token for unknown characters")


def _is_id(i: object) -> bool:
    return isinstance(i, int) and 0 <= i < _MAX_ID


def _named(numbers: Iterable[int], ids: Mapping[str, int]) -> dict[str, int]:
    """Those of the ids `numbers` whose text no one would take for a word: control tokens that aren't listed as such."""
    wanted = set(numbers)
    return {text: i for text, i in ids.items() if i in wanted and LOOKS_NAME.fullmatch(text)}


def _first_of_template(processor: Any) -> str | None:
    """The token that the post-processor puts in front of a text, None if it puts none."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        return next((t for p in processor["processors"] if (t := _first_of_template(p)) is not None), None)
    single = processor.get("single") or [{}]
    first: str | None = single[0].get("SpecialToken", {}).get("id") if isinstance(single, list) else None
    return first


def _types(node: Any) -> Iterator[str]:
    """The types of a pre-tokenizer or decoder and of its parts."""
    if isinstance(node, dict):
        yield str(node.get("type"))
        for part in [*node.get("pretokenizers", ()), *node.get("decoders", ())]:
            yield from _types(part)


def _libraries(
    spec: Mapping[str, Any], vocab: Mapping[str, int], visible: list[dict[str, Any]], path: Path
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer | None]:
    """The library's tokenizer of `spec` with other tokens, and one for texts that don't begin one, if that differs."""
    model = spec["model"]
    # Without the control tokens no text can become one; but the library needs the one for what is unknown.
    unknown = {t: model["vocab"][t] for t in [model.get("unk_token")] if t in model["vocab"]}
    changes = {"added_tokens": visible, "post_processor": None, "truncation": None, "padding": None}
    library = _library({**spec, **changes, "model": {**model, "vocab": {**vocab, **unknown}}}, path)
    words = json.dumps(spec.get("pre_tokenizer"))
    inside = words.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    if inside == words:
        return library, None
    continuing = tokenizers.Tokenizer(library.model)  # which is shared, not copied
    continuing.pre_tokenizer = _library({"pre_tokenizer": json.loads(inside), "model": _EMPTY}, path).pre_tokenizer
    if library.normalizer is not None:
        continuing.normalizer = library.normalizer
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    continuing.add_tokens([AddedToken(t["content"], **{f: bool(t.get(f)) for f in flags}) for t in visible])
    return library, continuing


def _library(spec: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    fields = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
    try:
        return tokenizers.Tokenizer.from_str(
            json.dumps({"version": "1.0", **dict.fromkeys(fields), "added_tokens": [], **spec})
        )
    except Exception as e:  # the library raises nothing narrower
        raise TokenizerError(f"{path}: {e}") from e


def _space_pieces(
    vocab: Mapping[str, int], visible: Mapping[str, int], size: int, library: tokenizers.Tokenizer, bytes_: bool
) -> Pieces:
    """The bytes of `size` ids where a space is written as U+2581, as SentencePiece has it; control tokens have none.

    With `bytes_`, <0x00> to <0xFF> are bytes.
    """
    prefix = b" " if library.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE) else b""
    pieces = [(b"", b"")] * size
    for token, i in vocab.items():
        if token in visible:
            pieces[i] = (token.encode(), token.encode())
        elif bytes_ and (match := BYTE.fullmatch(token.encode())):
            byte = bytes([int(match[1], 16)])
            pieces[i] = (byte, byte)
        else:
            piece = token.replace(SPACE, " ").encode()
            pieces[i] = (piece, piece.removeprefix(prefix))
    return pieces


def _read_vocab(vocab: dict[str, int], path: Path) -> Tokenizer:
    merges = _read_merges(path.with_name("merges.txt"))
    beside = _Beside(path, vocab)
    if (name := beside.config.get("tokenizer_class", "GPT2Tokenizer")) not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        raise TokenizerError(f"{path}: the tokenizer of a {name}; expected GPT-2's, or a tokenizer.json beside it")
    bos, ends = beside.ends(None)
    control = _named((bos, *ends), vocab) | {t: i for t, i in vocab.items() if LOOKS_CONTROL.fullmatch(t)}
    plain = {text: i for text, i in vocab.items() if text not in control}
    special = Special(control)
    return BPETokenizer(
        build(plain, merges, path, splits=[GPT2_SPLIT]),
        byte_pieces(plain, {}, control),
        bos=bos,
        eos=ends[0],
        special=special,
        add_bos=beside.add_bos(False),
        stop_ids=special.stop_ids(*ends),
        padded=True,
    )


def _read_merges(path: Path) -> Merges:
    """The merges of a file: a line each, after one that may give the version. A merge can begin with # too."""
    lines = ((number, line.removesuffix("\r")) for number, line in enumerate(_text(path).split("\n"), 1))
    merges = (
        (f"line {number}", line) for number, line in lines if line and not (number == 1 and line.startswith("#version"))
    )
    return parse_merges(merges, path)
