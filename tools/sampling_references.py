"""Make tests/data/sampling.npz: what the logits processors of transformers do to random logits.

  pip install torch transformers numpy
  python tools/sampling_references.py

Frequency and presence penalty, which transformers lacks, are vLLM's `apply_penalties`, written out: logits less
frequency times the count of a generated token, less presence where there is one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import generation as hf

OUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "sampling.npz"
VOCAB, PROMPT, NEW = 200, 12, 9
# bias, repetition, frequency, presence, temperature, top_k, top_p, min_p, min_new_tokens
CASES = [
    (0, 1.0, 0.0, 0.0, 1.0, 0, 1.0, 0.0, 10),
    (1, 1.0, 0.0, 0.0, 1.0, 0, 1.0, 0.0, 0),
    (1, 1.3, 0.0, 0.0, 0.7, 0, 0.9, 0.0, 10),
    (0, 0.8, 0.7, 0.0, 1.0, 20, 1.0, 0.0, 9),
    (1, 1.5, 0.5, 1.1, 1.3, 50, 0.8, 0.05, 10),
    (0, 1.0, -1.5, 2.0, 1.0, 0, 1.0, 0.1, 0),
    (1, 1.1, 2.0, -2.0, 0.5, 30, 0.95, 0.02, 0),
]
ENDS = [3, 150]


def expected(logits: torch.Tensor, ids: torch.Tensor, bias: dict[int, float], case: tuple[float, ...]) -> torch.Tensor:
    """Return the probabilities of the next token, in the order of `transformers`."""
    has_bias, repetition, frequency, presence, temperature, top_k, top_p, min_p, least = case
    if has_bias:
        logits = hf.SequenceBiasLogitsProcessor({(i,): x for i, x in bias.items()})(ids, logits)
    if repetition != 1:
        logits = hf.RepetitionPenaltyLogitsProcessor(repetition)(ids, logits)
    counts = torch.bincount(ids[0, PROMPT:], minlength=VOCAB)[None]
    logits = logits - frequency * counts - presence * (counts > 0)
    logits = hf.MinNewTokensLengthLogitsProcessor(PROMPT, int(least), ENDS, device="cpu")(ids, logits)
    logits = hf.TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        logits = hf.TopKLogitsWarper(int(top_k))(ids, logits)
    logits = hf.TopPLogitsWarper(top_p)(ids, logits)
    if min_p:
        logits = hf.MinPLogitsWarper(min_p)(ids, logits)
    return torch.softmax(logits, -1)


def main() -> None:
    """Write the file."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (len(CASES), VOCAB)).astype(np.float32)
    logits[:, ENDS] += 6
    ids = rng.integers(0, 25, (len(CASES), PROMPT + NEW)).astype(np.int32)
    bias = {int(i): float(x) for i, x in zip(rng.permutation(VOCAB)[:30], rng.uniform(-8, 8, 30).round(2), strict=True)}
    found = [
        expected(torch.tensor(x[None], dtype=torch.float64), torch.tensor(row[None], dtype=torch.int64), bias, case)
        for x, row, case in zip(logits, ids, CASES, strict=True)
    ]
    np.savez_compressed(
        OUT, logits=logits, ids=ids, prompt=PROMPT, ends=ENDS, bias_ids=list(bias), biases=list(bias.values()),
        cases=np.array(CASES), probabilities=np.concatenate([x.numpy() for x in found]),
    )  # fmt: skip


if __name__ == "__main__":
    main()
