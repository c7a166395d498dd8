"""What the file of a family says: how to read its metadata, and where its tensors are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from absl import logging

from jllama.config import Config
from jllama.errors import listed
from jllama.families.fields import Fields


class Layout(NamedTuple):
    """Where the files of one format have the tensors of a family."""

    # By the names of `tensors.tensors`, both without `.weight` and `.bias`, `{}` standing for the number of the layer.
    # Tensors under one name are one matrix there, its rows in the order of the table. Experts' have a second `{}` where
    # the files have a tensor for each, and else one for all.
    names: Mapping[str, str]
    fused: Mapping[str, str] = {}  # names that are used in place of those where a file has them
    optional_prefix: str = ""  # of those names, which some files leave out of all
    half_split: bool = False  # rotary pairs are (j, j + H/2) of each head, where the engine's are neighbours
    transposed: bool = False  # matrices of layers are [in, out]
    by_heads: bool = False  # wq, wk and wv under one name have the rows of each head together
    norm_offset: float = 0.0  # what is added to the weights of norms
    constants: str = r"(?!)"  # a pattern of the names of tables and masks that follow from the config
    others: str = r"(?!)"  # a pattern of the names of what else may be there and is no part of the model

    def kept(self, names: Iterable[str], origin: str) -> list[str]:
        """Give the names of the tensors that may be the model's; it is said which of the others are left out."""
        found = [name for name in names if not re.fullmatch(self.constants, name)]
        if others := [name for name in found if re.fullmatch(self.others, name)]:
            logging.warning("%s: left out, as no part of the model: %s", origin, listed(others))
        return [name for name in found if name not in others]


class HuggingFace(NamedTuple):
    """A kind of model in Hugging Face's folders.

    What `config` returns are the arguments of `Config`; `tied` is None among them where the fields don't say it and the
    tensors do.
    """

    model_type: str  # in config.json
    architecture: str  # the class in `architectures` that goes with it
    config: Callable[[Fields], dict[str, Any]]
    layout: Layout
    fields: Callable[[Config], dict[str, Any]] | None = None  # the opposite of `config`; None: it can't be written


class GGUF(NamedTuple):
    """A kind of model in GGUF files.

    What `config` returns are the arguments of `Config`, but for those that a file says only by its tensors. The fields
    are those after the architecture's name, `attention.head_count` for `llama.attention.head_count`.
    """

    architecture: str  # `general.architecture`
    config: Callable[[Fields], dict[str, Any]]
    layout: Layout
