"""The command line: flags and modes. The only place that prints."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags, logging
from tqdm import tqdm

from jllama import bench, checkpoint, config, prompts, report, tokenizer
from jllama.checkpoint import hub
from jllama.llm import LLM, Completion, Prompt, Score
from jllama.model import Params
from jllama.settings import Settings

FLAGS = flags.FLAGS


def _cache_folder() -> Path:
    """Return the user's cache folder; programs of another jaxlib can't be used, so each has its own."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "jllama" / f"jaxlib-{version('jaxlib')}"


# Each group is a paragraph of --help, in this order.
GROUPS: dict[str, list[flags.FlagHolder[Any]]] = {
    "What to run": [
        flags.DEFINE_enum(
            "mode", "generate", ["generate", "perplexity", "bench"], "continue prompts, score a text, or measure"
        ),
        flags.DEFINE_string(
            "checkpoint", None, "the model: a llama2.c .bin file, a Hugging Face folder, or hf://owner/name[@revision]"
        ),
        flags.DEFINE_string("tokenizer", None, "its tokenizer.model or .bin; unset: looked for beside the checkpoint"),
        flags.DEFINE_string("config", None, "a configs/*.toml: random weights of that size, in place of a checkpoint"),
        flags.DEFINE_enum(
            "dtype",
            "auto",
            ["auto", *checkpoint.DTYPES],
            "what to keep the weights in; auto: what the file stores; int8: fastest",
        ),
        flags.DEFINE_float("rope_theta", None, "base of the rotary frequencies, for models whose file can't tell it"),
    ],
    "Prompts": [
        flags.DEFINE_multi_string("prompt", [], "a text to continue; given several times, the answers are JSON lines"),
        flags.DEFINE_string(
            "prompt_file",
            None,
            "a prompt a line, answers are JSON lines; - is standard input; lines of a .jsonl file are objects with a "
            '"prompt" and any of the sampling flags; in mode perplexity, the text to score',
        ),
        flags.DEFINE_integer("batch_size", 8, "how many prompts share a step"),
        flags.DEFINE_bool("echo", True, "print a single prompt before what follows it; --noecho leaves it out"),
        flags.DEFINE_bool("logprobs", False, "answer in JSON lines, with the log-probability of each generated token"),
    ],
    "Sampling": [
        flags.DEFINE_integer("max_new_tokens", Settings.max_new_tokens, "the most tokens to generate for a prompt"),
        flags.DEFINE_float("temperature", Settings.temperature, "0: always the most probable token; 1: as trained"),
        flags.DEFINE_integer("top_k", Settings.top_k, "draw from the k most probable tokens; 0: off"),
        flags.DEFINE_float(
            "top_p", Settings.top_p, "draw from the fewest tokens with a total probability of p; 1: off"
        ),
        flags.DEFINE_float(
            "min_p", Settings.min_p, "draw from tokens with min_p times the largest probability; 0: off"
        ),
        flags.DEFINE_float("repetition_penalty", Settings.repetition_penalty, "above 1: repeat less; 1: off"),
        flags.DEFINE_integer("seed", None, "equal seed, equal text; unset: another text every time"),
        flags.DEFINE_multi_string("stop", [], "end the text before this string; may be given several times"),
    ],
    "Conversion": [
        flags.DEFINE_string("save", None, "write the model here, and stop"),
        flags.DEFINE_enum(
            "save_form", "llama2c", ["llama2c", "huggingface"], "a llama2.c file, or a folder with safetensors in it"
        ),
        flags.DEFINE_enum(
            "save_version", "0", ["0", "1", "2"], "of a llama2.c file: 0 float32; 1 with a magic; 2 int8 in groups"
        ),
    ],
    "Benchmark": [
        flags.DEFINE_integer("bench_prompt", 512, "tokens of a prompt", lower_bound=1),
        flags.DEFINE_integer("bench_new", 128, "tokens to generate", lower_bound=1),
        flags.DEFINE_list("bench_batches", ["1", "8", "32"], "numbers of rows"),
        flags.DEFINE_list("bench_dtypes", list(checkpoint.DTYPES), "of the weights"),
        flags.DEFINE_integer("bench_repeats", 5, "of each measurement, after one warm-up", lower_bound=1),
        flags.DEFINE_enum("bench_format", "table", ["table", "json", "csv"], "of the output"),
        flags.DEFINE_string("bench_plot", None, "draw the fractions of the bounds, and eager against compiled, here"),
    ],
    "Other": [
        flags.DEFINE_string(
            "compile_cache", str(_cache_folder()), "keep compiled programs here for the next start; empty: don't"
        ),
        flags.DEFINE_bool("help", False, "show this; --verbosity=1 shows where in the code an error came from"),
    ],
}

NO_MODEL = """\
no model given: --checkpoint=model.bin reads a llama2.c file, with its tokenizer.bin beside it (--help for all flags).
Small ones to begin with: stories15M.bin of karpathy/tinyllamas on Hugging Face, tokenizer.bin of karpathy/llama2.c."""


def run() -> None:
    """Run the command line and exit: 0 if all went well, 1 after an error, 130 after Ctrl-C."""
    sys.exit(main(sys.argv))


def main(argv: list[str]) -> int:
    """Run with these arguments and return the exit code."""
    try:
        if unexpected := FLAGS(argv)[1:]:
            raise ValueError(f"unexpected argument {unexpected[0]!r}: everything is a --flag=value")
        if FLAGS.compile_cache:
            jax.config.update("jax_compilation_cache_dir", FLAGS.compile_cache)  # type: ignore[no-untyped-call]
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # type: ignore[no-untyped-call]
        if FLAGS.help:
            print(usage())
        elif FLAGS.save:
            save()
        else:
            {"generate": generate, "perplexity": perplexity, "bench": benchmark}[FLAGS.mode]()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except (flags.Error, ValueError, OSError, FloatingPointError) as e:
        if logging.level_debug():
            traceback.print_exc()
        print(f"jllama: {e if str(e) == NO_MODEL else ' '.join(str(e).split())}", file=sys.stderr)
        return 1
    return 0


def usage() -> str:
    """Write the text of --help: every group of flags with defaults."""
    lines = ["jllama continues texts with Llama-family models, compiled by JAX. Everything is a --flag=value:"]
    for title, holders in GROUPS.items():
        lines += ["", f"{title}:"]
        for holder in holders:
            flag = FLAGS[holder.name]
            default = "" if flag.default in (None, [], "") else f"={(flag.default_as_str or '').strip(chr(39))}"
            choices = f" ({'|'.join(flag.parser.enum_values)})" if hasattr(flag.parser, "enum_values") else ""
            lines.append(f"  --{flag.name}{default}")
            lines += textwrap.wrap(flag.help + choices, 106, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def generate() -> None:
    """Continue the prompts: one as a stream of text, several as JSON lines."""
    if FLAGS.prompt and FLAGS.prompt_file:
        raise ValueError("--prompt and --prompt_file: expected one of the two")
    settings = Settings(**{f.name: getattr(FLAGS, f.name) for f in dataclasses.fields(Settings)})
    llm, load_seconds = _load()
    try:
        if FLAGS.prompt_file:
            _print_file(llm, settings)
        elif len(FLAGS.prompt) > 1 or FLAGS.logprobs:
            requests = [Prompt(text, settings) for text in FLAGS.prompt or [""]]
            for request in requests:
                llm.encode(request)
            _print_json(llm, iter(requests), len(requests))
        else:
            _print_stream(llm, Prompt("".join(FLAGS.prompt), settings))
    except KeyboardInterrupt:
        _report(llm, load_seconds)
        raise
    _report(llm, load_seconds)


def _print_file(llm: LLM, settings: Settings) -> None:
    """Answer the prompts of a file; a fault in any line comes up before work on the first begins."""
    count = None
    if FLAGS.prompt_file != "-":  # standard input can be read only once
        count = sum(1 for _ in prompts.read(FLAGS.prompt_file, settings, llm.encode))
    _print_json(llm, prompts.read(FLAGS.prompt_file, settings, llm.encode), count)


def _print_json(llm: LLM, requests: Iterator[Prompt], count: int | None) -> None:
    """Print one JSON line a prompt, in order, those of a window as soon as it is done."""
    with tqdm(total=count, unit=" prompts", file=sys.stderr, disable=None) as bar:
        for completion in llm.complete(requests, batch_size=FLAGS.batch_size, progress=bar.update):
            tqdm.write(_json(completion), file=sys.stdout)
            sys.stdout.flush()


def _json(completion: Completion) -> str:
    fields: dict[str, Any] = {
        "prompt": completion.prompt,
        "text": completion.text,
        "tokens": len(completion.tokens),
        "finish_reason": completion.finish_reason,
    }
    if FLAGS.logprobs:
        fields["logprobs"] = completion.logprobs
    return json.dumps(fields, ensure_ascii=False)


def _print_stream(llm: LLM, prompt: Prompt) -> None:
    """Print a prompt and what follows it as it is generated."""
    pieces = llm.stream(prompt)
    if FLAGS.echo:
        print(prompt.text, end="", flush=True)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)


def perplexity() -> None:
    """Print how well the model predicts a text, and how often it finds the same token best as in float32."""
    if bool(FLAGS.prompt_file) == bool(FLAGS.prompt):
        raise ValueError("--mode=perplexity scores one text: expected --prompt_file=text.txt or --prompt=...")
    text = "\n".join(FLAGS.prompt)
    if FLAGS.prompt_file:
        raw = sys.stdin.buffer.read() if FLAGS.prompt_file == "-" else Path(FLAGS.prompt_file).read_bytes()
        text = raw.decode("utf-8-sig")
    llm, load_seconds = _load()
    score = llm.score(text)
    _print_score(llm, score)
    if llm.dtype != "float32":
        exact = LLM(_params("float32"), llm.tokenizer)
        expected = exact.score(text)
        _print_score(exact, expected)
        print(f"greedy agreement with float32: {np.mean(score.best == expected.best):.2%}")
    _report(llm, load_seconds)


def _print_score(llm: LLM, score: Score) -> None:
    print(
        f"{llm.dtype}: perplexity {score.perplexity:.4f}, {score.bits_per_byte:.4f} bits a byte, "
        f"{len(score.best)} tokens in windows of {llm.window}"
    )


def benchmark() -> None:
    """Measure the model and print the report."""
    _check_source()
    wrong = [x for x in FLAGS.bench_batches if not (x.isdecimal() and int(x) > 0)]
    if wrong or not FLAGS.bench_batches:
        raise ValueError(f"bench_batches = {','.join(FLAGS.bench_batches)}: expected numbers of 1 or more")
    if not FLAGS.bench_dtypes or not set(FLAGS.bench_dtypes) <= set(checkpoint.DTYPES):
        raise ValueError(
            f"bench_dtypes = {','.join(FLAGS.bench_dtypes)}: expected some of {', '.join(checkpoint.DTYPES)}"
        )
    with tqdm(file=sys.stderr, disable=None, bar_format="measuring {desc}, {elapsed}") as bar:
        result = bench.run(
            _params,
            prompt=FLAGS.bench_prompt,
            new=FLAGS.bench_new,
            batches=[int(x) for x in FLAGS.bench_batches],
            dtypes=FLAGS.bench_dtypes,
            repeats=FLAGS.bench_repeats,
            progress=bar.set_description_str,
        )
    if FLAGS.bench_plot:
        report.plot(result, Path(FLAGS.bench_plot))
    if FLAGS.bench_format == "json":
        print(json.dumps(dataclasses.asdict(result)))
    else:
        print({"table": report.table, "csv": report.to_csv}[FLAGS.bench_format](result))


def save() -> None:
    """Convert the model; from float32 where no other dtype is asked for, so that nothing is lost."""
    _check_source()
    dtype = "float32" if FLAGS.dtype == "auto" else FLAGS.dtype
    checkpoint.save(_params(dtype), FLAGS.save, form=FLAGS.save_form, version=int(FLAGS.save_version))
    print(f"jllama: wrote {FLAGS.save}", file=sys.stderr)


def _load() -> tuple[LLM, float]:
    """Load the model and its tokenizer, and say how many seconds it took."""
    began = time.perf_counter()
    _check_source()
    if FLAGS.config and not FLAGS.tokenizer:
        raise ValueError("--config makes random weights, which bring no tokenizer: expected --tokenizer too")
    path = Path(FLAGS.tokenizer) if FLAGS.tokenizer else tokenizer.find(hub.local(FLAGS.checkpoint))
    llm = LLM(_params(FLAGS.dtype), tokenizer.load(path))
    jax.block_until_ready(llm.params)  # type: ignore[no-untyped-call]
    return llm, time.perf_counter() - began


def _check_source() -> None:
    if not (FLAGS.config or FLAGS.checkpoint):
        raise ValueError(NO_MODEL)
    if FLAGS.config and FLAGS.checkpoint:
        raise ValueError("--checkpoint and --config: expected one of the two")


def _params(dtype: str) -> Params:
    if FLAGS.config:
        sizes, tied = config.from_toml(FLAGS.config)
        return checkpoint.random(sizes, dtype="float32" if dtype == "auto" else dtype, tied=tied)
    return checkpoint.load(FLAGS.checkpoint, dtype=dtype, rope_theta=FLAGS.rope_theta)


def _report(llm: LLM, load_seconds: float) -> None:
    """Say on standard error where the time went."""
    t = llm.timings
    print(
        f"load {load_seconds:.2f} s, compile {t.compile_seconds:.2f} s, "
        f"prompt {_rate(t.prompt_tokens, t.prompt_seconds)}, generation {_rate(t.decode_tokens, t.decode_seconds)}",
        file=sys.stderr,
    )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds if seconds else 0:.1f} tokens/s)"
