"""Runs cases in processes that may die, and counts how they end."""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fuzz.cases import WORK, judged, limit, load_seeds, make, write

TESTS = Path(__file__).resolve().parents[1]
SILENT = 60.0  # seconds after which a worker is given up
CHUNK = 100
RESTART = 4000  # cases of a worker
Chunk = tuple[str, int, int]  # format, first number, the one after the last
State = dict[str, Any]


def worker(out_fd: int) -> None:
    """Run chunks of cases, told on standard input as `format first end`, and report each in a line."""
    out = os.fdopen(out_fd, "w", buffering=1)
    seeds = load_seeds()
    folder = WORK / f"worker-{os.getpid()}" / "case"
    limit()
    print("ready", file=out)
    for line in sys.stdin:
        name, first, end = line.split()
        for number in range(int(first), int(end)):
            seed, files, done, rng = make(seeds, name, number)
            write(folder, files)
            print(json.dumps({"at": number}), file=out)
            verdict, seconds = judged(seed.run, folder, seed.entry, files, rng, cut=done == "cut", whole=seed.whole)
            print(json.dumps({"done": number, "how": done, "verdict": list(verdict), "s": round(seconds, 3)}), file=out)
            if verdict.kind in ("hang", "memory", "MemoryError"):  # its memory may be in pieces
                print(json.dumps({"bye": number}), file=out)
                return
        print(json.dumps({"chunk": name}), file=out)


class Worker:
    """A process that runs chunks; the one that it is given first is what another left when it died."""

    def __init__(self, rest: Chunk | None = None) -> None:
        self.fd, theirs = os.pipe()
        with open(WORK / "worker.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fuzz", "worker", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[theirs],
                text=True,
                cwd=WORK,
                env={**os.environ, "PYTHONPATH": str(TESTS)},
            )
        os.close(theirs)
        self.buffer = ""
        self.rest = rest
        self.todo: Chunk | None = None
        self.at: int | None = None  # the case that it is busy with
        self.heard = time.monotonic() + 60
        self.cases = 0
        self.is_done = False

    def give(self, chunk: Chunk | None) -> None:
        """Let it run a chunk; None: nothing is left."""
        self.todo, self.at, self.rest, self.is_done = chunk, None, None, chunk is None
        self.heard = time.monotonic()
        if chunk is not None:
            assert self.process.stdin is not None
            self.process.stdin.write(" ".join(map(str, chunk)) + "\n")
            self.process.stdin.flush()

    def lines(self) -> list[str] | None:
        """Return new lines, None at the end."""
        data = os.read(self.fd, 1 << 16)
        if not data:
            return None
        *found, self.buffer = (self.buffer + data.decode()).split("\n")
        return found

    def end(self) -> int:
        self.process.kill()
        code = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        os.close(self.fd)
        shutil.rmtree(WORK / f"worker-{self.process.pid}", ignore_errors=True)
        return code


def record(state: State, name: str, number: int, how: str, verdict: list[str], seconds: float) -> None:
    """Count a case; keep what is new."""
    kind, place, message = verdict
    counts = state["counts"].setdefault(name, {})
    counts["cases"] = counts.get("cases", 0) + 1
    good = kind in ("ok", "refused")
    counts[kind if good else "findings"] = counts.get(kind if good else "findings", 0) + 1
    if seconds > state["slowest"].get(name, [0])[0]:
        state["slowest"][name] = [seconds, number]
    if not good:
        new = {"count": 0, "formats": {}, "message": message, "how": how}
        found = state["findings"].setdefault(f"{kind} | {place}", new)
        found["count"] += 1
        found["formats"].setdefault(name, []).append(number)
        del found["formats"][name][20:]


def chunks(state: State, names: list[str], cases: int | None, past: Mapping[str, Iterable[int]]) -> Iterator[Chunk]:
    """Give those of the `past`, then chunks of all formats in turn, from where the state is: `cases` each, or on."""
    yield from ((name, number, number + 1) for name in names for number in past.get(name, ()))
    ends = {name: state["next"].get(name, 0) + cases for name in names} if cases is not None else {}
    while True:
        given = 0
        for name in names:
            first = state["next"].get(name, 0)
            end = min(first + CHUNK, ends.get(name, first + CHUNK))
            if first < end:
                state["next"][name] = end
                given += 1
                yield name, first, end
        if not given:
            return


def run(
    *,
    seconds: float,
    formats: list[str],
    workers: int,
    state: Path,
    cases: int | None,
    past: Mapping[str, Iterable[int]],
) -> State:
    """Give chunks to workers until the time is up, or `cases` of each format are done; return what was counted."""
    empty: State = {"counts": {}, "next": {}, "findings": {}, "slowest": {}, "seconds": 0}
    found = json.loads(state.read_text()) if state.exists() else empty
    todo = chunks(found, formats or list(load_seeds()), cases, past)
    began = time.monotonic()
    running = [Worker() for _ in range(workers)]
    while running and time.monotonic() - began < seconds:
        readable, _, _ = select.select([w.fd for w in running], [], [], 1.0)
        for i, w in enumerate(running):
            lines = w.lines() if w.fd in readable else []
            if lines is None:
                running[i] = _replaced(w, found, "crash: exit code {code}")
            elif not lines and time.monotonic() - w.heard > SILENT and w.fd not in readable:
                running[i] = _replaced(w, found, "hang, and no alarm heard")
            elif lines and not _heard(w, lines, found, todo):
                running[i] = _replaced(w, found, "")
        for w in [w for w in running if w.is_done]:
            w.end()
            running.remove(w)
    for w in running:
        w.end()
    found["seconds"] += time.monotonic() - began
    state.write_text(json.dumps(found, indent=1))
    return found


def _heard(w: Worker, lines: list[str], state: State, todo: Iterator[Chunk]) -> bool:
    """Take what a worker reports; False if it has to be replaced."""
    w.heard = time.monotonic()
    for line in lines:
        event = {"ready": True} if line == "ready" else json.loads(line)
        if "done" in event:
            assert w.todo is not None
            record(state, w.todo[0], event["done"], event["how"], event["verdict"], event["s"])
            w.todo, w.at = (w.todo[0], event["done"] + 1, w.todo[2]), None
            w.cases += 1
        elif "at" in event:
            w.at = event["at"]
        elif "bye" in event or ("chunk" in event and w.cases > RESTART):
            return False
        else:
            w.give(w.rest or next(todo, None))
    return True


def _replaced(w: Worker, state: State, kind: str) -> Worker:
    """End a worker; its last case is a finding of that `kind`, the rest of its chunk is another's."""
    rest, code = w.todo, w.end()
    if rest is not None and w.at is not None and kind:
        record(state, rest[0], w.at, "", [kind.format(code=code), rest[0], ""], SILENT)
        rest = (rest[0], w.at + 1, rest[2])
    return Worker(rest if rest is not None and rest[1] < rest[2] else None)
