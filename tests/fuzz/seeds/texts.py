"""Good chat templates, settings, prompts and results."""

import gguf_writer

from fuzz.seeds.base import ROOT, Seed, json_bytes, seed
from fuzz.seeds.tokenizers import TOKENIZER_CONFIG
from jllama import chat

PUBLISHED = [
    chat._LLAMA2,
    chat._LLAMA3,
    chat._CHATML,
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}",
    "{%- macro turn(role, text) -%}<|im_start|>{{ role }}\n{{ text | trim }}<|im_end|>\n{%- endmacro -%}"
    "{%- set ns = namespace(found=false, last=messages|length - 1) -%}"
    "{%- for m in messages[::-1] -%}"
    "{%- if not ns.found and m.role == 'user' -%}{%- set ns.found = true -%}{%- endif -%}"
    "{%- endfor -%}{%- for m in messages -%}{%- if loop.index0 > ns.last -%}{%- continue -%}{%- endif -%}"
    "{{ turn(m.role, m.content.split('</think>')[-1]) }}{%- endfor -%}"
    "{%- if tools is not none -%}{{ tools | tojson(indent=4) }}{%- endif -%}{{ strftime_now('%d %b %Y') }}"
    "{% generation %}x{% endgeneration %}",
]


@seed
def chat_template_jinja():
    return [
        Seed({"chat_template.jinja": t.encode()}, "", {"chat_template.jinja": "template"}, "chat", whole=False)
        for t in PUBLISHED
    ]


@seed
def chat_template_json():
    several = {
        **TOKENIZER_CONFIG,
        "chat_template": [{"name": "default", "template": PUBLISHED[2]}, {"name": "rag", "template": ""}],
    }
    return [
        Seed({"tokenizer_config.json": json_bytes(c)}, "", {"tokenizer_config.json": "json"}, "chat")
        for c in (TOKENIZER_CONFIG, several)
    ]


@seed
def chat_template_gguf():
    keys = {"general.architecture": "llama", "tokenizer.chat_template": PUBLISHED[2], "general.alignment": 32}
    data = gguf_writer.gguf_bytes(keys, {"a": ((2,), 0, bytes(8))})
    return [Seed({"m.gguf": data}, "m.gguf", {"m.gguf": "gguf"}, "chat", whole=False)]


@seed
def config_toml():
    return [
        Seed({"c.toml": f.read_bytes()}, "c.toml", {"c.toml": "toml"}, "toml", whole=False)
        for f in sorted((ROOT / "configs").glob("*.toml"))
    ]


@seed
def prompts_txt():
    return [
        Seed(
            {"p.txt": "\ufeffonce upon\n\nthe é 🦙\r\nab".encode()}, "p.txt", {"p.txt": "lines"}, "prompts", whole=False
        )
    ]


@seed
def prompts_jsonl():
    fields = [
        {"prompt": "the cat", "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
        {"prompt": "", "max_new_tokens": 3, "repetition_penalty": 1.1, "seed": 7, "stop": ["a", "b"]},
        {"prompt": "é", "seed": None, "stop": "x"},
    ]
    data = b"\n".join(map(json_bytes, fields)) + b"\n"
    return [Seed({"p.jsonl": data}, "p.jsonl", {"p.jsonl": "jsonl"}, "prompts", whole=False)]


RESULT_PROMPTS = ["the", "cat", "é"]


@seed
def results_jsonl():
    rows = [{"prompt": p, "text": "x", "tokens": 1, "finish_reason": "stop"} for p in RESULT_PROMPTS]
    data = b"".join(json_bytes(r) + b"\n" for r in rows)
    return [Seed({"out.jsonl": data}, "out.jsonl", {"out.jsonl": "jsonl"}, "results", whole=False)]
