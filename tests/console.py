"""What the tests of the command line share."""

import sys
from collections.abc import Callable
from pathlib import Path

import oracle
from trained import write_tokenizer

from jllama.cli.flags import FLAGS
from jllama.config import Config

# Starts main.py by itself. Programs that a script puts in the background ignore Ctrl-C, and so do those they start.
_CODE = (
    "import runpy, signal as s; s.signal(s.SIGINT, s.default_int_handler); runpy.run_path('main.py', {}, '__main__')"
)
MAIN = [sys.executable, "-c", _CODE]
Run = Callable[..., tuple[int, str, str]]  # the fixture `run`: arguments to exit code, stdout, stderr


def write_model(folder: Path) -> Path:
    """Write a tiny random model with its tokenizer beside it."""
    config = Config(16, 24, 1, 2, 1, 330, 64)
    oracle.write_v0(folder / "model.bin", oracle.random_weights(config, tied=True), config)
    write_tokenizer(folder / "tokenizer.bin", 330)
    return folder / "model.bin"


def reset_flags() -> None:
    """Forget all flags that were parsed."""
    for name in FLAGS:
        FLAGS[name].unparse()


def error(result: tuple[int, str, str]) -> str:
    """Return the one line of an error: exit code 1, nothing on stdout, no traceback."""
    code, out, err = result
    assert (code, out) == (1, ""), result
    assert err.startswith("jllama: ")
    assert err.count("\n") == 1, err
    return err
