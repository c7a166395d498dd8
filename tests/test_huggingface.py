"""Hugging Face folders: the same model as from Meta's layout, every field honoured or refused, and back to a folder."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hf
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from absl import logging
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from jllama import checkpoint, rope
from jllama.checkpoint import CheckpointError, build, huggingface, mapped, safetensors
from jllama.config import Config, from_toml
from jllama.decode import Stop, generate
from jllama.families import HUGGINGFACE
from jllama.model import Params
from jllama.rope import Llama3
from jllama.tensors import tensors

ROOT = Path(__file__).resolve().parents[1]
SMALL = Config(dim=16, hidden_dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=40, max_seq_len=32)
GOLDEN = [
    ("tiny-llama-hf", "tiny-llama-hf"),
    ("tiny-llama-hf/config.v5.json", "tiny-llama-hf"),
    ("tiny-llama3-hf", "tiny-llama3-hf"),
    ("tiny-llama3-hf/config.v5.json", "tiny-llama3-hf"),
    ("tiny-gpt2-hf", "tiny-gpt2-hf"),
    ("tiny-gpt2-hub-names", "tiny-gpt2-hf"),
]

jit_generate = jax.jit(generate, static_argnames="slots")


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)  # also fails where the trees or configs differ


def with_extras(weights: oracle.Weights, config: Config, *, qkv: bool, wo: bool, norms: bool) -> oracle.Weights:
    """Add the tensors that some families have, random, so that leaving one out shows."""
    rng, extra = np.random.default_rng(5), {}
    for i in range(config.n_layers):
        at = f"layers.{i}.attention"
        for name, has in (("wq", qkv), ("wk", qkv), ("wv", qkv), ("wo", wo)):
            if has:
                extra[f"{at}.{name}.bias"] = rng.normal(0, 0.5, len(weights[f"{at}.{name}.weight"])).astype(np.float32)
        if norms:
            for name in ("q_norm", "k_norm"):
                extra[f"{at}.{name}.weight"] = rng.normal(1, 0.3, config.head_dim).astype(np.float32)
    return weights | extra


# --- the Llama family


def test_half_split_order() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert hf.half_split(rows, 8).ravel().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    source = build.Source((16, 1), lambda i, j: np.concatenate([rows, rows + 8])[i:j])
    pairs = mapped.interleaved(source, 8, 8)
    whole = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    halves = mapped.half_split(pairs, 8, 8)
    for start in range(16):
        for stop in range(start + 1, 17):
            assert pairs.read(start, stop).ravel().tolist() == whole[start:stop]
            assert halves.read(start, stop).ravel().tolist() == list(range(start, stop))


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(8, 2), (8, 4), (4, 4), (8, 1)])
@pytest.mark.parametrize("shards", [1, 3])
def test_same_model_as_from_metas_layout(tmp_path: Path, n_heads: int, n_kv_heads: int, shards: int) -> None:
    config = Config(64, 48, 2, n_heads, n_kv_heads, 50, 32)
    weights = oracle.random_weights(config, tied=False)
    params = checkpoint.load(hf.write_llama(tmp_path / "m", weights, config, shards))
    assert_same(params, tiny.params(weights, config))
    if shards == 1:
        tokens = tiny.ids(config, 1, 16)
        np.testing.assert_allclose(
            tiny.all_logits(params, tokens)[0], oracle.forward(weights, config, tokens[0]), atol=1e-4
        )


@pytest.mark.parametrize("name", tiny.CONFIGS)
@pytest.mark.parametrize("block", [50, 1 << 20])
def test_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block: int) -> None:
    monkeypatch.setattr(build, "_BLOCK", block)
    config, tied = tiny.CONFIGS[name]
    weights = oracle.random_weights(config, tied=tied)
    params = checkpoint.load(hf.write_llama(tmp_path / "m", weights, config))
    assert_same(params, tiny.params(weights, config))


def test_head_dim_wider_than_the_model(tmp_path: Path) -> None:
    config = Config(56, 40, 1, n_heads=6, n_kv_heads=2, vocab_size=50, max_seq_len=32, head_dim=16)
    assert config.dim % config.n_heads
    weights = oracle.random_weights(config, tied=True)
    params = checkpoint.load(hf.write_llama(tmp_path / "m", weights, config))
    tokens = tiny.ids(config, 1, 20)
    np.testing.assert_allclose(
        tiny.all_logits(params, tokens)[0], oracle.forward(weights, config, tokens[0]), atol=1e-4
    )
    with pytest.raises(CheckpointError, match="head_dim = 16"):
        checkpoint.save(params, tmp_path / "no.bin")


# name -> fields of config.json, window, and which of the extra tensors there are
FAMILIES: dict[str, tuple[dict[str, Any], int | None, dict[str, bool]]] = {
    "llama-bias": ({"attention_bias": True}, None, {"qkv": True, "wo": True, "norms": False}),
    "mistral": ({"model_type": "mistral", "sliding_window": 5}, 5, {"qkv": False, "wo": False, "norms": False}),
    "mistral-full": ({"model_type": "mistral", "sliding_window": None}, None, {"qkv": 0, "wo": 0, "norms": 0}),
    "qwen2": (
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1},
        None,
        {"qkv": True, "wo": False, "norms": False},
    ),
    "qwen2-window": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
        7,
        {"qkv": True, "wo": False, "norms": False},
    ),
    "qwen2-no-window": (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": None,
            "layer_types": ["sliding_attention"],
        },
        None,
        {"qkv": True, "wo": False, "norms": False},
    ),
    "qwen3": (
        {"model_type": "qwen3", "attention_bias": False, "sliding_window": None, "layer_types": ["full_attention"] * 2},
        None,
        {"qkv": False, "wo": False, "norms": True},
    ),
    "qwen3-bias": (
        {"model_type": "qwen3", "attention_bias": True},
        None,
        {"qkv": True, "wo": True, "norms": True},
    ),
}


def family(name: str) -> tuple[Config, oracle.Weights, dict[str, Any]]:
    fields, window, extras = FAMILIES[name]
    config = Config(40, 56, 2, 6, 3, 97, 64, head_dim=16, norm_eps=1e-4, sliding_window=window)
    return config, with_extras(oracle.random_weights(config, tied=False), config, **extras), fields


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    config, weights, fields = family(name)
    params = checkpoint.load(hf.write_llama(tmp_path / "m", weights, config, **fields))
    assert_same(params, tiny.params(weights, config))
    tokens = tiny.ids(config, 2, 24)
    for found, row in zip(tiny.all_logits(params, tokens), tokens, strict=True):
        np.testing.assert_allclose(found, oracle.forward(weights, config, row), atol=1e-4)


def test_the_norms_epsilon_is_the_files(tmp_path: Path) -> None:
    weights = oracle.random_weights(SMALL, tied=True)
    weights["tok_embeddings.weight"] *= 5e-3
    tokens, found = tiny.ids(SMALL, 1, 8), []
    for eps in (1e-5, 1e-6):
        config = dataclasses.replace(SMALL, norm_eps=eps)
        params = checkpoint.load(hf.write_llama(tmp_path / f"{eps}", weights, config))
        found.append(tiny.all_logits(params, tokens)[0])
        np.testing.assert_allclose(found[-1], oracle.forward(weights, config, tokens[0]), atol=1e-4)
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.parametrize(
    ("tie", "in_file", "tied"), [(True, 0, 1), (None, 0, 1), (..., 0, 1), (False, 1, 0), (..., 1, 0)]
)
def test_tied_heads(tmp_path: Path, tie: Any, in_file: int, tied: int) -> None:
    weights = oracle.random_weights(SMALL, tied=not in_file)
    params = checkpoint.load(hf.write_llama(tmp_path / "m", weights, SMALL, tie_word_embeddings=tie))
    assert (params.output is None) == bool(tied)
    assert_same(params, tiny.params(weights, SMALL))


def test_a_head_that_is_there_is_used_and_one_that_should_be_is_missed(tmp_path: Path, warnings: list[str]) -> None:
    weights = oracle.random_weights(SMALL, tied=False)
    params = checkpoint.load(hf.write_llama(tmp_path / "m", weights, SMALL, tie_word_embeddings=True))
    np.testing.assert_array_equal(params.output.decode(), weights["output.weight"])
    assert len(warnings) == 1
    assert "lm_head.weight" in warnings[0]
    del weights["output.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing, expected \[40, 16\]"):
        checkpoint.load(hf.write_llama(tmp_path / "m", weights, SMALL, tie_word_embeddings=False))


@pytest.mark.parametrize(
    ("dtype", "auto"), [("F32", "float32"), ("F16", "float32"), ("BF16", "bfloat16"), ("F64", "float32")]
)
@pytest.mark.parametrize("as_", build.DTYPES)
def test_dtypes(tmp_path: Path, dtype: str, auto: str, as_: str) -> None:
    stored = {n: a.astype(hf.DTYPES[dtype]) for n, a in oracle.random_weights(SMALL, tied=True).items()}
    folder = hf.write_llama(tmp_path / "m", stored, SMALL)
    exact = {name: array.astype(np.float32) for name, array in stored.items()}
    assert_same(checkpoint.load(folder, dtype=as_), tiny.params(exact, SMALL, as_))
    assert_same(checkpoint.load(folder), tiny.params(exact, SMALL, auto))


def test_auto_loses_nothing_of_mixed_files(tmp_path: Path) -> None:
    weights = {n: a if a.ndim == 1 else a.astype(bfloat16) for n, a in oracle.random_weights(SMALL, tied=True).items()}
    params = checkpoint.load(hf.write_llama(tmp_path / "m", weights, SMALL))
    assert params.layers[0].wo.weight.dtype == "bfloat16"
    np.testing.assert_array_equal(params.norm.weight, weights["norm.weight"])
    weights["layers.1.attention.wo.weight"] = weights["layers.1.attention.wo.weight"].astype(np.float32)
    params = checkpoint.load(hf.write_llama(tmp_path / "m", weights, SMALL))
    assert params.layers[0].wo.weight.dtype == "float32"


# --- config.json


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what is logged as a warning."""
    found: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda message, *args: found.append(message % args))
    return found


STRETCHED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("table", "scaling", "context"),
    [
        ({"type": "linear", "factor": 4}, rope.Linear(4.0), 32),
        ({"rope_type": "dynamic", "factor": 4.0}, None, 32),  # the same up to max_position_embeddings
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            rope.Yarn(4.0, 16, attention_factor=None),
            64,
        ),
        ({"rope_type": "yarn", "factor": 2.0}, rope.Yarn(2.0, 32), 64),
        (
            {
                "type": "yarn",
                "factor": 2.0,
                "beta_fast": 8,
                "beta_slow": 2.0,
                "truncate": False,
                "attention_factor": 1.5,
            },
            rope.Yarn(2.0, 32, 8.0, 2.0, 1.5, False),
            64,
        ),
    ],
)
def test_formulas_of_rope(
    tmp_path: Path, table: dict[str, Any], scaling: rope.RopeScaling | None, context: int
) -> None:
    """What they compute is compared with transformers in test_families.py."""
    folder = hf.write_llama(tmp_path / "m", oracle.random_weights(SMALL, tied=True), SMALL, rope_scaling=table)
    params = checkpoint.load(folder)
    assert (params.config.rope_scaling, params.config.max_seq_len) == (scaling, context)
    assert_same(checkpoint.load(saved(params, tmp_path / "saved")), params)


@pytest.mark.parametrize(
    ("changes", "theta", "scaled"),
    [
        ({"rope_theta": 500000}, 5e5, False),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 500000}}, 5e5, False),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 500000.0, "rope_type": None}}, 5e5, False),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000}}, 5e5, False),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default", "rope_type": "default"}}, 5e5, False),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **STRETCHED}}, 5e5, True),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **STRETCHED}}, 5e5, True),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **STRETCHED}}, 5e5, True),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **STRETCHED}}, 5e5, True),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"type": "llama3", **STRETCHED},
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **STRETCHED},
            },
            5e5,
            True,
        ),
    ],
)
def test_rotary_settings_wherever_they_are(
    tmp_path: Path, warnings: list[str], changes: dict[str, Any], theta: float, scaled: bool
) -> None:
    scaling = Llama3(8.0, 1.0, 4.0, 16) if scaled else None
    config = dataclasses.replace(SMALL, rope_theta=theta, rope_scaling=scaling)
    weights = oracle.random_weights(config, tied=True)
    params = checkpoint.load(hf.write_llama(tmp_path / "m", weights, SMALL, **changes))
    assert params.config == dataclasses.replace(config, tied=True)
    assert_same(params, tiny.params(weights, config))
    assert warnings == []


def test_no_rope_theta_is_said(tmp_path: Path, warnings: list[str]) -> None:
    weights = oracle.random_weights(SMALL, tied=True)
    folder = hf.write_llama(tmp_path / "m", weights, SMALL, rope_theta=...)
    assert checkpoint.load(folder).config.rope_theta == 10000
    assert len(warnings) == 1
    assert "config.json: no rope_theta, taking 10000" in warnings[0]
    assert checkpoint.load(folder, rope_theta=1e6).config.rope_theta == 1e6


def test_a_stored_type_is_the_tensors(tmp_path: Path, warnings: list[str]) -> None:
    weights = oracle.random_weights(SMALL, tied=True)
    folder = hf.write_llama(tmp_path / "m", weights, SMALL, dtype="bfloat16", torch_dtype="float16")
    assert_same(checkpoint.load(folder), tiny.params(weights, SMALL))
    assert len(warnings) == 1
    assert "dtype = bfloat16 and torch_dtype = float16" in warnings[0]


def test_what_the_first_llamas_leave_out(tmp_path: Path) -> None:
    config = Config(16, 24, 1, 4, 4, 40, 32)
    weights = oracle.random_weights(config, tied=False)
    left_out = {"head_dim": ..., "num_key_value_heads": ..., "rope_scaling": ..., "tie_word_embeddings": ...}
    folder = hf.write_llama(tmp_path / "m", weights, config, **left_out, model_type=...)
    assert_same(checkpoint.load(folder), tiny.params(weights, config))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba2"}, ["model_type = mamba2", "expected llama, mistral, qwen2, qwen3, "]),
        ({"model_type": ["llama"]}, ["model_type = ['llama']"]),
        ({"model_type": ..., "architectures": ["T5Model"]}, ["architectures = ['T5Model']", "LlamaForCausalLM"]),
        ({"hidden_size": ..., "vocab_size": None}, ["hidden_size is missing", "vocab_size is missing"]),
        ({"rms_norm_eps": ...}, ["rms_norm_eps is missing"]),
        ({"model_type": "mistral", "num_key_value_heads": ...}, ["num_key_value_heads is missing"]),
        ({"hidden_size": "16", "vocab_size": 40.0}, ["hidden_size = 16: expected a whole", "vocab_size = 40.0"]),
        ({"hidden_size": 10**400}, ["hidden_size = 1000", "expected a whole number"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps = 1000", "expected a number"]),
        ({"num_attention_heads": True}, ["num_attention_heads = True"]),
        ({"num_attention_heads": 7, "head_dim": 4}, ["n_heads = 7", "n_kv_heads = 2"]),
        ({"num_hidden_layers": 0}, ["n_layers = 0"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers = 1000000000", "only 20 tensors"]),
        ({"hidden_size": 2**30}, ["model.embed_tokens.weight is [40, 16], expected [40, 1073741824]"]),
        ({"hidden_size": 2**62}, ["dim = 4611686018427387904: expected 1 to 2146435071"]),
        ({"max_position_embeddings": 2**40}, ["max_seq_len = 1099511627776: expected 1 to 2146435071"]),
        ({"quantization": {"group_size": 64, "bits": 4}}, ["quantization: mlx's weights are not supported"]),
        ({"hidden_act": "relu"}, ["hidden_act = relu", "expected silu or gelu"]),
        ({"mlp_bias": True}, ["mlp_bias = True", "expected False"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"quantization_config": {"quant_method": "exl2"}}, ["quant_method = exl2: expected fp8", "the model's GGUF"]),
        ({"quantization": {"group_size": 64, "bits": 4}}, ["quantization: mlx's weights"]),
        ({"attention_bias": "no"}, ["attention_bias = no: expected true or false"]),
        ({"rope_theta": "10000"}, ["rope_theta = 10000: expected a number"]),
        ({"rope_theta": -1}, ["rope_theta = -1"]),
        ({"rope_theta": 10**400}, ["rope_theta = 1000", "expected a number"]),
        ({"rope_scaling": "linear"}, ["rope_scaling = linear: expected an object"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling.rope_type = None", "llama3, yarn or longrope"]),
        ({"rope_scaling": {"type": "longrope"}}, ["rope_scaling.short_factor is missing"]),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ["rope_scaling.factor = -1"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_parameters.factor is missing"]),
        ({"rope_scaling": {"rope_type": "llama4"}}, ["rope_scaling.rope_type = llama4"]),
        ({"rope_scaling": {"rope_type": []}}, ["rope_scaling.rope_type = []"]),
        ({"rope_scaling": {"rope_type": "llama3", "type": "yarn"}}, ["rope_type = llama3", "type = yarn", "one value"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling.low_freq_factor is missing"]),
        ({"rope_scaling": {"type": "llama3", **STRETCHED, "factor": 0}}, ["rope_scaling.factor = 0"]),
        ({"rope_parameters": {"rope_theta": 5e5}}, ["rope_theta = 10000.0 and rope_parameters.rope_theta = 500000.0"]),
        (
            {"rope_scaling": {"type": "default"}, "rope_parameters": {"type": "llama3", **STRETCHED}},
            ["rope_scaling", "rope_parameters", "expected one value"],
        ),
        ({"model_type": "mistral", "sliding_window": 0}, ["sliding_window = 0"]),
        ({"model_type": "mistral", "sliding_window": "all"}, ["sliding_window = all"]),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, ["use_sliding_window", "some"]),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            ["use_sliding_window"],
        ),
        ({"hidden_act": "relu", "mlp_bias": 1, "rms_norm_eps": ...}, ["hidden_act", "mlp_bias", "rms_norm_eps"]),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    folder = hf.write_llama(tmp_path / "m", oracle.random_weights(SMALL, tied=True), SMALL, **changes)
    start = time.process_time()
    with pytest.raises(CheckpointError) as e:
        checkpoint.load(folder)
    assert time.process_time() - start < 1
    assert all(word in str(e.value) for word in [str(folder), *words]), str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"\xff", b'{"model_type": "llama"', b'{"model_type":"llama","model_type":"gpt2"}']
)
def test_broken_config_files(tmp_path: Path, text: bytes) -> None:
    folder = hf.write_llama(tmp_path / "m", oracle.random_weights(SMALL, tied=True), SMALL)
    (folder / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        checkpoint.load(folder)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**100),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["rope_type", *STRETCHED]), inner),
    max_leaves=5,
)
OTHER_FIELDS = ["rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "dtype"]


@given(st.data(), st.sampled_from([*sorted(FAMILIES), "gpt2"]))
def test_no_fields_fail_in_another_way(data: st.DataObject, name: str) -> None:
    fields = hf.gpt2_config(24, None, 2, 3, 50, 32) if name == "gpt2" else hf.llama_config(SMALL, **FAMILIES[name][0])
    changed = data.draw(st.dictionaries(st.sampled_from([*fields, *OTHER_FIELDS]), ANYTHING, min_size=1, max_size=3))
    try:
        huggingface.parse(fields | changed, "here")
    except CheckpointError as e:
        message = str(e)
    else:
        return
    assert message.startswith("here: ")
    assert "\n" not in message


# --- which files


@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder_or_a_file_in_it(tmp_path: Path, shards: int) -> None:
    weights = oracle.random_weights(SMALL, tied=True)
    folder = hf.write_llama(tmp_path / "any.bin", weights, SMALL, shards)
    expected = checkpoint.load(str(folder))
    for file in folder.iterdir():
        if file.name != huggingface.INDEX:
            assert_same(checkpoint.load(file), expected)
    shutil.copy(folder / "config.json", folder / "other.json")
    (folder / "config.json").write_text("{}")
    assert_same(checkpoint.load(folder / "other.json"), expected)


def test_other_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"looks like a folder, expected .*a Hugging Face folder \(config\.json"):
        checkpoint.load(tmp_path)
    (tmp_path / "config.json").write_text('{"dim": 64}')
    with pytest.raises(CheckpointError, match="looks like a folder"):
        checkpoint.load(tmp_path)
    with pytest.raises(CheckpointError, match="looks like a text file"):
        checkpoint.load(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(hf.llama_config(SMALL)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4")
    with pytest.raises(CheckpointError, match=r"no weights here; expected model\.safetensors or"):
        checkpoint.load(tmp_path)
    with pytest.raises(CheckpointError, match="zip archive"):
        checkpoint.load(tmp_path / "pytorch_model.bin")


def test_tensors_without_a_config(tmp_path: Path) -> None:
    folder = hf.write_llama(tmp_path / "m", oracle.random_weights(SMALL, tied=True), SMALL)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"looks like a safetensors file, expected .*a Hugging Face folder"):
        checkpoint.load(folder / "model.safetensors")


def test_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    tensors = hf.llama_tensors(oracle.random_weights(SMALL, tied=True), SMALL)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.norm.weight"] = np.zeros(16, np.int64)
    tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((24, 16), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    folder = hf.write_folder(tmp_path / "m", hf.llama_config(SMALL, tie_word_embeddings=True), tensors)
    with pytest.raises(CheckpointError) as e:
        checkpoint.load(folder)
    words = [
        "model.layers.1.self_attn.k_proj.weight is missing, expected [8, 16]",
        "model.norm.weight is I64, expected F64, F32, F16, BF16",
        "model.layers.0.mlp.down_proj.weight is [24, 16], expected [16, 24]",
        "model.layers.0.self_attn.q_proj.bias is not a tensor of this model",
    ]
    assert sorted(str(e.value).removeprefix(f"{folder}: ").split("; ")) == sorted(words)


def test_what_is_no_part_of_the_model_is_left_out(tmp_path: Path, warnings: list[str]) -> None:
    weights = oracle.random_weights(SMALL, tied=True)
    at = "model.layers.0.self_attn"
    extra = [f"{at}.k_scale", f"{at}.rotary_emb.cos_cached", "v_head.summary.weight", "score.weight"]
    tensors = hf.llama_tensors(weights, SMALL) | {name: np.zeros(2, np.float32) for name in extra}
    params = checkpoint.load(hf.write_folder(tmp_path / "m", hf.llama_config(SMALL, tie_word_embeddings=True), tensors))
    assert_same(params, tiny.params(weights, SMALL))
    assert len(warnings) == 1
    assert all((name in warnings[0]) == ("cos_cached" not in name) for name in extra)


def test_names_without_their_prefix(tmp_path: Path) -> None:
    weights = oracle.random_weights(SMALL, tied=True)
    tensors = {name.removeprefix("model."): a for name, a in hf.llama_tensors(weights, SMALL).items()}
    fields = hf.llama_config(SMALL, tie_word_embeddings=True)
    assert_same(checkpoint.load(hf.write_folder(tmp_path / "m", fields, tensors)), tiny.params(weights, SMALL))
    fields = hf.llama_config(SMALL, tie_word_embeddings=False)  # the head is no part of such a folder
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        checkpoint.load(hf.write_folder(tmp_path / "m", fields, tensors))


@pytest.mark.parametrize("name", ["attention_bias", "qwen2", "qwen3"])
def test_what_the_config_promises_is_missed(tmp_path: Path, name: str) -> None:
    changes = {"attention_bias": True} if name == "attention_bias" else {"model_type": name}
    folder = hf.write_llama(tmp_path / "m", oracle.random_weights(SMALL, tied=True), SMALL, **changes)
    expected = "q_norm.weight" if name == "qwen3" else "q_proj.bias"
    with pytest.raises(CheckpointError, match=rf"layers\.0\.self_attn\.{expected} is missing.*layers\.1"):
        checkpoint.load(folder)


def index_of(folder: Path, change: Any) -> Path:
    path = folder / huggingface.INDEX
    index = json.loads(path.read_text())
    path.write_text(json.dumps(change(index["weight_map"]) if callable(change) else change))
    return path


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../m/model.safetensors", "..", "", "a/b.safetensors", "a\\b", "C:\\x", "\0"]
)
def test_shards_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = hf.write_llama(tmp_path / "m", oracle.random_weights(SMALL, tied=True), SMALL, shards=2)
    (tmp_path / "model.safetensors").write_bytes(b"")
    index_of(folder, lambda shards: {"weight_map": shards | {"model.norm.weight": name}})
    with pytest.raises(CheckpointError, match=r"index\.json: .* is (not the name of a file in this folder|missing)"):
        checkpoint.load(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {}}, []])
def test_broken_index(tmp_path: Path, index: Any) -> None:
    folder = hf.write_llama(tmp_path / "m", oracle.random_weights(SMALL, tied=True), SMALL, shards=2)
    index_of(folder, index)
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        checkpoint.load(folder)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    weights = oracle.random_weights(SMALL, tied=True)
    folder = hf.write_llama(tmp_path / "m", weights, SMALL, shards=3)
    one, two, three = sorted(folder.glob("model-*"))
    tensors = hf.llama_tensors(weights, SMALL)
    first = dict(list(tensors.items())[0::3])
    hf.write_safetensors(one, first | {"model.norm.weight": tensors["model.norm.weight"], "extra": np.zeros(1)})
    hf.write_safetensors(two, dict(list(tensors.items())[1::3][1:]))
    three.write_bytes(three.read_bytes()[:-1])
    gone = list(tensors)[1]
    with pytest.raises(CheckpointError) as e:
        checkpoint.load(folder)
    words = [
        f"model.norm.weight is in {one.name}",
        f"{gone} is not in {two.name}",
        f"; {three.name}: ",
    ]
    assert all(word in str(e.value) for word in words), str(e.value)
    three.unlink()
    with pytest.raises(CheckpointError, match=f"{three.name} is missing"):
        checkpoint.load(folder)


def test_what_an_index_does_not_list_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers does; a model.safetensors beside an index is what another version of the model left."""
    weights = oracle.random_weights(SMALL, tied=True)
    folder = hf.write_llama(tmp_path / "m", weights, SMALL, shards=2)
    expected = checkpoint.load(folder)
    one = folder / "model-00001-of-00002.safetensors"
    tensors = dict(list(hf.llama_tensors(weights, SMALL).items())[0::2])
    hf.write_safetensors(one, tensors | {"rotary_emb.inv_freq": np.zeros(1), "k_scale": np.zeros(1)})
    stray = folder / "model.safetensors"
    for content in (b"cut short", hf.write_llama(tmp_path / "o", weights, SMALL).joinpath(stray.name).read_bytes()):
        stray.write_bytes(content.replace(b"\0\0", b"\1\1"))
        assert_same(checkpoint.load(folder), expected)
    assert "the index doesn't list them: rotary_emb.inv_freq; k_scale" in caplog.text


def test_damaged_weights_are_named_through_the_folder(tmp_path: Path) -> None:
    folder = hf.write_llama(tmp_path / "m", oracle.random_weights(SMALL, tied=True), SMALL)
    whole = (folder / "model.safetensors").read_bytes()
    for data in (
        b"",
        b"\xff" * 8 + whole[8:],
        whole[:-1],
        whole + b"\0",
        b"version https://git-lfs.github.com/spec/v1\n",
    ):
        (folder / "model.safetensors").write_bytes(data)
        for path in (folder, folder / "model.safetensors"):
            with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
                checkpoint.load(path)


# --- GPT-2


@pytest.mark.parametrize(("dim", "hidden", "n_inner"), [(24, 96, None), (24, 40, 40), (24, 24, 24)])
@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("block", [100, 1 << 20])
def test_gpt2_equals_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int, hidden: int, n_inner: int | None, prefix: str, block: int
) -> None:
    monkeypatch.setattr(build, "_BLOCK", block)
    weights = oracle.random_gpt2(dim, hidden, 2, vocab_size=50, context=32)
    tensors = {prefix + name: array for name, array in weights.items()}
    for i in range(2):
        tensors[f"{prefix}h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), np.bool_))
        tensors[f"{prefix}h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    folder = hf.write_folder(tmp_path / "m", hf.gpt2_config(dim, n_inner, 2, 3, 50, 32), tensors)
    params = checkpoint.load(folder)
    assert params.output is None
    tokens = np.random.default_rng(0).integers(0, 50, (2, 32), dtype=np.int32)
    for found, row in zip(tiny.all_logits(params, tokens), tokens, strict=True):
        np.testing.assert_allclose(found, oracle.forward_gpt2(weights, 3, 1e-5, row), atol=1e-4)


def test_gpt2_dtypes_and_context(tmp_path: Path) -> None:
    weights = oracle.random_gpt2(32, 128, 1, vocab_size=50, context=1024)
    folder = hf.write_folder(tmp_path / "m", hf.gpt2_config(32, None, 1, 2, 50, 1024), weights)
    exact = checkpoint.load(folder)
    assert exact.config.max_seq_len == 1024
    tokens = np.random.default_rng(0).integers(0, 50, (1, 24), dtype=np.int32)
    expected = oracle.forward_gpt2(weights, 2, 1e-5, tokens[0])
    for dtype, bound in (("bfloat16", 0.02), ("int8", 0.06)):
        params = checkpoint.load(folder, dtype=dtype)
        assert np.abs(tiny.all_logits(params, tokens)[0] - expected).mean() < bound * expected.std()
        np.testing.assert_array_equal(params.positions, exact.positions)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation_function": "gelu"}, ["activation_function = gelu", "expected gelu_new"]),
        ({"scale_attn_weights": False}, ["scale_attn_weights"]),
        ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        ({"add_cross_attention": True}, ["add_cross_attention"]),
        ({"n_embd": None, "n_head": "3"}, ["n_embd is missing", "n_head = 3"]),
        ({"n_head": 5}, ["dim = 24", "n_heads = 5"]),
        ({"n_inner": 48}, ["h.0.mlp.c_fc.weight is [24, 96], expected [24, 48]", "h.1.mlp.c_proj.weight"]),
        ({"n_positions": 64}, ["wpe.weight is [32, 24], expected [64, 24]"]),
        ({"n_layer": 3}, ["h.2.attn.c_attn.weight is missing, expected [24, 72]"]),
        ({"n_layer": 1}, ["h.1.ln_1.weight is not a tensor"]),
    ],
)
def test_gpt2_configs_that_are_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    weights = oracle.random_gpt2(24, 96, 2, vocab_size=50, context=32)
    folder = hf.write_folder(tmp_path / "m", hf.gpt2_config(24, None, 2, 3, 50, 32) | changes, weights)
    with pytest.raises(CheckpointError) as e:
        checkpoint.load(folder)
    assert all(word in str(e.value) for word in [str(folder), *words]), str(e.value)


def test_gpt2_with_a_head_of_its_own(tmp_path: Path) -> None:
    weights = oracle.random_gpt2(24, 96, 1, vocab_size=50, context=32)
    fields = hf.gpt2_config(24, None, 1, 3, 50, 32) | {"tie_word_embeddings": False}
    folder = hf.write_folder(tmp_path / "m", fields, weights | {"lm_head.weight": 2 * weights["wte.weight"]})
    tokens = np.arange(10, dtype=np.int32)
    found = tiny.all_logits(checkpoint.load(folder), tokens[None])[0]
    np.testing.assert_allclose(found, 2 * oracle.forward_gpt2(weights, 3, 1e-5, tokens), atol=2e-4)


# --- what is saved


def saved(params: Params, folder: Path) -> Path:
    checkpoint.save(params, folder, form="huggingface")
    return folder


@pytest.mark.parametrize("name", [*FAMILIES, *tiny.CONFIGS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path: Path, name: str, dtype: str) -> None:
    config, weights, _ = family(name) if name in FAMILIES else (None, None, None)
    params = tiny.params(weights, config, dtype) if name in FAMILIES else tiny.model(name, dtype)[0]
    folder = saved(params, tmp_path / "saved")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(checkpoint.load(folder), params)


def test_tensors_are_written_as_they_were(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    weights = oracle.random_weights(SMALL, tied=False)
    folder = saved(tiny.params(weights, SMALL), tmp_path / "saved")
    found, expected = library.load_file(folder / "model.safetensors"), hf.llama_tensors(weights, SMALL)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    fields = json.loads((folder / "config.json").read_text())
    assert {name: fields[name] for name in hf.llama_config(SMALL)} == hf.llama_config(SMALL)


def test_blocks_do_not_show_when_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, _ = tiny.model("head_dim", "bfloat16")
    whole = saved(params, tmp_path / "whole")
    monkeypatch.setattr(build, "_BLOCK", 150)
    blocks = saved(params, tmp_path / "blocks")
    assert (whole / "model.safetensors").read_bytes() == (blocks / "model.safetensors").read_bytes()


def test_int8_is_widened(tmp_path: Path) -> None:
    params, _ = tiny.model("gqa", "int8")
    found = checkpoint.load(saved(params, tmp_path / "saved"))
    for name, source in build.sources_of(params).items():
        rows = source.shape[0]
        np.testing.assert_array_equal(build.sources_of(found)[name].read(0, rows), source.read(0, rows))


@pytest.mark.parametrize("tied", [True, False])
def test_llama2c_and_back(tmp_path: Path, tied: bool) -> None:
    params = tiny.params(oracle.random_weights(SMALL, tied=tied), SMALL)
    checkpoint.save(params, tmp_path / "one.bin")
    folder = saved(checkpoint.load(tmp_path / "one.bin"), tmp_path / "saved")
    checkpoint.save(checkpoint.load(folder), tmp_path / "two.bin")
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "two.bin").read_bytes()


def test_what_a_folder_cannot_hold(tmp_path: Path) -> None:
    weights = oracle.random_gpt2(24, 96, 1, vocab_size=50, context=32)
    gpt2 = checkpoint.load(hf.write_folder(tmp_path / "m", hf.gpt2_config(24, None, 1, 3, 50, 32), weights))
    with pytest.raises(CheckpointError, match="cannot hold norm = layer; position = learned; gated = False"):
        saved(gpt2, tmp_path / "no")
    config, weights, _ = family("llama-bias")
    windowed = tiny.params(weights, dataclasses.replace(config, sliding_window=4))
    with pytest.raises(CheckpointError, match="type llama cannot hold sliding_window = 4"):
        saved(windowed, tmp_path / "no")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("name", ["llama-bias", "mistral", "qwen2", "qwen3", "gpt2"])
def test_what_llama2c_cannot_hold(tmp_path: Path, name: str) -> None:
    if name == "gpt2":
        weights = oracle.random_gpt2(24, 96, 1, vocab_size=50, context=32)
        params = checkpoint.load(hf.write_folder(tmp_path / "m", hf.gpt2_config(24, None, 1, 3, 50, 32), weights))
    else:
        config, weights, _ = family(name)
        params = tiny.params(weights, config)
    words = {"mistral": "sliding_window", "qwen3": "head_norms", "gpt2": "norm = layer.*ffn_bias"}
    with pytest.raises(CheckpointError, match=words.get(name, "qkv_bias")):
        checkpoint.save(params, tmp_path / "no.bin")
    assert not (tmp_path / "no.bin").exists()


def test_saving_replaces_nothing_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, _ = tiny.model("mha")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        with pytest.raises(CheckpointError, match=f"{name}: exists; expected a new folder"):
            saved(params, tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert_same(checkpoint.load(saved(params, tmp_path / "empty")), params)

    def full_disk(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors, "write", full_disk)
    with pytest.raises(OSError, match="No space"):
        saved(params, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]
    with pytest.raises(ValueError, match="form = 'gguf'"):
        checkpoint.save(params, tmp_path / "new", form="gguf")


# --- reference files


@pytest.mark.parametrize(("path", "name"), GOLDEN)
def test_golden_logits(shared: Path, path: str, name: str) -> None:
    golden = np.load(shared / "golden/logits.npz")
    params = checkpoint.load(shared / "models" / path, dtype="float32")
    found = tiny.all_logits(params, golden[f"{name}.input_ids"][None])[0]
    np.testing.assert_allclose(found, golden[f"{name}.logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("path", "name"), GOLDEN[::2])
def test_golden_ragged_batch(shared: Path, path: str, name: str) -> None:
    golden = np.load(shared / "golden/logits.npz")
    params = checkpoint.load(shared / "models" / path, dtype="float32")
    rows = [golden[f"{name}.ragged{k}.input_ids"] for k in range(3)]
    length = np.array([len(row) for row in rows], np.int32)
    tokens = np.stack([np.pad(row, (0, 24 - len(row)), constant_values=1) for row in rows]).astype(np.int32)
    for k, found in enumerate(tiny.all_logits(params, tokens)):
        np.testing.assert_allclose(found[: length[k]], golden[f"{name}.ragged{k}.logits"], rtol=0, atol=1e-4)
    stop = Stop(jnp.array([-1], jnp.int32), jnp.array(length + 32))
    state = jit_generate(params, jnp.array(tokens), jnp.array(length), tiny.greedy(3), stop, slots=64)
    for k, found in enumerate(np.array(state.tokens)):
        np.testing.assert_array_equal(found[length[k] :][:32], golden[f"{name}.ragged{k}.greedy"])


@pytest.mark.parametrize(("path", "name"), GOLDEN[::2])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_golden_logits_of_stored_types(shared: Path, path: str, name: str, dtype: str) -> None:
    golden = np.load(shared / "golden/logits.npz")
    params = checkpoint.load(shared / "models" / path, dtype=dtype)
    expected = golden[f"{name}.logits"]
    error = np.abs(tiny.all_logits(params, golden[f"{name}.input_ids"][None])[0] - expected)
    assert error.mean() < {"bfloat16": 0.03, "int8": 0.1}[dtype] * expected.std()


def test_oracle_gives_the_reference_logits_of_gpt2(shared: Path) -> None:
    tensors = huggingface._tensors(shared / "models/tiny-gpt2-hub-names", HUGGINGFACE["gpt2"].layout)
    weights = {name: np.array(tensor.view()) for name, tensor in tensors.items()}
    golden = np.load(shared / "golden/logits.npz")
    found = oracle.forward_gpt2(weights, 4, 1e-5, golden["tiny-gpt2-hf.input_ids"])
    np.testing.assert_allclose(found, golden["tiny-gpt2-hf.logits"], rtol=0, atol=1e-6)


def test_reference_folders_hold_the_same_model(shared: Path, tmp_path: Path) -> None:
    models = shared / "models"
    for one, other in zip(GOLDEN[::2], GOLDEN[1::2], strict=True):
        assert_same(checkpoint.load(models / one[0]), checkpoint.load(models / other[0]))
    assert checkpoint.load(models / "tiny-llama3-hf").layers[0].wo.weight.dtype == "bfloat16"
    for name in ("tiny-llama-hf", "tiny-llama3-hf"):
        params = checkpoint.load(models / name)
        assert_same(checkpoint.load(saved(params, tmp_path / name)), params)


# --- memory


def sparse(folder: Path, fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], dtype: str) -> Path:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * np.dtype(hf.DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").write_bytes(hf.packed(header))
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size + end)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("stored", ["F32", "BF16"])
@pytest.mark.parametrize("dtype", build.DTYPES)
def test_memory_peaks_at_the_final_weights(tmp_path: Path, kind: str, stored: str, dtype: str) -> None:
    """A child's `ru_maxrss` starts at its parent's, so the kernel's own high-water mark is read in its place."""
    if kind == "llama":
        config = from_toml(ROOT / "configs" / "stories110M.toml")
        fields = hf.llama_config(config, tie_word_embeddings=True)
        meta = {
            name: np.broadcast_to(np.float32(0), tensor.shape)
            for tensor in tensors(config)
            for name in tensor.names(config)
        }
        shapes = {n: a.shape for n, a in hf.llama_tensors(dict.fromkeys(meta, None) | meta, config).items()}
    else:
        fields = hf.gpt2_config(768, None, 12, 12, 50257, 1024)
        shapes = {n: a.shape for n, a in oracle.random_gpt2(8, 32, 12, vocab_size=8, context=8).items()}
        scale = {8: 768, 24: 2304, 32: 3072}
        shapes = {n: tuple(scale[size] for size in shape) for n, shape in shapes.items()}
        shapes |= {"wte.weight": (50257, 768), "wpe.weight": (1024, 768)}
    folder = sparse(tmp_path, fields, shapes, stored)
    command = [sys.executable, "-c", tiny.PEAK, str(folder), dtype]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    grown, weights = map(int, result.stdout.split())
    assert 0.95 * weights < grown < 1.2 * weights
