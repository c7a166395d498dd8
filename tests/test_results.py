"""Files of results: what is written, what is kept of a run that was killed, and what is refused."""

import json
from pathlib import Path

import oracle
import pytest
from console import Run, error
from trained import write_tokenizer

from jllama.config import Config


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model and ten prompts."""
    folder = tmp_path_factory.mktemp("model")
    config = Config(16, 24, 1, 2, 1, 330, 64)
    oracle.write_v0(folder / "model.bin", oracle.random_weights(config, tied=True), config)
    write_tokenizer(folder / "tokenizer.bin", 330)
    (folder / "p.txt").write_text("".join(f"{'abcde'[: i % 5]} {i}\n" for i in range(10)))
    chosen = [f"--checkpoint={folder}/model.bin", f"--prompt_file={folder}/p.txt", "--batch_size=1"]
    return [*chosen, "--temperature=0", "--max_new_tokens=4"]


@pytest.fixture
def whole(run: Run, flags: list[str]) -> str:
    """What a run prints that nobody kills."""
    code, out, _ = run(*flags)
    assert code == 0
    assert out.count("\n") == 10
    return out


def test_output_is_what_would_be_printed(run: Run, flags: list[str], whole: str, tmp_path: Path) -> None:
    code, out, _ = run(*flags, f"--output={tmp_path}/out.jsonl")
    assert (code, out) == (0, "")
    assert (tmp_path / "out.jsonl").read_text() == whole
    one = [*flags[:1], "--prompt=abc", "--temperature=0", "--max_new_tokens=4", f"--output={tmp_path}/one.jsonl"]
    assert run(*one)[:2] == (0, "")
    assert json.loads((tmp_path / "one.jsonl").read_text())["prompt"] == "abc"


@pytest.mark.parametrize("end", ["", '{"prompt": "a', '{"prompt": "abcde', "[", "\ufffd"])
@pytest.mark.parametrize("done", [0, 1, 7, 10])
def test_a_killed_run_goes_on(run: Run, flags: list[str], whole: str, tmp_path: Path, done: int, end: str) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("".join(whole.splitlines(keepends=True)[:done]) + (end if done < 10 else ""))
    code, out, err = run(*flags, f"--output={output}", "--resume")
    assert (code, out) == (0, "")
    assert output.read_text() == whole
    tokens = sum(json.loads(line)["tokens"] for line in whole.splitlines()[done:])
    # The first token of each is of its prompt's reading.
    assert f"generation {tokens - 10 + done} tokens" in err or done == 10


def test_nothing_there_is_a_run_from_the_start(run: Run, flags: list[str], whole: str, tmp_path: Path) -> None:
    assert run(*flags, f"--output={tmp_path}/new.jsonl", "--resume")[0] == 0
    assert (tmp_path / "new.jsonl").read_text() == whole


def test_what_cannot_be_gone_on_with(run: Run, flags: list[str], whole: str, tmp_path: Path) -> None:
    output, other = tmp_path / "out.jsonl", tmp_path / "other.txt"
    lines = whole.splitlines(keepends=True)

    def refused(content: str, *more: str) -> str:
        output.write_text(content)
        message = error(run(*flags, f"--output={output}", *more))
        assert output.read_text() == content
        return message

    assert "exists; expected a new file, or --resume" in refused(whole)
    assert "line 2: the result of another prompt" in refused(lines[0] + lines[2], "--resume")
    assert "line 3: no result" in refused(lines[0] + lines[1] + "no json\n", "--resume")
    assert "line 1: no result" in refused('{"prompt": " 0"}\n', "--resume")
    assert "line 1: no result" in refused("[" * 100_000 + "\n", "--resume")
    assert "line 1: no result" in refused("9" * 5000 + "\n", "--resume")
    assert "expected prompt, text, tokens, finish_reason, logprobs" in refused(whole, "--resume", "--logprobs")
    other.write_text("x\n")
    assert "line 1: the result of another prompt" in refused(whole, "--resume", f"--prompt_file={other}")
    other.write_text(" 0\n")
    assert "line 2: the result of another prompt" in refused(lines[0] + lines[1], "--resume", f"--prompt_file={other}")
    assert "expected both" in error(run(*flags, "--resume"))
    assert "expected both" in error(run(flags[0], "--prompt=a", f"--output={output}", "--resume"))
    assert "regular file" in error(run(flags[0], "--prompt_file=-", f"--output={output}", "--resume"))
    assert "no such folder" in error(run(*flags, f"--output={tmp_path}/missing/out.jsonl"))
