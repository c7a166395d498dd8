"""Many prompts on many machines: what each worker of Ray Data does. Splitting, scaling and trying again are Ray's."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jllama.generation import Prompt
from jllama.llm import LLM
from jllama.settings import Overrides, Settings


class Generate:
    """Continue a column of prompts: a class for `Dataset.map_batches`, of which each worker makes one.

    Args:
      checkpoint: as for `LLM.load`; every worker must be able to read it.
      prompt: the name of the column of prompts.
      batch_size: how many prompts share a step. Ray's own `batch_size` should be several times as much, so that the
        place of a prompt that ends is taken by another.
      settings: fields of `Settings`. Columns of such names override them row by row, where they hold a value. Give a
        seed, and a prompt that is answered again, after a worker died, gets the same text.
      **load: as for `LLM.load`.

    Raises:
      As `LLM.load` does, and ValueError for wrong settings.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        prompt: str = "prompt",
        batch_size: int = 8,
        settings: Overrides | None = None,
        **load: Any,
    ) -> None:
        self._llm = LLM.load(checkpoint, **load)
        self._column = prompt
        self._batch_size = batch_size
        self._default = Settings(**(settings or {}))

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the columns `text`, `tokens` (how many) and `finish_reason` to some rows.

        Raises:
          ValueError: there is no such column, or a prompt can't be continued.
          FloatingPointError: the model's logits are not finite.
        """
        if self._column not in rows:
            raise ValueError(f"no column {self._column!r}: expected it among {', '.join(rows)}")
        names = [field.name for field in dataclasses.fields(Settings) if field.name in rows]
        prompts = []
        for i, text in enumerate(rows[self._column]):
            own = {name: rows[name][i] for name in names if not _is_missing(rows[name][i])}
            prompts.append(Prompt(text, self._default.override(own)))
        found = self._llm.generate(prompts, batch_size=self._batch_size)
        return {
            **rows,
            "text": np.array([completion.text for completion in found], object),
            "tokens": np.array([len(completion.tokens) for completion in found], np.int32),
            "finish_reason": np.array([completion.finish_reason for completion in found], object),
        }


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float | np.floating) and np.isnan(value))
