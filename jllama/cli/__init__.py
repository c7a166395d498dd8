"""The command line: `jllama COMMAND MODEL ...`, or flags alone. The only place that prints."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def run() -> NoReturn:
    """Run the command line and exit: 0 if all went well, 1 after an error, 130 after Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    code = main(sys.argv)
    jax = sys.modules.get("jax")
    # A compilation that was broken off may still run on other threads, which an orderly exit would crash. And such an
    # exit waits for the other processes, which after an error wait for this one.
    if code == 130 or (code and jax and jax.distributed.is_initialized()):
        os._exit(code)
    sys.exit(code)


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: an exception in the middle of an import would come out as something else."""
    os._exit(130)


def main(argv: list[str]) -> int:
    """Run with these arguments and return the exit code."""
    if sys.stdout is None:
        print("jllama: standard output is closed: expected somewhere to write to", file=sys.stderr)
        return 1
    try:
        _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except Exception as e:
        from jllama.cli import errors, output

        if (sentence := errors.sentence(e)) is None:
            raise
        from absl import logging

        if logging.level_debug():
            import traceback

            traceback.print_exc()
        output.note(sentence)
        return 1
    return 0


def _run(argv: list[str]) -> None:
    """Do what the arguments say; nothing is imported before it is needed."""
    from jllama.cli import commands, errors, output
    from jllama.cli.flags import FLAGS

    output.prepare()
    name = commands.parse(argv)
    if FLAGS.help or FLAGS.version:
        from jllama.cli import help

        print(help.versions() if FLAGS.version else help.of_command(name) if name in argv else help.overview())
        return
    errors.check_address_space()

    import jax

    from jllama.cli import folders

    if FLAGS.mesh or name == "bench":  # of what `Programs` doesn't keep
        folder = folders.for_programs(FLAGS.compile_cache)
        if folder is not None:
            folders.keep_programs(folder)
    command = commands.COMMANDS[name]
    main = getattr(importlib.import_module(f"jllama.cli.{command.module}"), command.function)
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with jax.transfer_guard("allow"):  # the environment may forbid it, but a model has to come from somewhere
        main()
