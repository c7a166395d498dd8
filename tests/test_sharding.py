"""More than one device: the same logits and text on every mesh, what each device holds and sends, several processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshes
import numpy as np
import oracle
import pytest
import tiny
from console import MAIN, Run, error
from trained import write_tokenizer

from jllama import LLM, checkpoint, mesh, tokenizer
from jllama.checkpoint import build, llama2c
from jllama.checkpoint.parts import part
from jllama.checkpoint.source import Source
from jllama.config import Config, ConfigError, from_toml
from jllama.tensors import fitted

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": meshes.FASTER,
}
CONFIG = Config(16, 24, 1, 2, 2, 330, 64)
NEW = 12  # tokens that the command line is asked for


# --- meshes and parts


def test_meshes_are_read() -> None:
    assert mesh.parse("data:2,model:4") == mesh.parse("model:4,data:2") == mesh.Shape(2, 4)
    assert mesh.parse("model:8") == mesh.Shape(1, 8)
    for text in (
        "",
        "8",
        "data",
        "data:0",
        "data:-1",
        "data:2,data:2",
        "rows:2",
        "data:2;model:4",
        "data:1.5",
        "data:²",
    ):
        with pytest.raises(ValueError, match="expected data:N, model:N or data:N,model:N"):
            mesh.parse(text)
    with pytest.raises(ValueError, match=r"data:2,model:4 needs 8 devices, but 1 is available"):
        mesh.make_mesh("data:2,model:4")
    assert mesh.make_mesh("data:1").shape == {"data": 1, "model": 1}


def test_the_sizes_of_a_part() -> None:
    config = tiny.CONFIGS["gqa"][0]  # 8 query heads, 2 key heads
    assert mesh.local_config(config, 1) == config
    local = mesh.local_config(config, 2)
    assert (local.n_heads, local.n_kv_heads, local.hidden_dim, local.head_dim) == (4, 1, 40, 6)
    assert (local.dim, local.vocab_size) == (48, 97)
    assert mesh.local_config(config, 8).n_kv_heads == 1
    with pytest.raises(ValueError, match=r"n_heads = 8.*multiple of 3; hidden_dim = 80.*; n_kv_heads = 2"):
        mesh.local_config(config, 3)
    with pytest.raises(ValueError, match=r"n_kv_heads = 6: expected a multiple or a divisor of 4$"):
        mesh.local_config(Config(48, 80, 1, 12, 6, 97, 64), 4)


def test_a_config_file_names_no_axis(tmp_path: Path) -> None:
    text = (ROOT / "configs/stories260K.toml").read_text()
    (tmp_path / "c.toml").write_text('axis = "model"\n' + text)
    with pytest.raises(ConfigError, match="axis"):
        from_toml(tmp_path / "c.toml")


def sources_of(weights: oracle.Weights) -> dict[str, Source]:
    return {name: Source(a.shape, lambda start, stop, a=a: a[start:stop]) for name, a in weights.items()}


@pytest.mark.parametrize("count", [2, 4, 8])
def test_parts_make_up_the_whole(count: int) -> None:
    config = tiny.CONFIGS["gqa"][0]
    weights = meshes.llama_weights("gqa") | {"layers.0.attention.wo.bias": np.arange(48, dtype=np.float32)}
    parts = [part(sources_of(weights), fitted(config, weights), i, count) for i in range(count)]
    for name, whole in weights.items():
        found = [p[name].read(0, p[name].shape[0]) for p in parts]
        assert [f.shape for f in found] == [p[name].shape for p in parts]
        if name.endswith((".wo.weight", ".w2.weight")):
            np.testing.assert_array_equal(np.concatenate(found, axis=1), whole)
        elif re.search(r"norm|bias", name):
            assert all((f == whole).all() for f in found)
        elif re.search(r"\.w[kv]\.", name):  # 2 key heads, in order, each as often as needed
            heads = [whole[:6], whole[6:]]
            assert all((f == heads[i * 2 // count]).all() for i, f in enumerate(found))
        else:
            rows = np.concatenate(found)
            np.testing.assert_array_equal(rows[: len(whole)], whole)
            assert not rows[len(whole) :].any()
            assert len(rows) - len(whole) == (-97 % count if whole.shape[0] == 97 else 0)


@pytest.mark.parametrize(("count", "dtype"), [(4, "int8"), (8, "float32")])
def test_a_part_in_int8_has_whole_groups_or_none(count: int, dtype: str) -> None:
    weights = meshes.llama_weights("wide")
    name = "layers.0.feed_forward.w2.weight"
    (whole,) = build._read([[[sources_of(weights)[name]]]], "int8", stacked=False)
    parts = [[[part(sources_of(weights), Config(64, 128, 2, 8, 8, 97, 64), i, count)[name]]] for i in range(count)]
    assert build._form(parts[0], "int8") == dtype
    for i, found in enumerate(build._read(parts, dtype, stacked=False)):
        width = 128 // count
        columns = slice(width * i, width * (i + 1))
        np.testing.assert_array_equal(
            found.decode(), whole.decode()[:, columns] if dtype == "int8" else weights[name][:, columns]
        )


def test_random_weights_can_be_read_in_any_order() -> None:
    config = tiny.CONFIGS["gqa"][0]  # rows of 48 and 80 bytes, and of 6 key heads
    sources = checkpoint.random_contents(config, seed=3).sources
    for name in ("tok_embeddings.weight", "layers.1.attention.wo.weight", "layers.0.feed_forward.w2.weight"):
        whole = sources[name].read(0, sources[name].shape[0]).copy()
        np.testing.assert_array_equal(sources[name].read(7, 19), whole[7:19])
        assert abs(whole.std() * whole.shape[1] ** 0.5 - 1) < 0.05
    a, b = (sources[f"layers.{i}.attention.wq.weight"].read(0, 48) for i in range(2))
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.1


# --- eight devices


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `meshes.py` finds, in a process that has eight devices."""
    command = [sys.executable, str(ROOT / "tests/meshes.py")]
    environment = ENVIRONMENT | {"XLA_FLAGS": meshes.EIGHT}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mesh"), [(case, mesh) for case, texts in meshes.CASES.items() for mesh in texts])
def test_logits_on_a_mesh_are_those_of_one_device(found: dict[str, Any], case: str, mesh: str) -> None:
    result = found["cases"][case][mesh]
    assert result["same ids"]
    assert len(result["errors"]) == meshes.ROWS
    # In int8 a sum in another order may round an input of the next product to the number beside.
    assert max(result["errors"]) < (0.1 if case.endswith("int8") else 1e-4)
    if case.endswith("float32"):
        assert result["oracle"] < 1e-4
    if "model" not in mesh:
        assert result["collectives"] == {}  # each device by itself


@pytest.mark.slow
def test_ragged_batches_are_the_same_on_a_mesh(found: dict[str, Any]) -> None:
    one, mesh = found["batches"]
    assert one["ids"] == mesh["ids"]
    assert [len(ids) for ids in one["ids"]] == [5, 6, 7, 8, 9]
    assert set(one["ids"][3]) <= {ord(letter) - 30 for letter in "ABCDEFGHIJKLM"}


@pytest.mark.slow
def test_guesses_on_a_mesh_leave_the_text_as_it_is(found: dict[str, Any]) -> None:
    one, mesh = found["guessed"]
    assert one["ids"] == mesh["ids"]
    assert mesh["guesses"] > 0


@pytest.mark.slow
def test_devices_send_sums_and_logits_alone(found: dict[str, Any]) -> None:
    one, mesh = found["batches"]
    assert one["collectives"] == [{}, {}, {}]
    start, read, loop = mesh["collectives"]
    assert start == {}
    # Two sums a layer and one of the embedding; the logits of 97 tokens, 25 a device. 4 of 8 rows, blocks of 16 tokens.
    assert read == {"all-reduce f32[64,48]": 4, "all-reduce f32[4,16,48]": 1, "all-gather f32[4,100]": 1}
    assert loop == {"all-reduce f32[4,48]": 4, "all-reduce f32[4,1,48]": 1, "all-gather f32[4,100]": 1}


@pytest.mark.slow
def test_each_device_keeps_its_rows_and_heads_in_place(found: dict[str, Any]) -> None:
    mesh = found["batches"][1]
    # 8 rows and 2 key heads, one for each of 4 devices, so each head twice: 4 rows and 1 head on each of 8.
    assert mesh["cache"] == [[32, 64, 6], [4, 64, 6]]
    assert mesh["copies"] == 0
    assert mesh["reused"] >= 2 * 2 * 4 * 64 * 6 * 4


@pytest.mark.slow
def test_each_device_holds_its_part_of_each_weight(found: dict[str, Any]) -> None:
    assert len(found["shards"]) == 10 * 3 + 5  # values, d and m of each matrix, and norms
    for name, (parts, devices) in found["shards"].items():
        assert devices == 8
        # 97 rows in 4 parts of 25; and of 4 query, 2 key and 2 value heads a device has one each.
        divided = {"embedding": 97 / 25, "output": 97 / 25, "wqkv": 8 / 3, "norm": 1}
        assert parts == pytest.approx(next((n for part, n in divided.items() if part in name), 4), abs=0.01), name


# --- several processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer beside it, and prompts."""
    folder = tmp_path_factory.mktemp("model")
    oracle.write_v0(folder / "model.bin", oracle.random_weights(CONFIG, tied=True), CONFIG)
    write_tokenizer(folder / "tokenizer.bin", 330)
    words = ("one", "two three", "four", "five six seven", "")
    (folder / "few.txt").write_text("".join(f"{words[i % 5]} {i}\n" for i in range(10)))
    (folder / "many.txt").write_text("".join(f"{words[i % 5]} {i}\n" for i in range(3000)))
    return folder / "model.bin"


def flags(model: Path, file: str, *more: str) -> list[str]:
    chosen = [f"--checkpoint={model}", f"--prompt_file={model.parent}/{file}", f"--compile_cache={model.parent}/cache"]
    return [*chosen, "--batch_size=4", "--temperature=0", f"--max_new_tokens={NEW}", *more]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """End what a test that failed has left."""
    yield
    while STARTED:
        if (process := STARTED.pop()).poll() is None:
            process.kill()
            process.communicate()


def start(command: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    STARTED.append(subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True))
    return STARTED[-1]


def start_two(arguments: list[str]) -> list[subprocess.Popen[str]]:
    """Start the command line twice, as the processes of one run."""
    together = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
    return [start([*MAIN, *arguments, *together, f"--process_id={i}"]) for i in range(2)]


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for processes that end well and return what they print."""
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), [err for _, err in outputs]
    return [out for out, _ in outputs]


@pytest.fixture(scope="module")
def alone(model: Path) -> str:
    """What one process with one device prints."""
    return finish([start([*MAIN, *flags(model, "few.txt")])])[0]


@pytest.mark.slow
def test_two_processes_print_what_one_does(model: Path, alone: str) -> None:
    first, second = finish(start_two(flags(model, "few.txt", "--mesh=model:2")))
    assert first == alone
    assert second == ""
    assert [json.loads(line)["prompt"] for line in first.splitlines()] == (
        (model.parent / "few.txt").read_text().splitlines()
    )


@pytest.mark.slow
def test_two_processes_read_a_half_each(model: Path, alone: str) -> None:
    port = str(free_port())
    command = [sys.executable, str(ROOT / "tests/worker.py"), str(model), port]
    results = [json.loads(out.splitlines()[-1]) for out in finish([start([*command, str(i)]) for i in range(2)])]
    sizes = {name: np.prod(s.shape).item() for name, s in checkpoint.read(model).sources.items()}
    for result in results:
        assert result["read"].keys() == sizes.keys()
        for name, count in result["read"].items():
            # Of wo and w2 a part is columns; their rows are mapped, and only the part is copied.
            whole = re.search(r"norm|\.(wo|w2)\.", name)
            assert count == (sizes[name] if whole else sizes[name] // 2), name
        norms = sum(size for name, size in sizes.items() if "norm" in name)
        assert result["here"] == norms + (sum(sizes.values()) - norms) // 2
    first, second = results
    assert first["drawn"] == second["drawn"]
    assert first["stream"] == second["stream"] == json.loads(alone.splitlines()[0])["text"]
    found = tokenizer.load(tokenizer.find(model))
    ids = np.array([found.bos, *found.encode("one two three")])
    logits = oracle.forward(oracle.random_weights(CONFIG, tied=True), CONFIG, ids)[:-1]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(first["score"], logprobs[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
    assert first["score"] == second["score"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("dtype", build.DTYPES)
def test_a_process_has_memory_for_its_part_alone(tmp_path: Path, dtype: str) -> None:
    config = from_toml(ROOT / "configs/stories110M.toml")
    head = llama2c.Header(0, config)
    path = tmp_path / "sparse.bin"
    path.write_bytes(llama2c._pack(head))
    os.truncate(path, llama2c.file_size(head))
    port = str(free_port())
    for out in finish([start([sys.executable, "-c", tiny.PEAK, str(path), dtype, port, str(i)]) for i in range(2)]):
        grown, weights = map(int, out.splitlines()[-1].split())
        size = {"float32": 4, "bfloat16": 2, "int8": 9 / 8, "int4": 4.5 / 8}[dtype]
        assert 0.5 < weights / (size * 109.5e6) < 0.52  # 109.5 million parameters, a half of nearly all of them
        assert 0.95 * weights < grown < 1.1 * weights + 20e6


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "victim"), [("model:2", 1), ("data:2", 0)])
def test_when_a_process_is_killed_the_other_ends_too(
    model: Path, alone: str, tmp_path: Path, mesh: str, victim: int
) -> None:
    output = tmp_path / "out.jsonl"
    processes = start_two(flags(model, "many.txt", f"--mesh={mesh}", f"--output={output}"))
    deadline = time.monotonic() + 200
    while not (output.exists() and output.read_bytes().count(b"\n") >= 10):
        assert time.monotonic() < deadline
        assert [process.poll() for process in processes] == [None, None], processes[0].communicate()
        time.sleep(0.05)
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    _, err = processes[1 - victim].communicate(timeout=60)
    processes[victim].communicate(timeout=60)
    assert processes[1 - victim].returncode not in (0, -signal.SIGKILL), err
    assert time.monotonic() - killed < 60
    written = output.read_text().splitlines(keepends=True)
    assert 0 < len(written) < 3000
    # The results so far stay, and one process goes on with them.
    prompts = (model.parent / "many.txt").read_text().splitlines()[: len(written) + 3]
    (model.parent / "some.txt").write_text("\n".join(prompts))
    more = finish([start([*MAIN, *flags(model, "some.txt", f"--output={output}", "--resume")])])
    assert more == [""]
    lines = output.read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == prompts
    assert "\n".join(lines[:10]) + "\n" == alone


def test_what_does_not_go_with_several_devices(run: Run, model: Path, tmp_path: Path) -> None:
    checked = [f"--checkpoint={model}"]
    for more, words in (
        (["--mesh=rows:2"], "mesh = 'rows:2'"),
        (["--mesh=data:2"], "needs 2 devices, but 1 is available"),
        (["--mode=bench", "--mesh=data:1"], "neither --mesh nor --coordinator"),
        ([f"--save={tmp_path}/x.bin", "--mesh=data:1"], "neither --mesh nor --coordinator"),
        (["--mode=chat", "--coordinator=auto"], "no --coordinator"),
        (["--coordinator=localhost:1234"], "expected HOST:PORT"),
        (["--num_processes=2"], "expected HOST:PORT"),
        (["--coordinator=localhost", "--num_processes=2", "--process_id=0"], "expected HOST:PORT"),
        (["--coordinator=localhost:1", "--num_processes=2", "--process_id=2"], "which of them this is, from 0"),
        (["--coordinator=auto", "--num_processes=2", "--process_id=0"], "alone"),
    ):
        assert words in error(run(*checked, *more)), more


def test_a_model_knows_its_mesh(model: Path) -> None:
    for where in ("data:1,model:1", mesh.make_mesh("data:1")):
        llm = LLM.load(model, mesh=where)
        assert llm.runner.mesh == mesh.mesh_of(llm.params) == mesh.make_mesh("data:1")
        assert llm.score("one two").logprobs.shape == LLM.load(model).score("one two").logprobs.shape
    assert LLM.load(model).runner.mesh is None
