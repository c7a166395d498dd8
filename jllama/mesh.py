"""A mesh of devices: what of a model lies on which.

A mesh has two axes. "data" divides the rows of a batch; "model" divides every layer by heads and by the width of the
feed-forward, and embedding and head by vocabulary. Each device runs the program of a single device on what it has
(`jax.shard_map`): a model of fewer heads, on fewer rows. Those of one data index sum what they have where a layer
needs it, and meet nowhere else; those of different data indices never meet, and each ends its loop by itself.

A leaf on the mesh is what the devices have, one after another: so the rows of wqkv are q, k and v of the first part,
then q, k and v of the second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jllama.config import Config
from jllama.model import Params
from jllama.tensors import leaves
from jllama.weights import Weight

P: Any = PartitionSpec  # untyped: a tree of specs has the type of its arrays
DATA, MODEL = "data", "model"
WHOLE, ROWS = P(), P(DATA)  # on all devices alike; by the rows of a batch


class Shape(NamedTuple):
    """How many parts a mesh makes of the rows of a batch, and of a model."""

    data: int = 1
    model: int = 1


def parse(text: str) -> Shape:
    """Read "data:2,model:4"; an axis that isn't named is 1.

    Raises:
      ValueError: the text is something else.
    """
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = item.partition(":")
        if name not in Shape._fields or name in sizes or not (size.isdecimal() and 1 <= int(size) < 2**20):
            raise ValueError(f"mesh = {text!r}: expected data:N, model:N or data:N,model:N with numbers of 1 or more")
        sizes[name] = int(size)
    return Shape(**sizes)


def make_mesh(shape: str | Shape) -> Mesh:
    """Arrange all devices of all processes, those of one data index as near to each other as they can be.

    Raises:
      ValueError: not that many devices, or a text that `parse` doesn't read.
    """
    shape = parse(shape) if isinstance(shape, str) else shape
    if (found := jax.device_count()) != shape.data * shape.model:
        needed = f"data:{shape.data},model:{shape.model} needs {shape.data * shape.model} devices"
        raise ValueError(f"the mesh {needed}, but {found} {'is' if found == 1 else 'are'} available: expected as many")
    return jax.make_mesh(shape, Shape._fields, axis_types=(AxisType.Auto, AxisType.Auto))


def check(config: Config, model: int) -> None:
    """Raise ValueError where a model can't be divided into `model` parts."""
    problems = [
        f"{name} = {size}: expected a multiple of {model}"
        for name, size in ((name, getattr(config, name)) for name in ("n_heads", "hidden_dim", "shared_dim"))
        if size % model
    ]
    if config.n_kv_heads % model and model % config.n_kv_heads:
        problems.append(f"n_kv_heads = {config.n_kv_heads}: expected a multiple or a divisor of {model}")
    if problems:
        raise ValueError(f"the mesh model:{model} doesn't divide the model: {'; '.join(problems)}")


def part(params: Params, model: int) -> Params:
    """Give a model the sizes of one of `model` parts, and the axis over which it sums."""
    config = local_config(params.config, model)
    run = params.run if model == 1 else dataclasses.replace(params.run, axis=MODEL)
    return dataclasses.replace(params, config=config, run=run)


def local_config(config: Config, model: int) -> Config:
    """Return the sizes of one of `model` parts; with fewer key heads than parts, several parts have the same one.

    Raises:
      ValueError: the model can't be divided like that.
    """
    check(config, model)
    if config.width_norms and model > 1:
        raise ValueError("a norm over all heads (width_norms) can't be divided: expected no parts of the model")
    return dataclasses.replace(
        config,
        n_heads=config.n_heads // model,
        n_kv_heads=max(config.n_kv_heads // model, 1),
        hidden_dim=config.hidden_dim // model,
        shared_dim=config.shared_dim // model,
    )


def specs(params: Params) -> Params:
    """Return where each leaf of a model lies: a tree of the same form."""
    table = leaves(params.config)

    def leaf(path: tuple[Any, ...], x: Any) -> Any:
        divided = table[".".join(str(key.name) for key in path if hasattr(key, "name"))][0].divided
        rows, columns = (None, MODEL) if divided == "inputs" else (None if divided == "not" else MODEL, None)
        if isinstance(x, Weight):
            return x.specs(rows, columns)
        stacked = [None] * (len(x.shape) - 1) if path[0].name == "layers" else []
        return P(*stacked, rows) if rows else P()

    found: Params = jax.tree_util.tree_map_with_path(leaf, params, is_leaf=lambda x: isinstance(x, Weight))
    return found


def mesh_of(params: Params) -> Mesh | None:
    """Return the mesh that a model lies on, None where it is on a single device."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def shape_of(mesh: Mesh | None) -> Shape:
    """Return the shape of a mesh; of none, that of a single device."""
    return Shape() if mesh is None else Shape(**mesh.shape)


class Parts:
    """The arrays of single devices that make up one leaf."""

    def __init__(self, arrays: Sequence[jax.Array]) -> None:
        self.arrays = arrays
        self.shape = arrays[0].shape


def local_devices(mesh: Mesh) -> dict[int, list[jax.Device]]:
    """Return the devices of this process that hold each part of a model; without the parts that are not here."""
    here = jax.process_index()
    found = {i: [d for d in column if d.process_index == here] for i, column in enumerate(mesh.devices.T)}
    return {i: devices for i, devices in found.items() if devices}


def join(mesh: Mesh, params: Params) -> Params:
    """Make a model on a mesh of one whose leaves are `Parts`."""

    def leaf(parts: Parts, spec: Any) -> jax.Array:
        shape = list(parts.shape)
        for axis, name in enumerate(spec):
            shape[axis] *= 1 if name is None else mesh.shape[name]
        return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(mesh, spec), parts.arrays)

    joined: Params = jax.tree.map(leaf, params, specs(params))
    return joined


def put(mesh: Mesh | None, tree: Any, where: Any) -> Any:
    """Lay small host arrays, which all processes have alike, out over a mesh: `where` is a tree of specs, or one."""
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, tree)

    def place(spec: PartitionSpec, leaf: Any) -> jax.Array | None:
        if leaf is None:
            return None
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])

    if isinstance(where, PartitionSpec):
        return jax.tree.map(lambda leaf: place(where, leaf), tree)
    return jax.tree.map(place, where, tree)
