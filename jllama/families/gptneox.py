"""GPT-NeoX and Pythia: attention and feed-forward side by side, biases everywhere, a part of each head rotated."""

from __future__ import annotations

from typing import Any

from jllama.families import gguf, huggingface
from jllama.families.family import GGUF, HuggingFace, Layout
from jllama.families.fields import Fields

_SWITCHES = {"norm": "layer", "gated": False, "norm_bias": True, "ffn_bias": True}
_AT = "gpt_neox.layers.{}"
_NAMES = {
    "tok_embeddings": "gpt_neox.embed_in",
    "layers.{}.attention_norm": f"{_AT}.input_layernorm",
    **{f"layers.{{}}.attention.w{x}": f"{_AT}.attention.query_key_value" for x in "qkv"},
    "layers.{}.attention.wo": f"{_AT}.attention.dense",
    "layers.{}.ffn_norm": f"{_AT}.post_attention_layernorm",
    "layers.{}.feed_forward.w1": f"{_AT}.mlp.dense_h_to_4h",
    "layers.{}.feed_forward.w2": f"{_AT}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
}
_MASKS = r"(gpt_neox\.)?layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"


def _config(fields: Fields) -> dict[str, Any]:
    # Its own names of what other families have.
    theta, part = fields.peek("rotary_emb_base"), fields.get("rotary_pct", float, 0.25)
    heads = {"num_key_value_heads": fields.peek("num_attention_heads")}
    given = heads if theta is None else heads | {"rope_theta": theta}
    usual = fields.within("", {**fields.values, **given})
    values = huggingface.decoder(usual, eps="layer_norm_eps", part=part)
    bias = fields.get("attention_bias", bool, True)
    parallel = fields.get("use_parallel_residual", bool, True)
    return values | _SWITCHES | {"parallel": parallel, "qkv_bias": bias, "wo_bias": bias}


def _gguf(fields: Fields) -> dict[str, Any]:
    values = gguf.decoder(fields, is_partial=True, norm="layer")
    return values | _SWITCHES | {"activation": "gelu_erf", "parallel": fields.get("use_parallel_residual", bool, True)}


HUGGINGFACE = (
    HuggingFace(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _config,
        Layout(_NAMES, optional_prefix="gpt_neox.", half_split=True, by_heads=True, constants=_MASKS),
    ),
)
_GGUF_NAMES = gguf.NAMES | gguf.FUSED | {"layers.{}.feed_forward.w1": "blk.{}.ffn_up"}
GGUF_FILES = (GGUF("gptneox", _gguf, Layout(_GGUF_NAMES, half_split=True)),)
