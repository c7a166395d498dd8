"""`jllama convert`: a model in another format."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from jllama import checkpoint
from jllama.cli import output
from jllama.cli.errors import check_devices
from jllama.cli.flags import FLAGS
from jllama.cli.loading import check_source, expect_one_device, weights


def main() -> None:
    """Convert the model; from float32 where no other dtype is asked for, so that nothing is lost."""
    check_source()
    if not FLAGS.save:
        raise ValueError("expected where to write the model: jllama convert MODEL PATH")
    if FLAGS.save_form != "llama2c" and FLAGS["save_version"].present:
        raise ValueError(f"--save_version is one of llama2.c files: expected none with --save_form={FLAGS.save_form}")
    expect_one_device("--save")
    check_devices()
    dtype = "float32" if FLAGS.dtype == "auto" else FLAGS.dtype
    path = os.path.expanduser(FLAGS.save)
    with _ended_in_order():
        checkpoint.save(weights(dtype), path, form=FLAGS.save_form, version=int(FLAGS.save_version))
    output.note(f"wrote {path}")


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let the signals that end a program be exceptions, so that a file half written is removed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows lacks one
    numbers = [signal.Signals[name] for name in names]
    ours = [n for n in numbers if signal.getsignal(n) == signal.SIG_DFL]  # nohup has SIGHUP ignored
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
