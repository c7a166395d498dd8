"""Hugging Face's `tokenizer.json`, and `vocab.json` with `merges.txt` as GPT-2 has it.

What they don't say is read from the files beside them: tokenizer_config.json, generation_config.json and config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jllama.errors import quoted
from jllama.tokenizer import limits
from jllama.tokenizer.base import Ids, Tokenizer, TokenizerError, is_id, raise_all
from jllama.tokenizer.beside import Beside, read_json, read_text
from jllama.tokenizer.bpe import (
    GPT2_SPLIT,
    BPETokenizer,
    Merges,
    add_visible,
    bpe,
    build,
    library_errors,
    parse_merges,
)
from jllama.tokenizer.pieces import BYTE_KIND, CONTROL, NORMAL, SPACE, BytePieces, SpacedPieces, byte_of
from jllama.tokenizer.special import LOOKS_CONTROL, LOOKS_NAME, Special

_OPTIONS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
_NOTHING = {"type": "BPE", "vocab": {}, "merges": []}


def recognises(head: bytes) -> bool:
    """Whether a file that begins with `head` holds a JSON object."""
    return re.match(rb"(\xef\xbb\xbf)?\s*\{", head) is not None


def read(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, or a `vocab.json` with the `merges.txt` beside it.

    Of a Unigram tokenizer.json the tokenizer.model beside it is read, which says the same.

    Raises:
      TokenizerError: it is neither, or is damaged.
    """
    spec = read_json(path)
    if isinstance(model := spec.get("model"), dict):
        if model.get("type") == "Unigram" and (file := path.with_name("tokenizer.model")).is_file():
            from jllama.tokenizer import sentencepiece

            return sentencepiece.read(file)
        return _read_tokenizer(spec, path)
    if spec and all(map(is_id, spec.values())):
        return _read_vocab(spec, path)
    raise TokenizerError(
        f"{path}: JSON with {', '.join(map(quoted, list(spec)[:5]))}; expected tokenizer.json or vocab.json"
    )


def _read_tokenizer(spec: dict[str, Any], path: Path) -> Tokenizer:
    _check(spec, path)
    model, added = spec["model"], spec.get("added_tokens") or []
    listed = {token["content"]: token["id"] for token in added}
    ids = model["vocab"] | listed
    beside = Beside(path.parent)
    prefix, ends = _prefix(spec.get("post_processor"), ids, path), beside.ends(ids)
    bos = next(iter([*(i for i in beside.ids("bos", ids) if not prefix or i in prefix), *(prefix or ())]), None)
    control = _named([*ends, *([] if bos is None else [bos])], ids)
    control |= {t["content"]: t["id"] for t in added if t.get("special") or LOOKS_CONTROL.fullmatch(t["content"])}
    visible = {text: i for text, i in listed.items() if text not in control}
    vocab = {text: i for text, i in model["vocab"].items() if text not in control} | visible
    library, continuing = _libraries(spec, vocab, [t for t in added if t["content"] in visible], path)
    special = Special(
        control,
        lstrip=[t["content"] for t in added if t.get("lstrip")],
        rstrip=[t["content"] for t in added if t.get("rstrip")],
    )
    pieces = BytePieces(vocab, visible | control)
    ids_: Ids = {
        "bos": bos,
        "eos": ends[0] if ends else None,
        "special": special,
        "prefix": _stated(beside, bos, ends) if prefix is None else prefix,
        "bos_token": beside.bos_token,
        "stop_ids": special.stop_ids(*ends),
        "unused": pieces.unused,
        "padded": True,
    }
    if _byte_level(spec):
        return BPETokenizer(library, pieces, missing=pieces.missing, **ids_)
    spaced = _spaced(vocab, visible, len(pieces), library, bool(model.get("byte_fallback")))
    return BPETokenizer(library, spaced, continuing=continuing, strips=True, **ids_)


def _stated(beside: Beside, bos: int | None, ends: Sequence[int]) -> tuple[int, ...]:
    """What a text begins with where no post-processor says it."""
    begin = next((i for i in (bos, *ends) if i is not None), None)
    return (begin,) if beside.add_bos and begin is not None else ()


def _check(spec: Mapping[str, Any], path: Path) -> None:
    """Raise for a model that is not byte-pair encoding, and for fields of other types than they should be."""
    model, added = spec["model"], spec.get("added_tokens") or []
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"{path}: model.type is {quoted(model['type'])}; expected 'BPE', or a tokenizer.model")
    problems = []
    vocab, unknown = model.get("vocab"), model.get("unk_token")
    if not isinstance(vocab, dict) or not all(map(is_id, vocab.values())):
        problems.append("model.vocab is no object of ids")
    elif unknown is not None and (not isinstance(unknown, str) or unknown not in vocab):
        problems.append(f"model.unk_token is {quoted(unknown)}, expected one of model.vocab")
    if not isinstance(model.get("merges", []), list):
        problems.append("model.merges is no list")
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and is_id(token.get("id")) for token in added
    ):
        problems.append("added_tokens is no list of objects with an id and a content")
    raise_all([*problems, *limits.problems(spec)], path)
    # The library knows the shapes of all the rest.
    _library({**spec, "added_tokens": [], "model": {**model, **_NOTHING, "unk_token": None}}, path)
    if not _byte_level(spec) and not model.get("byte_fallback") and unknown is None:
        raise TokenizerError(f"{path}: neither bytes, model.byte_fallback nor model.unk_token for unknown characters")


def _byte_level(spec: Mapping[str, Any]) -> bool:
    nodes = limits.parts(spec.get("pre_tokenizer"), spec.get("decoder"))
    return any(node.get("type") == "ByteLevel" for node in nodes)


def _named(numbers: Iterable[int], ids: Mapping[str, int]) -> dict[str, int]:
    """Those of the ids `numbers` whose text no one would take for a word: control tokens that aren't listed as such."""
    wanted = set(numbers)
    return {text: i for text, i in ids.items() if i in wanted and LOOKS_NAME.fullmatch(text)}


def _prefix(processor: Any, ids: Mapping[str, int], path: Path) -> tuple[int, ...] | None:
    """The ids that the post-processor puts in front of a text, None if it says nothing about that."""
    todo = [processor]
    while todo:
        node = todo.pop(0)
        if not isinstance(node, dict):
            continue
        if node.get("type") == "Sequence":
            todo = [*node["processors"], *todo]
        elif node.get("type") == "TemplateProcessing":
            prefix = []
            for part in node["single"]:
                if "SpecialToken" not in part:
                    break
                prefix += node["special_tokens"].get(part["SpecialToken"]["id"], {"ids": [-1]})["ids"]
            if not set(prefix) <= set(ids.values()):
                raise TokenizerError(f"{path}: post_processor begins a text with {quoted(prefix)}; expected token ids")
            return tuple(prefix)
    return None


def _libraries(
    spec: Mapping[str, Any], vocab: Mapping[str, int], visible: list[dict[str, Any]], path: Path
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer | None]:
    """The library's tokenizer of `spec` with other tokens, and one for texts that don't begin one, if that differs."""
    model = spec["model"]
    # Without the control tokens no text can become one; but the library needs the one for what is unknown.
    unknown = {t: model["vocab"][t] for t in [model.get("unk_token")] if t in model["vocab"]}
    options = {name: model[name] for name in _OPTIONS if model.get(name) is not None}
    library = bpe({**vocab, **unknown}, _merges_of(model, path), path, **options)
    words = json.dumps(spec.get("pre_tokenizer"))
    inside = words.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    both = [library]
    if inside != words:
        both.append(tokenizers.Tokenizer(library.model))  # which is shared, not copied
    for each, split in zip(both, (words, inside), strict=False):
        steps = _library({"pre_tokenizer": json.loads(split), "normalizer": spec.get("normalizer")}, path)
        if steps.normalizer is not None:
            each.normalizer = steps.normalizer
        if steps.pre_tokenizer is not None:
            each.pre_tokenizer = steps.pre_tokenizer
        add_visible(each, visible, path)
    return library, both[1] if len(both) > 1 else None


def _merges_of(model: Mapping[str, Any], path: Path) -> Merges:
    """The merges, each written as two tokens or with a space between them."""
    merges = model.get("merges") or []
    if all(type(merge) is str for merge in merges):
        return parse_merges(merges, path, "model.merges: entry")
    if all(type(merge) is list and len(merge) == 2 and all(type(t) is str for t in merge) for merge in merges):
        return list(map(tuple, merges))
    raise TokenizerError(f"{path}: model.merges is no list of pairs of tokens")


def _library(spec: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    fields = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
    with library_errors(path):
        return tokenizers.Tokenizer.from_str(
            json.dumps({"version": "1.0", "model": _NOTHING, **dict.fromkeys(fields), "added_tokens": [], **spec})
        )


def _spaced(
    vocab: Mapping[str, int], visible: Mapping[str, int], size: int, library: tokenizers.Tokenizer, bytes_: bool
) -> SpacedPieces:
    """The bytes of `size` ids where a space is written as U+2581, as SentencePiece has it; control tokens have none.

    With `bytes_`, <0x00> to <0xFF> are bytes.
    """
    first = library.encode("a", add_special_tokens=False).tokens[:1]
    texts, kinds = [b""] * size, [CONTROL] * size
    for token, i in vocab.items():
        texts[i] = token.encode() if token in visible else token.replace(SPACE, " ").encode()
        kinds[i] = BYTE_KIND if bytes_ and byte_of(texts[i]) is not None else NORMAL
    plain = frozenset(visible.values())
    return SpacedPieces(texts, kinds, prefix=bool(first) and first[0].startswith(SPACE), plain=plain)


def _read_vocab(vocab: dict[str, int], path: Path) -> Tokenizer:
    merges = _read_merges(path.with_name("merges.txt"))
    beside = Beside(path.parent)
    if (name := beside.config.get("tokenizer_class", "GPT2Tokenizer")) not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        raise TokenizerError(
            f"{path}: the tokenizer of a {quoted(name)}; expected GPT-2's, or a tokenizer.json beside it"
        )
    ends = beside.ends(vocab)
    bos = next(iter(beside.ids("bos", vocab)), None)
    control = _named([*ends, *([] if bos is None else [bos])], vocab)
    control |= {t: i for t, i in vocab.items() if LOOKS_CONTROL.fullmatch(t)}
    plain = {text: i for text, i in vocab.items() if text not in control}
    special, pieces = Special(control), BytePieces(plain, control)
    return BPETokenizer(
        build(plain, merges, path, splits=[GPT2_SPLIT]),
        pieces,
        missing=pieces.missing,
        bos=bos,
        eos=ends[0] if ends else None,
        special=special,
        prefix=_stated(beside, bos, ends),
        bos_token=beside.bos_token,
        stop_ids=special.stop_ids(*ends),
        unused=pieces.unused,
        padded=True,
    )


def _read_merges(path: Path) -> Merges:
    """The merges of a file: a line each, after one that may give the version. A merge can begin with # too."""
    lines = [line.removesuffix("\r") for line in read_text(path).split("\n")]
    header = int(lines[0].startswith("#version"))
    # An empty line can only be the last one, or comes before others by mistake, and says nothing.
    return parse_merges([line for line in lines[header:] if line], path, "line", 1 + header)
