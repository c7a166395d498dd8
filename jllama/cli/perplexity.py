"""`jllama perplexity`: how well a model predicts a text."""

from __future__ import annotations

import numpy as np

from jllama.cli import folders, output
from jllama.cli.flags import FLAGS
from jllama.cli.folders import expanded
from jllama.cli.loading import load, weights
from jllama.llm import LLM, Score
from jllama.prompts import standard_input


def main() -> None:
    """Print how well the model predicts a text, and how often it finds the same token best as in float32."""
    if bool(FLAGS.prompt_file) == bool(FLAGS.prompt):
        raise ValueError("perplexity scores one text: expected --prompt_file=text.txt or --prompt=...")
    text = "\n".join(FLAGS.prompt)
    if FLAGS.prompt_file:
        path = expanded(FLAGS.prompt_file)
        text = (standard_input().read() if FLAGS.prompt_file == "-" else path.read_bytes()).decode("utf-8-sig")
    llm, load_seconds = load()
    score = llm.score(text)
    _print_score(llm, score)
    output.timings(llm, load_seconds, verbose=FLAGS.verbose)
    tokenizer, dtype = llm.tokenizer, llm.dtype
    del llm  # a model in float32 may be all that there is room for
    if dtype != "float32":
        exact = LLM(weights("float32"), tokenizer, compile_cache=folders.for_programs(FLAGS.compile_cache))
        expected = exact.score(text)
        _print_score(exact, expected)
        print(f"greedy agreement with float32: {np.mean(score.best == expected.best):.2%}")


def _print_score(llm: LLM, score: Score) -> None:
    print(
        f"{llm.dtype}: perplexity {score.perplexity:.4f}, {score.bits_per_byte:.4f} bits a byte, "
        f"{len(score.best)} tokens in windows of {llm.window}"
    )
