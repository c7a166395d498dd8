"""`jllama plan`: what a model would need of devices that need not be here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jllama import checkpoint, config, mesh, plan
from jllama.cli.flags import FLAGS
from jllama.cli.folders import expanded
from jllama.cli.loading import check_source
from jllama.llm import check_batch_size


def main() -> None:
    """Print what the model would need on a mesh."""
    check_source()
    if FLAGS.coordinator:
        raise ValueError("plan runs in one process: expected no --coordinator")
    shape = mesh.parse(FLAGS.mesh) if FLAGS.mesh else mesh.Shape()
    check_batch_size(FLAGS.batch_size)
    if FLAGS.config:
        contents = checkpoint.random_contents(config.from_toml(expanded(FLAGS.config)))
    else:
        contents = checkpoint.read(FLAGS.checkpoint)
    dtype = contents.dtype if FLAGS.dtype == "auto" else FLAGS.dtype
    devices: Sequence[plan.Device] = plan.DEVICES
    if FLAGS.memory is not None:
        if not 0 < FLAGS.memory < 1e6:
            raise ValueError(f"memory = {FLAGS.memory:g}: expected GB of a device")
        devices = [device._replace(memory=FLAGS.memory * 1e9) for device in devices]
    found = plan.plan(contents, dtype, shape, FLAGS.batch_size, devices, kv_dtype=FLAGS.kv_dtype)
    model = Path(FLAGS.config or FLAGS.checkpoint).stem
    title = f"{model} in {dtype} on data:{shape.data},model:{shape.model}, a batch of {FLAGS.batch_size}"
    print(plan.table(found, title))
