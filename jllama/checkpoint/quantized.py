"""Quantised weights in Hugging Face's folders: what the tensors of a `quantization_config` come to.

  fp8                 weight in 8-bit floats; weight_scale_inv or weight_scale of the tensor, its rows or its blocks
  compressed-tensors  the same; weight in int8 with weight_scale; weight_packed of 4 or 8 bits with weight_scale
  gptq                qweight [in / n, out], qzeros [groups, out / n], scales [groups, out], g_idx [in]
  awq                 qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]

n numbers of 4 or 8 bits are in an int32, the first in its lowest bits; awq has columns 0 2 4 6 1 3 5 7 there. Sources:
vllm-project/compressed-tensors; qlinear_cuda_old.py in AutoGPTQ; packing of WQLinear_GEMM in AutoAWQ; FP8Linear in
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jllama.checkpoint.safetensors import FLOATS, Tensor
from jllama.checkpoint.source import Array, Source, Stored
from jllama.errors import shown
from jllama.families import Fields

_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq")
_FORMATS = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "dense")
_INSTEAD = "; get the model's GGUF, or the folder that isn't quantised"
_FP8 = ("F8_E4M3", "F8_E5M2")
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_SUFFIXES = (
    "weight_scale_inv",
    "weight_scale",
    "weight_packed",
    "weight_shape",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
)
_OF_ACTIVATIONS = ("input_scale", "activation_scale")  # of inputs, which are rounded here in another way


class Quantization(NamedTuple):
    """How a folder's matrices are quantised."""

    method: str
    bits: int = 8  # of packed integers
    zero_offset: int = 0  # what is added to zeros
    block: tuple[int, int] | None = None  # rows and columns that share a scale


def parse(fields: Fields) -> Quantization | None:
    """Read a config.json's `quantization_config`, None where there is none; what isn't supported goes to `problems`."""
    if fields.peek("quantization") is not None:
        fields.problems.append(f"quantization: mlx's weights are not supported{_INSTEAD}")
    if fields.peek("quantization_config") is None:
        return None
    table = fields.within("quantization_config.", fields.get("quantization_config", dict))
    method, before = str(table.peek("quant_method")), len(fields.problems)
    if method not in _METHODS:
        expected = ", ".join(_METHODS)
        table.problems.append(f"{table.prefix}quant_method = {shown(method)}: expected {expected}{_INSTEAD}")
        return None
    found = Quantization(method)
    if method == "fp8" and (block := table.peek("weight_block_size")) is not None:
        if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            table.problems.append(f"{table.prefix}weight_block_size = {shown(block)}: expected two sizes")
        else:
            found = found._replace(block=(block[0], block[1]))
    elif method == "compressed-tensors":
        found = _compressed(table, found)
    elif method in ("gptq", "awq"):
        table.only("bits", *((4, 8) if method == "gptq" else (4,)))
        table.only("checkpoint_format", "gptq", "gptq_v2")
        table.only("version", "gemm")
        is_old = method == "gptq" and table.peek("checkpoint_format") != "gptq_v2"
        found = found._replace(bits=table.get("bits", int), zero_offset=int(is_old))
    return found if len(fields.problems) == before else None


def _compressed(table: Fields, found: Quantization) -> Quantization:
    table.only("format", *_FORMATS)
    sparse = table.within("sparsity_config.", table.get("sparsity_config", dict, {}))
    sparse.only("format", "dense")
    groups = table.get("config_groups", dict)
    for name, group in groups.items():
        inner = table.within(f"config_groups.{shown(name)}.", group if isinstance(group, dict) else {})
        weights = inner.within("weights.", inner.get("weights", dict))
        weights.only("symmetric", True)
        weights.only("num_bits", 4, 8)
        bits = weights.get("num_bits", int)
        block = weights.peek("block_structure")
        if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            found = found._replace(block=(block[0], block[1]))
        if len(groups) > 1 and found.bits != bits and group is not next(iter(groups.values())):
            weights.problems.append(f"{weights.prefix}num_bits = {bits}: expected as many in all groups")
        found = found._replace(bits=bits)
    return found


def sources(how: Quantization, tensors: Mapping[str, Tensor], problems: list[str]) -> dict[str, Source]:
    """Give a folder's tensors as numbers, quantised ones under the name of the weight that they make up.

    Integers whose scales float16 holds and whose zero is the middle keep their values in GGUF's Q4_0 or Q8_0; other
    integers are kept in 8 bits where blocks are kept. What doesn't fit together goes to `problems`.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    found: dict[str, Source] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        is_weight = suffix == "weight" and tensor.dtype not in FLOATS
        if suffix in _SUFFIXES or is_weight:
            parts.setdefault(module, {})[suffix] = tensor
        elif suffix not in _OF_ACTIVATIONS:
            found[name] = Source(tensor.shape, _rows(tensor))
    for module, given in parts.items():
        try:
            found[f"{module}.weight"] = _matrix(how, given)
        except (ValueError, KeyError) as e:
            what = f"{e.args[0]} is missing" if isinstance(e, KeyError) else str(e)
            problems.append(f"{shown(module)}: {what}; found {', '.join(sorted(given))}")
    return found


def _matrix(how: Quantization, given: Mapping[str, Tensor]) -> Source:
    """Put one matrix together.

    Raises:
      KeyError: a part is missing.
      ValueError: parts that don't fit each other.
    """
    if how.method == "gptq":
        return _gptq(how, given)
    if how.method == "awq":
        return _awq(how, given)
    if "weight_packed" in given:
        return _packed(how, given["weight_packed"], given["weight_scale"])
    weight = given["weight"]
    scale = _scale(given["weight_scale_inv" if "weight_scale_inv" in given else "weight_scale"])
    if len(weight.shape) != 2 or weight.dtype not in (*_FP8, "I8"):
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}, expected a matrix of {', '.join(_FP8)} or I8")
    if weight.dtype == "I8":
        zeros = np.zeros((weight.shape[0], 1), np.int32)
        scales = scale if scale.ndim == 2 else np.broadcast_to(scale.reshape(-1, 1), zeros.shape)
        return _integers("channels", 8, weight.shape, _rows(weight), zeros, scales, None)
    return _floats(weight, scale, how.block)


def _floats(weight: Tensor, scale: Array, block: tuple[int, int] | None) -> Source:
    """Give 8-bit floats times the scale of the tensor, of each row, or of each block."""
    out, columns = weight.shape
    if scale.size == 1:
        scale, block = scale.reshape(1, 1), (out, columns)
    elif scale.size == out:
        scale, block = scale.reshape(out, 1), (1, columns)
    height, width = block or (0, 0)
    if not height or scale.shape != (-(-out // height), -(-columns // width)):
        raise ValueError(f"the scale is {list(scale.shape)}, expected one of the tensor, its rows or its blocks")
    rows = _rows(weight)

    def read(start: int, stop: int) -> Array:
        scales = scale[np.arange(start, stop) // height].repeat(width, axis=1)[:, :columns]
        block: Array = rows(start, stop).astype(np.float32) * scales
        return block

    return Source(weight.shape, read)


def _packed(how: Quantization, packed: Tensor, scale: Tensor) -> Source:
    """Give rows of integers that are packed along the rows, their middle as zero."""
    each = 32 // how.bits
    _expect("weight_packed", packed, "I32", 2)
    out, words = packed.shape
    rows, scales = _rows(packed), _scale(scale)

    def integers(start: int, stop: int) -> Array:
        return _unpacked(rows(start, stop), how.bits).reshape(stop - start, -1)

    zeros = np.full((out, 1), 1 << how.bits - 1, np.int32)
    return _integers("packed", how.bits, (out, words * each), integers, zeros, scales, None)


def _gptq(how: Quantization, given: Mapping[str, Tensor]) -> Source:
    words, each = given["qweight"], 32 // how.bits
    _expect("qweight", words, "I32", 2)
    columns, out = words.shape[0] * each, words.shape[1]
    scales = _scale(given["scales"]).T
    zeros = _unpacked(_whole(given["qzeros"], "I32"), how.bits).reshape(len(given["qzeros"].view()), -1)
    zeros = zeros.T + how.zero_offset & (1 << how.bits) - 1
    order = _whole(given["g_idx"], "I32") if "g_idx" in given else None

    def integers(start: int, stop: int) -> Array:
        return _unpacked(words.view()[:, start:stop].T, how.bits).reshape(stop - start, -1)

    return _integers("gptq", how.bits, (out, columns), integers, zeros, scales, order)


def _awq(how: Quantization, given: Mapping[str, Tensor]) -> Source:
    words = given["qweight"]
    _expect("qweight", words, "I32", 2)
    columns, out = words.shape[0], words.shape[1] * 8

    def in_order(packed: Array) -> Array:
        fields = _unpacked(packed, how.bits)
        return fields[..., np.argsort(_AWQ_COLUMNS)].reshape(len(packed), -1)

    def integers(start: int, stop: int) -> Array:
        first = start // 8
        return in_order(words.view()[:, first : -(-stop // 8)])[:, start - 8 * first : stop - 8 * first].T

    zeros = in_order(_whole(given["qzeros"], "I32")).T
    return _integers("awq", how.bits, (out, columns), integers, zeros, _scale(given["scales"]).T, None)


def _integers(
    method: str,
    bits: int,
    shape: tuple[int, ...],
    integers: Callable[[int, int], Array],
    zeros: Array,
    scales: Array,
    order: Array | None,
) -> Source:
    """Give `(integers - zeros) * scales`.

    Args:
      method: what it is called where it is kept in no form of its own.
      bits: of the integers.
      shape: `[out, in]`.
      integers: some rows of them.
      zeros: `[out, groups]`, or `[out, 1]` of a row.
      scales: float32 `[out, groups]`.
      order: the group of each column; None: as many columns to each, one after another.
    """
    out, columns = shape
    count = scales.shape[-1] if scales.ndim == 2 else 0
    if scales.shape != (out, count) or not count or columns % count or zeros.shape not in ((out, count), (out, 1)):
        raise ValueError(f"weight {list(shape)}, scales {list(scales.shape)}, zeros {list(zeros.shape)}: don't fit")
    zeros = np.broadcast_to(zeros, scales.shape)
    plain = np.arange(columns) // (columns // count)
    group = plain if order is None else order
    if group.shape != plain.shape or group.min() < 0 or group.max() >= count:
        raise ValueError(f"g_idx: expected the groups of {columns} columns, numbers below {count}")

    def read(start: int, stop: int) -> Array:
        u = integers(start, stop).astype(np.int32) - zeros[start:stop][:, group]
        rows: Array = u.astype(np.float32) * scales[start:stop][:, group]
        return rows

    def blocks(start: int, stop: int) -> Array:
        u = (integers(start, stop).astype(np.int16) - middle).astype(np.int8).reshape(stop - start, -1, 32)
        if bits == 4:
            u = (u + 8).astype(np.uint8)
            u = u[..., :16] | u[..., 16:] << 4
        d = scales[start:stop].astype(np.float16)[..., None].view(np.uint8).repeat(columns // count // 32, axis=1)
        return np.concatenate([d, u.view(np.uint8)], axis=-1).reshape(stop - start, -1)

    middle = int(zeros.flat[0])
    with np.errstate(over="ignore"):
        is_exact = np.array_equal(scales.astype(np.float16).astype(np.float32), scales) and bool((scales >= 0).all())
    is_even = (zeros == middle).all() and middle == (0 if method == "channels" else 1 << bits - 1)
    is_whole = columns // count % 32 == 0 and np.array_equal(group, plain)
    kind = ("q4_0" if bits == 4 else "q8_0") if is_exact and is_even and is_whole else method
    return Source(shape, read, stored=Stored(kind, blocks))


def _unpacked(words: Array, bits: int) -> Array:
    """Take int32 `[...]` apart into the numbers in them `[..., n]`, the lowest bits first."""
    shift = np.arange(0, 32, bits, dtype=np.uint32)
    fields: Array = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shift & np.uint32((1 << bits) - 1)
    return fields.astype(np.int32)


def _scale(tensor: Tensor) -> Array:
    if tensor.dtype not in FLOATS:
        raise ValueError(f"the scale is {tensor.dtype}, expected {', '.join(FLOATS)}")
    return tensor.view().astype(np.float32)


def _whole(tensor: Tensor, dtype: str) -> Array:
    if tensor.dtype != dtype:
        raise ValueError(f"{tensor.dtype}, expected {dtype}")
    return tensor.view().copy()


def _expect(name: str, tensor: Tensor, dtype: str, axes: int) -> None:
    if tensor.dtype != dtype or len(tensor.shape) != axes:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} with {axes} axes")


def _rows(tensor: Tensor) -> Callable[[int, int], Any]:
    return lambda start, stop: tensor.view()[start:stop]
