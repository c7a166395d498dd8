"""The optional kernels: their results against float64 NumPy, whole models with them, and when they may be used."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from console import Run, error

from jllama import LLM, Prompt, Settings, decode, kernels, programs
from jllama.config import Config
from jllama.decode import Stop
from jllama.model import Params, init_cache, step
from jllama.run import choose

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.explain()}")
# Widths around the vectors of 16, 32 and 64 elements, outputs around the tiles of 4.
SHAPES = ((1, 1), (3, 15), (5, 65), (130, 64), (7, 288), (33, 2048), (70, 100))
Array = np.ndarray


def with_kernels(params: Params) -> Params:
    return tiny.running(params, choose("native"))


def weights(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> tuple[tuple[jax.Array, ...], Array]:
    """What a product takes, and the weights' values in float64."""
    w = rng.normal(size=shape).astype(np.float32)
    stored = jnp.asarray(w, dtype)
    return (stored,), np.asarray(stored, np.float64)


def product(w: tuple[jax.Array, ...], x: Array | jax.Array, layer: int | None = None) -> Array:
    return np.asarray(kernels.dot(*w, jnp.asarray(x), None if layer is None else jnp.int32(layer)))


@pytest.mark.skipif(os.environ.get("JLLAMA_EXPECT") != "native", reason="JLLAMA_EXPECT=native doesn't ask for kernels")
def test_where_kernels_are_expected_they_run() -> None:
    assert kernels.available(), kernels.explain()


needs = {
    dtype: pytest.param(
        dtype, marks=pytest.mark.skipif(not kernels.has(dtype), reason=f"no kernel: {kernels.explain()}")
    )
    for dtype in ("float32", "bfloat16")
}


@pytest.mark.parametrize("dtype", needs.values())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 70])
def test_products(dtype: str, shape: tuple[int, int], rows: int) -> None:
    rng = np.random.default_rng(rows)
    w, exact = weights(rng, dtype, shape)
    x = rng.normal(size=(rows, shape[1])).astype(np.float32)
    if dtype == "bfloat16":
        x = np.asarray(jnp.asarray(x, dtype), np.float32)
    y = product(w, x)
    bound = 1e-6 * np.abs(x).astype(np.float64) @ np.abs(exact).T
    np.testing.assert_array_less(np.abs(y - x.astype(np.float64) @ exact.T), bound + 1e-30)


@pytest.mark.parametrize("dtype", needs.values())
def test_products_of_a_layer(dtype: str) -> None:
    rng = np.random.default_rng(0)
    w, exact = weights(rng, dtype, (3, 10, 33))
    x = np.asarray(jnp.asarray(rng.normal(size=(5, 33)), "bfloat16"), np.float32)
    for layer in range(3):
        np.testing.assert_allclose(product(w, x, layer), x @ exact[layer].T, rtol=0, atol=2e-3)
        np.testing.assert_array_equal(product(w, x, layer), product(tuple(a[layer] for a in w), x))
    # A layer that isn't there is the nearest one, as in XLA's indexing: never memory of something else.
    np.testing.assert_array_equal(product(w, x, -1), product(w, x, 0))
    np.testing.assert_array_equal(product(w, x, 7), product(w, x, 2))


@pytest.mark.parametrize("dtype", needs.values())
def test_a_product_depends_on_its_own_row_alone(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for shape in ((70, 291), (1030, 1100)):
        w, _ = weights(rng, dtype, shape)
        x = rng.normal(size=(530, shape[1])).astype(np.float32)
        whole = product(w, x)
        for start, stop in ((0, 1), (7, 9), (3, 10), (100, 133), (29, 529)):
            np.testing.assert_array_equal(product(w, x[start:stop]), whole[start:stop])


@pytest.mark.parametrize("dtype", needs.values())
def test_extremes(dtype: str) -> None:
    w, exact = weights(np.random.default_rng(0), dtype, (5, 40))
    x = np.ones((6, 40), np.float32)
    x[1, 7], x[2, 7], x[3, 39] = np.nan, np.inf, -np.inf
    x[4] *= 2.0**120
    x[5] *= 1e-44
    y = product(w, x)
    assert np.isfinite(y).all(axis=1).tolist() == [True, False, False, False, True, True]
    np.testing.assert_allclose(y[4] / 2.0**120, exact.sum(axis=1), rtol=0, atol=1e-4)
    assert np.abs(y[5]).max() < 1e-42
    assert not product(w, np.zeros((1, 40), np.float32)).any()


def attention(q: Array, k: Array, v: Array, first: Array, window: int | None, scale: float) -> Array:
    """Attention in float64: `q [B, T, N, H]` to `k` and `v [B*K, S, H]`, which hold the new tokens."""
    b, t, n, _ = q.shape
    n_kv = k.shape[0] // b
    out = np.zeros(q.shape)
    for row, token, head in np.ndindex(b, t, n):
        last = first[row] + token
        seen = slice(max(0, last + 1 - (window or k.shape[1])), last + 1)
        at = row * n_kv + head // (n // n_kv)
        scores = k[at, seen] @ q[row, token, head].astype(np.float64) * scale
        p = np.exp(scores - scores.max())
        out[row, token, head] = p / p.sum() @ v[at, seen]
    return out


attend = jax.jit(kernels.attend, static_argnames=("window", "scale"))
needs_attention = pytest.mark.skipif(not kernels.has("attention"), reason=f"no kernel: {kernels.explain()}")


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.normal(size=shape).astype(np.float32)


@needs_attention
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1, 7, 200])
@pytest.mark.parametrize("t", [1, 2, 7, 33])
@pytest.mark.parametrize(("g", "h"), [(1, 64), (3, 20), (5, 80), (8, 128)])
def test_attention(dtype: str, window: int | None, t: int, g: int, h: int) -> None:
    b, n_kv, s = 3, 2, 1100
    rng = np.random.default_rng(g)
    q, k, v = normal(rng, b, t, n_kv * g, h), normal(rng, b, t, n_kv, h), normal(rng, b, t, n_kv, h)
    caches = [normal(rng, 2, b * n_kv, s, h) for _ in range(2)]
    first = np.array([0, 125, s - 1 - t], np.int32)
    for cache in caches:
        cache[:, :, -1] = np.nan  # what lies behind a token is never looked at
    stored = [jnp.asarray(cache, dtype) for cache in caches]
    expected = [np.array(cache, np.float64) for cache in stored]
    for cache, new in zip(expected, (k, v), strict=True):
        for row, token, head in np.ndindex(b, t, n_kv):
            cache[1, row * n_kv + head, first[row] + token] = np.asarray(jnp.asarray(new[row, token, head], dtype))
    out, *found = attend(q, k, v, *stored, first, jnp.int32(1), window=window, scale=0.3)
    for cache, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(cache, np.float64), right)
    right = attention(q, expected[0][1], expected[1][1], first, window, 0.3)
    np.testing.assert_allclose(out, right, rtol=0, atol=1e-5)


@needs_attention
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 600])
def test_attention_is_the_same_to_the_bit_however_a_prompt_is_read(dtype: str, window: int | None) -> None:
    n, n_kv, h, total, start = 6, 2, 40, 130, 1000
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, 1, total, n, h), normal(rng, 1, total, n_kv, h), normal(rng, 1, total, n_kv, h)
    past = [normal(rng, n_kv, start, h) for _ in range(2)]

    def read(blocks: list[int], slots: int, rows: int) -> Array:
        """Read the tokens in blocks, beside other rows in a cache of some length, and return what came of row 0."""
        caches = [np.full((rows * n_kv, slots, h), 0.5, np.float32) for _ in range(2)]
        for cache, old in zip(caches, past, strict=True):
            cache[:n_kv, :start] = old
        stored, at, outs = [jnp.asarray(cache, dtype) for cache in caches], 0, []
        for t in blocks:
            first = np.array([start + at] + [3] * (rows - 1), np.int32)
            new = [np.repeat(a[:, at : at + t], rows, axis=0) for a in (q, k, v)]
            out, *stored = attend(*new, *stored, first, window=window, scale=h**-0.5)
            outs.append(np.asarray(out)[0])
            at += t
        return np.concatenate(outs)

    right = read([total], 2000, 1)
    assert np.isfinite(right).all()
    for blocks, slots, rows in (([64, 66], 1130, 1), ([1] * 24 + [33, 7, 66], 1200, 4), ([16] * 8 + [2], 1500, 2)):
        np.testing.assert_array_equal(read(blocks, slots, rows), right)


@needs_attention
def test_slots_that_are_not_there_are_the_nearest_ones() -> None:
    rng = np.random.default_rng(0)
    new, k, v = normal(rng, 2, 2, 1, 16), normal(rng, 2, 8, 16), normal(rng, 2, 8, 16)
    _, found_k, found_v = kernels.attend(new, new, new, k, v, np.array([-3, 9], np.int32), window=None, scale=1.0)
    for found, expected in ((found_k, k.copy()), (found_v, v.copy())):
        expected[0, :2], expected[1, 6:] = new[0, :, 0], new[1, :, 0]
        np.testing.assert_array_equal(found, expected)


@needs_attention
def test_attention_to_what_is_not_finite() -> None:
    q, new = np.ones((3, 2, 2, 16), np.float32), np.ones((3, 2, 1, 16), np.float32)
    k, v = np.ones((3, 40, 16), np.float32), np.ones((3, 40, 16), np.float32)
    k[0, 3, 5], k[1, 3, 5] = np.nan, np.inf
    new[2, 1] = np.nan  # a later token's, which the one before doesn't see
    out, _, _ = kernels.attend(q, new, new, k, v, np.full(3, 20, np.int32), window=None, scale=1.0)
    assert np.isfinite(out).all(axis=(2, 3)).tolist() == [[False, False], [False, False], [True, False]]


@needs_attention
def test_scores_of_the_largest_magnitudes() -> None:
    q, new = np.full((1, 1, 1, 16), 1e18, np.float32), np.zeros((1, 1, 1, 16), np.float32)
    k, v = np.zeros((1, 600, 16), np.float32), np.arange(600 * 16, dtype=np.float32).reshape(1, 600, 16)
    k[0, 300] = 1e18
    out, _, _ = kernels.attend(q, new, new, k, v, np.array([598], np.int32), window=None, scale=1.0)
    np.testing.assert_array_equal(out[0, 0, 0], v[0, 300])


@needs_attention
def test_wrong_shapes_are_refused_with_a_sentence() -> None:
    x, cache = np.ones((2, 1, 2, 8), np.float32), np.ones((2, 4, 8), np.float32)
    first = np.zeros(2, np.int32)

    def call(**changed: Array | int) -> None:
        given = {"q": x, "k": x[:, :, :1], "v": x[:, :, :1], "k_cache": cache, "v_cache": cache, "first": first}
        jax.block_until_ready(kernels.attend(**(given | {"window": None, "scale": 1.0} | changed)))

    call()
    for changed, message in (
        ({"k": x[:, :, :1, :4]}, r"k has the shape \[2, 1, 1, 4\]: expected \[B, T, K, H\]"),
        ({"v": x}, "v has the shape .*: expected that of k"),
        ({"k_cache": cache[:1], "v_cache": cache[:1]}, r"k_cache has the shape .*: expected \[L, B\*K, S, H\]"),
        ({"v_cache": cache[:, :2]}, "v_cache has the shape .*: expected that of k_cache"),
        ({"k_cache": cache[:, :0], "v_cache": cache[:, :0]}, "expected at least 1 slots"),
        ({"first": first[:1]}, r"first has the shape \[1\]: expected \[B\]"),
        ({"window": 0}, "the window is 0: expected 1 or more"),
        ({"k_cache": cache.astype(np.int32)}, "expected float32 or bfloat16, both the same"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(**changed)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"x has the shape \[2, 4\]: expected \[rows, 5\]"):
        product((jnp.ones((3, 5)),), np.ones((2, 4), np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="w is of another dtype"):
        product((jnp.ones((3, 5), jnp.int32),), np.ones((2, 5), np.float32))
    with pytest.raises(ValueError, match="expected 3 axes, the first of which is the layers'"):
        product((jnp.ones((3, 5)),), np.ones((2, 5), np.float32), 0)


@needs_attention
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_scan_over_layers_copies_neither_weights_nor_caches(layers: int, rows: int) -> None:
    w = jnp.ones((layers, 96, 32))
    caches = tuple(jnp.zeros((layers, rows * 2, 64, 16)) for _ in range(2))

    def step(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        def layer(carry: tuple[jax.Array, ...], number: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
            x, k, v = carry
            parts = kernels.dot(w, x, number).reshape(rows, 1, 6, 16)
            first = jnp.full(rows, i, jnp.int32)
            out, k, v = kernels.attend(
                parts[:, :, :2], parts[:, :, 2:4], parts[:, :, 4:], k, v, first, number, window=None, scale=1.0
            )
            return (out.reshape(rows, 32), k, v), None

        return jax.lax.scan(layer, state, jnp.arange(layers))[0]

    loop = jax.jit(lambda w, *state: jax.lax.fori_loop(0, 5, step, state), donate_argnums=(1, 2, 3))
    text = loop.lower(w, jnp.ones((rows, 32)), *caches).compile().as_text()
    assert "jllama_attend" in text
    for shape in (caches[0].shape, w.shape):
        assert not re.search(rf"= f32{re.escape(str(list(shape)).replace(' ', ''))}\S* copy\(", text)


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
    heads = f"{rows * params.config.n_kv_heads},{slots},{params.config.head_dim}]"
    assert "jllama_attend" in text
    assert f"f32[{params.config.n_layers},{heads}" in text
    assert not re.search(rf"= f32\[(\d,)?{re.escape(heads)}\S* copy\(", text)


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


@pytest.mark.parametrize("choice", ["xla", pytest.param("native", marks=needs_kernels)])
def test_keys_and_values_in_bfloat16(choice: str) -> None:
    params, weights = tiny.model("gqa")
    params = tiny.running(params, choose(choice, "bfloat16"))
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
    monkeypatch.setattr(kernels, "_load", kernels._Loaded)
    assert not choose().kernels
    assert kernels.build() == ""
    with pytest.raises(ValueError, match="kernels = native: no native kernels: they were not built"):
        choose("native")
    with pytest.raises(ValueError, match="kernels = 'fast': expected auto, xla or native"):
        choose("fast")
    with pytest.raises(RuntimeError, match="they were not built"):
        kernels.dot(jnp.ones((2, 2)), jnp.ones((1, 2)))
    oracle.write_v0(tmp_path / "model.bin", weights, params.config)
    flags = ("--mode=bench", f"--checkpoint={tmp_path}/model.bin", "--kernels=native", "--bench_dtypes=float32")
    assert "were not built" in error(run(*flags))


def compiled(folder: Path, code: str) -> Path:
    """A library of some C++ code."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    (folder / "library.cc").write_text(code)
    flags = ["-shared", "-fPIC", "-o", str(folder / "_native.so"), str(folder / "library.cc")]
    subprocess.run(["g++", *flags], check=True, timeout=60)
    return folder / "_native.so"


def reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why a library is not used; JAX must work all the same."""
    monkeypatch.setattr(kernels, "_built", lambda: iter([path]))
    monkeypatch.setattr(kernels, "_load", kernels._load.__wrapped__)
    assert not kernels.available()
    assert jnp.ones(3).sum() == 3
    return kernels.explain()


def test_a_library_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_native.so").write_bytes(b"\x7fELF 12")
    assert "_native.so can't be used: " in reason(tmp_path / "_native.so", monkeypatch)


VERSIONS = """
extern "C" const char* jllama_source() {{ return "{}"; }}
extern "C" int jllama_ffi_major() {{ return {}; }}
extern "C" int jllama_ffi_minor() {{ return {}; }}
extern "C" void jllama_dot() {{}}
extern "C" void jllama_dot_groups() {{}}
extern "C" void jllama_attend() {{}}
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("int jllama_old() { return 1; }", "can't be used: .*undefined symbol: jllama_source"),
        (VERSIONS.format("other", 0, 1), "was compiled from other sources"),
        (VERSIONS.format("SOURCE", 0, 999), r"needs version \(0, 999\) of XLA's interface, and jaxlib has \(\d, \d+\)"),
        (VERSIONS.format("SOURCE", 1, 0), r"needs version \(1, 0\)"),
    ],
)
def test_a_library_of_another_version(
    code: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compiled(tmp_path, code.replace("SOURCE", kernels._source()))
    assert re.search(expected, reason(library, monkeypatch))


@needs_kernels
def test_a_lower_instruction_set_can_be_forced() -> None:
    code = "from jllama import kernels; print(kernels.explain()); print(kernels.build())"

    def call(last: str) -> str:
        environment = os.environ | {"JLLAMA_CPU": last}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        return done.stdout + done.stderr

    assert re.match(
        r"native kernels: float32 generic, .*, attention generic; none above generic because of JLLAMA_CPU\n",
        call("generic"),
    )
    assert kernels.build() not in call("generic")
    assert "ValueError: JLLAMA_CPU='386': expected one of generic, " in call("386")


def test_a_clone_finds_the_installed_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "jllama" / "kernels" / "_native.test.so"
    library.parent.mkdir(parents=True)
    library.touch()
    metadata = tmp_path / "jllama-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: jllama\nVersion: 0.1.0\n")
    (metadata / "RECORD").write_text("jllama/kernels/_native.test.so,,\njllama/kernels/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert library in list(kernels._built())
