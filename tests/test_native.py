"""The optional kernels: their results against float64 NumPy, whole models with them, and when they may be used."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from console import Run, error

from jllama import LLM, Prompt, Settings, decode, native, programs
from jllama.config import Config
from jllama.decode import Stop
from jllama.model import Params, init_cache, step
from jllama.quant import Linear, linear, quantize
from jllama.runner import prepare

needs_kernels = pytest.mark.skipif(
    not native.available(), reason="the native kernels were not built, or can't run here"
)
# Widths around the vectors of 16, 32 and 64 elements, outputs around the tiles of 4.
SHAPES = ((1, 1), (3, 15), (5, 65), (130, 64), (7, 288), (33, 2048))


def with_kernels(params: Params) -> Params:
    return prepare(params, kernels="native")


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 64])
def test_products(shape: tuple[int, int], rows: int) -> None:
    rng = np.random.default_rng(rows)
    w, x = rng.normal(size=shape).astype(np.float32), rng.normal(size=(rows, shape[1])).astype(np.float32)
    y = linear(Linear(jnp.asarray(w)), jnp.asarray(x), use_native=True)
    scale = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    np.testing.assert_array_less(np.abs(y - x.astype(np.float64) @ w.astype(np.float64).T), 1e-6 * scale + 1e-30)

    w16, x16 = jnp.asarray(w, jnp.bfloat16), jnp.asarray(x, jnp.bfloat16)
    exact = np.asarray(x16, np.float64) @ np.asarray(w16, np.float64).T
    y = linear(Linear(w16), jnp.asarray(x), use_native=True)
    np.testing.assert_array_less(np.abs(y - exact), 1e-6 * scale + 1e-30)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 32])
@pytest.mark.parametrize("fine", [False, True])
def test_int8_products(shape: tuple[int, int], rows: int, fine: bool) -> None:
    rng = np.random.default_rng(rows)
    w = quantize(jnp.asarray(rng.normal(size=shape), jnp.float32))
    x = (rng.normal(size=(rows, shape[1])) * 10.0 ** rng.integers(-3, 4, (rows, 1))).astype(np.float32)
    x[0] = 0
    y = np.asarray(linear(Linear(w), jnp.asarray(x), fine=fine, use_native=True))
    weights = np.asarray(w.values, np.float64) * np.asarray(w.scale, np.float64)[:, None]

    # The error of a row that is rounded once is at most half a step in each element; twice: 1/254 of that.
    half_step = np.abs(x).max(axis=1, keepdims=True) / 127 / 2
    bound = half_step / (127 if fine or rows == 1 else 1) * np.abs(weights).sum(axis=1)
    exact = x.astype(np.float64) @ weights.T
    np.testing.assert_array_less(np.abs(y - exact), 1.01 * bound + 1e-5 * np.abs(exact) + 1e-30)
    assert not y[0].any()
    if not (fine or rows == 1):
        scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
        rounded = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)).astype(np.float64) * scale
        # An element half-way between two steps may go either way.
        assert np.mean(np.abs(y - rounded @ weights.T) <= 1e-5 * np.abs(exact).max()) > 0.9


@needs_kernels
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_what_is_not_finite_stays_so(bad: float, dtype: str) -> None:
    w = jnp.ones((5, 40), jnp.float32)
    x = np.ones((3, 40), np.float32)
    x[1, 7] = bad
    y = linear(Linear(quantize(w) if dtype == "int8" else w.astype(dtype)), jnp.asarray(x), use_native=True)
    assert np.isfinite(y).all(axis=1).tolist() == [True, False, True]


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1, 7, 200])
@pytest.mark.parametrize(("g", "h"), [(1, 64), (3, 20), (5, 80), (8, 128)])
def test_attention(dtype: str, window: int | None, g: int, h: int) -> None:
    n, s = 5, 300
    rng = np.random.default_rng(g)
    q, new_k, new_v, k, v = (
        rng.normal(size=shape).astype(np.float32) for shape in ((n, g, h), (n, 1, h), (n, 1, h), (n, s, h), (n, s, h))
    )
    k[:, -1] = np.nan  # what lies behind the last slot is never looked at
    last = np.array([0, 5, 127, 128, 298], np.int32)
    stored = [jnp.asarray(x, dtype) for x in (k, v)]
    keys, values = (np.asarray(x, np.float64) for x in stored)
    for row, slot in enumerate(last):
        keys[row, slot] = np.asarray(jnp.asarray(new_k[row, 0], dtype), np.float64)
        values[row, slot] = np.asarray(jnp.asarray(new_v[row, 0], dtype), np.float64)
    attend = jax.jit(native.attend, static_argnums=6, donate_argnums=(3, 4))
    out, found_k, found_v = attend(q, new_k, new_v, *stored, last, window)
    np.testing.assert_array_equal(np.asarray(found_k, np.float64), keys)
    np.testing.assert_array_equal(np.asarray(found_v, np.float64), values)
    for row, slot in enumerate(last):
        first = max(0, slot + 1 - (window or s))
        scores = q[row].astype(np.float64) @ keys[row, first : slot + 1].T
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = p / p.sum(axis=1, keepdims=True) @ values[row, first : slot + 1]
        np.testing.assert_allclose(out[row], expected, rtol=0, atol=5e-6)


@needs_kernels
def test_slots_that_are_not_there_are_the_nearest_ones() -> None:
    rng = np.random.default_rng(0)
    new, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 1, 16), (2, 8, 16), (2, 8, 16)))
    _, found_k, found_v = native.attend(new, new, new, k, v, np.array([-3, 9], np.int32), None)
    for found, expected in ((found_k, k.copy()), (found_v, v.copy())):
        expected[0, 0], expected[1, 7] = new[0, 0], new[1, 0]
        np.testing.assert_array_equal(found, expected)


@needs_kernels
def test_attention_to_what_is_not_finite() -> None:
    q, new = np.ones((3, 1, 16), np.float32), np.ones((3, 1, 16), np.float32)
    k, v = np.ones((3, 40, 16), np.float32), np.ones((3, 40, 16), np.float32)
    k[0, 3, 5], k[1, 3, 5] = np.nan, np.inf
    out, _, _ = native.attend(q, new, new, k, v, np.full(3, 20, np.int32), None)
    assert np.isfinite(out).all(axis=(1, 2)).tolist() == [False, False, True]


@needs_kernels
@pytest.mark.parametrize("name", tiny.CONFIGS)
@pytest.mark.parametrize("jit", [True, False])
def test_logits_of_steps(name: str, jit: bool) -> None:
    params, weights = tiny.model(name)
    params = with_kernels(params)
    rows, length = 3, 12
    tokens = tiny.ids(params.config, rows, length)
    expected = np.stack([oracle.forward(weights, params.config, row) for row in tokens])
    cache = init_cache(params, rows, 16)
    advance = jax.jit(step, donate_argnums=1) if jit else step
    for t in range(length):
        logits, cache = advance(params, cache, jnp.asarray(tokens[:, t]), jnp.full(rows, t, jnp.int32))
        np.testing.assert_allclose(logits, expected[:, t], rtol=0, atol=1e-4)


@needs_kernels
def test_logits_within_a_sliding_window() -> None:
    config = Config(32, 64, 2, 4, 2, 97, 64, sliding_window=5)
    weights = oracle.random_weights(config, tied=True)
    params = with_kernels(tiny.params(weights, config))
    tokens = tiny.ids(config, 14)
    expected = oracle.forward(weights, config, tokens)
    cache = init_cache(params, 1, 16)
    for t, token in enumerate(tokens):
        logits, cache = jax.jit(step)(params, cache, jnp.array([token]), jnp.array([t], jnp.int32))
        np.testing.assert_allclose(logits[0], expected[t], rtol=0, atol=1e-4)


@needs_kernels
def test_the_compiled_loop_copies_no_cache() -> None:
    params = with_kernels(tiny.model("gqa")[0])
    rows, slots = 4, 64
    stop = Stop(jnp.array([-1], jnp.int32), jnp.full(rows, slots, jnp.int32))
    state = decode.start(params, jnp.ones((rows, slots), jnp.int32), jnp.ones(rows, jnp.int32), stop)
    text = programs.DECODE.jitted.lower(params, state, tiny.greedy(rows), stop, np.int32(4)).compile().as_text()
    shape = re.escape(f"f32[{rows * params.config.n_kv_heads},{slots},{params.config.head_dim}]")
    assert "jllama_attend" in text
    assert not re.search(rf"= {shape}\S* copy\(", text)


@needs_kernels
@pytest.mark.parametrize("batch_size", [1, 8])
def test_golden_texts(shared: Path, batch_size: int) -> None:
    llm = LLM.load(shared / "models/stories260K/stories260K.bin", kernels="native")
    cases = json.loads((shared / "golden/llama2c.json").read_text())["greedy"]
    prompts = [
        Prompt(c["prompt"], Settings(temperature=0.0, max_new_tokens=c["steps"] + 1 - len(c["prompt_ids"])))
        for c in cases
    ]
    for case, completion in zip(cases, llm.generate(prompts, batch_size=batch_size), strict=True):
        assert completion.prompt + completion.text == case["decoded"], case["name"]


@pytest.mark.parametrize("kernels", ["xla", pytest.param("native", marks=needs_kernels)])
def test_keys_and_values_in_bfloat16(kernels: str) -> None:
    params, weights = tiny.model("gqa")
    params = prepare(params, kernels=kernels, kv_dtype="bfloat16")
    tokens = tiny.ids(params.config, 2, 12)
    cache = init_cache(params, 2, 16)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}
    for t in range(12):
        logits, cache = jax.jit(step)(params, cache, jnp.asarray(tokens[:, t]), jnp.full(2, t, jnp.int32))
    expected = np.stack([oracle.forward(weights, params.config, row)[-1] for row in tokens])
    # bfloat16 has 8 bits: each key and value is off by up to 1/256, and not by nothing.
    error = np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2))
    assert 1e-4 < error < 1 / 128


def test_kernels_that_are_not_there(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, weights = tiny.model("mha")
    monkeypatch.setattr(native, "_LIBRARY", None)
    assert not prepare(params).config.native
    with pytest.raises(ValueError, match="kernels = native: they were not built"):
        prepare(params, kernels="native")
    with pytest.raises(ValueError, match="kernels = 'fast': expected auto, xla or native"):
        prepare(params, kernels="fast")
    oracle.write_v0(tmp_path / "model.bin", weights, params.config)
    flags = ("--mode=bench", f"--checkpoint={tmp_path}/model.bin", "--kernels=native", "--bench_dtypes=float32")
    assert "were not built" in error(run(*flags))


def test_the_users_choices_are_no_sizes(tmp_path: Path, run: Run) -> None:
    sizes = dataclasses.asdict(tiny.CONFIGS["mha"][0])
    text = "\n".join(f"{name} = {value}" for name, value in sizes.items() if isinstance(value, int | float))
    (tmp_path / "native.toml").write_text(text.replace("False", "true"))
    assert "native is no size of a model: expected --kernels" in error(
        run("--mode=bench", f"--config={tmp_path}/native.toml")
    )


def test_a_clone_finds_the_installed_library_of_the_same_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jllama").mkdir()
    library, source = tmp_path / "jllama" / "_native.test.so", tmp_path / "jllama" / "native.cc"
    library.touch()
    source.write_bytes(Path(native.__file__).with_name("native.cc").read_bytes())
    metadata = tmp_path / "jllama-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: jllama\nVersion: 0.1.0\n")
    (metadata / "RECORD").write_text("jllama/_native.test.so,,\njllama/native.cc,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert library in list(native._built())
    source.write_bytes(b"// another version\n")
    assert library not in list(native._built())
