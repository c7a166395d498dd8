"""Good files of every format that jllama reads, as small as they can be: what the fuzzer damages."""

from fuzz.seeds import models, texts, tokenizers
from fuzz.seeds.base import SEEDS, Seed

__all__ = ["SEEDS", "Seed", "models", "texts", "tokenizers"]
