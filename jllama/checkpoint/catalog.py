"""Short names of models on the Hugging Face Hub: `qwen3:0.6b` stands for one GGUF file, or all parts of one."""

from types import MappingProxyType

# Of each model the smallest file that loses little, from whoever made the model where they offer one.
ADDRESSES = MappingProxyType(
    {
        "gemma3:1b": "hf://ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
        "gemma3:4b": "hf://ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
        "granite3.3:2b": "hf://ibm-granite/granite-3.3-2b-instruct-GGUF:Q4_K_M",
        "llama3.2:1b": "hf://bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
        "llama3.2:3b": "hf://bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
        "llama3.1:8b": "hf://bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
        "olmo2:1b": "hf://allenai/OLMo-2-0425-1B-Instruct-GGUF:Q4_K_M",
        "phi4-mini": "hf://bartowski/microsoft_Phi-4-mini-instruct-GGUF:Q4_K_M",
        "qwen2.5:0.5b": "hf://Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
        "qwen2.5:1.5b": "hf://Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M",
        "qwen3:0.6b": "hf://Qwen/Qwen3-0.6B-GGUF:Q8_0",
        "qwen3:1.7b": "hf://Qwen/Qwen3-1.7B-GGUF:Q8_0",
        "qwen3:4b": "hf://Qwen/Qwen3-4B-GGUF:Q4_K_M",
        "qwen3:8b": "hf://Qwen/Qwen3-8B-GGUF:Q4_K_M",
        "smollm2:360m": "hf://HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0",
        "smollm2:1.7b": "hf://HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
        "smollm3": "hf://bartowski/HuggingFaceTB_SmolLM3-3B-GGUF:Q4_K_M",
        "tinyllama": "hf://TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M",
    }
)
