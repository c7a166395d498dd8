"""The model in the box: it tells a story with nothing but the package, and the script that makes it still runs."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from console import Run, error

from jllama import LLM, checkpoint
from jllama.checkpoint import CheckpointError, hub

ROOT = Path(__file__).resolve().parents[1]

# Written for this test, so no model has seen it.
STORY = """\
Once upon a time, there was a little girl named Mia. Mia had a red kite. She loved to fly it in the park. One day, \
the wind was very strong and the kite flew up into a big tree. Mia was sad. She could not reach it.
A kind bird saw Mia and said, "Do not cry. I can help you." The bird flew up and pulled the kite out of the tree. \
Mia was so happy. She said, "Thank you, bird!" and gave the bird some bread. From that day on, they were best friends.
"""


def program(*args: str) -> tuple[int, str, str]:
    """Run main.py as a user does, but without the user's cache."""
    done = subprocess.run(
        [sys.executable, "main.py", "--compile_cache=", *args], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_the_program_alone_tells_a_story() -> None:
    code, out, err = program("--seed=1")
    assert code == 0, err
    assert len(out) > 200
    assert out.rstrip()[-1] in '.!?"', out
    assert set(out) <= {"\n", *map(chr, range(32, 127))}, out
    assert not {"the", "was", "and"} - set(out.split())


def test_a_prompt_is_continued(run: Run) -> None:
    code, out, _ = run("--prompt=The little robot", "--seed=1")
    assert code == 0
    assert out.startswith("The little robot")
    assert len(out) > 100


def test_its_name_stands_for_its_tokenizer_too(run: Run, tmp_path: Path) -> None:
    model = shutil.copy(hub.local("stories"), tmp_path)
    flags = ("--prompt=The little robot", "--seed=1", "--max_new_tokens=8")
    found = run(f"--checkpoint={model}", "--tokenizer=stories", *flags)
    assert found[:2] == run(*flags)[:2]
    assert found[0] == 0


def test_it_knows_how_stories_go() -> None:
    llm = LLM.load("stories", dtype="float32")
    assert llm.score(STORY).bits_per_byte < 0.9
    backwards = " ".join(reversed(STORY.split()))
    assert llm.score(backwards).bits_per_byte > 1.5
    assert LLM.load("stories").dtype == "q80"
    assert LLM.load("stories").score(STORY).bits_per_byte < 1.02 * llm.score(STORY).bits_per_byte


@pytest.mark.slow
def test_it_knows_tiny_stories_as_well_as_the_model_that_wrote_its_text(shared: Path) -> None:
    text = (shared / "text/tinystories_sample.txt").read_text()
    writer = LLM.load(shared / "models/stories260K/stories260K.bin").score(text).bits_per_byte
    assert writer == pytest.approx(1.398254, abs=1e-5)  # the oracle's, in windows of the same 511 tokens
    assert LLM.load("stories").score(text).bits_per_byte < writer


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in hub.local("stories").parent.iterdir()) < 4 * 2**20


def test_a_path_of_that_name_has_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = ROOT / "jllama/stories/model.bin"
    assert hub.local("stories") == packaged
    (tmp_path / "stories").write_bytes(b"")
    assert hub.local("stories") == packaged
    assert hub.local(Path("stories")) == Path("stories")
    with pytest.raises(CheckpointError, match="stories: looks like an empty file"):
        checkpoint.load("./stories")
    for given, warnings in (
        ((), []),
        (("--checkpoint=stories",), ["stories is a model's name; the file or folder here is ./stories"]),
    ):
        code, out, _ = run("--max_new_tokens=5", *given)
        assert code == 0
        assert len(out) > 5
        assert caplog.messages == warnings


def test_random_weights_take_its_place(run: Run) -> None:
    assert "--tokenizer" in error(run(f"--config={ROOT}/configs/stories260K.toml"))
    assert "not both" in error(run(f"--config={ROOT}/configs/stories260K.toml", "--checkpoint=stories"))


@pytest.mark.slow
def test_the_wheel_holds_the_model_and_finds_it(tmp_path: Path) -> None:
    # From a copy, because building leaves folders behind.
    shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(tmp_path / "copy")]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("jllama-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {"jllama/stories/model.bin", "jllama/stories/tokenizer.model"} <= set(names)
        if (platform.system(), platform.machine()) == ("Linux", "x86_64") and shutil.which("g++"):
            assert any(name.startswith("jllama/kernels/_native") for name in names)
        archive.extractall(tmp_path / "site")
    code = "from jllama import cli; from jllama.checkpoint import hub; print(hub.local('stories')); cli.run()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--compile_cache=", "--max_new_tokens=20", "--verbosity=1"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site/jllama/stories/model.bin\n"))
    assert len(done.stdout) > len(str(tmp_path)) + 60


@pytest.mark.slow
def test_the_script_that_makes_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    flags = ["--smoke", f"--work={tmp_path}", "--writer=stories", f"--text={tmp_path}/text.txt"]
    (tmp_path / "text.txt").write_text(STORY)

    def train() -> None:
        script = [sys.executable, "tools/train_stories.py", *flags]
        done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr

    train()
    steps, _, training, held_out = np.loadtxt(tmp_path / "curve.csv", delimiter=",").T
    assert steps.tolist() == sorted(set(steps.tolist()))
    assert training[-1] < training[0]
    assert held_out[-1] < held_out[0]
    for name, dtype in (("int8", "q80"), ("float32", "float32")):
        llm = LLM.load(tmp_path / name / "model.bin")
        assert llm.dtype == dtype
        assert len(llm.generate([""], max_new_tokens=5, temperature=0.0)[0].tokens) == 5
    report = (tmp_path / "report.md").read_text()
    assert all(f"| {name} |" in report for name in ("int8", "float32", "writer"))
    assert (tmp_path / "curve.png").stat().st_size > 1000
    # What is there is not made again.
    before = (tmp_path / "int8/model.bin").read_bytes(), (tmp_path / "written-000.json").stat().st_mtime_ns
    train()
    assert before == ((tmp_path / "int8/model.bin").read_bytes(), (tmp_path / "written-000.json").stat().st_mtime_ns)
