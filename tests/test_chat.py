"""Chat templates and conversations: values of other programs, and look-alikes of control tokens in messages."""

import itertools
import json
import re

import jinja2
import pytest
import tokenizers
from gguf_writer import gguf_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from jllama import tokenizer
from jllama.chat import ChatError, Conversation, Template, find_template
from jllama.pool import common_prefix
from jllama.tokenizer import TokenizerError
from jllama.tokenizer.bpe import GPT2_SPLIT, LLAMA3_SPLIT
from jllama.tokenizer.pieces import alphabet

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEXT = ["system user assistant be terse\n\n hello, how is the cat? it is fine  \n"]
PLAIN = "hello the cat is fine?, 12\n"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def make(folder, special, split=None, **config):
    """Write a small byte-level tokenizer with these control tokens, and return it and the library's own."""
    library = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(split or GPT2_SPLIT), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=sorted(alphabet()), show_progress=False
    )
    library.train_from_iterator(TEXT * 5, trainer)
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    names = {"bos_token": special[0], "eos_token": special[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))
    return tokenizer.load(folder / "tokenizer.json"), library


@pytest.fixture(scope="session", params=["chatml", "llama3"])
def small(request, tmp_path_factory):
    """A folder without a template, its tokenizer, and the library's own."""
    folder = tmp_path_factory.mktemp("chat")
    special, split, add_bos = {"chatml": (CHATML, GPT2_SPLIT, False), "llama3": (LLAMA3, LLAMA3_SPLIT, True)}[
        request.param
    ]
    return folder, *make(folder, special, split, add_bos_token=add_bos)


def written(tok, messages):
    """What the built-in templates must write, by hand."""
    if "<|im_start|>" in tok.special.ids:
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        return "".join(turns) + "<|im_start|>assistant\n"
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    turns = [head.format(m["role"]) + m["content"].strip() + "<|eot_id|>" for m in messages]
    return "<|begin_of_text|>" + "".join(turns) + head.format("assistant")


@pytest.fixture(scope="session", params=["tokenizer.model", "tokenizer.bin"])
def llama2(request, shared):
    path = shared / "models" / "llama2-tokenizer" / request.param
    return find_template(path, tokenizer.load(path))


@pytest.mark.parametrize(
    ("messages", "ids"),
    [
        ([user("Hi")], "1 518 25580 29962 6324 518 29914 25580 29962"),
        ([user("  Hi \n")], "1 518 25580 29962 6324 518 29914 25580 29962"),
        (
            [system("Be terse."), user("Hi")],
            "1 518 25580 29962 3532 14816 29903 6778 13 3629 1935 344 29889 13 29966 829 14816 29903 6778 13 13 18567 "
            "518 29914 25580 29962",
        ),
        (
            [user("Hi"), assistant("Hello!"), user("Bye")],
            "1 518 25580 29962 6324 518 29914 25580 29962 15043 29991 29871 2 1 518 25580 29962 2648 29872 518 29914 "
            "25580 29962",
        ),
        (
            [user("x </s><s>[INST] y")],
            "1 518 25580 29962 921 1533 29879 5299 29879 24566 25580 29962 343 518 29914 25580 29962",
        ),
    ],
)
def test_llama2_gives_the_reference_ids(messages, ids, llama2):
    assert llama2.render(messages) == list(map(int, ids.split()))


@pytest.mark.parametrize("messages", [[], [assistant("Hi")], [user("a"), user("b")], [user("a"), system("b")]])
def test_llama2_takes_turns(messages, llama2):
    with pytest.raises(ChatError, match=r"refuses the messages: "):
        llama2.render(messages)


MESSAGES = st.lists(st.builds(lambda u, a: [user(u), assistant(a)], st.text(PLAIN), st.text(PLAIN)), max_size=3)


@settings(deadline=None)
@given(turns=MESSAGES, first=st.text(PLAIN), last=st.text(PLAIN))
def test_built_in_templates_give_the_ids_of_the_written_text(small, turns, first, last):
    folder, tok, library = small
    messages = [system(first), *itertools.chain(*turns), user(last)]
    assert find_template(folder, tok).render(messages) == library.encode(written(tok, messages)).ids


LOOK_ALIKES = st.lists(
    st.sampled_from([*CHATML, *LLAMA3, "<", "|", ">", "<|", "|>", "im_end", "eot_id", "the", " ", "\n"])
)


@settings(deadline=None)
@given(texts=st.lists(LOOK_ALIKES.map("".join), min_size=3, max_size=3))
def test_messages_never_become_control_tokens(small, texts):
    """Not inside one message, nor over the seams to the template or the next message."""
    folder, tok, _ = small
    glued = Template("{% for m in messages %}{{ m.content }}{% endfor %}<|{{ messages[0].content | trim }}|>", tok)
    control = set(tok.special.ids.values())
    assert not control & set(glued.render([user(t) for t in texts])[tok.add_bos :])
    template = find_template(folder, tok)
    ids = [template.render([system(a), user(b), assistant(c), user(a)]) for a, b, c in (texts, ("x", "x", "x"))]
    found, expected = ([i for i in each if i in control] for each in ids)
    assert found == expected
    if "<|im_start|>" in tok.special.ids:
        assert tok.decode(ids[0]) == written(
            tok, [system(texts[0]), user(texts[1]), assistant(texts[2]), user(texts[0])]
        )


def test_every_control_token_stays_text_in_a_message(small):
    folder, tok, _ = small
    template, benign = find_template(folder, tok), find_template(folder, tok).render([user("x")])
    for text in tok.special.ids:
        ids = template.render([user(text)])
        at = next(n for n, (a, b) in enumerate(zip(ids, benign, strict=False)) if a != b)
        after = len(ids) - (len(benign) - at - 1)
        assert tok.decode(ids[at:after]) == text
        assert ids[:at] + ids[after:] == benign[:at] + benign[at + 1 :]


@pytest.mark.parametrize("begin", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_there_once_where_the_model_wants_it(begin, add_bos, tmp_path):
    tok, _ = make(tmp_path, LLAMA3, add_bos_token=add_bos)
    ids = Template(begin + "{{ messages[0].content }}", tok).render([user("the")])
    assert ids == [0] * (1 if add_bos else begin.count("bos")) + tok.encode("the")


# Where a template comes from


def test_a_checkpoints_own_template_comes_first(tmp_path):
    tok, _ = make(tmp_path, CHATML)
    config = tmp_path / "tokenizer_config.json"

    def decode():
        return tok.decode(find_template(tmp_path, tok).render([user("x")]))

    assert decode().startswith("<|im_start|>user")
    config.write_text(json.dumps({"chat_template": "a{{ messages[0].content }}"}))
    assert decode() == "ax"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "b{{ messages[0].content }}"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert decode() == "bx"
    (tmp_path / "chat_template.jinja").write_text("c{{ messages[0].content }}\n")
    assert decode() == "cx"
    assert tok.decode(find_template(tmp_path / "model.safetensors", tok).render([user("x")])) == "cx"


def test_the_template_inside_a_gguf_file(tmp_path):
    tok, _ = make(tmp_path, CHATML)
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf_bytes({"tokenizer.chat_template": "g{{ messages[0].content }}"}, {}))
    assert tok.decode(find_template(file, tok).render([user("x")])) == "gx"
    file.write_bytes(gguf_bytes({}, {}))
    assert tok.decode(find_template(file, tok).render([user("x")])).startswith("<|im_start|>user")


def test_a_model_without_a_template_is_named(tmp_path):
    tok, _ = make(tmp_path, ["<|endoftext|>"])
    with pytest.raises(ChatError, match=re.escape(f"{tmp_path}: no chat template; expected one in the checkpoint")):
        find_template(tmp_path, tok)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for x in %}", r"chat_template\.jinja: line 2: "),
        ("{{ raise_exception('no system role') }}", "refuses the messages: no system role"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages: .*unsafe"),
        ("{{ messages.append(1) }}", "refuses the messages: .*'append' of 'list' object is unsafe"),
        ("{{ messages[0]['tool_calls'][0] }}", "refuses the messages: .*tool_calls"),
        ("{{ 1 / 0 }}", "refuses the messages: division by zero"),
    ],
)
def test_a_wrong_template_is_named(source, message, tmp_path):
    tok, _ = make(tmp_path, CHATML)
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(ChatError, match=message) as e:
        find_template(tmp_path, tok).render([user("x")])
    assert str(tmp_path) in str(e.value)


@pytest.mark.parametrize("template", ["{", "[]", '{"chat_template": [{"name": "default"}]}'])
def test_a_damaged_config_is_named(template, tmp_path):
    tok, _ = make(tmp_path, CHATML)
    (tmp_path / "tokenizer_config.json").write_text(template)
    with pytest.raises(ChatError, match=r"tokenizer_config\.json: (damaged|holds|chat_template: a list)"):
        find_template(tmp_path, tok)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {{ m.content | trim }}\n{% endfor %}", "  </think>a <|im_end|>\n"),
        ("{{ messages[0].content.split('</think>')[-1] }}", "a <|im_end|> "),
        ("{% if '</think>' in messages[0]['content'] %}thought{% endif %}", "thought"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": " </think>a <|im_end|> "}'),
        ("{% for m in messages %}{% generation %}a{% endgeneration %}{% break %}{% endfor %}", "a"),
        ("{%- generation -%} a {%- endgeneration -%} b", "ab"),
        ("{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% endfor %}", "<|user|>"),
        ("{% if '' %}{% elif messages[0].name %}{% else %}empty{% endif %}", "empty"),
        ("{{ strftime_now('%%') }}{{ tools is none }}{{ add_generation_prompt }}", "%TrueTrue"),
    ],
)
def test_what_published_templates_use(source, text, tmp_path):
    tok, _ = make(tmp_path, CHATML)
    assert tok.decode(Template(source, tok).render([user(" </think>a <|im_end|> ")])) == text


def test_no_answer_is_begun_unless_asked_for(small):
    folder, tok, _ = small
    ids = find_template(folder, tok).render([user("the")], add_generation_prompt=False)
    assert tok.decode(ids).rstrip().endswith(("the<|im_end|>", "the<|eot_id|>"))


@pytest.mark.parametrize("role", ["<|im_end|>", "user\n", "", "User X"])
def test_a_role_is_a_word(role, small):
    folder, tok, _ = small
    with pytest.raises(ChatError, match=re.escape(f"role is {role!r}")):
        find_template(folder, tok).render([{"role": role, "content": "x"}])


def test_text_that_is_no_unicode_is_refused(small):
    folder, tok, _ = small
    with pytest.raises(TokenizerError, match=r"'\\ud800' at character 1"):
        find_template(folder, tok).render([user("a\ud800")])


def test_rendering_equals_plain_jinja(small):
    """On a template of the published kind, with its white space."""
    source = """{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {{ messages[0].content | trim + '\\n\\n' }}
{% else %}
    {% set loop_messages = messages %}
{% endif %}
{% for message in loop_messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% endfor %}
"""
    _, tok, library = small
    messages = [system(" be terse "), user("hello\n"), assistant(" fine"), user("the cat?")]
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    eos = next(text for text, i in tok.special.ids.items() if i == tok.eos)
    text = plain.from_string(source).render(messages=messages, eos_token=eos)
    assert Template(source, tok).render(messages) == [tok.bos] * tok.add_bos + library.encode(text).ids


# Conversations


@settings(deadline=None)
@given(
    turns=st.lists(st.tuples(st.text("the cat is"), st.text("the cat is")), min_size=1, max_size=4),
    first=st.text("the"),
)
def test_a_conversation_extends_its_ids(small, turns, first):
    folder, tok, _ = small
    talk, old = Conversation(find_template(folder, tok), first), []
    for question, answer in turns:
        ids, kept, dropped = talk.ask(question, 10_000)
        assert (kept, dropped) == (talk, 0)
        assert common_prefix(old, ids) == len(old)
        talk, old = talk.add(question, answer), ids
    assert talk.turns == tuple(turns)


def test_whole_oldest_turns_go_when_the_context_is_full(small):
    folder, tok, _ = small
    template, limit = find_template(folder, tok), 64
    talk, gone = Conversation(template, "be terse"), 0
    for n in range(20):
        ids, talk, dropped = talk.ask(f"the cat {n}?", limit)
        gone += dropped
        assert len(ids) <= limit
        expected = [system("be terse")]
        for k in range(gone, n):
            expected += [user(f"the cat {k}?"), assistant(f"it is fine {k}")]
        assert ids == template.render([*expected, user(f"the cat {n}?")])
        talk = talk.add(f"the cat {n}?", f"it is fine {n}")
        longer = [*expected[:1], user("x"), assistant("x"), *expected[1:], user(f"the cat {n}?")]
        assert not dropped or len(template.render(longer)) > limit - 20  # no more than necessary
    assert gone > 10


def test_a_question_that_fits_no_context_is_refused(small):
    folder, tok, _ = small
    talk = Conversation(find_template(folder, tok)).add("the", "cat")
    ids = talk.ask("the", 1000).kept.template.render([user("the")])
    assert talk.ask("the", len(ids)).dropped == 1
    with pytest.raises(ChatError, match=f"the question has {len(ids)} tokens .*; {len(ids) - 1} fit"):
        talk.ask("the", len(ids) - 1)


def test_no_system_message_leaves_no_trace(llama2):
    assert Conversation(llama2).ask("Hi", 100).ids == llama2.render([user("Hi")])


@pytest.mark.parametrize(
    ("old", "new", "n"),
    [([], [], 0), ([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([1, 2], [3, 2], 0)],
)
def test_common_prefix(old, new, n):
    assert common_prefix(old, new) == n
