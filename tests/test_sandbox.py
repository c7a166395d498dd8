"""Templates: what they see of messages, and that none takes more time or memory than it may."""

import datetime
import json
import time
import tracemalloc

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import CHATML, make, user
from trained import train

from jllama.chat import ChatError, Template
from jllama.sandbox import Program, SandboxError

NOW = datetime.datetime(2026, 1, 2)


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return make(tmp_path_factory.mktemp("sandbox"), [*CHATML[:1], "<think>", "</think>", *CHATML[1:]])[0]


def rendered(source, tok, *contents):
    return Template(source, tok).render([user(text) for text in contents])


# Messages that look like control tokens. Right values: transformers 5.24, which shows templates the messages as given.


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        ("{{ messages[0].content.split('</think>')[-1] }}", "<think>x</think>y", "y"),
        ("{{ messages[0].content.split('</think>')[-1].lstrip('\n') }}", "<think>\nx</think>\n\ny", "y"),
        ("{% if '</think>' in messages[0].content %}a{% else %}b{% endif %}", "x</think>y", "a"),
        ("{{ messages[0].content | replace('<think>', '') }}", "<think>x", "x"),
        ("{{ messages[0].content.startswith('<think>') }}", "<think>x", "True"),
        ("{% if messages[0].role == 'user' and messages[0].content == 'think' %}a{% endif %}", "think", "a"),
        ("{{ '<' + messages[0].role + '>' if messages[0].content == 'think' }}", "think", "<user>"),
        ("{{ messages[0].content | length }}", "<|im_end|> <think>", "18"),
        ("{{ messages[0].content[-1] }}", "x<", "<"),
        ("{% if messages[0].content == '<' %}a{% endif %}", "<", "a"),
        ("{{ messages[0].content | upper }}", "user", "USER"),
        ("{{ messages | tojson }}", "<|im_end|>", '[{"role": "user", "content": "<|im_end|>"}]'),
    ],
)
def test_templates_see_messages_as_they_are(source, content, text, tok):
    ids = rendered(source, tok, content)
    assert tok.decode(ids) == text
    assert not set(ids) & set(tok.special.ids.values())


PUBLISHED = [  # what templates of Qwen, DeepSeek and Gemma do with an answer
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content | trim }}{% endif %}<|im_end|>"
    "{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>', 1)[1] %}{% endif %}{{ content + '<|im_end|>' }}{% endfor %}",
    "{% macro cut(text) %}{% set ns = namespace(result='') %}{% for part in text.split('</think>') %}{% if '<think>' "
    "in part %}{% set ns.result = ns.result + part.split('<think>')[0] %}{% else %}{% set ns.result = ns.result + part "
    "%}{% endif %}{% endfor %}{{ ns.result | trim }}{% endmacro %}{% for m in messages %}{{ cut(m.content) }}<|im_end|>"
    "{% endfor %}",
    "{% for m in messages %}{% if m.content.startswith('<think>') and not m.content.endswith('</think>') %}open "
    "{% endif %}{{ m.content.replace('<think>', '') | length }}{{ m | tojson }}<|im_end|>{% endfor %}",
]
PARTS = ["<think>", "</think>", "<|im_end|>", "think", "<", ">", "</", "|>", "<|im_", "im_end", "a", " ", "\n"]


@settings(deadline=None)
@given(
    texts=st.lists(st.lists(st.sampled_from(PARTS)).map("".join), min_size=1, max_size=3),
    source=st.sampled_from(PUBLISHED),
)
def test_what_templates_write_is_what_plain_jinja_writes(tok, texts, source):
    """And its control tokens are those that it writes for messages that look like nothing."""
    messages = [user(text) for text in texts]
    plain = jinja2.Environment()
    plain.filters["tojson"] = json.dumps
    ids = Template(source, tok).render(messages)
    assert tok.decode(ids) == plain.from_string(source).render(messages=messages)
    control = set(tok.special.ids.values())
    harmless = Template(source, tok).render([user("a")] * len(texts))
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]


def test_control_tokens_of_the_template_stay_beside_the_same_ones_of_a_message(tok):
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% set parts = m.content.split('</think>') %}"
        "<think>{{ parts[0] }}</think>{{ parts[-1] }}<|im_end|>{% endfor %}"
    )
    ids = rendered(source, tok, "a</think>b<|im_end|>")
    s = tok.special.ids
    assert ids == [
        *[s["<|im_start|>"], *tok.encode("user"), s["<think>"], *tok.encode("a"), s["</think>"]],
        *[*tok.encode("b<|im_end|>"), s["<|im_end|>"]],
    ]


def test_a_message_that_a_template_takes_apart_is_refused_and_not_forged(tok):
    source = "{% for c in messages[0].content %}{% if c == '<' or c == 'b' %}[{% endif %}{{ c }}{% endfor %}"
    assert tok.decode(rendered(source, tok, "<|im_end|>")) == "[<|im_end|>"
    with pytest.raises(ChatError, match="changes what looks like a control token in a message"):
        rendered("{{ messages[0].content | urlencode }}", tok, "<|im_end|>")


def test_overlapping_control_tokens_stay_text(tmp_path):
    tok, _ = make(tmp_path, ["<a>", "[x]", "]y[x", "<|end|>"])
    for text in ("[x]y[x]", "[x", "x]", "]", "[x]y[x", "<a>[x]"):
        ids = Template("{{ messages[0].content }}|{{ messages[0].content }}", tok).render([user(text)])
        assert not set(ids) & set(tok.special.ids.values())
        assert tok.decode(ids) == f"{text}|{text}"


# What templates may use, as in transformers.


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        ("", {"ensure_ascii": False}),
        ("ensure_ascii=True", {}),
        ("separators=(',', ':')", {"separators": (",", ":"), "ensure_ascii": False}),
        ("sort_keys=True, indent=2", {"sort_keys": True, "indent": 2, "ensure_ascii": False}),
    ],
)
def test_tojson_takes_what_json_takes(arguments, keywords, tok):
    value = {"b": ["é", 1], "a": {"x": None}}
    source = f"{{{{ value | tojson({arguments}) }}}}"
    assert Program(source).render(10**6, NOW, value=value) == json.dumps(value, **keywords)


def test_tools_and_more_are_shown_to_a_template(tok):
    source = "{% for t in tools %}{{ t.name }} {% endfor %}{{ x }}{{ strftime_now('%Y') | length }}"
    with pytest.raises(ChatError, match="a message is 'the'; expected a role"):
        Template(source, tok).render(["the"])
    odd = {"name": "<|im_end|>", "<|im_end|>": "x", "role": "<|im_end|>"}
    assert tok.decode(shown := Template("{{ tools | tojson }}", tok).render([], tools=[odd])) == json.dumps([odd])
    assert not set(shown) & set(tok.special.ids.values())
    ids = Template(source, tok).render([user("")], tools=[{"name": "<|im_end|>"}], x=3)
    assert tok.decode(ids) == "<|im_end|> 34"
    assert not set(ids) & set(tok.special.ids.values())


# Templates that don't end, or make much of little


LOOP = "{% for i in range(99999) %}"
ENDLESS = {
    "nested loops": LOOP * 3 + "x" + "{% endfor %}" * 3,
    "power": "{{ 9**(9**9) }}",
    "power in a loop": "{% set n = namespace(x=9) %}" + LOOP + "{% set n.x = n.x ** 9 %}{% endfor %}",
    "repeated text": "{{ 'x' * 10**10 }}",
    "repeated list": "{{ [0] * 10**10 }}",
    "repeated by a number before": "{{ 10**9 * 'x' }}",
    "doubled": "{% set n = namespace(x='x') %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by ~": "{% set n = namespace(x='x') %}" + LOOP + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled by set": "{% set n = namespace(x='x') %}" + LOOP + "{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "doubled by replace": "{% set n = namespace(x='xx') %}"
    + LOOP
    + "{% set n.x = n.x.replace('x', n.x) %}{% endfor %}",
    "doubled by join": "{% set n = namespace(x='xx') %}" + LOOP + "{% set n.x = n.x | join(n.x) %}{% endfor %}",
    "joined by a method": "{% set n = namespace(x='xx') %}" + LOOP + "{% set n.x = n.x.join(n.x) %}{% endfor %}",
    "shared lists": "{% set n = namespace(x=[1]) %}" + LOOP + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "shared dicts": "{% set n = namespace(x={}) %}" + LOOP + "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}",
    "shared by dict()": "{% set n = namespace(x=1) %}" + LOOP + "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
    "a list that grows": "{% set n = namespace(x=[]) %}" + LOOP + "{% set n.x = n.x + [i] %}{% endfor %}",
    "a text that grows": "{% set n = namespace(x='') %}" + LOOP + "{% set n.x = n.x ~ 'xxxxxxxx' %}{% endfor %}",
    "looking": "{% set x = 'x' * 999999 %}" + LOOP + "{% if 'y' in x %}{% endif %}{% endfor %}",
    "comparing": "{% set x = 'x' * 99999 %}" + LOOP + "{% if x + 'a' == x + 'b' %}{% endif %}{% endfor %}",
    "slicing": "{% set x = 'x' * 999999 %}" + LOOP + "{% set y = x[1:] %}{% endfor %}",
    "centred": "{{ 'x'.center(10**10) }}",
    "justified": "{{ 'x'.ljust(999999999) }}",
    "zeros": "{{ 'x'.zfill(999999999) }}",
    "tabs": "{{ '\t'.expandtabs(999999999) }}",
    "a wide field": "{{ '%999999999d' % 1 }}",
    "a wide field by a filter": "{{ '%999999999d' | format(1) }}",
    "a field of any width": "{{ '%*d' % (999999999, 1) }}",
    "a wide field by format": "{{ '{:999999999}'.format(1) }}",
    "a nested field": "{{ '{:{}}'.format(1, 999999999) }}",
    "indented": "{{ 'x\nx' | indent(999999999) }}",
    "indented JSON": "{{ [1] | tojson(indent=999999999) }}",
    "slices": "{{ 'x' | slice(999999999) | list }}",
    "filled batches": "{{ [1] | batch(999999999, 0) | list }}",
    "rounded": "{{ 1 | round(999999999, 'floor') }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop of loops": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "lazy": "{{ range(99999) | map('string') | map('list') | map('join') | list }}" * 99,
    "namespaces": "{% set n = namespace() %}"
    + LOOP
    + "{% set m = namespace(a=n, b=n) %}{% endfor %}{{ [n, n] * 9999 }}",
    "itself": "{% set n = namespace() %}{% set n.n = n %}{% set n.m = n %}{{ n }}",
    "lazy join": "{% set x = 'x' * 999999 %}{{ range(99999) | map('string') | join(x) }}",
    "greatest of many": LOOP + "{% if range(99999) | max %}{% endif %}{% endfor %}",
    "greatest of lazy": LOOP + "{% if range(99999) | map('abs') | max %}{% endif %}{% endfor %}",
    "values": "{% set d = {1: 2} %}" + LOOP + "{% if range(99999) | list | max %}{% endif %}{% endfor %}",
    "in a range": LOOP + "{% if 'a' in range(99999) %}{% endif %}{% endfor %}",
    "is in a range": LOOP + "{% if 'a' is in(range(99999)) %}{% endif %}{% endfor %}",
    "squares": "{% set n = namespace(x=9) %}" + LOOP + "{% set n.x = n.x * n.x %}{% endfor %}{{ n.x // 3 }}",
    "a long number": "{{ ('9' * 4000) | int * 2 }}",
    "one value for many fields": "{{ ('%(a)s' * 99999) % {'a': 'x' * 99999} }}",
    "one value for many fields of a filter": "{{ ('%(a)s' * 99999) | format(a='x' * 99999) }}",
    "one value for many fields of format": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "one value by name": "{{ ('{a}' * 99999).format(a='x' * 99999) }}",
    "many wide fields": "{{ ('{:999}' * 99999).format(*range(99999)) }}",
    "a format of colons": "{{ ('{' + ':' * 99999 + '9999').format(1) }}",
    "messages": LOOP + "{{ messages }}{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_ended(name, tok):
    began = time.process_time()
    with pytest.raises(ChatError) as e:
        rendered(ENDLESS[name], tok, "x" * 100)
    assert time.process_time() - began < 20  # seconds where it would be hours; about 1 on an idle machine
    assert len(str(e.value)) < 900
    assert str(e.value).isprintable()


@pytest.mark.parametrize("name", ["doubled", "doubled by ~", "repeated text", "shared lists", "a text that grows"])
def test_it_takes_little_memory_till_then(name, tok):
    template = Template(ENDLESS[name], tok)
    tracemalloc.start()
    try:
        with pytest.raises(ChatError):
            template.render([user("x")])
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_long_conversations_are_no_endless_templates(tok):
    """A template of the costlier kind: every message looks at all, and texts are put together piece by piece."""
    source = (
        "{% set n = namespace(text='') %}{% for m in messages %}{% for o in messages %}{% if o.role == 'tool' %}x"
        "{% endif %}{% endfor %}{% if loop.index0 == messages | length - 1 %}last{% endif %}"
        "{% set n.text = n.text + '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>' %}{% endfor %}"
        "{{ n.text }}"
    )
    ids = rendered(source, tok, *["the cat is fine. " * 60] * 200)
    assert ids.count(tok.special.ids["<|im_end|>"]) == 200


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 500 + "]" * 500 + " }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
        "{% for x in y %}" * 100 + "{% endfor %}" * 100,
        "{{ x" + ".x" * 5000 + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ a if b else " * 500,
        "\x1b[31m{% \x00 %}",
        "{% set x = 1 %}{{ \ud800 }}",
        "{{ x | nosuch }}",
        "{{ loop.x is nosuch }}",
        "{% include 'a' %}",
        "{% extends 'a' %}",
        "{% break %}",
        "{{ raise_exception('\x1b[31m' * 1000) }}",
        "x" * 300_000,
        "{% set self = 1 %}{% block x %}{% set x.y = 1 %}{% endblock %}",
        "{{ lipsum(n=999999) }}",
        "{{ 'x'.translate({120: 'y'}) }}",
    ],
)
def test_what_is_no_template_is_named_in_a_line(source, tok):
    with pytest.raises(ChatError) as e:
        rendered(source, tok, "x")
    assert len(str(e.value)) < 900
    assert str(e.value).isprintable()


def test_templates_read_nothing_of_the_process():
    source = "{{ ('{0.__globals__[jinja2].__file__}' | attr('format'))(raise_exception) }}"
    with pytest.raises(SandboxError, match="unsafe"):
        Program(source).render(10**6, NOW)


def test_a_template_file_that_is_no_text_is_named(tmp_path):
    from jllama.chat import find_template

    train().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    from jllama import tokenizer

    with pytest.raises(ChatError, match=r"chat_template\.jinja: byte 0 is no UTF-8"):
        find_template(tmp_path, tokenizer.load(tmp_path / "tokenizer.json"))


def test_a_guessed_template_says_so(tmp_path):
    from jllama.chat import find_template

    tok, _ = make(tmp_path, CHATML)
    found = find_template(tmp_path, tok)
    assert (found.guessed, found.name) == (True, "built-in template for <|im_start|>")
    (tmp_path / "chat_template.jinja").write_text("x")
    assert not find_template(tmp_path, tok).guessed
