"""Checkpoints by their address on the Hugging Face Hub, from a cache made here; nothing is fetched."""

import dataclasses
import hashlib
import sys
from pathlib import Path

import gguf_writer
import hf
import oracle
import pytest
from console import Run, error

from jllama import LLM, checkpoint
from jllama.checkpoint import CheckpointError, hub
from jllama.checkpoint.catalog import ADDRESSES
from jllama.config import Config

SMALL = Config(dim=16, hidden_dim=24, n_layers=1, n_heads=2, n_kv_heads=2, vocab_size=40, max_seq_len=16)
COMMIT = "c" * 40
REVISIONS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the library's cache with one model in two revisions, and keep it offline."""
    constants = pytest.importorskip("huggingface_hub.constants")
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The environment is read when the library is imported, which may have been before.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--tiny.model"
    (repository / "refs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    for i, (name, commit) in enumerate(REVISIONS.items()):
        (repository / "refs" / name).write_text(commit)
        weights = oracle.random_weights(SMALL, tied=True, seed=i)
        hf.write_llama(repository / "snapshots" / commit, weights, SMALL)
    return repository


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf://owner/tiny.model", "main"),
        ("hf://owner/tiny.model@main", "main"),
        ("hf://owner/tiny.model@v1", "v1"),
        (f"hf://owner/tiny.model@{REVISIONS['v1']}", "v1"),
        (Path("hf://owner/tiny.model@v1"), "v1"),
    ],
)
def test_an_address_is_a_folder_of_the_cache(cache: Path, address: str, name: str) -> None:
    folder = hub.local(address)
    assert folder == cache / "snapshots" / REVISIONS[name]
    assert checkpoint.load(address).config == dataclasses.replace(SMALL, tied=True)


def test_what_is_not_in_the_cache_is_named(cache: Path) -> None:
    for address in ("hf://owner/other", "hf://owner/tiny.model@v2"):
        with pytest.raises(CheckpointError, match=f"{address}: cannot be fetched from huggingface.co: ") as e:
            checkpoint.load(address)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "address",
    [
        "hf://",
        "hf://gpt2",
        "hf://a/b/c",
        "hf://a/b@",
        "hf://a/b@c@d",
        "hf:///b",
        "hf://@c",
        "hf://a/b:",
        "hf://a/b/c.gguf:Q4_0",
    ],
)
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected hf://owner/name or hf://owner/name@revision"):
        hub.local(address)


@pytest.mark.parametrize("path", ["model.bin", "b", "hf", "hf/x", "x/hf:/a/b"])
def test_other_paths_stay(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch()
    assert hub.local(path) == hub.local(Path(path)) == Path(path)
    assert hub.local(tmp_path / path) == tmp_path / path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.local(f"~/{path}") == tmp_path / path


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/nope", ""),
        ("nope.gguf", ""),
        ("smolm2", r"; did you mean smollm2\?"),
        ("./owner/name", "; on the Hugging Face Hub it would be hf://owner/name"),
        ("owner/name", "; on the Hugging Face Hub it would be hf://owner/name"),
        ("https://host/a.bin", "; addresses are hf://owner/name, anything else has to be downloaded first"),
    ],
)
def test_a_path_with_nothing_there_is_named(
    path: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"^{Path(path)}: no such file or folder{hint}$"):
        LLM.load(path)


def test_a_folder_of_one_gguf_model_is_that(tmp_path: Path) -> None:
    weights = oracle.random_weights(gguf_writer.CONFIG, tied=True)
    assert hub.local(tmp_path) == tmp_path
    one, other = (gguf_writer.write(tmp_path / name, weights) for name in ("a.gguf", "b.gguf"))
    with pytest.raises(CheckpointError, match=r"2 GGUF models here, expected one of them: a\.gguf; b\.gguf"):
        hub.local(tmp_path)
    other.unlink()
    assert hub.local(tmp_path) == one
    assert checkpoint.load(tmp_path).config == dataclasses.replace(gguf_writer.CONFIG, tied=True)
    first = one.rename(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").touch()
    assert hub.local(tmp_path) == first
    (tmp_path / "config.json").touch()
    assert hub.local(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf://owner/tiny.model/m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
        ("hf://owner/tiny.model/m.Q8_0.gguf@v1", "m.Q8_0.gguf"),
        ("hf://owner/tiny.model:Q4_K_M", "m-Q4_K_M.gguf"),
        ("hf://owner/tiny.model:q8_0@v1", "m.Q8_0.gguf"),
        ("hf://owner/tiny.model:F16", "big/m-F16-00001-of-00002.gguf"),
        ("hf://owner/tiny.model/big/m-F16-00001-of-00002.gguf", "big/m-F16-00001-of-00002.gguf"),
    ],
)
def test_a_gguf_file_of_a_repository(cache: Path, address: str, name: str) -> None:
    for commit in REVISIONS.values():
        folder = cache / "snapshots" / commit
        (folder / "big").mkdir()
        for each in ("m-Q4_K_M.gguf", "m.Q8_0.gguf", *(f"big/m-F16-0000{i}-of-00002.gguf" for i in (1, 2))):
            (folder / each).touch()
    assert hub.local(address) == cache / "snapshots" / REVISIONS["v1" if "@v1" in address else "main"] / name
    with pytest.raises(CheckpointError, match=r"0 such GGUF files, expected one; there are: m-F16.*; m-Q4_K_M\.gguf"):
        hub.local("hf://owner/tiny.model:Q9_9")


def test_a_repository_of_gguf_files_alone_says_how_to_name_one(cache: Path) -> None:
    (cache / "snapshots" / REVISIONS["main"] / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a GGUF file is hf://owner/tiny\.model/FILE\.gguf or :Q4_K_M after it"):
        hub.local("hf://owner/tiny.model")


def test_the_library_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        CheckpointError, match=r"hf://a/b: needs the huggingface_hub library: pip install 'jllama\[hub\]'"
    ):
        checkpoint.load("hf://a/b")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("hf://a/b/m-Q4_0.gguf", ["m-Q4_0.gguf"]),
        ("hf://a/b:q4_0", ["big/m-Q4_0-00001-of-00002.gguf", "big/m-Q4_0-00002-of-00002.gguf", "m-Q4_0.gguf"]),
        ("hf://a/b/big/m-Q4_0-00001-of-00002.gguf", [f"big/m-Q4_0-0000{i}-of-00002.gguf" for i in (1, 2)]),
    ],
)
def test_only_the_gguf_file_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, expected: list[str]
) -> None:
    library = pytest.importorskip("huggingface_hub")
    filtered = pytest.importorskip("huggingface_hub.utils").filter_repo_objects
    there = ["m-Q4_0.gguf", "m-Q8_0.gguf", "big/m-Q4_0-00001-of-00002.gguf", "big/m-Q4_0-00002-of-00002.gguf", "x.json"]
    asked: list[str] = []

    def snapshot_download(repo_id: str, *, revision: object, **options: object) -> str:
        asked.extend(sorted(filtered(there, **options)))
        return str(tmp_path)

    monkeypatch.setattr(library, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="0 such GGUF files"):
        hub.local(address)
    assert asked == expected


def test_only_what_is_read_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = pytest.importorskip("huggingface_hub")
    filtered = pytest.importorskip("huggingface_hub.utils").filter_repo_objects
    there = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    there += ["tokenizer.model", "tokenizer.json", "merges.txt", "generation_config.json"]
    others = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.safetensors",
        "a.png",
    ]

    def snapshot_download(repo_id: str, **options: object) -> str:
        assert (repo_id, options.pop("revision")) == ("a/b", None)
        assert sorted(filtered(there + others, **options)) == sorted(there)
        return str(tmp_path)

    monkeypatch.setattr(library, "snapshot_download", snapshot_download)
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    assert hub.local("hf://a/b") == tmp_path


@pytest.fixture
def qwen(cache: Path) -> Path:
    """Add a file of the catalogue to the cache, laid out as the library does; returns the repository's folder."""
    repository = cache.parent / "models--Qwen--Qwen3-0.6B-GGUF"
    for folder in ("refs", "blobs", f"snapshots/{COMMIT}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    blob = repository / "blobs" / hashlib.sha256(b"a model").hexdigest()
    blob.write_bytes(b"a model")
    (repository / f"snapshots/{COMMIT}/Qwen3-0.6B-Q8_0.gguf").symlink_to(blob)
    return repository


def test_a_name_of_the_catalogue_is_pulled_listed_and_removed(run: Run, qwen: Path) -> None:
    path = qwen / f"snapshots/{COMMIT}/Qwen3-0.6B-Q8_0.gguf"
    assert hub.local("qwen3:0.6b") == path
    assert run("pull", "qwen3:0.6b")[:2] == (0, f"{path}\n")
    assert run("pull", "hf://owner/tiny.model@v1")[0] == 0
    lines = {line.split()[0]: line.split()[1:] for line in run("list")[1].splitlines()}
    assert lines["qwen3:0.6b"] == ["0.00", "GB", "hf://Qwen/Qwen3-0.6B-GGUF:Q8_0"]
    assert lines["hf://owner/tiny.model"] == ["0.00", "GB"]
    assert lines["stories"][1] == "GB"
    assert lines["qwen3:8b"] == ["hf://Qwen/Qwen3-8B-GGUF:Q4_K_M"]
    assert run("rm", "qwen3:0.6b")[0] == 0
    assert not path.exists()
    assert "not in the cache; there are: hf://owner/tiny.model" in error(run("rm", "qwen3:0.6b"))
    assert run("rm", "hf://owner/tiny.model")[0] == 0
    assert "not in the cache; there are: none" in error(run("rm", "hf://owner/tiny.model"))


def test_a_damaged_file_is_pulled_again(run: Run, qwen: Path) -> None:
    (blob,) = (qwen / "blobs").iterdir()
    blob.write_bytes(b"a modem")
    assert f"expected {blob.name}; pull it again" in error(run("pull", "qwen3:0.6b"))
    assert not blob.exists()
    assert "hf://Qwen/Qwen3-0.6B-GGUF:Q8_0: " in error(run("pull", "qwen3:0.6b"))


@pytest.mark.parametrize("name", ["stories", "qwen3:7b", "model.gguf"])
def test_only_what_lies_on_the_hub_is_pulled(run: Run, name: str) -> None:
    assert f"{name}: expected a model to pull: hf://owner/name, or one of gemma3:1b" in error(run("pull", name))


def test_every_name_of_the_catalogue_stands_for_one_file() -> None:
    for name, address in ADDRESSES.items():
        assert hub.is_name(name)
        assert address == f"hf://{hub.repository(address)}:{address.rpartition(':')[2]}"


def test_without_a_cache_nothing_is_listed_as_here(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "nowhere"))
    code, out, _ = run("list")
    assert (code, "hf://owner/tiny.model" in out, "qwen3:0.6b" in out) == (0, False, True)
