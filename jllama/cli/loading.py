"""From flags to a model in memory."""

from __future__ import annotations

import os
import sys
import time

import jax
from absl import logging

from jllama import checkpoint, config, mesh, processes
from jllama.checkpoint import hub
from jllama.cli import folders
from jllama.cli.errors import check_devices
from jllama.cli.flags import FLAGS
from jllama.cli.folders import expanded
from jllama.cli.status import waiting
from jllama.llm import LLM
from jllama.model import Params
from jllama.run import choose


def load() -> tuple[LLM, float]:
    """Load the model and its tokenizer, and say how many seconds it took."""
    began = time.perf_counter()
    check_source()
    _connect()
    check_devices()
    with waiting("loading the model"):
        llm = _load()
    return llm, time.perf_counter() - began


def _load() -> LLM:
    if FLAGS.config and not FLAGS.tokenizer:
        raise ValueError("--config makes random weights, which bring no tokenizer: expected --tokenizer too")
    llm = LLM.load(
        None if FLAGS.config else FLAGS.checkpoint,
        config=expanded(FLAGS.config) if FLAGS.config else None,
        tokenizer=FLAGS.tokenizer if hub.is_name(FLAGS.tokenizer) or not FLAGS.tokenizer else expanded(FLAGS.tokenizer),
        dtype=FLAGS.dtype,
        rope_theta=FLAGS.rope_theta,
        context=FLAGS.context,
        mesh=FLAGS.mesh or None,
        kernels=FLAGS.kernels,
        kv_dtype=FLAGS.kv_dtype,
        compile_cache=folders.for_programs(FLAGS.compile_cache),
        speculate=FLAGS.speculate,
        draft=FLAGS.draft,
    )
    jax.block_until_ready(llm.params)  # type: ignore[no-untyped-call]
    return llm


def check_source() -> None:
    """Raise ValueError where the flags name no model, or what can't be one."""
    if not FLAGS.checkpoint:
        raise ValueError("--checkpoint is empty: expected a file, a folder, or one of the names in --help")
    path = expanded(FLAGS.checkpoint)
    if FLAGS.config:
        if FLAGS["checkpoint"].present:
            raise ValueError("pass either --checkpoint or --config, not both")
    elif hub.is_name(FLAGS.checkpoint):
        if FLAGS["checkpoint"].present and path.exists():
            logging.warning("%s is a model's name; the file or folder here is ./%s", path, path)
    elif path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: a pipe or device; expected a file, whose parts can be read in any order")


def expect_one_device(what: str) -> None:
    """Raise ValueError for flags of several devices."""
    if FLAGS.mesh or FLAGS.coordinator:
        raise ValueError(f"{what} uses one device: expected neither --mesh nor --coordinator")


def _connect() -> None:
    """Join the other processes of this run, if there are any. Only the first writes to standard output."""
    if not processes.connect(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id):
        return
    # Libraries below print there too (Gloo does): what they print goes to standard error.
    sys.stdout.flush()
    out = os.dup(sys.stdout.fileno()) if jax.process_index() == 0 else os.open(os.devnull, os.O_WRONLY)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # It stays until the end.
    sys.stdout = open(out, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115
    if not FLAGS.mesh:
        raise ValueError(f"--mesh is missing: expected one of {jax.device_count()} devices, those of all processes")


def weights(dtype: str) -> Params:
    """Load or make the weights in a dtype, to be run as the flags say."""
    on = mesh.make_mesh(FLAGS.mesh) if FLAGS.mesh else None
    run = choose(FLAGS.kernels, FLAGS.kv_dtype, on_mesh=on is not None)
    source = config.from_toml(expanded(FLAGS.config)) if FLAGS.config else FLAGS.checkpoint
    return checkpoint.load(source, dtype=dtype, rope_theta=FLAGS.rope_theta, context=FLAGS.context, run=run, mesh=on)
