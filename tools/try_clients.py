"""Try clients that others wrote against a server: the `llm` command and LangChain, in an environment of their own.

Run it where jllama is installed with its extra `serve`: `python tools/try_clients.py`. It installs the clients into a
temporary environment, starts `jllama serve` with the model that comes with jllama, and ends with what went wrong.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("llm", "langchain-openai")
LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI, OpenAI

where = {"base_url": sys.argv[1], "api_key": "none", "model": "stories"}
chat = ChatOpenAI(**where, max_tokens=20, temperature=0)
whole = chat.invoke([("system", "Be brief."), ("human", "Name a color.")])
assert whole.content, whole
assert whole.usage_metadata["output_tokens"] == 20, whole
assert whole.response_metadata["finish_reason"] == "length", whole
pieces = [piece.content for piece in chat.stream([("system", "Be brief."), ("human", "Name a color.")])]
assert "".join(pieces) == whole.content, pieces
assert len(chat.batch(["one", "two", "three"])) == 3
likely = ChatOpenAI(**where, max_tokens=5, logprobs=True, top_logprobs=2).invoke("one")
assert len(likely.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2, likely
assert OpenAI(**where, max_tokens=10).invoke("One day")
print("langchain-openai: all well")
"""


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Start a server; yields its address."""
    command = [sys.executable, "-m", "jllama", "serve", "stories", "--port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"served at (http://\S+)", line) for line in process.stderr)))
            yield f"{found[1]}/v1"
        finally:
            process.terminate()


def llm(command: Path, folder: Path, address: str) -> None:
    """Ask through the `llm` command, with and without a stream."""
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: stories\n  api_base: {address}\n", encoding="utf-8"
    )
    asked = [str(command), "-m", "here", "--key", "none", "Say hello", "-o", "max_tokens", "20", "-o", "seed", "3"]
    environment = os.environ | {"LLM_USER_PATH": str(folder)}
    answers = [
        subprocess.run([*asked, *more], env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
        for more in ((), ("--no-stream",))
    ]
    assert answers[0].strip() == answers[1].strip() != "", answers
    print("llm: all well")


def main() -> None:
    """Install the clients, and try each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        programs = folder / "venv" / "bin"
        subprocess.run([programs / "pip", "install", "-q", *PACKAGES], check=True)
        with server() as address:
            llm(programs / "llm", folder, address)
            subprocess.run([programs / "python", "-c", LANGCHAIN, address], check=True, timeout=300)


if __name__ == "__main__":
    main()
