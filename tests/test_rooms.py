"""Which module may import which, and how big the heart may get."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "jllama"

# What each room may import from the others; a folder is one room.
ROOMS = {
    "errors": set(),  # which all may import
    "rope": set(),
    "rotary": {"config"},
    "config": {"rope"},
    "kernels": set(),
    "run": {"kernels"},
    "tools": {"chat", "response_format", "settings"},
    "tensors": {"config"},
    "families": {"config", "rope", "tensors"},
    "weights": {"kernels", "run"},
    "norms": {"config"},
    "experts": {"config", "run", "weights"},
    "model": {"config", "experts", "norms", "rotary", "kernels", "run", "weights"},
    "processors": set(),
    "likely": set(),
    "sampling": {"processors"},
    "decode": {"likely", "model", "processors", "sampling"},
    "rows": {"decode", "model"},
    "speculation": {"decode", "model", "sampling", "weights"},
    "speculator": {"decode", "kernels", "mesh", "model", "programs", "sampling", "speculation", "weights"},
    "mesh": {"config", "model", "tensors", "weights"},
    "processes": set(),
    "executables": {"kernels"},
    "programs": {"decode", "executables", "likely", "mesh", "model", "rows", "sampling", "speculation"},
    "text": set(),
    "gguf_file": set(),
    "tokenizer": {"gguf_file", "text"},
    "sandbox": set(),
    "chat": {"gguf_file", "sandbox", "tokenizer"},
    "checkpoint": {
        "config",
        "kernels",
        "experts",
        "families",
        "norms",
        "rope",
        "rotary",
        "weights",
        "model",
        "gguf_file",
        "mesh",
        "run",
        "tensors",
    },
    "response_format": set(),
    "settings": {"response_format", "sampling"},
    "grammar": {"response_format", "tokenizer"},
    "runner": {"grammar", "mesh", "model", "processes", "programs", "settings", "speculator"},
    "row": {"decode", "grammar", "runner", "sampling"},
    "pool": {"decode", "grammar", "mesh", "programs", "row", "runner", "sampling", "settings", "speculator"},
    "generation": {"pool", "row", "runner", "settings", "text", "tokenizer", "tools"},
    "llm": {"chat", "checkpoint", "config", "generation", "gguf_file", "grammar", "mesh", "model", "pool", "programs"}
    | {"run", "runner", "settings", "speculator", "tokenizer", "tools"},
    "prompts": {"generation", "settings"},
    "ray": {"generation", "llm", "settings"},
    "session": {"chat", "generation", "llm", "pool", "row", "settings"},
    "server": {"chat", "decode", "generation", "grammar", "llm", "mesh", "model", "pool", "programs", "row"}
    | {"runner", "sampling", "settings", "tokenizer", "tools"},
    "machine": {"run", "weights"},
    "bench": {
        "machine",
        "decode",
        "model",
        "plan",
        "programs",
        "run",
        "runner",
        "sampling",
        "settings",
        "tensors",
        "weights",
    },
    "report": {"bench"},
    "results": {"prompts"},
    "plan": {"checkpoint", "mesh", "model", "run", "runner"},
    "cli": {"bench", "chat", "checkpoint", "config", "errors", "generation", "kernels", "llm", "mesh", "model"}
    | {"plan", "processes", "prompts", "report", "response_format", "results", "run", "server", "session", "settings"}
    | {"tokenizer"},
    "__init__": {"checkpoint", "generation", "llm", "response_format", "session", "settings", "tokenizer"},
    "__main__": {"cli"},
}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The rooms that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "jllama":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jllama."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("jllama.")}
    return found - {room(path)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    assert imports(path) <= ROOMS[room(path)] | {"errors"}


def test_every_room_is_there() -> None:
    assert {room(path) for path in PACKAGE.rglob("*.py")} == set(ROOMS)


def test_the_heart_can_be_read_in_an_hour() -> None:
    heart = ("config", "weights/plain", "model", "sampling", "decode")
    assert sum(len((PACKAGE / f"{name}.py").read_text().splitlines()) for name in heart) < 1000


def test_only_the_command_line_prints() -> None:
    for path in PACKAGE.rglob("*.py"):
        calls = {
            n.func.id
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        assert "print" not in calls or room(path) == "cli", path
