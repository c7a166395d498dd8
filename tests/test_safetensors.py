"""Reading and writing safetensors files, and refusing hostile ones."""

import contextlib
import struct
import time
from pathlib import Path
from typing import Any

import hf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from jllama.checkpoint import CheckpointError, safetensors
from jllama.checkpoint.source import Source


def entry(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def test_floats_are_read_bit_by_bit(tmp_path: Path) -> None:
    data = bytes.fromhex("803f 0040 80ff c07f") + bytes.fromhex("003c 0100") + struct.pack("<2d", 0.1, -3.0)
    header = {"b": entry("BF16", [4], 0, 8), "h": entry("F16", [2], 8, 12), "d": entry("F64", [1, 2], 12, 28)}
    (tmp_path / "f").write_bytes(hf.packed(header, data))
    found = {name: tensor.view() for name, tensor in safetensors.read(tmp_path / "f").items()}
    np.testing.assert_array_equal(found["b"].astype(np.float32), [1, 2, -np.inf, np.nan])
    np.testing.assert_array_equal(found["h"].astype(np.float32), np.array([1, 2**-24], np.float32))
    np.testing.assert_array_equal(found["d"], [[0.1, -3.0]])


def test_every_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    (tmp_path / "f").write_bytes(hf.packed({"b": entry("BF16", [1 << 16], 0, 1 << 17)}, bits.tobytes()))
    found = safetensors.read(tmp_path / "f")["b"].view().astype(np.float32)
    expected = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(found, expected)  # NaNs equal NaNs


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"__metadata__": {"format": "pt", "note": "x"}, "a": entry("F32", [2, 2], 0, 16)},
        {"a": entry("F32", [2, 2], 0, 16), "empty": entry("F32", [0, 4], 16, 16)},
        {"empty": entry("I64", [0], 0, 0), "a": entry("U8", [16], 0, 16)},
        {"one": entry("F32", [], 0, 4), "a": entry("BOOL", [3, 4], 4, 16)},
        {"z": entry("BF16", [4], 0, 8), "a": entry("F8_E4M3", [8], 8, 16)},
        {"a": entry("F4", [32], 0, 16)},
    ],
)
def test_legal_files(tmp_path: Path, header: dict[str, Any]) -> None:
    path = tmp_path / "legal.safetensors"
    path.write_bytes(hf.packed(header, bytes(16 if header else 0)))
    tensors = safetensors.read(path)
    assert set(tensors) == set(header) - {"__metadata__"}
    for name, tensor in tensors.items():
        assert list(tensor.shape) == header[name]["shape"]
        if tensor.dtype in safetensors.FLOATS:
            assert tensor.view().shape == tensor.shape


A = entry("F32", [2, 2], 0, 16)
BROKEN: dict[str, tuple[bytes, list[str]]] = {
    "nothing": (b"", ["found 0 bytes"]),
    "7 bytes": (bytes(7), ["found 7 bytes"]),
    "length 2**64 - 1": (b"\xff" * 8 + b"{}", ["header of 18446744073709551615 bytes", "10 bytes"]),
    "length past the file": (struct.pack("<Q", 3) + b"{}", ["header of 3 bytes", "10 bytes"]),
    "length 0": (bytes(8) + b"{}", ["header of 0 bytes"]),
    "list": (hf.packed([1, 2]), ["list", "expected an object"]),
    "number": (hf.packed(b"12"), ["int", "expected an object"]),
    "not UTF-8": (hf.packed(b'{"\xff": 1}'), ["utf-8"]),
    "UTF-16": (hf.packed("{}".encode("utf-16")), ["no JSON"]),
    "not JSON": (hf.packed(b'{"a": '), ["no JSON"]),
    "deep": (hf.packed(b'{"a":' + b"[" * 100_000), ["no JSON"]),
    "giant number": (hf.packed(b'{"a":' + b"9" * 10_000 + b"}"), ["no JSON"]),
    "duplicate key": (hf.packed(b'{"a":1,"a":2}'), ["twice: a"]),
    "entry": (hf.packed({"a": 5, "b": {}}), ["a: dtype None", "b: dtype None", "b: shape None", "b: data_offsets"]),
    "dtype": (hf.packed({"a": entry("F31", [2, 2], 0, 16)}, bytes(16)), ["a: dtype F31"]),
    "dtype list": (hf.packed({"a": entry(["F32"], [2, 2], 0, 16)}, bytes(16)), ["a: dtype ['F32']"]),
    "shape": (hf.packed({"a": entry("F32", [-2, -2], 0, 16)}, bytes(16)), ["a: shape [-2, -2]"]),
    "shape of bools": (hf.packed({"a": entry("F32", [True, 4], 0, 16)}, bytes(16)), ["a: shape"]),
    "shape of floats": (hf.packed({"a": entry("F32", [4.0], 0, 16)}, bytes(16)), ["a: shape"]),
    "many axes": (hf.packed({"a": entry("F32", [1] * 4000, 0, 4)}, bytes(4)), ["a: shape"]),
    "wraps": (hf.packed({"a": entry("F32", [2**62, 2**62], 0, 0)}), ["a: F32", "data_offsets [0, 0] are 0"]),
    "past 64 bits": (hf.packed({"a": entry("F32", [2**70], 0, 16)}, bytes(16)), ["a: shape"]),
    "offsets": (hf.packed({"a": entry("F32", [2, 2], 0, 16, 3)}, bytes(16)), ["a: data_offsets"]),
    "begin after end": (hf.packed({"a": entry("F32", [2, 2], 16, 0)}, bytes(16)), ["a: data_offsets [16, 0]"]),
    "negative begin": (hf.packed({"a": entry("F32", [2, 2], -16, 0)}, bytes(16)), ["a: data_offsets [-16, 0]"]),
    "end past the data": (hf.packed({"a": A, "b": entry("F32", [1], 16, 20)}, bytes(16)), ["b ends at byte 20", "16"]),
    "giant": (hf.packed({"a": entry("U8", [2**60], 0, 2**60)}, bytes(16)), ["a ends at byte 1152921504606846976"]),
    "size": (hf.packed({"a": entry("F32", [2, 3], 0, 16)}, bytes(16)), ["a: F32 [2, 3] needs 24", "are 16"]),
    "overlap": (hf.packed({"a": A, "b": entry("F32", [2], 12, 20)}, bytes(20)), ["b begins at byte 12", "inside a"]),
    "same place": (hf.packed({"a": A, "b": A}, bytes(16)), ["b begins at byte 0", "inside a"]),
    "gap": (hf.packed({"a": A, "b": entry("F32", [1], 20, 24)}, bytes(24)), ["4 bytes between a and b"]),
    "gap before": (hf.packed({"a": entry("F32", [1], 4, 8)}, bytes(8)), ["4 bytes between the header and a"]),
    "a byte short": (hf.packed({"a": A}, bytes(15)), ["a ends at byte 16", "expected at most 15"]),
    "a byte more": (hf.packed({"a": A}, bytes(17)), ["1 bytes after a"]),
    "data without tensors": (hf.packed({}, bytes(2)), ["2 bytes after the header"]),
    "strange name": (hf.packed({"a\n\ud800": 5}), ["'a\\n\\ud800': dtype"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    data, words = BROKEN[name]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(CheckpointError) as e:
        safetensors.read(path)
    assert time.process_time() - start < 1
    assert all(word in str(e.value) for word in [str(path), *words]), str(e.value)
    assert "\n" not in str(e.value)
    str(e.value).encode()  # can be printed


def test_all_problems_come_together(tmp_path: Path) -> None:
    header = {"a": entry("F32", [3], 0, 4), "b": entry("X", [1], 4, 8), "c": entry("F32", [1], 9, 8)}
    (tmp_path / "f").write_bytes(hf.packed(header, bytes(8)))
    with pytest.raises(CheckpointError) as e:
        safetensors.read(tmp_path / "f")
    assert all(word in str(e.value) for word in ("a: F32 [3] needs 12", "b: dtype X", "c: data_offsets [9, 8]"))


def test_giant_sparse_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    size = 1 << 36
    path.write_bytes(hf.packed({"a": entry("F32", [1 << 24, 1 << 10], 0, size)}))
    try:
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size + size)
    except OSError as e:
        pytest.skip(f"this file system makes no sparse files of {size} bytes: {e}")
    assert not safetensors.read(path)["a"].view()[-1].any()


@given(
    st.binary(max_size=100), st.sampled_from([b"", hf.packed({"a": A}), struct.pack("<Q", 40) + b'{"a":{"dtype":"F32"'])
)
def test_no_bytes_fail_in_another_way(tmp_path_factory: pytest.TempPathFactory, tail: bytes, head: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(head + tail)
    with contextlib.suppress(CheckpointError):
        assert safetensors.read(path).keys() == {"a"}


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = hf.packed({"a": A, "b": entry("BF16", [3], 16, 22)}, bytes(range(22)))
    path = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            safetensors.read(path)


# --- against the library


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "odd": rng.normal(0, 1, (3, 5)).astype(np.float32),
        "half": rng.normal(0, 1, (7,)).astype(np.float16),
        "double": rng.normal(0, 1, (2, 1, 3)),
        "empty": np.zeros((0, 4), np.float32),
    }


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    library.save_file(arrays(), tmp_path / "f", metadata={"format": "pt"})
    found = safetensors.read(tmp_path / "f")
    assert found.keys() == arrays().keys()
    for name, array in arrays().items():
        np.testing.assert_array_equal(found[name].view(), array)
        assert found[name].view().dtype == array.dtype


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    rng = np.random.default_rng(1)
    exact = {
        f"t{i}": rng.normal(0, 1, shape).astype(np.float32) for i, shape in enumerate([(3, 5), (7,), (2, 2), (1,)])
    }
    tensors = {
        name: ("BF16" if array.ndim == 2 else "F32", Source(array.shape, lambda i, j, array=array: array[i:j]))
        for name, array in exact.items()
    }
    with open(tmp_path / "f", "wb") as file:
        safetensors.write(file, tensors)
    for name, fields in library.deserialize((tmp_path / "f").read_bytes()):
        dtype = bfloat16 if fields["dtype"] == "BF16" else np.float32
        found = np.frombuffer(fields["data"], dtype).reshape(fields["shape"])
        np.testing.assert_array_equal(found, exact.pop(name).astype(dtype))
    assert not exact


@pytest.mark.parametrize("name", [name for name in BROKEN if name != "many axes"])
def test_the_library_refuses_the_same(name: str) -> None:
    library = pytest.importorskip("safetensors")
    with pytest.raises(library.SafetensorError):
        library.deserialize(BROKEN[name][0])
