"""The texts of --help and --version."""

from __future__ import annotations

import platform
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata

import jllama
from jllama import kernels
from jllama.cli.commands import COMMANDS, usage
from jllama.cli.errors import check_devices
from jllama.cli.flags import FLAGS, GROUPS, Flag

_EXAMPLES = """\
  jllama                                            tell a story, with the tiny model that comes with jllama
  jllama run smollm2 "The moon is"
  jllama chat hf://Qwen/Qwen3-0.6B --temperature=0.6
  jllama --checkpoint=model.bin --temperature=0.8   flags alone: the same as jllama run model.bin\
"""


def overview() -> str:
    """Write the text of --help: the commands, and every flag with its default and what it does."""
    lines = ["jllama runs language models: the Llama family and GPT-2.", "", "Commands:"]
    lines += [f"  jllama {usage(name):<28} {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "jllama COMMAND --help shows the flags of one command. Examples:", _EXAMPLES]
    return "\n".join([*lines, *_groups(lambda flag: True)])


def of_command(name: str) -> str:
    """Write the text of a command's --help: the flags that it takes."""
    lines = [f"jllama {usage(name)} [--FLAG=VALUE ...]: {COMMANDS[name].summary}."]
    return "\n".join([*lines, *_groups(lambda flag: name in flag.commands.split())])


def _groups(wanted: Callable[[Flag], bool]) -> Iterator[str]:
    for title, group in GROUPS.items():
        if chosen := [flag.holder.name for flag in group if wanted(flag)]:
            yield from ("", f"{title}:")
            for name in chosen:
                yield from _entry(name)


def _entry(name: str) -> Iterator[str]:
    flag = FLAGS[name]
    default = "" if flag.default in (None, [], "") else f"={(flag.default_as_str or '').strip(chr(39))}"
    yield f"  --{name}{default}"
    # absl adds to some texts how to give a flag several times.
    text = re.sub(r";\s+repeat this option to specify a list of values$", "", flag.help)
    yield from textwrap.wrap(text, 106, initial_indent=" " * 6, subsequent_indent=" " * 6)


def versions() -> str:
    """Write the text of --version: what runs here, and whether the native kernels do."""
    check_devices()
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    libraries = [f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "numpy")]
    return "\n".join([f"jllama {jllama.__version__}", ", ".join([*libraries, system]), kernels.explain()])
