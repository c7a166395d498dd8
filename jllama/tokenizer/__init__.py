"""Text to token ids and back: `Tokenizer`, and `load`, which knows a file by its content.

A format is one module with `recognises(head)` and `read(path)`, and one row of the table in `load`.
"""

from __future__ import annotations

from pathlib import Path

from jllama.gguf_file import Header
from jllama.tokenizer.base import Tokenizer, TokenizerError
from jllama.tokenizer.beside import find

__all__ = ["Tokenizer", "TokenizerError", "find", "load"]

_LFS = b"version https://git-lfs"


def load(path: str | Path, *, header: Header | None = None) -> Tokenizer:
    """Read a tokenizer: the content decides which, not the name.

    A SentencePiece model, a llama2.c `tokenizer.bin` of the new or the old layout, Hugging Face's `tokenizer.json` or
    `vocab.json` with its `merges.txt`, Llama 3's `tokenizer.model`, or the one inside a GGUF checkpoint.

    Args:
      path: the file.
      header: that of `path` where it is a GGUF file and was read already.

    Raises:
      TokenizerError: the file can't be read, is of another kind, or is damaged.
    """
    # Not at the top, because the formats bring libraries with them.
    from jllama.tokenizer import gguf, huggingface, llama2c, sentencepiece, tiktoken

    formats = (
        ("a SentencePiece model", sentencepiece),
        ("a llama2.c tokenizer.bin", llama2c),
        ("Hugging Face's tokenizer.json or vocab.json", huggingface),
        ("Llama 3's tokenizer.model", tiktoken),
        ("a GGUF file", gguf),
    )
    path = Path(path)
    try:
        if header is not None:
            return gguf.read(path, header)
        with path.open("rb") as file:
            head = file.read(256)
        for _, form in formats:
            if form.recognises(head):
                found: Tokenizer = form.read(path)
                return found
    except OSError as e:
        raise TokenizerError(f"{e.filename or path}: cannot be read: {e.strerror}") from e
    except TokenizerError:
        raise
    except ValueError as e:  # from what knows no file
        raise TokenizerError(f"{path}: {e}") from e
    expected = " or ".join(name for name, _ in formats)
    begins = f"begins {head[:16]!r}" if head else "is empty"
    if head.startswith(_LFS):
        begins = "looks like a Git LFS pointer in place of the file itself (`git lfs pull` gets it)"
    raise TokenizerError(f"{path}: {begins}; expected {expected}")
