"""Rows of a running state: what is put in, taken out and moved is what was there, on any leading axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllama.decode import State
from jllama.likely import Likely
from jllama.model import Cache
from jllama.rows import place, regroup

K, H = 3, 2


def numbered(rows: int, slots: int, first: int, lead: tuple[int, ...]) -> State:
    """Make a state whose numbers all differ."""

    def array(*shape: int, dtype: type = np.float32) -> jax.Array:
        return jnp.asarray(np.arange(first, first + np.prod(shape)).reshape(shape).astype(dtype))

    cache = Cache(k=(array(*lead, rows * K, slots, H),), v=(-array(*lead, rows * K, slots, H),))
    pos = jnp.asarray(np.arange(rows, dtype=np.int32) % slots)
    likely = Likely(array(rows, slots, 20, dtype=np.int32), array(rows, slots, 20))
    return State(cache, array(rows, slots, dtype=np.int32), array(rows, slots), pos, jnp.arange(rows) % 2 == 0, likely)


def by_row(state: State) -> list[list[np.ndarray]]:
    """Return all that belongs to each row, its slots first."""
    rows = len(state.pos)
    found = []
    for row in range(rows):
        leaves = [
            np.moveaxis(np.asarray(x)[..., row * K : (row + 1) * K, :, :], -2, 0) for x in jax.tree.leaves(state.cache)
        ]
        found.append([*leaves, *(np.asarray(x)[row] for x in jax.tree.leaves(state[1:]))])
    return found


def assert_row(found: list[np.ndarray], expected: list[np.ndarray], slots: int) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a[:slots] if a.ndim else a, b[:slots] if b.ndim else b)


@pytest.mark.parametrize("lead", [(), (2,)])
def test_rows_are_put_in_and_the_others_stay(lead: tuple[int, ...]) -> None:
    state, new = numbered(4, 8, 0, lead), numbered(3, 5, 1000, lead)
    found = jax.jit(place)(state, new, jnp.array([2, 4, 0], jnp.int32))  # the second goes nowhere
    before, after, put = by_row(state), by_row(found), by_row(new)
    for row, source in ((2, 0), (0, 2)):
        assert_row(after[row], put[source], 5)
    for row in (1, 3):
        assert_row(after[row], before[row], 8)


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("slots", [4, 8, 12])
def test_rows_are_chosen_and_slots_cut_or_added(lead: tuple[int, ...], slots: int) -> None:
    state = numbered(4, 8, 0, lead)
    chosen = [3, 1, 1, 0, 2]
    found = jax.jit(regroup, static_argnames="slots")(state, jnp.array(chosen, jnp.int32), slots=slots)
    assert found.tokens.shape == found.logprobs.shape == (5, slots)
    before, after = by_row(state), by_row(found)
    for row, source in enumerate(chosen):
        assert_row(after[row], before[source], min(slots, 8))
        assert all(not a[8:].any() for a in after[row] if a.ndim)


def test_a_row_is_put_in_without_a_copy_of_the_state() -> None:
    state, new = numbered(4, 64, 0, ()), numbered(1, 32, 1000, ())
    program = jax.jit(place, donate_argnums=0).lower(state, new, jnp.array([1], jnp.int32)).compile()
    whole = sum(leaf.nbytes for leaf in state.cache.k + state.cache.v)
    assert program.memory_analysis().alias_size_in_bytes >= whole
    assert program.memory_analysis().temp_size_in_bytes < whole / 8
