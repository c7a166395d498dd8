"""`jllama bench`: how fast a model runs here."""

from __future__ import annotations

import dataclasses
import json
import sys

from tqdm import tqdm

from jllama import bench, report
from jllama.cli.errors import check_devices
from jllama.cli.flags import DTYPES, FLAGS
from jllama.cli.folders import expanded
from jllama.cli.loading import check_source, expect_one_device, weights


def main() -> None:
    """Measure the model and print the report."""
    check_source()
    expect_one_device("bench")
    check_devices()
    wrong = [x for x in FLAGS.bench_batches if not (x.isdecimal() and int(x) > 0)]
    if wrong or not FLAGS.bench_batches:
        raise ValueError(f"bench_batches = {','.join(FLAGS.bench_batches)}: expected numbers of 1 or more")
    if not FLAGS.bench_dtypes or not set(FLAGS.bench_dtypes) <= set(DTYPES):
        raise ValueError(f"bench_dtypes = {','.join(FLAGS.bench_dtypes)}: expected some of {', '.join(DTYPES)}")
    with tqdm(file=sys.stderr, disable=None, bar_format="measuring {desc}, {elapsed}") as bar:
        result = bench.run(
            weights,
            prompt=FLAGS.bench_prompt,
            new=FLAGS.bench_new,
            batches=[int(x) for x in FLAGS.bench_batches],
            dtypes=FLAGS.bench_dtypes,
            repeats=FLAGS.bench_repeats,
            progress=bar.set_description_str,
        )
    if FLAGS.bench_plot:
        report.plot(result, expanded(FLAGS.bench_plot))
    if FLAGS.bench_format == "json":
        print(json.dumps(dataclasses.asdict(result)))
    else:
        print({"table": report.table, "csv": report.to_csv}[FLAGS.bench_format](result))
