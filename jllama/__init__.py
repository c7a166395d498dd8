"""jllama: a functional inference engine for Llama-family models on JAX."""
