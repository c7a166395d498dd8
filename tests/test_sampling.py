"""Sampling against a float64 reference, and what it promises each row."""

import dataclasses
import json
import typing
from pathlib import Path
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllama import likely, processors, sampling
from jllama.settings import MOST_LIKELY, Overrides, Settings, to_sampling


def settings(rows: int = 1, **fields: object) -> sampling.Sampling:
    return to_sampling([Settings(**{"top_p": 1.0, "temperature": 1.0, "seed": row} | fields) for row in range(rows)])


probabilities = jax.jit(sampling.probabilities)
sample = jax.jit(sampling.sample)


def draw(logits: np.ndarray, rows: int, **fields: object) -> np.ndarray:
    """Draw once for each of many seeds."""
    tokens = jnp.zeros((rows, 4), jnp.int32)
    return np.array(
        sample(jnp.tile(logits[None], (rows, 1)), settings(rows, **fields), tokens, jnp.zeros(rows, jnp.int32))
    )


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The definition, with a sort, in float64."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    order = np.argsort(-p, kind="stable")
    if 0 < top_k < len(p):
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
        dropped = before >= top_p
        dropped[0] = False
        p[order[dropped]] = 0
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def test_golden_distributions(shared: Path) -> None:
    golden = json.loads((shared / "golden/sampling.json").read_text())
    for case in golden["cases"]:
        fields = {name: case[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        logits = jnp.array([golden["vectors"][case["logits"]]], jnp.float32)
        found = np.array(probabilities(logits, settings(**fields)))[0]
        np.testing.assert_allclose(found, case["probs"], atol=1e-6, err_msg=case["name"])
        assert np.flatnonzero(found).tolist() == case["kept"], case["name"]


@pytest.mark.parametrize("vocab", [2, 5, 127, 128, 129, 1000])
@pytest.mark.parametrize("fields", [(0.7, 0, 0.9, 0.0), (1.0, 3, 1.0, 0.0), (1.4, 7, 0.8, 0.1), (1.0, 0, 0.999, 0.0)])
def test_distribution_of_random_logits(vocab: int, fields: tuple[float, int, float, float]) -> None:
    logits = np.random.default_rng(vocab).normal(0, 3, (4, vocab)).astype(np.float32)
    logits[1] = np.round(logits[1])  # many ties
    names = dict(zip(("temperature", "top_k", "top_p", "min_p"), fields, strict=True))
    found = np.array(probabilities(jnp.array(logits), settings(4, **names)))
    for row, x in zip(found, logits, strict=True):
        np.testing.assert_allclose(row, reference(x, *fields), atol=2e-6)


@pytest.mark.parametrize("fields", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.5}])
def test_draws_follow_the_distribution(fields: dict[str, float]) -> None:
    logits = np.random.default_rng(0).normal(0, 2, 300).astype(np.float32)
    n = 20000
    found = np.bincount(draw(logits, n, **fields), minlength=300)
    p = reference(logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | fields)
    possible = p > 0
    assert not found[~possible].any()
    chi_square = np.sum((found - n * p)[possible] ** 2 / (n * p[possible]))
    degrees = possible.sum() - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


def test_draws_over_a_flat_vocabulary_reach_all_of_it() -> None:
    ids = draw(np.zeros(32000, np.float32), 2000)
    assert abs(ids.mean() - 15999.5) < 620  # three standard deviations
    assert len(np.unique(ids)) > 1900


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 2.0**-126, 1e-12])
@pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_no_temperature_is_greedy(temperature: float, fields: dict[str, float]) -> None:
    assert set(draw(np.array([2, 4, 3], np.float32), 200, temperature=temperature, **fields)) == {1}


def test_small_temperature_of_large_logits() -> None:
    logits = np.array([2e4, 4e4, 3e4], np.float32)
    assert set(draw(logits, 1000, temperature=1e-3)) == {1}
    assert set(draw(logits / 1e4, 1000, temperature=1e-4)) == {1}


@pytest.mark.parametrize("top_p", [0.0, 1e-8, 1e-4, 1e-3])
def test_tiny_top_p_keeps_the_best(top_p: float) -> None:
    logits = np.random.default_rng(1).normal(0, 1, 4096).astype(np.float32)
    logits[1234] = 12
    assert set(draw(logits, 200, top_p=top_p)) == {1234}
    flat = draw(np.zeros(4096, np.float32), 200, top_p=top_p)
    assert ((flat >= 0) & (flat < 4096)).all()


def test_top_p_near_one_stays_in_the_vocabulary() -> None:
    flat = np.zeros(128256, np.float32)
    for top_p in (0.9999999, 1.0):
        ids = draw(flat, 64, top_p=top_p)
        assert ((ids >= 0) & (ids < 128256)).all()
        assert len(np.unique(ids)) > 60


def test_filters_that_are_off_change_no_draw() -> None:
    logits = np.random.default_rng(2).normal(0, 2, 50).astype(np.float32)
    plain = draw(logits, 500)
    for off in ({"top_k": 50}, {"top_k": 5000}, {"top_p": 1.0}, {"min_p": 0.0}, {"repetition_penalty": 1.0}):
        np.testing.assert_array_equal(draw(logits, 500, **off), plain)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = jnp.array(np.random.default_rng(3).normal(0, 2, (9, 500)), jnp.float32)
    rows = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"repetition_penalty": 1.5}]
    rows += [{"logit_bias": {7: 9.0}}, {"presence_penalty": 2.0}, {"frequency_penalty": -2.0}]
    mixed = to_sampling([Settings(**{"temperature": 1.0, "top_p": 1.0, "seed": i} | row) for i, row in enumerate(rows)])
    tokens, pos = jnp.arange(90, dtype=jnp.int32).reshape(9, 10), jnp.arange(9, dtype=jnp.int32)
    together = sample(logits, mixed, tokens, pos)
    for i in range(9):
        one = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], mixed)
        assert together[i] == sample(logits[i : i + 1], one, tokens[i : i + 1], pos[i : i + 1])[0]


def test_every_seed_is_a_seed() -> None:
    logits = np.zeros(1000, np.float32)
    seeds = [0, 1, -1, 2**31, 2**32, 2**63, 2**64 - 2]
    ids = [tuple(draw_at(logits, seed, pos) for pos in range(4)) for seed in seeds]
    assert len(set(ids)) == len(seeds)
    assert ids == [tuple(draw_at(logits, seed, pos) for pos in range(4)) for seed in seeds]


def draw_at(logits: np.ndarray, seed: int, pos: int) -> int:
    row = settings(seed=seed)
    return int(sample(jnp.array(logits[None]), row, jnp.zeros((1, 1), jnp.int32), jnp.array([pos], jnp.int32))[0])


def test_repetition_penalty() -> None:
    logits = jnp.array([[2.0, -1.0, 1.9, -1.5]], jnp.float32)
    tokens = jnp.array([[0, 3, 2, 2]], jnp.int32)
    greedy = {"temperature": 0.0}

    def best(penalty: float, pos: int) -> int:
        return int(
            sample(logits, settings(repetition_penalty=penalty, **greedy), tokens, jnp.array([pos], jnp.int32))[0]
        )

    assert best(1.0, 1) == 0
    assert best(1.1, 1) == 2  # 2.0 / 1.1 < 1.9; token 2 comes after position 1 and is not counted
    assert best(1.04, 1) == 0  # 2.0 / 1.04 > 1.9
    negative = -jnp.abs(logits) - 1  # a negative logit is multiplied: [-3, -2, -2.9, -2.5]
    seen = jnp.array([[1, 1, 1, 1]], jnp.int32)
    row = settings(repetition_penalty=1.5, **greedy)
    assert int(sample(negative, row, seen, jnp.array([0], jnp.int32))[0]) == 3


def test_argmax_takes_the_first_of_equals() -> None:
    x = jnp.array([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0], [-jnp.inf, -2.0, -2.0]], jnp.float32)
    assert sampling.argmax(x).tolist() == [1, 0, 1]


@pytest.mark.parametrize("bad", [[0.0, np.nan, 5.0], [-np.inf] * 3, [np.nan] * 3, [0.0, np.inf, 1.0]])
def test_bad_logits_show_in_the_log_probability(bad: list[float]) -> None:
    logits = jnp.array([bad], jnp.float32)
    token = sample(logits, settings(temperature=0.0), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    assert not np.isfinite(sampling.log_probability(logits, token)).all()


def test_log_probability() -> None:
    logits = np.random.default_rng(4).normal(0, 5, (3, 40)).astype(np.float32)
    token = np.array([3, 0, 39], np.int32)
    x = logits.astype(np.float64)
    expected = x[np.arange(3), token] - np.log(np.exp(x).sum(-1))
    np.testing.assert_allclose(sampling.log_probability(jnp.array(logits), jnp.array(token)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1, float("nan"), float("inf"), "hot", True, np.bool_(True), np.float32("nan"), None, b"1"]),
        ("top_k", [-1, 1.5, None, np.int8(-1), np.float32(2), 9**9999]),
        ("top_p", [-0.1, 1.1, float("nan")]),
        ("min_p", [-0.1, 2]),
        ("repetition_penalty", [0, -1, float("inf")]),
        ("max_new_tokens", [-1, 2**40, 1.0]),
        ("seed", [2**64, -(2**63) - 1, 0.5]),
        ("presence_penalty", [-2.1, 3, float("nan")]),
        ("frequency_penalty", [2.5, None]),
        ("logit_bias", [{1: 101}, {-1: 0}, {"a": 1}, {1: None}, {1.5: 1}, 7, "ab", dict.fromkeys(range(1025), 1)]),
        ("min_new_tokens", [-1, 0.5]),
        ("top_logprobs", [-1, 21, True]),
        ("stop_token_ids", [[-1], ["a"], 7, "7", [True], list(range(65))]),
        ("ignore_eos", [1, None, "yes"]),
        ("stop", [[""], [1], 7, b"ab", None, [b"a"]]),
    ],
)
def test_wrong_settings_are_named(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{field} = "):
            Settings(**{field: value})
    with pytest.raises(ValueError, match=r"top_k.*; min_p"):
        Settings(top_k=-1, min_p=3)
    with pytest.raises(ValueError, match="unknown settings tempreature"):
        Settings().override({"tempreature": 1})


def test_numpy_numbers_are_numbers() -> None:
    numpy = Settings(
        max_new_tokens=np.int16(3),
        temperature=np.float32(0.5),
        top_k=np.uint8(7),
        top_p=np.float64(1),
        seed=np.int64(-1),
    )
    plain = Settings(max_new_tokens=3, temperature=0.5, top_k=7, top_p=1.0, seed=-1)
    assert numpy == plain
    kinds = {type(value) for value in dataclasses.asdict(numpy).values() if value is not None}
    assert kinds == {int, float, bool, tuple, dict}
    assert json.dumps(dataclasses.asdict(numpy)) == json.dumps(dataclasses.asdict(plain))


def test_overrides_are_the_settings() -> None:
    assert Overrides.__annotations__.keys() == {field.name for field in dataclasses.fields(Settings)}
    hints = get_type_hints(Settings)
    assert get_type_hints(Overrides) == hints
    kinds = {name: typing.get_args(hint)[0] if typing.get_args(hint) else hint for name, hint in hints.items()}
    assert likely.MOST == MOST_LIKELY
    assert {field.name: field.metadata["about"].kind for field in dataclasses.fields(Settings)} == kinds


@pytest.mark.parametrize("fields", [{"top_k": 40}, {"min_p": 0.02}, {"top_k": 1000}, {"top_p": 0.9}])
def test_a_dropped_token_is_never_drawn(fields: dict[str, float]) -> None:
    """The sums of blocks differ in their last bit where zeros follow: this seed draws the largest number below 1."""
    rows, vocab = 64, 49152
    greatest = to_sampling([Settings(**{"seed": 22644461, "temperature": 1.0, "top_p": 1.0} | fields)] * rows)
    tokens, pos = jnp.zeros((rows, 4), jnp.int32), jnp.zeros(rows, jnp.int32)
    for seed in range(4):
        x = np.random.default_rng(seed).normal(0, 1 + seed, (rows, vocab)).astype(np.float32)
        kept = np.array(probabilities(jnp.array(x), greatest))
        ids = np.array(sample(jnp.array(x), greatest, tokens, pos))
        assert (kept[np.arange(rows), ids] > 0).all()


@pytest.mark.parametrize("fields", [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.0}])
@pytest.mark.parametrize("allowed", [[0], [299], [3, 128, 200, 256, 299]])
def test_a_masked_token_is_never_chosen(fields: dict[str, float], allowed: list[int]) -> None:
    """What a grammar or a padded vocabulary rests on."""
    logits = np.full(300, -np.inf, np.float32)
    logits[allowed] = np.random.default_rng(5).normal(0, 1, len(allowed))
    assert set(draw(logits, 2000, **fields, repetition_penalty=1.3)) <= set(allowed)
    if not fields:
        assert set(draw(logits, 2000)) == set(allowed)


def test_the_whole_order_against_transformers() -> None:
    """Data of tools/sampling_references.py, in float64."""
    data = np.load(Path(__file__).parent / "data" / "sampling.npz")
    bias = dict(zip(data["bias_ids"].tolist(), data["biases"].tolist(), strict=True))
    prompt = int(data["prompt"])
    rows = [
        Settings(
            logit_bias=bias if has_bias else {},
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
            temperature=temperature,
            top_k=int(top_k),
            top_p=top_p,
            min_p=min_p,
            min_new_tokens=int(least),
        )
        for has_bias, repetition, frequency, presence, temperature, top_k, top_p, min_p, least in data["cases"]
    ]
    x = to_sampling(rows, [prompt] * len(rows))
    tokens, pos = jnp.array(data["ids"]), jnp.full(len(rows), data["ids"].shape[1] - 1, jnp.int32)
    ends = jnp.tile(jnp.array(data["ends"], jnp.int32)[None], (len(rows), 1))
    logits = processors.forbid(jnp.array(data["logits"]), ends, pos + 1 - x.start < x.min_new_tokens)
    found = probabilities(sampling.process(logits, x, tokens, pos), x)
    np.testing.assert_allclose(found, data["probabilities"], atol=2e-6)


def test_biases_and_penalties_of_generated_tokens() -> None:
    """By hand: tokens at positions 0 and 1 are the prompt's, those at 2 to 4 were generated, 5 is not known yet."""
    logits = jnp.array([[1.0, -1.0, 2.0, -jnp.inf, 0.0]], jnp.float32)
    tokens, pos = jnp.array([[0, 3, 2, 2, 1, 4]], jnp.int32), jnp.array([4], jnp.int32)

    def processed(**fields: object) -> list[float]:
        rows = to_sampling([Settings(**fields)], [2])
        return sampling.process(logits, rows, tokens, pos)[0].tolist()

    low = float("-inf")
    assert processed() == [1.0, -1.0, 2.0, low, 0.0]
    assert processed(frequency_penalty=0.5) == [1.0, -1.5, 1.0, low, 0.0]
    assert processed(presence_penalty=0.5) == [1.0, -1.5, 1.5, low, 0.0]
    assert processed(presence_penalty=-0.5, frequency_penalty=1.0) == [1.0, -1.5, 0.5, low, 0.0]
    assert processed(logit_bias={4: 3.5, "0": -100, 3: 100, 77: 1}) == [-99.0, -1.0, 2.0, low, 3.5]
    assert processed(logit_bias={1: 3.0}, repetition_penalty=2.0) == [0.5, 1.0, 1.0, low, 0.0]  # the bias comes first


def test_likely_tokens() -> None:
    logits = np.random.default_rng(6).normal(0, 4, (2, 50)).astype(np.float32)
    found = likely.find(jnp.array(logits), jnp.array([3, 0], jnp.int32))
    x = logits.astype(np.float64)
    order = np.argsort(-x, axis=-1)[:, : likely.MOST]
    np.testing.assert_array_equal(found.ids, order)
    logs = x - np.log(np.exp(x).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.logprobs, np.take_along_axis(logs, order, -1), atol=1e-5)
    few = likely.find(jnp.array([[0.0, 0.0, -jnp.inf]], jnp.float32), jnp.array([20], jnp.int32))
    np.testing.assert_allclose(few.logprobs[0, :4], [np.log(0.5), np.log(0.5), -np.inf, -np.inf])
