"""Jinja templates from strangers: they read nothing but what they are given, and end, in bounded time and memory.

An operation costs the size of what it is given and of what it makes, and a template has so much to spend: the bound is
the same on every machine. What could make much of little, such as `9**(9**9)`, is priced before it is done.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from types import CodeType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from jllama.errors import InputError

_MOST = 200_000  # characters of a template
_STEP = 20  # what an operation costs beside its operands
_WIDTH = 1000  # characters that text is padded to
_FILTERS = (
    "abs attr batch capitalize count d default dictsort e escape first float forceescape format groupby indent int "
    "items join last length list lower map max min reject rejectattr replace reverse round safe select selectattr "
    "slice sort string title trim truncate unique upper urlencode"
)
_SHALLOW = ("count", "default", "d", "first", "last", "length")  # filters that look at no more than one item
_LOOKS = re.compile(  # methods that look for their arguments, and don't write them
    "count|endswith|r?find|r?index|[lr]?strip|r?partition|removeprefix|removesuffix|r?split|startswith"
)
_WORD = re.compile("[a-z_]*")
_BITS = 10_000  # of a number
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|\d{4})")  # a field of unknown or great width
_FIELD = re.compile(r"\{[^{}]*.?", re.DOTALL)  # of str.format, with what ends it
_FIELD_COST = 300


class SandboxError(InputError):
    """A template that is none, or that doesn't end well."""


class Program:
    """A compiled template.

    Args:
      source: the template.
      hide: is applied to the texts that the template looks for, but not to those it writes.
      words: whether it is applied to single words too.

    Raises:
      SandboxError: `source` is no template.
    """

    def __init__(self, source: str, hide: Callable[[str], str] | None = None, *, words: bool = False) -> None:
        if len(source) > _MOST:
            raise SandboxError(f"{len(source)} characters; expected {_MOST} at most")
        environment = _Environment(budget=len(source) * 1000)
        try:
            tree = environment.parse(_without_generation_tags(source))
            if hide:
                _hide(tree, hide, words=words)
            self._code: CodeType = environment.compile(_Priced().visit(tree))
        except jinja2.TemplateSyntaxError as e:
            raise SandboxError(f"line {e.lineno}: {e.message}") from e
        except Exception as e:  # nesting too deep for Python, numbers too long for it, and the like
            raise SandboxError(f"can't be compiled: {type(e).__name__}: {e}") from e

    def render(self, budget: int, now: datetime.datetime, **variables: Any) -> str:
        """Return what the template writes, spending no more than `budget`.

        Raises:
          SandboxError: the template fails, or doesn't end within it.
        """
        environment = _Environment(budget, now)
        try:
            template = jinja2.Template.from_code(environment, self._code, environment.make_globals(None))
            return template.render(**variables)
        except Exception as e:  # a template is a program, and not ours
            raise SandboxError(str(e) or type(e).__name__) from e


class _Environment(ImmutableSandboxedEnvironment):
    """What templates may use, as in transformers, utils/chat_template_utils.py, and what they have left to spend."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, budget: int, now: datetime.datetime | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed while compiling
            finalize=self._paid,
            extensions=["jinja2.ext.loopcontrols"],
        )
        self.left = budget
        given = {name: self.filters[name] for name in _FILTERS.split()}
        self.filters = {name: self._priced(name, function) for name, function in given.items()}
        self.filters |= {"tojson": self._to_json, "_paid": self._paid, "_loop": self._loop, "_concat": self.concat}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: (now or datetime.datetime.now()).strftime(format[:_WIDTH])

    def pay(self, cost: int) -> None:
        """Spend."""
        self.left -= cost
        if self.left < 0:
            raise SandboxError("it takes too long or makes too much")

    def look(self, *values: Any) -> int:
        """Pay for looking at values with all that they hold, and return how much."""
        todo, cost = list(values), _STEP
        while todo:
            value = todo.pop()
            if isinstance(value, str):
                cost += len(value) >> 2
            elif isinstance(value, int):
                self._check_bits(value.bit_length())
            elif isinstance(value, list | tuple | set | dict):
                cost += _STEP + len(value)
                if cost <= self.left:
                    todo += [*value, *value.values()] if isinstance(value, dict) else value
            elif isinstance(value, Namespace):
                cost += 50 * _STEP
                todo.append(value._Namespace__attrs)
            elif isinstance(value, Sized):
                cost += len(value)
            if cost > self.left:
                break
        self.pay(cost)
        return cost

    def _check_bits(self, bits: int) -> None:
        if bits > _BITS:
            raise SandboxError(f"a number has over {_BITS} bits")

    def _paid(self, value: Any) -> Any:
        self.look(value)
        return value

    def _loop(self, value: Any) -> Any:
        """Pay for every round of a loop."""
        if not isinstance(value, Sized):
            return self._counted(value) if isinstance(value, Iterable) else value
        self.pay(_STEP * (1 + len(value)))
        return value

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.pay(_STEP)
            yield value

    def concat(self, parts: Iterable[Any]) -> str:
        """Join what a template writes after paying for it."""
        texts = []
        for part in parts:
            self.look(part)
            texts.append(str(part))
        return "".join(texts)

    def _priced(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is paid for, before and after."""
        passes = hasattr(function, "jinja_pass_arg")

        @functools.wraps(function)
        def priced(*args: Any, **kwargs: Any) -> Any:
            args = tuple(self._counted(arg) if isinstance(arg, Iterator) else arg for arg in args)
            if name == "join":
                args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            given = [*args[passes:], *kwargs.values()]
            if name in _SHALLOW:
                self.pay(_STEP)
                return function(*args, **kwargs)
            cost = self.look(*given)
            if any(type(x) is int and abs(x) > _WIDTH for x in given[1:]):
                raise SandboxError(f"the filter {name} was given a number over {_WIDTH}")
            self._foresee(name, given, cost)
            found = function(*args, **kwargs)
            self.look(found)
            return found

        return priced

    def _foresee(self, name: str, given: list[Any], cost: int) -> None:
        """Pay for what a filter or method of a text makes, where that can be much more than the `cost` of `given`."""
        text = given[0] if given and isinstance(given[0], str) else ""
        if name == "join":
            # The filter gets the items first, the method the text between them.
            items, between = (given[1], text) if text and len(given) > 1 else (given[0], [*given, ""][1])
            self.pay(len(str(between)) * len(items) if isinstance(items, Sized) else 0)
        elif name == "replace" and len(given) > 2:
            self.pay(text.count(str(given[1])) * len(str(given[2])))
        elif name == "indent":
            self.pay((1 + text.count("\n")) * max([4, *(len(x) if isinstance(x, str) else int(x) for x in given[1:])]))
        elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
            self.pay((1 + text.count("\t")) * max([8, *(x for x in given[1:] if isinstance(x, int))]))
        elif name in ("format", "format_map", "%"):
            fields = [field for field in _FIELD.findall(text) if ":" in field]
            if _WIDE.search(text) or any(field.endswith("{") or re.search(r"\d{4}", field) for field in fields):
                raise SandboxError("a field of text is too wide")
            # One value may fill many fields.
            self.pay((text.count("%") + text.count("{")) * (_FIELD_COST + cost))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator's value after paying for it."""
        cost = self.look(left, right)
        number, other = (left, right) if isinstance(left, int) else (right, left)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() * right)
        elif operator == "*" and isinstance(number, int) and isinstance(other, Sized):
            self.pay(len(other) * max(0, number))
        elif operator == "%" and isinstance(left, str):
            self._foresee("%", [left], cost)
        found = super().call_binop(context, operator, left, right)
        self.look(found)
        return found

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function after paying for it."""
        method = getattr(function, "__wrapped__", function)  # of str.format, which jinja2 wraps
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        cost = self.look(*args, *kwargs.values(), *([owner] if isinstance(owner, str | Sized) else []))
        if isinstance(owner, str):
            self._foresee(name, [owner, *args], cost)
        found = super().call(context, function, *args, **kwargs)
        self.look(found)
        return found

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute; those that make texts by tables are for nothing here."""
        return super().is_safe_attribute(obj, attr, value) and attr not in ("translate", "maketrans", "encode")

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers has it: jinja2's own escapes HTML."""
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators and (separators[0], separators[1]),
            sort_keys=sort_keys,
        )
        self.look(value, indent, separators)
        if isinstance(indent, int) and indent > _WIDTH:
            raise SandboxError(f"tojson was given an indent over {_WIDTH}")
        return self.concat(encoder.iterencode(value))


class _Priced(NodeTransformer):
    """Let the loops, texts, lists and comparisons of a template be paid for; filters, calls and operators are."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = _filter("_loop", node.iter)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(
            nodes.List(node.nodes, lineno=node.lineno), "_concat", [], [], None, None, lineno=node.lineno
        )

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filter("_paid", self.generic_visit(node))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filter("_paid", self.generic_visit(node))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _filter("_paid", node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter("_paid", node.expr)
        for operand in node.ops:
            operand.expr = _filter("_paid", operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.args:
            node.node = _filter("_paid", node.node)
            node.args = [_filter("_paid", arg) for arg in node.args]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter("_paid", node.node)
        return node


def _filter(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _hide(tree: nodes.Template, hide: Callable[[str], str], *, words: bool) -> None:
    """Apply `hide` to the texts that a template looks for, but for those that it compares roles with."""
    looked_for: list[nodes.Node] = [each for each in tree.find_all(nodes.Compare) if not _names_role(each)]
    for call in tree.find_all(nodes.Call):
        method = call.node.attr if isinstance(call.node, nodes.Getattr) else ""
        looked_for += call.args if _LOOKS.fullmatch(method) else call.args[:1] if method == "replace" else []
    for each in tree.find_all((nodes.Filter, nodes.Test)):
        looked_for += each.args[:1] if each.name == "replace" or isinstance(each, nodes.Test) else []
    for node in looked_for:
        for const in [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const):
            if isinstance(const.value, str) and (words or not _WORD.fullmatch(const.value)):
                const.value = hide(const.value)


def _names_role(compare: nodes.Compare) -> bool:
    """Whether a comparison speaks of a role, as `message.role`, `m["role"]` or `last_role`."""

    def name(node: Any) -> str:
        return str(node.name if isinstance(node, nodes.Name) else getattr(node, "attr", getattr(node, "arg", "")))

    return any("role" in name(node) for node in compare.find_all((nodes.Name, nodes.Getattr, nodes.Getitem)))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _without_generation_tags(source: str) -> str:
    """`source` with the tags that mark answers for training replaced by ones that do nothing."""
    source = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", source)
    return re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", source)
