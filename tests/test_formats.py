"""The table in the README: every format and family with its tokenizers, in every dtype, from file to text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_writer
import hf
import meta_writer
import numpy as np
import oracle
import pytest
from trained import metadata_of, sentencepiece_metadata, train, train_sentencepiece, write_tokenizer

from jllama import LLM
from jllama.config import Config

Model = tuple[Path, Callable[[np.ndarray], np.ndarray]]  # a checkpoint, and the oracle's logits for its weights


def config(vocab_size: int) -> Config:
    return Config(32, 48, 2, 4, 2, vocab_size, 64)


def llama(sizes: Config, tied: bool = False) -> tuple[oracle.Weights, Callable[[np.ndarray], np.ndarray]]:
    weights = oracle.random_weights(sizes, tied=tied)
    return weights, lambda ids: oracle.forward(weights, sizes, ids)


def llama2c_bin(folder: Path) -> Model:
    sizes = config(330)
    weights, forward = llama(sizes, tied=True)
    oracle.write_v0(folder / "model.bin", weights, sizes)
    write_tokenizer(folder / "tokenizer.bin", 330)
    return folder / "model.bin", forward


def llama2c_model(folder: Path) -> Model:
    sizes = config(train_sentencepiece().vocab_size())
    weights, forward = llama(sizes)
    oracle.write_v0(folder / "model.bin", weights, sizes)
    (folder / "tokenizer.model").write_bytes(train_sentencepiece().serialized_model_proto())
    return folder / "model.bin", forward


def meta_pth(folder: Path) -> Model:
    sizes = config(train_sentencepiece().vocab_size())
    weights, forward = llama(sizes)
    meta_writer.write(folder, weights, 2, n_kv_heads=2, multiple_of=48, ffn_dim_multiplier=0.5)
    (folder / "tokenizer.model").write_bytes(train_sentencepiece().serialized_model_proto())
    return folder, forward


def meta_npy(folder: Path) -> Model:
    path, forward = meta_pth(folder)
    weights, _ = llama(config(train_sentencepiece().vocab_size()))
    for file in path.glob("*.pth"):
        file.unlink()
    for name, array in weights.items():
        np.save(folder / f"{name}.npy", array)
    return folder, forward


def hf_llama(folder: Path) -> Model:
    sizes = config(330)
    weights, forward = llama(sizes, tied=True)
    hf.write_llama(folder, weights, sizes, shards=2)
    train().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": "<|begin|>"}))
    return folder, forward


def hf_llama_model(folder: Path) -> Model:
    sizes = config(train_sentencepiece().vocab_size())
    weights, forward = llama(sizes)
    hf.write_llama(folder, weights, sizes)
    (folder / "tokenizer.model").write_bytes(train_sentencepiece().serialized_model_proto())
    return folder, forward


def hf_gpt2(folder: Path) -> Model:
    weights = oracle.random_gpt2(32, 128, 2, 330, 64)
    hf.write_folder(folder, hf.gpt2_config(32, None, 2, 4, 330, 64), weights)
    spec = json.loads(train().to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(spec["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in spec["merges"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder, lambda ids: oracle.forward_gpt2(weights, 4, 1e-5, ids)


def gguf(folder: Path, metadata: dict[str, Any], size: int) -> Model:
    sizes = config(size)
    weights, forward = llama(sizes)
    keys = {"llama.feed_forward_length": 48, "llama.context_length": 64, "llama.rope.freq_base": 1e4}
    gguf_writer.write(folder / "model.gguf", weights, keys | metadata)
    return folder / "model.gguf", forward


def gguf_sentencepiece(folder: Path) -> Model:
    return gguf(folder, sentencepiece_metadata(train_sentencepiece()), train_sentencepiece().vocab_size())


def gguf_bpe(folder: Path) -> Model:
    return gguf(folder, metadata_of(json.loads(train().to_str())), train().get_vocab_size())


MAKERS = [
    llama2c_bin,
    llama2c_model,
    meta_pth,
    meta_npy,
    hf_llama,
    hf_llama_model,
    hf_gpt2,
    gguf_sentencepiece,
    gguf_bpe,
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_from_file_to_text_in_every_dtype(make: Callable[[Path], Model], tmp_path: Path) -> None:
    path, forward = make(tmp_path)
    text = "the cat sat on the mat"
    exact = LLM.load(path, dtype="float32")
    ids = exact.tokenizer.prompt_ids(text)
    expected: list[int] = []
    while len(expected) < 6:
        best = int(np.argmax(forward(np.array(ids + expected))[-1]))
        if best in exact.tokenizer.stop_ids:
            break
        expected.append(best)
    completion = exact.generate([text], temperature=0, max_new_tokens=6)[0]
    assert completion.tokens == expected
    known = ids[1:] if ids[0] == exact.tokenizer.bos else ids
    assert completion.text == exact.tokenizer.decode([*known, *expected]).removeprefix(text)
    nats = np.log(exact.score(text).perplexity)
    for dtype, tolerance in (("bfloat16", 0.02), ("int8", 0.1)):
        llm = LLM.load(path, dtype=dtype)
        assert llm.dtype == dtype
        assert abs(np.log(llm.score(text).perplexity) - nats) < tolerance * nats
        assert len(llm.generate([text], temperature=0, max_new_tokens=6, stop=["\0"])[0].tokens) <= 6


def test_one_model_in_many_formats_tells_one_story(shared: Path) -> None:
    folder = shared / "models/stories260K"
    texts = {
        file: LLM.load(folder / file, dtype="float32").generate(["Lily and"], temperature=0, max_new_tokens=40)[0].text
        for file in ("stories260K.bin", "stories260K_v1.bin", "stories260K.F32.gguf", "stories260K.F16.gguf")
    }
    assert len(set(texts.values())) == 1
