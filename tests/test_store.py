"""What is kept of prompts: the longest beginning in common is found, salts keep apart, and the budget holds."""

import jax.numpy as jnp
from hypothesis import given, settings, strategies

from jllama.model import Cache
from jllama.server.pages import Pages
from jllama.server.store import Store

PAGE = 4 * 2 * 8  # bytes


def pages(ids: list[int], shared: Pages | None = None, common: int = 0) -> Pages:
    """Pages of four ids each, the first ones those of another."""
    same = [] if shared is None else shared.pages[: common // 4]
    count = -(-len(ids) // 4) - len(same)
    return Pages(ids, [*same, *(Cache((jnp.zeros((1, 4, 2)),), (jnp.zeros((1, 4, 2)),)) for _ in range(count))])


def common(a: list[int], b: list[int]) -> int:
    """Ids in common at the beginning, counted one by one."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


texts = strategies.lists(strategies.integers(0, 2), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(strategies.lists(strategies.tuples(texts, strategies.sampled_from(["", "x"])), max_size=12), texts)
def test_what_is_found_has_the_longest_beginning_in_common(added, wanted) -> None:
    store = Store(10**6)
    for ids, salt in added:
        store.add(pages(ids), salt)
    for salt in ("", "x"):
        longest = max((common(ids, wanted) for ids, s in added if s == salt), default=0)
        found = store.find(wanted, salt)
        assert (0 if found is None else common(found.ids, wanted)) == longest


@settings(max_examples=60, deadline=None)
@given(strategies.lists(texts, max_size=12), strategies.integers(0, 6))
def test_the_budget_holds_and_shared_pages_count_once(added, budget) -> None:
    store = Store(budget * PAGE)
    held: list[Pages] = []
    for ids in added:
        known = store.find(ids)
        new = pages(ids, known, 0 if known is None else common(known.ids, ids))
        store.add(new)
        held.append(new)
        there = {id(page): page for p in held if store.find(p.ids) is p for page in p.pages}
        assert len(there) * PAGE == store.bytes <= budget * PAGE
    store.clear()
    assert (len(store), store.bytes, store.find([0])) == (0, 0, None)


def test_the_least_recently_used_goes_first() -> None:
    store = Store(2 * PAGE)
    first, second, third = pages([1]), pages([2]), pages([3])
    store.add(first)
    store.add(second)
    assert store.find([1, 5]) is first
    store.add(third)
    assert [store.find([n]) for n in (1, 2, 3)] == [first, None, third]


def test_a_longer_text_takes_the_place_of_its_beginning() -> None:
    store = Store(10**6)
    store.add(pages([1, 2]))
    longer = pages([1, 2, 3])
    store.add(longer)
    store.add(pages([1, 2, 3]))  # is there
    store.add(pages([1]))  # is its beginning
    assert len(store) == 1
    assert store.find([1, 2, 9]) is longer
