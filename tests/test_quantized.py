"""Folders with a quantization_config: packed here number by number, and read as what was packed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf
import ml_dtypes
import numpy as np
import oracle
import pytest
import tiny

from jllama import checkpoint, kernels
from jllama.checkpoint import CheckpointError
from jllama.config import Config
from jllama.run import choose

CONFIG = Config(64, 96, 1, 4, 2, 48, 64, head_dim=16)
Array = np.ndarray
Made = tuple[dict[str, Array], Array]  # the tensors of a matrix, and what they stand for
RNG = np.random.default_rng(0)


def packed(numbers: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Array:
    """Pack whole numbers along an axis, one by one."""
    numbers = np.moveaxis(numbers, axis, -1)
    each = 32 // bits
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // each), np.uint32)
    for word in range(words.shape[-1]):
        for place in range(each):
            column = word * each + (order[place] if order else place)
            words[..., word] |= numbers[..., column].astype(np.uint32) << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def scales(*shape: int, dtype: Any = np.float16) -> Array:
    return RNG.uniform(0.001, 0.02, shape).astype(dtype)


def fp8(out: int, columns: int, block: tuple[int, int], name: str = "weight_scale_inv", shape: Any = None) -> Made:
    weight = RNG.normal(0, 20, (out, columns)).astype(ml_dtypes.float8_e4m3fn)
    scale = scales(-(-out // block[0]), -(-columns // block[1]), dtype=np.float32)
    exact = np.zeros((out, columns))
    for i, j in np.ndindex(out, columns):
        exact[i, j] = float(weight[i, j]) * float(scale[i // block[0], j // block[1]])
    return {"weight": weight, name: scale.reshape(scale.shape if shape is None else shape)}, exact


def int8(out: int, columns: int, dtype: Any) -> Made:
    weight, scale = RNG.integers(-128, 128, (out, columns), np.int8), scales(out, 1, dtype=dtype)
    return {"weight": weight, "weight_scale": scale}, weight.astype(float) * scale.astype(float)


def grouped(u: Array, zeros: Array, scale: Array, group: Array) -> Array:
    """Give `(u - zero) * scale`, all `[in, out]` or `[groups, out]`, as `[out, in]`."""
    exact = np.zeros(u.shape[::-1])
    for i, j in np.ndindex(*u.shape):
        exact[j, i] = (int(u[i, j]) - int(zeros[group[i], j])) * float(scale[group[i], j])
    return exact


def gptq(
    out: int, columns: int, *, zero: int | None = 8, offset: int = 1, bits: int = 4, shuffled: bool = False
) -> Made:
    u, count = RNG.integers(0, 1 << bits, (columns, out)), columns // 32
    zeros = RNG.integers(1, 1 << bits, (count, out)) if zero is None else np.full((count, out), zero)
    scale, group = scales(count, out), np.arange(columns) // 32
    if shuffled:
        RNG.shuffle(group)
    tensors = {"qweight": packed(u, bits, 0), "qzeros": packed(zeros - offset, bits, 1), "scales": scale}
    return tensors | {"g_idx": group.astype(np.int32)}, grouped(u, zeros, scale, group)


def awq(out: int, columns: int, *, zero: int | None = None) -> Made:
    order, count = (0, 2, 4, 6, 1, 3, 5, 7), columns // 32
    u, scale = RNG.integers(0, 16, (columns, out)), scales(count, out)
    zeros = RNG.integers(0, 16, (count, out)) if zero is None else np.full((count, out), zero)
    tensors = {"qweight": packed(u, 4, 1, order), "qzeros": packed(zeros, 4, 1, order), "scales": scale}
    return tensors, grouped(u, zeros, scale, np.arange(columns) // 32)


def in_words(out: int, columns: int, bits: int) -> Made:
    u, scale = RNG.integers(0, 1 << bits, (columns, out)), scales(columns // 32, out, dtype=ml_dtypes.bfloat16)
    zeros = np.full(scale.shape, 1 << bits - 1)
    shape = np.array([out, columns], np.int64)
    tensors = {"weight_packed": packed(u.T, bits, 1), "weight_scale": np.ascontiguousarray(scale.T)}
    return tensors | {"weight_shape": shape}, grouped(u, zeros, scale, np.arange(columns) // 32)


def compressed(form: str, bits: int, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "symmetric": True} | weights, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


# name: the quantization_config, what makes a matrix, and in which form a leaf of such is kept
KINDS: dict[str, tuple[dict[str, Any], Callable[[int, int], Made], str]] = {
    "fp8 by blocks": (
        {"quant_method": "fp8", "weight_block_size": [40, 24]},
        lambda n, m: fp8(n, m, (40, 24)),
        "bfloat16",
    ),
    "fp8 by tensors": ({"quant_method": "fp8"}, lambda n, m: fp8(n, m, (n, m), "weight_scale", ()), "bfloat16"),
    "fp8 by rows": (
        compressed("float-quantized", 8, type="float", strategy="channel"),
        lambda n, m: fp8(n, m, (1, m), "weight_scale"),
        "bfloat16",
    ),
    "int8 by rows": (compressed("int-quantized", 8), lambda n, m: int8(n, m, ml_dtypes.bfloat16), "q8_0"),
    "int8, wide scales": (compressed("int-quantized", 8), lambda n, m: int8(n, m, np.float32), "int8"),
    "packed 4": (compressed("pack-quantized", 4), lambda n, m: in_words(n, m, 4), "q4_0"),
    "packed 8": (compressed("pack-quantized", 8), lambda n, m: in_words(n, m, 8), "q8_0"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq, "q4_0"),
    "gptq 8": ({"quant_method": "gptq", "bits": 8}, lambda n, m: gptq(n, m, bits=8, zero=128), "q8_0"),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda n, m: gptq(n, m, offset=0),
        "q4_0",
    ),
    "gptq, zeros": ({"quant_method": "gptq", "bits": 4}, lambda n, m: gptq(n, m, zero=None), "int8"),
    "gptq, shuffled": ({"quant_method": "gptq", "bits": 4}, lambda n, m: gptq(n, m, shuffled=True), "int8"),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq, "int8"),
    "awq, even": ({"quant_method": "awq", "bits": 4}, lambda n, m: awq(n, m, zero=8), "q4_0"),
}
EXACT = [name for name, (_, _, form) in KINDS.items() if form == "q4_0"] + ["int8 by rows", "packed 8", "gptq 8"]


def write(folder: Path, how: dict[str, Any], make: Callable[[int, int], Made]) -> oracle.Weights:
    """Write a model whose matrices in layers are quantised; return its weights, as the files have them."""
    weights = oracle.random_weights(CONFIG, tied=True)
    exact, tensors = {}, dict[str, Array]()
    for name, array in hf.llama_tensors(weights, CONFIG).items():
        exact[name], made = array, {"weight": array}
        if array.ndim == 2 and "layers" in name:
            made, matrix = make(*array.shape)
            exact[name] = matrix.astype(np.float32)
        tensors |= {name.replace("weight", key) if key != "weight" else name: x for key, x in made.items()}
    hf.write_folder(folder, hf.llama_config(CONFIG, tie_word_embeddings=True) | {"quantization_config": how}, {})
    hf.write_safetensors(folder / "model.safetensors", tensors)
    return exact


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_that_were_packed(tmp_path: Path, kind: str) -> None:
    how, make, form = KINDS[kind]
    exact = write(tmp_path, how, make)
    contents = checkpoint.read(tmp_path)
    assert contents.dtype == ("bfloat16" if form == "bfloat16" else "int8")
    sources = checkpoint.build.sources_of(checkpoint.load(tmp_path, dtype="float32"))
    found = {name: source.read(0, source.shape[0]) for name, source in sources.items()}
    found = hf.llama_tensors(found, CONFIG)
    assert found.keys() == exact.keys()
    for name, array in exact.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, err_msg=name)
    some = contents.sources["layers.0.feed_forward.w1.weight"].read(11, 30)  # within words and blocks
    np.testing.assert_array_equal(some, found["model.layers.0.mlp.gate_proj.weight"][11:30])


@pytest.mark.skipif(not kernels.has("groups"), reason=kernels.explain())
@pytest.mark.parametrize("kind", [name for name, (_, _, form) in KINDS.items() if form != "bfloat16"])
def test_integers_are_kept_in_groups(tmp_path: Path, kind: str) -> None:
    how, make, form = KINDS[kind]
    exact = write(tmp_path, how, make)
    params = checkpoint.load(tmp_path, run=choose("native"))
    assert params.layers[0].wqkv.weight.dtype == form
    found = {name: s.read(0, s.shape[0]) for name, s in checkpoint.build.sources_of(params).items()}
    for name, array in hf.llama_tensors(found, CONFIG).items():
        step = np.abs(exact[name]).max() / 127 * 0.6
        np.testing.assert_allclose(
            array, exact[name], rtol=1e-6 if kind in EXACT else 0, atol=step * (kind not in EXACT)
        )
    if kind in ("int8 by rows", "gptq"):
        tokens = tiny.ids(CONFIG, 1, 8)
        wanted = oracle.forward(found, CONFIG, tokens[0])
        error = np.abs(tiny.all_logits(params, tokens)[0] - wanted).max()
        assert error < 0.15 * wanted.std()  # inputs are rounded to int8


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method = bitsandbytes: expected fp8, fbgemm_fp8, compressed-tensors"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = gemv: not supported; expected gemm"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3: not supported; expected 4 or 8"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size = 128: expected two sizes"),
        (compressed("marlin-24", 4), "format = marlin-24: not supported"),
        (compressed("pack-quantized", 4, symmetric=False), "symmetric = False: not supported; expected True"),
        ("4 bits", "quantization_config = 4 bits: expected an object"),
        ({"quant_method": "fp8"}, "self_attn.q_proj: weight is missing; found g_idx, qweight"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, how: Any, words: str) -> None:
    write(tmp_path, {}, gptq)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(words)):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": scales(3, 64)}, "weight [96, 64], scales [64, 3]"),
        ({"g_idx": np.full(64, 9, np.int32)}, "g_idx: expected the groups of 64 columns, numbers below 2"),
        ({"qweight": np.zeros((8, 96), np.float32)}, "qweight is F32 [8, 96], expected I32"),
        ({"qzeros": None}, "qzeros is missing"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    def make(out: int, columns: int) -> Made:
        tensors, exact = gptq(out, columns)
        if out == CONFIG.hidden_dim:
            tensors = {name: x for name, x in (tensors | change).items() if x is not None}
        return tensors, exact

    write(tmp_path, {"quant_method": "gptq", "bits": 4}, make)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        checkpoint.read(tmp_path)
