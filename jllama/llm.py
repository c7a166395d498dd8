"""`LLM`: a model and its tokenizer in one hand. Text in, text out: batches, streams, scores."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Unpack

import numpy as np
from jax.sharding import Mesh

from jllama import checkpoint, decode, generation, processes
from jllama import mesh as meshes
from jllama import tokenizer as tokenizers
from jllama.checkpoint import hub
from jllama.generation import Completion, Prompt, Row
from jllama.model import Params
from jllama.run import KVDtype, choose
from jllama.runner import Runner, Timings
from jllama.settings import Overrides, Settings
from jllama.tokenizer import Tokenizer

_SCORE_WINDOW = 2048  # tokens of context in scores, where a model has more
_SCORE_TOKENS = 2048  # scored at a time: their logits are the largest array there is
_MAX_BATCH = 2**16
_WINDOW_BATCHES = 16  # batches whose prompts are sorted together


@dataclasses.dataclass(frozen=True)
class Score:
    """How well a model predicts a text: one entry a token, arrays of one length.

    Args:
      logprobs: float32, the natural log of each token's probability.
      best: int32, the most probable id in each token's place.
      n_bytes: the length of the text in UTF-8.
    """

    logprobs: np.ndarray
    best: np.ndarray
    n_bytes: int

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability of a token."""
        return float(np.exp(-np.mean(self.logprobs, dtype=np.float64)))

    @property
    def bits_per_byte(self) -> float:
        """Total negative log-probability in bits, per byte of text: comparable between tokenizers."""
        return float(-np.sum(self.logprobs, dtype=np.float64) / np.log(2) / self.n_bytes)


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError for a number of prompts that can't share a step."""
    if not (isinstance(batch_size, int) and 1 <= batch_size <= _MAX_BATCH):
        raise ValueError(f"batch_size = {batch_size!r}: expected an integer from 1 to {_MAX_BATCH}")


class LLM:
    """A model, its tokenizer, and the programs compiled for them so far."""

    def __init__(self, params: Params, tokenizer: Tokenizer) -> None:
        """Join a model and a tokenizer.

        Raises:
          ValueError: they disagree on the size of the vocabulary.
        """
        self.params = params
        self.tokenizer = tokenizer.fit(params.config.vocab_size)
        self.runner = Runner(params)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        rope_theta: float | None = None,
        mesh: str | Mesh | None = None,
        kernels: str = "auto",
        kv_dtype: KVDtype = "float32",
    ) -> LLM:
        """Load a checkpoint and its tokenizer.

        Args:
          path: the checkpoint.
          tokenizer: the file of its tokenizer; None looks in and beside the checkpoint.
          dtype: of the weights: "float32", "bfloat16", "int8", or "auto", what the file stores.
          rope_theta: base of the rotary frequencies, for files that can't say it; None takes the file's.
          mesh: the devices it is laid out over, all there are: "data:2,model:4", or what `mesh.make_mesh` makes;
            None: the default device.
          kernels: "xla", "native" or "auto", as for `run.choose`.
          kv_dtype: of the keys and values kept: "float32" or "bfloat16".

        Raises:
          CheckpointError: the checkpoint can't be read.
          TokenizerError: the tokenizer can't be found or read.
          ValueError: they don't fit each other, or the mesh doesn't fit the devices or the model.
        """
        if isinstance(mesh, str):
            mesh = meshes.make_mesh(mesh)
        path = hub.local(path)
        found = tokenizers.load(tokenizers.find(path) if tokenizer is None else tokenizer)
        run = choose(kernels, kv_dtype, on_mesh=mesh is not None)
        return cls(checkpoint.load(path, dtype=dtype, rope_theta=rope_theta, run=run, mesh=mesh), found)

    @property
    def timings(self) -> Timings:
        """Where the time of the work so far went."""
        return self.runner.timings

    @property
    def dtype(self) -> str:
        """What the weights are kept in: "float32", "bfloat16" or "int8"."""
        return self.params.embedding.dtype

    @property
    def window(self) -> int:
        """The most tokens that `score` looks at together."""
        return min(self.params.config.max_seq_len, _SCORE_WINDOW)

    def generate(
        self, prompts: Sequence[str | Prompt], *, batch_size: int = 8, **settings: Unpack[Overrides]
    ) -> list[Completion]:
        """Continue every prompt.

        Args:
          prompts: texts, or `Prompt`s, which bring their own settings.
          batch_size: how many prompts share a step.
          **settings: fields of `Settings`, for the texts.

        Returns:
          One completion a prompt, in order.

        Raises:
          ValueError: a wrong setting, or a prompt longer than the context; before any work.
          FloatingPointError: the model's logits are not finite.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a single string: expected a list of them")
        default = Settings(**settings)
        requests = [p if isinstance(p, Prompt) else Prompt(p, default) for p in prompts]
        for request in requests:
            self.encode(request)
        return list(self.complete(requests, batch_size=batch_size))

    def complete(
        self, prompts: Iterable[Prompt], *, batch_size: int = 8, progress: Callable[[int], object] = lambda n: None
    ) -> Iterator[Completion]:
        """Continue any number of prompts, in order, holding a window of some of them at a time.

        The prompts of a window are sorted by length, so that those of a batch are alike, and come back in order when
        the window is done. `progress` is called after each batch, with its number of prompts.

        Raises:
          ValueError: a wrong batch size, or a prompt longer than the context; windows before it are done.
          FloatingPointError: the model's logits are not finite.
        """
        check_batch_size(batch_size)
        prompts = iter(prompts)
        while window := [self._row(p) for p in itertools.islice(prompts, _WINDOW_BATCHES * batch_size)]:
            in_order = sorted(window, key=lambda row: len(row.ids))
            for i in range(0, len(window), batch_size):
                batch = in_order[i : i + batch_size]
                for _ in generation.run(self.runner, batch, self.tokenizer.stop_ids, stream=False):
                    pass
                progress(len(batch))
            yield from (row.completion() for row in window)

    def stream(self, prompt: str | Prompt, **settings: Unpack[Overrides]) -> Generator[str, None, Completion]:
        """Continue one prompt, piece by piece as the text is generated.

        The pieces, joined, are the `text` of `generate` for the same prompt and settings; the generator returns the
        completion. Raises like `generate`.
        """
        row = self._row(prompt if isinstance(prompt, Prompt) else Prompt(prompt, Settings(**settings)))
        return generation.stream(self.runner, row, self.tokenizer.stop_ids)

    def _row(self, prompt: Prompt) -> Row:
        return Row(self.tokenizer, prompt, self.encode(prompt))

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn a prompt into ids, the beginning-of-text token first.

        Raises:
          ValueError: they don't fit the context.
        """
        ids = self.tokenizer.prompt_ids(prompt.text)
        self.runner.check(ids)
        return ids

    def score(self, text: str) -> Score:
        """Score a text, in windows of the model's context (of 2,048 tokens at most), each after a BOS token.

        Raises:
          ValueError: the text is empty.
          FloatingPointError: the model's logits are not finite.
        """
        ids = np.array(self.tokenizer.encode(text), np.int32)
        if not len(ids):
            raise ValueError("the text to score is empty")
        width = self.window - 1
        rows = min(-(-len(ids) // width), max(1, _SCORE_TOKENS // width))
        rows = -(-rows // self.runner.shards) * self.runner.shards
        count = -(-len(ids) // (width * rows))
        windows = np.pad(ids, (0, count * rows * width - len(ids))).reshape(count, rows, width)
        windows = np.pad(windows, ((0, 0), (0, 0), (1, 0)), constant_values=self.tokenizer.bos)
        with self.runner.timed("prompt"):
            blocks = [self.runner.put(window, meshes.ROWS) for window in windows]
            scored = [processes.get(self.runner.call(decode.compiled_score, self.params, block)) for block in blocks]
        self.timings.prompt_tokens += len(ids)
        logprobs, best = (np.concatenate([np.ravel(s) for s in part])[: len(ids)] for part in zip(*scored, strict=True))
        if not np.isfinite(logprobs).all():
            raise FloatingPointError("non-finite logits: the weights hold NaN or infinity")
        return Score(logprobs, best, len(text.encode()))
