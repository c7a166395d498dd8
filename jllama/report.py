"""Shows a benchmark's report: as a table, as CSV, as a picture."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path

from jllama.bench import Report, Row


def table(report: Report) -> str:
    """Write the report for a reader."""
    m = report.machine
    lines = [
        f"{m.cpu}, {m.cores} cores, {m.devices}; jax {m.jax}, jaxlib {m.jaxlib}",
        f"bounds: memory {m.bandwidth / 1e9:.1f} GB/s; "
        + ", ".join(f"{dtype} {peak / 1e9:.0f} GOP/s" for dtype, peak in m.peak.items()),
        f"kernels for few rows: {report.kernels}; keys and values in {report.kv_dtype}",
        report.definition,
        "",
        f"{'dtype':9} {'weights':>9} {'load':>8} {'compile':>8} {'first token':>12} {'peak memory so far':>19}",
    ]
    lines += [
        f"{x.dtype:9} {x.weight_bytes / 1e6:6.0f} MB {x.load_seconds:6.2f} s {x.compile_seconds:6.2f} s "
        f"{x.time_to_first_token:10.2f} s {x.peak_memory / 1e6:16.0f} MB"
        for x in report.models
    ]
    lines += [
        "",
        f"{'phase':8} {'dtype':9} {'batch':>5} {'depth':>6} {'tokens':>6} {'tokens/s':>9} {'spread':>8}  bound",
    ]
    lines += [
        f"{r.phase:8} {r.dtype:9} {r.batch:5} {r.depth:6} {r.tokens:6} {r.tokens_per_second:9.1f} {_spread(r):>7.0%}  "
        f"{r.fraction:.0%} of {r.bound}"
        for r in report.rows
    ]
    lines += ["", f"{'way':8} {'first call':>12} {'tokens/s':>10} {'speed-up':>9}"]
    lines += [f"{w.name:8} {w.first_call:10.2f} s {w.tokens_per_second:10.1f} {w.speedup:8.1f}x" for w in report.ways]
    return "\n".join(lines)


def to_csv(report: Report) -> str:
    """Write the measured rows as CSV, with a header."""
    out = io.StringIO()
    names = [f.name for f in dataclasses.fields(Row) if f.name != "seconds"]
    writer = csv.DictWriter(out, [*names, "median", "fastest", "slowest"], lineterminator="\n")
    writer.writeheader()
    for row in report.rows:
        fields = dataclasses.asdict(row)
        writer.writerow(fields | fields.pop("seconds"))
    return out.getvalue().rstrip("\n")


def plot(report: Report, path: Path) -> None:
    """Draw how much of its bound each row reaches, and eager against compiled.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ValueError("--bench_plot needs matplotlib: pip install 'jllama[plot]'") from e
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    names = [f"{r.phase} {r.dtype} x{r.batch} @{r.depth}" for r in report.rows]
    colours = ["tab:blue" if r.bound == "memory" else "tab:orange" for r in report.rows]
    left.barh(names[::-1], [r.fraction for r in report.rows][::-1], color=colours[::-1])
    left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("fraction of the bound (blue: memory, orange: compute)")
    left.tick_params(axis="y", labelsize=7)
    right.bar([w.name for w in report.ways], [w.tokens_per_second for w in report.ways])
    right.set_ylabel("tokens/s, batch 1")
    right.set_yscale("log")
    figure.suptitle(f"{report.machine.cpu}, {report.machine.cores} cores, jaxlib {report.machine.jaxlib}")
    figure.savefig(path, dpi=120)


def _spread(row: Row) -> float:
    return (row.seconds.slowest - row.seconds.fastest) / row.seconds.median
