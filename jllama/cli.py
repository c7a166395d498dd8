"""The command line: flags and modes. The only place that prints."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags, logging
from tqdm import tqdm

from jllama import bench, chat, checkpoint, config, mesh, plan, processes, prompts, report, results, tokenizer
from jllama.checkpoint import hub
from jllama.checkpoint.files import replacing
from jllama.flags import FLAGS, usage
from jllama.generation import Completion, Prompt
from jllama.llm import LLM, Score, check_batch_size
from jllama.model import Params
from jllama.prompts import standard_input
from jllama.run import choose
from jllama.session import Session
from jllama.settings import Settings

CHAT_HELP = "/reset forgets the conversation, /system TEXT begins anew with that, /save FILE writes it, /exit leaves"


def run() -> None:
    """Run the command line and exit: 0 if all went well, 1 after an error, 130 after Ctrl-C."""
    code = main(sys.argv)
    # A compilation that was broken off may still run on other threads, which an orderly exit would crash. And such an
    # exit waits for the other processes, which after an error wait for this one.
    if code == 130 or (code and jax.distributed.is_initialized()):
        os._exit(code)
    sys.exit(code)


def main(argv: list[str]) -> int:
    """Run with these arguments and return the exit code."""
    if sys.stdout is None:
        print("jllama: standard output is closed: expected somewhere to write to", file=sys.stderr)
        return 1
    try:
        if unexpected := FLAGS(argv)[1:]:
            raise ValueError(f"unexpected argument {unexpected[0]!r}: everything is a --flag=value")
        if FLAGS.compile_cache and (FLAGS.mesh or FLAGS.mode == "bench"):  # which keep no programs by themselves
            jax.config.update("jax_compilation_cache_dir", FLAGS.compile_cache)  # type: ignore[no-untyped-call]
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # type: ignore[no-untyped-call]
        if FLAGS.help:
            print(usage())
        elif FLAGS.save:
            save()
        else:
            modes = {
                "generate": generate,
                "chat": talk,
                "perplexity": perplexity,
                "bench": benchmark,
                "plan": show_plan,
            }
            modes[FLAGS.mode]()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except (flags.Error, ValueError, OSError, FloatingPointError) as e:
        if logging.level_debug():
            traceback.print_exc()
        print(f"jllama: {' '.join(str(e).split())}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as e:
        if jax.process_count() == 1:
            raise
        print(f"jllama: another process ended, or can't be reached: {' '.join(str(e).split())}", file=sys.stderr)
        return 1
    return 0


def generate() -> None:
    """Continue the prompts: one as a stream of text, several as JSON lines."""
    if FLAGS.prompt and FLAGS.prompt_file:
        raise ValueError("--prompt and --prompt_file: expected one of the two")
    if FLAGS.resume and not (FLAGS.output and FLAGS.prompt_file):
        raise ValueError("--resume goes on with the answers to a --prompt_file in --output: expected both")
    if FLAGS.output:
        results.check(Path(FLAGS.output), resume=FLAGS.resume)
    settings = _settings()
    llm, load_seconds = _load()
    try:
        if FLAGS.prompt_file:
            _print_file(llm, settings)
        elif len(FLAGS.prompt) > 1 or FLAGS.logprobs or FLAGS.output:
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


def _settings() -> Settings:
    return Settings(**{field.name: getattr(FLAGS, field.name) for field in dataclasses.fields(Settings)})


def _print_file(llm: LLM, settings: Settings) -> None:
    """Answer the prompts of a file; a fault in any line comes up before work on the first begins."""

    def read() -> Iterator[Prompt]:
        return prompts.read(FLAGS.prompt_file, settings, llm.encode)

    is_file = Path(FLAGS.prompt_file).is_file()  # pipes can be read only once
    if not is_file and (FLAGS.resume or jax.process_count() > 1):
        raise ValueError(f"{FLAGS.prompt_file}: expected a regular file, to be read several times")
    count = sum(1 for _ in read()) if is_file else None
    done = _count_results(llm, read()) if FLAGS.resume else 0
    _print_json(llm, itertools.islice(read(), done, None), count, done)


def _count_results(llm: LLM, requests: Iterator[Prompt]) -> int:
    """Count the answers that are there already. The first process looks, and the others take its word."""
    done, fault = 0, None
    if jax.process_index() == 0:
        try:
            done = results.count(Path(FLAGS.output), requests, _fields())
        except (ValueError, OSError) as e:
            done, fault = -1, e
    done = int(llm.runner.agree(np.int32(done)))
    if done < 0:
        raise fault or ValueError(f"{FLAGS.output}: the first process can't go on with it")
    return done


def _print_json(llm: LLM, requests: Iterator[Prompt], count: int | None, done: int = 0) -> None:
    """Write one JSON line a prompt, in order, those of a window as soon as it is done."""
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=count, initial=done, unit=" prompts", file=sys.stderr, disable=None))
        path = FLAGS.output if jax.process_index() == 0 else os.devnull
        file = stack.enter_context(open(path, "ab")) if FLAGS.output else None
        for completion in llm.complete(requests, batch_size=FLAGS.batch_size, progress=bar.update):
            line = json.dumps({name: value(completion) for name, value in _fields().items()}, ensure_ascii=False)
            if file is None:
                tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()
            else:
                file.write(f"{line}\n".encode())
                file.flush()


def _fields() -> dict[str, Callable[[Completion], Any]]:
    """Return what a JSON line says of a completion."""
    fields: dict[str, Callable[[Completion], Any]] = {
        "prompt": lambda completion: completion.prompt,
        "text": lambda completion: completion.text,
        "tokens": lambda completion: len(completion.tokens),
        "finish_reason": lambda completion: completion.finish_reason,
    }
    return fields | ({"logprobs": lambda completion: completion.logprobs} if FLAGS.logprobs else {})


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


def talk() -> None:
    """Answer questions from standard input until it ends, with the conversation in mind."""
    if FLAGS.coordinator:
        raise ValueError("--mode=chat reads from one terminal: expected no --coordinator")
    settings = _settings()
    llm, load_seconds = _load()
    path = Path(FLAGS.tokenizer) if FLAGS.config else hub.local(FLAGS.checkpoint)
    session = Session(llm, chat.find_template(path, llm.tokenizer), FLAGS.system_prompt, settings)
    interactive = standard_input().isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # absent on Windows
            import readline  # noqa: F401  # gives input() line editing and a history
        print(CHAT_HELP, file=sys.stderr)
    while (line := _read_line(interactive)) is not None and line.strip() != "/exit":
        try:
            if line.startswith("/"):
                _command(session, *line.strip().split(maxsplit=1))
            elif line.strip():
                _answer(session, line)
        except (ValueError, OSError) as e:
            if not interactive:
                raise
            print(f"jllama: {' '.join(str(e).split())}", file=sys.stderr)
    _report(llm, load_seconds)


def _read_line(interactive: bool) -> str | None:
    """Return the next question, None at the end of input."""
    if not interactive:
        return line.rstrip("\r\n") if (line := sys.stdin.readline()) else None
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n/exit or the end of input (Ctrl-D) leaves", file=sys.stderr)


def _answer(session: Session, question: str) -> None:
    """Print an answer as it comes; Ctrl-C ends it."""
    pieces = session.ask(question)
    started = False
    try:
        for piece in pieces:
            if not started and session.dropped:
                print(f"jllama: the context is full: the oldest {session.dropped} turns are forgotten", file=sys.stderr)
            text = piece if started else piece.lstrip()
            started = started or bool(text)
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()
    print(flush=True)


def _command(session: Session, name: str, argument: str = "") -> None:
    if name == "/reset":
        session.reset()
    elif name == "/system":
        session.reset(argument)
    elif name == "/save" and argument:
        with replacing(Path(argument)) as file:
            file.write(json.dumps(session.conversation.messages(), ensure_ascii=False, indent=2).encode() + b"\n")
        print(f"jllama: wrote {argument}", file=sys.stderr)
    else:
        print(f"jllama: {name} is none of the commands: {CHAT_HELP}", file=sys.stderr)


def perplexity() -> None:
    """Print how well the model predicts a text, and how often it finds the same token best as in float32."""
    if bool(FLAGS.prompt_file) == bool(FLAGS.prompt):
        raise ValueError("--mode=perplexity scores one text: expected --prompt_file=text.txt or --prompt=...")
    text = "\n".join(FLAGS.prompt)
    if FLAGS.prompt_file:
        raw = standard_input().read() if FLAGS.prompt_file == "-" else Path(FLAGS.prompt_file).read_bytes()
        text = raw.decode("utf-8-sig")
    llm, load_seconds = _load()
    score = llm.score(text)
    _print_score(llm, score)
    if llm.dtype != "float32":
        exact = LLM(_params("float32"), llm.tokenizer, compile_cache=FLAGS.compile_cache)
        expected = exact.score(text)
        _print_score(exact, expected)
        print(f"greedy agreement with float32: {np.mean(score.best == expected.best):.2%}")
    _report(llm, load_seconds)


def _print_score(llm: LLM, score: Score) -> None:
    print(
        f"{llm.dtype}: perplexity {score.perplexity:.4f}, {score.bits_per_byte:.4f} bits a byte, "
        f"{len(score.best)} tokens in windows of {llm.window}"
    )


def show_plan() -> None:
    """Print what the model would need on a mesh that need not be here."""
    _check_source()
    shape = mesh.parse(FLAGS.mesh) if FLAGS.mesh else mesh.Shape()
    check_batch_size(FLAGS.batch_size)
    if FLAGS.config:
        contents = checkpoint.random_contents(config.from_toml(FLAGS.config))
    else:
        contents = checkpoint.read(FLAGS.checkpoint)
    dtype = contents.dtype if FLAGS.dtype == "auto" else FLAGS.dtype
    devices: Sequence[plan.Device] = plan.DEVICES
    if FLAGS.memory is not None:
        if not 0 < FLAGS.memory < 1e6:
            raise ValueError(f"memory = {FLAGS.memory:g}: expected GB of a device")
        devices = [device._replace(memory=FLAGS.memory * 1e9) for device in devices]
    found = plan.plan(contents, dtype, shape, FLAGS.batch_size, devices, kv_dtype=FLAGS.kv_dtype)
    model = Path(FLAGS.config or FLAGS.checkpoint).stem
    title = f"{model} in {dtype} on data:{shape.data},model:{shape.model}, a batch of {FLAGS.batch_size}"
    print(plan.table(found, title))


def benchmark() -> None:
    """Measure the model and print the report."""
    _check_source()
    _expect_one_device("--mode=bench")
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
    _expect_one_device("--save")
    dtype = "float32" if FLAGS.dtype == "auto" else FLAGS.dtype
    checkpoint.save(_params(dtype), FLAGS.save, form=FLAGS.save_form, version=int(FLAGS.save_version))
    print(f"jllama: wrote {FLAGS.save}", file=sys.stderr)


def _load() -> tuple[LLM, float]:
    """Load the model and its tokenizer, and say how many seconds it took."""
    began = time.perf_counter()
    _check_source()
    _connect()
    if FLAGS.config and not FLAGS.tokenizer:
        raise ValueError("--config makes random weights, which bring no tokenizer: expected --tokenizer too")
    path = Path(FLAGS.tokenizer) if FLAGS.tokenizer else tokenizer.find(hub.local(FLAGS.checkpoint))
    llm = LLM(_params(FLAGS.dtype), tokenizer.load(path), compile_cache=FLAGS.compile_cache)
    jax.block_until_ready(llm.params)  # type: ignore[no-untyped-call]
    return llm, time.perf_counter() - began


def _check_source() -> None:
    if not FLAGS.checkpoint:
        raise ValueError("--checkpoint is empty: expected a file, a folder, or one of the names in --help")
    if FLAGS.config and FLAGS["checkpoint"].present:
        raise ValueError("--checkpoint and --config: expected one of the two")
    if FLAGS["checkpoint"].present and FLAGS.checkpoint in hub.NAMES and os.path.exists(FLAGS.checkpoint):
        logging.warning("%s is a model's name; the file or folder here is ./%s", FLAGS.checkpoint, FLAGS.checkpoint)


def _expect_one_device(what: str) -> None:
    if FLAGS.mesh or FLAGS.coordinator:
        raise ValueError(f"{what} uses one device: expected neither --mesh nor --coordinator")


def _connect() -> None:
    """Join the other processes of this run, if there are any. Only the first writes to standard output."""
    if not processes.connect(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id):
        return
    # Libraries below print there too (Gloo does): what they print goes to standard error.
    sys.stdout.flush()
    out = os.dup(sys.stdout.fileno()) if jax.process_index() == 0 else os.open(os.devnull, os.O_WRONLY)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = open(out, "w", encoding=sys.stdout.encoding)  # noqa: SIM115  # it stays until the end
    if not FLAGS.mesh:
        raise ValueError(f"--mesh is missing: expected one of {jax.device_count()} devices, those of all processes")


def _params(dtype: str) -> Params:
    on = mesh.make_mesh(FLAGS.mesh) if FLAGS.mesh else None
    run = choose(FLAGS.kernels, FLAGS.kv_dtype, on_mesh=on is not None)
    if FLAGS.config:
        dtype = "float32" if dtype == "auto" else dtype
        return checkpoint.random(config.from_toml(FLAGS.config), dtype=dtype, run=run, mesh=on)
    return checkpoint.load(FLAGS.checkpoint, dtype=dtype, rope_theta=FLAGS.rope_theta, run=run, mesh=on)


def _report(llm: LLM, load_seconds: float) -> None:
    """Say on standard error where the time went."""
    if jax.process_index():
        return
    t = llm.timings
    phases = [("prompt", t.prompt_tokens, t.prompt_seconds), ("generation", t.decode_tokens, t.decode_seconds)]
    rates = [f"{name} {_rate(tokens, seconds)}" for name, tokens, seconds in phases if seconds]
    print(", ".join([f"load {load_seconds:.2f} s", f"compile {t.compile_seconds:.2f} s", *rates]), file=sys.stderr)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)"
