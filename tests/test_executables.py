"""Programs kept in a folder: a later start compiles nothing; what is damaged, foreign or not ours is not run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jllama import executables

TESTS = Path(__file__).resolve().parent
# A start of its own, without JAX's cache: says what was compiled, and what came out.
START = """
import dataclasses, json, sys
import jax
import tiny
from jllama import LLM
from jllama.run import choose

traced = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *a, **k: traced.append(name))
params, _ = tiny.model("gqa")
letters = tiny.Letters([b""] * 3 + [bytes([33 + i]) for i in range(94)])
traced.clear()
params = dataclasses.replace(params, run=dataclasses.replace(choose(), stacked=False))
llm = LLM(params, letters, compile_cache=sys.argv[1])
found = llm.generate(["ab", "c"], seed=3, max_new_tokens=9)
programs = [name for name in traced if name.endswith("backend_compile_duration")]
print(json.dumps({"tokens": [c.tokens for c in found], "logprobs": [c.logprobs for c in found],
                  "seconds": llm.timings.compile_seconds, "events": len(programs)}))
"""
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "JAX_PLATFORMS": "cpu",
}  # fmt: skip


def begin(folder: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=ENVIRONMENT | environment, stdout=pipe, stderr=pipe, text=True)


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out) | {"err": err}
    return result


@pytest.mark.slow
def test_a_later_start_compiles_nothing_and_says_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    both = [end(p) for p in [begin(folder), begin(folder)]]  # two processes at once
    files = sorted(folder.iterdir())
    assert len(files) == 3  # start, read_prompt, decode
    assert all(f.suffix == ".executable" for f in files)
    # One that is cut, one that is foreign, one that is another program's.
    kept = [f.read_bytes() for f in files]
    files[0].write_bytes(kept[0][: len(kept[0]) // 2])
    files[1].write_bytes(b"something else")
    damaged = end(begin(folder))
    assert [len(f.read_bytes()) for f in files] == pytest.approx([len(k) for k in kept], rel=0.05)
    again = end(begin(folder))
    for result in (*both, damaged, again):
        assert (result["tokens"], result["logprobs"]) == (both[0]["tokens"], both[0]["logprobs"])
        assert result["err"] == ""
    assert damaged["events"] - again["events"] == 2
    assert again["seconds"] < both[0]["seconds"] / 2
    other = end(begin(folder, XLA_FLAGS="--xla_cpu_enable_fast_math=false"))
    assert other["events"] - again["events"] == 3
    assert len(list(folder.iterdir())) == 6


def test_a_key_holds_all_that_matters(tmp_path: Path) -> None:
    kept = executables.Executables(tmp_path)
    (device,) = jax.devices()[:1]
    params, _ = tiny.model("gqa")
    other, _ = tiny.model("mqa")
    x = np.zeros((2, 3), np.float32)
    given: list[tuple[str, Any, dict[str, Any]]] = [
        ("f", (params, x), {}),
        ("g", (params, x), {}),
        ("f", (other, x), {}),
        ("f", (params, x.T), {}),
        ("f", (params, x.astype(np.int32)), {}),
        ("f", (params, [x]), {}),
        ("f", (params, x), {"width": 16}),
        ("f", (params, x), {"width": 32}),
    ]
    keys = [kept.key(name, args, static, device) for name, args, static in given]
    assert len(set(keys)) == len(given)
    assert kept.key("f", (params, jnp.asarray(x + 1)), {}, device) == keys[0]  # values don't


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert executables.open_folder(own) is not None
    assert own.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707, 0o777):
        own.chmod(mode)
        assert executables._distrust(own)
    own.chmod(0o755)
    assert executables._distrust(own) is None
    tmp_path.chmod(0o777)  # others could put another folder in its place
    assert executables._distrust(own)
    tmp_path.chmod(0o1777)
    assert executables._distrust(own) is None
    (tmp_path / "file").write_text("")
    assert executables.open_folder(tmp_path / "file") is None
    if os.getuid() == 0:
        os.chown(own, 12345, 12345)
        assert "another user" in str(executables._distrust(own))


def test_the_oldest_programs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executables, "_LIMIT", 250)
    for i in range(5):
        path = tmp_path / f"{i}.executable"
        path.write_bytes(bytes(100))
        os.utime(path, (i, i))
    executables.Executables(tmp_path)._shrink()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["3.executable", "4.executable"]
