"""The functions of `decode`, compiled over a mesh of devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jllama import decode
from jllama.decode import State, Stop
from jllama.mesh import DATA, MODEL, ROWS, WHOLE, P, mesh_of, part, specs
from jllama.model import Params
from jllama.sampling import Sampling

# Where the arrays of a batch lie. The cache's leaves are divided by rows and by heads at once.
STOP = Stop(ids=WHOLE, length=ROWS)
SAMPLING = Sampling(*[ROWS] * len(Sampling._fields))


def state_specs(params: Params) -> State:
    """Return where the leaves of a state lie."""
    cache = P(None, (DATA, MODEL)) if params.layers[0].stacked else P((DATA, MODEL))
    return State(cache=cache, tokens=ROWS, logprobs=ROWS, pos=ROWS, done=ROWS)


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
      function: any whose first argument may be a `Params`, which it gets as one part.
      in_specs: where its positional arguments lie; each is a tree, or the spec of all leaves.
      out_specs: where its result lies.
      static: the name of a keyword argument that is compiled in.
      donate: the arguments whose memory is used again.
    """

    def run(*args: Any, **static: Any) -> Any:
        def local(*args: Any) -> Any:
            if isinstance(args[0], Params):
                args = (part(args[0], mesh.shape[MODEL]), *args[1:])
            return function(*args, **static)

        # Unchecked: what all devices of a model axis have is computed from gathered logits, and so is equal.
        mapped: Any = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return mapped(*args)

    return jax.jit(run, static_argnames=static, donate_argnums=donate)


def programs(params: Params) -> dict[Any, Any]:
    """Return what stands for each compiled function of `decode` where the model lies on a mesh; {} where on none."""
    if (mesh := mesh_of(params)) is None:
        return {}
    weights, state = specs(params), state_specs(params)
    return {
        decode.compiled_start: over(
            mesh, decode.start, (weights, ROWS, ROWS, STOP, state.cache), state, donate=(4,)
        ),
        decode.compiled_read_prompt: over(
            mesh, decode.read_prompt, (weights, state, SAMPLING, STOP, WHOLE), state, static="width", donate=(1,)
        ),
        decode.compiled_decode: over(
            mesh, decode.decode, (weights, state, SAMPLING, STOP, WHOLE), state, donate=(1,)
        ),
        decode.compiled_grow: over(mesh, decode.grow, (state,), state, static="slots"),
        decode.compiled_score: over(mesh, decode.score, (weights, ROWS), (ROWS, ROWS)),
    }  # fmt: skip
