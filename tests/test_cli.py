"""The command line: what goes to stdout and stderr, and what an error looks like."""

import gc
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from console import MAIN, Run, error, write_model
from trained import write_tokenizer

from jllama.cli import perplexity
from jllama.cli.flags import GROUPS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer beside it."""
    return write_model(tmp_path_factory.mktemp("model"))


def test_a_story_with_its_prompt_and_the_times(run: Run, shared: Path) -> None:
    flags = (f"--checkpoint={shared}/models/stories260K/stories260K.bin", "--temperature=0", "--max_new_tokens=20")
    code, out, err = run(*flags)
    assert (code, out) == (0, "Once upon a time, there was a little girl named Lily. She loved to play\n")
    times = r"load [\d.]+ s, compile [\d.]+ s, prompt 1 tokens in [\d.]+ s \([\d.]+ tokens/s\), "
    assert re.fullmatch(times + r"generation 19 tokens in [\d.]+ s \([\d.]+ tokens/s\)\n", err)
    _, out, _ = run(*flags, "--prompt=Once upon a time", "--max_new_tokens=5")
    assert out == "Once upon a time, there was a little\n"
    _, out, _ = run(*flags, "--prompt=Once upon a time", "--max_new_tokens=5", "--noecho")
    assert out == ", there was a little\n"


@pytest.mark.parametrize(
    "file", ["stories260K", "stories260K_v1", "stories260K_q80", "stories260K_q80_gs4", "stories260K_untied"]
)
def test_every_reference_file_tells_a_story(run: Run, shared: Path, file: str) -> None:
    code, out, _ = run(f"--checkpoint={shared}/models/stories260K/{file}.bin", "--temperature=0.8", "--seed=1")
    assert code == 0
    assert len(out) > 100
    if "untied" not in file:
        assert out.startswith("Once upon a time")
    assert run(f"--checkpoint={shared}/models/stories260K/{file}.bin", "--temperature=0.8", "--seed=1")[1] == out


def test_several_prompts_are_json_lines(run: Run, model: Path) -> None:
    code, out, err = run(
        f"--checkpoint={model}", "--prompt=one", "--prompt=two three", "--temperature=0", "--max_new_tokens=4"
    )
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["prompt"] for line in lines] == ["one", "two three"]
    assert [set(line) for line in lines] == [{"prompt", "text", "tokens", "finish_reason"}] * 2
    assert lines[0]["tokens"] == 4
    assert lines[0]["finish_reason"] == "length"
    assert "load" in err
    _, out, _ = run(f"--checkpoint={model}", "--prompt=one", "--logprobs", "--temperature=0", "--max_new_tokens=4")
    line = json.loads(out)
    assert len(line["logprobs"]) == 4
    assert all(x < 0 for x in line["logprobs"])


def test_prompt_files(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (f"--checkpoint={model}", "--temperature=0", "--max_new_tokens=3", "--batch_size=2")
    text = "\ufeffone\n\ntwo é\r\nthree"
    (tmp_path / "p.txt").write_bytes(text.encode())
    _, out, _ = run(*flags, f"--prompt_file={tmp_path}/p.txt")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "", "two é", "three"]
    assert "é" in out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run(*flags, "--prompt_file=-")[1] == out

    objects = [
        {"prompt": "one", "max_new_tokens": 1},
        {"prompt": "two é"},
        {"prompt": "x", "stop": [lines[0]["text"][:1]]},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, objects)) + "\n\n")
    code, out, _ = run(*flags, f"--prompt_file={tmp_path}/p.jsonl")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["tokens"] for line in found[:2]] == [1, 3]
    assert found[1] == lines[2]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", '{"prompt": "a"}\nnot json\n', "line 2"),
        ("p.jsonl", '{"prompt": "a"}\n[1]\n', 'line 2: expected an object with a "prompt"'),
        ("p.jsonl", '{"prompt": 1}\n', "line 1"),
        ("p.jsonl", '{"prompt": "a", "tempreature": 1}\n', "line 1: unknown settings tempreature"),
        ("p.jsonl", '{"prompt": "a", "temperature": "hot"}\n', "line 1: temperature = 'hot'"),
        ("p.jsonl", '{"prompt": "a", "temperature": 1' + 400 * "0" + "}\n", "line 1: temperature = 1000"),
        ("p.jsonl", "[" * 100000, "line 1"),
        ("p.txt", "fine\n" + "long " * 50, "line 2: the prompt has"),
        ("p.txt", b"fine\nbad \xff\n", "line 2"),
    ],
)
def test_a_fault_in_a_prompt_file_comes_up_before_any_work(
    run: Run, model: Path, tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = run(f"--checkpoint={model}", f"--prompt_file={tmp_path}/{name}")
    assert (code, out) == (1, "")
    assert words in err.splitlines()[-1]


def test_perplexity(run: Run, shared: Path, tmp_path: Path) -> None:
    text = (shared / "text/tinystories_sample.txt").read_text()[:3000]
    (tmp_path / "text.txt").write_text(text)
    flags = (
        f"--checkpoint={shared}/models/stories260K/stories260K.bin",
        "--mode=perplexity",
        f"--prompt_file={tmp_path}/text.txt",
    )
    code, out, _ = run(*flags)
    pattern = r"float32: perplexity ([\d.]+), ([\d.]+) bits a byte, (\d+) tokens in windows of 512\n"
    found, bits, tokens = map(float, re.fullmatch(pattern, out).groups())
    assert code == 0
    assert abs(np.log2(found) * tokens / len(text.encode()) - bits) < 1e-3
    assert 3 < found < 5
    code, out, _ = run(*flags, "--dtype=int8")
    assert re.match(
        r"int8: perplexity [\d.]+.*\nfloat32: perplexity [\d.]+.*\ngreedy agreement with float32: 9\d\.\d+%\n$", out
    )
    assert "expected --prompt_file" in error(run(*flags[:2]))


def test_perplexity_never_holds_two_models(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    load, weights, held = perplexity.load, perplexity.weights, []

    def loaded():
        llm, seconds = load()
        held.append(weakref.ref(llm))
        return llm, seconds

    def compared(dtype: str):
        gc.collect()
        held.append(held[0]())
        return weights(dtype)

    monkeypatch.setattr(perplexity, "load", loaded)
    monkeypatch.setattr(perplexity, "weights", compared)
    code, out, _ = run("--mode=perplexity", "--dtype=int8", "--prompt=one two")
    assert code == 0
    assert "greedy agreement" in out
    assert held[1] is None


def test_save_and_load_again(run: Run, shared: Path, tmp_path: Path) -> None:
    source = shared / "models/stories260K/stories260K.bin"
    for version in ("0", "1", "2"):
        code, out, err = run(f"--checkpoint={source}", f"--save={tmp_path}/v{version}.bin", f"--save_version={version}")
        assert (code, out, err) == (0, "", f"jllama: wrote {tmp_path}/v{version}.bin\n")
    assert (tmp_path / "v1.bin").read_bytes() == (shared / "models/stories260K/stories260K_v1.bin").read_bytes()
    assert (tmp_path / "v2.bin").read_bytes() == (shared / "models/stories260K/stories260K_q80.bin").read_bytes()
    assert "missing" in error(run(f"--checkpoint={source}", f"--save={tmp_path}/missing/out.bin"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v0.bin", "v1.bin", "v2.bin"]


def test_random_weights_of_a_config(run: Run, shared: Path) -> None:
    flags = (
        f"--config={ROOT}/configs/stories260K.toml",
        f"--tokenizer={shared}/models/stories260K/tok512.bin",
        "--max_new_tokens=5",
    )
    code, out, _ = run(*flags, "--prompt=Once", "--seed=3")
    assert (code, out[:4]) == (0, "Once")
    assert "--tokenizer" in error(run(flags[0]))


def test_an_empty_checkpoint(run: Run) -> None:
    assert "--checkpoint is empty" in error(run("--checkpoint="))
    assert "context = 9999: expected 1 to 384 tokens" in error(run("--checkpoint=stories", "--context=9999"))


def test_help(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for name in [f"--{flag.holder.name}" for group in GROUPS.values() for flag in group]:
        assert name in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature=-1"], "temperature = -1.0: expected"),
        (["--temperature=hot"], "--temperature=hot"),
        (["--top_p=2", "--top_k=-3"], "top_k = -3"),
        (["--max_new_tokens=-1"], "max_new_tokens = -1"),
        (["--batch_size=0", "--prompt=a", "--prompt=b"], "batch_size = 0"),
        (["--batch_size=" + 30 * "9", "--prompt=a", "--prompt=b"], "batch_size = 999"),
        (["--temperature=1e200"], "temperature = 1e+200"),
        (["--dtype=float16"], "dtype"),
        (["--mode=sing"], "mode"),
        (["--nonsense=1"], "nonsense"),
        (["story"], "unexpected argument 'story'"),
        (["--stop="], "stop"),
        (["--prompt=" + "long " * 50], "tokens: expected 1 to 64"),
        (["--prompt_file=/nowhere.txt"], "/nowhere.txt"),
        (["--prompt=a", "--prompt_file=b"], "not both"),
        (["--config=x.toml"], "not both"),
        (["--tokenizer=/nowhere"], "/nowhere"),
        (["--rope_theta=-1"], "rope_theta = -1.0"),
    ],
)
def test_wrong_flags(run: Run, model: Path, flags: list[str], words: str) -> None:
    code, out, err = run(f"--checkpoint={model}", *flags)
    assert (code, out) == (1, "")
    assert words in err.splitlines()[0]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file or folder"),
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        (b"GGUF" + bytes(300), "GGUF"),
        (struct.pack("<7i", 64, 172, 5, 8, 4, 512, 512), "1056540"),
        (struct.pack(">7i", 64, 172, 5, 8, 4, 512, 512) + bytes(100), "big-endian"),
        (struct.pack("<7i", 64, 172, 5, 7, 4, 512, 512), "n_heads = 7"),
    ],
)
def test_files_that_are_no_checkpoint(run: Run, model: Path, tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "x.bin").write_bytes(content)
    checkpoint = f"--checkpoint={tmp_path}/x.bin"
    assert words in error(run(checkpoint, f"--tokenizer={model.parent}/tokenizer.bin"))
    assert words in error(run(checkpoint, f"--save={tmp_path}/out.bin"))
    assert not (tmp_path / "out.bin").exists()


def test_prompts_from_a_pipe_are_read_once(model: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"one\ntwo\n")
    os.close(write)
    command = [*MAIN, f"--checkpoint={model}", f"--prompt_file=/dev/fd/{read}", "--temperature=0"]
    command += ["--max_new_tokens=2", f"--compile_cache={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, pass_fds=[read], capture_output=True, text=True, timeout=120)
    os.close(read)
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["one", "two"], done.stderr


def test_whoever_writes_a_prompt_and_waits_gets_its_answer(model: Path, tmp_path: Path) -> None:
    command = [*MAIN, f"--checkpoint={model}", "--prompt_file=-", "--max_new_tokens=3", f"--compile_cache={tmp_path}"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    for prompt in ("one", "two three", ""):
        process.stdin.write(f"{prompt}\n".encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["prompt"] == prompt
    process.stdin.write(b"four\nfive\n\xff\n")
    out, _ = process.communicate(timeout=60)
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["four", "five"]
    assert process.returncode == 1


@pytest.mark.parametrize("flag", ["--prompt_file=-", "--mode=chat"])
def test_closed_standard_input(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in error(run(f"--checkpoint={model}", flag))


def test_what_is_no_regular_file_is_not_replaced(run: Run, model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in error(run(f"--checkpoint={model}", f"--save={tmp_path}/pipe"))
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to("target")
    assert run(f"--checkpoint={model}", f"--save={tmp_path}/link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_size == model.stat().st_size


@pytest.mark.slow
def test_ctrl_c_while_compiling(model: Path, tmp_path: Path) -> None:
    process = start(tmp_path, f"--checkpoint={model}", "--max_new_tokens=60")
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130), err  # 0: it was done already
    assert b"Traceback" not in err


def test_a_tokenizer_that_does_not_fit(run: Run, model: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "small.bin", 320)
    message = error(run(f"--checkpoint={model}", f"--tokenizer={tmp_path}/small.bin"))
    assert "320" in message
    assert "330" in message


def test_a_traceback_is_there_for_who_asks(run: Run, model: Path) -> None:
    code, _, err = run(f"--checkpoint={model}", "--temperature=-1", "--verbosity=1")
    assert code == 1
    assert "Traceback" in err


def start(cache: Path, *args: str) -> subprocess.Popen[bytes]:
    """Start the program by itself, with its compiled programs kept in `cache`."""
    command = [*MAIN, *args, f"--compile_cache={cache}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_program_of_its_own_starts_faster_the_second_time(model: Path, tmp_path: Path) -> None:
    compiling = []
    for _ in range(2):
        process = start(tmp_path, f"--checkpoint={model}", "--prompt=one two", "--temperature=0", "--max_new_tokens=5")
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.startswith(b"one two")
        compiling.append(float(re.fullmatch(r"load .* compile ([\d.]+) s, .*\n", err.decode())[1]))
    assert compiling[1] < compiling[0] / 2


def test_a_reader_that_leaves_is_no_error(model: Path, tmp_path: Path) -> None:
    process = start(tmp_path, f"--checkpoint={model}", "--prompt=one", "--max_new_tokens=60", "--temperature=0")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=120)
    assert (process.returncode, b"Traceback" in err) == (0, False)


@pytest.mark.slow
def test_ten_thousand_prompts_in_bounded_memory(model: Path, tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("".join(f"{'abcdefg'[: i % 7 + 1]}\n" for i in range(10000)))

    def peak(count: int) -> tuple[int, list[str]]:
        code = (
            "import re, sys; from jllama.cli import main; code = main(sys.argv); "
            "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
        )
        text = "".join((tmp_path / "many.txt").read_text().splitlines(keepends=True)[:count])
        flags = [f"--checkpoint={model}", "--prompt_file=-", "--batch_size=64", "--temperature=0"]
        flags += ["--max_new_tokens=2", "--compile_cache="]
        done = subprocess.run(
            [sys.executable, "-c", code, *flags], cwd=ROOT, input=text, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return int(done.stderr.split()[-1]), done.stdout.splitlines()

    few, _ = peak(3000)
    many, lines = peak(10000)  # kB; the allocator settles after some windows, and seven more are below this bound
    assert [json.loads(line)["prompt"] for line in lines] == (tmp_path / "many.txt").read_text().splitlines()
    assert many - few < 250_000  # 20,000 prompts take no more than 10,000
