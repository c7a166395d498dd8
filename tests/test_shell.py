"""What a shell, a terminal and an environment can do to the command line."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PROGRAMS
from console import MAIN, Run, error, write_model

from jllama.cli import chat, errors, folders, output

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
FLAGS = ("--temperature=0", "--max_new_tokens=3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer and a template beside it."""
    path = write_model(tmp_path_factory.mktemp("model"))
    (path.parent / "chat_template.jinja").write_text(TEMPLATE)
    return path


def program(*args: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run main.py by itself, with some variables of the environment set or, where None, missing."""
    variables = {k: v for k, v in (os.environ | environment).items() if v is not None}
    command = [*MAIN, *args, f"--compile_cache={PROGRAMS}"]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert folders.user_folder("XDG_CACHE_HOME", ".cache") is None
    assert folders.for_programs(None) is None
    assert run("--help")[0] == 0


def test_the_command_line_starts_for_a_user_who_has_no_entry_anywhere() -> None:
    code = (
        "import pwd, sys\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown\n"
        "from jllama.cli import main\n"
        "sys.exit(main(['jllama', '--help']))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["JAX_PLATFORMS", "JAX_PLATFORM_NAME"])
def test_a_device_that_is_not_here(model: Path, name: str) -> None:
    done = program("run", str(model), **{"JAX_PLATFORMS": None} | {name: "cuda"})
    assert f"{name}=cuda" in error((done.returncode, done.stdout, done.stderr))


def test_a_guard_in_the_environment_does_not_matter(model: Path) -> None:
    done = program("run", str(model), "one", *FLAGS, JAX_TRANSFER_GUARD="disallow")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("one")


def test_an_output_that_is_not_utf_8(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["Łódź", "日本", "plain"]
    (tmp_path / "p.txt").write_text("\n".join(prompts), "utf-8")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))  # such as a pipe on Windows
    assert run("run", str(model), f"--prompt_file={tmp_path}/p.txt", *FLAGS)[0] == 0
    assert [json.loads(line)["prompt"] for line in written.getvalue().splitlines()] == prompts
    assert run("run", str(model), "日é", *FLAGS)[0] == 0
    assert "\\u65e5\xe9".encode("cp1252") in written.getvalue()


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    for stream, shown in (
        (Terminal(), "a\\u001b[2J\\u009b1m\n\tb\\u000dc"),
        (io.StringIO(), "a\x1b[2J\x9b1m\r\n\tb\rc"),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        output.write("a\x1b[2J\x9b1m\r\n\tb\rc")
        assert stream.getvalue() == shown
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert json.loads(output.json_line({"text": "\x9b1m"})) == {"text": "\x9b1m"}
    assert "\x9b" not in output.json_line({"text": "\x9b1m"})
    monkeypatch.undo()
    assert run("run", "no\x1b[2J\x9bsuch")[2] == "jllama: no\\x1b[2J\\x9bsuch: no such file or folder\n"


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError("Unable to allocate 12.0 GiB for an array"),
        "RESOURCE_EXHAUSTED: Out of memory allocating 12884901888 bytes.",
        "INTERNAL: std::bad_alloc",
    ],
)
def test_too_little_memory_is_one_line(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception | str
) -> None:
    import jax

    def load(*args: object, **named: object) -> None:
        raise jax.errors.JaxRuntimeError(fault) if isinstance(fault, str) else fault

    monkeypatch.setattr("jllama.checkpoint.load", load)
    message = error(run("run", str(model)))
    assert message.startswith("jllama: out of memory")
    assert "--dtype=int8" in message
    assert ("12" in message) == ("12" in str(fault))


def test_a_limit_that_jax_cannot_start_in_is_named(model: Path) -> None:
    command = f"ulimit -v 1000000; exec {sys.executable} main.py run {model} --compile_cache="
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "allows 1.0 GB" in error((done.returncode, done.stdout, done.stderr))


def test_faults_of_our_own_keep_their_traceback() -> None:
    assert errors.sentence(TypeError("a bug")) is None
    assert errors.sentence(RuntimeError("another")) is None


def test_ctrl_c_while_python_imports() -> None:
    # JAX is a module that takes forever: the signal comes in the middle of its import.
    code = (
        "import importlib.abc, os, signal, sys, time\n"
        "class Slow(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'jax':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from jllama.cli import run\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_conversion_that_is_ended_leaves_nothing(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    from jllama.checkpoint import llama2c
    from jllama.checkpoint.files import replacing

    def save(params: object, path: str, *, version: int) -> None:
        with replacing(Path(path)) as file:
            file.write(b"half")
            assert any(tmp_path.iterdir())
            os.kill(os.getpid(), number)
            time.sleep(30)

    monkeypatch.setattr(llama2c, "save", save)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as e:
        run("convert", str(model), f"{tmp_path}/out.bin")
    assert e.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before


@pytest.mark.slow
def test_damaged_programs_are_replaced(model: Path, tmp_path: Path) -> None:
    command = [*MAIN, "run", str(model), "one", *FLAGS, f"--compile_cache={tmp_path}"]

    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    first = start()
    assert stat.S_IMODE(tmp_path.stat().st_mode) & 0o077 == 0
    entries = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 200]
    for path in entries:
        os.truncate(path, 100)
    second = start()
    assert second.stdout == first.stdout
    assert second.stderr.count("\n") == 1, second.stderr
    assert all(path.stat().st_size > 200 for path in entries)


def test_the_folder_of_programs_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        (tmp_path / f"{i}-cache").write_bytes(bytes(100))
        os.utime(tmp_path / f"{i}-cache", (i, i))
    monkeypatch.setattr(folders, "_CACHE_BYTES", 250)
    folders._prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3-cache", "4-cache"]


def test_prompts_with_ids(run: Run, model: Path, tmp_path: Path) -> None:
    entries = [{"prompt": "one", "id": "a"}, {"prompt": "two"}, {"prompt": "one", "id": 7, "max_new_tokens": 1}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, entries)))
    (tmp_path / "p.json").write_text(json.dumps([*entries[:1], "two", entries[2]]))
    code, out, _ = run("run", str(model), f"--prompt_file={tmp_path}/p.jsonl", *FLAGS)
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line.get("id") for line in found] == ["a", None, 7]
    assert [line["tokens"] for line in found] == [3, 3, 1]
    assert "id" not in found[1]
    assert run("run", str(model), f"--prompt_file={tmp_path}/p.json", *FLAGS)[1] == out
    results = tmp_path / "out.jsonl"
    results.write_text(out.splitlines(keepends=True)[0])
    flags = (f"--prompt_file={tmp_path}/p.jsonl", f"--output={results}", "--resume", *FLAGS)
    assert run("run", str(model), *flags)[0] == 0
    assert results.read_text() == out
    results.write_text(out.splitlines(keepends=True)[2])
    assert "another prompt" in error(run("run", str(model), *flags))


def test_a_reader_leaves_while_the_pipe_of_prompts_stays_open(model: Path) -> None:
    command = [*MAIN, "run", str(model), "--prompt_file=-", *FLAGS, f"--compile_cache={PROGRAMS}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], 120)[0]
        assert json.loads(process.stdout.readline())["prompt"] == "one"
        process.stdout.close()
        process.stdin.write(b"two\n")
        process.stdin.flush()
        assert process.wait(timeout=60) == 0, process.stderr.read()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.json", '{"prompt": "a"}', "expected an array"),
        ("p.json", "[1]", 'item 1: expected an object with a "prompt"'),
        ("p.json", '["a", {"prompt": "b", "max_tokens": 3}]', "item 2: unknown settings max_tokens"),
        ("p.json", "[", "p.json: "),
        ("p.jsonl", '{"prompt": "a", "id": [1]}', "line 1: id = [1]: expected a string or an integer"),
        ("p.jsonl", '{"prompt": "a", "id": true}', "line 1: id = True"),
    ],
)
def test_prompt_files_that_are_none(run: Run, model: Path, tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    code, out, err = run("run", str(model), f"--prompt_file={tmp_path}/{name}")
    assert (code, out) == (1, "")
    assert words in err


def test_whatever_comes_through_a_pipe_is_a_message(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Listening(chat.Session):
        def ask(self, question: str):  # type: ignore[no-untyped-def]
            asked.append(question)
            return super().ask(question)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat, "Session", Listening)
    lines = [b"\xef\xbb\xbfhello", b"/save x.json", b"/etc what?", b"//x", b"", b"/exit"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\r\n".join(lines))))
    code, out, _ = run("chat", str(model), *FLAGS)
    assert code == 0
    assert asked == ["hello", "/save x.json", "/etc what?", "//x", "/exit"]
    assert out.count("\n") >= 5
    assert not (tmp_path / "x.json").exists()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n\xff\n")))
    code, _, err = run("chat", str(model), *FLAGS)
    assert code == 1
    assert "standard input, line 2: " in err


def test_a_template_that_was_guessed_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    _, _, err = run("chat", "stories")
    assert "no chat template: using the built-in template for </s>" in err or "stories: no chat template" in err


class Terminal:
    """A chat in a terminal of its own, typed to and read from."""

    def __init__(self, *args: str, **environment: str) -> None:
        try:
            self.ours, theirs = pty.openpty()
        except OSError as e:
            pytest.skip(f"no terminals here: {e}")
        variables = os.environ | {"TERM": "xterm"} | environment
        self.process = subprocess.Popen(
            [*MAIN, *args], cwd=ROOT, env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.shown = ""

    def wait_for(self, text: str) -> str:
        """Read up to `text`, and return what came before."""
        end = time.monotonic() + 120
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self.ours], [], [], 1)[0]:
                self.shown += os.read(self.ours, 65536).decode()
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def leave(self) -> int:
        """Read to the end."""
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(self.ours, 65536):
                pass
        return self.process.wait(timeout=60)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *args: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.mark.slow
def test_a_chat_in_a_terminal(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("readline")
    flags = ("chat", str(model), *FLAGS, f"--compile_cache={tmp_path}/cache")
    state = tmp_path / "state"

    def said(file: str) -> list[str]:
        return [each["content"] for each in json.loads((tmp_path / file).read_text()) if each["role"] == "user"]

    with Terminal(*flags, XDG_STATE_HOME=str(state)) as terminal:
        terminal.wait_for("Any other line is a message")
        for line, answer in (
            ("//usr", "\n"),
            ("/etc is?", "\n"),
            ("\x1b[200~two\nlines\x1b[201~", "\n"),  # pasted
            (f"/save {tmp_path}/talk.json", "wrote"),
            (f"/save {tmp_path}/talk.json", "File exists"),
            ("x" * 6000, "tokens"),  # more than a terminal gives in one line without an editor
        ):
            terminal.wait_for("> ")
            terminal.type(f"{line}\n")
            terminal.wait_for(answer)
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.leave() == 0
    assert said("talk.json") == ["/usr", "/etc is?", "two\nlines"]
    history = state / "jllama" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    with Terminal(*flags, XDG_STATE_HOME=str(state)) as terminal:
        for line in ("\x1b<", f"/save {tmp_path}/again.json", "/exit"):  # the first: back to the first line of before
            terminal.wait_for("> ")
            terminal.type(f"{line}\n")
        assert terminal.leave() == 0
    assert said("again.json") == ["/usr"]


@pytest.mark.slow
def test_a_first_start_says_what_takes_so_long(model: Path, tmp_path: Path) -> None:
    with Terminal("run", str(model), "one", *FLAGS, f"--compile_cache={tmp_path}/cache") as terminal:
        terminal.wait_for("compiling for this model")
        terminal.wait_for("the next start is faster")
        terminal.wait_for("one")
        assert "ready after" in terminal.wait_for("tokens/s]")
        assert terminal.leave() == 0
