"""Experts: the text of the dense computation, each row by itself, and no expert read that isn't chosen."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from gguf_writer import KEYS, NAMES, gguf_bytes, plain, renamed

from jllama import checkpoint, kernels, plan
from jllama.checkpoint import CheckpointError
from jllama.config import Config, ConfigError
from jllama.experts import route
from jllama.mesh import Shape
from jllama.model import Params, init_cache, prefill, step
from jllama.run import Run, choose
from jllama.tensors import counts

# 8 experts and a shared one; 3 experts, of which as many rows come to one as to make several tiles.
MANY = Config(32, 24, 2, 4, 2, 97, 64, n_experts=8, n_active_experts=2, normalized_experts=True)
SHARED = Config(48, 20, 2, 8, 4, 65, 64, n_experts=3, n_active_experts=2, shared_dim=36)
RUNS = {"xla": Run(), "stacked": Run(stacked=True)} | (
    {"native": choose("native")} if kernels.available() else {}  # whose own tests say so where there are none
)

jit_step, jit_prefill = jax.jit(step), jax.jit(prefill)


def model(config: Config, dtype: str = "float32", run: Run | None = None) -> tuple[Params, oracle.Weights]:
    weights = oracle.random_weights(config, tied=False)
    return tiny.params(weights, config, dtype, run), weights


@pytest.mark.parametrize(
    ("config", "run"), [pytest.param(MANY if run == "xla" else SHARED, run, id=run) for run in RUNS]
)
def test_logits_are_those_of_all_experts_weighed(config: Config, run: str) -> None:
    params, weights = model(config, run=RUNS[run])
    tokens = tiny.ids(config, 2, 32)
    found = tiny.all_logits(params, tokens)
    for row, ids in zip(found, tokens, strict=True):
        np.testing.assert_allclose(row, oracle.forward(weights, config, ids), rtol=0, atol=2e-4)
    # Steps of ragged rows give what a whole prompt does.
    length = np.array([9, 20], np.int32)
    logits, cache = jit_prefill(params, init_cache(params, 2, 32), jnp.array(tokens[:, :20]), jnp.array(length))
    for i in range(3):
        wanted = found[[0, 1], length - 1 + i]
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-4)
        logits, cache = jit_step(params, cache, jnp.array(tokens[[0, 1], length + i]), jnp.array(length + i))


@pytest.mark.skipif("native" not in RUNS, reason=kernels.explain())
def test_a_row_has_the_same_bits_whoever_its_neighbours_are() -> None:
    params, _ = model(MANY, "bfloat16", RUNS["native"])
    tokens = tiny.ids(MANY, 40, 1)
    tokens[20:] = tokens[0]  # so that 21 rows take the same experts, more than a tile
    zeros = jnp.zeros(40, jnp.int32)
    together, _ = jit_step(params, init_cache(params, 40, 4), jnp.array(tokens[:, 0]), zeros)
    for i in (0, 7, 39):
        alone, _ = jit_step(params, init_cache(params, 1, 4), jnp.array(tokens[i]), zeros[:1])
        np.testing.assert_array_equal(alone[0], together[i])


def test_int8_is_near() -> None:
    params, weights = model(SHARED, "int8")
    exact = {name: source.read(0, source.shape[0]) for name, source in checkpoint.build.sources_of(params).items()}
    tokens = tiny.ids(SHARED, 1, 12)
    wanted = oracle.forward(exact, SHARED, tokens[0])
    error = np.abs(tiny.all_logits(params, tokens)[0] - wanted).max(axis=-1)
    assert np.median(error) < 0.1 * wanted.std()  # a rounded input may choose other experts now and then
    for name, array in weights.items():
        np.testing.assert_allclose(exact[name], array, rtol=0, atol=0.02)


def test_the_router_takes_the_most_probable() -> None:
    config = dataclasses.replace(MANY, dim=8, head_dim=8)
    rows = jnp.array([[0, 3, 0, 0, 2, 0, 0, 0], [9, 9, 0, 0, 0, 0, 0, 1]], jnp.float32)
    weights, chosen = route(config, Run(), jnp.eye(8), rows)
    np.testing.assert_array_equal(chosen, [[1, 4], [0, 1]])  # of equal ones the first
    e = np.exp(1.0)
    np.testing.assert_allclose(weights, [[e / (1 + e), 1 / (1 + e)], [0.5, 0.5]], rtol=1e-6)
    weights, _ = route(dataclasses.replace(config, normalized_experts=False), Run(), jnp.eye(8), rows)
    np.testing.assert_allclose(weights[0], np.exp([3, 2]) / (np.exp([3, 2]).sum() + 6), rtol=1e-6)


def write_stored(folder: Path, kind: str, config: Config) -> tuple[Path, oracle.Weights]:
    """Write a GGUF file whose experts are blocks of a kind; return its values too."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    experts = {f"feed_forward.experts.w{i}": f"ffn_{x}_exps" for i, x in ((1, "gate"), (2, "down"), (3, "up"))}
    names = NAMES | experts | {"feed_forward.router": "ffn_gate_inp"}
    weights = oracle.random_weights(config, tied=True)
    form, exact, tensors = GGMLQuantizationType[kind], dict(weights), {}
    for (name, array), theirs in zip(weights.items(), renamed(weights, names), strict=True):
        tensors[theirs] = plain(array)
        if ".experts." in name:
            blocks = quantize(array, form)
            exact[name] = dequantize(blocks, form)
            shape = (config.n_experts, array.shape[0] // config.n_experts, array.shape[1])
            tensors[theirs] = (shape, int(form), blocks.tobytes())
    sizes = {"embedding_length": config.dim, "feed_forward_length": config.hidden_dim, "expert_count": config.n_experts}
    keys = KEYS | {f"llama.{key}": size for key, size in sizes.items()} | {"llama.expert_used_count": 2}
    (folder / "m.gguf").write_bytes(gguf_bytes(keys, tensors))
    return folder / "m.gguf", exact


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
def test_quantised_experts_stay_as_the_file_has_them(tmp_path: Path, kind: str) -> None:
    config = Config(
        32, 64, 2, 4, 2, 48, 128, rope_theta=5e5, n_experts=4, n_active_experts=2, normalized_experts=True, tied=True
    )
    path, exact = write_stored(tmp_path, kind, config)
    params = checkpoint.load(path, dtype="float32")
    assert params.config == config
    tokens = tiny.ids(config, 1, 12)
    wanted = oracle.forward(exact, config, tokens[0])
    np.testing.assert_allclose(tiny.all_logits(params, tokens)[0], wanted, rtol=0, atol=2e-4)
    if "native" in RUNS:
        params = checkpoint.load(path, run=RUNS["native"])
        assert params.layers[0].experts is not None
        assert params.layers[0].experts.w13.dtype == kind.lower()
        assert params.layers[0].experts.w13.shape == (8, 128, 32)  # two layers of four experts
        found = {name: source.read(0, source.shape[0]) for name, source in checkpoint.build.sources_of(params).items()}
        tiny.assert_same(found, exact)
        error = np.abs(tiny.all_logits(params, tokens)[0] - wanted).max(axis=-1)
        assert np.median(error) < 0.03 * wanted.std()  # inputs are rounded to int8


@pytest.mark.parametrize(
    ("run", "dtype"), [(run, dtype) for run in RUNS if run != "stacked" for dtype in ("float32", "bfloat16")]
)
def test_no_operation_makes_something_of_all_experts(run: str, dtype: str) -> None:
    params = checkpoint.random(MANY, dtype=dtype, run=RUNS[run])
    arguments = params, init_cache(params, 1, 8), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    text = jit_step.lower(*arguments).compile().as_text()
    assert text is not None
    inside = re.sub(r"\n%?fused_computation.*?\n}", "", text, flags=re.DOTALL)  # whose intermediates are no arrays
    made = [line for line in inside.splitlines() if re.search(r"= \w+\[(8|16),(48|32),(32|24)\]\S* \w", line)]
    assert all(re.search(r"\} (parameter|get-tuple-element)\(", line) for line in made), made
    assert made  # the pattern finds the weights


def test_a_step_reads_the_chosen_experts() -> None:
    config = dataclasses.replace(MANY, tied=True)
    contents = checkpoint.random_contents(config)
    one, eight = 3 * 32 * 24 * 4, 8 * 3 * 32 * 24 * 4  # bytes of an expert, and of all of a layer
    for rows, read in ((1, 2), (2, 4), (4, 8), (64, 8)):
        found = plan.plan(contents, "float32", Shape(), rows, [])
        assert found.weights - found.read == 2 * (eight - read * one)
    assert plan.plan(contents, "float32", Shape(1, 2), 1, []).weights < 0.6 * found.weights
    attention = 32 * 32 * 2 + 32 * 16 * 2
    assert counts(config) == (2 * (attention + 2 * 3 * 32 * 24), 97 * 32)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_active_experts": 9}, "n_active_experts = 9: expected 1 to n_experts = 8"),
        ({"n_active_experts": 0}, "n_active_experts = 0: expected 1 to n_experts = 8"),
        ({"n_experts": 0}, "n_active_experts = 2: expected 0 without n_experts"),
        ({"n_experts": -1}, "n_experts = -1: expected 0 to"),
        ({"shared_dim": True}, "shared_dim = True: expected 0 to"),
        ({"activation": "gelu"}, "experts with gelu"),
        ({"gated": False}, "without a gate"),
    ],
)
def test_configs_of_experts_that_make_no_sense(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        dataclasses.replace(MANY, **fields)


def test_what_llama2c_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="n_experts = 8"):
        checkpoint.save(checkpoint.random(MANY), tmp_path / "m.bin")
