"""Let an engine answer thousands of requests that come, go and are broken off, and compare each with the answer alone.

  python tools/soak.py MODEL [--tokenizer=FILE] [--requests=2000] [--together=32] [--max_rows=8] [--dtype=float32]

Prompts have 1 to 400 tokens, half of them begin like others; answers have 1 to 200; a third are broken off at a random
moment. It fails where an answer differs, where memory grows after the first tenth, or where something is left behind.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time

from jllama import LLM, Completion, Prompt, Settings
from jllama.server.engine import Engine, Event, Failed, Finished, Job

_PREFIX_CACHE = 2**22  # small, so that much of it is given up
_GROWTH = 1.1  # of the memory, by which it may be more at the end than after a tenth


class Request:
    """A job, and what came of it."""

    def __init__(self, engine: Engine, slots: threading.Semaphore, ids: list[int], settings: Settings) -> None:
        self.job = Job(ids, settings, self._emit)
        self.leaves: int | None = None  # at this event
        self.events = 0
        self.found: Completion | None = None
        self.error: Exception | None = None
        self._engine = engine
        self._slots = slots

    def _emit(self, event: Event) -> None:
        self.events += 1
        if isinstance(event, Finished):
            self.found = event.completion
        elif isinstance(event, Failed):
            self.error = event.error
        elif self.leaves == self.events:
            self._engine.cancel(self.job)
        else:
            return
        self._slots.release()


def requests(engine: Engine, llm: LLM, slots: threading.Semaphore, count: int, seed: int) -> list[Request]:
    """Make requests at random."""
    rng = random.Random(seed)
    context, vocabulary = llm.params.config.max_seq_len, llm.params.config.vocab_size

    def ids(least: int, most: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(rng.randint(least, most))]

    beginnings = [ids(10, 300) for _ in range(20)]
    made = []
    for number in range(count):
        prompt = ids(1, 400)
        if rng.random() < 0.5:
            prompt = (rng.choice(beginnings) + prompt[: rng.randint(1, 100)])[:400]
        prompt = prompt[: context - 1]
        settings = Settings(
            max_new_tokens=rng.randint(1, 200),
            temperature=rng.choice([0.0, 0.8, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            seed=number,
        )
        made.append(Request(engine, slots, prompt, settings))
        if rng.random() < 1 / 3:
            made[-1].leaves = rng.randint(1, 3)
    return made


def memory() -> int:
    """Return the bytes that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Run the soak; returns how many things are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--together", type=int, default=32)
    parser.add_argument("--max_rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    llm = LLM.load(args.model, tokenizer=args.tokenizer, dtype=args.dtype, kernels=args.kernels)
    engine = Engine(llm, max_rows=args.max_rows, max_queue=args.together, prefix_cache=_PREFIX_CACHE)
    engine.start()
    programs, slots = engine.status.programs, threading.Semaphore(args.together)
    made, sizes, began = requests(engine, llm, slots, args.requests, args.seed), list[int](), time.monotonic()
    for request in made:
        slots.acquire()
        engine.submit(request.job)
        sizes.append(memory())
    for _ in range(args.together):
        slots.acquire()
    while engine.status.running or engine.status.waiting:
        time.sleep(0.01)
    print(f"{len(made)} requests in {time.monotonic() - began:.0f} s: {engine.status}")
    status = engine.status
    problems = []
    if status.programs != programs:
        problems.append(f"{status.programs - programs} programs were compiled")
    if status.cache_bytes or status.stored_bytes > _PREFIX_CACHE:
        problems.append(f"{status.cache_bytes} bytes of rows and {status.stored_bytes} of prompts are left")
    early = max(sizes[: len(sizes) // 10])
    print(f"memory: {early >> 20} MB in the first tenth, {max(sizes) >> 20} MB at most")
    if max(sizes) > _GROWTH * early:
        problems.append("memory has grown")
    engine.close()
    if engine.status.stored_bytes:
        problems.append(f"{engine.status.stored_bytes} bytes of prompts are left after the end")
    problems += [f"failed: {r.error}" for r in made if r.error is not None]
    whole = [r for r in made if r.found is not None]
    for request in whole:
        (alone,) = llm.generate([Prompt("", request.job.settings, tuple(request.job.ids))])
        found = request.found
        assert found is not None
        if (found.text, found.tokens, found.finish_reason) != (alone.text, alone.tokens, alone.finish_reason):
            problems.append(f"{len(request.job.ids)} ids, {request.job.settings}: another answer than alone")
    print(f"{len(whole)} whole answers compared; {len(problems)} problems", *problems[:20], sep="\n")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main() > 0)
