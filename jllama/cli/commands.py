"""The words of the command line: `jllama COMMAND MODEL ...` beside the flags, and what goes with what."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from jllama.cli.flags import FLAGS, GROUPS


class Command(NamedTuple):
    """A command.

    Args:
      module: of this package.
      summary: what it does.
      places: the flags that words without a flag are for, in order.
      function: of the module, which does it.
    """

    module: str
    summary: str
    places: tuple[str, ...] = ("checkpoint",)
    function: str = "main"


COMMANDS = {
    "run": Command("generate", "continue a text, or a file of prompts", ("checkpoint", "prompt")),
    "chat": Command("chat", "talk with a model"),
    "serve": Command("serve", "answer over HTTP, as OpenAI's API does"),
    "perplexity": Command("perplexity", "score a text", ("checkpoint", "prompt_file")),
    "bench": Command("bench", "measure how fast a model runs on this machine"),
    "plan": Command("plan", "estimate the memory and speed a model needs, without loading it"),
    "convert": Command("convert", "write a model in another format", ("checkpoint", "save")),
    "pull": Command("models", "download a model of the Hugging Face Hub", function="pull"),
    "list": Command("models", "list the models that can be had by name, and those downloaded", (), function="show"),
    "rm": Command("models", "remove a downloaded model", function="remove"),
}
WORDS = {"checkpoint": "[MODEL]", "prompt": '["PROMPT"]', "prompt_file": "FILE", "save": "PATH"}


def usage(name: str) -> str:
    """Return the words of a command: `run [MODEL] ["PROMPT"]`."""
    return " ".join([name, *(WORDS[place] for place in COMMANDS[name].places)])


def parse(argv: list[str]) -> str:
    """Set the flags from arguments, the first of which is the program's name, and return the command's name.

    Raises:
      flags.Error: a flag that there isn't, or a wrong value of one.
      ValueError: words or flags that don't go together.
    """
    FLAGS.set_gnu_getopt(True)  # flags may come after words
    words = FLAGS(argv)[1:]
    if words and words[0] in COMMANDS:
        name = words.pop(0)
        if FLAGS["mode"].present:
            raise ValueError(f"--mode={FLAGS.mode}: expected no --mode with the command {name}")
    elif words:
        raise ValueError(_unexpected(words[0]))
    elif FLAGS.save and FLAGS["mode"].present and FLAGS.mode != "generate":
        raise ValueError(f"--mode={FLAGS.mode} and --save: pass one of them; --save converts the model")
    else:
        name = "convert" if FLAGS.save else "run" if FLAGS.mode == "generate" else FLAGS.mode
    _take(name, words)
    if not FLAGS.help:
        _check(name)
    return name


def _unexpected(word: str) -> str:
    close = difflib.get_close_matches(word, COMMANDS, 1)
    hint = f"did you mean {close[0]}?" if close else f"expected a command ({', '.join(COMMANDS)}) or --flags"
    return f"unexpected argument {word!r}: {hint}"


def _take(name: str, words: list[str]) -> None:
    """Give the words after a command to the flags that they stand for."""
    places = list(COMMANDS[name].places)
    if "checkpoint" in places and (FLAGS["checkpoint"].present or FLAGS["config"].present):
        places.remove("checkpoint")
    for word in words:
        if not places:
            quotes = "; a prompt of several words goes in quotes" if name == "run" else ""
            raise ValueError(f"unexpected argument {word!r}: expected jllama {usage(name)}{quotes}")
        flag = FLAGS[places.pop(0)]
        if flag.present:
            raise ValueError(f"unexpected argument {word!r}: --{flag.name} is there already")
        flag.parse(word)


def _check(name: str) -> None:
    """Refuse flags that the command would ignore."""
    for flag in (flag for group in GROUPS.values() for flag in group):
        if FLAGS[flag.holder.name].present and flag.commands and name not in flag.commands.split():
            *most, last = flag.commands.split()
            expected = f"{', '.join(most)} and {last}" if most else last
            raise ValueError(f"--{flag.holder.name} goes with {expected}, not with {name}: see jllama {name} --help")
