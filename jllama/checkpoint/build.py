"""Named tensors to `Params`, and back: what every file format shares.

A format gives a `Config` and, by the names of Meta's checkpoints, tensors not yet read. `build_params` checks all of
them, then reads each once, block of rows by block of rows, straight into the arrays that the engine keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm
from jax import lax

from jllama.config import Config
from jllama.model import Layer, Params
from jllama.quant import QuantizedWeight, Weight

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = ("float32", "bfloat16", "int8")

# Elements converted at a time: the temporaries stay in the processor's cache, and out of the peak of memory.
_BLOCK = 1 << 20


class CheckpointError(ValueError):
    """A file that cannot be read as a model, or a model that a file format cannot hold."""


class Source(NamedTuple):
    """A tensor not yet read: its shape is known, `read(start, stop)` gives those rows as floats of any width.

    A block may be a view that is only good until the next `read`.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], Array]


class Contents(NamedTuple):
    """What a format's reader finds in a file."""

    config: Config
    sources: Mapping[str, Source]  # by the names of `tensor_shapes`; without output.weight where it is tied
    dtype: str  # one of DTYPES: the nearest to what the file stores


def tensor_shapes(config: Config, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of each kind of tensor, `[out, in]`; `{}` in a name stands for the number of each layer."""
    d, f = config.dim, config.hidden_dim
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (config.vocab_size, d),
        "layers.{}.attention_norm.weight": (d,),
        "layers.{}.attention.wq.weight": (config.q_dim, d),
        "layers.{}.attention.wk.weight": (config.kv_dim, d),
        "layers.{}.attention.wv.weight": (config.kv_dim, d),
        "layers.{}.attention.wo.weight": (d, config.q_dim),
        "layers.{}.ffn_norm.weight": (d,),
        "layers.{}.feed_forward.w1.weight": (f, d),
        "layers.{}.feed_forward.w2.weight": (d, f),
        "layers.{}.feed_forward.w3.weight": (f, d),
        "norm.weight": (d,),
    }
    return shapes if tied else shapes | {"output.weight": (config.vocab_size, d)}


def expand(name: str, n_layers: int) -> list[str]:
    """Return the name for every layer where it holds `{}`, else itself."""
    return [name.format(i) for i in range(n_layers)] if "{}" in name else [name]


def build_params(config: Config, sources: Mapping[str, Source], *, dtype: str, origin: str) -> Params:
    """Check all tensors against the config, then read each once into the weights of a model.

    Memory peaks at the weights in their final dtype and one block of rows. A progress bar appears on stderr if that
    is a terminal and reading takes over a second.

    Args:
      config: sizes of the model.
      sources: every tensor of `tensor_shapes`; the head is tied to the embedding where output.weight is absent.
      dtype: one of `DTYPES`, for the matrices; norms are float32 always.
      origin: where the tensors are from, for messages.

    Raises:
      CheckpointError: tensors are missing, left over or of a wrong shape; all are named.
    """
    _check(config, sources, origin)
    total = sum(math.prod(source.shape) for source in sources.values())
    with tqdm.tqdm(total=total, unit="w", unit_scale=True, desc="weights", delay=1, disable=None) as bar:

        def weight(*names: str) -> Weight:
            parts = [sources[f"{name}.weight"] for name in names]
            bar.update(sum(math.prod(part.shape) for part in parts))
            return _quantized(parts) if dtype == "int8" else _plain(parts, dtype)

        def norm(name: str) -> jax.Array:
            return _plain([sources[f"{name}.weight"]], "float32")

        def layer(at: str) -> Layer:
            return Layer(
                attention_norm=norm(f"{at}.attention_norm"),
                wqkv=weight(f"{at}.attention.wq", f"{at}.attention.wk", f"{at}.attention.wv"),
                wo=weight(f"{at}.attention.wo"),
                ffn_norm=norm(f"{at}.ffn_norm"),
                w13=weight(f"{at}.feed_forward.w1", f"{at}.feed_forward.w3"),
                w2=weight(f"{at}.feed_forward.w2"),
            )

        return Params(
            embedding=weight("tok_embeddings"),
            layers=tuple(layer(f"layers.{i}") for i in range(config.n_layers)),
            norm=norm("norm"),
            output=weight("output") if "output.weight" in sources else None,
            config=config,
        )


def sources_of(params: Params) -> dict[str, Source]:
    """Return the tensors of a model by name, the fused ones apart: what `build_params` takes, in float32."""
    c = params.config
    sources = {"tok_embeddings.weight": _rows_of(params.embedding), "norm.weight": _rows_of(params.norm)}
    for i, layer in enumerate(params.layers):
        named = {
            "attention_norm": _rows_of(layer.attention_norm),
            "attention.wq": _rows_of(layer.wqkv, 0, c.q_dim),
            "attention.wk": _rows_of(layer.wqkv, c.q_dim, c.kv_dim),
            "attention.wv": _rows_of(layer.wqkv, c.q_dim + c.kv_dim, c.kv_dim),
            "attention.wo": _rows_of(layer.wo),
            "ffn_norm": _rows_of(layer.ffn_norm),
            "feed_forward.w1": _rows_of(layer.w13, 0, c.hidden_dim),
            "feed_forward.w2": _rows_of(layer.w2),
            "feed_forward.w3": _rows_of(layer.w13, c.hidden_dim, c.hidden_dim),
        }
        sources |= {f"layers.{i}.{name}.weight": source for name, source in named.items()}
    if params.output is not None:
        sources["output.weight"] = _rows_of(params.output)
    return sources


def blocks(shape: tuple[int, ...], multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Cut the rows of a tensor into blocks, each but the last a multiple of `multiple` rows: `(start, stop)`."""
    rows = max(_BLOCK // math.prod(shape[1:]) // multiple, 1) * multiple
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def _check(config: Config, sources: Mapping[str, Source], origin: str) -> None:
    shapes = tensor_shapes(config, tied="output.weight" not in sources)
    expected = {name: shape for kind, shape in shapes.items() for name in expand(kind, config.n_layers)}
    problems = []
    for name, shape in expected.items():
        if name not in sources:
            problems.append(f"{name} is missing, expected {list(shape)}")
        elif sources[name].shape != shape:
            problems.append(f"{name} is {list(sources[name].shape)}, expected {list(shape)}")
    problems += [f"{name} is not a tensor of this model" for name in sources if name not in expected]
    if problems:
        raise CheckpointError(f"{origin}: {'; '.join(problems)}")


def _plain(parts: Sequence[Source], dtype: str) -> jax.Array:
    """Read tensors into one, below each other, cast to `dtype`."""
    values = _empty(_stacked_shape(parts), dtype)
    for rows, block in _stacked_blocks(parts):
        values[rows] = block
    return _put(values)


def _quantized(parts: Sequence[Source]) -> QuantizedWeight:
    """Read matrices into one, below each other, with an int8 scale for each row."""
    shape = _stacked_shape(parts)
    values, scale = _empty(shape, "int8"), _empty(shape[:1], "float32")
    for rows, block in _stacked_blocks(parts):
        values[rows], scale[rows] = _quantize(block)
    return QuantizedWeight(_put(values), _put(scale))


def _stacked_shape(parts: Sequence[Source]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _stacked_blocks(parts: Sequence[Source]) -> Iterator[tuple[slice, Array]]:
    first = 0
    for part in parts:
        for start, stop in blocks(part.shape):
            yield slice(first + start, first + stop), part.read(start, stop)
        first += part.shape[0]


def _quantize(block: Array) -> tuple[Array, Array]:
    """Do what `quant.quantize` does, in NumPy: twice as fast as XLA on a CPU, nothing to compile."""
    x = block.astype(np.float32, copy=False)
    # NaN and infinity are let through: they stay in the scale, and so in the logits.
    with np.errstate(invalid="ignore"):
        scale = np.maximum(x.max(axis=-1), -x.min(axis=-1)) / np.float32(127)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale >= np.finfo(np.float32).tiny)
        return np.rint(x * inverse[:, None]).astype(np.int8), scale


def _empty(shape: tuple[int, ...], dtype: str) -> Array:
    """Allocate on a 64-byte border, where JAX on a CPU takes over the buffer of an array and makes no copy."""
    count = math.prod(shape) * jax.numpy.dtype(dtype).itemsize
    raw = np.empty(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array: Array = raw[start : start + count].view(jax.numpy.dtype(dtype)).reshape(shape)
    return array


def _put(array: Array) -> jax.Array:
    # Transfers to an accelerator run behind: without waiting, host copies of many tensors would pile up.
    placed: jax.Array = jax.device_put(array).block_until_ready()
    return placed


def _rows_of(w: Weight, first: int = 0, count: int | None = None) -> Source:
    """Give `count` rows of a weight from `first` on, dequantised, as a source."""
    values, scale = w if isinstance(w, QuantizedWeight) else (w, None)

    def rows(array: jax.Array, start: int, stop: int) -> Array:
        # Sliced on the device, so that only these rows travel, and by a traced start, so that it compiles once.
        return np.asarray(lax.dynamic_slice_in_dim(array, first + start, stop - start)).astype(np.float32)

    def read(start: int, stop: int) -> Array:
        block = rows(values, start, stop)
        if scale is not None:
            block *= rows(scale, start, stop)[:, None]
        return block

    return Source((values.shape[0] if count is None else count, *values.shape[1:]), read)
