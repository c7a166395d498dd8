"""jllama: a functional inference engine for Llama-family models on JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jllama.checkpoint import CheckpointError
    from jllama.generation import Completion, Prompt
    from jllama.llm import LLM, Score
    from jllama.response_format import Format
    from jllama.session import Session
    from jllama.settings import Settings
    from jllama.tokenizer import TokenizerError

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CheckpointError",
    "Completion",
    "Format",
    "Prompt",
    "Score",
    "Session",
    "Settings",
    "TokenizerError",
    "__version__",
]

# Where each name is from: imported when it is first used, so that `jllama --help` doesn't wait for JAX.
_MODULES = {
    "LLM": "llm",
    "CheckpointError": "checkpoint",
    "Completion": "generation",
    "Format": "response_format",
    "Prompt": "generation",
    "Score": "llm",
    "Session": "session",
    "Settings": "settings",
    "TokenizerError": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"jllama.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
