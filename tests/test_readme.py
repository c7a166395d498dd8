"""What the documentation tells people to type: every command is understood, and the Python runs."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from console import reset_flags
from test_rooms import ROOMS

from jllama.cli import commands

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "docs/devices.md", "docs/benchmark.md", "docs/embedded_model.md", "docs/serving.md"]


def blocks(page: str, language: str) -> str:
    """The code of a page in one language, lines that end in a backslash joined."""
    found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(found).replace("\\\n", " ")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_understood(page: str) -> None:
    lines = [re.split(r"(?:jllama|python main\.py) ", line, maxsplit=1) for line in blocks(page, "sh").splitlines()]
    calls = [shlex.split(line[1], comments=True) for line in lines if len(line) == 2 and "pip" not in line[0]]
    for words in calls:
        reset_flags()
        assert commands.parse(["jllama", *words]) in commands.COMMANDS, words
    reset_flags()
    assert calls or page != "README.md"


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("README.md", "python").replace('"smollm2"', '"stories"'), {})
    out = capsys.readouterr().out
    assert len(re.findall(r" (?:length|stop)$", out, re.MULTILINE)) == 2


def test_the_two_set_up_commands() -> None:
    first, *_, last = [line for line in blocks("README.md", "sh").splitlines() if line.startswith("python3 -m venv")]
    assert first.endswith("python main.py")
    found = subprocess.run(
        ["bash", "-c", "set -e; " + re.search(r"^command=.*$", (ROOT / ".ci/run").read_text(), re.MULTILINE)[0]
         + '; echo "$command"'],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert last.endswith(found)
    assert found.startswith("pip install -e ")
    assert found.endswith("pytest")


def test_the_map_shows_every_room() -> None:
    shown = re.findall(r"^  (\w+)(?:\.py|/) ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(shown) == {room for room in ROOMS if not room.startswith("__")} | {"stories"}
    assert len(shown) == len(set(shown))
