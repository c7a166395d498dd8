"""Chats: the cache between turns, turns that no longer fit, answers broken off, and the mode on the command line."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import oracle
import pytest
import tiny
from console import MAIN, Run, write_model

from jllama import LLM, Settings
from jllama.chat import ChatError, Template
from jllama.config import Config
from jllama.session import Session

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def session(context: int = 64, system: str = "", **settings: object) -> Session:
    """Begin a chat with a random model whose tokens are letters."""
    config = Config(32, 48, 2, 4, 2, 40, context)
    pieces = [b"", b"", b"", b" ", b".", *[bytes([97 + i]) for i in range(26)], *[bytes([65 + i]) for i in range(9)]]
    llm = LLM(tiny.params(oracle.random_weights(config, tied=False, seed=5), config), tiny.Letters(pieces))
    given = Settings(**{"temperature": 0.0, "max_new_tokens": 5} | settings)
    return Session(llm, Template(TEMPLATE, llm.tokenizer), system, given)


def ask(chat: Session, question: str) -> str:
    return "".join(chat.ask(question))


def fresh_answer(chat: Session, text: str) -> str:
    """Continue a conversation written out, with nothing cached."""
    llm = LLM(chat.llm.params, chat.llm.tokenizer)
    return llm.generate([text], temperature=0, max_new_tokens=5)[0].text


def test_answers_with_a_kept_cache_equal_those_without() -> None:
    chat = session(context=128, system="be terse")
    text = "sbe terse."
    read = 0
    for question in ("hello", "what", "x", "a longer question"):
        text += f"u{question}.a"
        answer = ask(chat, question)
        assert answer == fresh_answer(chat, text)
        new = chat.llm.timings.prompt_tokens - read
        # BOS and the system message once; then the question with its marks, and what of the answer was not cached
        assert new == len(text) + 1 if not read else len(question) + 4 <= new < len(question) + 10
        read += new
        text += f"{answer}."
    assert [turn for turn, _ in chat.conversation.turns] == ["hello", "what", "x", "a longer question"]


def test_the_oldest_turns_go_when_the_context_is_full() -> None:
    chat = session(context=64, system="sys")
    dropped = []
    for i in range(20):
        question = f"question {chr(97 + i)}"
        turns = chat.conversation.turns
        answer = ask(chat, question)
        dropped.append(chat.dropped)
        kept = turns[chat.dropped :]
        text = "ssys." + "".join(f"u{q}.a{a}." for q, a in kept) + f"u{question}.a"
        assert len(text) + 1 <= 64 - 5
        assert answer == fresh_answer(chat, text)
        assert chat.conversation.turns == (*kept, (question, answer))
    assert sum(dropped) == 20 - len(chat.conversation.turns)
    assert max(dropped) == 1
    with pytest.raises(ChatError, match=r"\d+ tokens.*59 fit"):
        ask(chat, "x" * 60)
    assert ask(chat, "still here")


def test_an_answer_broken_off_stays_and_the_chat_goes_on() -> None:
    chat = session(max_new_tokens=20)
    pieces = chat.ask("hello")
    first = next(pieces)
    pieces.close()
    ((_, said),) = chat.conversation.turns
    assert said.startswith(first)
    chat.settings = Settings(temperature=0.0, max_new_tokens=5)
    assert ask(chat, "more") == fresh_answer(chat, f"uhello.a{said}.umore.a")


def test_reset_and_system() -> None:
    chat = session(system="one")
    before = ask(chat, "hello")
    ask(chat, "more")
    chat.reset()
    assert ask(chat, "hello") == before
    chat.reset("two")
    assert ask(chat, "hello") == fresh_answer(chat, "stwo.uhello.a")


@pytest.fixture
def chatty(tmp_path: Path) -> str:
    """A checkpoint with a tokenizer and a template beside it."""
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return f"--checkpoint={tmp_path}/model.bin"


def test_chat_through_pipes(run: Run, chatty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\nmore\n\nhello\n")))
    code, out, err = run("--mode=chat", chatty, "--temperature=0", "--max_new_tokens=4")
    assert code == 0
    assert out.count("\n") == 3
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    alone = run("--mode=chat", chatty, "--temperature=0", "--max_new_tokens=4")[1]
    assert out.startswith(alone)
    assert "prompt" in err.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_program(chatty: str, tmp_path: Path) -> None:
    try:
        ours, theirs = pty.openpty()
    except OSError as e:
        pytest.skip(f"no terminal to type Ctrl-C in: {e}")
    command = [*MAIN, "--mode=chat", chatty, "--max_new_tokens=4", f"--compile_cache={tmp_path}/cache"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    shown = b""

    def wait_for(text: bytes, *, interrupting: bool = False) -> None:
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < end, shown
            if interrupting:  # readline misses a signal that comes just before it waits
                process.send_signal(signal.SIGINT)
            while select.select([ours], [], [], 1)[0] and text not in shown:
                shown += os.read(ours, 4096)
        shown = shown[shown.index(text) + len(text) :]

    wait_for(b"> ")
    wait_for(b"leaves", interrupting=True)
    wait_for(b"> ")
    os.write(ours, b"hello\n")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)  # during the answer, most likely while compiling
    wait_for(b"> ")
    os.write(ours, b"hello again\n")
    wait_for(b"> ")
    os.write(ours, b"/exit\n")
    wait_for(b"generation")
    assert process.wait(timeout=30) == 0


@pytest.mark.slow
@pytest.mark.parametrize("question", ["List three colors."])
def test_smollm2_chats_as_llama_cpp_does(shared: Path, question: str) -> None:
    from jllama.chat import find_template
    from jllama.checkpoint import CheckpointError, hub

    try:
        path = hub.local("smollm2")
    except CheckpointError as e:
        pytest.skip(str(e))
    llm = LLM.load("smollm2", dtype="float32")
    chat = Session(llm, find_template(path, llm.tokenizer), "", Settings(temperature=0.0, max_new_tokens=60))
    expected = json.loads((shared / "golden/smollm2_llamacpp.json").read_text())["chat"][question]
    assert ask(chat, question) == expected
