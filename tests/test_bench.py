"""The benchmark's output: complete, consistent, and in the formats that it promises."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest
from console import Run, error

from jllama import bench, machine

FLAGS = ("--mode=bench", "--bench_prompt=20", "--bench_new=6", "--bench_batches=2", "--bench_repeats=2")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(
        "dim = 32\nhidden_dim = 48\nn_layers = 2\nn_heads = 4\nn_kv_heads = 2\nvocab_size = 100\nmax_seq_len = 64\n"
    )
    return f"--config={path}"


@pytest.mark.slow
def test_json_is_one_object_with_every_measurement(run: Run, config: str, tmp_path: Path) -> None:
    code, out, _ = run(
        *FLAGS, config, "--bench_dtypes=float32,int8", "--bench_format=json", f"--bench_plot={tmp_path}/plot.png"
    )
    report = json.loads(out)
    assert code == 0
    assert set(report) == {
        "machine",
        "kernels",
        "kv_dtype",
        "definition",
        "prompt",
        "new",
        "repeats",
        "models",
        "rows",
        "ways",
    }
    rows = report["rows"]
    keys = {(r["phase"], r["dtype"], r["batch"], r["depth"]) for r in rows}
    dtypes = ("float32", "int8")
    expected = {
        (phase, dtype, batch, depth)
        for dtype in dtypes
        for batch in (2,)
        for phase, depth in (("prefill", 0), ("decode", 0), ("decode", 57))
    }
    assert keys == expected
    assert len(rows) == len(keys)
    for row in rows:
        median = row["seconds"]["median"]
        assert row["seconds"]["fastest"] <= median <= row["seconds"]["slowest"]
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * row["tokens"] / median)
        assert row["bound"] in ("memory", "compute")
        assert 0 < row["fraction"] < 1
    assert [m["dtype"] for m in report["models"]] == list(dtypes)
    # 2 layers of 64 x 32 + 32 x 32 + 96 x 32 + 32 x 48, embedding and head of 100 x 32, norms
    assert report["models"][0]["weight_bytes"] == 4 * (2 * (64 * 32 + 32 * 32 + 96 * 32 + 32 * 48) + 2 * 3200 + 5 * 32)
    assert [w["name"] for w in report["ways"]] == ["eager", "step", "loop"]
    assert report["ways"][0]["speedup"] == 1
    assert report["machine"]["bandwidth"] > 1e8
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_schema_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "benchmark.md").read_text()
    for kind in (bench.Report, machine.Machine, bench.Model, bench.Row, bench.Way, machine.Spread):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in text, f"{kind.__name__}.{field.name}"


def test_table_and_csv(run: Run, config: str) -> None:
    flags = (*FLAGS, config, "--bench_dtypes=float32", "--bench_batches=1")
    _, table, _ = run(*flags)
    for word in ("GB/s", "tokens/s: tokens of all rows", "prefill", "decode", "eager", "loop", "of memory"):
        assert word in table
    _, text, _ = run(*flags, "--bench_format=csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert [(r["phase"], r["depth"]) for r in rows] == [("prefill", "0"), ("decode", "0"), ("decode", "57")]
    assert all(float(r["median"]) > 0 for r in rows)


@pytest.mark.parametrize("flag", ["--bench_batches=0", "--bench_batches=x", "--bench_dtypes=int2", "--bench_new=0"])
def test_wrong_flags(run: Run, config: str, flag: str) -> None:
    assert flag.removeprefix("--").split("=")[0] in error(run(*FLAGS, config, flag))
