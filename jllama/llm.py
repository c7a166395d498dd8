"""`LLM`: a model and its tokenizer in one hand. Text in, text out: batches, streams, scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from jax.sharding import Mesh

from jllama import checkpoint, generation, gguf_file, speculator
from jllama import mesh as meshes
from jllama import tokenizer as tokenizers
from jllama.chat import ChatError, Message, Template, find_template
from jllama.checkpoint import hub
from jllama.config import Config, from_toml
from jllama.errors import quoted
from jllama.generation import Answer, Completion, Prompt
from jllama.grammar import Grammars
from jllama.model import Params
from jllama.pool import Pool
from jllama.programs import SCORE
from jllama.run import KVDtype, Run, choose
from jllama.runner import Runner, Timings
from jllama.settings import Overrides, Settings
from jllama.speculator import Speculate
from jllama.tokenizer import Tokenizer, TokenizerError
from jllama.tools import to_tools, turn

_SCORE_WINDOW = 2048  # tokens of context in scores, where a model has more
_SCORE_TOKENS = 2048  # scored at a time: their logits are the largest array there is
_MAX_BATCH = 2**16


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


def _load_draft(path: str | Path, tokenizer: Tokenizer, run: Run) -> Params:
    """Load a draft model for a model with this tokenizer; without one of its own it has the same."""
    source = hub.local(path)
    params = checkpoint.load(source, run=run)
    try:
        own = tokenizers.load(tokenizers.find(source))
    except TokenizerError:
        own = tokenizer
    if different := tokenizer.first_difference(own.fit(params.config.vocab_size)):
        raise ValueError(f"draft = {quoted(str(path))}: {different}: expected a model with the same tokenizer")
    return params


class LLM:
    """A model, its tokenizer, and the programs compiled for them so far; for one thread at a time."""

    def __init__(
        self,
        params: Params,
        tokenizer: Tokenizer,
        *,
        template: Template | Path | None = None,
        compile_cache: str | Path | None = None,
        speculate: Speculate = "auto",
        draft: Params | None = None,
    ) -> None:
        """Join a model and a tokenizer.

        Args:
          params: the model.
          tokenizer: what it was trained with.
          template: for `chat`, or the checkpoint that has one.
          compile_cache: as for `load`.
          speculate: as for `load`.
          draft: a smaller model with the same tokenizer.

        Raises:
          ValueError: the two disagree on the size of the vocabulary; a wrong way to speculate.
        """
        self.params = params
        self.tokenizer = tokenizer.fit(params.config.vocab_size)
        self.grammars = Grammars(self.tokenizer, params.config.vocab_size)
        self.runner = Runner(params, compile_cache, banned=self.tokenizer.unused, grammars=self.grammars)
        self.runner.speculator = speculator.choose(speculate, params, draft)
        self._template = template

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        *,
        config: str | Path | Config | None = None,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        rope_theta: float | None = None,
        context: int | None = None,
        mesh: str | Mesh | None = None,
        kernels: str = "auto",
        kv_dtype: KVDtype = "float32",
        compile_cache: str | Path | None = None,
        speculate: Speculate = "auto",
        draft: str | Path | None = None,
    ) -> LLM:
        """Load a checkpoint and its tokenizer.

        Args:
          path: the checkpoint.
          config: sizes of a model, or a file of them as in configs/, in place of a checkpoint: its weights are random.
          tokenizer: the file of its tokenizer, the folder, or a model's name; None looks in and beside the checkpoint.
          dtype: of the weights: "float32", "bfloat16", "int8", "int4", or "auto", what the file stores.
          rope_theta: base of the rotary frequencies, for files that can't say it; None takes the file's.
          context: the longest text in tokens, at most the model's own; with longrope it chooses the factors. None: the
            model's own, with longrope that of its short factors.
          mesh: the devices it is laid out over, all there are: "data:2,model:4", or what `mesh.make_mesh` makes;
            None: the default device.
          kernels: "xla", "native" or "auto", as for `run.choose`.
          kv_dtype: of the keys and values kept: "float32" or "bfloat16".
          compile_cache: a folder of your own, where compiled programs of a single device are kept for the next start;
            None: nowhere.
          speculate: how tokens are guessed, so that one pass of the model gives several: "lookup" in the text so far,
            "draft" by a smaller model; "off"; or "auto", by the smaller model if there is one and else in the text,
            where it is faster and the same text comes out to the bit.
          draft: the checkpoint of a smaller model with the same tokenizer.

        Raises:
          CheckpointError: the checkpoint can't be read.
          TokenizerError: the tokenizer can't be found or read.
          ValueError: they don't fit each other, or the mesh doesn't fit the devices or the model; both a checkpoint
            and a config, or neither; a config without a tokenizer.
        """
        if (path is None) == (config is None):
            raise ValueError("expected either a checkpoint or a config")
        if isinstance(mesh, str):
            mesh = meshes.make_mesh(mesh)
        run = choose(kernels, kv_dtype, on_mesh=mesh is not None)
        source = None if path is None else hub.local(path)
        if tokenizer is None and source is None:
            raise ValueError("a config makes random weights, which bring no tokenizer: expected a tokenizer too")
        named = hub.is_name(tokenizer)
        beside = hub.local(str(tokenizer)) if named else Path(tokenizer or source or "")
        # The header of a large vocabulary takes a while: it is read once, for the tokenizer and for the weights.
        header = None if source is None else gguf_file.header_of(source)
        file = tokenizers.find(beside) if tokenizer is None or named or beside.is_dir() else beside
        found = tokenizers.load(file, header=header if file == source else None)
        model = source or (config if isinstance(config, Config) else from_toml(str(config)))
        params = checkpoint.load(
            model, dtype=dtype, rope_theta=rope_theta, context=context, run=run, mesh=mesh, header=header
        )
        small = None if draft is None else _load_draft(draft, found.fit(params.config.vocab_size), run)
        return cls(
            params, found, template=source or beside, compile_cache=compile_cache, speculate=speculate, draft=small
        )

    @property
    def timings(self) -> Timings:
        """Where the time of the work so far went."""
        return self.runner.timings

    @property
    def dtype(self) -> str:
        """What the embedding is kept in, and mostly the other matrices: a key of `weights.FORMS`."""
        return self.params.embedding.dtype

    @property
    def window(self) -> int:
        """The most tokens that `score` looks at together."""
        return min(self.params.config.max_seq_len, _SCORE_WINDOW)

    def generate(
        self, prompts: Sequence[str | Prompt], *, batch_size: int = 8, n: int = 1, **settings: Unpack[Overrides]
    ) -> list[Completion]:
        """Continue every prompt.

        Args:
          prompts: texts, or `Prompt`s, which bring their own settings.
          batch_size: how many prompts share a step.
          n: how many completions each prompt gets, with the seeds seed, seed + 1, and so on.
          **settings: fields of `Settings`, for the texts.

        Returns:
          The n completions of the first prompt, then those of the second, and so on.

        Raises:
          ValueError: a wrong setting, or a prompt longer than the context; before any work.
          FloatingPointError: the model's logits are not finite.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a single string: expected a list of them")
        default = Settings(**settings)
        given = [p if isinstance(p, Prompt) else Prompt(p, default) for p in prompts]
        requests = [variant for prompt in given for variant in prompt.variants(n)]
        check_batch_size(batch_size)
        answers = [self._answer(request) for request in requests]
        return list(self._complete(iter(answers), batch_size))

    def complete(
        self,
        prompts: Iterable[Prompt],
        *,
        batch_size: int = 8,
        ready: Callable[[], bool] = lambda: True,
        progress: Callable[[int], object] = lambda n: None,
    ) -> Iterator[Completion]:
        """Continue any number of prompts, and yield the completions in order, each as soon as it is there.

        Args:
          prompts: read as they are needed, and at most 16 batches ahead of the completion that is due.
          batch_size: how many prompts share a step; the place of one that ends is taken by the next.
          ready: whether the next prompt can be had without waiting, where they come from a pipe: without one, the
            others go on.
          progress: called with the number of prompts that were completed since the last call.

        Raises:
          ValueError: a wrong batch size, or a prompt longer than the context, after the completions of those before it.
          FloatingPointError: the model's logits are not finite.
        """
        check_batch_size(batch_size)
        answers = map(self._answer, prompts)
        return self._complete(answers, batch_size, ready, progress)

    def _complete(
        self,
        answers: Iterator[Answer],
        batch_size: int,
        ready: Callable[[], bool] = lambda: True,
        progress: Callable[[int], object] = lambda n: None,
    ) -> Iterator[Completion]:
        stop_ids = self.tokenizer.stop_ids
        found = generation.complete(
            self.runner, stop_ids, answers, batch_size=batch_size, ready=ready, progress=progress
        )
        return (answer.completion() for answer in found)

    def stream(self, prompt: str | Prompt, **settings: Unpack[Overrides]) -> Generator[str, None, Completion]:
        """Continue one prompt, piece by piece as the text is generated.

        The pieces, joined, are the `text` of `generate` for the same prompt and settings; the generator returns the
        completion. Raises like `generate`.
        """
        return self._stream(
            self._answer(prompt if isinstance(prompt, Prompt) else Prompt(prompt, Settings(**settings)))
        )

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        **settings: Unpack[Overrides],
    ) -> Completion:
        """Answer the last of some messages, each a `role` and a `content`, as the model's template has them.

        Args:
          messages: calls of earlier answers and their results among them.
          tools: functions that the model may call, as OpenAI's API writes them: the completion has its `tool_calls`.
          tool_choice: "none", "auto", "required", or which function must be called.
          parallel_tool_calls: whether there may be several calls in one answer.
          **settings: how it answers.

        Raises:
          ChatError: there is no template, or it refuses the messages.
          TokenizerError: a message can't be encoded.
          ValueError: a wrong setting or tool, or the messages don't fit the context.
          FloatingPointError: the model's logits are not finite.
        """
        pieces = self.stream_chat(
            messages, tools=tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, **settings
        )
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                completion: Completion = end.value
                return completion

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        **settings: Unpack[Overrides],
    ) -> Generator[str, None, Completion]:
        """Answer like `chat`, piece by piece, calls apart; returns the completion."""
        asked = turn(self.template, messages, to_tools(tools, tool_choice, parallel_tool_calls))
        how = asked.settings(Settings(**settings))
        text = messages[-1].get("content") if messages else ""
        prompt = Prompt(text if isinstance(text, str) else "", how)
        pieces = self._stream(Answer(self.tokenizer, prompt, self._checked(asked.ids, how)))
        return pieces if (parser := asked.parser()) is None else generation.with_calls(pieces, parser)

    @property
    def template(self) -> Template:
        """The chat template, found when it is first asked for.

        Raises:
          ChatError: there is none.
        """
        if self._template is None:
            raise ChatError("no chat template: expected one when the model and the tokenizer were joined")
        if isinstance(self._template, Path):
            self._template = find_template(self._template, self.tokenizer)
        return self._template

    def _stream(self, answer: Answer) -> Generator[str, None, Completion]:
        yield from generation.follow(Pool(self.runner, self.tokenizer.stop_ids, 1), answer)
        return answer.completion()

    def _answer(self, prompt: Prompt) -> Answer:
        return Answer(self.tokenizer, prompt, self.encode(prompt))

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn a prompt into ids, the beginning-of-text token first.

        Raises:
          ValueError: they don't fit the context, or the text is to have a format that can't be compiled.
        """
        ids = self.tokenizer.prompt_ids(prompt.text) if prompt.ids is None else list(prompt.ids)
        return self._checked(ids, prompt.settings)

    def _checked(self, ids: list[int], settings: Settings) -> list[int]:
        """Return the ids of a prompt that can be continued in this way."""
        self.runner.check(ids, settings)
        if (form := settings.form) is not None:
            self.grammars.check(form)
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
        windows = np.pad(ids, (0, count * rows * width - len(ids)), mode="edge").reshape(count, rows, width)
        windows = np.pad(windows, ((0, 0), (0, 0), (1, 0)), constant_values=self.tokenizer.bos)
        with self.runner.timed("prompt"):
            blocks = [self.runner.put(window, meshes.ROWS) for window in windows]
            scored = [self.runner.get(self.runner.call(SCORE, block)) for block in blocks]
        self.timings.prompt_tokens += len(ids)
        logprobs, best = (np.concatenate([np.ravel(s) for s in part])[: len(ids)] for part in zip(*scored, strict=True))
        if not np.isfinite(logprobs).all():
            raise FloatingPointError("non-finite logits: the weights hold NaN or infinity")
        return Score(logprobs, best, len(text.encode()))
