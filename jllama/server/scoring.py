"""Log-probabilities of a prompt's own tokens, for requests that want it echoed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jllama.llm import LLM
from jllama.mesh import ROWS
from jllama.model import Params, forward, head, init_cache
from jllama.programs import Program
from jllama.runner import power_of_two
from jllama.sampling import log_probability
from jllama.server.logprobs import Top
from jllama.settings import MOST_LIKELY

_MIN_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """What a model makes of a prompt, token by token; of the first it says nothing.

    Args:
      logprobs: the natural log of each token's probability after those before it.
      tops: the likeliest ids in each token's place, and theirs.
    """

    logprobs: list[float | None]
    tops: list[Top]


def score_with_top(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Predict tokens 1 to T - 1 of `tokens [1, T]`: log-probabilities of each `[1, T-1]`, and of the likeliest ids."""
    hidden, _ = forward(params, init_cache(params, *tokens.shape), tokens, jnp.zeros(tokens.shape[0], jnp.int32))
    logits = head(params, hidden[:, :-1]).reshape(-1, params.config.vocab_size)
    values, ids = jax.lax.top_k(logits, min(MOST_LIKELY, params.config.vocab_size))
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return log_probability(logits, tokens[:, 1:].reshape(-1))[None], (values - total)[None], ids[None]


_SCORE = Program(score_with_top, ("model", "rows"), "rows")


def score(llm: LLM, ids: list[int]) -> PromptScores:
    """Score a prompt of up to `llm.window` tokens.

    Raises:
      FloatingPointError: the model's logits are not finite.
    """
    if len(ids) < 2:
        return PromptScores([None] * len(ids), [()] * len(ids))
    width = min(power_of_two(len(ids), _MIN_TOKENS), llm.window)
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(ids)] = ids
    found = llm.runner.get(llm.runner.call(_SCORE, llm.runner.put(padded, ROWS)))
    logprobs, values, likely = (part[0][: len(ids) - 1] for part in found)
    if not np.isfinite(logprobs).all():
        raise FloatingPointError("non-finite logits: the weights hold NaN or infinity")
    tops: list[Top] = [list(zip(*pair, strict=True)) for pair in zip(likely.tolist(), values.tolist(), strict=True)]
    return PromptScores([None, *logprobs.tolist()], [(), *tops])
