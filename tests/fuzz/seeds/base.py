"""What a seed is, and how one is registered."""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / "shared"  # reference models, which make good seeds where they are

Files = dict[str, bytes]


class Seed(NamedTuple):
    """A folder, the path in it that is opened, and which files are damaged, each with the mutator for it."""

    files: Files
    entry: str  # "" is the folder itself
    damage: dict[str, str]  # file name -> a name in damage.DAMAGE
    run: str  # name of a function in oracles.RUNS
    whole: bool = True  # whether a file that is cut short must be refused


def folder_of(write: Callable[[Path], Any]) -> Files:
    """Return what `write` puts into a folder."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        write(top)
        return {str(f.relative_to(top)): f.read_bytes() for f in sorted(top.rglob("*")) if f.is_file()}


SEEDS: dict[str, Callable[[], list[Seed]]] = {}


def seed(function: Callable[[], list[Seed]]) -> Callable[[], list[Seed]]:
    """Register a maker of seeds under its name."""
    SEEDS[function.__name__] = functools.cache(function)
    return SEEDS[function.__name__]


def json_bytes(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def shared_file(name: str) -> list[bytes]:
    """Return a reference file, if it is here."""
    path = SHARED / "models" / name
    return [path.read_bytes()] if path.is_file() else []
