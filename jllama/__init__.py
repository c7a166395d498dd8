"""jllama: a functional inference engine for Llama-family models on JAX."""

from jllama.checkpoint import CheckpointError
from jllama.llm import LLM, Completion, Prompt, Score
from jllama.settings import Settings
from jllama.tokenizer import TokenizerError

__all__ = ["LLM", "CheckpointError", "Completion", "Prompt", "Score", "Settings", "TokenizerError"]
