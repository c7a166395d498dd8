"""Published models by their config.json: read as what they are, with as many parameters as they are said to have."""

import math
from typing import Any

import pytest

from jllama.checkpoint import CheckpointError, huggingface_config
from jllama.config import Config
from jllama.rope import Llama3
from jllama.tensors import counts, tensors

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False, "attention_bias": False}
QWEN = {"hidden_act": "silu", "attention_dropout": 0.0, "use_cache": True, "use_sliding_window": False}
ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}


def fields(
    dim: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int, **others: Any
) -> dict[str, Any]:
    """Give the fields of a config.json."""
    return {
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    } | others


# Name: its config.json, without what says nothing of the model; billions of parameters, and of those a token uses.
MODELS: dict[str, tuple[dict[str, Any], float, float]] = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        fields(1536, 8960, 28, 12, 2, 151936, 131072, model_type="qwen2", rope_theta=10000, sliding_window=4096)
        | QWEN
        | {"max_window_layers": 21, "use_mrope": False},
        1.78,
        1.78,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (
        fields(4096, 14336, 32, 32, 8, 128256, 131072, rope_theta=500000.0, rope_scaling=ROPE | {"rope_type": "llama3"})
        | LLAMA,
        8.03,
        8.03,
    ),
    "tiiuae/Falcon3-1B-Instruct": (
        fields(2048, 8192, 18, 8, 4, 131072, 8192, head_dim=256, rope_theta=1000042, activation="swiglu") | LLAMA,
        1.67,
        1.67,
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (
        fields(4096, 14336, 32, 32, 8, 32000, 32768, model_type="mixtral", rope_theta=1000000.0, sliding_window=None)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
        46.7,
        12.9,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": (
        fields(2048, 5632, 24, 16, 16, 151936, 8192, model_type="qwen2_moe", rope_theta=1000000.0, sliding_window=32768)
        | QWEN
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60}
        | {"num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1, "max_window_layers": 21},
        14.3,
        2.7,
    ),
    "Qwen/Qwen3-30B-A3B": (
        fields(2048, 6144, 48, 32, 4, 151936, 40960, model_type="qwen3_moe", rope_theta=1000000.0, sliding_window=None)
        | QWEN
        | {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
        | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
        30.5,
        3.3,
    ),
}


def read(name: str) -> Config:
    return huggingface_config.parse(MODELS[name][0], name).config


@pytest.mark.parametrize("name", MODELS)
def test_sizes_come_to_the_published_parameters(name: str) -> None:
    _, billions, active = MODELS[name]
    config = read(name)
    each = ((math.prod(t.shape), len(t.names(config))) for t in tensors(config))
    assert sum(size * count for size, count in each) / 1e9 == pytest.approx(billions, rel=0.005)
    embedding = config.vocab_size * config.dim  # which `counts` leaves out
    assert (sum(counts(config)) + embedding) / 1e9 == pytest.approx(active, rel=0.02)


def test_distillations_of_deepseek_r1_are_qwen_and_llama() -> None:
    qwen, llama = (read(f"deepseek-ai/DeepSeek-R1-Distill-{name}") for name in ("Qwen-1.5B", "Llama-8B"))
    assert (qwen.qkv_bias, qwen.wo_bias, qwen.rope_theta, qwen.sliding_window) == (True, False, 10000.0, None)
    assert (llama.qkv_bias, llama.rope_scaling) == (False, Llama3(8.0, 1.0, 4.0, 8192))
    falcon = read("tiiuae/Falcon3-1B-Instruct")
    assert (falcon.head_dim, falcon.q_dim, falcon.rope_theta) == (256, 2048, 1000042.0)


def test_llama_4_and_layers_without_experts_are_refused_by_name() -> None:
    llama4 = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": {}}
    with pytest.raises(CheckpointError, match="model_type = llama4: not supported; expected llama, "):
        huggingface_config.parse(llama4, "here")
    some = MODELS["Qwen/Qwen3-30B-A3B"][0] | {"mlp_only_layers": [0], "decoder_sparse_step": 2}
    with pytest.raises(CheckpointError, match=r"decoder_sparse_step = 2: .*expected 1; mlp_only_layers = \[0\]: not"):
        huggingface_config.parse(some, "here")
