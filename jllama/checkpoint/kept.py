"""Models of the Hugging Face Hub that are on this machine: which there are, whether they are whole, and removing one.

They lie in the Hub's own cache, which other programs share. A repository's `blobs/` has contents, each named by its
hash, and `snapshots/REVISION/` links to them. Source: huggingface_hub, "Understand caching".
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from jllama.checkpoint import hub
from jllama.checkpoint.build import CheckpointError
from jllama.checkpoint.catalog import ADDRESSES
from jllama.errors import listed, shown

_SHA256 = re.compile(r"[0-9a-f]{64}")  # small files are named by Git's hash


class Repository(NamedTuple):
    """What the cache has of a repository: one model, or several GGUF files.

    Args:
      address: the short name of the model, or `hf://owner/name`.
      n_bytes: its size on disk.
      path: its folder.
    """

    address: str
    n_bytes: int
    path: Path


def repositories() -> list[Repository]:
    """List the models in the cache, by address.

    Raises:
      CheckpointError: the huggingface_hub library is missing.
    """
    return _listed(_models(_cache()))


def remove(address: str) -> int:
    """Remove a repository from the cache, with all revisions and files of it; returns the bytes that are free again.

    Raises:
      CheckpointError: it isn't there, the address is wrong, or the library is missing.
    """
    name = hub.repository(ADDRESSES.get(address, address))
    cache = _cache()
    revisions = [v.commit_hash for r in _models(cache) if r.repo_id == name for v in r.revisions]
    if not revisions:
        there = listed([shown(each.address) for each in _listed(_models(cache))]) or "none"
        raise CheckpointError(f"{address}: not in the cache; there are: {there}")
    strategy = cache.delete_revisions(*revisions)
    strategy.execute()
    freed: int = strategy.expected_freed_size
    return freed


def check(path: Path) -> None:
    """Compare what was fetched with its hash.

    Args:
      path: of a file, or a folder of files, in the cache.

    Raises:
      CheckpointError: a file is not what the Hub has under this name; it is removed, so that it can be fetched again.
    """
    for file in sorted(path.iterdir()) if path.is_dir() else sorted(path.parent.glob(_parts_of(path.name))):
        blob = file.resolve()
        if not _SHA256.fullmatch(blob.name):
            continue
        with open(blob, "rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != blob.name:
            file.unlink()
            blob.unlink()
            raise CheckpointError(f"{file}: damaged: its SHA-256 is {found}, expected {blob.name}; pull it again")


def _parts_of(name: str) -> str:
    """Return a pattern of a file's name and the other parts of its model."""
    return re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-*-of-\1", re.sub(r"([*?[])", r"[\1]", name))


def _cache() -> Any:
    """Look at the cache; None where there is none."""
    library = hub.library("the models in the cache")
    from huggingface_hub import constants  # where it is may have been said since the library was imported

    try:
        return library.scan_cache_dir(constants.HF_HUB_CACHE)
    except library.CacheNotFound:
        return None


def _models(cache: Any) -> list[Any]:
    return [each for each in cache.repos if each.repo_type == "model"] if cache else []


def _listed(models: list[Any]) -> list[Repository]:
    names = {hub.repository(address): name for name, address in ADDRESSES.items()}
    return sorted(Repository(names.get(r.repo_id, f"hf://{r.repo_id}"), r.size_on_disk, r.repo_path) for r in models)
