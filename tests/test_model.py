"""The forward pass against the float64 oracle, and the properties that the engine builds on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny

from jllama import checkpoint
from jllama.checkpoint.build import sources_of
from jllama.config import Config
from jllama.model import Params, forward, init_cache, prefill, step
from jllama.norms import Norm, norm
from jllama.rope import Llama3
from jllama.rotary import rotary_frequencies
from jllama.run import Run
from jllama.weights import Int8, Linear, Plain, linear, take
from jllama.weights.int8 import quantize

jit_forward, jit_step, jit_prefill = jax.jit(forward), jax.jit(step), jax.jit(prefill)


@pytest.mark.parametrize(("name", "run"), [*((name, jit_forward) for name in tiny.CONFIGS), ("llama3", forward)])
def test_logits_equal_the_oracle(name: str, run: Callable[..., Any]) -> None:
    params, weights = tiny.model(name)
    tokens = tiny.ids(params.config, 3, 40)
    found = tiny.all_logits(params, tokens, run)
    for row, ids in zip(found, tokens, strict=True):
        np.testing.assert_allclose(row, oracle.forward(weights, params.config, ids), atol=1e-4)


@pytest.mark.parametrize(
    "file", ["stories260K", "stories260K_v1", "stories260K_untied", "stories260K_q80", "stories260K_q80_gs4"]
)
def test_golden_logits(shared: Path, file: str) -> None:
    golden = np.load(shared / "golden/logits.npz")
    name = file.removesuffix("_v1")
    params = checkpoint.load(shared / f"models/stories260K/{file}.bin", dtype="float32")
    tokens = golden[f"{name}.input_ids"][None]
    np.testing.assert_allclose(tiny.all_logits(params, tokens)[0], golden[f"{name}.logits"], atol=1e-4)
    with jax.disable_jit():
        np.testing.assert_allclose(tiny.all_logits(params, tokens, forward)[0], golden[f"{name}.logits"], atol=1e-4)


def test_versions_of_a_file_give_the_very_same_logits(shared: Path) -> None:
    folder = shared / "models/stories260K"
    v0, v1 = (checkpoint.load(folder / f"stories260K{v}.bin") for v in ("", "_v1"))
    tokens = tiny.ids(v0.config, 1, 30)
    np.testing.assert_array_equal(tiny.all_logits(v0, tokens), tiny.all_logits(v1, tokens))


def test_an_untied_head_is_used() -> None:
    params, weights = tiny.model("mha")
    doubled = tiny.params(weights | {"output.weight": 2 * weights["tok_embeddings.weight"]}, params.config)
    tokens = tiny.ids(params.config, 1, 10)
    np.testing.assert_array_equal(tiny.all_logits(doubled, tokens), 2 * tiny.all_logits(params, tokens))


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_prefill_equals_steps(name: str) -> None:
    params, weights = tiny.model(name)
    tokens = tiny.ids(params.config, 2, 12)
    expected = [oracle.forward(weights, params.config, row) for row in tokens]
    cache = init_cache(params, 2, 16)
    for t in range(12):
        logits, cache = jit_step(params, cache, tokens[:, t], jnp.full(2, t, jnp.int32))
        np.testing.assert_allclose(logits, [row[t] for row in expected], atol=1e-4)
    logits, whole = jit_prefill(params, init_cache(params, 2, 16), tokens, jnp.full(2, 12, jnp.int32))
    np.testing.assert_allclose(logits, [row[-1] for row in expected], atol=1e-4)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a[:, :12], b[:, :12], atol=1e-5)
        assert not np.any(a[:, 12:])  # nothing is written past the position


@pytest.mark.parametrize("lengths", [(1, 3, 12), (12, 3, 1), (5,), (2, 2, 9, 16, 1, 7, 8, 16)])
def test_ragged_rows_equal_each_row_alone(lengths: tuple[int, ...]) -> None:
    params, weights = tiny.model("gqa")
    rows, length = len(lengths), np.array(lengths, np.int32)
    tokens = tiny.ids(params.config, rows, 24)
    padded = np.where(np.arange(16) < length[:, None], tokens[:, :16], 1).astype(np.int32)
    logits, cache = jit_prefill(params, init_cache(params, rows, 32), padded, length)
    for i in range(4):  # the rows go on, each from its own position, over the slots that held padding
        for row in range(rows):
            alone = oracle.forward(weights, params.config, tokens[row, : lengths[row] + i])[-1]
            np.testing.assert_allclose(logits[row], alone, atol=1e-4)
        logits, cache = jit_step(params, cache, tokens[np.arange(rows), length + i], length + i)


def test_a_prompt_in_blocks_equals_the_prompt_at_once() -> None:
    params, weights = tiny.model("head_dim")
    tokens = tiny.ids(params.config, 2, 30)
    cache = init_cache(params, 2, 32)
    padded = np.pad(tokens, ((0, 0), (0, 2)))
    for first in (0, 8, 16, 24):
        length = jnp.full(2, min(8, 30 - first), jnp.int32)
        logits, cache = jit_prefill(params, cache, padded[:, first : first + 8], length, jnp.int32(first))
        expected = [oracle.forward(weights, params.config, row[: first + int(length[0])])[-1] for row in tokens]
        np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_neighbours_share_nothing() -> None:
    params, _ = tiny.model("gqa")
    tokens = tiny.ids(params.config, 4, 10)
    changed = tokens.copy()
    changed[1:] = tiny.ids(params.config, 3, 10, seed=9)
    np.testing.assert_array_equal(tiny.all_logits(params, tokens)[0], tiny.all_logits(params, changed)[0])


def test_positions_matter_from_the_second_on() -> None:
    weights = oracle.random_weights(tiny.CONFIGS["mha"][0], tied=True)
    config = tiny.CONFIGS["mha"][0]
    other = tiny.params(weights, Config(32, 64, 2, 4, 4, 97, 64, rope_theta=1e6))
    tokens = tiny.ids(config, 1, 8)
    one, two = tiny.all_logits(tiny.params(weights, config), tokens)[0], tiny.all_logits(other, tokens)[0]
    np.testing.assert_allclose(one[0], two[0], atol=1e-6)
    assert (np.abs(one - two)[1:].max(-1) > 1e-3).all()


def test_llama3_frequencies() -> None:
    def ratio(head_dim: int, factor: float) -> np.ndarray:
        config = Config(head_dim, 8, 1, 1, 1, 8, 8, rope_theta=5e5)
        scaled = Config(head_dim, 8, 1, 1, 1, 8, 8, rope_theta=5e5, rope_scaling=Llama3(factor, 1.0, 4.0, 8192))
        return rotary_frequencies(scaled) / rotary_frequencies(config)

    r = ratio(64, 32.0)
    np.testing.assert_allclose(r[:15], 1, rtol=1e-6)
    np.testing.assert_allclose(r[15:18], [0.605573, 0.303743, 0.103448], rtol=1e-5)
    np.testing.assert_allclose(r[18:], 1 / 32, rtol=1e-6)
    scaled = Config(64, 8, 1, 1, 1, 8, 8, rope_theta=5e5, rope_scaling=Llama3(32.0, 1.0, 4.0, 8192))
    np.testing.assert_allclose(
        rotary_frequencies(scaled)[15:18], [0.001290547928, 0.000429556797, 0.0000970828780], rtol=1e-7
    )
    r = ratio(128, 8.0)
    np.testing.assert_allclose(r[[0, 28, 29, 34, 35, 63]], [1, 1, 0.828168, 0.190211, 1 / 8, 1 / 8], rtol=1e-5)


def test_epsilon_of_the_norm() -> None:
    x = jnp.full((1, 4), 1e-3, jnp.float32)
    for eps, scale in ((1e-5, 301.5), (1e-6, 707.1)):
        config = Config(4, 4, 1, 1, 1, 4, 4, norm_eps=eps)
        np.testing.assert_allclose(norm(config, Norm(jnp.ones(4)), x), 1e-3 * scale, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_layers_in_one_stack_compute_the_same(dtype: str) -> None:
    params, weights = tiny.model("mqa", dtype)  # three layers
    stacked = tiny.params(weights, params.config, dtype, Run(stacked=True))
    assert len(stacked.layers) == 1
    assert {leaf.shape[0] for leaf in jax.tree.leaves(stacked.layers)} == {3}
    tokens = tiny.ids(params.config, 3, 12)
    cache = init_cache(stacked, 3, 16)
    assert cache.k[0].shape == (3, 3, 16, 8)
    logits, cache = jax.jit(prefill)(stacked, cache, tokens[:, :8], jnp.array([8, 8, 5]))
    logits, cache = jax.jit(step)(stacked, cache, jnp.asarray(tokens[:, 8]), jnp.array([8, 8, 5]))
    ragged = [tokens[0, :9], tokens[1, :9], [*tokens[2, :5], tokens[2, 8]]]
    for found, ids in zip(np.asarray(logits), ragged, strict=True):
        expected = oracle.forward(weights, params.config, np.array(ids))[-1]
        error = np.abs(found - expected)
        assert error.max() < 1e-4 if dtype == "float32" else error.mean() < 0.06 * expected.std()
    names = arrays_of(stacked)
    for name, array in arrays_of(params).items():
        np.testing.assert_array_equal(names[name], array)


def arrays_of(params: Params) -> oracle.Weights:
    return {name: source.read(0, source.shape[0]) for name, source in sources_of(params).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("fine", [False, True])
def test_linear_of_stored_types(dtype: str, rows: int, fine: bool) -> None:
    rng = np.random.default_rng(0)
    w, x = rng.normal(0, 1, (40, 64)).astype(np.float32), rng.normal(0, 1, (rows, 64)).astype(np.float32)
    x[0, 3] = 50  # one large input leaves few levels for the others
    stored = quantize(jnp.array(w)) if dtype == "int8" else Plain(jnp.array(w, jnp.bfloat16))
    exact_weights = np.array(stored.decode(), np.float64)
    x_stored = np.array(jnp.array(x, jnp.bfloat16), np.float64) if dtype == "bfloat16" else rounded(x)
    if dtype == "int8" and (fine or rows == 1):
        x_stored = x_stored + rounded(x - x_stored)
        assert np.abs(x_stored - x).max() < 1e-3
    product = jax.jit(linear, static_argnums=2, static_argnames="fine")
    found = np.array(product(Linear(stored), jnp.array(x), Run(), fine=fine))
    np.testing.assert_allclose(found, x_stored @ exact_weights.T, atol=1e-3)
    ids = jnp.array([3, 39, 0])
    np.testing.assert_array_equal(take(stored, ids, Run()), stored.decode()[ids])


def rounded(x: np.ndarray) -> np.ndarray:
    """Round each row to multiples of a 127th of its largest element."""
    scale = np.abs(x).max(-1, keepdims=True).astype(np.float64) / 127
    return np.round(x / scale) * scale


def test_quantisation_error_is_bounded() -> None:
    w = np.random.default_rng(1).normal(0, 1, (30, 50)).astype(np.float32)
    w[7] = 0
    q = quantize(jnp.array(w))
    assert isinstance(q, Int8)
    error = np.abs(np.array(q.decode()) - w)
    assert (error <= np.array(q.scale)[:, None] * 0.5001).all()
    assert not error[7].any()


@pytest.mark.parametrize("name", tiny.CONFIGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_stored_types_stay_near_float32(name: str, dtype: str) -> None:
    params, weights = tiny.model(name, dtype)
    tokens = tiny.ids(params.config, 1, 24)
    expected = oracle.forward(weights, params.config, tokens[0])
    error = np.abs(tiny.all_logits(params, tokens)[0] - expected)
    # Random weights amplify rounding more than trained ones: the bound is a share of the logits' spread.
    assert error.mean() < {"bfloat16": 0.02, "int8": 0.06}[dtype] * expected.std()
    if name == "gqa":
        with jax.disable_jit():
            eager = tiny.all_logits(params, tokens, forward)[0]
        assert np.abs(tiny.all_logits(params, tokens)[0] - eager).mean() < 0.02 * expected.std()
