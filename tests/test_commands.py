"""Commands as people type them: words for flags, what goes with what, help, versions, and how fast they are there."""

import importlib.metadata
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from console import MAIN, Run, error, write_model

import jllama
from jllama import checkpoint
from jllama.cli.commands import COMMANDS
from jllama.cli.flags import DTYPES, GROUPS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer beside it."""
    return write_model(tmp_path_factory.mktemp("model"))


def test_words_stand_for_flags(run: Run, model: Path, tmp_path: Path) -> None:
    flags = ("--temperature=0", "--max_new_tokens=4")
    expected = run(f"--checkpoint={model}", "--prompt=one two", *flags)
    assert expected[:2] == (0, expected[1])
    assert expected[1].startswith("one two")
    assert run("run", str(model), "one two", *flags)[:2] == expected[:2]
    assert run("--temperature", "0", "run", "--max-new-tokens=4", str(model), "one two")[:2] == expected[:2]
    assert run("run", f"--checkpoint={model}", "one two", *flags)[:2] == expected[:2]
    assert run("convert", str(model), f"{tmp_path}/out.bin")[0] == 0
    assert (tmp_path / "out.bin").stat().st_size == model.stat().st_size
    (tmp_path / "text.txt").write_text("one two")
    assert run("perplexity", str(model), f"{tmp_path}/text.txt")[1].startswith("float32: perplexity ")
    assert "of weights" in run("plan", str(model))[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "MODEL", "one", "two"], "a prompt of several words goes in quotes"),
        (["run", "MODEL", "one", "--prompt=two"], "--prompt is there already"),
        (["run", "MODEL", "--mode=chat"], "no --mode with the command run"),
        (["run", "MODEL", "--system_prompt=x"], "--system_prompt goes with chat, not with run: see jllama run --help"),
        (["run", "MODEL", "--bench_new=3"], "--bench_new goes with bench, not with run"),
        (["chat", "MODEL", "--prompt=x"], "--prompt goes with run and perplexity, not with chat"),
        (["chat", "MODEL", "hello"], "expected jllama chat [MODEL]"),
        (["--mode=chat", "--prompt=x"], "not with chat"),
        (["--mode=chat", "--save=x.bin"], "--save converts"),
        (["bench", "MODEL", "--dtype=int8"], "--dtype goes with"),
        (["plan", "MODEL", "--temperature=1"], "--temperature goes with run, chat and serve, not with plan"),
        (["convert", "MODEL"], "jllama convert MODEL PATH"),
        (["convert", "MODEL", "x", "--save_form=huggingface", "--save_version=1"], "--save_version"),
        (["--save_version=1"], "--save_version goes with convert"),
        (["run", "MODEL", "--prompt=a", "--prompt=b", "--noecho"], "--echo is for a single prompt"),
        (["chta", "MODEL"], "unexpected argument 'chta': did you mean chat?"),
        (["run", "nosuch.gguf"], "nosuch.gguf: no such file or folder"),
        (["run", "owner/name"], "it would be hf://owner/name"),
        (["run", "/dev/null"], "a pipe or device"),
        (["run", "--checkpoint=~nobody-here/model.bin"], "~nobody-here/model.bin: no such file"),
    ],
)
def test_what_does_not_go_together_is_refused(run: Run, model: Path, words: list[str], expected: str) -> None:
    assert expected in error(run(*[str(model) if word == "MODEL" else word for word in words]))


def test_a_home_is_found_and_so_is_a_tokenizers_folder(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model.bin").write_bytes(model.read_bytes())
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ("--temperature=0", "--max_new_tokens=2", "--prompt=a")
    code, out, err = run("--checkpoint=~/model.bin", f"--tokenizer={model.parent}", *flags)
    assert (code, out[:1]) == (0, "a"), err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_its_own_help(run: Run, name: str) -> None:
    code, out, err = run(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"jllama {name} ")
    shown = set(re.findall(r"^  --(\w+)", out, re.MULTILINE))
    assert shown == {f.holder.name for group in GROUPS.values() for f in group if name in f.commands.split()}
    assert ("system_prompt" in shown) == (name == "chat")
    assert f"jllama {name}" in run("--help")[1]


def test_versions(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith(f"jllama {jllama.__version__}\njax {importlib.metadata.version('jax')}, ")
    assert "kernels" in out.splitlines()[2]
    assert jllama.__version__ == importlib.metadata.version("jllama")


def test_the_flags_know_the_dtypes_there_are() -> None:
    assert DTYPES == checkpoint.DTYPES


def test_every_name_that_is_exported_is_there() -> None:
    assert {name for name in jllama.__all__ if not hasattr(jllama, name)} == set()
    assert set(jllama.__all__) <= set(dir(jllama))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = jllama.nonsense


@pytest.mark.parametrize("start", [["main.py"], ["-m", "jllama"]])
def test_help_needs_neither_jax_nor_numpy(start: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *start, "chat", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith("jllama chat")
    imported = set(re.findall(r"\| +(\w+)", done.stderr))
    assert "absl" in imported
    assert imported & {"jax", "numpy", "jinja2", "tokenizers", "sentencepiece", "tqdm", "chex"} == set()


def test_help_takes_a_moment() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*MAIN, "--help"], cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: that of a busy machine's clock says nothing.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3
