"""`jllama serve` as a process: what it says, how it ends, and how it refuses to begin."""

import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import PROGRAMS
from console import MAIN, Run, error, write_model
from servers import events, until

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer beside it."""
    return write_model(tmp_path_factory.mktemp("model"))


def test_from_the_command_to_the_signal(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sesame\nalibaba\n")
    flags = [str(checkpoint), f"--api_key_file={tmp_path}/keys", "--port=0", "--max_rows=1", "--grace=10"]
    said: list[str] = []
    with subprocess.Popen(
        [*MAIN, "serve", *flags, f"--compile_cache={PROGRAMS}"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            threading.Thread(target=lambda: said.extend(process.stderr), daemon=True).start()
            until(lambda: any("is served at" in line for line in said) or process.poll() is not None, 120)
            (url,) = re.findall(r"model\.bin is served at (http://127\.0\.0\.1:\d+)", said[-1])

            def ask(**fields: object) -> httpx.Response:
                headers = {"Authorization": "Bearer alibaba"}
                asked = {"prompt": "a", "max_tokens": 40, **fields}
                return httpx.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=60)

            assert httpx.get(f"{url}/v1/models").status_code == 401
            assert ask(seed=1).json()["model"] == "model.bin"
            with ThreadPoolExecutor() as pool:
                streams = [pool.submit(ask, stream=True) for _ in range(8)]
                until(lambda: any(stream.done() for stream in streams))
                process.send_signal(signal.SIGTERM)
                for stream in streams:
                    if stream.exception() is None and stream.result().status_code == 200:
                        choices = [c for event in events(stream.result().content) for c in event["choices"]]
                        assert sum(c["finish_reason"] is not None for c in choices) == 1
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
    log = "".join(said)
    assert "sesame" not in log
    assert "alibaba" not in log
    assert re.search(
        r'127\.0\.0\.1 "POST /v1/completions" 200 total=\d\S* cmpl-\w+ prompt=\d+ cached=\d+ generated=', log
    )


def test_without_the_libraries_it_says_how_to_get_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("jllama.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    message = error(run("serve"))
    assert message == "jllama: serve needs the Python package starlette: pip install 'jllama[serve]'\n"


def test_what_it_can_not_begin_with(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags, words in (
            ((f"--port={port}",), f"can't listen at 127.0.0.1, port {port}: "),
            (("--port=70000",), "port"),
            (("--host=256.0.0.1", "--port=0"), "can't listen at 256.0.0.1"),
            ((f"--api_key_file={tmp_path}/none",), "none: No such file"),
            ((f"--api_key_file={tmp_path}/empty",), "no key in it"),
            ((f"--api_key_file={tmp_path}/bytes",), "expected keys"),
            (("--coordinator=auto",), "expected no --coordinator"),
            (("--grace=-1",), "grace"),
            (("--temperature=-1",), "temperature = -1.0"),
        ):
            assert words in error(run("serve", str(checkpoint), *flags))
    assert "--port goes with serve, not with run" in error(run("run", str(checkpoint), "--port=80"))


def test_a_model_that_can_not_be_loaded_ends_it(run: Run, tmp_path: Path) -> None:
    assert "model.bin: no such file or folder" in error(run("serve", f"{tmp_path}/model.bin", "--port=0"))
    (tmp_path / "model.bin").write_bytes(b"x" * 100)
    assert "model.bin" in error(run("serve", "--checkpoint", f"{tmp_path}/model.bin", "--port=0"))
