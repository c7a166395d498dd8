"""Damage to TOML and to chat templates."""

import random
import re

from fuzz.damage.binary import INTS, Damaged, binary

_TOML = [
    "0",
    "-1",
    "1.5",
    "true",
    '""',
    '"x"',
    "[]",
    "[1]",
    "{}",
    "{a = 1}",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1979-05-27",
    "07:32:00",
    "0x7fffffffffffffff",
    "9223372036854775808",
    "1" + "0" * 400,
    "-1" + "0" * 400,
    "9" * 5000,
    "[" * 500 + "]" * 500,
    "[" * 20000,
    "{a=" * 300 + "1" + "}" * 300,
    '"\\ud800"',
    "'''",
    '"\x1b[2J"',
    "1_000",
    "+0",
    "1e-400",
]


def toml(data: bytes, rng: random.Random) -> Damaged:
    """Values and keys, line by line."""
    if rng.random() < 0.3:
        return binary(data, rng)
    rows = data.decode().split("\n")
    for _ in range(rng.choice([1, 1, 2])):
        i = rng.randrange(len(rows))
        key, equals, _ = rows[i].partition(" = ")
        kind = rng.random()
        if kind < 0.65 and equals:
            rows[i] = f"{key} = {rng.choice([*_TOML, *map(str, INTS)])}"
        elif kind < 0.75:
            rows.insert(i, rng.choice(rows))
        elif kind < 0.85:
            rows.insert(
                i,
                rng.choice(
                    [
                        "[a]",
                        "[[a]]",
                        "[rope_scaling]",
                        "rope_scaling = 1",
                        "rope_scaling = {}",
                        "rope_scaling.factor = 1",
                        "tied = 1",
                        "axis = 'x'",
                        "native = true",
                        "kv_dtype = 'float32'",
                        "norm = []",
                        "norm = 'layer'",
                        "position = {}",
                        "sliding_window = true",
                        "a.b.c.d = 1",
                        "." * 1000 + " = 1",
                        "a." * 5000 + "b = 1",
                        "\0",
                    ]
                ),
            )
        elif len(rows) > 1:
            del rows[i]
    return "\n".join(rows).encode(), "toml"


_EXPRESSIONS = [
    "''.__class__.__mro__[1].__subclasses__()",
    "cycler.__init__.__globals__.os.system('touch canary')",
    "self.__init__.__globals__",
    "lipsum.__globals__['os'].popen('id').read()",
    "joiner.__init__.__globals__",
    "namespace.__init__.__globals__",
    "raise_exception.__globals__",
    "strftime_now.__globals__",
    "messages.__class__",
    "messages|attr('__class__')",
    "loop.__init__",
    "'%s'.format.__func__",
    "'{0.__class__}'.format(1)",
    "'{a.__globals__}'.format(a=strftime_now)",
    "'{0.__class__}'.format_map({'0': 1})",
    "raise_exception('x')",
    "raise_exception(messages)",
    "strftime_now('%' * 1000)",
    "strftime_now(1)",
    "strftime_now('\\0')",
    "tojson",
    "messages|tojson",
    "self|tojson",
    "namespace|tojson",
    "messages|tojson(indent=1000)",
    "messages|tojson(indent=-1)",
    "1/0",
    "range(10)",
    "range(10**9)|list",
    "messages.append(1)",
    "messages[0].pop('role')",
    "messages|map(attribute='x')|list",
    "messages|sort",
    "messages|groupby('role')|list",
    "messages|batch(0)|list",
    "messages|slice(0)|list",
    "messages|sum",
    "messages|random",
    "'a'|center(10000)",
    "'a'|indent(1000)",
    "'a'|wordwrap(0)",
    "'a'|truncate(-1)",
    "'%d'|format('x')",
    "'a'|int(base=99)",
    "'9'*5000|int",
    "10**5000",
    "2**2**2",
    "-10**400",
    "1e400",
    "1e400|int",
    "none.x",
    "undefined_name",
    "undefined_name.x",
    "caller()",
    "super()",
    "varargs",
    "loop.cycle()",
    "loop.index/0",
    "loop(messages)",
    "bos_token * 3",
    "eos_token",
    "messages[1000]",
    "messages[-1]",
    "messages['x']",
    "messages[0]['content'][0:99999]",
    "lipsum(n=2)",
    "lipsum(n=100000)",
    "cycler()",
    "cycler(1).next()",
    "joiner()()",
    "dict(a=1)",
    "namespace(a=1).a",
    "'a'~1",
    "not x",
    "x is divisibleby 0",
    "1 is divisibleby 0",
    "1 in 2",
    "[1,2][::0]",
    "{[]:1}",
    "{}[[]]",
    "(1).real",
    "'\\ud800'",
    '"\\N{nul}"',
    "'a'*100000",
    "'x'|replace('', 'yy'*1000)",
    "'<a>'|striptags",
    "'a b'|urlize",
    "{}|xmlattr",
    "{'a b':1}|xmlattr",
    "messages|pprint",
    "'x'|filesizeformat",
    "1|round(99999)",
    "messages|unique|list",
    "messages|join",
    "messages|first",
    "[]|first",
    "[]|last",
    "[]|min",
    "messages|max",
]
_TAGS = [
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{% from 'x' import y %}",
    "{% block a %}{% endblock %}",
    "{% block a %}{% endblock %}{% block a %}{% endblock %}",
    "{% raw %}",
    "{% endraw %}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{% for i in range(100) %}{% for j in range(100) %}x{% endfor %}{% endfor %}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if %}",
    "{% if 1 %}",
    "{% endif %}",
    "{% else %}",
    "{% elif x %}",
    "{% break %}",
    "{% continue %}",
    "{% set x = 10**5000 %}",
    "{% set x = 1e999 %}{{ x }}",
    "{% set x %}a{% endset %}",
    "{% set x.y = 1 %}",
    "{% set messages = 3 %}",
    "{% call a() %}{% endcall %}",
    "{% filter upper %}a{% endfilter %}",
    "{% filter nothing %}a{% endfilter %}",
    "{% with a=1 %}{% endwith %}",
    "{% do x %}",
    "{% autoescape true %}{% endautoescape %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% trans %}",
    "{%",
    "%}",
    "{{",
    "}}",
    "{#",
    "#}",
    "# for",
    "{% set _ = messages.__setitem__(0, 1) %}",
    "{% set loop = 1 %}",
    "{% for loop in messages %}{% endfor %}",
    "{% macro caller() %}{% endmacro %}",
    "{% set self = 1 %}{{ self }}",
    "{% for True in x %}{% endfor %}",
    "{% set none = 1 %}",
    "{% set x = namespace() %}{% set x.__class__ = 1 %}",
    "{% set x = x.y.z %}",
    "{%- for a, b in messages -%}{{ a }}{%- endfor -%}",
    "{% for a in 3 %}{% endfor %}",
    "{% print x %}",
    "{% if " + "(" * 60 + "1" + ")" * 60 + " %}{% endif %}",
    "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "{{ " + "[" * 150 + "]" * 150 + " }}",
    "{{ " + "not " * 3000 + "1 }}",
    "{{ " + "1+" * 3000 + "1 }}",
    "{{ x" + ".a" * 3000 + " }}",
    "{{ x" + "|trim" * 2000 + " }}",
    "{% for a in x %}" * 21 + "{% endfor %}" * 21,
    "{% if 1 %}" * 120 + "{% endif %}" * 120,
    "{% if 1 %}" * 1000 + "{% endif %}" * 1000,
    "{% macro a() %}" * 30 + "{% endmacro %}" * 30,
]


def template(data: bytes, rng: random.Random) -> Damaged:
    """Jinja: other expressions and tags at places where one is."""
    kind = rng.random()
    if kind < 0.15:
        return binary(data, rng)
    text = data.decode()
    if kind < 0.35:
        tokens = re.findall(r"\w+|\s+|.", text)
        for _ in range(rng.choice([1, 2, 4])):
            i = rng.randrange(len(tokens))
            tokens[i] = rng.choice(
                [
                    *tokens,
                    "",
                    "__class__",
                    "\ud800",
                    "9" * 5000,
                    "lipsum",
                    "\0",
                    "é",
                    "loop",
                    "messages",
                    "1e999",
                    "'",
                    '"',
                    "**",
                    "//",
                    "%}",
                    "{%",
                    "}}",
                    "{{",
                    "-%}",
                ]
            )
        return "".join(tokens).encode("utf-8", "surrogatepass"), "tokens"
    parts = re.split(r"({{.*?}}|{%.*?%})", text, flags=re.DOTALL)
    for _ in range(rng.choice([1, 1, 2, 3])):
        i = rng.randrange(len(parts))
        what = rng.random()
        if what < 0.4:
            parts[i] = "{{ " + rng.choice(_EXPRESSIONS) + " }}"
        elif what < 0.7:
            parts[i] = rng.choice(_TAGS)
        elif what < 0.8:
            parts[i] = "{% set a = " + rng.choice(_EXPRESSIONS) + " %}{{ a }}"
        elif what < 0.9:
            parts[i] = rng.choice(parts)
        else:
            parts[i] = ""
    return "".join(parts).encode("utf-8", "surrogatepass"), "template"
