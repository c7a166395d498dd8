"""Small models for the tests: random weights as a dict for the oracle, and as `Params`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from jllama.checkpoint.build import build_params, sources_of
from jllama.checkpoint.source import Source
from jllama.config import Config
from jllama.llm import LLM
from jllama.model import Params, forward, head, init_cache
from jllama.rope import Llama3
from jllama.run import Run
from jllama.settings import Settings, to_sampling
from jllama.tensors import fitted
from jllama.tokenizer import Tokenizer

# name -> config, tied: multi-head and grouped heads, head_dim other than dim / heads, stretched rotary frequencies
CONFIGS = {
    "mha": (Config(32, 64, 2, 4, 4, 97, 64), True),
    "gqa": (Config(48, 80, 2, 8, 2, 97, 64), False),
    "mqa": (Config(32, 48, 3, 4, 1, 65, 64, norm_eps=1e-3), True),
    "head_dim": (Config(40, 56, 2, 6, 3, 97, 64, head_dim=16, rope_theta=5e5), False),
    "llama3": (Config(32, 64, 2, 4, 2, 97, 64, rope_theta=500.0, rope_scaling=Llama3(8.0, 1.0, 4.0, 16)), True),
}

_forward = jax.jit(forward)


def params(weights: oracle.Weights, config: Config, dtype: str = "float32", run: Run | None = None) -> Params:
    """Build a model from a dict of tensors."""
    sources = {name: Source(a.shape, lambda start, stop, a=a: a[start:stop]) for name, a in weights.items()}
    return build_params(fitted(config, weights), sources, dtype=dtype, origin="test", run=run or Run())


def running(params: Params, run: Run) -> Params:
    """Build a model again, to be run in another way."""
    return build_params(params.config, sources_of(params), dtype=params.embedding.dtype, origin="test", run=run)


def model(name: str, dtype: str = "float32", seed: int = 0) -> tuple[Params, oracle.Weights]:
    """Make one of `CONFIGS` with random weights."""
    config, tied = CONFIGS[name]
    weights = oracle.random_weights(config, tied=tied, seed=seed)
    return params(weights, config, dtype), weights


def all_logits(params, tokens: np.ndarray, run=_forward) -> np.ndarray:
    """Logits at every position of `tokens [B, T]`."""
    hidden, _ = run(params, init_cache(params, *tokens.shape), tokens, jnp.zeros(len(tokens), jnp.int32))
    return np.array(head(params, hidden))


def ids(config: Config, *shape: int, seed: int = 0) -> np.ndarray:
    """Random token ids, none of them BOS or EOS."""
    return np.random.default_rng(seed).integers(3, config.vocab_size, shape, dtype=np.int32)


def greedy(rows: int):
    """The sampling settings of rows that take the best token."""
    return to_sampling([Settings(temperature=0.0)] * rows)


def chain(successor: list[int], max_seq_len: int = 64, unlikely: Sequence[int] = ()) -> Params:
    """Make a model that always continues token i with `successor[i]`: one-hot embeddings, layers that add nothing.

    Where that can't be, it takes one of the tokens that are not `unlikely`.
    """
    v = len(successor)
    config = Config(v, 2, 1, 1, 1, v, max_seq_len, head_dim=2)
    weights = {name: np.zeros_like(a) for name, a in oracle.random_weights(config, tied=False).items()}
    weights["tok_embeddings.weight"] = np.eye(v, dtype=np.float32)
    weights["norm.weight"] = np.ones(v, np.float32)
    weights["output.weight"][list(unlikely)] = -10.0
    weights["output.weight"][successor, range(v)] = 10.0
    return params(weights, config)


class Letters(Tokenizer):
    """A tokenizer whose text is encoded letter by letter; longer pieces come only out of a model."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__([(p, p) for p in pieces], bos=1, eos=2)

    def encode(self, text: str) -> list[int]:
        return [self._pieces.index((c.encode(), c.encode())) for c in text]

    def first_after(self, token: int, *, first: bool) -> bool:
        return False


def says(prompt: bytes, *pieces: bytes, max_seq_len: int = 64) -> LLM:
    """Make a model that answers `prompt`, a single letter, with these pieces in turn, and then with EOS."""
    vocabulary = [b"", b"", b"", prompt, *pieces]
    successor = [2, 2, 2, 4, *range(5, 4 + len(pieces)), 2]
    return LLM(chain(successor[: len(vocabulary)], max_seq_len), Letters(vocabulary))


def assert_same(found: oracle.Weights, expected: oracle.Weights) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


# Prints the peak of memory that loading a checkpoint adds, and the bytes of weights that are here then. With a port and
# a number this is one of two processes, and loads its part.
PEAK = """
import sys
import jax
from jllama import checkpoint, mesh, processes

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

path, dtype, *process = sys.argv[1:]
if process:
    processes.connect(f"127.0.0.1:{process[0]}", 2, int(process[1]))
on = mesh.make_mesh("model:2") if process else None
jax.device_put([0.0])[0].block_until_ready()
before = peak()
params = checkpoint.load(path, dtype=dtype, mesh=on)
print(peak() - before, sum(s.data.nbytes for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards))
"""
