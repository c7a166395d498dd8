"""What most families have in common in Hugging Face's config.json and safetensors files."""

from __future__ import annotations

from typing import Any

from jllama.config import Config
from jllama.families import ropes
from jllama.families.family import Layout
from jllama.families.fields import Fields

SIZES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu_erf",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu"),
}
_WINDOW = 4096  # transformers' default where a family has windows

_ATTENTION, _FEED_FORWARD = "layers.{}.attention", "layers.{}.feed_forward"
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    **{f"{_ATTENTION}.w{x}": f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkvo"},
    **{f"{_ATTENTION}.{x}_norm": f"model.layers.{{}}.self_attn.{x}_norm" for x in "qk"},
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    f"{_FEED_FORWARD}.w1": "model.layers.{}.mlp.gate_proj",
    f"{_FEED_FORWARD}.w2": "model.layers.{}.mlp.down_proj",
    f"{_FEED_FORWARD}.w3": "model.layers.{}.mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}

LAYOUT = Layout(
    NAMES,
    optional_prefix="model.",
    half_split=True,
    constants=r"(.*\.)?(inv_freq|cos_cached|sin_cached)",
    others=r"(.*\.)?[kv]_scale|(v_head|score)\..*",  # scales of a cache in 8 bits, heads that score a text
)


def decoder(
    fields: Fields,
    *,
    says_kv_heads: bool = True,
    eps: str = "rms_norm_eps",
    activation: str = "hidden_act",
    part: float | None = None,
) -> dict[str, Any]:
    """Read what nearly all families have: sizes, epsilon, activation, rotary positions, whether the head is tied.

    Args:
      fields: the config.json's.
      says_kv_heads: whether a file must say how many heads of keys there are; else it may mean as many as of queries.
      eps: the field with the epsilon of the norms.
      activation: the field with the activation.
      part: as for `ropes.from_huggingface`.
    """
    defaults = {"head_dim": 0} if says_kv_heads else {"head_dim": 0, "n_kv_heads": fields.peek(SIZES["n_heads"]) or 0}
    values = {name: fields.get(field, int, defaults.get(name)) for name, field in SIZES.items()}
    values["norm_eps"] = fields.get(eps, float)
    tied = fields.peek("tie_word_embeddings")
    values["tied"] = None if tied is None else fields.get("tie_word_embeddings", bool)
    fields.only(activation, *_ACTIVATIONS)
    values["activation"] = _ACTIVATIONS.get(str(fields.peek(activation)), "silu")
    fields.only("mlp_bias", False)
    return ropes.from_huggingface(fields, values, part=part)


def fields_of(config: Config) -> dict[str, Any]:
    """Give the fields of a config.json that `decoder` reads, in the layout of transformers 4, which 5 reads too."""
    return {
        **{field: getattr(config, name) for name, field in SIZES.items()},
        "hidden_act": next(name for name, ours in _ACTIVATIONS.items() if ours == config.activation),
        "rms_norm_eps": config.norm_eps,
        **ropes.to_huggingface(config),
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
    }


def experts(name: str, projections: tuple[str, str, str] = ("gate_proj", "down_proj", "up_proj")) -> dict[str, str]:
    """Give the names of a router and of experts' three matrices, under one of a layer's modules."""
    at = f"model.layers.{{}}.{name}"
    named = {
        f"{_FEED_FORWARD}.experts.w{i}": f"{at}.experts.{{}}.{x}" for i, x in zip((1, 2, 3), projections, strict=True)
    }
    return NAMES | {f"{_FEED_FORWARD}.router": f"{at}.gate"} | named


def window(fields: Fields, n_layers: int, *, first: int = 0) -> int | None:
    """Read the window of all layers; `first` is the first that has one, where no `layer_types` says which."""
    kinds = {kind for kind, some in (("sliding_attention", first < n_layers), ("full_attention", first > 0)) if some}
    if isinstance(named := fields.peek("layer_types"), list):
        kinds = set(map(str, named))
    if fields.values.get("sliding_window", _WINDOW) is None or kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        fields.problems.append("use_sliding_window = true for some layers: not supported; expected for all or none")
    found: int = fields.get("sliding_window", int, _WINDOW)
    return found
