"""Cases: made from a format and a number alone, written into a folder, run under an alarm and judged."""

import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path

import jax

from fuzz import oracles
from fuzz.damage import DAMAGE
from fuzz.seeds import SEEDS, Seed

WORK = Path(os.environ.get("FUZZ_WORK", Path(tempfile.gettempdir()) / "jllama-fuzz"))
SECONDS = 5.0  # of processor time that a case may take, beside those for the size of its files
BYTES_A_SECOND = 2_000_000
MOST = 8_000_000  # bytes of a file
ROOM = 3 << 30  # bytes of address space over those of a worker at its start
GROWN = 192 << 20  # bytes by which the peak of memory may grow in a case, beside GROWN_TIMES the size of its files
GROWN_TIMES = 100


def load_seeds() -> dict[str, list[Seed]]:
    """The seeds, the same in every run."""
    file = WORK / "seeds.pkl"
    if not file.exists():
        WORK.mkdir(exist_ok=True, parents=True)
        made = {name: make() for name, make in SEEDS.items()}
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(made))
        os.replace(part, file)
    return pickle.loads(file.read_bytes())


def make(all_seeds: dict[str, list], name: str, number: int):
    """A case: its seed, the files, and what was done to them."""
    rng = random.Random(f"{name}/{number}")
    seed = rng.choice(all_seeds[name])
    files, done = dict(seed.files), ""
    for file, mutator in seed.damage.items():
        files[file], done = DAMAGE[mutator](files[file], rng)
        files[file] = files[file][:MOST]
    if done == "cut":
        off = b"".join(good[len(files[name]) :] for name, good in seed.files.items())
        is_padding = seed.entry.endswith(".gguf") and len(off) < 32 and not any(off)  # after the last tensor
        done = "same" if is_padding or not off else "cut"
    return seed, files, done, rng


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write a case into a folder, in place of what is there."""
    for old in list(folder.iterdir()) if folder.exists() else ():
        if old.name not in files:
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    folder.mkdir(exist_ok=True, parents=True)
    for name, data in files.items():
        # A new file each time: the maps of an earlier case may still be open.
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(data)


def limit() -> None:
    """Bound the memory of this process, and let an alarm end a case."""
    jax.block_until_ready(jax.device_put([0.0]))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def ring(*_: object) -> None:
        raise oracles.Hang

    signal.signal(signal.SIGPROF, ring)


def judged(
    run: str, folder: Path, entry: str, files: dict[str, bytes], rng: random.Random, *, cut: bool, whole: bool
) -> tuple[oracles.Verdict, float]:
    """Run one case under the alarm; a peak of memory that grew too far is a finding of its own."""
    size = sum(map(len, files.values()))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    signal.setitimer(signal.ITIMER_PROF, SECONDS + size / BYTES_A_SECOND)
    try:
        verdict = oracles.run(run, folder / entry if entry else folder, rng, size, cut=cut, whole=whole)
    except oracles.Hang:  # between the end and the disarming
        verdict = oracles.Verdict("hang", "late")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > GROWN + GROWN_TIMES * size and verdict.kind in ("ok", "refused"):
        verdict = oracles.Verdict(
            "memory", f"{run}: {verdict.kind} {verdict.place}", f"{grown >> 20} MB more for {size} bytes of files"
        )
    return verdict, time.perf_counter() - began
