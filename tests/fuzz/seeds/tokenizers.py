"""Good tokenizers of every format."""

import base64
import json
import struct

import gguf_writer
import numpy as np
import trained
from trained import BEGINS, BYTES

from fuzz.seeds.base import Seed, folder_of, json_bytes, seed, shared_file
from jllama.tokenizer.pieces import alphabet
from jllama.tokenizer.proto import field


def _pieces():
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *[f"<0x{b:02X}>".encode() for b in range(256)]]
    return [*pieces, b" ", *[bytes([97 + i]) for i in range(26)], b"th", b" th", b" the", "é".encode()]


@seed
def tokenizer_bin_new():
    small = folder_of(lambda top: trained.write_tokenizer(top / "tokenizer.bin", 330))
    few = {"tokenizer.bin": _new([b"<unk>", b"\n<s>\n", b"\n</s>\n", b" ", b"a", b"b", b"ab"])}
    real = [{"tokenizer.bin": data} for data in shared_file("stories260K/tok512.bin")]
    return [Seed(f, "tokenizer.bin", {"tokenizer.bin": "sized"}, "tokenizer", whole=False) for f in (few, small, *real)]


def _new(pieces):
    body = b"".join(struct.pack("<fi", -float(i), len(p)) + p for i, p in enumerate(pieces))
    return struct.pack("<i", max(map(len, pieces))) + body


@seed
def tokenizer_bin_old():
    few = b"".join(struct.pack("<i", len(p)) + p for p in _pieces())
    return [
        Seed({"tokenizer.bin": data}, "tokenizer.bin", {"tokenizer.bin": "sized"}, "tokenizer", whole=False)
        for data in (few, *shared_file("stories260K/tok512_old.bin"))
    ]


@seed
def sentencepiece_model():
    made = trained.train_sentencepiece().serialized_model_proto()
    few = _proto([b"<unk>", b"<s>", b"</s>", "▁".encode(), b"a", b"b", b"ab"])
    return [
        Seed({"tokenizer.model": d}, "tokenizer.model", {"tokenizer.model": "proto"}, "tokenizer") for d in (made, few)
    ]


def _proto(pieces):
    kinds = {0: 2, 1: 3, 2: 3}
    fields = [field(1, field(1, p) + field(2, -float(i)) + field(3, kinds.get(i, 1))) for i, p in enumerate(pieces)]
    trainer = field(3, 2) + field(35, False) + field(40, 0) + field(41, 1) + field(42, 2)
    return b"".join(fields) + field(2, trainer) + field(3, field(1, b"identity") + field(3, True))


def ranks():
    vocab = {t: i for t, i in trained.train().get_vocab().items() if t not in trained.SPECIAL}
    bytes_ = {char: b for b, char in enumerate(alphabet())}
    return [bytes(bytes_[c] for c in t) for t in sorted(vocab, key=vocab.get)] + [b"aa", b"aaa", b"aaaa"]


@seed
def tiktoken_model():
    """Of few tokens: oracles.py sets the number that the reader expects to theirs."""
    data = b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(ranks()))
    return [Seed({"tokenizer.model": data}, "tokenizer.model", {"tokenizer.model": "lines"}, "tiktoken")]


SPACE = "\u2581"
FIRST = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}


def added(i: int, content: str, **changes: bool) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, "special": True, **flags, **changes}


def toy(**changes):
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "</s>": 5, "<|begin|>": 6, "<unk>": 7}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added(5, "</s>"),
            added(8, "<think>", special=False, lstrip=True, rstrip=True),
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [FIRST]},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "post_processor": {"type": "Sequence", "processors": [BYTES, BEGINS]},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": ["a b", "ab c"],
            "unk_token": "<unk>",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": False,
            "ignore_merges": False,
        },
        **changes,
    }


def bytelevel():
    vocab = {c: i for i, c in enumerate(sorted(alphabet()))} | {"th": 256, "the": 257, "Ġthe": 258}
    return {
        "version": "1.0",
        "added_tokens": [
            added(259 + i, t) for i, t in enumerate(["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"])
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": r"\p{N}{1,3}| ?\p{L}+|\s+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": BEGINS,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["t h", "th e", "Ġ the"], "ignore_merges": True},
    }


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|begin|>",
    "eos_token": {"content": "<|end|>", "lstrip": False},
    "add_bos_token": True,
    "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
}


@seed
def tokenizer_json():
    found = []
    for spec in (toy(), bytelevel()):
        files = {"tokenizer.json": json_bytes(spec)}
        found.append(Seed(files, "tokenizer.json", {"tokenizer.json": "json"}, "tokenizer"))
    return found


@seed
def beside_tokenizer():
    """tokenizer_config.json, generation_config.json and config.json, which a tokenizer reads too."""
    files = {
        "tokenizer.json": json_bytes(bytelevel()),
        "tokenizer_config.json": json_bytes(TOKENIZER_CONFIG),
        "generation_config.json": json_bytes({"bos_token_id": 259, "eos_token_id": [260, 262], "temperature": 0.6}),
        "config.json": json_bytes({"bos_token_id": 259, "eos_token_id": 260, "model_type": "llama"}),
    }
    names = ("tokenizer_config.json", "generation_config.json", "config.json")
    return [Seed(files, "tokenizer.json", {name: "json"}, "tokenizer") for name in names]


@seed
def vocab_and_merges():
    spec = json.loads(trained.train().to_str())["model"]
    merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in spec["merges"])
    files = {
        "vocab.json": json_bytes(spec["vocab"]),
        "merges.txt": merges.encode(),
        "config.json": json_bytes({"bos_token_id": 0, "eos_token_id": 1}),
    }
    return [
        Seed(files, "vocab.json", {"vocab.json": "json"}, "tokenizer"),
        Seed(files, "vocab.json", {"merges.txt": "lines"}, "tokenizer", whole=False),
    ]


@seed
def gguf_tokenizer():
    bpe = trained.metadata_of(bytelevel_trained(), eot_token_id=2, add_bos_token=True)
    sp = trained.sentencepiece_metadata(trained.train_sentencepiece()) | {"tokenizer.ggml.add_space_prefix": True}
    few = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", SPACE, "a", "b", "ab"],
        "tokenizer.ggml.scores": np.array([0, 0, 0, -1, -2, -3, -4], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, 1, 1, 1, 1], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
    }
    return [
        Seed(
            {"m.gguf": gguf_writer.gguf_bytes({"general.architecture": "llama", **keys}, {})},
            "m.gguf",
            {"m.gguf": "gguf"},
            "tokenizer",
        )
        for keys in (bpe, sp, few)
    ]


def bytelevel_trained():
    return json.loads(trained.train().to_str())
