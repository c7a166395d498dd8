"""The fuzzer's commands.

run --seconds 480 [--formats gguf_model,meta_pth] [--workers 2] [--state state.json]
    goes on from the numbers in the state file; a case is known by its format and number, and comes again from them
case FORMAT NUMBER [--save FOLDER]      runs one case here, with its traceback
minimise FORMAT NUMBER FOLDER           makes the file smaller while it fails alike, and saves it
report [--state state.json]
"""

import argparse
import json
import os
import shutil
import signal
import time
import traceback
from pathlib import Path

from fuzz import oracles, workers
from fuzz.cases import SECONDS, WORK, judged, limit, load_seeds, make, write
from fuzz.past import PAST


def report(args: argparse.Namespace) -> None:
    """Print the counts and the findings."""
    state = json.loads(Path(args.state).read_text())
    total = sum(c["cases"] for c in state["counts"].values())
    print(f"{total} cases in {state['seconds']:.0f} s")
    print(f"{'format':24}{'cases':>9}{'ok':>9}{'refused':>9}{'findings':>9}  slowest")
    for name, c in sorted(state["counts"].items()):
        slow = state["slowest"].get(name, [0, 0])
        numbers = (c.get(kind, 0) for kind in ("cases", "ok", "refused", "findings"))
        print(f"{name:24}{''.join(f'{n:9}' for n in numbers)}  {slow[0]:.2f} s (case {slow[1]})")
    for key, found in sorted(state["findings"].items(), key=lambda item: -item[1]["count"]):
        where = ", ".join(f"{n} {numbers[0]}" for n, numbers in found["formats"].items())
        print(f"\n[{found['count']}] {key}\n    {found['message'][:260]}\n    {where}")


def one(args: argparse.Namespace) -> None:
    """Run one case here."""
    seed, files, done, rng = make(load_seeds(), args.format, args.number)
    folder = Path(args.save) if args.save else WORK / f"one-{os.getpid()}"
    write(folder, files)
    print(f"{done}; files in {folder}; changed: {[n for n in files if files[n] != seed.files[n]]}")
    limit()
    state = rng.getstate()
    print(*judged(seed.run, folder, seed.entry, files, rng, cut=done == "cut", whole=seed.whole), sep="\n")
    rng.setstate(state)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        oracles.RUNS[seed.run](folder / seed.entry if seed.entry else folder, rng, sum(map(len, files.values())))
    except BaseException:
        text = traceback.format_exc()
        print(text if len(text) < 6000 else text[:2500] + "\n...\n" + text[-2500:])


def minimise(args: argparse.Namespace) -> None:
    """Leave out parts of the damaged file, and put back those of the good one, while it fails alike."""
    seed, files, done, rng = make(load_seeds(), args.format, args.number)
    folder, state = WORK / f"minimise-{os.getpid()}" / "case", rng.getstate()
    limit()

    def verdict(trial: dict[str, bytes]):
        write(folder, trial)
        rng.setstate(state)
        v, _ = judged(seed.run, folder, seed.entry, trial, rng, cut=done == "cut", whole=seed.whole)
        return v.kind, v.place

    wanted, end = verdict(files), time.monotonic() + args.seconds
    for name in [n for n in files if files[n] != seed.files[n]]:
        data, size = files[name], max(len(files[name]) // 2, 1)
        while size and time.monotonic() < end:
            at, smaller = 0, False
            while at < len(data) and time.monotonic() < end:
                trial = data[:at] + data[at + size :]
                if verdict({**files, name: trial}) == wanted:
                    data, smaller = trial, True
                else:
                    at += size
            size = size if smaller and size < len(data) // 2 else size // 2
        files[name] = data
    target = Path(args.folder)
    shutil.rmtree(target, ignore_errors=True)
    write(target, files)
    shutil.rmtree(folder.parent, ignore_errors=True)
    print(json.dumps({"verdict": wanted, "sizes": {n: len(d) for n, d in files.items()}}))


def run(args: argparse.Namespace) -> None:
    """Run cases until the time is up, and report."""
    formats = args.formats.split(",") if args.formats else []
    past = PAST if args.past else {}
    limits = {"seconds": args.seconds, "cases": args.cases}
    workers.run(**limits, formats=formats, workers=args.workers, state=Path(args.state), past=past)
    report(args)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    p = sub.add_parser("run")
    p.add_argument("--seconds", type=float, default=480)
    p.add_argument("--formats", default="")
    p.add_argument("--cases", type=int, default=None, help="of each format")
    p.add_argument("--past", action="store_true", help="those that once ended wrongly, too")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--state", default=str(WORK / "state.json"))
    p = sub.add_parser("report")
    p.add_argument("--state", default=str(WORK / "state.json"))
    p = sub.add_parser("worker")
    p.add_argument("fd", type=int)
    p = sub.add_parser("case")
    p.add_argument("format")
    p.add_argument("number", type=int)
    p.add_argument("--save", default="")
    p = sub.add_parser("minimise")
    p.add_argument("format")
    p.add_argument("number", type=int)
    p.add_argument("folder")
    p.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    if args.command == "worker":
        workers.worker(args.fd)
    else:
        {"run": run, "report": report, "case": one, "minimise": minimise}[args.command](args)


if __name__ == "__main__":
    main()
