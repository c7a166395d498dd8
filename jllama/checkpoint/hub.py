"""Checkpoints on the Hugging Face Hub: `hf://owner/name[@revision]` to a folder here."""

from __future__ import annotations

import re
from pathlib import Path

from jllama.checkpoint.build import CheckpointError

# What loading reads. Subfolders and consolidated.safetensors hold the same weights again, in other formats.
_FILES = ["model*.safetensors", "*.json", "tokenizer.model", "*.txt"]
_SUBFOLDERS = ["*/*"]


def local(path: str | Path) -> Path:
    """Return the folder of a model on the Hub, downloaded into the Hub's own cache; or any other path as it is.

    The cache, its place and the token are those of the huggingface_hub library (HF_HOME, HF_TOKEN); with
    HF_HUB_OFFLINE=1 only the cache is looked at.

    Raises:
      CheckpointError: the address is wrong, the library is not installed, or the model cannot be had.
    """
    if not re.match("hf:/", str(path)):
        return Path(path)
    # A Path has made one slash of the two.
    match = re.fullmatch(r"hf://?([^/@]+/[^/@]+)(?:@([^@]+))?", str(path))
    if match is None:
        raise CheckpointError(f"{path}: expected hf://owner/name or hf://owner/name@revision")
    try:
        import huggingface_hub
    except ImportError as e:
        raise CheckpointError(f"{path}: needs the huggingface_hub library: pip install 'jllama[hub]'") from e
    try:
        folder = huggingface_hub.snapshot_download(
            match[1], revision=match[2], allow_patterns=_FILES, ignore_patterns=_SUBFOLDERS
        )
    # What a network, a disk and the Hub may do has many types, without a common one.
    except Exception as e:
        raise CheckpointError(f"{path}: cannot be fetched: {' '.join(str(e).split())}") from e
    return Path(folder)
