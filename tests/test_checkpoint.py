"""Loading, saving and making checkpoints, and refusing what is none."""

import dataclasses
import math
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from jllama import checkpoint
from jllama.checkpoint import CheckpointError, build, llama2c, safetensors
from jllama.config import Config, ConfigError, from_toml
from jllama.model import Params
from jllama.rope import Llama3
from jllama.tensors import fitted
from jllama.weights import Groups, Plain, Weight

ROOT = Path(__file__).resolve().parents[1]

# In version 2 the group size is 16, and rows of w2 (24 wide) end within a group.
SMALL = Config(dim=16, hidden_dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=40, max_seq_len=10)
WIDE = Config(dim=32, hidden_dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=40, max_seq_len=10)  # with groups
HEADER = struct.pack("<7i", 16, 24, 2, 4, 2, 40, 10)


def small_file(folder: Path, *, tied: bool) -> tuple[Path, oracle.Weights]:
    weights = oracle.random_weights(SMALL, tied=tied)
    oracle.write_v0(folder / "small.bin", weights, SMALL)
    return folder / "small.bin", weights


def random_params(config: Config, *, tied: bool) -> Params:
    weights = oracle.random_weights(config, tied=tied)
    sources = {name: build.Source(a.shape, lambda i, j, a=a: a[i:j]) for name, a in weights.items()}
    return build.build_params(fitted(config, weights), sources, dtype="float32", origin="test")


def arrays(params: Params) -> oracle.Weights:
    return {name: source.read(0, source.shape[0]) for name, source in build.sources_of(params).items()}


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)  # also fails where the trees or configs differ


def header(**fields: int) -> bytes:
    return struct.pack("<7i", *dict(zip(llama2c.FIELDS, struct.unpack("<7i", HEADER), strict=True), **fields).values())


def versioned(version: int, fields: bytes = HEADER, group_size: int = 16) -> bytes:
    return (struct.pack("<Ii", llama2c.MAGIC, version) + fields + struct.pack("<Bi", 1, group_size)).ljust(256, b"\0")


# --- what is loaded


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_fused_and_unchanged(tmp_path: Path, tied: bool) -> None:
    path, w = small_file(tmp_path, tied=tied)
    params = checkpoint.load(path)
    assert params.config == dataclasses.replace(SMALL, tied=tied)
    np.testing.assert_array_equal(params.embedding.decode(), w["tok_embeddings.weight"])
    for i, layer in enumerate(params.layers):
        attention = [w[f"layers.{i}.attention.{name}.weight"] for name in ("wq", "wk", "wv")]
        np.testing.assert_array_equal(layer.wqkv.weight.decode(), np.concatenate(attention))
        feed_forward = [w[f"layers.{i}.feed_forward.{name}.weight"] for name in ("w1", "w3")]
        np.testing.assert_array_equal(layer.w13.weight.decode(), np.concatenate(feed_forward))
    assert_same(arrays(params), dict(sorted(w.items())))
    assert (params.output is None) == tied


def test_untied_head_is_read_after_the_rotary_tables(tmp_path: Path) -> None:
    weights = oracle.random_weights(SMALL, tied=True)
    weights["output.weight"] = 2 * weights["tok_embeddings.weight"]
    oracle.write_v0(tmp_path / "untied.bin", weights, SMALL)
    params = checkpoint.load(tmp_path / "untied.bin")
    assert isinstance(params.output, Plain)
    np.testing.assert_array_equal(params.output.values, 2 * weights["tok_embeddings.weight"])


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("dtype", build.DTYPES)
def test_dtypes(tmp_path: Path, version: int, dtype: str) -> None:
    checkpoint.save(random_params(WIDE, tied=False), tmp_path / "v.bin", version=version)
    exact, params = (checkpoint.load(tmp_path / "v.bin", dtype=name) for name in ("float32", dtype))

    def compare(exact_weight: Weight, weight: Weight) -> None:
        assert isinstance(exact_weight, Plain)
        exact_values = exact_weight.values
        if isinstance(weight, Groups):
            assert weight.dtype == dtype
            jax.tree.map(np.testing.assert_array_equal, weight, Groups.encode(np.asarray(exact_values), dtype))
        else:
            assert isinstance(weight, Plain)
            np.testing.assert_array_equal(weight.values, exact_values.astype(dtype))

    compare(exact.embedding, params.embedding)
    assert exact.output is not None
    assert params.output is not None
    compare(exact.output, params.output)
    assert params.norm.weight.dtype == jnp.float32
    for a, b in zip(exact.layers, params.layers, strict=True):
        for name in ("wqkv", "wo", "w13", "w2"):
            compare(getattr(a, name).weight, getattr(b, name).weight)
            assert isinstance(getattr(b, name).weight, Groups) == dtype.startswith("int")
        for name in ("attention_norm", "ffn_norm"):
            assert getattr(b, name).weight.dtype == jnp.float32
            np.testing.assert_array_equal(getattr(a, name).weight, getattr(b, name).weight)


@pytest.mark.parametrize(("version", "dtype"), [(0, "float32"), (1, "float32"), (2, "q80")])
def test_auto_keeps_what_the_file_stores(tmp_path: Path, version: int, dtype: str) -> None:
    checkpoint.save(random_params(WIDE, tied=True), tmp_path / "v.bin", version=version)
    exact, stored = (checkpoint.load(tmp_path / "v.bin", dtype=name) for name in ("float32", "auto"))
    assert stored.layers[1].w2.weight.dtype == dtype
    jax.tree.map(np.testing.assert_array_equal, arrays(stored), arrays(exact))


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, dtype: str) -> None:
    params = random_params(SMALL, tied=False)
    checkpoint.save(params, tmp_path / "whole.bin", version=version)
    whole = checkpoint.load(tmp_path / "whole.bin", dtype=dtype)
    monkeypatch.setattr(build, "_BLOCK", 50)
    checkpoint.save(params, tmp_path / "blocks.bin", version=version)
    assert (tmp_path / "blocks.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert_same(checkpoint.load(tmp_path / "whole.bin", dtype=dtype), whole)


def test_rope_theta_is_recorded(tmp_path: Path) -> None:
    path, _ = small_file(tmp_path, tied=True)
    assert checkpoint.load(path).config.rope_theta == 10000.0
    assert checkpoint.load(path, rope_theta=1e6).config == dataclasses.replace(SMALL, rope_theta=1e6, tied=True)
    assert checkpoint.load(path).config.norm_eps == 1e-5
    with pytest.raises(ConfigError, match="rope_theta = -1"):
        checkpoint.load(path, rope_theta=-1.0)


def test_loading_writes_nothing_to_a_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint.load(small_file(tmp_path, tied=True)[0])
    assert capfd.readouterr() == ("", "")


# --- what is saved


@pytest.mark.parametrize("tied", [True, False])
def test_version_0_round_trip(tmp_path: Path, tied: bool) -> None:
    path, weights = small_file(tmp_path, tied=tied)
    checkpoint.save(checkpoint.load(path), tmp_path / "saved.bin")
    before, after = path.read_bytes(), (tmp_path / "saved.bin").read_bytes()
    end = len(before) - (0 if tied else weights["output.weight"].nbytes)
    start = end - 4 * SMALL.max_seq_len * SMALL.head_dim
    assert (after[:start], after[end:]) == (before[:start], before[end:])
    tables = np.frombuffer(after[start:end], "<f4").reshape(2, SMALL.max_seq_len, SMALL.head_dim // 2)
    angles = np.outer(np.arange(SMALL.max_seq_len), oracle.frequencies(SMALL))
    np.testing.assert_allclose(tables, [np.cos(angles), np.sin(angles)], atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("version", [0, 1])
def test_float_versions_keep_every_bit(tmp_path: Path, version: int, tied: bool) -> None:
    params = random_params(SMALL, tied=tied)
    checkpoint.save(params, tmp_path / "a.bin", version=version)
    loaded = checkpoint.load(tmp_path / "a.bin")
    assert_same(loaded, params)
    checkpoint.save(loaded, tmp_path / "b.bin", version=version)
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_int8_groups_run_over_the_flattened_matrix(tmp_path: Path, tied: bool) -> None:
    params = random_params(WIDE, tied=tied)
    weights = arrays(params)
    weights["layers.1.feed_forward.w2.weight"].flat[32:64] = 0  # one group without a scale
    sources = {name: build.Source(a.shape, lambda i, j, a=a: a[i:j]) for name, a in weights.items()}
    params = build.build_params(params.config, sources, dtype="float32", origin="test")
    checkpoint.save(params, tmp_path / "v2.bin", version=2)
    data = (tmp_path / "v2.bin").read_bytes()
    assert struct.unpack_from("<Bi", data, 36) == (tied, 32)

    stored = llama2c.read(tmp_path / "v2.bin").sources
    offset = 256 + 4 * WIDE.dim * (2 * WIDE.n_layers + 1)
    order = ["tok_embeddings", *(f"layers.{{}}.attention.w{c}" for c in "qkvo")]
    order += [f"layers.{{}}.feed_forward.w{c}" for c in "123"] + ([] if tied else ["output"])
    layers = range(WIDE.n_layers)
    for name in (f"{kind.format(i)}.weight" for kind in order for i in (layers if "{}" in kind else [0])):
        count = weights[name].size
        values = np.frombuffer(data, np.int8, count, offset).astype(np.float32)
        scales = np.repeat(np.frombuffer(data, "<f4", count // 32, offset + count), 32)
        offset += count + count // 8
        np.testing.assert_array_equal(stored[name].read(0, len(weights[name])).ravel(), values * scales)
        assert (np.abs(values * scales - weights[name].ravel()) <= scales * 0.5001).all()
    assert offset == len(data)


@pytest.mark.parametrize(("dim", "n_heads", "group_size"), [(288, 6, 32), (64, 8, 64), (12, 2, 4), (10, 1, 2)])
def test_group_size_is_halved_until_it_divides_dim(tmp_path: Path, dim: int, n_heads: int, group_size: int) -> None:
    config = Config(dim, 6, 1, n_heads, n_heads, vocab_size=5, max_seq_len=4)
    checkpoint.save(random_params(config, tied=True), tmp_path / "v2.bin", version=2)
    assert struct.unpack_from("<i", (tmp_path / "v2.bin").read_bytes(), 37) == (group_size,)
    assert checkpoint.load(tmp_path / "v2.bin").config == dataclasses.replace(config, tied=True)


def test_other_dtypes_are_widened(tmp_path: Path) -> None:
    path, _ = small_file(tmp_path, tied=False)
    for dtype in ("bfloat16", "int8"):
        params = checkpoint.load(path, dtype=dtype)
        checkpoint.save(params, tmp_path / "saved.bin", version=1)
        saved = checkpoint.load(tmp_path / "saved.bin")
        np.testing.assert_array_equal(saved.embedding.decode(), params.embedding.decode())
        np.testing.assert_array_equal(saved.layers[1].w13.weight.decode(), params.layers[1].w13.weight.decode())


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 8}, ["head_dim = 8"]),
        ({"norm_eps": 1e-6}, ["norm_eps = 1e-06"]),
        ({"rope_theta": 500000.0}, ["rope_theta = 500000.0"]),
        ({"rope_scaling": Llama3(8.0, 1.0, 4.0, 64), "norm_eps": 1e-6}, ["rope_scaling", "norm_eps"]),
    ],
)
def test_what_a_file_cannot_hold_is_refused(
    tmp_path: Path, version: int, changes: dict[str, Any], words: list[str]
) -> None:
    params = checkpoint.random(dataclasses.replace(SMALL, **changes))
    with pytest.raises(CheckpointError) as e:
        checkpoint.save(params, tmp_path / "no.bin", version=version)
    assert all(word in str(e.value) for word in [str(tmp_path / "no.bin"), *words])
    assert list(tmp_path.iterdir()) == []


def test_unknown_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="version = 3"):
        checkpoint.save(random_params(SMALL, tied=True), tmp_path / "no.bin", version=3)


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = small_file(tmp_path, tied=True)
    before, params, write = path.read_bytes(), checkpoint.load(path), llama2c._write
    calls = []

    def full_disk(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        write(*args)

    monkeypatch.setattr(llama2c, "_write", full_disk)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(params, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    params, victim = checkpoint.random(SMALL), tmp_path / "victim"
    victim.write_text("mine")
    for form in ("llama2c", "huggingface"):
        part = tmp_path / f".new-{form}.{os.getpid()}.part"
        part.symlink_to(victim)
        path = tmp_path / f"new-{form}"
        if form == "llama2c":
            checkpoint.save(params, path)
            assert not path.is_symlink()
            assert checkpoint.load(path).config == SMALL
        else:
            with pytest.raises(FileExistsError):
                checkpoint.save(params, path, form=form)
        assert victim.read_text() == "mine"


def test_a_save_that_is_broken_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is by a signal, which comes as an exception of another kind than Exception."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llama2c, "_write", interrupted)
    monkeypatch.setattr(safetensors, "write", interrupted)
    for form in ("llama2c", "huggingface"):
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(checkpoint.random(SMALL), tmp_path / "new", form=form)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF])
def test_numbers_that_are_not_finite_show_without_warnings(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "model.bin"
    checkpoint.save(checkpoint.random(WIDE), path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 28, bits)
    path.write_bytes(data)
    for dtype in ("float32", "bfloat16", "int8"):
        embedding = checkpoint.load(path, dtype=dtype).embedding
        shown = embedding.d if dtype == "int8" else embedding.values
        assert not np.isfinite(np.asarray(shown, np.float32)).all()


def test_scales_that_are_not_finite_show_without_warnings(tmp_path: Path) -> None:
    """NumPy's warnings are errors here; whoever loads the file sees the values in the logits."""
    path = tmp_path / "model.bin"
    checkpoint.save(checkpoint.random(WIDE), path, version=2)
    data = bytearray(path.read_bytes())
    at = 256 + (2 * WIDE.n_layers + 1) * WIDE.dim * 4 + WIDE.vocab_size * WIDE.dim  # the embedding's scales
    data[at : at + 8] = struct.pack("<2f", np.inf, np.nan)
    path.write_bytes(data)
    for dtype in ("float32", "bfloat16", "int8"):
        embedding = checkpoint.load(path, dtype=dtype).embedding
        shown = embedding.d if dtype == "int8" else embedding.values
        assert not np.isfinite(np.asarray(shown, np.float32)).all()


# --- what is refused


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("change", [-1, 4, 1])
def test_wrong_size_names_both_sizes(tmp_path: Path, version: int, change: int) -> None:
    path = tmp_path / "v.bin"
    checkpoint.save(random_params(SMALL, tied=True), path, version=version)
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(CheckpointError, match=rf"expected {size} bytes.* found {size + change}"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["empty"]),
        (HEADER[:4], ["expected a header of 28 bytes", "4 bytes"]),
        (HEADER[:27], ["expected a header of 28 bytes", "27 bytes"]),
        (HEADER, ["found 28", "dim 16", "vocab_size 40"]),
        (versioned(1)[:255], ["expected a header of 256 bytes", "255 bytes"]),
        (versioned(1)[:8], ["expected a header of 256 bytes", "8 bytes"]),
        (versioned(0), ["version 0", "expected 1 or 2"]),
        (versioned(3), ["version 3", "expected 1 or 2"]),
        (versioned(-1), ["version -1", "expected 1 or 2"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", ["Git LFS pointer"]),
        (b"GGUF\3\0\0\0" + bytes(40), ["general.architecture"]),
        (b"PK\3\4" + bytes(40), ["zip archive"]),
        (b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", ["pickle", ".pth"]),
        (struct.pack("<Q", 2000) + b'{"__metadata__":{}}', ["safetensors"]),
        (b'{\n "dim": 64\n}\n', ["text"]),
        ('{"ä": "ö"}'.encode(), ["text"]),
        (struct.pack("<ifi", 7, 0.0, 5) + b"<unk>" + struct.pack("<fi", 0.0, 5) + b"\n<s>\n", ["tokenizer"]),
        (struct.pack("<i", 5) + b"<unk>" + struct.pack("<i", 3) + b"<s>", ["tokenizer"]),
        (b"\n\x0e\n\5<unk>\x15\0\0\0\0\x18\2", ["tokenizer"]),
        (struct.pack(">7i", 16, 24, 2, 4, 2, -40, 10), ["big-endian"]),
        (struct.pack(">Ii", llama2c.MAGIC, 1).ljust(256, b"\0"), ["big-endian"]),
        (header(n_heads=7, n_kv_heads=2), ["version 0", "n_heads = 7", "n_kv_heads = 2", "dim = 16"]),
        (header(n_layers=0, max_seq_len=0), ["n_layers = 0", "max_seq_len = 0"]),
        (header(n_kv_heads=0), ["n_kv_heads = 0"]),
        (header(vocab_size=0), ["vocab_size = 0"]),
        (header(dim=20), ["head_dim = 5"]),
        (header(hidden_dim=-24), ["hidden_dim = -24"]),
        (versioned(1, header(vocab_size=-40)), ["version 1", "vocab_size = -40"]),
        (versioned(2, group_size=0), ["group_size = 0"]),
        (versioned(2, group_size=-16), ["group_size = -16"]),
        (versioned(2, group_size=7), ["group_size = 7"]),
    ],
)
def test_foreign_and_broken_files_are_named(tmp_path: Path, data: bytes, words: list[str]) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as e:
        checkpoint.load(path)
    assert all(word in str(e.value) for word in [str(path), *words]), str(e.value)
    assert "\n" not in str(e.value)


def test_folder_and_absent_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"looks like a folder, expected .* llama2\.c"):
        checkpoint.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"absent\.bin: no such file or folder"):
        checkpoint.load(tmp_path / "absent.bin")


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype = 'float16'"):
        checkpoint.load(tmp_path / "any.bin", dtype="float16")
    with pytest.raises(ValueError, match="dtype = 'auto'"):
        checkpoint.random(SMALL, dtype="auto")


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("n_layers", [2**31 - 2**20 - 1, 2**16])
def test_absurd_sizes_fail_at_once(tmp_path: Path, version: int, n_layers: int) -> None:
    large = 2**31 - 2**20 - 1
    fields = struct.pack("<7i", 2**30, large, n_layers, 2**16, 2**16, large, large)
    data = fields if version == 0 else versioned(version, fields)
    (tmp_path / "absurd.bin").write_bytes(data + bytes(1000))
    start = time.process_time()
    with pytest.raises(CheckpointError, match=f"found {len(data) + 1000}"):
        checkpoint.load(tmp_path / "absurd.bin")
    assert time.process_time() - start < 1


@given(st.binary(max_size=300), st.sampled_from([b"", HEADER, versioned(1)[:200], versioned(2)[:200]]))
def test_no_bytes_fail_in_another_way(tmp_path_factory: pytest.TempPathFactory, tail: bytes, head: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.bin"
    path.write_bytes(head + tail)
    with pytest.raises(CheckpointError):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["llama2_13b", "llama2_70b"])
def test_sizes_past_32_bits(tmp_path: Path, name: str) -> None:
    config = from_toml(ROOT / "configs" / f"{name}.toml")
    d, f, kv, v = config.dim, config.hidden_dim, config.kv_dim, config.vocab_size
    layer = 2 * d + 2 * d * d + 2 * d * kv + 3 * d * f
    size = 28 + 4 * (2 * v * d + config.n_layers * layer + d + config.max_seq_len * config.head_dim)
    assert llama2c.file_size(llama2c.Header(0, config)) == size
    path = tmp_path / "sparse.bin"
    path.write_bytes(llama2c._pack(llama2c.Header(0, config)))
    try:
        os.truncate(path, size)
    except OSError as e:
        pytest.skip(f"this file system makes no sparse files of {size} bytes: {e}")
    with open(path, "r+b") as file:
        file.seek(size - 4)
        file.write(struct.pack("<f", 1.5))
    source = llama2c.read(path).sources["output.weight"]
    np.testing.assert_array_equal(source.read(v - 1, v)[0, -2:], [0, 1.5])


# --- building from named tensors


def test_every_tensor_is_checked_before_one_is_read() -> None:
    def unread(start: int, stop: int) -> build.Array:
        raise AssertionError("read before the check")

    sources = {name: build.Source(a.shape, unread) for name, a in oracle.random_weights(SMALL, tied=True).items()}
    del sources["norm.weight"], sources["layers.1.attention.wk.weight"]
    sources["layers.0.feed_forward.w2.weight"] = build.Source((24, 16), unread)
    sources["rope.freqs"] = build.Source((2,), unread)
    with pytest.raises(CheckpointError) as e:
        build.build_params(SMALL, sources, dtype="float32", origin="here.bin")
    words = ("here.bin", "norm.weight is missing", "layers.1.attention.wk.weight is missing, expected [8, 16]")
    words += ("layers.0.feed_forward.w2.weight is [24, 16], expected [16, 24]", "rope.freqs is not a tensor")
    assert all(word in str(e.value) for word in words), str(e.value)


def test_every_row_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_BLOCK", 50)
    read: list[tuple[str, int]] = []

    def source(name: str, array: build.Array) -> build.Source:
        def rows(start: int, stop: int) -> build.Array:
            read.extend((name, row) for row in range(start, stop))
            return array[start:stop]

        return build.Source(array.shape, rows)

    weights = oracle.random_weights(SMALL, tied=False)
    build.build_params(SMALL, {n: source(n, a) for n, a in weights.items()}, dtype="int8", origin="test")
    assert sorted(read) == sorted((name, row) for name, array in weights.items() for row in range(len(array)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", build.DTYPES)
def test_random_weights(dtype: str, tied: bool) -> None:
    config = Config(64, 96, 2, n_heads=4, n_kv_heads=2, vocab_size=128, max_seq_len=8, head_dim=24, tied=tied)
    params = checkpoint.random(config, dtype=dtype, seed=3)
    assert_same(params, checkpoint.random(config, dtype=dtype, seed=3))
    assert (params.output is None) == tied
    exact, weights = arrays(checkpoint.random(config, seed=3)), arrays(params)
    for name, array in weights.items():
        if array.ndim == 1:
            np.testing.assert_array_equal(array, 1)
        else:
            assert math.isclose(array.std() * array.shape[1] ** 0.5, 1, rel_tol=0.05), name
            np.testing.assert_allclose(array, exact[name], atol=0.04 if dtype == "int4" else 0.01)
    other = checkpoint.random(config, seed=4)
    assert not np.array_equal(other.embedding.decode(), params.embedding.decode())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("dtype", build.DTYPES)
def test_memory_peaks_at_the_final_weights(tmp_path: Path, version: int, dtype: str) -> None:
    """A child's `ru_maxrss` starts at its parent's, so the kernel's own high-water mark is read in its place."""
    config = from_toml(ROOT / "configs" / "stories110M.toml")
    head = llama2c.Header(version, config, 64 if version == 2 else 0)
    path = tmp_path / "sparse.bin"
    path.write_bytes(llama2c._pack(head))
    os.truncate(path, llama2c.file_size(head))
    command = [sys.executable, "-c", tiny.PEAK, str(path), dtype]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    grown, weights = map(int, result.stdout.split())
    assert 0.95 * weights < grown < 1.2 * weights


# --- reference files


def test_reference_versions_hold_the_same_weights(shared: Path) -> None:
    v0, v1 = (checkpoint.load(shared / "models" / "stories260K" / f"stories260K{v}.bin") for v in ("", "_v1"))
    assert_same(v0, v1)
    assert v0.config == from_toml(ROOT / "configs" / "stories260K.toml")


@pytest.mark.parametrize(("name", "version"), [("_v1", 1), ("_q80", 2)])
def test_saved_files_equal_the_exporters(shared: Path, tmp_path: Path, name: str, version: int) -> None:
    folder = shared / "models" / "stories260K"
    checkpoint.save(checkpoint.load(folder / "stories260K.bin"), tmp_path / "saved.bin", version=version)
    assert (tmp_path / "saved.bin").read_bytes() == (folder / f"stories260K{name}.bin").read_bytes()


@pytest.mark.parametrize("name", ["stories260K", "stories260K_untied"])
def test_version_0_differs_in_the_rotary_tables_alone(shared: Path, tmp_path: Path, name: str) -> None:
    path = shared / "models" / "stories260K" / f"{name}.bin"
    params = checkpoint.load(path)
    checkpoint.save(params, tmp_path / "saved.bin")
    assert_same(checkpoint.load(tmp_path / "saved.bin"), params)
    before, after = (np.frombuffer(p.read_bytes()[28:], "<f4") for p in (path, tmp_path / "saved.bin"))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)
    tables = len(before) - 512 * 8 - (0 if params.output is None else 512 * 64)
    np.testing.assert_array_equal(after[:tables], before[:tables])


@pytest.mark.parametrize("name", ["stories260K", "stories260K_untied", "stories260K_q80", "stories260K_q80_gs4"])
def test_oracle_gives_the_reference_logits(shared: Path, name: str) -> None:
    contents = llama2c.read(shared / "models" / "stories260K" / f"{name}.bin")
    weights = {n: np.array(source.read(0, source.shape[0])) for n, source in contents.sources.items()}
    with np.load(shared / "golden" / "logits.npz") as golden:
        logits = oracle.forward(weights, contents.config, golden[f"{name}.input_ids"])
        np.testing.assert_allclose(logits, golden[f"{name}.logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stories260K/tok512.bin", "tokenizer"),
        ("stories260K/tok512_old.bin", "tokenizer"),
        ("llama2-tokenizer/tokenizer.model", "tokenizer"),
        ("llama2-tokenizer/tokenizer.bin", "tokenizer"),
        ("gpt2-tokenizer/merges.txt", "text"),
        ("llama2-tokenizer", "folder"),
    ],
)
def test_foreign_reference_files_are_named(shared: Path, name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"looks like a {words}"):
        checkpoint.load(shared / "models" / name)
