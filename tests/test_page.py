"""The chat page in a real browser, against a server that answers by a script, and against the real one."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the page's server is not tested: pip install 'jllama[serve]'")
api = pytest.importorskip("playwright.sync_api", reason="the page is not tested: pip install 'jllama[browser]'")

from servers import changed, model, served, until  # noqa: E402

from jllama.server import page as pages  # noqa: E402

CHROMIUM = Path("/usr/bin/chromium")


def event(chunk: Any) -> bytes:
    return b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk, ensure_ascii=False).encode()) + b"\n\n"


def say(text: str, finish: str | None = None) -> bytes:
    """One chunk of a chat and of a completion alike."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "text": text, "finish_reason": finish}]})


def ending(finish: str = "stop", tokens: int = 40) -> bytes:
    usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
    return say("", finish) + event({"choices": [], "usage": usage}) + event(b"[DONE]")


class Stub(ThreadingHTTPServer):
    """A server that answers by `script`: bytes to send, an event to wait for, or None: the connection is cut.

    Attributes:
      asked: what came: the path and the JSON of each request for text.
      gone: set as a client leaves in the middle of an answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.html, self.headers = pages.load()
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.reset()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reset(self, script: Any = (), *, chats: bool = True, key: str = "", refusal: Any = None) -> None:
        self.script, self.chats, self.key, self.refusal = script, chats, key, refusal
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.gone = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that leaves is no news


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, message: str) -> None:
        self.answer(status, "application/json", json.dumps({"error": {"message": message}}).encode())

    def known(self) -> bool:
        if not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return True
        self.refuse(401, "this key is not known here")
        return False

    def do_GET(self) -> None:
        if self.path == "/":
            self.answer(200, "text/html; charset=utf-8", self.server.html, self.server.headers)
        elif self.known():
            card = {"id": "stub-model", "max_model_len": 2048, "chat_template": self.server.chats}
            self.answer(200, "application/json", json.dumps({"data": [card]}).encode())

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.known():
            return
        self.server.asked.append((self.path, fields))
        if self.server.refusal:
            self.refuse(*self.server.refusal)
            return
        self.answer(200, "text/event-stream; charset=utf-8", b"")
        try:
            for step in self.server.script:
                if isinstance(step, threading.Event):
                    while not step.wait(0.01):
                        self.wfile.write(b":\n\n")
                elif step is None:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                else:
                    self.wfile.write(step)
                    self.wfile.flush()
        except OSError:
            self.server.gone.set()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip("there is no /usr/bin/chromium: the page is not tested")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def only_stub() -> Iterator[Stub]:
    server = Stub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def stub(only_stub: Stub) -> Stub:
    only_stub.reset()
    return only_stub


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    found = browser.new_context()
    found.set_default_timeout(5000)
    yield found
    found.close()


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    """A page, whose console has nothing to say of its policy or of faults when the test is over."""
    found = context.new_page()
    faults: list[str] = []
    found.on("pageerror", lambda error: faults.append(str(error)))
    found.on("console", lambda line: faults.append(line.text) if "Content Security" in line.text else None)
    yield found
    assert not faults


def ask(page: Any, text: str) -> None:
    page.locator("#send:enabled").wait_for()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def whole(page: Any) -> None:
    """Wait for an answer's end."""
    page.locator("#send:visible").wait_for()


def test_an_answer_grows_and_stop_ends_it(stub: Stub, page: Any) -> None:
    stub.reset([say("Once"), say(" upon"), threading.Event()])
    page.goto(stub.url)
    ask(page, "Tell me a story")
    api.expect(page.locator(".assistant .text")).to_have_text("Once upon")
    page.keyboard.press("Escape")
    assert stub.gone.wait(5)
    api.expect(page.get_by_text("stopped")).to_be_visible()
    api.expect(page.locator(".assistant .text")).to_have_text("Once upon")
    [(path, fields)] = stub.asked
    assert path == "/v1/chat/completions"
    assert fields == {
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_what_anyone_writes_stays_text(stub: Stub, page: Any) -> None:
    bad = "<img src=x onerror=document.title='bad'> **<b onclick=1>x</b>** `<script>1</script>`"
    stub.reset([say(bad), ending()])
    page.goto(stub.url)
    ask(page, bad)
    whole(page)
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.locator(".user .text").inner_text() == bad
    api.expect(page.locator(".assistant strong")).to_have_text("<b onclick=1>x</b>")
    assert page.title() == "stub-model – jllama"


def test_events_and_characters_come_in_any_pieces(stub: Stub, page: Any) -> None:
    text = "Hello 👩‍👩‍👧, tschüß."
    whole_stream = b":\n\n" + say(text) + ending()
    stub.reset([whole_stream[i : i + 1] for i in range(len(whole_stream))])
    page.goto(stub.url)
    ask(page, "Hi")
    whole(page)
    api.expect(page.locator(".assistant .text")).to_have_text(text)


def test_markdown_becomes_elements(stub: Stub, page: Any) -> None:
    text = (
        "# Title\n\nSome *soft*, **hard**, ***both*** and snake_case_name, 2 * 3 * 4.\n\n"
        "3. one\n4. two\n   - deep\n\n- a\n- b\n\n```python\nif x < 1:\n    print('**no**')\n```\n> said\n\n---\nend"
    )
    stub.reset([*(say(c) for c in text), ending()])
    page.goto(stub.url)
    ask(page, "Hi")
    whole(page)
    html = page.locator(".assistant > .text").evaluate("e => e.innerHTML")
    assert html == (
        "<h3>Title</h3><p>Some <em>soft</em>, <strong>hard</strong>, <strong><em>both</em></strong> "
        "and snake_case_name, 2 * 3 * 4.</p>"
        '<ol start="3"><li><p>one</p></li><li><p>two</p><ul><li><p>deep</p></li></ul></li></ol>'
        "<ul><li><p>a</p></li><li><p>b</p></li></ul>"
        '<div class="code"><div><span>python</span><button type="button" class="plain">Copy</button></div>'
        "<pre tabindex=\"0\"><code>if x &lt; 1:\n    print('**no**')</code></pre></div>"
        "<blockquote><p>said</p></blockquote><hr><p>end</p>"
    )


def test_code_is_copied(stub: Stub, context: Any, page: Any) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    stub.reset([say("```\na < b\n```"), ending()])
    page.goto(stub.url)
    ask(page, "Hi")
    whole(page)
    page.locator(".code button").click()
    api.expect(page.locator(".code button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "a < b"


def test_thoughts_are_folded(stub: Stub, page: Any) -> None:
    stub.reset([say("<think>\nHm, **well**.</think>\n\nIt is *so*."), ending()])
    page.goto(stub.url)
    ask(page, "Hi")
    whole(page)
    api.expect(page.locator("details.thinking summary")).to_have_text("Thoughts")
    assert not page.get_by_text("Hm, **well**.").is_visible()
    api.expect(page.locator(".assistant .text .text")).to_have_text("It is so.")


def test_a_reload_keeps_chats_which_are_renamed_and_deleted(stub: Stub, page: Any) -> None:
    stub.reset([say("Yes."), ending()])
    page.goto(stub.url)
    for question in ("First", "Second"):
        page.get_by_role("button", name="New chat").click()
        ask(page, question)
        whole(page)
    page.reload()
    api.expect(page.locator(".user .text")).to_have_text("Second")
    page.get_by_role("button", name="First", exact=True).click()
    api.expect(page.locator(".user .text")).to_have_text("First")
    page.get_by_role("button", name="Rename First").click()
    page.get_by_role("textbox", name="Name").fill("Renamed")
    page.keyboard.press("Enter")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Second").click()
    page.reload()
    api.expect(page.locator("#chats .open")).to_have_text(["Renamed"])


def test_a_question_is_edited_and_an_answer_is_asked_for_again(stub: Stub, page: Any) -> None:
    stub.reset([say("Yes."), ending()])
    page.goto(stub.url)
    for question in ("One", "Two"):
        ask(page, question)
        whole(page)
    page.get_by_role("button", name="Regenerate").click()
    whole(page)
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Question").fill("Uno")
    page.keyboard.press("Enter")
    whole(page)
    assert [[m["content"] for m in fields["messages"]] for _, fields in stub.asked[1:]] == [
        ["One", "Yes.", "Two"],
        ["One", "Yes.", "Two"],
        ["Uno"],
    ]


def test_settings_are_sent_and_kept(stub: Stub, page: Any) -> None:
    stub.reset([say("Yes."), ending("length", 40)])
    page.goto(stub.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    for name, value in {"Temperature": "0.5", "Top p": "0.9", "Most tokens": "40", "Seed": "7"}.items():
        page.get_by_label(name).fill(value)
    page.keyboard.press("Enter")
    page.reload()
    ask(page, "Hi")
    whole(page)
    _, fields = stub.asked[0]
    assert fields["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [fields[name] for name in ("temperature", "top_p", "max_tokens", "seed")] == [0.5, 0.9, 40, 7]
    api.expect(page.locator("#used span")).to_have_text("50 of 2,048 tokens of context")
    page.get_by_role("button", name="Continue").click()
    whole(page)
    assert [m["content"] for m in stub.asked[1][1]["messages"]][1:] == ["Hi", "Yes.", "Continue"]


def test_enter_within_a_composition_or_with_shift_sends_nothing(stub: Stub, page: Any) -> None:
    page.goto(stub.url)
    page.locator("#send:enabled").wait_for()
    page.get_by_label("Message", exact=True).fill("か")
    page.keyboard.press("Shift+Enter")
    page.evaluate(
        "document.getElementById('question').dispatchEvent(new KeyboardEvent('keydown', "
        "{ key: 'Enter', isComposing: true, bubbles: true, cancelable: true }))"
    )
    assert page.get_by_label("Message", exact=True).input_value() == "か\n"
    assert not stub.asked


def test_a_key_is_asked_for(stub: Stub, page: Any) -> None:
    stub.reset([say("Yes."), ending()], key="secret")
    page.goto(stub.url)
    api.expect(page.get_by_role("dialog")).to_contain_text("this key is not known here")
    api.expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    api.expect(page.locator("#model")).to_have_text("stub-model")
    ask(page, "Hi")
    whole(page)
    api.expect(page.locator(".assistant .text")).to_have_text("Yes.")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ([], "The server broke off its answer."),
        ([None], "The connection broke in the middle of the answer."),
        ([event({"error": {"message": "the model broke"}})], "the model broke"),
    ],
)
def test_an_answer_that_breaks_off_is_kept_until_it_is_asked_for_again(
    stub: Stub, page: Any, end: Any, said: str
) -> None:
    go = threading.Event()
    stub.reset([say("Half of"), go, *end])
    page.goto(stub.url)
    ask(page, "Hi")
    api.expect(page.locator(".assistant .text")).to_have_text("Half of")
    go.set()
    api.expect(page.locator("#failure")).to_contain_text(said)
    api.expect(page.locator(".assistant .text")).to_have_text("Half of")
    stub.script = [say("All of it."), ending()]
    page.get_by_role("button", name="Retry").click()
    api.expect(page.locator(".assistant .text")).to_have_text("All of it.")
    assert page.locator("#failure").is_hidden()


def test_a_refusal_is_shown_with_the_question_kept(stub: Stub, page: Any) -> None:
    stub.reset(refusal=(400, "the prompt has 3000 tokens, the model's context 2048"))
    page.goto(stub.url)
    ask(page, "Hi")
    api.expect(page.locator("#failure")).to_contain_text("the prompt has 3000 tokens")
    assert page.locator(".assistant").count() == 0
    assert page.get_by_role("button", name="Edit").is_visible()


def test_two_tabs_keep_each_others_chats(stub: Stub, context: Any, page: Any) -> None:
    stub.reset([say("Yes."), ending()])
    other = context.new_page()
    for tab in (page, other):
        tab.goto(stub.url)
    for tab, question in ((page, "From one"), (other, "From the other")):
        ask(tab, question)
        whole(tab)
    api.expect(page.locator("#chats .open")).to_have_text(["From the other", "From one"])
    api.expect(page.locator(".user .text")).to_have_text("From one")


def test_a_full_store_is_said(stub: Stub, page: Any) -> None:
    stub.reset([say("Yes."), ending()])
    page.goto(stub.url)
    page.evaluate("localStorage.setItem('filler', 'x'.repeat(5 * 2 ** 20 - 400))")
    ask(page, "Hi " * 200)
    whole(page)
    api.expect(page.locator("#failure")).to_contain_text("This browser keeps no more")
    api.expect(page.locator(".assistant .text")).to_have_text("Yes.")


def test_a_long_chat_follows_the_end_only_for_who_is_there(stub: Stub, page: Any) -> None:
    go = threading.Event()
    stub.reset([say("a\n\n" * 60), go, say("b\n\n" * 60), ending()])
    page.goto(stub.url)
    chat = {"id": "1", "title": "Long", "changed": 1, "messages": []}
    chat["messages"] = [{"role": role, "content": "word " * 40} for _ in range(100) for role in ("user", "assistant")]
    page.evaluate("chat => localStorage.setItem('jllama.chat.1', JSON.stringify(chat))", chat)
    page.reload()
    api.expect(page.locator(".message")).to_have_count(200)
    ask(page, "On")
    api.expect(page.locator(".assistant").last.locator("p")).to_have_count(60)
    assert page.evaluate("isAtBottom()")
    page.evaluate("document.getElementById('scroll').scrollTop = 50")
    go.set()
    whole(page)
    assert page.evaluate("document.getElementById('scroll').scrollTop") == 50
    page.get_by_role("button", name="To the latest").click()
    assert page.evaluate("isAtBottom()")


def test_a_text_is_continued_and_the_continuation_undone(stub: Stub, page: Any) -> None:
    stub.reset([say(" a time"), say(" there was."), ending("length")], chats=False)
    page.goto(stub.url)
    text = page.get_by_label("Text, which the model continues")
    page.locator("#send:enabled").wait_for()
    text.fill("Once upon")
    page.keyboard.press("Control+Enter")
    api.expect(text).to_have_value("Once upon a time there was.")
    whole(page)
    assert stub.asked[0][0] == "/v1/completions"
    assert stub.asked[0][1]["prompt"] == "Once upon"
    page.reload()
    api.expect(text).to_have_value("Once upon a time there was.")
    page.get_by_role("button", name="Undo").click()
    api.expect(text).to_have_value("Once upon")


def test_everything_has_a_name_and_the_keyboard_reaches_it(stub: Stub, page: Any) -> None:
    stub.reset([say("Yes."), ending()])
    page.goto(stub.url)
    ask(page, "Hi")
    whole(page)
    unnamed = "e => !(e.ariaLabel || e.labels?.length || e.textContent.trim())"
    assert page.evaluate(f"[...document.querySelectorAll('button, input, textarea')].filter({unnamed}).length") == 0
    page.keyboard.press("ArrowUp")
    api.expect(page.get_by_label("Question")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+KeyS")
    page.get_by_text("Keyboard").click()
    api.expect(page.get_by_text("new line")).to_be_visible()


@pytest.mark.slow
def test_against_the_real_server_stop_frees_the_row(page: Any) -> None:
    pause = [0.0]
    with served(changed(model(), lambda program, args: time.sleep(pause[0]))) as server:

        def runs(number: str) -> bool:
            return f"jllama_running {number}\n" in server.client.get("/metrics").text

        page.goto(server.url)
        api.expect(page.locator("#model")).to_have_text("tiny")
        ask(page, "Hello there")
        whole(page)
        api.expect(page.locator("#used")).to_contain_text("256 of 256 tokens of context")
        pause[0] = 0.05  # now it lasts
        page.get_by_role("button", name="Regenerate").click()
        until(lambda: runs("1.0"))
        page.keyboard.press("Escape")
        until(lambda: runs("0.0"))
        api.expect(page.get_by_text("stopped")).to_be_visible()
