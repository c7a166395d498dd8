"""More than one device: a mesh, where each array lies on it, and the functions of `decode` over it.

A mesh has two axes. "data" divides the rows of a batch; "model" divides every layer by heads and by the width of the
feed-forward, and embedding and head by vocabulary. Each device runs the program of a single device on what it has
(`jax.shard_map`): a model of fewer heads, on fewer rows. Those of one data index sum what they have where a layer
needs it, and meet nowhere else; those of different data indices never meet, and each ends its loop by itself.

A leaf on the mesh is what the devices have, one after another: so the rows of wqkv are q, k and v of the first part,
then q, k and v of the second.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jllama.config import Config
from jllama.decode import State, Stop
from jllama.model import Layer, Params
from jllama.quant import Linear, QuantizedWeight, Weight
from jllama.sampling import Sampling

P: Any = PartitionSpec  # untyped: a tree of specs has the type of its arrays
DATA, MODEL = "data", "model"

# Where the arrays of a batch lie. The cache's leaves, `[B*K, S, H]`, are divided by rows and by heads at once.
WHOLE, ROWS = P(), P(DATA)
STATE = State(cache=P((DATA, MODEL)), tokens=ROWS, logprobs=ROWS, pos=ROWS, done=ROWS)
STOP = Stop(ids=WHOLE, length=ROWS)
SAMPLING = Sampling(*[ROWS] * len(Sampling._fields))

# Seconds without a sign of life after which a process counts as dead, and for which the end of the others is awaited.
_HEARTBEAT = 20
_SHUTDOWN = 30


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
        raise ValueError(f"the mesh {needed}, and there are {found}: expected one place for each")
    return jax.make_mesh(shape, Shape._fields, axis_types=(AxisType.Auto, AxisType.Auto))


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None) -> bool:
    """Join the other processes of a run, whose devices then are one set; when one of them dies, the others end.

    Args:
      coordinator: HOST:PORT where process 0 listens; or "auto", where JAX finds all three out by itself (TPU pods,
        SLURM, Open MPI, Kubernetes).
      num_processes: how many there are.
      process_id: which of them this is, from 0.

    Returns:
      Whether there are others to join: not if all three are None.

    Raises:
      ValueError: the three don't go together, or the processes don't find each other.
    """
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        return False
    auto = coordinator == "auto" and given[1:] == (None, None)
    if not auto and not (
        coordinator
        and re.fullmatch(r".+:\d+", coordinator)
        and num_processes is not None
        and process_id is not None
        and 0 <= process_id < num_processes
    ):
        raise ValueError(
            f"coordinator, num_processes, process_id = {', '.join(map(str, given))}: expected HOST:PORT, the number of "
            'processes and which of them this is, from 0; or "auto" alone'
        )
    try:
        jax.distributed.initialize(
            None if auto else coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=_SHUTDOWN,
        )
    except (ValueError, RuntimeError) as e:
        hint = ": expected a TPU pod, SLURM, Open MPI or Kubernetes" if auto else ""
        raise ValueError(f"coordinator = {coordinator}: the processes can't be joined{hint} ({e})") from e
    return True


def check(config: Config, model: int) -> None:
    """Raise ValueError where a model can't be divided into `model` parts."""
    problems = [
        f"{name} = {size}: expected a multiple of {model}"
        for name, size in (("n_heads", config.n_heads), ("hidden_dim", config.hidden_dim))
        if size % model
    ]
    if config.n_kv_heads % model and model % config.n_kv_heads:
        problems.append(f"n_kv_heads = {config.n_kv_heads}: expected a multiple or a divisor of {model}")
    if problems:
        raise ValueError(f"the mesh model:{model} doesn't divide the model: {'; '.join(problems)}")


def part(config: Config, model: int) -> Config:
    """Return the sizes of one of `model` parts; with fewer key heads than parts, several parts have the same one.

    Raises:
      ValueError: the model can't be divided like that.
    """
    check(config, model)
    if model == 1:
        return config
    return dataclasses.replace(
        config,
        n_heads=config.n_heads // model,
        n_kv_heads=max(config.n_kv_heads // model, 1),
        hidden_dim=config.hidden_dim // model,
        axis=MODEL,
    )


def specs(params: Params) -> Params:
    """Return where each leaf of a model lies: a tree of the same form."""

    def weight(w: Weight, rows: bool) -> Any:
        matrix = P(MODEL, None) if rows else P(None, MODEL)
        return QuantizedWeight(matrix, P(MODEL) if rows else P()) if isinstance(w, QuantizedWeight) else matrix

    def linear(layer: Linear, rows: bool) -> Linear:
        return Linear(weight(layer.weight, rows), None if layer.bias is None else P(MODEL) if rows else P())

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: P(), tree)

    def layer(layer: Layer) -> Layer:
        return Layer(
            attention_norm=whole(layer.attention_norm),
            wqkv=linear(layer.wqkv, rows=True),
            wo=linear(layer.wo, rows=False),
            ffn_norm=whole(layer.ffn_norm),
            w13=linear(layer.w13, rows=True),
            w2=linear(layer.w2, rows=False),
            q_norm=whole(layer.q_norm),
            k_norm=whole(layer.k_norm),
        )

    return Params(
        embedding=weight(params.embedding, rows=True),
        layers=tuple(layer(x) for x in params.layers),
        norm=whole(params.norm),
        output=None if params.output is None else weight(params.output, rows=True),
        config=params.config,
        positions=whole(params.positions),
    )


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


def local_devices(mesh: Mesh) -> dict[int, list[jax.Device]]:
    """Return the devices of this process that hold each part of a model; without the parts that are not here."""
    here = jax.process_index()
    found = {i: [d for d in column if d.process_index == here] for i, column in enumerate(mesh.devices.T)}
    return {i: devices for i, devices in found.items() if devices}


def join(mesh: Mesh, params: Params) -> Params:
    """Make a model on a mesh of one whose leaves are `Parts`."""

    def leaf(parts: Parts, spec: Any) -> jax.Array:
        shape = list(parts.arrays[0].shape)
        for axis, name in enumerate(spec):
            shape[axis] *= 1 if name is None else mesh.shape[name]
        return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(mesh, spec), parts.arrays)

    joined: Params = jax.tree.map(leaf, params, specs(params))
    return joined


def over(
    mesh: Mesh,
    function: Callable[..., Any],
    in_specs: tuple[Any, ...],
    out_specs: Any,
    *,
    static: str | None = None,
    donate: tuple[int, ...] = (),
) -> Any:
    """Compile a function of `decode` or `model` so that each device of the mesh runs it on its part of the arguments.

    Args:
      mesh: the devices.
      function: any whose first argument may be a `Params`, which it gets with the sizes of a part.
      in_specs: where its positional arguments lie; each is a tree, or the spec of all leaves.
      out_specs: where its result lies.
      static: the name of a keyword argument that is compiled in.
      donate: the arguments whose memory is used again.
    """

    def run(*args: Any, **static: Any) -> Any:
        def local(*args: Any) -> Any:
            if isinstance(args[0], Params):
                args = (dataclasses.replace(args[0], config=part(args[0].config, mesh.shape[MODEL])), *args[1:])
            return function(*args, **static)

        # Unchecked: what all devices of a model axis have is computed from gathered logits, and so is equal.
        mapped: Any = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return mapped(*args)

    return jax.jit(run, static_argnames=static, donate_argnums=donate)


def put(mesh: Mesh | None, tree: Any, where: Any) -> Any:
    """Lay small host arrays, which all processes have alike, out over a mesh: `where` is a tree of specs, or one."""
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, tree)

    def place(spec: PartitionSpec, leaf: Any) -> jax.Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])

    if isinstance(where, PartitionSpec):
        return jax.tree.map(lambda leaf: place(where, leaf), tree)
    return jax.tree.map(place, where, tree)


def agree(mesh: Mesh | None, tree: Any) -> Any:
    """Return the host arrays that the first process has, on all processes of a mesh."""
    return tree if mesh is None or jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def get(tree: Any) -> Any:
    """Fetch small arrays as NumPy's, whole on every process."""
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
