"""Weights in groups: GGUF's values as gguf-py gives them, and products against float64 NumPy."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from jllama import LLM, kernels
from jllama.checkpoint.build import STORED, build_params, sources_of
from jllama.checkpoint.source import Source, Stored
from jllama.weights import groups
from jllama.weights.groups import KINDS, Groups

Array = np.ndarray
BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q4_k": 144, "q5_k": 176, "q6_k": 210}
native = pytest.mark.parametrize(
    "native",
    [False, pytest.param(True, marks=pytest.mark.skipif(not kernels.has("groups"), reason=kernels.explain()))],
)
GGUF = kernels.GROUPS[:8]
every_kind = pytest.mark.parametrize("kind", KINDS)


def blocks(kind: str, rows: int, columns: int) -> Array:
    """Random blocks: any bits, and sensible scales."""
    rng = np.random.default_rng(rows)
    count = columns // KINDS[kind].share
    raw = rng.integers(0, 256, (rows, count, BYTES[kind]), dtype=np.uint8)
    scales = rng.normal(size=(rows, count, 2)).astype(np.float16).view(np.uint8)
    if kind == "q6_k":
        raw[..., -2:] = scales[..., :2]
    else:
        n = 4 if KINDS[kind].has_m else 2
        raw[..., :n] = scales[..., :n]
    return raw.reshape(rows, -1)


def weights(kind: str, rows: int, columns: int) -> tuple[Groups, Array]:
    """Weights of a kind, and their values."""
    if kind not in GGUF:
        w = groups.encode(np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32), kind)
        return w, values(w)
    raw = blocks(kind, rows, columns)
    return groups.from_blocks(raw, kind), quants.dequantize(raw, GGMLQuantizationType[kind.upper()])


def values(w: Groups) -> Array:
    """What int8, int4 and q80 stand for."""
    u = w.values.astype(np.float32)
    if w.kind == "int4":
        low, high = (np.reshape(w.values >> shift & 15, (len(w.values), -1, 16)) for shift in (0, 4))
        u = np.concatenate([low, high], axis=-1).reshape(len(w.values), -1).astype(np.float32) - 8
    d, m = (0 if part is None else part.astype(np.float32).repeat(32, axis=-1) for part in (w.d, w.m))
    return u * d + m


def on_device(w: Groups) -> Groups:
    return jax.tree.map(jnp.asarray, w)


@pytest.mark.parametrize("kind", GGUF)
def test_values_are_the_files(kind: str) -> None:
    w, right = weights(kind, 5, 768)
    assert w.shape == (5, 768)
    np.testing.assert_array_equal(w.decode(), right)
    np.testing.assert_array_equal(on_device(w).take(jnp.array([[4], [1]])), right[[[4], [1]]])
    size = sum(part.nbytes for part in jax.tree.leaves(w))
    assert size <= 1.03 * blocks(kind, 5, 768).nbytes
    np.testing.assert_array_equal(w.columns(slice(256, 512)).decode(), right[:, 256:512])


@native
@every_kind
@pytest.mark.parametrize(("rows", "out", "columns"), [(1, 1, 256), (2, 5, 768), (7, 33, 1280), (70, 6, 256)])
def test_products(kind: str, native: bool, rows: int, out: int, columns: int) -> None:
    if KINDS[kind].share == 32:
        columns = {256: 32, 768: 576, 1280: 1056}[columns]  # last groups that fill no vector
    w, right = weights(kind, out, columns)
    x = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
    groups_of_x = x.reshape(rows, -1, 32).astype(np.float64)
    scale = np.abs(groups_of_x).max(axis=-1, keepdims=True) / 127
    y = np.asarray(on_device(w).dot(jnp.asarray(x), native=native, fine=False, axis=None), np.float64)
    finely = np.asarray(on_device(w).dot(jnp.asarray(x), native=native, fine=True, axis=None), np.float64)
    # Rounding is off by half a step at most in each element, and by what float32 loses.
    half_a_step = (scale / 2 * np.ones(32)).reshape(rows, -1)
    wide = right.astype(np.float64)
    np.testing.assert_array_less(np.abs(y - x @ wide.T), 1.001 * half_a_step @ np.abs(wide).T + 1e-30)
    bound = 1.001 * half_a_step / 254 @ np.abs(wide).T + 2e-6 * np.abs(x) @ np.abs(wide).T
    np.testing.assert_array_less(np.abs(finely - x @ wide.T), bound + 1e-30)
    rounded = (np.rint(groups_of_x / scale) * scale).reshape(rows, -1)
    bound = 1e-6 * np.abs(rounded) @ np.abs(wide).T
    # An element half-way between two steps may go either way.
    assert np.mean(np.abs(y - rounded @ wide.T) <= bound) > 0.95


@pytest.mark.skipif(not kernels.has("groups"), reason=kernels.explain())
@every_kind
def test_a_product_depends_on_its_own_row_and_layer_alone(kind: str) -> None:
    one, other = (on_device(weights(kind, out, 768)[0]) for out in (70, 70))
    stack = jax.tree.map(lambda *parts: jnp.stack(parts), one, on_device(weights(kind, 70, 768)[0]), other)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(130, 768)), jnp.float32)
    whole = np.asarray(one.dot(x, native=True, fine=False, axis=None))
    for start, stop in ((0, 1), (7, 9), (3, 10), (29, 129)):
        found = stack.at(jnp.int32(2)).dot(x[start:stop], native=True, fine=False, axis=None)
        np.testing.assert_array_equal(found, whole[start:stop])


@native
def test_what_is_not_finite_stays_so(native: bool) -> None:
    w = on_device(weights("q4_1", 5, 64)[0])
    x = np.ones((4, 64), np.float32)
    x[1, 7], x[2, 40], x[3] = np.nan, np.inf, 0
    y = np.asarray(w.dot(jnp.asarray(x), native=native, fine=False, axis=None))
    assert np.isfinite(y).all(axis=1).tolist() == [True, False, False, True]
    assert not y[3].any()


@pytest.mark.parametrize(("kind", "steps"), [("q80", 127), ("int8", 127), ("int4", 7)])
def test_floats_are_rounded_to_the_nearest_step(kind: str, steps: float) -> None:
    x = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    x[2, 32:64] = 0
    largest = np.abs(x).reshape(6, 3, 32).max(axis=-1).repeat(32, axis=-1)
    # Half a step, and what float16 loses of the scales.
    assert (np.abs(groups.encode(x, kind).decode() - x) <= largest / steps / 2 + largest * 2e-3).all()
    assert not groups.encode(x, kind).decode()[2, 32:64].any()
    np.testing.assert_array_equal(groups.encode(x, kind).decode(), values(groups.encode(x, kind)))


def test_int4_is_nearer_than_q4_0() -> None:
    """By a twentieth of the squared error, where each element counts as its square does, on normal numbers."""
    x = np.random.default_rng(1).normal(size=(50, 320)).astype(np.float32)
    by_gguf = quants.dequantize(quants.quantize(x, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0)
    errors = [np.square(x * (y - x)).sum() for y in (groups.encode(x, "int4").decode(), by_gguf)]
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize("name", ["stories", "stories260K"])
def test_int4_predicts_no_worse_than_q4_0(shared: Path, name: str) -> None:
    path = "stories" if name == "stories" else shared / "models/stories260K/stories260K.bin"
    exact = LLM.load(path, dtype="float32")

    def rounded(source: Source) -> Source:
        rows = source.read(0, source.shape[0])
        if rows.ndim == 1 or rows.shape[1] % 32:
            return source
        blocks = quants.quantize(rows, GGMLQuantizationType.Q4_0)
        return source._replace(stored=Stored("q4_0", lambda start, stop: blocks[start:stop]))

    sources = {tensor: rounded(source) for tensor, source in sources_of(exact.params).items()}
    by_gguf = build_params(exact.params.config, sources, dtype=STORED, origin="test", run=exact.params.run)
    text = (shared / "text/tinystories_sample.txt").read_text()[:12_000]
    right, q4_0 = (llm.score(text).perplexity for llm in (exact, LLM(by_gguf, exact.tokenizer)))
    assert right < LLM.load(path, dtype="int4").score(text).perplexity < q4_0


def test_int8_keeps_what_was_quantised_to_4_bits() -> None:
    x = np.random.default_rng(0).normal(size=(40, 320)).astype(np.float32)
    kept = quants.dequantize(quants.quantize(x, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)
    largest = np.abs(kept).reshape(40, -1, 32).max(axis=-1).repeat(32, axis=-1)
    assert (np.abs(groups.encode(kept, "int8").decode() - kept) <= 1e-3 * largest).all()  # a step is twice 1/255


@pytest.mark.parametrize("kind", ["q80", "int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(kind: str, value: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 40] = value
    assert np.isfinite(groups.encode(x, kind).decode()).reshape(4, 32).all(axis=1).tolist() == [True] * 3 + [False]


def test_what_is_no_whole_number_of_blocks() -> None:
    with pytest.raises(ValueError, match="rows of 19 bytes: expected a multiple of q4_0's 18"):
        groups.from_blocks(np.zeros((2, 19), np.uint8), "q4_0")
    with pytest.raises(ValueError, match="expected q80, int8 or int4, and a multiple of 32"):
        groups.encode(np.zeros((2, 33), np.float32), "int8")


@pytest.mark.skipif(not kernels.has("groups"), reason=kernels.explain())
def test_wrong_parts_are_refused() -> None:
    w = on_device(weights("q4_1", 5, 64)[0])
    parts = list(w.parts)
    parts[5] = parts[5][:, :1]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"m has the shape \[5, 1\]: expected \[1, 5, 2\]"):
        jax.block_until_ready(kernels.dot_groups("q4_1", parts, jnp.ones((1, 64))))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"x has the shape \[1, 32\]: expected \[rows, 64\]"):
        jax.block_until_ready(kernels.dot_groups("q4_1", w.parts, jnp.ones((1, 32))))
