"""Text in, text out: golden texts, batches, streams, stop strings, seeds, scores."""

import dataclasses
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny

from jllama import LLM, Completion, Prompt, Settings, checkpoint
from jllama.chat import ChatError, Template
from jllama.config import from_toml
from jllama.model import forward, head, init_cache
from jllama.settings import Overrides

GREEDY = Settings(temperature=0.0)
# What llama2.c's own test expects of stories260K after 200 steps.
LLAMA2C_TEST = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" "
    "Lily was sad and didn't know what to do. She said, \"I want to play with your ball, but I can't find it.\"\nLily "
    "was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\nLily didn't want to "
    "help her mom, so she"
)


@pytest.fixture(scope="module")
def stories(shared: Path) -> LLM:
    return LLM.load(shared / "models/stories260K/stories260K.bin", kernels="xla")


def golden(shared: Path, kind: str) -> list[dict[str, Any]]:
    return json.loads((shared / "golden/llama2c.json").read_text())[kind]


def request(case: dict[str, Any]) -> Prompt:
    return Prompt(case["prompt"], Settings(temperature=0.0, max_new_tokens=case["steps"] + 1 - len(case["prompt_ids"])))


def check(case: dict[str, Any], completion: Completion) -> None:
    expected = case["generated_ids"][: len(case["generated_ids"]) - case["stopped_on_bos"]]
    assert completion.tokens == expected, case["name"]
    assert completion.finish_reason == ("stop" if case["stopped_on_bos"] else "length")
    assert completion.prompt + completion.text == case["decoded"], case["name"]


def streamed(llm: LLM, prompt: Prompt) -> tuple[list[str], Completion]:
    pieces, stream = [], llm.stream(prompt)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def test_text_of_llama2c_s_own_test(stories: LLM) -> None:
    assert stories.generate([""], temperature=0, max_new_tokens=200)[0].text == LLAMA2C_TEST


def test_golden_texts_in_one_ragged_batch(shared: Path, stories: LLM) -> None:
    cases = golden(shared, "greedy")
    for case, completion in zip(cases, stories.generate([request(c) for c in cases]), strict=True):
        check(case, completion)


def test_golden_texts_streamed(shared: Path, stories: LLM) -> None:
    for case in golden(shared, "greedy"):
        pieces, completion = streamed(stories, request(case))
        check(case, completion)
        assert "".join(pieces) == completion.text
        assert len(pieces) > 2


def test_golden_texts_of_the_untied_model(shared: Path) -> None:
    llm = LLM.load(shared / "models/stories260K/stories260K_untied.bin")
    for case in golden(shared, "greedy_untied"):
        check(case, llm.generate([request(case)])[0])


def test_golden_text_eagerly(shared: Path, stories: LLM) -> None:
    case = golden(shared, "greedy")[3]
    prompt = request(case)
    with jax.disable_jit():
        text = stories.generate([Prompt(prompt.text, Settings(temperature=0.0, max_new_tokens=12))])[0]
    assert text.tokens == case["generated_ids"][:12]


@pytest.mark.parametrize(("file", "dtype"), [("stories260K_q80", "q80"), ("stories260K_q80_gs4", "float32")])
def test_golden_texts_of_the_int8_files(shared: Path, file: str, dtype: str) -> None:
    path = shared / f"models/stories260K/{file}.bin"
    exact, stored = LLM.load(path, dtype="float32"), LLM.load(path)
    assert (exact.dtype, stored.dtype) == ("float32", dtype)
    for case in golden(shared, "greedy_runq"):
        if case["model"] != path.name:
            continue
        expected = case["dequantised_float64"]["generated_ids"]
        prompt = request(case)
        assert exact.generate([prompt])[0].tokens == expected
        assert_equal_until_a_near_tie(exact, case["prompt_ids"], stored.generate([prompt])[0].tokens, expected)


def assert_equal_until_a_near_tie(exact: LLM, prompt: list[int], found: list[int], expected: list[int]) -> None:
    """Where the ids part, the exact model must find the two about equally good; shows the two logits."""
    parted = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    if parted is None:
        assert len(found) > 50
        return
    ids = jnp.array([[*prompt, *expected[:parted]]], jnp.int32)
    hidden, _ = forward(exact.params, init_cache(exact.params, *ids.shape), ids, jnp.zeros(1, jnp.int32))
    logits = head(exact.params, hidden[0, -1])
    ours, theirs = float(logits[found[parted]]), float(logits[expected[parted]])
    print(f"parted at token {parted}: logit {ours:.4f} of {found[parted]}, {theirs:.4f} of {expected[parted]}")
    assert abs(theirs - ours) < 0.2
    assert parted >= 15


def test_stored_types_continue_like_float32(shared: Path, stories: LLM) -> None:
    expected = stories.generate(["Once upon a time"], temperature=0, max_new_tokens=100)[0].tokens
    prompt = stories.tokenizer.prompt_ids("Once upon a time")
    for dtype in ("bfloat16", "int8"):
        llm = LLM.load(shared / "models/stories260K/stories260K.bin", dtype=dtype)
        found = llm.generate(["Once upon a time"], temperature=0, max_new_tokens=100)[0].tokens
        assert_equal_until_a_near_tie(stories, prompt, found, expected)


def test_rows_of_mixed_settings_equal_each_row_alone(stories: LLM) -> None:
    prompts = [
        Prompt("Once upon a time", GREEDY),
        Prompt("", Settings(seed=1, temperature=1.0, max_new_tokens=40)),
        Prompt("Tom and Lily", Settings(seed=2, top_k=5, repetition_penalty=1.2, stop=("the",))),
        Prompt(
            "One day, the little dog saw a very big red ball in the park and",
            Settings(seed=0, min_p=0.1, max_new_tokens=7),
        ),
        Prompt("The sun", Settings(seed=2**64 - 1, top_p=0.5)),
        Prompt("A cat", Settings(seed=5, presence_penalty=0.8, frequency_penalty=0.4, logit_bias={300: 4.0})),
        Prompt("A dog", Settings(seed=6, top_logprobs=3, stop_token_ids=(13,), min_new_tokens=30, max_new_tokens=60)),
    ]
    alone = [stories.generate([p])[0] for p in prompts]
    for order in (prompts, prompts[::-1]):
        together = dict(zip((p.text for p in order), stories.generate(order, batch_size=8), strict=True))
        for expected in alone:
            found = together[expected.prompt]
            assert (found.text, found.tokens, found.finish_reason) == (
                expected.text,
                expected.tokens,
                expected.finish_reason,
            )
            np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
    for prompt, expected in zip(prompts, alone, strict=True):
        pieces, completion = streamed(stories, prompt)
        assert "".join(pieces) == completion.text == expected.text


def test_seeds(stories: LLM) -> None:
    def text(seed: int | None) -> str:
        return stories.generate(["Once"], seed=seed, temperature=1.0, top_p=1.0, max_new_tokens=40)[0].text

    seeds = [0, 1, -1, 2**63, 2**64 - 2]
    texts = [text(seed) for seed in seeds]
    assert texts == [text(seed) for seed in seeds]
    assert len(set(texts)) == len(seeds)
    assert text(None) != text(None)


def test_prompts_of_64_lengths_and_any_settings_compile_a_program_a_bucket(
    stories: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(stories.params, stories.tokenizer)

    def run(**settings: Any) -> int:
        caplog.clear()
        for n in range(1, 65):
            llm.generate([Prompt("a" * n, Settings(max_new_tokens=2, **settings))])
        return sum("Finished XLA compilation" in r.getMessage() for r in caplog.records)

    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        first = run(temperature=0.0)
        again = run(
            temperature=1.1,
            top_k=7,
            top_p=0.8,
            min_p=0.1,
            seed=3,
            stop=("x",),
            ignore_eos=True,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={3: 1.0},
            min_new_tokens=1,
            top_logprobs=5,
            stop_token_ids=[7],
        )
    # start and decode for the one size of cache, and read_prompt for blocks of 16, 32, 64 (and BOS makes 65: 128)
    assert first <= 2 + 4
    assert again == 0


def test_batches_of_any_size_compile_a_program_a_power_of_two(stories: LLM) -> None:
    llm = LLM(stories.params, stories.tokenizer)
    for rows in range(1, 9):
        llm.generate(["Once"] * rows, max_new_tokens=2, seed=0)
    compiled = llm.timings.compile_seconds
    for rows in range(1, 9):
        llm.generate(["Twice"] * rows, max_new_tokens=3, top_k=3, seed=1)
    assert llm.timings.compile_seconds == compiled > 0


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason"),
    [
        ([b"\nUser", b":", b"x"], ["\nUser:"], "", "stop"),
        ([b"in", b" Paris", b"x"], ["Pari"], "in ", "stop"),
        ([b"wait", b"..."], [".."], "wait", "stop"),
        ([b"DEF", b"G", b"HI", b"K"], ["DEFGHIJ"], "DEFGHIK", "stop"),
        ([b"DEF", b"G"], ["DEFGHIJ"], "DEFG", "stop"),
        ([b"ab", b"cd", b"ef"], ["ef", "cd"], "ab", "stop"),
        ([b"ab", b"cd"], ["bcx", "c"], "ab", "stop"),
        ([b"hi ", b"\xf0\x9f", b"\xa6\x99", b"!"], ["\U0001f999"], "hi ", "stop"),
        ([b"hi ", b"\xf0\x9f", b"\xa6\x99", b"!"], [], "hi \U0001f999!", "stop"),
        ([b"hi", b"\xf0\x9f"], [], "hi\ufffd", "stop"),
        ([b"\xf0\x9f", b"ok"], ["k"], "\ufffdo", "stop"),
    ],
)
def test_stop_strings_and_split_characters(pieces: list[bytes], stop: list[str], text: str, reason: str) -> None:
    llm = tiny.says(b"?", *pieces)
    completion = llm.generate(["?"], temperature=0, stop=stop)[0]
    assert (completion.text, completion.finish_reason) == (text, reason)
    parts, end = streamed(llm, Prompt("?", Settings(temperature=0.0, stop=stop)))
    assert "".join(parts) == end.text == text
    assert all(parts)
    joined = b"".join(pieces).decode(errors="replace")
    assert text == min((joined.split(s)[0] for s in stop), key=len, default=joined)


def test_a_stop_string_in_the_prompt_does_not_stop() -> None:
    llm = tiny.says(b"?", b"a", b"b")
    assert llm.generate(["?"], temperature=0, stop=["?"])[0].text == "ab"


def test_a_stop_string_ends_one_row_and_not_its_neighbour() -> None:
    llm = tiny.says(b"?", *[bytes([97 + i]) for i in range(20)])
    prompts = [Prompt("?", Settings(temperature=0.0, stop=s)) for s in (["c"], [], ["qr"])]
    assert [c.text for c in llm.generate(prompts)] == ["ab", "abcdefghijklmnopqrst", "abcdefghijklmnop"]


def test_bos_and_eos_end_a_text_and_are_not_part_of_it() -> None:
    for end in (1, 2):
        params = tiny.chain([2, 3, 2, 4, 5, 6, end])
        llm = LLM(params, tiny.Letters([b"", b"<s>", b"</s>", b"a", b"b", b"c", b"d"]))
        completion = llm.generate([""], temperature=0)[0]  # the prompt is BOS alone, which does not end it
        assert (completion.text, completion.finish_reason, completion.tokens) == ("abcd", "stop", [3, 4, 5, 6])


def test_how_a_text_ends_is_a_setting_of_its_row() -> None:
    llm = tiny.says(b"?", b"a", b"b", b"c")  # ids 4 to 6, and then 2, the end, which 2 follows
    rows = {
        "stop_token_ids": (Settings(stop_token_ids=[5]), [4], "stop"),
        "both": (Settings(stop_token_ids=[2], ignore_eos=True), [4, 5, 6], "stop"),
        "ignore_eos": (Settings(ignore_eos=True, max_new_tokens=6), [4, 5, 6, 2, 2, 2], "length"),
        "biased": (Settings(logit_bias={4: -20, 6: 20}), [6], "stop"),
        "neither": (Settings(), [4, 5, 6], "stop"),
    }
    prompts = [Prompt("?", dataclasses.replace(row[0], temperature=0.0)) for row in rows.values()]
    for name, found in zip(rows, llm.generate(prompts), strict=True):
        assert (found.tokens, found.finish_reason) == rows[name][1:], name


def test_no_text_ends_before_min_new_tokens() -> None:
    llm = tiny.says(b"?", b"a", b"b", b"c")
    best = [4, 5, 6, 0]  # after the last letter all others are equally probable
    for least in (0, 3, 4):
        (found,) = llm.generate(["?"], temperature=0, min_new_tokens=least, max_new_tokens=10)
        assert found.tokens == best[: max(least, 3)]
        assert found.finish_reason == "stop"


def test_a_row_in_which_nothing_can_come_ends_with_an_error() -> None:
    llm = tiny.says(b"?", b"a", b"b", b"c")
    every = range(llm.params.config.vocab_size)
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="no token can follow at position 2"):
            llm.generate(["?"], temperature=temperature, stop_token_ids=list(every), min_new_tokens=2)


def test_the_most_probable_tokens() -> None:
    llm = tiny.says(b"?", b"a", b"b", b"c")
    settings = [Settings(temperature=0.0, top_logprobs=n, logit_bias={5: 50}, max_new_tokens=2) for n in (2, 0, 20)]
    two, none, twenty = llm.generate([Prompt("?", s) for s in settings])
    assert none.top_logprobs == []
    assert two.tokens == [5, 5]  # the bias decides what comes, and not what the model thinks of it
    assert [[i for i, _ in place] for place in two.top_logprobs] == [[4, 0], [6, 0]]
    assert [len(place) for place in twenty.top_logprobs] == [7, 7]  # the whole vocabulary
    for place, token, logprob in zip(twenty.top_logprobs, twenty.tokens, twenty.logprobs, strict=True):
        assert dict(place)[token] == pytest.approx(logprob)
        assert sum(np.exp(x) for _, x in place) == pytest.approx(1)


def test_several_answers_to_a_prompt_read_it_once(stories: LLM) -> None:
    llm = LLM(stories.params, stories.tokenizer)
    text = "Once upon a time there was a little dog who lived in a house with a big red door. " * 3
    seeds = Settings(seed=2**64 - 1, max_new_tokens=12)
    expected = [llm.generate([Prompt(text, dataclasses.replace(seeds, seed=s))])[0] for s in (2**64 - 1, 0, 1)]
    before = llm.timings.prompt_tokens
    found = llm.generate([Prompt(text, seeds)], n=3)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert len({c.text for c in found}) == 3
    assert llm.timings.prompt_tokens - before == len(llm.encode(Prompt(text))) + 2
    assert len(llm.generate(["a", "b"], n=2, max_new_tokens=1)) == 4


def test_how_a_text_of_max_new_tokens_ends() -> None:
    llm = tiny.says(b"?", b"a", b"b", b"c")
    for n, text, reason in ((0, "", "length"), (1, "a", "length"), (3, "abc", "length"), (4, "abc", "stop")):
        completion = llm.generate(["?"], temperature=0, max_new_tokens=n)[0]
        assert (completion.text, completion.finish_reason, len(completion.tokens)) == (text, reason, len(text))


def test_empty_prompts_and_lists(stories: LLM) -> None:
    assert stories.generate([]) == []
    found = stories.generate(["", "Hello"], temperature=0, max_new_tokens=5)
    assert [c.prompt for c in found] == ["", "Hello"]
    assert all(len(c.tokens) == 5 for c in found)


def test_any_number_of_prompts_in_order_and_a_window_at_a_time() -> None:
    llm = tiny.says(b"?", b"a", b"b")
    taken = itertools.count()

    def prompts() -> Iterator[Prompt]:
        for n in range(1000):
            next(taken)
            yield Prompt("?" * (n % 7 + 1), Settings(temperature=0.0, max_new_tokens=n % 3))

    progress: list[int] = []
    results = llm.complete(prompts(), batch_size=4, progress=progress.append)
    first = next(results)
    assert next(taken) == 64  # of a thousand
    everything = [first, *results]
    assert [(len(c.prompt), c.text) for c in everything] == [(n % 7 + 1, "ab"[: n % 3]) for n in range(1000)]
    assert sum(progress) == 1000


@pytest.mark.parametrize("text", [None, b"a", 3, ["a"]])
def test_what_is_no_text_is_named(stories: LLM, text: Any) -> None:
    with pytest.raises(ValueError, match=r"the prompt .*: expected a text"):
        stories.generate([text])
    with pytest.raises(ValueError, match=r"the prompt .*: expected a text"):
        next(iter(stories.stream(text)))


def test_whoever_waits_for_an_answer_before_the_next_prompt_gets_it() -> None:
    llm = tiny.says(b"?", b"a", b"b")
    there: list[str] = ["?"]

    def prompts() -> Iterator[Prompt]:
        while there:
            yield Prompt(there.pop(), Settings(temperature=0.0))

    results = llm.complete(prompts(), batch_size=4, ready=lambda: bool(there))
    for n in range(1, 5):  # while nothing is there, nothing is asked for
        assert next(results).prompt == "?" * n
        there.append("?" * (n + 1))
    assert [c.text for c in results] == ["ab"]


def test_answers_before_a_faulty_prompt_come_first() -> None:
    llm = tiny.says(b"?", b"a", b"b")
    results = llm.complete([Prompt("?" * n) for n in (1, 2, 65, 1)], batch_size=2)
    assert [len(next(results).prompt), len(next(results).prompt)] == [1, 2]
    with pytest.raises(ValueError, match="66 tokens"):
        next(results)


def test_a_short_answer_does_not_wait_for_a_long_one() -> None:
    llm = tiny.says(b"?", *[bytes([97 + i]) for i in range(20)])
    lengths = [20, 1, 2, 1, 3, 1, 1, 2, 1, 20]
    prompts = [Prompt("?", Settings(temperature=0.0, max_new_tokens=n)) for n in lengths]
    before = llm.timings.decode_tokens
    found = list(llm.complete(prompts, batch_size=2))
    assert [len(c.tokens) for c in found] == lengths
    assert llm.timings.decode_tokens - before == sum(lengths) - len(lengths)  # the first are drawn with the prompts


def test_what_is_refused(stories: LLM) -> None:
    before = stories.timings.prompt_tokens
    with pytest.raises(ValueError, match=r"\d+ tokens.*512"):
        stories.generate(["fine", "word " * 600])
    with pytest.raises(ValueError, match="temperature"):
        stories.generate(["x"], temperature=-1)
    with pytest.raises(ValueError, match="single string"):
        stories.generate("x")
    with pytest.raises(ValueError, match="batch_size = 0"):
        stories.generate(["x"], batch_size=0)
    with pytest.raises(ValueError, match="Unicode"):
        stories.generate(["\udc80"])
    with pytest.raises(ValueError, match=r"512 .*97"):
        LLM(tiny.model("mha")[0], stories.tokenizer)
    assert stories.timings.prompt_tokens == before  # of all that was refused nothing was read


def test_the_full_context_can_be_used(stories: LLM) -> None:
    prompt = "a b" * 200
    n = len(stories.tokenizer.prompt_ids(prompt))
    completion = stories.generate([prompt], temperature=1.0, seed=3, top_p=1.0, max_new_tokens=10**6)[0]
    assert completion.finish_reason == "stop" or len(completion.tokens) + n == 512


def test_log_probabilities(stories: LLM) -> None:
    completion = stories.generate(["Once upon a time"], temperature=0, max_new_tokens=20)[0]
    ids = jnp.array([stories.tokenizer.prompt_ids("Once upon a time") + completion.tokens], jnp.int32)
    hidden, _ = forward(stories.params, init_cache(stories.params, *ids.shape), ids, jnp.zeros(1, jnp.int32))
    expected = jax.nn.log_softmax(head(stories.params, hidden))[0, -21:-1].max(-1)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_score_of_a_text() -> None:
    config = type(tiny.CONFIGS["mha"][0])(32, 64, 2, 4, 4, 30, 16)
    weights = oracle.random_weights(config, tied=False)
    weights["tok_embeddings.weight"][0] = np.nan  # which is in no text, but could be padding
    letters = tiny.Letters([b"", b"", b"", *[bytes([97 + i]) for i in range(26)], "é".encode()])
    llm = LLM(tiny.params(weights, config), letters)
    text = "the quick brown fox jumps over é".replace(" ", "") * 3
    ids = letters.encode(text)
    nats = 0.0
    best: list[int] = []
    for first in range(0, len(ids), 15):  # BOS takes one of the 16 places of each window
        window = np.array([1, *ids[first : first + 15]])
        logits = oracle.forward(weights, config, window)[:-1]
        nats -= sum(x[i] - np.log(np.exp(x).sum()) for x, i in zip(logits, window[1:], strict=True))
        best += logits.argmax(-1).tolist()
    score = llm.score(text)
    assert abs(score.perplexity - np.exp(nats / len(ids))) < 1e-3 * score.perplexity
    assert abs(score.bits_per_byte - nats / np.log(2) / len(text.encode())) < 1e-3
    assert score.best.tolist() == best
    with pytest.raises(ValueError, match="empty"):
        llm.score("")


def test_random_weights_of_a_config(shared: Path) -> None:
    folder = shared / "models/stories260K"
    config = Path(__file__).resolve().parents[1] / "configs/stories260K.toml"
    llm = LLM.load(config=config, tokenizer=folder / "tok512.bin")
    same = LLM.load(config=from_toml(config), tokenizer=folder)
    texts = [each.generate(["Once"], seed=1, max_new_tokens=5)[0].text for each in (llm, same)]
    assert texts[0] == texts[1]
    assert llm.dtype == "float32"
    with pytest.raises(ValueError, match="no tokenizer"):
        LLM.load(config=config)
    for both in ({}, {"path": folder / "stories260K.bin", "config": config}):
        with pytest.raises(ValueError, match="either a checkpoint or a config"):
            LLM.load(**both)


def test_chat_is_the_template_and_then_the_model() -> None:
    llm = tiny.says(b"a", b"b", b"c")
    with pytest.raises(ChatError, match="no chat template"):
        llm.chat([{"role": "user", "content": "a"}])
    template = Template("{% for m in messages %}{{ m.content }}{% endfor %}", llm.tokenizer)
    llm = LLM(llm.params, llm.tokenizer, template=template)
    messages = [{"role": "user", "content": "b"}, {"role": "user", "content": "a"}]
    answer = llm.chat(messages, temperature=0)
    assert (answer.prompt, answer.text, answer.finish_reason) == ("a", "bc", "stop")
    assert "".join(llm.stream_chat(messages, temperature=0)) == "bc"
    assert llm.generate(["ba"], temperature=0)[0].tokens == answer.tokens
    with pytest.raises(ValueError, match="66 tokens"):
        llm.chat([{"role": "user", "content": "a" * 65}])
    with pytest.raises(ChatError, match="role"):
        llm.chat(["hello"])


def test_keyword_arguments_are_the_fields_of_the_settings() -> None:
    assert set(Overrides.__annotations__) == set(Settings.__dataclass_fields__)


def test_load_finds_the_tokenizer_and_fits_it(shared: Path) -> None:
    folder = shared / "models/stories260K"
    with pytest.raises(ValueError, match=r"32000.*512"):
        LLM.load(folder / "stories260K.bin", tokenizer=shared / "models/llama2-tokenizer/tokenizer.bin")
    old = LLM.load(folder / "stories260K.bin", tokenizer=folder / "tok512_old.bin")
    assert LLAMA2C_TEST.startswith(old.generate([""], temperature=0, max_new_tokens=20)[0].text)
    with pytest.raises(ValueError, match="scores"):
        old.generate(["Once"])
    theta = LLM.load(folder / "stories260K.bin", rope_theta=1e6)
    assert theta.params.config.rope_theta == 1e6
    assert checkpoint.load(folder / "stories260K.bin").config.rope_theta == 1e4


def test_rows_that_no_token_stands_for_are_never_drawn() -> None:
    """A model padded to 8 rows beside a tokenizer of 6 tokens; the most probable token is one of the padding."""
    tokenizer = tiny.Letters([b"", b"", b"", b"a", b"b", b"c"])
    tokenizer.padded = True
    llm = LLM(tiny.chain([2, 2, 2, 7, 2, 2, 2, 2]), tokenizer)
    assert llm.generate(["a"], temperature=0.0)[0].tokens == [0]  # of those that are left, all alike, the first
    drawn = {i for c in llm.generate(["a"] * 40, temperature=1.0, top_p=1.0, max_new_tokens=1) for i in c.tokens}
    assert drawn
    assert max(drawn) < 6
