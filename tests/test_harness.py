"""The kernels without XLA: with sanitizers, with several numbers of threads, and on an emulated aarch64."""

import itertools
import platform
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import setuptools
from test_groups import weights
from test_kernels import attention, normal

from jllama import kernels
from jllama.weights import groups

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "jllama" / "kernels"
Array = np.ndarray
pytestmark = pytest.mark.slow


def products() -> Iterator[tuple[list[int], list[Any]]]:
    rng = np.random.default_rng(0)
    for (out, columns), rows in itertools.product(((1, 1), (5, 65), (33, 300), (9, 2100)), (1, 2, 7)):
        w, x = normal(rng, out, columns), normal(rng, rows, columns)
        may = 1e-6 * np.abs(x) @ np.abs(w).T + 1e-30
        yield [0, out, rows, columns], [w, x, x.astype(np.float64) @ w.T, may]
        w16, x16 = (np.asarray(jnp.asarray(a, "bfloat16")) for a in (w, x))
        right = x16.astype(np.float64) @ w16.astype(np.float64).T
        yield [1, out, rows, columns], [w16, x, right, 2 * may]


def products_in_groups() -> Iterator[tuple[list[int], list[Any]]]:
    rng = np.random.default_rng(0)
    for (number, kind), rows in itertools.product(enumerate(kernels.GROUPS), (1, 7)):
        for out, columns in ((1, groups.KINDS[kind].share), (6, 3 * 256 if groups.KINDS[kind].own_scales else 1120)):
            w = weights(kind, out, columns)[0]
            wide, x = w.decode().astype(np.float64), normal(rng, rows, columns)
            half = np.abs(x).reshape(rows, -1, 32).max(axis=-1).repeat(32, axis=-1) / 254
            parts = [np.zeros(0, np.uint8) if part is None else part for part in w.parts]
            for fine in (False, True):
                may = 1.01 * half / (254 if fine else 1) @ np.abs(wide).T + 2e-6 * np.abs(x) @ np.abs(wide).T
                yield [2, out, rows, columns, number, fine], [*parts, x, x @ wide.T, may]


def attentions() -> Iterator[tuple[list[int], list[Any]]]:
    rng = np.random.default_rng(0)
    for dtype, t, window, (g, h) in itertools.product(
        ("float32", "bfloat16"), (1, 6), (700, 30), ((1, 5), (3, 20), (5, 72))
    ):
        b, n_kv, s = 2, 2, 700
        q, k, v = normal(rng, b, t, n_kv * g, h), normal(rng, b, t, n_kv, h), normal(rng, b, t, n_kv, h)
        caches = [np.asarray(jnp.asarray(normal(rng, b * n_kv, s, h), dtype)) for _ in range(2)]
        first = np.array([3, s - t], np.int32)
        filled = [cache.astype(np.float64) for cache in caches]
        for cache, new in zip(filled, (k, v), strict=True):
            for row, token, head in np.ndindex(b, t, n_kv):
                cache[row * n_kv + head, first[row] + token] = np.asarray(jnp.asarray(new[row, token, head], dtype))
        right = attention(q, *filled, first, window, 0.3)
        sizes = [3, b, t, n_kv * g, n_kv, s, h, window, dtype == "bfloat16"]
        yield sizes, [q, k, v, *caches, first, right, np.full(right.shape, 1e-5)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("harness") / "cases"
    with path.open("wb") as file:
        for sizes, arrays in itertools.chain(products(), products_in_groups(), attentions()):
            *given, right, may = (np.ascontiguousarray(array) for array in arrays)
            arrays = [*given, right.astype(np.float32), may.astype(np.float32)]
            file.write(np.array([len(sizes), *sizes, len(arrays)], np.int64).tobytes())
            for array in arrays:
                file.write(np.int64(array.nbytes).tobytes() + array.tobytes())
    return path


def build(folder: Path, compiler: str, machine: str, *flags: str) -> Path:
    """Compile the harness with the kernels for a machine, each source with its own flags."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not here: the kernels for {machine} are not tested with it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        patch.chdir(ROOT)
        table = runpy.run_path("setup.py")
    sources = {FOLDER / name: own for name, own in (table["COMMON"] | table["MACHINES"][machine]).items()}
    del sources[FOLDER / "handlers.cc"]
    objects = []
    for source, own in (sources | {ROOT / "tests" / "kernels_harness.cc": []}).items():
        objects.append(str(folder / f"{source.stem}.o"))
        command = [compiler, "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-ignored-attributes"]
        done = subprocess.run(
            [*command, *flags, *own, f"-I{FOLDER}", "-c", str(source), "-o", objects[-1]],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    subprocess.run([compiler, *flags, *objects, "-pthread", "-o", str(folder / "harness")], check=True, timeout=60)
    return folder / "harness"


def run(*command: object) -> list[str]:
    """Run the harness; give the instruction sets that it ran."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    count, _, *sets = done.stdout.split()
    assert int(count) == 128
    return sets


x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86-64")


@x86
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_with_sanitizers(compiler: str, cases: Path, tmp_path: Path) -> None:
    sanitize = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
    sets = run(build(tmp_path, compiler, "x86_64", *sanitize), cases)
    if kernels.available():
        assert {"generic", *kernels._load().sets.values()} <= set(sets)


@x86
def test_as_clang_compiles_it(cases: Path, tmp_path: Path) -> None:
    assert "generic" in run(build(tmp_path, "clang++", "x86_64", "-O3"), cases)


@pytest.mark.parametrize(
    ("cpu", "sets"), [("cortex-a57", ["generic", "neon"]), ("max", ["generic", "neon", "dotprod"])]
)
def test_on_an_emulated_aarch64(cpu: str, sets: list[str], cases: Path, tmp_path: Path) -> None:
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("qemu-aarch64 is not here: the kernels for aarch64 are not tested")
    harness = build(tmp_path, "aarch64-linux-gnu-g++", "aarch64", "-O2", "-static")
    assert run("qemu-aarch64", "-cpu", cpu, harness, cases) == sets
