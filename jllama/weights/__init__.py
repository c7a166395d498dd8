"""Weights and the products with them, behind one `linear` and one `take`; a file for each storage form.

A weight is `[out, in]`, as checkpoints store it. The products are written in the forms that XLA's CPU back end turns
into its fast kernels, which cost nothing elsewhere; docs/performance.md has the measurements.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jllama.run import Run
from jllama.weights.base import Array, Weight, layer_of, summed
from jllama.weights.groups import KINDS, Groups
from jllama.weights.plain import Plain

__all__ = ["FORMS", "KINDS", "Array", "Groups", "Linear", "Plain", "Weight", "layer_of", "linear", "take"]

# The storage forms by name.
FORMS: dict[str, type[Plain] | type[Groups]] = {
    "float32": Plain,
    "bfloat16": Plain,
    **dict.fromkeys(KINDS, Groups),
}


class Linear(NamedTuple):
    """A weight `[out, in]` and, in some models, a bias float32 `[out]`."""

    weight: Weight
    bias: jax.Array | None = None


def linear(layer: Linear, x: jax.Array, run: Run, *, fine: bool = False, divided: bool = False) -> jax.Array:
    """Multiply float32 `x [..., in]` by a weight `[out, in]` and add the bias -> float32 `[..., out]`.

    Args:
      layer: the weight and its bias.
      x: the inputs.
      run: how the model is run.
      fine: whether the rounding of inputs matters more here than elsewhere.
      divided: whether the inputs are divided over the mesh axis of `run`; the products are summed over it then.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = layer.weight.dot(rows, native=run.kernels, fine=fine, axis=run.axis if divided else None)
    if layer.bias is not None:
        y = y + layer.bias[None]
    return y.reshape(*x.shape[:-1], y.shape[-1])


def take(w: Weight, ids: jax.Array, run: Run) -> jax.Array:
    """Look up rows: `ids` int `[...]` within the matrix -> float32 `[..., in]`.

    Over a mesh each device has some of the rows.
    """
    if run.axis is None:
        return w.take(ids)
    ids = ids - lax.axis_index(run.axis) * w.shape[0]
    here = (ids >= 0) & (ids < w.shape[0])
    return summed(jnp.where(here[..., None], w.take(jnp.where(here, ids, 0)), 0.0), run.axis)
