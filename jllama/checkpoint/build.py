"""Named tensors to `Params`, and back: what every file format shares.

A format gives a `Config` and, by the names of Meta's checkpoints, tensors not yet read. `build_params` checks all of
them, then reads each once, block of rows by block of rows, straight into the arrays that the engine keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm
from jax import lax
from jax.sharding import Mesh

from jllama import sharding
from jllama.checkpoint.parts import part
from jllama.checkpoint.source import Array, Source
from jllama.config import Config
from jllama.errors import InputError, listed, shown
from jllama.model import Layer, Norm, Params
from jllama.quant import Linear, QuantizedWeight, Weight

DTYPES = ("float32", "bfloat16", "int8")

# Elements converted at a time: the temporaries stay in the processor's cache, and out of the peak of memory.
_BLOCK = 1 << 20


class CheckpointError(InputError):
    """A file that cannot be read as a model, or a model that a file format cannot hold."""


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
        "norm.weight": (d,),
    }
    if config.activation == "silu":
        shapes["layers.{}.feed_forward.w3.weight"] = (f, d)
    if config.position == "learned":
        shapes["position_embeddings.weight"] = (config.max_seq_len, d)
    if config.norm == "layer":  # GPT-2, which has a bias everywhere
        shapes |= {name.replace("weight", "bias"): (shape[0],) for name, shape in shapes.items() if "embed" not in name}
    return shapes if tied else shapes | {"output.weight": (config.vocab_size, d)}


def optional_shapes(config: Config) -> list[dict[str, tuple[int, ...]]]:
    """Return the kinds of tensors that only some models of the Llama family have, in groups that come together."""
    at = "layers.{}.attention"
    qkv = {f"{at}.wq.bias": (config.q_dim,), f"{at}.wk.bias": (config.kv_dim,), f"{at}.wv.bias": (config.kv_dim,)}
    norms = {f"{at}.q_norm.weight": (config.head_dim,), f"{at}.k_norm.weight": (config.head_dim,)}
    return [dict(qkv), {f"{at}.wo.bias": (config.dim,)}, dict(norms)]


def expand(name: str, n_layers: int) -> list[str]:
    """Return the name for every layer where it holds `{}`, else itself."""
    return [name.format(i) for i in range(n_layers)] if "{}" in name else [name]


def build_params(
    config: Config, sources: Mapping[str, Source], *, dtype: str, origin: str, mesh: Mesh | None = None
) -> Params:
    """Check all tensors against the config, then read each once into the weights of a model.

    Memory peaks at the weights in their final dtype and one block of rows. A progress bar appears on stderr if that
    is a terminal and reading takes over a second.

    Args:
      config: sizes of the model.
      sources: every tensor of `tensor_shapes`; the head is tied to the embedding where output.weight is absent.
      dtype: one of `DTYPES`, for the matrices; norms are float32 always.
      origin: where the tensors are from, for messages.
      mesh: the devices that the model is laid out over; this process reads the parts of its own. None: the default
        device.

    Raises:
      CheckpointError: tensors are missing, left over or of a wrong shape; all are named.
      ValueError: the mesh doesn't divide the model.
    """
    _check(config, sources, origin)
    count = sharding.shape_of(mesh).model
    devices = {0: [None]} if mesh is None else sharding.local_devices(mesh)
    parts = {i: part(sources, config, i, count) for i in devices}
    total = sum(math.prod(source.shape) for source in sources.values())
    with tqdm.tqdm(total=total, unit="w", unit_scale=True, desc="weights", delay=1, disable=None) as bar:

        def read(names: Sequence[str], dtype: str) -> Any:
            placed = []
            hosts = _read([[parts[i][name] for name in names] for i in devices], dtype)
            for host, on in zip(hosts, devices.values(), strict=True):
                placed += [_put(host, device) for device in on]
            bar.update(sum(math.prod(sources[name].shape) for name in names))
            return placed[0] if mesh is None else jax.tree.map(lambda *leaves: sharding.Parts(leaves), *placed)

        params = _assemble(config, sources, dtype, read)
        return params if mesh is None else sharding.join(mesh, params)


def abstract_params(config: Config, sources: Mapping[str, Source], *, dtype: str, parts: int = 1) -> Params:
    """Give the shapes and dtypes of one of the `parts` of a model, as `build_params` lays it out on each device.

    Raises:
      ValueError: the model can't be divided like that.
    """
    narrowed = part(sources, config, 0, parts)

    def read(names: Sequence[str], dtype: str) -> Any:
        shape = _stacked_shape([narrowed[name] for name in names])
        array: Any = jax.ShapeDtypeStruct
        if dtype == "int8":
            return QuantizedWeight(array(shape, "int8"), array(shape[:1], "float32"))
        return array(shape, dtype)

    return _assemble(sharding.part(config, parts), sources, dtype, read)


def _assemble(config: Config, names: Container[str], dtype: str, read: Callable[[Sequence[str], str], Any]) -> Params:
    """Put a model together of the tensors `names`; `read` gives some of them, below each other, in a dtype."""

    def weight(*stems: str) -> Weight:
        found: Weight = read([f"{stem}.weight" for stem in stems], dtype)
        return found

    def vector(*wanted: str) -> Any:
        return read(wanted, "float32") if wanted[0] in names else None

    def linear(*stems: str) -> Linear:
        return Linear(weight(*stems), vector(*(f"{stem}.bias" for stem in stems)))

    def norm(stem: str) -> Norm:
        return Norm(vector(f"{stem}.weight"), vector(f"{stem}.bias"))

    def layer(at: str) -> Layer:
        has_head_norms = f"{at}.attention.q_norm.weight" in names
        return Layer(
            attention_norm=norm(f"{at}.attention_norm"),
            wqkv=linear(f"{at}.attention.wq", f"{at}.attention.wk", f"{at}.attention.wv"),
            wo=linear(f"{at}.attention.wo"),
            ffn_norm=norm(f"{at}.ffn_norm"),
            w13=linear(*(f"{at}.feed_forward.{w}" for w in ("w1", "w3") if f"{at}.feed_forward.{w}.weight" in names)),
            w2=linear(f"{at}.feed_forward.w2"),
            q_norm=norm(f"{at}.attention.q_norm") if has_head_norms else None,
            k_norm=norm(f"{at}.attention.k_norm") if has_head_norms else None,
        )

    return Params(
        embedding=weight("tok_embeddings"),
        layers=tuple(layer(f"layers.{i}") for i in range(config.n_layers)),
        norm=norm("norm"),
        output=weight("output") if "output.weight" in names else None,
        config=config,
        positions=vector("position_embeddings.weight"),
    )


def sources_of(params: Params) -> dict[str, Source]:
    """Return the tensors of a model by name, the fused ones apart: what `build_params` takes, in float32."""
    c = params.config
    q, kv, f = c.q_dim, c.kv_dim, c.hidden_dim
    gated = c.activation == "silu"
    found: dict[str, Weight | None] = {"tok_embeddings.weight": params.embedding, "output.weight": params.output}
    found |= {"norm.weight": params.norm.weight, "norm.bias": params.norm.bias}
    found["position_embeddings.weight"] = params.positions
    sources = {}
    for i, layer in enumerate(params.layers):
        at = f"layers.{i}"
        for name, norm in (
            ("attention_norm", layer.attention_norm),
            ("attention.q_norm", layer.q_norm),
            ("attention.k_norm", layer.k_norm),
            ("ffn_norm", layer.ffn_norm),
        ):
            if norm is not None:
                found |= {f"{at}.{name}.weight": norm.weight, f"{at}.{name}.bias": norm.bias}
        for name, linear, first, count in (
            ("attention.wq", layer.wqkv, 0, q),
            ("attention.wk", layer.wqkv, q, kv),
            ("attention.wv", layer.wqkv, q + kv, kv),
            ("attention.wo", layer.wo, 0, c.dim),
            ("feed_forward.w1", layer.w13, 0, f),
            ("feed_forward.w2", layer.w2, 0, c.dim),
            ("feed_forward.w3", layer.w13, f, f),
        ):
            if gated or name != "feed_forward.w3":
                sources[f"{at}.{name}.weight"] = _rows_of(linear.weight, first, count)
                if linear.bias is not None:
                    sources[f"{at}.{name}.bias"] = _rows_of(linear.bias, first, count)
    return sources | {name: _rows_of(w) for name, w in found.items() if w is not None}


def blocks(shape: tuple[int, ...], multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Cut the rows of a tensor into blocks, each but the last a multiple of `multiple` rows: `(start, stop)`."""
    rows = max(_BLOCK // math.prod(shape[1:]) // multiple, 1) * multiple
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def _check(config: Config, sources: Mapping[str, Source], origin: str) -> None:
    if config.n_layers > len(sources):  # else a damaged file could ask for billions of names
        raise CheckpointError(f"{origin}: n_layers = {config.n_layers}, but there are only {len(sources)} tensors")
    shapes = tensor_shapes(config, tied="output.weight" not in sources)
    for group in optional_shapes(config):
        if any(name in sources for kind in group for name in expand(kind, config.n_layers)):
            shapes |= group
    expected = {name: shape for kind, shape in shapes.items() for name in expand(kind, config.n_layers)}
    problems = []
    for name, shape in expected.items():
        if name not in sources:
            problems.append(f"{name} is missing, expected {list(shape)}")
        elif sources[name].shape != shape:
            problems.append(f"{name} is {list(sources[name].shape)}, expected {list(shape)}")
    problems += [f"{shown(name)} is not a tensor of this model" for name in sources if name not in expected]
    if problems:
        raise CheckpointError(f"{origin}: {listed(problems)}")


def _read(parts: Sequence[Sequence[Source]], dtype: str) -> Iterator[Any]:
    """Read some tensors of each part into one, below each other, cast to `dtype`; for int8, as a `QuantizedWeight`."""
    if parts[0][0].columns is None:
        for sources in parts:
            yield from _read_columns(sources, [slice(None)], dtype)
    else:  # of the same matrix, read once for all parts
        found = [sources[0].columns for sources in parts if sources[0].columns is not None]
        yield from _read_columns([found[0][0]], [columns for _, columns in found], dtype)


def _read_columns(sources: Sequence[Source], columns: Sequence[slice], dtype: str) -> list[Any]:
    """Read tensors into one, and give each of some slices of its columns."""
    shape, first = _stacked_shape(sources), 0
    scale = _empty(shape[:1], "float32")
    found = [_empty((*shape[:-1], len(range(shape[-1])[c])) if len(shape) > 1 else shape, dtype) for c in columns]
    for source in sources:
        for start, stop in blocks(source.shape):
            block, rows = source.read(start, stop), slice(first + start, first + stop)
            if dtype == "int8":
                block, scale[rows] = _quantize(block)
            with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity stay, and show in the logits
                for values, wanted in zip(found, columns, strict=True):
                    values[rows] = block[..., wanted]
        first += source.shape[0]
    return [QuantizedWeight(values, scale) for values in found] if dtype == "int8" else found  # type: ignore[arg-type]


def _stacked_shape(parts: Sequence[Source]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


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


def _put(arrays: Any, device: jax.Device | None) -> Any:
    # Transfers to an accelerator run behind: without waiting, host copies of many tensors would pile up.
    return jax.block_until_ready(jax.device_put(arrays, device))  # type: ignore[no-untyped-call]


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
