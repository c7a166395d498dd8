"""Small models for the tests: random weights as a dict for the oracle, and as `Params`."""

import numpy as np
import oracle

from jllama.checkpoint.build import Source, build_params
from jllama.config import Config, RopeScaling
from jllama.model import Params
from jllama.settings import Settings, to_sampling

# name -> config, tied: multi-head and grouped heads, head_dim other than dim / heads, stretched rotary frequencies
CONFIGS = {
    "mha": (Config(32, 64, 2, 4, 4, 97, 64), True),
    "gqa": (Config(48, 80, 2, 8, 2, 97, 64), False),
    "mqa": (Config(32, 48, 3, 4, 1, 65, 64, norm_eps=1e-3), True),
    "head_dim": (Config(40, 56, 2, 6, 3, 97, 64, head_dim=16, rope_theta=5e5), False),
    "llama3": (Config(32, 64, 2, 4, 2, 97, 64, rope_theta=500.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)), True),
}


def params(weights: oracle.Weights, config: Config, dtype: str = "float32") -> Params:
    """Build a model from a dict of tensors."""
    sources = {name: Source(a.shape, lambda start, stop, a=a: a[start:stop]) for name, a in weights.items()}
    return build_params(config, sources, dtype=dtype, origin="test")


def model(name: str, dtype: str = "float32", seed: int = 0) -> tuple[Params, oracle.Weights]:
    """Make one of `CONFIGS` with random weights."""
    config, tied = CONFIGS[name]
    weights = oracle.random_weights(config, tied=tied, seed=seed)
    return params(weights, config, dtype), weights


def ids(config: Config, *shape: int, seed: int = 0) -> np.ndarray:
    """Random token ids, none of them BOS or EOS."""
    return np.random.default_rng(seed).integers(3, config.vocab_size, shape, dtype=np.int32)


def greedy(rows: int):
    """The sampling settings of rows that take the best token."""
    return to_sampling([Settings(temperature=0.0)] * rows)
