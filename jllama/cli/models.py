"""`jllama pull`, `list` and `rm`: the models of the Hugging Face Hub, by short names or addresses."""

from __future__ import annotations

from pathlib import Path

from jllama.checkpoint import CheckpointError, catalog, hub, kept
from jllama.cli import output
from jllama.cli.flags import FLAGS


def pull() -> None:
    """Download a model, or what is missing of it, and compare it with its hash."""
    path = hub.local(_address())
    kept.check(path)
    print(path)


def show() -> None:
    """Print the models that are here, with their sizes, and the names of others."""
    sizes: dict[str, int | None] = dict.fromkeys(catalog.ADDRESSES)
    sizes |= {each.address: each.n_bytes for each in kept.repositories()}
    sizes |= {name: _size(name) for name in hub.NAMES}
    for name, size in sorted(sizes.items()):
        shown = "" if size is None else f"{size / 1e9:.2f} GB"
        print(f"{name:<24}{shown:>10}  {catalog.ADDRESSES.get(name, '')}".rstrip())


def _size(name: str) -> int | None:
    """Return the size of a model that comes in a package, None where it isn't installed."""
    try:
        return Path(hub.local(name)).stat().st_size
    except CheckpointError:
        return None


def remove() -> None:
    """Remove a model from the Hub's cache."""
    freed = kept.remove(FLAGS.checkpoint)
    output.note(f"removed {FLAGS.checkpoint}: {freed / 1e9:.2f} GB")


def _address() -> str:
    name: str = FLAGS.checkpoint
    if not (name in catalog.ADDRESSES or name.startswith("hf://")):
        known = ", ".join(catalog.ADDRESSES)
        raise ValueError(f"{name}: expected a model to pull: hf://owner/name, or one of {known}")
    return catalog.ADDRESSES.get(name, name)
