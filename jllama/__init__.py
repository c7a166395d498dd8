"""jllama: a functional inference engine for Llama-family models on JAX."""

from jllama.checkpoint import CheckpointError
from jllama.generation import Completion, Prompt
from jllama.llm import LLM, Score
from jllama.settings import Settings
from jllama.tokenizer import TokenizerError

__all__ = ["LLM", "CheckpointError", "Completion", "Prompt", "Score", "Settings", "TokenizerError"]
