"""The optional kernels of native.cc: products of few rows, and attention of one token, at the speed of memory.

`pip install` compiles them where it finds a C++ compiler on Linux for x86-64; elsewhere, and on processors without
AVX-512, XLA's own kernels do the work. Nothing but speed depends on them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
import numpy as np

MAX_ROWS = 64  # of a product; XLA is as fast with more
_VERSION = 1  # of the kernels' arguments, as in native.cc


def _built() -> Iterator[Path]:
    """Find the compiled library beside this file, or in the installed package of the same source."""
    here = Path(__file__).parent
    yield from sorted(here.glob("_native*.so"))
    # A clone beside `pip install .`: the library is there. Building may have left metadata in the clone too.
    for file in itertools.chain(*(found.files or [] for found in distributions(name="jllama"))):
        source = Path(str(file.locate())).with_name("native.cc")
        is_library = file.match("_native*.so") and source.exists()
        if is_library and source.read_bytes() == (here / "native.cc").read_bytes():
            yield source.with_name(file.name)


def _load() -> ctypes.CDLL | None:
    """Load the library and make its kernels known to XLA; None where it was not built or can't run here."""
    # It uses no Python, so that of another Python version serves as well.
    for path in _built():
        library = ctypes.CDLL(str(path))
        if library.jllama_version() == _VERSION and library.jllama_supported():
            for name in ("jllama_dot", "jllama_dot_int8", "jllama_attend"):
                handler = jax.ffi.pycapsule(getattr(library, name))  # type: ignore[no-untyped-call]
                jax.ffi.register_ffi_target(name, handler, platform="cpu")
            return library
    return None


_LIBRARY = _load()


def available() -> bool:
    """Whether the kernels can serve JAX's default backend here."""
    return _LIBRARY is not None and jax.default_backend() == "cpu"


def choose(kernels: str) -> bool:
    """Whether to use the kernels, where "auto", "xla" or "native" is asked for.

    Raises:
      ValueError: another word, or "native" where they are not available.
    """
    if kernels not in ("auto", "xla", "native"):
        raise ValueError(f"kernels = {kernels!r}: expected auto, xla or native")
    if kernels == "native" and not available():
        raise ValueError(
            "kernels = native: they were not built, or this processor or backend has no use for them: expected Linux "
            "on x86-64 with AVX-512 (VNNI, BF16) and `pip install` with a C++ compiler; kernels = auto does without"
        )
    return kernels != "xla" and available()


def dot(w: jax.Array, rows: jax.Array) -> jax.Array:
    """Multiply `rows [R, in]` by `w [out, in]` transposed, both float32 or both bfloat16: float32 `[R, out]`."""
    y: jax.Array = jax.ffi.ffi_call("jllama_dot", _float32(rows.shape[0], w.shape[0]))(w, rows)
    return y


def dot_int8(w: jax.Array, scale: jax.Array, rows: jax.Array, *, fine: bool) -> jax.Array:
    """Multiply float32 `rows [R, in]`, rounded to int8, by int8 `w [out, in]`, transposed, times `scale [out]`.

    With `fine` what the rounding left is rounded and multiplied too; returns float32 `[R, out]`.
    """
    y: jax.Array = jax.ffi.ffi_call("jllama_dot_int8", _float32(rows.shape[0], w.shape[0]))(w, scale, rows, fine=fine)
    return y


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)  # type: ignore[no-untyped-call]


def attend(
    q: jax.Array, new_k: jax.Array, new_v: jax.Array, k: jax.Array, v: jax.Array, last: jax.Array, window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write one key and value a row to a cache, in its memory, and attend to the slots up to them.

    Args:
      q: float32 `[B*K, G, H]`, scaled: the query heads of each key head.
      new_k: float32 `[B*K, 1, H]`.
      new_v: the same.
      k: float32 or bfloat16 `[B*K, S, H]`.
      v: the same.
      last: int32 `[B*K]`, below S: the slots of the new keys and values.
      window: how many slots up to the last are seen; None: all.

    Returns:
      float32 `[B*K, G, H]`, `k` and `v`.
    """
    results: list[Any] = [_float32(*q.shape), k, v]
    call = jax.ffi.ffi_call("jllama_attend", results, input_output_aliases={3: 1, 4: 2})
    out, k, v = call(q, new_k, new_v, k, v, last, window=np.int64(k.shape[1] if window is None else window))
    return out, k, v
