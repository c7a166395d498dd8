"""Meta's checkpoints: shards, `.npy` files, params.json; and `.pth` files that mean harm."""

import contextlib
import dataclasses
import json
import os
import pickle
import struct
import sys
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from meta_writer import CONFIG, PARAMS, Storage, View, fake_torch, split, torch_save, whole, write, write_zip

from jllama import checkpoint
from jllama.checkpoint import CheckpointError, build, meta, pth
from jllama.config import from_toml
from jllama.rope import Llama3

ROOT = Path(__file__).resolve().parents[1]


def random_weights(*, tied: bool = False) -> oracle.Weights:
    return oracle.random_weights(CONFIG, tied=tied)


def arrays(path: Path) -> oracle.Weights:
    contents = meta.read(path)
    assert dataclasses.replace(contents.config, tied=False) == CONFIG
    return {name: np.array(source.read(0, source.shape[0])) for name, source in contents.sources.items()}


def message(path: Path) -> str:
    with pytest.raises(CheckpointError) as e:
        checkpoint.load(path)
    assert "\n" not in str(e.value)
    return str(e.value)


# --- what is loaded


@pytest.mark.parametrize(
    "name",
    [
        "tiny-meta",
        "tiny-meta/npy",
        "tiny-meta/consolidated.00.pth",
        "tiny-meta-2shard",
        "tiny-meta-2shard/consolidated.01.pth",
    ],
)
def test_golden_logits(shared: Path, name: str) -> None:
    with np.load(shared / "golden/logits.npz") as golden:
        tokens, expected = golden["tiny-llama-hf.input_ids"], golden["tiny-llama-hf.logits"]
    params = checkpoint.load(shared / "models" / name, dtype="float32")
    np.testing.assert_allclose(tiny.all_logits(params, tokens[None])[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("embedding_axis", [0, 1])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_shards_are_joined(tmp_path: Path, n: int, embedding_axis: int) -> None:
    weights = random_weights()
    path = write(tmp_path / "model", weights, n, embedding_axis=embedding_axis)
    tiny.assert_same(arrays(path), weights)
    for name, source in meta.read(path).sources.items():  # every range of rows, across the ends of shards too
        for start in range(0, source.shape[0], 7):
            np.testing.assert_array_equal(source.read(start, start + 5), weights[name][start : start + 5])


def test_logits_equal_the_oracle(tmp_path: Path) -> None:
    weights = random_weights()
    params = checkpoint.load(write(tmp_path / "model", weights, 2))
    tokens = tiny.ids(CONFIG, 1, 20)
    np.testing.assert_allclose(
        tiny.all_logits(params, tokens)[0], oracle.forward(weights, CONFIG, tokens[0]), atol=1e-4
    )


def test_copies_may_differ_between_shards(tmp_path: Path) -> None:
    weights = random_weights()
    other = {name: a * np.float32(1.01) if a.ndim == 1 else a for name, a in weights.items()}
    write(tmp_path / "model", other, 2)
    write(tmp_path / "one", weights, 2)
    os.replace(tmp_path / "one/consolidated.00.pth", tmp_path / "model/consolidated.00.pth")
    tiny.assert_same(arrays(tmp_path / "model"), weights)


def test_a_single_file_of_another_name(tmp_path: Path) -> None:
    weights = random_weights(tied=True)
    path = write(tmp_path / "model", weights)
    os.replace(path / "consolidated.00.pth", path / "mine.pth")
    tiny.assert_same(arrays(path / "mine.pth"), weights)
    assert checkpoint.load(path / "mine.pth").output is None


@pytest.mark.parametrize("where", ["", "npy", "up"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files(tmp_path: Path, where: str, order: str) -> None:
    weights = random_weights()
    folder = tmp_path / "model" / ("npy" if where else "")
    folder.mkdir(parents=True)
    (tmp_path / "model/params.json").write_text(json.dumps(PARAMS))
    for name, array in weights.items():
        np.save(folder / f"{name}.npy", np.asarray(array, order=order))
    np.save(folder / "rope.freqs.npy", np.ones(4))
    tiny.assert_same(arrays(folder if where == "up" else tmp_path / "model"), weights)


@pytest.mark.parametrize(("dtype", "auto"), [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("n", [1, 2])
def test_dtypes_are_widened_exactly(tmp_path: Path, dtype: str, auto: str, n: int) -> None:
    weights = {name: a.astype(jnp.dtype(dtype)) for name, a in random_weights().items()}
    path = write(tmp_path / "model", weights, n)
    tiny.assert_same(arrays(path), weights)
    params = checkpoint.load(path)
    assert params.embedding.dtype == auto
    exact = checkpoint.load(path, dtype="float32")
    np.testing.assert_array_equal(exact.embedding.decode(), weights["tok_embeddings.weight"].astype(np.float32))
    assert checkpoint.load(path, dtype="int8").embedding.values.dtype == np.int8


def test_strides_and_offsets(tmp_path: Path) -> None:
    weights = random_weights()
    path = write(tmp_path / "model", weights)
    wq, wk = (weights[f"layers.0.attention.{name}.weight"] for name in ("wq", "wk"))
    both = Storage(np.concatenate([np.zeros(5, np.float32), wk.ravel(), wq.T.ravel()]))
    tree = {name: whole(array) for name, array in weights.items()}
    tree["layers.0.attention.wk.weight"] = View(both, 5, wk.shape, (32, 1))
    tree["layers.0.attention.wq.weight"] = View(both, 5 + wk.size, wq.shape, (1, 32))
    torch_save(path / "consolidated.00.pth", OrderedDict(tree))
    tiny.assert_same(arrays(path), weights)
    np.testing.assert_array_equal(meta.read(path).sources["layers.0.attention.wq.weight"].read(3, 9), wq[3:9])


@pytest.mark.parametrize("n", [1, 2])
def test_a_shared_storage_is_a_tied_head(tmp_path: Path, n: int) -> None:
    weights = random_weights(tied=True)
    path = write(tmp_path / "model", weights)
    for i in range(n):
        tree = {name: whole(split(name, a, n, embedding_axis=0)[i]) for name, a in weights.items()}
        torch_save(path / f"consolidated.{i:02}.pth", tree | {"output.weight": tree["tok_embeddings.weight"]})
    assert checkpoint.load(path).output is None
    tiny.assert_same(arrays(path), weights)


# --- params.json


@pytest.mark.parametrize(
    ("dim", "multiplier", "multiple_of", "expected"),
    [
        (4096, 1.0, 256, 11008),
        (5120, 1.0, 256, 13824),
        (8192, 1.3, 4096, 28672),
        (8192, 1.0, 4096, 24576),
        (8192, 1.0, 256, 22016),
        (4096, 1.3, 1024, 14336),
        (2048, 1.5, 256, 8192),
        (288, 1.0, 32, 768),
        (64, 1.0, 4, 172),
    ],
)
def test_hidden_dim(dim: int, multiplier: float, multiple_of: int, expected: int) -> None:
    assert meta.hidden_dim(dim, multiple_of, multiplier) == expected


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama2_7b", {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-5}),
        ("llama2_13b", {"dim": 5120, "multiple_of": 256, "n_heads": 40, "n_layers": 40, "norm_eps": 1e-5}),
        (
            "llama2_70b",
            {"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64, "n_kv_heads": 8}
            | {"n_layers": 80, "norm_eps": 1e-5},
        ),
        (
            "llama3.1_8b",
            {"dim": 4096, "ffn_dim_multiplier": 1.3, "multiple_of": 1024, "n_heads": 32, "n_kv_heads": 8}
            | {"n_layers": 32, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True, "vocab_size": 128256},
        ),
        (
            "llama3.2_1b",
            {"dim": 2048, "ffn_dim_multiplier": 1.5, "multiple_of": 256, "n_heads": 32, "n_kv_heads": 8}
            | {"n_layers": 16, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True, "vocab_size": 128256},
        ),
    ],
)
def test_params_of_known_models(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"vocab_size": 32000} | fields))
    expected = dataclasses.replace(from_toml(ROOT / f"configs/{name}.toml"), tied=False)  # the tensors tell that
    assert meta._config(meta._read_params(tmp_path / "params.json"), {}) == expected


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"norm_eps": 1e-6}, 2048),  # Llama 1
        ({"dim": 8192, "n_heads": 64, "n_layers": 80, "norm_eps": 1e-5}, 2048),  # Llama 1, 65B
        ({"norm_eps": 1e-5}, 4096),  # Llama 2
        ({"rope_theta": 1e6, "vocab_size": 32016}, 16384),  # Code Llama
        ({"rope_theta": 500000, "vocab_size": 128256}, 8192),  # Llama 3
        ({"rope_theta": 500000, "vocab_size": 128256, "use_scaled_rope": True}, 131072),  # Llama 3.1
        ({"max_seq_len": 77}, 77),
    ],
)
def test_context(tmp_path: Path, fields: dict[str, Any], context: int) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | {"vocab_size": 32000} | fields))
    assert meta._config(meta._read_params(tmp_path / "params.json"), {}).max_seq_len == context


def test_a_scaling_factor_of_its_own(tmp_path: Path) -> None:
    fields = {"use_scaled_rope": True, "rope_scaling_factor": 16, "rope_high_freq_factor": 2, "vocab_size": 48}
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | fields))
    config = meta._config(meta._read_params(tmp_path / "params.json"), {})
    assert config.rope_scaling == Llama3(16.0, 1.0, 2.0, 8192)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["params.json", "JSON"]),
        ("[1]", ["params.json", "object"]),
        ("[" * 10**5, ["params.json", "JSON"]),
        ("{}", ["dim is missing", "n_layers is missing", "n_heads is missing"]),
        (json.dumps(PARAMS | {"dim": "32", "n_heads": 4.0}), ["dim = '32'", "n_heads = 4.0", "an integer"]),
        (json.dumps(PARAMS | {"multiple_of": 0, "n_layers": 2**40}), ["multiple_of = 0", "n_layers"]),
        (json.dumps(PARAMS | {"ffn_dim_multiplier": float("nan")}), ["ffn_dim_multiplier = nan"]),
        (json.dumps(PARAMS | {"rope_theta": 10**400, "norm_eps": float("inf")}), ["rope_theta", "norm_eps = inf"]),
        (json.dumps(PARAMS | {"rope_theta": -(10**400), "dim": 10**4000}), ["rope_theta", "dim = 1000"]),
        ('{"dim": ' + "9" * 5000 + "}", ["params.json", "no JSON"]),
        (json.dumps(PARAMS | {"dim": "\x1b[2J" * 999, "n_layers": [[]] * 9999}), ["dim = '\\x1b[2J", "n_layers = [[]"]),
        (json.dumps(PARAMS | {"dim": 2**30 + 2**29}), ["consolidated.01.pth", "missing: found 1 of 50331648 shards"]),
        (json.dumps(PARAMS | {"n_kv_heads": 3}), ["n_heads = 4", "n_kv_heads = 3"]),
        (json.dumps(PARAMS | {"n_layers": 2**30}), ["n_layers = 1073741824", "20 tensors"]),
        (json.dumps(PARAMS | {"multiple_of": 256}), ["w1.weight has 96 rows", "multiple_of = 256", "256"]),
        (json.dumps(PARAMS | {"ffn_dim_multiplier": 1.3}), ["96 rows", "ffn_dim_multiplier = 1.3", "128"]),
        (json.dumps(PARAMS | {"vocab_size": 50}), ["tok_embeddings.weight is [48, 32], expected [50, 32]"]),
    ],
)
def test_wrong_params(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path / "model", random_weights(tied=True))
    (path / "params.json").write_text(text)
    found = message(path)
    assert all(word in found for word in words), found


def test_no_params(tmp_path: Path) -> None:
    path = write(tmp_path / "model", random_weights())
    (path / "params.json").unlink()
    assert "params.json is missing" in message(path)


def test_params_alone(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    assert "expected consolidated.00.pth or one .npy file a tensor" in message(tmp_path)


# --- shards and tensors that are not as they should be


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("left", [[0], [1], [0, 2]])
def test_missing_shards_are_named(tmp_path: Path, n: int, left: list[int]) -> None:
    path = write(tmp_path / "model", random_weights(), n)
    gone = [f"consolidated.{i:02}.pth" for i in range(n) if i not in left]
    for name in gone:
        (path / name).unlink()
    found = message(path)
    assert f"of {n} shards" in found
    assert ", ".join(gone) in found


def test_tensors_missing_in_shards_are_all_named(tmp_path: Path) -> None:
    weights = random_weights()
    path = write(tmp_path / "model", weights, 2)
    names = ["layers.0.attention.wk.weight", "norm.weight"]
    tree = {name: whole(split(name, a, 2, embedding_axis=1)[1]) for name, a in weights.items() if name not in names}
    tree["layers.1.attention.wo.weight"] = whole(np.zeros((8, 16), np.float32))
    torch_save(path / "consolidated.01.pth", tree)
    found = message(path)
    assert all(f"{name} is missing in consolidated.01.pth" in found for name in names), found
    assert "layers.1.attention.wo.weight is [32, 16] and [8, 16]" in found


@pytest.mark.parametrize("n", [1, 2])
def test_tensors_missing_left_over_and_misshapen_are_all_named(tmp_path: Path, n: int) -> None:
    weights = random_weights()
    del weights["layers.1.ffn_norm.weight"]
    weights["layers.0.attention.wv.weight"] = np.zeros((16, 32), np.float32)
    weights["layers.2.attention.wq.weight"] = np.zeros((32, 32), np.float32)
    found = message(write(tmp_path / "model", weights, n))
    assert "layers.1.ffn_norm.weight is missing" in found
    assert "layers.0.attention.wv.weight is [16, 32], expected [32, 32]" in found
    assert "layers.2.attention.wq.weight is not a tensor of this model" in found


def npy_header(text: str) -> bytes:
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x93NUMPY\1\0", ["cannot be read"]),
        (b"", ["cannot be read"]),
        (b"PK\3\4" + bytes(50), ["cannot be read"]),
        (np.array([os.system], object), ["object [1]", "expected float32 or float16"]),
        (npy_header("{'descr': 'V0', 'fortran_order': False, 'shape': (-1,)}"), ["|V0 [-1]"]),  # NumPy divides by zero
        (npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"), ["cannot be read: [-1]"]),
        (npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4)}"), ["cannot be read: [0, 4]"]),
        (np.zeros((48, 32), np.int32), ["int32 [48, 32]", "expected float32 or float16"]),
        (np.float32(1), ["float32 []"]),
        (npy_header("(" * 3000), ["cannot be read"]),  # RecursionError or MemoryError of the parser
        (npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (8L, 8L \\"), ["cannot be read"]),  # TokenError
        (npy_header("{'descr': [], 'fortran_order': False, 'shape': (1,)}"), ["it is [] [1], expected float32"]),
        (npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2**62,)}"), ["cannot be read"]),
        (npy_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**62}, 4)}}"), ["cannot be read"]),
        (npy_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': (1{', 1' * 69},)}}"), ["cannot be read"]),
        (npy_header("{[]: 1, 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}"), ["cannot be read"]),
        (npy_header("{'descr': '<f4\x1b[2J', 'fortran_order': False, 'shape': (1,)}"), ["cannot be read"]),
    ],
)
def test_npy_files_that_are_none(tmp_path: Path, content: Any, words: list[str]) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    for name, array in random_weights().items():
        np.save(tmp_path / f"{name}.npy", array)
    for name in ("tok_embeddings.weight", "norm.weight"):
        if isinstance(content, bytes):
            (tmp_path / f"{name}.npy").write_bytes(content)
        else:
            np.save(tmp_path / f"{name}.npy", content, allow_pickle=True)
    found = message(tmp_path)
    assert all(word in found for word in ["tok_embeddings.weight.npy", "norm.weight.npy", *words]), found


def test_npy_files_cut_short(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    for name, array in random_weights().items():
        np.save(tmp_path / f"{name}.npy", array)
    file = tmp_path / "tok_embeddings.weight.npy"
    size = file.stat().st_size
    for length in [*range(140), size - 1]:
        os.truncate(file, length)
        assert "tok_embeddings.weight.npy cannot be read" in message(tmp_path)
        np.save(file, random_weights()["tok_embeddings.weight"])


# --- .pth files that mean harm


class Runs:
    """Pickled, it is a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = write(tmp_path / "model", random_weights())
    tree = {"norm.weight": Runs(os.system, f"touch {canary}"), "output.weight": Runs(eval, "1")}
    torch_save(path / "consolidated.00.pth", tree)
    with zipfile.ZipFile(path / "consolidated.00.pth") as archive, mock.patch.dict(sys.modules, fake_torch()):
        pickle.loads(archive.read("consolidated.00/data.pkl"))  # the file does mean harm
    assert canary.exists()
    canary.unlink()
    found = message(path)
    assert f"{os.system.__module__}.system" in found
    assert "builtins.eval" in found or "__builtin__.eval" in found
    assert not canary.exists()


NESTED = b"Nq\0" + b"h\0\x86q\0" * 60  # a tuple of two equal tuples, and so on: 2**60 parts


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n(Vtouch canary\ntR.",
        b"c__builtin__\nexec\n(Vopen('canary', 'w')\ntR.",
        b"(Vtouch canary\nios\nsystem\n.",
        b"cjllama.checkpoint.pth\nread\n(Vx\ntR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(tR.",
        b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n.",
        b"ctorch\nFloatStorage\n(I1\ntR.",
        b"ctorch\nStorage.__class__Storage\n.",
        b"Q.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"]r\xff\xff\xff\x7f.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"(" * 10000,
        b"]" + b"2a" * 1000 + b".",
        b"N.",
        b"}(K\1K\2u.",
        b"}(Vnorm.weight\nK\2Voutput.weight\nNu.",
        b"",
        b"\x80\x05\x96" + struct.pack("<Q", 3 << 30) + b".",  # BYTEARRAY8
        b"}" + NESTED + b"Ns.",
        b"}(" + NESTED + b"Nu.",
        b"ccollections\nOrderedDict\n((" + NESTED + b"NttR.",
    ],
)
def test_pickles_of_other_things_are_refused(tmp_path: Path, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    write_zip(tmp_path / "consolidated.00.pth", body, {})
    began = time.process_time()
    assert "consolidated.00.pth" in message(tmp_path)
    assert time.process_time() - began < 1
    assert not (tmp_path / "canary").exists()


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_no_bytes_fail_in_another_way(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pth"
    torch_save(path, {"norm.weight": whole(np.ones(4, np.float32))})
    with zipfile.ZipFile(path) as archive:
        good = archive.read("any/data.pkl")
    write_zip(path, good[:at] + data, {"data/0": bytes(16)})
    with contextlib.suppress(CheckpointError):
        pth.read(path)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (View(Storage(np.ones(31, np.float32)), 0, (32,), (1,)), "needs 32 numbers of a storage of 31"),
        (View(Storage(np.ones(32, np.float32)), 1, (32,), (1,)), "needs 33 numbers of a storage of 32"),
        (View(Storage(np.ones(32, np.float32)), 0, (32,), (2**62,)), "of a storage of 32"),
        (View(Storage(np.ones(32, np.float32)), -1, (32,), (1,)), "no proper shape"),
        (View(Storage(np.ones(32, np.float32)), 0, (32,), (-1,)), "no proper shape"),
        (View(Storage(np.ones(32, np.float32)), 0, (32,), (1, 1)), "no proper shape"),
        (View(Storage(np.ones(32, np.float32)), 0, ("32",), (1,)), "no proper shape"),
        (View(Storage(np.ones(32, np.float32)), 0, 32, 1), "no proper shape"),
        (View(Storage(np.ones(32, np.float32)), 0, (), ()), "no proper shape"),
        (View(Storage(np.ones(32, np.int32), "Int"), 0, (32,), (1,)), "IntStorage"),
        (View(Storage(np.ones(16, np.float32), "BFloat16"), 0, (32,), (1,)), "of a storage of 32"),
        (View(Storage(np.ones(32, np.float32)), 0, (2**40,), (0,)), "of a storage of 32"),
        (View(Storage(np.ones(32, np.float32)), 0, (2, 33), (0, 0)), "needs 66 numbers of a storage of 32"),
        (View(Storage(np.ones(32, np.float32)), 0, (1,) * 70, (1,) * 70), "no proper shape"),
        (View(Storage(np.ones(32, np.float32)), 0, (0, 2**70), (1, 1)), "no proper shape"),
        (View(Storage(np.ones(32, np.float32)), 0, (10**70,), (1,)), "no proper shape"),
        (3, "is a int, expected a tensor"),
        ({"weight": 3}, "is a dict, expected a tensor"),
    ],
)
def test_tensors_that_are_none_are_all_named(tmp_path: Path, tensor: Any, words: str) -> None:
    torch_save(tmp_path / "bad.pth", {"norm.weight": tensor, "also": tensor, "rope.freqs": tensor})
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    found = message(tmp_path / "bad.pth")
    assert found.count(words) == 2, found
    assert "norm.weight" in found
    assert "also" in found
    assert "rope.freqs" not in found


def test_a_tuple_of_tuples_in_the_place_of_a_name_ends(tmp_path: Path) -> None:
    storage = b"(Vstorage\nctorch\nFloatStorage\n%bVcpu\nK\1tQ"
    body = b"}Vnorm.weight\nctorch._utils\n_rebuild_tensor_v2\n(" + storage % NESTED + b"K\0(K\1t(K\1ttRs."
    write_zip(tmp_path / "bad.pth", body, {"data/0": bytes(4)})
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    assert "norm.weight is in no storage" in message(tmp_path / "bad.pth")


def test_a_few_bytes_are_no_large_model(tmp_path: Path) -> None:
    storage = Storage(np.ones(1000, np.float32))
    torch_save(tmp_path / "bad.pth", {f"{i}.weight": View(storage, 0, (1000,), (1,)) for i in range(100)})
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    assert "tensors of 400000 bytes in a file of" in message(tmp_path / "bad.pth")


def test_an_encrypted_archive(tmp_path: Path) -> None:
    path = write(tmp_path / "model", random_weights())
    file = path / "consolidated.00.pth"
    data = bytearray(file.read_bytes())
    for mark, at in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        data[data.index(mark) + at] |= 1
    file.write_bytes(data)
    assert "encrypted" in message(path)


def moved(data: bytes, offset: int) -> bytes:
    """A zip archive whose first member begins at an offset of 64 bits, in an extra field (PKWARE APPNOTE, 4.5.3)."""
    end = data.rindex(b"PK\5\6")
    size, first = struct.unpack_from("<II", data, end + 12)
    directory, ending = bytearray(data[first : first + size]), bytearray(data[end:])
    names, extras = struct.unpack_from("<HH", directory, 28)
    directory[46 + names : 46 + names + extras] = extra = struct.pack("<HHQ", 1, 8, offset)
    struct.pack_into("<H", directory, 30, len(extra))
    struct.pack_into("<I", directory, 42, 0xFFFFFFFF)
    struct.pack_into("<I", ending, 12, len(directory))
    return data[:first] + bytes(directory) + bytes(ending)


def test_archives_that_are_none(tmp_path: Path) -> None:
    weights = random_weights()
    path = write(tmp_path / "model", weights)
    file = path / "consolidated.00.pth"
    data = file.read_bytes()
    for length in [4, 5, 100, *range(200, len(data), 4999), *range(len(data) - 60, len(data))]:
        file.write_bytes(data[:length])
        assert "damaged or incomplete zip archive" in message(path)
    for offset in (2**62, 2**63, 2**64 - 1):
        file.write_bytes(moved(data, offset))
        assert "damaged or incomplete zip archive" in message(path)
    torch_save(file, {name: whole(a) for name, a in weights.items()}, how=zipfile.ZIP_DEFLATED)
    assert "compressed" in message(path)
    torch_save(file, {name: whole(a) for name, a in weights.items()}, order=b"big")
    assert "byte order b'big'" in message(path)
    write_zip(file, b"", {})
    file.write_bytes(file.read_bytes().replace(b"data.pkl", b"data.txt"))
    assert "no data.pkl" in message(path)
    file.write_bytes(b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(100))
    assert "zip layout of PyTorch 1.6" in message(path)
    assert "zip layout of PyTorch 1.6" in message(file)


def test_all_damaged_shards_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "model", random_weights(), 2)
    for i in range(2):
        os.truncate(path / f"consolidated.{i:02}.pth", 1000)
    found = message(path)
    assert "consolidated.00.pth" in found
    assert "consolidated.01.pth" in found


def test_a_local_header_that_lies(tmp_path: Path) -> None:
    path = write(tmp_path / "model", random_weights())
    file = path / "consolidated.00.pth"
    data = bytearray(file.read_bytes())
    struct.pack_into("<H", data, data.rindex(b"PK\3\4") + 26, 0xFFFF)
    file.write_bytes(data)
    assert "damaged or incomplete" in message(path)


def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model", random_weights(), 2)
    expected = checkpoint.load(path, dtype="int8")
    monkeypatch.setattr(build, "_BLOCK", 100)
    found = checkpoint.load(path, dtype="int8")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
