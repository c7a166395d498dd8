"""A short run of the fuzzer, which is in `fuzz/`: some cases of every format, and those that once ended wrongly."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzz.past import PAST
from fuzz.seeds import SEEDS

CASES = 40  # of each format


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the fuzzer, and return what it counted."""
    pytest.importorskip("gguf")
    work = tmp_path_factory.mktemp("fuzz")
    command = [sys.executable, "-m", "fuzz", "run", f"--cases={CASES}", "--past", "--seconds=300"]
    environment = os.environ | {"FUZZ_WORK": str(work), "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=400)
    found: dict[str, Any] = json.loads((work / "state.json").read_text())
    return found


@pytest.mark.parametrize("name", SEEDS)
def test_damaged_files_are_refused_or_read(state: dict[str, Any], name: str) -> None:
    assert state["counts"][name]["cases"] == CASES + len(PAST.get(name, ()))
    assert not {kind: found for kind, found in state["findings"].items() if name in found["formats"]}
