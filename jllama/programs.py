"""The programs that a model is run with: compiled once for each set of shapes, for a single device or for a mesh."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jllama import decode, executables, rows, speculation
from jllama.decode import State, Stop
from jllama.likely import Likely
from jllama.mesh import DATA, MODEL, ROWS, WHOLE, P, mesh_of, part, specs
from jllama.model import Params
from jllama.sampling import Sampling

# Where the arguments of the rows lie on a mesh.
STOP = Stop(ids=ROWS, length=ROWS, banned=WHOLE, allowed=ROWS)
SAMPLING = Sampling(*[ROWS] * len(Sampling._fields))


@dataclasses.dataclass(frozen=True)
class Program:
    """A pure function, and what compiling it takes.

    Args:
      function: of a model, or of none, and arrays.
      arguments: where they lie on a mesh, by the names in `places`.
      result: where the result lies.
      static: a keyword argument that is compiled in.
      donate: the positions of the arguments whose memory is used again.
    """

    function: Callable[..., Any]
    arguments: tuple[str, ...]
    result: str
    static: str | None = None
    donate: tuple[int, ...] = ()

    @functools.cached_property
    def jitted(self) -> Any:
        """The function for a single device."""
        return jax.jit(self.function, static_argnames=self.static, donate_argnums=self.donate)

    def over(self, mesh: Mesh, params: Params) -> Any:
        """Return the function for a mesh that the model lies on."""
        where = places(params)
        arguments = tuple(where[name] for name in self.arguments)
        return over(mesh, self.function, arguments, where[self.result], static=self.static, donate=self.donate)


START = Program(decode.start, ("model", "rows", "rows", "stop", "cache"), "state", donate=(4,))
READ_PROMPT = Program(
    decode.read_prompt, ("model", "state", "sampling", "stop", "whole"), "state", static="width", donate=(1,)
)
DECODE = Program(decode.decode, ("model", "state", "sampling", "stop", "whole"), "state", donate=(1,))
LOOKUP = Program(
    speculation.decode_lookup, ("model", "state", "sampling", "stop", "whole"), "counted", static="guesses", donate=(1,)
)
# Not for a mesh: a draft model lies on a single device.
DRAFT = Program(
    speculation.decode_draft,
    ("model", "state", "draft", "cache", "rows", "sampling", "stop", "whole"),
    "drafted",
    static="guesses",
    donate=(1, 3),
)
SCORE = Program(decode.score, ("model", "rows"), "rows")
PLACE = Program(rows.place, ("state", "state", "rows"), "state", donate=(0,))
CUT = Program(rows.cut, ("state", "whole", "whole"), "cache", static="slots")
PASTE = Program(rows.paste, ("cache", "cache", "whole", "whole"), "cache", donate=(0,))
CLEAR = Program(rows.clear, ("state", "rows"), "state", donate=(0,))
REGROUP = Program(rows.regroup, ("state", "rows"), "state", static="slots")


def places(params: Params) -> dict[str, Any]:
    """Return where each kind of argument lies on a mesh; a cache is divided by rows and by heads at once."""
    cache = P(None, (DATA, MODEL)) if params.layers[0].stacked else P((DATA, MODEL))
    state = State(cache=cache, tokens=ROWS, logprobs=ROWS, pos=ROWS, done=ROWS, likely=Likely(ROWS, ROWS))
    return {
        "model": specs(params), "state": state, "cache": cache, "stop": STOP, "sampling": SAMPLING,
        "rows": ROWS, "whole": WHOLE, "counted": (state, ROWS),
    }  # fmt: skip


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


class Programs:
    """Those of one model that were compiled so far, or found in a folder.

    Attributes:
      seconds: how long compiling and loading them took.
    """

    def __init__(self, params: Params, folder: str | Path | None = None) -> None:
        self._params = params
        self._mesh = mesh_of(params)
        # What runs on a mesh is compiled for its devices' places, and for several processes: it stays in memory.
        self._folder = executables.open_folder(folder) if folder and self._mesh is None else None
        self._compiled: dict[Any, Any] = {}
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._compiled)

    def call(self, program: Program, *args: Any, **static: Any) -> Any:
        """Run a program on arrays, the model first where it wants that; compile it where these shapes are new."""
        given = (self._params, *args) if program.arguments[0] == "model" else args
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return program.function(*given, **static)
        leaves, tree = jax.tree.flatten(args)
        key = (program.function, tree, *((leaf.shape, leaf.dtype) for leaf in leaves), *static.items())
        if key not in self._compiled:
            began = time.perf_counter()
            self._compiled[key] = self._make(program, given, static)
            self.seconds += time.perf_counter() - began
        return self._compiled[key](*given)

    def _make(self, program: Program, args: Any, static: dict[str, Any]) -> Any:
        if self._mesh is not None:
            return program.over(self._mesh, self._params).lower(*args, **static).compile()
        if self._folder is None:
            return program.jitted.lower(*args, **static).compile()
        (device,) = jax.tree.leaves(self._params)[0].devices()
        key = self._folder.key(program.function.__qualname__, args, static, device)
        if (found := self._folder.get(key, device)) is None:
            found = program.jitted.lower(*args, **static).compile()
            self._folder.put(key, found)
        return found
