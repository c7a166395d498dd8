"""`jllama chat`: a conversation, line by line."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator

from jllama.cli import errors, output
from jllama.cli.flags import FLAGS
from jllama.cli.folders import expanded, user_folder
from jllama.cli.loading import load
from jllama.cli.settings import from_flags
from jllama.cli.status import waiting
from jllama.prompts import standard_input
from jllama.session import Session

HELP = """\
/reset       forget the conversation
/system TEXT forget it, and begin again with this system message
/save FILE   write it to a new file, as JSON
/exit        leave (Ctrl-D too); Ctrl-C ends an answer
Any other line is a message; one that begins with // is sent with a single /.\
"""
_HISTORY = 1000  # lines


def main() -> None:
    """Answer lines from a terminal, or from a pipe, until they end, with the conversation in mind."""
    if FLAGS.coordinator:
        raise ValueError("chat reads from one terminal: expected no --coordinator")
    stdin = standard_input()
    settings = from_flags()
    llm, load_seconds = load()
    template = llm.template
    if template.guessed:
        output.note(f"the model brings no chat template: using the {template.name}")
    session = Session(llm, template, FLAGS.system_prompt, settings)
    if stdin.isatty():
        _talk(session)
    else:
        for number, raw in enumerate(stdin, 1):
            line = _decoded(raw, number).rstrip("\r\n")
            if line.strip():
                _answer(session, line)
    output.timings(llm, load_seconds, verbose=FLAGS.verbose)


def _decoded(raw: bytes, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"standard input, line {number}: {e}") from e


def _talk(session: Session) -> None:
    """Answer what is typed; commands are for those who type, not for whatever comes through a pipe."""
    print(HELP, file=sys.stderr)
    with _line_editing():
        while (line := _read_line()) is not None and line.strip() != "/exit":
            try:
                if not _command(session, line.strip()) and line.strip():
                    _answer(session, line.removeprefix("/") if line.startswith("//") else line)
            except (ValueError, OSError) as e:
                output.note(errors.sentence(e))


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Let the arrow keys edit a line and bring back earlier ones, those of earlier chats too."""
    try:
        import readline
    except ImportError:  # absent on Windows
        yield
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # the lines of a pasted text are one message
    readline.set_history_length(_HISTORY)
    folder = user_folder("XDG_STATE_HOME", ".local/state")
    if folder is None:
        yield
        return
    path = folder / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # no reason to fail a chat
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


def _read_line() -> str | None:
    """Return the next line that is typed, None at the end of input."""
    prompt = "> "
    if not sys.stdout.isatty():  # whoever reads it wants answers alone
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    while True:
        try:
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print("\n/exit or the end of input (Ctrl-D) leaves", file=sys.stderr)


def _answer(session: Session, question: str) -> None:
    """Print an answer as it comes; Ctrl-C ends it."""
    pieces = session.ask(question)
    try:
        with waiting("reading"):
            first = next(pieces, "")
        if session.dropped:
            output.note(f"the context is full: the oldest {session.dropped} turns are forgotten")
        started = False
        for piece in itertools.chain([first], pieces):
            text = piece if started else piece.lstrip()
            started = started or bool(text)
            output.write(text)
    except KeyboardInterrupt:
        pieces.close()
    print(flush=True)


def _command(session: Session, line: str) -> bool:
    """Do what a line asks for; False if it is a message."""
    name, _, argument = line.partition(" ")
    if line == "/reset":
        session.reset()
    elif name == "/system":
        session.reset(argument.strip())
    elif name == "/save":
        if not argument:
            raise ValueError("expected a file: /save FILE")
        path = expanded(argument.strip())
        with open(path, "x", encoding="utf-8") as file:
            json.dump(session.conversation.messages(), file, ensure_ascii=False, indent=2)
            file.write("\n")
        output.note(f"wrote {path}")
    else:
        return False
    return True
