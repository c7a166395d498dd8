"""Checkpoints by their address on the Hugging Face Hub, from a cache made here; nothing is fetched."""

import dataclasses
import sys
from pathlib import Path

import hf
import oracle
import pytest

from jllama import checkpoint
from jllama.checkpoint import CheckpointError, hub
from jllama.config import Config

SMALL = Config(dim=16, hidden_dim=24, n_layers=1, n_heads=2, n_kv_heads=2, vocab_size=40, max_seq_len=16)
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
        with pytest.raises(CheckpointError, match=f"{address}: cannot be fetched: ") as e:
            checkpoint.load(address)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "address", ["hf://", "hf://gpt2", "hf://a/b/c", "hf://a/b@", "hf://a/b@c@d", "hf:///b", "hf://@c"]
)
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected hf://owner/name or hf://owner/name@revision"):
        hub.local(address)


@pytest.mark.parametrize("path", ["model.bin", "/a/b", "hf", "hf/x", "x/hf://a/b"])
def test_other_paths_stay(path: str) -> None:
    assert hub.local(path) == hub.local(Path(path)) == Path(path)


def test_the_library_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        CheckpointError, match=r"hf://a/b: needs the huggingface_hub library: pip install 'jllama\[hub\]'"
    ):
        checkpoint.load("hf://a/b")


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
    assert hub.local("hf://a/b") == tmp_path
