"""`jllama run`: continue a prompt as a stream of text, or several as JSON lines."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jllama import prompts, results
from jllama.cli import output
from jllama.cli.flags import FLAGS
from jllama.cli.folders import expanded
from jllama.cli.loading import load
from jllama.cli.settings import from_flags
from jllama.cli.status import waiting
from jllama.generation import Completion, Prompt
from jllama.llm import LLM
from jllama.prompts import Arriving, Request
from jllama.settings import Settings


def main() -> None:
    """Continue the prompts."""
    _check()
    settings = from_flags()
    llm, load_seconds = load()
    try:
        if FLAGS.prompt_file:
            _print_file(llm, settings)
        elif _is_stream():
            _print_stream(llm, Prompt("".join(FLAGS.prompt), settings))
        else:
            texts = FLAGS.prompt or [""]
            requests = [Request(prompt) for text in texts for prompt in Prompt(text, settings).variants(FLAGS.n)]
            for request in requests:
                llm.encode(request.prompt)
            _print_json(llm, iter(requests), len(requests))
    except KeyboardInterrupt:
        output.timings(llm, load_seconds, verbose=FLAGS.verbose)
        raise
    output.timings(llm, load_seconds, verbose=FLAGS.verbose)


def _check() -> None:
    if FLAGS.prompt and FLAGS.prompt_file:
        raise ValueError("pass either a prompt or --prompt_file, not both")
    if FLAGS.resume and not (FLAGS.output and FLAGS.prompt_file):
        raise ValueError("--resume continues the answers to a --prompt_file in --output: expected both")
    if FLAGS["echo"].present and not _is_stream():
        raise ValueError("--echo is for a single prompt as text: JSON lines hold the prompt anyway")
    if FLAGS.output:
        results.check(expanded(FLAGS.output), resume=FLAGS.resume)


def _is_stream() -> bool:
    several = len(FLAGS.prompt) > 1 or FLAGS.n != 1
    return not (FLAGS.prompt_file or several or FLAGS.logprobs or FLAGS.top_logprobs or FLAGS.output)


def _print_file(llm: LLM, settings: Settings) -> None:
    """Answer the prompts of a file; a fault in any line comes up before work on the first begins."""
    path = str(expanded(FLAGS.prompt_file))

    def read() -> Iterator[Request]:
        for request in prompts.read(path, settings, llm.encode):
            for prompt in request.prompt.variants(FLAGS.n):
                yield request._replace(prompt=prompt)

    is_file = Path(path).is_file()  # pipes can be read only once
    if not is_file and (FLAGS.resume or jax.process_count() > 1):
        raise ValueError(f"{path}: expected a regular file, to be read several times")
    count = sum(1 for _ in read()) if is_file else None
    done = _count_results(llm, read()) if FLAGS.resume else 0
    requests = itertools.islice(read(), done, None)
    if is_file:
        _print_json(llm, requests, count, done)
    else:
        arriving = Arriving(requests)  # whoever writes one prompt and waits for its answer gets it
        _print_json(llm, arriving, count, done, ready=arriving.ready)


def _count_results(llm: LLM, requests: Iterator[Request]) -> int:
    """Count the answers that are there already. The first process looks, and the others take its word."""
    done, fault = 0, None
    if jax.process_index() == 0:
        try:
            done = results.count(expanded(FLAGS.output), requests, _fields())
        except (ValueError, OSError) as e:
            done, fault = -1, e
    done = int(llm.runner.agree(np.int32(done)))
    if done < 0:
        raise fault or ValueError(f"{FLAGS.output}: the first process can't continue it")
    return done


def _print_json(
    llm: LLM,
    requests: Iterator[Request],
    count: int | None,
    done: int = 0,
    ready: Callable[[], bool] = lambda: True,
) -> None:
    """Write one JSON line a prompt, in order, as soon as there are answers."""
    from tqdm import tqdm

    ids: collections.deque[str | int | None] = collections.deque()

    def taken() -> Iterator[Prompt]:
        for request in requests:
            ids.append(request.id)
            yield request.prompt

    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=count, initial=done, unit=" prompts", file=sys.stderr, disable=None))
        file = None
        if FLAGS.output:
            path = expanded(FLAGS.output) if jax.process_index() == 0 else os.devnull
            file = stack.enter_context(open(path, "ab"))
        for completion in llm.complete(taken(), batch_size=FLAGS.batch_size, ready=ready, progress=bar.update):
            given = {} if (name := ids.popleft()) is None else {"id": name}
            answer = given | {field: value(completion) for field, value in _fields().items()}
            if completion.top_logprobs:  # a line of a file may ask for them
                answer["top_logprobs"] = completion.top_logprobs
            if file is None:
                tqdm.write(output.json_line(answer), file=sys.stdout)
                sys.stdout.flush()
            else:
                file.write(results.line(answer))
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
    try:
        with waiting("reading the prompt"):
            first = next(pieces, "")
        output.write((prompt.text if FLAGS.echo else "") + first)
        for piece in pieces:
            output.write(piece)
    finally:
        print(flush=True)
