"""Random JSON schemas that something satisfies, as hypothesis makes them."""

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "id", "name", "x y", "é", 'q"', "list", "next"])


def _bounded(kind: str, least: str, most: str, low: int, high: int) -> st.SearchStrategy[dict[str, Any]]:
    """A type whose size or value has bounds, or some of them."""

    def of(bounds: tuple[int, int], given: tuple[bool, bool]) -> dict[str, Any]:
        both = zip((least, most), sorted(bounds), given, strict=True)
        return {"type": kind} | {key: value for key, value, is_given in both if is_given}

    bounds = st.tuples(st.integers(low, high), st.integers(low, high))
    return st.builds(of, bounds, st.tuples(st.booleans(), st.booleans()))


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.sampled_from(["", "red", 'a"b', "ü", "\n"]))
LEAVES = st.one_of(
    _bounded("integer", "minimum", "maximum", -120, 120),
    _bounded("number", "minimum", "maximum", -20, 20),
    _bounded("number", "exclusiveMinimum", "exclusiveMaximum", -20, 20).filter(
        lambda s: s.get("exclusiveMinimum", -99) < s.get("exclusiveMaximum", 99)
    ),
    _bounded("string", "minLength", "maxLength", 0, 8),
    st.sampled_from(["boolean", "null", ["string", "null"], ["integer", "boolean"]]).map(lambda kind: {"type": kind}),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
    st.sampled_from(["^[a-c]{2,5}$", "^(red|green)-[0-9]+$", "b"]).map(lambda p: {"type": "string", "pattern": p}),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        properties = draw(st.dictionaries(NAMES, inner, max_size=4))
        required = [name for name in properties if draw(st.booleans())]
        more = draw(st.sampled_from([False, {"type": "integer"}, None]))
        schema = {"type": "object", "properties": properties, "required": required}
        return schema if more is None else schema | {"additionalProperties": more}

    return build()


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    bounded = _bounded("array", "minItems", "maxItems", 0, 3)
    pairs = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    return st.one_of(st.builds(lambda sizes, items: sizes | {"items": items}, bounded, inner), pairs)


def _choices(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


NESTED = st.recursive(LEAVES, lambda inner: st.one_of(_objects(inner), _arrays(inner), _choices(inner)), max_leaves=6)
# A tree: nodes that hold nodes, and what each of them holds besides.
TREES = NESTED.map(
    lambda leaf: {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": leaf, "more": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
)
SCHEMAS = st.one_of(_objects(NESTED), _arrays(NESTED), NESTED, TREES)
