"""Control tokens: where they stand in a template's text, and how a look-alike in a message stays text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")  # of a turn or a text
LOOKS_CONTROL = re.compile(r"<\|[^<>]+\|>")
LOOKS_NAME = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # of BOS or EOS, which some files don't list as control tokens

_GUARD = "\ud800"  # a lone surrogate, so no text that can be encoded holds it


class Special:
    """The control tokens of a vocabulary.

    Args:
      ids: their ids by their texts.
      lstrip: texts of those that take in the white space before them.
      rstrip: texts of those that take in the white space after them.

    Attributes:
      ids: as given, without texts of one character, which can't be told from text.
    """

    def __init__(self, ids: Mapping[str, int], lstrip: Collection[str] = (), rstrip: Collection[str] = ()) -> None:
        self.ids = {text: i for text, i in ids.items() if len(text) > 1}
        self._texts = sorted(self.ids, key=len, reverse=True)  # of two that begin alike the longer one is meant
        self._look_alike = _any_of(map(re.escape, self._texts))
        self._token = _any_of(
            (r"\s*" if t in lstrip else "") + f"({re.escape(t)})" + (r"\s*" if t in rstrip else "") for t in self._texts
        )
        self._beginnings = tuple({t[:n] for t in self._texts for n in range(1, len(t))})
        self._endings = tuple({t[n:] for t in self._texts for n in range(1, len(t))})

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the ids of the control tokens in `text` and the texts between them, in order, without guards."""
        at = 0
        for match in self._token.finditer(text):
            if between := text[at : match.start()].replace(_GUARD, ""):
                yield between
            assert match.lastindex is not None
            yield self.ids[self._texts[match.lastindex - 1]]
            at = match.end()
        if rest := text[at:].replace(_GUARD, ""):
            yield rest

    def guard(self, text: str) -> str:
        """Return `text` marked so that `split` finds no control token in it, nor one that it is a part of."""
        text = self._look_alike.sub(lambda match: match[0][0] + _GUARD + match[0][1:], text)
        # The marks go inside the white space around a text, so that a template can still strip it.
        if (body := text.rstrip()).endswith(self._beginnings):
            text = body + _GUARD + text[len(body) :]
        body = text.lstrip()
        if body.startswith(self._endings) or (body and any(body.rstrip() in token for token in self._texts)):
            text = text[: len(text) - len(body)] + _GUARD + body
        return text

    def stop_ids(self, *ids: int) -> tuple[int, ...]:
        """Return `ids` and those of the control tokens that end a turn or a text, each once."""
        return tuple(dict.fromkeys([*ids, *(self.ids[text] for text in ENDS if text in self.ids)]))


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)")
