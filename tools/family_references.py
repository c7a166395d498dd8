"""Make the models of tests/data/families: tiny random ones of transformers, and what it computes of them.

  pip install torch transformers numpy
  python tools/family_references.py [NAME ...]

A folder each: config.json and model.safetensors (bfloat16, so that they are small) as transformers saves them, and
expected.npz: ids `[2, T]`, float32 logits `[2, T, V]`, and 12 greedy ids after the first `lengths` of each row, 7 and
11 where there are none.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

OUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "families"
LENGTH = 40
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
}
MHA = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3}
del MHA["head_dim"]  # 8
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [2.0, 4.0, 8.0],
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
}


def theta(value: float, **others: Any) -> dict[str, Any]:
    """Give rotary settings in the layout of transformers 5."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value} | others}


# The family and what differs from `SIZES`; a value of ... leaves a field out.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.5, "beta_fast": 4.0, "truncate": False}},
    ),
    "smollm3": ("SmolLM3", theta(1000.0) | {"num_hidden_layers": 5, "intermediate_size": 18}),
    "granite": (
        "Granite",
        theta(1000.0)
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 0.7},
    ),
    "olmo2": ("Olmo2", theta(1000.0)),
    "stablelm": (
        "StableLm",
        theta(1000.0, partial_rotary_factor=0.25)
        | {"use_qkv_bias": True, "layer_norm_eps": 1e-4, "hidden_size": 48, "intermediate_size": 30, "head_dim": ...},
    ),
    "phi3": ("Phi3", theta(1000.0) | {"sliding_window": 9, "head_dim": ..., "hidden_size": 48}),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 40, "head_dim": ..., "hidden_size": 48},
    ),
    "gpt_neox": ("GPTNeoX", MHA | theta(1000.0, partial_rotary_factor=0.5) | {"layer_norm_eps": 1e-4}),
    "gpt_neox-serial": (
        "GPTNeoX",
        MHA | theta(1000.0, partial_rotary_factor=0.25) | {"use_parallel_residual": False, "hidden_act": "gelu_new"},
    ),
    "gemma": ("Gemma", theta(1000.0)),
    "gemma2": (
        "Gemma2",
        theta(1000.0)
        | {"query_pre_attn_scalar": 5, "sliding_window": 9, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "query_pre_attn_scalar": 5,
            "sliding_window": 9,
            "num_hidden_layers": 3,
            "intermediate_size": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "mixtral": ("Mixtral", theta(1000.0) | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12}),
    "qwen2_moe": (
        "Qwen2Moe",
        theta(1000.0)
        | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 10}
        | {"shared_expert_intermediate_size": 14},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        theta(1000.0)
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True},
    ),
    "phi3-longrope-past": (
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 20, "head_dim": ..., "hidden_size": 48},
    ),
    "llama-llama3": (
        "Llama",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16, "rope_theta": 100.0}},
    ),
}


def make(name: str, seed: int) -> None:
    """Make one folder."""
    family, changes = MODELS[name]
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
    fields = {key: value for key, value in (SIZES | tokens | changes).items() if value is not ...}
    config = getattr(transformers, f"{family}Config")(**fields)
    config._experts_implementation = "eager"  # the others want wider experts
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            is_norm = "norm" in key and key.endswith("weight")
            centre = (0.0 if "Gemma" in family else 1.0) if is_norm else 0.0
            weight.normal_(centre, 0.2 if is_norm or weight.ndim == 1 else 0.25)
            weight.copy_(weight.to(torch.bfloat16))
    folder = OUT / name
    # A copy: buffers such as the rotary frequencies would stay rounded.
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(0, config.vocab_size, (2, LENGTH))
    with torch.no_grad():
        logits = model(ids).logits.numpy()
        lengths = (22, 26) if name.endswith("-past") else (7, 11)
        rows = [model.generate(ids[i : i + 1, :n], max_new_tokens=12, do_sample=False) for i, n in enumerate(lengths)]
    greedy = np.stack([row[0, -12:].numpy() for row in rows])
    arrays = {"ids": ids.numpy().astype(np.int32), "logits": logits, "greedy": greedy, "lengths": np.array(lengths)}
    np.savez_compressed(folder / "expected.npz", **arrays)
    print(name, logits.std(), {file.name: file.stat().st_size for file in folder.iterdir()})


def main() -> None:
    """Make the folders named on the command line, or all."""
    for name in sys.argv[1:] or MODELS:
        make(name, list(MODELS).index(name))


if __name__ == "__main__":
    main()
