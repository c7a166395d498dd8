"""The programs that a model is run with: compiled once for each set of shapes, for a single device or for a mesh."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jllama import decode, executables, rows, sharding
from jllama.model import Params
from jllama.sharding import ROWS, SAMPLING, STATE, STOP, WHOLE


@dataclasses.dataclass(frozen=True)
class Program:
    """A pure function, and what compiling it takes.

    Args:
      function: of arrays; with `weights`, of a model before them.
      arguments: where the arrays lie on a mesh, the model apart.
      result: where the result lies.
      weights: whether the first argument is the model.
      static: a keyword argument that is compiled in.
      donate: the positions of the arguments whose memory is used again.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: Any
    weights: bool = True
    static: str | None = None
    donate: tuple[int, ...] = ()

    @functools.cached_property
    def jitted(self) -> Any:
        """The function for a single device."""
        return jax.jit(self.function, static_argnames=self.static, donate_argnums=self.donate)

    def over(self, mesh: Any, params: Params) -> Any:
        """Return the function for a mesh that the model lies on."""
        given = (sharding.specs(params), *self.arguments) if self.weights else self.arguments
        return sharding.over(mesh, self.function, given, self.result, static=self.static, donate=self.donate)


START = Program(decode.start, (ROWS, ROWS, STOP, STATE.cache), STATE, donate=(4,))
READ_PROMPT = Program(decode.read_prompt, (STATE, SAMPLING, STOP, WHOLE), STATE, static="width", donate=(1,))
DECODE = Program(decode.decode, (STATE, SAMPLING, STOP, WHOLE), STATE, donate=(1,))
SCORE = Program(decode.score, (ROWS,), (ROWS, ROWS))
PLACE = Program(rows.place, (STATE, STATE, ROWS), STATE, weights=False, donate=(0,))
REGROUP = Program(rows.regroup, (STATE, ROWS), STATE, weights=False, static="slots")


class Programs:
    """Those of one model that were compiled so far, or found in a folder.

    Attributes:
      seconds: how long compiling and loading them took.
    """

    def __init__(self, params: Params, folder: str | Path | None = None) -> None:
        self._params = params
        self._mesh = sharding.mesh_of(params)
        # What runs on a mesh is compiled for its devices' places, and for several processes: it stays in memory.
        self._folder = executables.open_folder(folder) if folder and self._mesh is None else None
        self._compiled: dict[Any, Any] = {}
        self.seconds = 0.0

    def call(self, program: Program, *args: Any, **static: Any) -> Any:
        """Run a program on arrays, the model first where it wants that; compile it where these shapes are new."""
        given = (self._params, *args) if program.weights else args
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
