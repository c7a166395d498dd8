"""Small tokenizers that the libraries train, and what files of other formats say about them."""

import functools
import io
import struct
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jllama.tokenizer.pieces import alphabet

# Parts of a tokenizer.json: what puts BOS before a text, and how text becomes bytes.
BEGINS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}},
}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}

TEXT = [
    "the cat sat on the mat, then it ate the hat 1234",
    "hello   there\n\n  hello #other ## I'll you'Ve",
    "é 株式 🦙",
]
SPECIAL = ["<|begin|>", "<|end|>", "<|im_end|>"]


@functools.cache
def train():
    """A small byte-level tokenizer with control tokens, as the library makes it."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet()), show_progress=False
    )
    library.train_from_iterator(TEXT * 5, trainer)
    return library


@functools.cache
def train_sentencepiece(text=tuple(TEXT), size=330):
    """A small SentencePiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 5),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(spec, **more):
    """What the header of a GGUF file says about a tokenizer.json."""
    vocab = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": np.array([3 if t in SPECIAL else 1 for t in vocab], np.int32),
        "tokenizer.ggml.merges": [" ".join(m) for m in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece_metadata(sp):
    """What the header of a GGUF file says about a SentencePiece model."""
    ids = range(sp.vocab_size())
    kinds = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([sp.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_tokenizer(path: Path, size: int) -> None:
    """Write a tokenizer.bin: specials, the 256 bytes, letters."""
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *[f"<0x{b:02X}>".encode() for b in range(256)]]
    pieces += [b" ", *[bytes([97 + i]) for i in range(26)], *[b" " + bytes([97 + i]) for i in range(26)]]
    pieces += [f"w{i}".encode() for i in range(size - len(pieces))]
    body = b"".join(struct.pack("<fi", -float(i), len(p)) + p for i, p in enumerate(pieces[:size]))
    path.write_bytes(struct.pack("<i", max(map(len, pieces))) + body)
