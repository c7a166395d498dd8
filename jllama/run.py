"""How a model is run: what the user and the machine choose, beside what the model is (`Config`)."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax

from jllama.kernels import choose as choose_kernels

KVDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Run:
    """How a model is run; frozen and hashable, so that it can be static under `jax.jit`.

    Args:
      kernels: whether the kernels of `kernels` run what they can, in XLA's place.
      kv_dtype: what keys and values are kept in.
      stacked: whether equal layers are kept as one stack that a `lax.scan` runs over, so that compiling doesn't take
        longer the more layers there are. XLA's CPU back end would copy each slice of a stack; kernels and
        accelerators don't.
      axis: the mesh axis over which heads, feed-forward and vocabulary are divided, where this is what one device
        has of a model; None: all of it.
    """

    kernels: bool = False
    kv_dtype: KVDtype = "float32"
    stacked: bool = False
    axis: str | None = None


def choose(kernels: str = "auto", kv_dtype: KVDtype = "float32", *, on_mesh: bool = False) -> Run:
    """Choose how to run a model here.

    Args:
      kernels: "xla"; "native", the package's own for CPUs; or "auto", the latter where they can be used.
      kv_dtype: "float32" or "bfloat16", what keys and values are kept in.
      on_mesh: whether the model is laid out over several devices.

    Raises:
      ValueError: another word, or kernels or keys and values that can't be used here.
    """
    if kv_dtype not in get_args(KVDtype):
        raise ValueError(f"kv_dtype = {kv_dtype!r}: expected {' or '.join(get_args(KVDtype))}")
    if on_mesh and kernels == "native":
        raise ValueError("kernels = native: they run on a single device: expected no mesh, or kernels = auto")
    use_kernels = choose_kernels(kernels) and not on_mesh
    return Run(use_kernels, kv_dtype, stacked=use_kernels or jax.default_backend() != "cpu")
