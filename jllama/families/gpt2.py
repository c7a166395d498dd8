"""GPT-2."""

from __future__ import annotations

from typing import Any

from jllama.config import GPT2
from jllama.families import gguf
from jllama.families.family import GGUF, HuggingFace, Layout
from jllama.families.fields import Fields

_AT = "transformer.h.{}"
_NAMES = {
    "tok_embeddings": "transformer.wte",
    "position_embeddings": "transformer.wpe",
    "layers.{}.attention_norm": f"{_AT}.ln_1",
    **{f"layers.{{}}.attention.w{x}": f"{_AT}.attn.c_attn" for x in "qkv"},
    "layers.{}.attention.wo": f"{_AT}.attn.c_proj",
    "layers.{}.ffn_norm": f"{_AT}.ln_2",
    "layers.{}.feed_forward.w1": f"{_AT}.mlp.c_fc",
    "layers.{}.feed_forward.w2": f"{_AT}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "output": "lm_head",
}
_MASKS = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"


def _huggingface(fields: Fields) -> dict[str, Any]:
    dim, heads = fields.get("n_embd", int), fields.get("n_head", int)
    fields.only("activation_function", "gelu_new")
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    return GPT2 | {
        "dim": dim,
        "hidden_dim": fields.get("n_inner", int, 4 * dim),
        "n_layers": fields.get("n_layer", int),
        "n_heads": heads,
        "n_kv_heads": heads,
        "vocab_size": fields.get("vocab_size", int),
        "max_seq_len": fields.get("n_positions", int),
        "norm_eps": fields.get("layer_norm_epsilon", float, 1e-5),
        "tied": fields.get("tie_word_embeddings", bool, True),
    }


def _gguf(fields: Fields) -> dict[str, Any]:
    return gguf.sizes(fields) | GPT2 | {"norm_eps": fields.get("attention.layer_norm_epsilon", float)}


HUGGINGFACE = (
    HuggingFace(
        "gpt2",
        "GPT2LMHeadModel",
        _huggingface,
        Layout(_NAMES, optional_prefix="transformer.", transposed=True, constants=_MASKS),
    ),
)
_UP = {"layers.{}.feed_forward.w1": "blk.{}.ffn_up"}
GGUF_FILES = (GGUF("gpt2", _gguf, Layout(gguf.NAMES | _UP, fused=gguf.FUSED)),)
