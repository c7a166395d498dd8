"""The optional kernels: products and attention on a CPU, at the speed of memory.

`pip install` compiles them, for each instruction set in a file of its own, where it finds GCC or Clang; elsewhere XLA's
own kernels do the work. The best for the processor run; JLLAMA_CPU=avx2 in the environment leaves out what comes after.
Nothing but speed depends on them: a library that is damaged, foreign or older is left alone, and `explain` says so.
A result depends on its own row alone, to the bit: not on other rows, the number of threads, how a prompt was cut into
blocks or how long the cache is.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

_HERE = Path(__file__).parent
_HANDLERS = ("jllama_dot", "jllama_dot_groups", "jllama_attend")
# Kinds of groups, in the order of the kernels'.
GROUPS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "int8", "q80")
_KERNELS = ("float32", "bfloat16", "groups", "attention")  # in the library's order


class _Loaded(NamedTuple):
    """What was found of the library: the instruction set of each kernel, and why no others are used."""

    sets: Mapping[str, str] = MappingProxyType({})
    reason: str = "they were not built: expected Linux or macOS and `pip install` with a C++ compiler"


def available() -> bool:
    """Whether there are kernels that can serve JAX's default backend here."""
    import jax

    return bool(_load().sets) and jax.default_backend() == "cpu"


def has(name: str) -> bool:
    """Whether a kernel runs here: products with "float32", "bfloat16" or "groups", or "attention"."""
    return name in _load().sets and available()


def choose(kernels: str) -> bool:
    """Whether to use the kernels, where "auto", "xla" or "native" is asked for.

    Raises:
      ValueError: another word, or "native" where they are not available.
    """
    if kernels not in ("auto", "xla", "native"):
        raise ValueError(f"kernels = {kernels!r}: expected auto, xla or native")
    if kernels == "native" and not available():
        raise ValueError(f"kernels = native: {explain()}; kernels = auto does without")
    return kernels != "xla" and available()


def explain() -> str:
    """Say in one line which kernels run here, and why not others."""
    loaded = _load()
    if not loaded.sets:
        return f"no native kernels: {loaded.reason}"
    if not available():
        return "no native kernels: they are for CPUs, and JAX's default backend is another"
    runs = ", ".join(f"{name} {instructions}" for name, instructions in loaded.sets.items())
    return f"native kernels: {runs}" + (f"; {loaded.reason}" if loaded.reason else "")


def build() -> str:
    """Name the kernels, "" where there are none: compiled programs are good for those of the same name."""
    sets = _load().sets
    return "-".join((_source()[:16], *sets.values())) if sets else ""


def dot(w: jax.Array, x: jax.Array, layer: jax.Array | None = None) -> jax.Array:
    """Multiply `x` by a weight transposed, that of one layer of a stack.

    Args:
      w: float32 or bfloat16 `[out, in]`, or `[L, out, in]` with a layer.
      x: float32 `[R, in]`; with bfloat16 weights it is rounded to bfloat16.
      layer: int32 scalar; out of range it is the nearest there is.

    Returns:
      float32 `[R, out]`.
    """
    y: jax.Array = _call("jllama_dot", _float32(x.shape[0], w.shape[-2]))(w, _number(layer, 2, w), x)
    return y


def dot_groups(
    kind: str, parts: Sequence[jax.Array | None], x: jax.Array, layer: jax.Array | None = None, *, fine: bool = False
) -> jax.Array:
    """Multiply `x`, rounded to int8 with a scale for each 32 elements, by a weight in groups, transposed.

    Args:
      kind: one of GROUPS.
      parts: those of `weights.groups.Groups`, each `[out, n]`, or `[L, out, n]` with a layer.
      x: float32 `[R, in]`.
      layer: as for `dot`.
      fine: whether what the rounding of x left is rounded and multiplied too.

    Returns:
      float32 `[R, out]`.
    """
    import jax.numpy as jnp
    import numpy as np

    there = [part for part in parts if part is not None]
    dtypes = (jnp.uint8,) * 4 + (jnp.float16,) * 2
    filled = [jnp.zeros(0, dtype) if part is None else part for part, dtype in zip(parts, dtypes, strict=True)]
    y: jax.Array = _call("jllama_dot_groups", _float32(x.shape[0], there[0].shape[-2]))(
        *filled, _number(layer, 2, *there), x, kind=np.int64(GROUPS.index(kind)), fine=fine
    )
    return y


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    first: jax.Array,
    layer: jax.Array | None = None,
    *,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write new keys and values to a cache, in its memory, and attend from each new token to what it sees.

    Token t of row b has position p = first[b] + t and sees the slots max(0, p - window + 1) .. p.

    Args:
      q: float32 `[B, T, N, H]`, not scaled.
      k: float32 `[B, T, K, H]`.
      v: the same.
      k_cache: float32 or bfloat16 `[B*K, S, H]`, or `[L, B*K, S, H]` with a layer; S is at least T.
      v_cache: the same.
      first: int32 `[B]`; brought into 0 .. S - T, as XLA's updates do.
      layer: as for `dot`.
      window: how many slots up to its own a token sees; None: all.
      scale: what the scores are multiplied with.

    Returns:
      float32 `[B, T, N, H]`, and the two caches, which were changed in place.
    """
    import numpy as np

    results: list[Any] = [_float32(*q.shape), k_cache, v_cache]
    out, k_cache, v_cache = _call("jllama_attend", results, input_output_aliases={3: 1, 4: 2})(
        q, k, v, k_cache, v_cache, first, _number(layer, 3, k_cache, v_cache),
        window=np.int64(k_cache.shape[-2] if window is None else window), scale=np.float32(scale),
    )  # fmt: skip
    return out, k_cache, v_cache


def _call(name: str, results: Any, **options: Any) -> Any:
    import jax

    if not _load().sets:
        raise RuntimeError(explain())
    return jax.ffi.ffi_call(name, results, **options)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    import jax
    import numpy as np

    return jax.ShapeDtypeStruct(shape, np.float32)  # type: ignore[no-untyped-call]


def _number(layer: jax.Array | None, rank: int, *arrays: jax.Array) -> jax.Array:
    """Return a layer's number, 0 where there is none, for arrays of which a single layer's have `rank` axes."""
    import jax.numpy as jnp

    # XLA copies a cache whose first axis has the size 1: arrays of one layer go to the kernels without such an axis.
    if any(array.ndim != rank + (layer is not None) for array in arrays):
        expected = f"{rank} axes" if layer is None else f"{rank + 1} axes, the first of which is the layers'"
        raise ValueError(f"shapes {', '.join(str(array.shape) for array in arrays)}: expected {expected}")
    return jnp.int32(0) if layer is None else jnp.asarray(layer, jnp.int32)


@functools.cache
def _source() -> str:
    """Hash the kernels' sources as setup.py does: a library that was compiled from others is not used."""
    files = sorted([*_HERE.glob("*.cc"), *_HERE.glob("*.h")])
    return hashlib.sha256(b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)).hexdigest()


def _built() -> Iterator[Path]:
    """Find compiled libraries beside this file and in the installed package."""
    yield from sorted(_HERE.glob("_native*.so"))
    # A clone beside `pip install .`: the library is there. Building may have left metadata in the clone too.
    for file in itertools.chain(*(found.files or [] for found in distributions(name="jllama"))):
        if file.match("kernels/_native*.so"):
            yield Path(str(file.locate()))


@functools.cache
def _load() -> _Loaded:
    """Load the library and make its kernels known to XLA."""
    result = _Loaded()
    for path in _built():
        try:
            result = _open(path)  # it uses no Python, so that of another Python version serves as well
        except (OSError, AttributeError) as problem:
            result = _Loaded(reason=f"{path} can't be used: {str(problem)[:200]}")
        if result.sets:
            break
    return result


def _open(path: Path) -> _Loaded:
    """Register the kernels of a library.

    Raises:
      OSError: it can't be loaded.
      AttributeError: it is no library of these kernels.
      ValueError: JLLAMA_CPU names no instruction set.
    """
    library = ctypes.CDLL(str(path))
    library.jllama_source.restype = ctypes.c_char_p
    if library.jllama_source() != _source().encode():
        return _Loaded(reason=f"{path} was compiled from other sources: run `pip install` again")
    handlers = {name: getattr(library, name) for name in _HANDLERS}
    built_for, running = (library.jllama_ffi_major(), library.jllama_ffi_minor()), _ffi_version()
    # XLA takes older handlers, and refuses to work at all after a newer one was registered.
    if running is None or built_for[0] != running[0] or built_for > running:
        return _Loaded(reason=f"{path} needs version {built_for} of XLA's interface, and jaxlib has {running}")
    library.jllama_instruction_set.restype = ctypes.c_char_p
    every = [name.decode() for name in iter(map(library.jllama_instruction_set, itertools.count()).__next__, None)]
    lacking = [name for i, name in enumerate(every) if not library.jllama_supported(i)]
    reason = f"this processor lacks {', '.join(lacking)}" if lacking else ""
    last = os.environ.get("JLLAMA_CPU", "")
    if not library.jllama_choose(last.encode()):
        raise ValueError(f"JLLAMA_CPU={last!r}: expected one of {', '.join(every)}")
    if last:
        reason = f"none above {last} because of JLLAMA_CPU"
    import jax

    for name, handler in handlers.items():
        capsule = jax.ffi.pycapsule(handler)  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return _Loaded({name: every[library.jllama_used(i)] for i, name in enumerate(_KERNELS)}, reason)


def _ffi_version() -> tuple[int, int] | None:
    """Read the version of XLA's foreign function interface that jaxlib has."""
    import jaxlib

    header = Path(jaxlib.__file__).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
    try:
        found = re.findall(r"#define XLA_FFI_API_M(?:AJOR|INOR) (\d+)", header.read_text())
    except OSError:
        return None
    return (int(found[0]), int(found[1])) if len(found) == 2 else None
