"""The decoding loop: right tokens in every way of running it, right ends, and what the compiled program does."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny

from jllama import decode
from jllama.config import Config
from jllama.decode import Stop, generate, start
from jllama.pool import Pool
from jllama.programs import DECODE, READ_PROMPT
from jllama.run import Run
from jllama.runner import Runner, block_width
from jllama.settings import Settings

NONE = jnp.array([-1], jnp.int32)
RUNNERS: dict[int, Runner] = {}  # by their model, so that each of its programs is compiled once; they keep it alive
jit_generate = jax.jit(generate, static_argnames="slots")


def oracle_greedy(weights: oracle.Weights, config, prompt: np.ndarray, n: int) -> list[int]:
    ids = prompt.tolist()
    for _ in range(n):
        ids.append(int(np.argmax(oracle.forward(weights, config, np.array(ids))[-1])))
    return ids[len(prompt) :]


def batch_greedy(params, prompts: list[list[int]], n: int, steps: int = 2**30, stop_ids: tuple[int, ...] = (-1,)):
    """Generate with the host's loop; returns the ids of each row."""
    pool = Pool(RUNNERS.setdefault(id(params), Runner(params)), stop_ids, len(prompts))
    settings = Settings(temperature=0.0, max_new_tokens=n)
    rows = pool.join([(prompt, settings) for prompt in prompts]).finish()
    found: list[list[int]] = [[] for _ in prompts]
    while True:
        for ids, row in zip(found, rows, strict=True):
            ids += pool.take(row)[0]
        if all(row.done for row in rows):
            return found
        pool.advance(steps)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_greedy_ids_equal_the_oracle_in_every_way_of_running(name: str) -> None:
    params, weights = tiny.model(name)
    prompts = [tiny.ids(params.config, n, seed=n) for n in (1, 3, 12)]
    expected = [oracle_greedy(weights, params.config, p, 20) for p in prompts]
    lists = [p.tolist() for p in prompts]
    for p, ids in zip(lists, expected, strict=True):
        assert batch_greedy(params, [p], 20) == [ids]
    assert batch_greedy(params, lists, 20) == expected
    assert batch_greedy(params, lists[::-1], 20) == expected[::-1]
    assert batch_greedy(params, lists, 20, steps=3) == expected
    if name == "gqa":  # the same functions; eagerly they are slow
        with jax.disable_jit():
            assert batch_greedy(params, lists[1:2], 4) == [expected[1][:4]]


def test_generate_is_the_whole_job_in_one_pure_function() -> None:
    params, weights = tiny.model("gqa")
    tokens = tiny.ids(params.config, 2, 8)
    length = jnp.array([8, 3], jnp.int32)
    state = jit_generate(params, tokens, length, tiny.greedy(2), Stop(NONE, length + 10), slots=32)
    for row, n in enumerate((8, 3)):
        expected = oracle_greedy(weights, params.config, tokens[row, :n], 10)
        assert state.tokens[row, n : n + 10].tolist() == expected
        assert state.pos[row] == n + 9
        log_probs = log_softmax(oracle.forward(weights, params.config, np.array([*tokens[row, :n], *expected])))
        np.testing.assert_allclose(
            state.logprobs[row, n : n + 10], log_probs[np.arange(n - 1, n + 9), expected], atol=1e-4
        )


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


@pytest.mark.parametrize("prompt", [7, 8])
@pytest.mark.parametrize("new", [0, 1, 100])
def test_generation_stops_at_the_end_of_the_context(prompt: int, new: int) -> None:
    config = tiny.CONFIGS["mha"][0]
    small = type(config)(
        **{f: getattr(config, f) for f in ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads")},
        vocab_size=97,
        max_seq_len=8,
    )
    weights = oracle.random_weights(small, tied=True)
    ids = tiny.ids(small, prompt)
    found = batch_greedy(tiny.params(weights, small), [ids.tolist()], new)[0]
    assert found == oracle_greedy(weights, small, ids, min(new, 8 - prompt))


def test_prompts_that_do_not_fit_are_refused_before_any_work() -> None:
    params, _ = tiny.model("mha")
    runner = Runner(params)
    for ids, words in (
        ([5] * 65, "65 tokens.*64"),
        ([], "0 tokens"),
        ([97], "97.*0 to 96"),
        ([-1], "id -1"),
        ([3, -5], "-5"),
    ):
        with pytest.raises(ValueError, match=words):
            Pool(runner, [2], 2).join([([5], Settings()), (ids, Settings())])
    assert runner.timings.prompt_tokens == 0


def test_the_cache_grows_without_changing_the_text() -> None:
    config = type(tiny.CONFIGS["gqa"][0])(32, 48, 1, 4, 2, 97, 700)
    weights = oracle.random_weights(config, tied=True)
    params = tiny.params(weights, config)
    prompt = tiny.ids(config, 250)
    grown = batch_greedy(params, [prompt.tolist()], 300)[0]
    length = jnp.array([250], jnp.int32)
    state = jit_generate(params, prompt[None], length, tiny.greedy(1), Stop(NONE, length + 300), slots=1024)
    assert grown == state.tokens[0, 250:550].tolist()
    assert len(grown) == 300
    forward = oracle.forward(weights, config, np.array([*prompt, *grown]))
    best = np.sort(forward[249:-1], axis=-1)
    clear = best[:, -1] - best[:, -2] > 1e-4
    assert clear.sum() > 250
    np.testing.assert_array_equal(np.argmax(forward[249:-1], -1)[clear], np.array(grown)[clear])


def test_a_long_prompt_is_read_in_blocks() -> None:
    config = type(tiny.CONFIGS["gqa"][0])(32, 48, 1, 4, 2, 97, 1500)
    weights = oracle.random_weights(config, tied=True)
    prompts = [tiny.ids(config, n, seed=n) for n in (1200, 513, 40)]
    found = batch_greedy(tiny.params(weights, config), [p.tolist() for p in prompts], 3)
    assert found == [oracle_greedy(weights, config, p, 3) for p in prompts]


@pytest.mark.parametrize("shared_length", [1, 7, 12])
def test_a_kept_cache_serves_any_prompt_that_begins_like_it(shared_length: int) -> None:
    params, weights = tiny.model("gqa")
    first = tiny.ids(params.config, 12)
    settings = Settings(temperature=0.0, max_new_tokens=8)
    runner = RUNNERS.setdefault(id(params), Runner(params))
    pool = Pool(runner, [-1], 1)
    (row,) = pool.join([(first.tolist(), settings)]).finish()
    pool.advance(2**30)
    second = np.concatenate([first[:shared_length], tiny.ids(params.config, 12 - shared_length, seed=7)])
    read = runner.timings.prompt_tokens
    (row,) = pool.join([(second.tolist(), settings)], pool.leave(row)).finish()
    assert runner.timings.prompt_tokens - read == max(12 - shared_length, 1)  # the last token is always read
    pool.advance(2**30)
    assert pool.take(row)[0] == oracle_greedy(weights, params.config, second, 8)


def test_each_row_ends_at_its_own_stop_token() -> None:
    # 3 -> 4 -> 5 -> ... -> 12 -> EOS; another stop id at 5
    params = tiny.chain([2, 2, 2, *range(4, 13), 2])
    prompts = [[12], [9], [3]]
    assert batch_greedy(params, prompts, 6, stop_ids=(1, 2)) == [[2], [10, 11, 12, 2], [4, 5, 6, 7, 8, 9]]
    assert batch_greedy(params, prompts, 6, stop_ids=(5, 2)) == [[2], [10, 11, 12, 2], [4, 5]]


def test_a_model_that_never_stops_ends_with_its_context() -> None:
    params = tiny.chain([3, 3, 3, 3], max_seq_len=40)
    assert batch_greedy(params, [[1]], 2**31 - 1, stop_ids=(1, 2)) == [[3] * 39]


def test_bad_weights_stop_the_row_with_its_position() -> None:
    params, weights = tiny.model("mha")
    poisoned = weights | {
        "layers.1.feed_forward.w2.weight": np.full_like(weights["layers.1.feed_forward.w2.weight"], np.nan)
    }
    with pytest.raises(FloatingPointError, match="position 2"):
        batch_greedy(tiny.params(poisoned, params.config), [[5, 6, 7]], 5)
    late = weights["tok_embeddings.weight"].copy()
    late[oracle_greedy(weights, params.config, np.array([5, 6, 7]), 1)[0]] = np.nan
    untied = tiny.params(
        {**weights, "tok_embeddings.weight": late, "output.weight": weights["tok_embeddings.weight"]}, params.config
    )
    with pytest.raises(FloatingPointError, match="position 3"):
        batch_greedy(untied, [[5, 6, 7]], 5)


def test_padding_that_nobody_asked_for_reaches_no_row() -> None:
    """The embedding of id 0 holds NaN, and prompts are padded with it: also where others are blocks longer."""
    params, weights = tiny.model("gqa")
    embedding = weights["tok_embeddings.weight"].copy()
    embedding[0] = np.nan
    output = weights.get("output.weight", weights["tok_embeddings.weight"])
    poisoned = tiny.params({**weights, "tok_embeddings.weight": embedding, "output.weight": output}, params.config)
    prompts = np.zeros((3, 32), np.int32)
    lengths = (2, 5, 20)
    for row, n in zip(prompts, lengths, strict=True):
        row[:n] = tiny.ids(params.config, n, seed=n) % (params.config.vocab_size - 1) + 1
    stop = Stop(NONE, jnp.array(lengths, jnp.int32) + 4)
    state = start(poisoned, jnp.array(prompts), jnp.array(lengths, jnp.int32), stop)
    jit_read = jax.jit(decode.read_prompt, static_argnames="width")
    for first in range(0, 24, 8):
        state = jit_read(poisoned, state, tiny.greedy(3), stop, np.int32(first), width=8)
    state = jax.jit(decode.decode)(poisoned, state, tiny.greedy(3), stop, np.int32(10))
    for row, n, found in zip(prompts, lengths, np.asarray(state.tokens), strict=True):
        assert found[n : n + 4].tolist() == oracle_greedy(weights, params.config, row[:n], 4)


def programs(rows: int, slots: int = 256, kv_dtype: str = "float32"):
    """Compile the two programs of a small model; returns them, the decode state's shapes and the config."""
    params = tiny.running(tiny.model("gqa")[0], Run(kv_dtype=kv_dtype))
    length = jnp.full(rows, 4, jnp.int32)
    stop = Stop(NONE, length + 10)
    state = start(params, jnp.zeros((rows, slots), jnp.int32), length, stop)
    read = READ_PROMPT.jitted.lower(params, state, tiny.greedy(rows), stop, np.int32(0), width=16).compile()
    loop = DECODE.jitted.lower(params, state, tiny.greedy(rows), stop, np.int32(5)).compile()
    return read, loop, state, params.config


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_the_compiled_loop_updates_the_cache_in_place(rows: int) -> None:
    read, loop, state, config = programs(rows)
    shape = rf"f32\[{rows * config.n_kv_heads},256,{config.head_dim}\]"
    text = loop.as_text()
    assert re.search(rf"{shape}\S* parameter", text), "the pattern doesn't match the cache's leaves at all"
    assert not re.search(rf"= {shape}\S* copy\(", text)
    assert not re.search(rf"= {shape}\S* copy\(", read.as_text())
    assert " while(" in text, "the loop was turned into a single call, which runs on one thread"
    leaf = state.cache.k[0].nbytes
    assert loop.memory_analysis().temp_size_in_bytes < 2 * leaf  # no second cache of 2 * n_layers leaves
    assert loop.memory_analysis().alias_size_in_bytes >= leaf * 2 * config.n_layers  # donated and reused


def test_bfloat16_keys_and_values_take_no_more_memory_than_float32_without_kernels() -> None:
    taken = {}
    for kv_dtype in ("float32", "bfloat16"):
        _, loop, state, _ = programs(2, 2048, kv_dtype)
        cache = sum(leaf.nbytes for leaf in state.cache.k + state.cache.v)
        taken[kv_dtype] = cache + loop.memory_analysis().temp_size_in_bytes
    assert taken["bfloat16"] < 1.1 * taken["float32"]


def test_the_memory_of_reading_a_long_prompt_is_bounded() -> None:
    slots, config = 2**17, Config(64, 64, 1, 32, 8, 97, 2**17, head_dim=128)  # the heads of Llama 3.1 8B
    params = tiny.params(oracle.random_weights(config, tied=True), config)
    stop = Stop(NONE, jnp.full(1, slots, jnp.int32))
    state = jax.eval_shape(start, params, jnp.zeros((1, slots), jnp.int32), jnp.full(1, slots - 1, jnp.int32), stop)
    width = block_width(1, slots - 1, slots * config.n_heads)
    read = READ_PROMPT.jitted.lower(params, state, tiny.greedy(1), stop, np.int32(0), width=width).compile()
    assert read.memory_analysis().temp_size_in_bytes < 2**30  # one block of 512 tokens would have 2**31 scores


def test_small_updates_in_a_loop_do_not_rewrite_the_buffer() -> None:
    def fill(n: int):
        def body(carry):
            i, x = carry
            return i + 1, x.at[jnp.zeros(1, jnp.int32), i[None]].set(i[None], mode="drop")

        run = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x)), donate_argnums=0)
        np.testing.assert_array_equal(run(jnp.zeros((1, n), jnp.int32))[1][0], np.arange(n))
        return min(timed(run, jnp.zeros((1, n), jnp.int32)) for _ in range(5))

    assert fill(40000) / fill(20000) < 3  # four times where each update touches the whole buffer


def timed(run, x: jax.Array) -> float:
    jax.block_until_ready(x)
    began = time.perf_counter()
    jax.block_until_ready(run(x))
    return time.perf_counter() - began


def test_score_equals_the_oracle() -> None:
    params, weights = tiny.model("llama3")
    tokens = tiny.ids(params.config, 3, 30)
    logprobs, best = jax.jit(decode.score)(params, tokens)
    for row in range(3):
        expected = oracle.forward(weights, params.config, tokens[row])[:-1]
        np.testing.assert_allclose(logprobs[row], log_softmax(expected)[np.arange(29), tokens[row, 1:]], atol=1e-4)
        np.testing.assert_array_equal(best[row], expected.argmax(-1))
