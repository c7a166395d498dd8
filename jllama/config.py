"""The sizes and switches of a model: `Config`, its checks, and the reader of `configs/*.toml`."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from jllama import rope
from jllama.errors import InputError, listed, quoted

_LARGEST = 2**31 - 2**20  # of a size: positions are int32, and padded
_LONGEST = 1 << 13  # characters of a TOML file: tomllib takes time by the square of them


class ConfigError(InputError):
    """Sizes that make no model: every problem found is named in the one message."""


def _is_size(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 1 <= x < _LARGEST


def _is_positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < 1e38  # float32 holds it; NaN isn't


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and switches of a model; frozen and hashable, so that it can be static under `jax.jit`.

    The switches' defaults are the Llama family's; `GPT2` holds those of GPT-2.

    Args:
      dim: width D of the residual stream.
      hidden_dim: width F of the feed-forward, or of each expert.
      n_layers: number of layers.
      n_heads: number of query heads N.
      n_kv_heads: number of key and value heads K; divides `n_heads`.
      vocab_size: number of token ids V.
      max_seq_len: the context: tokens of prompt and continuation together.
      head_dim: width H of a head; 0 stands for `dim / n_heads`.
      norm_eps: epsilon of the norms.
      rope_theta: base of the rotary frequencies.
      rotary_dim: how many numbers of each head are rotated, from its first on; 0 stands for all.
      rope_scaling: how the rotary frequencies are stretched (a formula of `rope`), None where they are not.
      local_rope_theta: the base in layers with a window, whose frequencies aren't stretched; 0 stands for the others'.
      unrotated_layers: the numbers of the layers that rotate nothing.
      sliding_window: how many tokens, itself included, a token attends to; None: all before it.
      full_layers: the numbers of the layers without that window.
      attention_scale: what products of queries and keys are multiplied with; 0 stands for `head_dim ** -0.5`.
      attention_cap: bounds those products by `cap * tanh(x / cap)`; 0: no bounds.
      embedding_scale, residual_scale: what embeddings, and what attention and feed-forward add, are multiplied with.
      logit_scale, logit_cap: what logits are multiplied with, and what bounds them then as above.
      norm: "rms" or "layer", which also takes off the mean.
      norms: where norms are: "before" attention and feed-forward, "after" each, before it is added, or "both".
      position: "rope", rotary, or "learned", a table of `max_seq_len` rows added to the embedding.
      activation: "silu", "gelu" (the tanh form) or "gelu_erf" (the exact one).
      n_experts: how many feed-forwards a layer has, of which each token takes some; 0: one, for all tokens.
      n_active_experts: how many of them a token takes.
      normalized_experts: whether the weights of those, probabilities of all experts, are brought to a sum of 1.
      shared_dim: width of one more feed-forward that all tokens take, weighed by a gate of its own; 0: none.
      gated: whether the feed-forward multiplies the activation of one product (w1) with another (w3).
      norm_bias, qkv_bias, wo_bias, ffn_bias: which of the norms and products have a bias.
      head_norms: whether each query and key head has a norm.
      width_norms: whether all query heads together have one, and all key heads.
      parallel: whether the feed-forward reads what the attention does, not what that adds to.
      tied: whether the embedding is the output head too.

    Raises:
      ConfigError: with every field that is wrong, by name.
    """

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int
    head_dim: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rotary_dim: int = 0
    rope_scaling: rope.RopeScaling | None = None
    local_rope_theta: float = 0.0
    unrotated_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    norm: Literal["rms", "layer"] = "rms"
    norms: Literal["before", "after", "both"] = "before"
    position: Literal["rope", "learned"] = "rope"
    activation: Literal["silu", "gelu", "gelu_erf"] = "silu"
    n_experts: int = 0
    n_active_experts: int = 0
    normalized_experts: bool = False
    shared_dim: int = 0
    gated: bool = True
    norm_bias: bool = False
    qkv_bias: bool = False
    wo_bias: bool = False
    ffn_bias: bool = False
    head_norms: bool = False
    width_norms: bool = False
    parallel: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        if self.head_dim == 0 and _is_size(self.dim) and _is_size(self.n_heads) and self.dim % self.n_heads == 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if self.rotary_dim == self.head_dim:
            object.__setattr__(self, "rotary_dim", 0)
        if problems := self._problems():
            raise ConfigError(listed(problems))

    def _problems(self) -> list[str]:
        sizes = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
        problems = [
            f"{n} = {quoted(getattr(self, n))}: expected 1 to {_LARGEST - 1}"
            for n in sizes
            if not _is_size(getattr(self, n))
        ]
        if self.sliding_window is not None and not _is_size(self.sliding_window):
            problems.append(f"sliding_window = {self.sliding_window!r}: expected 1 or more, or none")
        if not problems:
            if self.n_heads % self.n_kv_heads:
                problems.append(f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}")
            if self.head_dim == 0:
                problems.append(
                    f"dim = {self.dim} is not a multiple of n_heads = {self.n_heads}; expected a head_dim then"
                )
            elif not _is_size(self.head_dim):
                problems.append(f"head_dim = {self.head_dim!r}: expected 1 or more")
            elif self.position == "rope" and not self._rotates():
                name = "rotary_dim" if self.rotary_dim else "head_dim"
                problems.append(
                    f"{name} = {getattr(self, name)!r}: rotary pairs need an even number of 2 to {self.head_dim}"
                )
        may_be_0 = ("local_rope_theta", "attention_scale", "attention_cap", "logit_cap")
        for name in ("norm_eps", "rope_theta", "embedding_scale", "residual_scale", "logit_scale", *may_be_0):
            if not _is_positive(value := getattr(self, name)) and not (name in may_be_0 and value == 0):
                problems.append(f"{name} = {value!r}: expected a positive number")
        problems += self._problems_of_experts()
        if self.rope_scaling is not None:
            problems += self.rope_scaling.problems()
            if isinstance(self.rope_scaling, rope.Yarn) and self.rope_theta == 1:
                problems.append("rope_theta = 1: YaRN's formula has no pairs to tell apart then")
        if not problems and isinstance(self.rope_scaling, rope.Divided | rope.LongRope):
            found, expected = len(self.rope_scaling.divisors), self.rotated_dim // 2
            problems += [f"rope_scaling has {found} divisors, expected {expected}"] if found != expected else []
        for name, kind in get_type_hints(Config).items():
            value, choices = getattr(self, name), get_args(kind)
            if kind is bool and not isinstance(value, bool):
                problems.append(f"{name} = {value!r}: expected true or false")
            elif choices and isinstance(choices[0], str) and value not in choices:
                problems.append(f"{name} = {value!r}: expected {' or '.join(choices)}")
        return problems

    def _problems_of_experts(self) -> list[str]:
        sizes = {name: getattr(self, name) for name in ("n_experts", "n_active_experts", "shared_dim")}
        if wrong := {name: size for name, size in sizes.items() if size != 0 and not _is_size(size)}:
            return [f"{name} = {quoted(size)}: expected 0 to {_LARGEST - 1}" for name, size in wrong.items()]
        if not self.n_experts:
            return [f"{name} = {size}: expected 0 without n_experts" for name, size in sizes.items() if size]
        problems = []
        if not 1 <= self.n_active_experts <= self.n_experts:
            problems.append(f"n_active_experts = {self.n_active_experts}: expected 1 to n_experts = {self.n_experts}")
        if self.activation != "silu" or not self.gated or self.ffn_bias:
            problems.append("experts with gelu, with biases or without a gate: not supported; expected gated silu")
        return problems

    def _rotates(self) -> bool:
        return _is_size(self.rotated_dim) and self.rotated_dim <= self.head_dim and self.rotated_dim % 2 == 0

    @property
    def rotated_dim(self) -> int:
        """How many numbers of each head are rotated, R."""
        return self.rotary_dim or self.head_dim

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers compute the same, but for their weights."""
        return not self.unrotated_layers and (self.sliding_window is None or not self.full_layers)

    @property
    def q_dim(self) -> int:
        """Width of all query heads together, N * H."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads together, K * H."""
        return self.n_kv_heads * self.head_dim


def with_context(config: Config, context: int) -> Config:
    """Give a model a context of so many tokens, of its own at most; with longrope that chooses the factors.

    Raises:
      ConfigError: it has no such context.
    """
    scaling = config.rope_scaling
    longest = scaling.longest if isinstance(scaling, rope.LongRope) else config.max_seq_len
    first = 1 if config.position == "rope" else longest  # as many learned positions as the table has
    if not first <= context <= longest:
        raise ConfigError(f"context = {context}: expected {first} to {longest} tokens")
    if isinstance(scaling, rope.LongRope):
        scaling = dataclasses.replace(scaling, is_long=context > scaling.original_max_seq_len)
    return dataclasses.replace(config, max_seq_len=context, rope_scaling=scaling)


# The switches of GPT-2.
GPT2: dict[str, Any] = {
    "norm": "layer",
    "position": "learned",
    "activation": "gelu",
    "gated": False,
    **dict.fromkeys(("norm_bias", "qkv_bias", "wo_bias", "ffn_bias"), True),
}


def from_toml(path: str | Path) -> Config:
    """Read a `configs/*.toml` file, whose fields are those of `Config`.

    Raises:
      ConfigError: the file cannot be read, is not TOML, or holds unknown, missing or wrong fields.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters, expected at most {_LONGEST}")
        fields: dict[str, Any] = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: cannot be read as TOML: {e}") from e
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    try:
        if "rope_scaling" in fields:
            table = dict(fields["rope_scaling"])
            kind = str(table.pop("type", "llama3"))
            if kind not in rope.FORMULAS:
                raise ConfigError(f"rope_scaling.type = {kind!r}: expected {' or '.join(rope.FORMULAS)}")
            fields["rope_scaling"] = rope.FORMULAS[kind](**table)
        return Config(**fields)
    except TypeError as e:
        raise ConfigError(f"{path}: {str(e).replace('.__init__()', '')}") from e
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e
