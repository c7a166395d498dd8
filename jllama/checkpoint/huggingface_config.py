"""Hugging Face's `config.json`: what it says of a model, and what to write into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from absl import logging

from jllama.checkpoint.build import CheckpointError
from jllama.config import GPT2, Config, ConfigError, RopeScaling
from jllama.errors import listed, shown

# model_type, and the architecture that it goes with
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

# fields of `Config` and of `RopeScaling`
_SIZES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}

_ROPE_THETA = 10000.0  # transformers' default
_WINDOW = 4096  # transformers' default where a family has windows


class Description(NamedTuple):
    """What a config.json says of a model."""

    family: str  # one of FAMILIES
    config: Config
    tied: bool | None  # None: it does not say, so that the tensors do


def is_model(fields: Mapping[str, Any]) -> bool:
    """Whether the fields of a JSON object are those of a model's config.json."""
    return "model_type" in fields or "architectures" in fields


def parse(fields: Mapping[str, Any], origin: str) -> Description:
    """Read the fields of a config.json, in the layout of transformers 4 or 5.

    Raises:
      CheckpointError: another family, or missing, wrong or contradicting fields; all are named.
    """
    key = "architectures" if fields.get("model_type") is None else "model_type"
    families = {str([name]) if key == "architectures" else family: family for family, name in FAMILIES.items()}
    if (found := str(fields.get(key))) not in families:
        raise CheckpointError(f"{origin}: {key} = {shown(found)}: not supported; expected {', '.join(families)}")
    family, checked, described = families[found], _Fields(fields, origin), None
    try:
        described = _gpt2(checked) if family == "gpt2" else _llama(checked, family)
    except ConfigError as e:
        checked.problems.append(str(e))
    if described is None:
        raise CheckpointError(f"{origin}: {listed(checked.problems)}")
    return described


def fields_of(described: Description, dtype: str) -> dict[str, Any]:
    """Return the fields of a config.json, in the layout of transformers 4, which 5 reads too.

    Args:
      described: a model of any family but GPT-2.
      dtype: what its matrices are stored in, for `torch_dtype`.
    """
    config, scaling = described.config, described.config.rope_scaling
    fields = {
        "architectures": [FAMILIES[described.family]],
        "model_type": described.family,
        **{field: getattr(config, name) for name, field in _SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": config.wo_bias,
        "mlp_bias": False,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": 0 if config.sliding_window else config.n_layers,
        "tie_word_embeddings": described.tied,
        "torch_dtype": dtype,
    }
    if scaling is not None:
        fields["rope_scaling"] = {"rope_type": "llama3"} | {
            field: getattr(scaling, name) for name, field in _SCALING.items()
        }
    return fields


def _typed(value: Any, kind: type) -> Any:
    """Return a value of this type, None where it is of another; no numbers past 64 bits."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = None if abs(value) >= 1 << 63 else float(value) if kind is float else value
    return value if type(value) is kind else None


class _Fields:
    """Fields read with checks. What is wrong goes to `problems`, and something of the right type is returned."""

    _EXPECTED: ClassVar = {int: "a whole number", float: "a number", bool: "true or false", dict: "an object"}

    def __init__(self, values: Mapping[str, Any], origin: str, prefix: str = "") -> None:
        self.values = values
        self.origin = origin
        self.problems: list[str] = []
        self._prefix = prefix

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field of this type; the default where it is absent or null, unless there is none."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            self.problems.append(f"{self._prefix}{name} is missing")
        elif (typed := _typed(value, kind)) is not None:
            return typed
        else:
            self.problems.append(f"{self._prefix}{name} = {shown(value)}: expected {self._EXPECTED[kind]}")
        return kind()

    def only(self, name: str, expected: Any) -> None:
        """Refuse any value but this one; absent and null stand for it."""
        value = self.values.get(name)
        if value is not None and value != expected:
            self.problems.append(f"{self._prefix}{name} = {shown(value)}: not supported; expected {expected}")

    def agree(self, found: Mapping[str, Any]) -> Any:
        """Return the value that was found under several names, None where under none."""
        given = [(name, value) for name, value in found.items() if value is not None]
        if any(value != given[0][1] for _, value in given):
            both = " and ".join(f"{self._prefix}{name} = {shown(value)}" for name, value in given)
            self.problems.append(f"{both}: expected one value")
        return given[0][1] if given else None


def _gpt2(fields: _Fields) -> Description | None:
    dim = fields.get("n_embd", int)
    sizes = {
        "dim": dim,
        "hidden_dim": fields.get("n_inner", int, 4 * dim),
        "n_layers": fields.get("n_layer", int),
        "n_heads": (heads := fields.get("n_head", int)),
        "n_kv_heads": heads,
        "vocab_size": fields.get("vocab_size", int),
        "max_seq_len": fields.get("n_positions", int),
        "norm_eps": fields.get("layer_norm_epsilon", float, 1e-5),
    }
    fields.only("activation_function", "gelu_new")
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    _check_dtype(fields)
    tied = fields.get("tie_word_embeddings", bool, True)
    if fields.problems:
        return None
    return Description("gpt2", Config(**sizes, **GPT2), tied)


def _llama(fields: _Fields, family: str) -> Description | None:
    values = {name: fields.get(field, int) for name, field in _SIZES.items() if name not in ("n_kv_heads", "head_dim")}
    # The first Llama's files have no such field; other families' defaults are no use.
    values["n_kv_heads"] = fields.get("num_key_value_heads", int, values["n_heads"] if family == "llama" else None)
    values["head_dim"] = fields.get("head_dim", int, 0)
    values["norm_eps"] = fields.get("rms_norm_eps", float)
    values["rope_theta"], values["rope_scaling"] = _rope(fields)
    values["sliding_window"] = _sliding_window(fields, family, values["n_layers"])
    fields.only("hidden_act", "silu")
    fields.only("mlp_bias", False)
    fields.only("partial_rotary_factor", 1.0)
    _check_dtype(fields)
    tied = None if fields.values.get("tie_word_embeddings") is None else fields.get("tie_word_embeddings", bool)
    bias = family in ("llama", "qwen3") and fields.get("attention_bias", bool, False)
    if fields.problems:
        return None
    switches: dict[str, Any] = {"qkv_bias": bias or family == "qwen2", "wo_bias": bias, "head_norms": family == "qwen3"}
    return Description(family, Config(**values, **switches), tied)


def _check_dtype(fields: _Fields) -> None:
    # Each tensor tells its own dtype, so the field is not needed; but two that differ make the file suspect.
    fields.agree({name: fields.values.get(name) for name in ("dtype", "torch_dtype")})
    for name in ("quantization_config", "quantization"):  # the latter is mlx's
        if fields.values.get(name) is not None:
            fields.problems.append(f"{name}: quantised weights are not supported; expected none")


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Read base and scaling of the rotary frequencies."""
    # transformers 4 writes rope_theta and rope_scaling, 5 rope_parameters with both in it; some tools write all.
    places = ("rope_scaling", "rope_parameters")
    tables = {place: {k: v for k, v in fields.get(place, dict, {}).items() if v is not None} for place in places}
    found = {"rope_theta": fields.values.get("rope_theta")}
    found |= {f"{place}.rope_theta": table.pop("rope_theta", None) for place, table in tables.items()}
    if (theta := fields.agree(found)) is None:
        logging.warning("%s: no rope_theta, taking %g", fields.origin, _ROPE_THETA)
    agreed = _Fields({"rope_theta": theta}, fields.origin)
    theta = agreed.get("rope_theta", float, _ROPE_THETA)
    fields.problems += agreed.problems
    scalings = [_rope_scaling(fields, place, table) for place, table in tables.items() if table]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        fields.problems.append(f"rope_scaling = {scalings[0]} and rope_parameters = {scalings[1]}: expected one value")
    return theta, scalings[0] if scalings else None


def _rope_scaling(fields: _Fields, place: str, table: dict[str, Any]) -> RopeScaling | None:
    inner, scaling = _Fields(table, fields.origin, f"{place}."), None
    kind = inner.agree({name: table.get(name) for name in ("rope_type", "type")})
    inner.only("partial_rotary_factor", 1.0)
    if kind == "llama3":
        values = {name: inner.get(field, int if "max" in name else float) for name, field in _SCALING.items()}
        try:
            scaling = None if inner.problems else RopeScaling(**values)
        except ConfigError as e:
            inner.problems.append(str(e))
    elif kind not in ("default", "none"):
        key = "type" if "type" in table else "rope_type"
        inner.problems.append(f"{place}.{key} = {shown(kind)}: not supported; expected default or llama3")
    fields.problems += inner.problems
    return scaling


def _sliding_window(fields: _Fields, family: str, n_layers: int) -> int | None:
    """Return the window of all layers; `Config` has none for some of them."""
    slides, first = family == "mistral", 0  # the first layer that slides
    if family in ("qwen2", "qwen3"):
        slides, first = fields.get("use_sliding_window", bool, False), fields.get("max_window_layers", int, 28)
    slides = slides and fields.values.get("sliding_window", _WINDOW) is not None
    kinds = {kind for kind, some in (("sliding_attention", first < n_layers), ("full_attention", first > 0)) if some}
    if isinstance(named := fields.values.get("layer_types"), list):
        kinds = set(map(str, named))
    if not slides or kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        fields.problems.append("use_sliding_window = true for some layers: not supported; expected for all or none")
    window: int = fields.get("sliding_window", int, _WINDOW)
    return window
