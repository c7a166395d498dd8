"""A chat that goes on: a conversation, and the cache that holds what the model has read of it."""

from __future__ import annotations

from collections.abc import Generator

from jllama import generation
from jllama.chat import Conversation, Template
from jllama.generation import Answer, Completion, Prompt
from jllama.llm import LLM
from jllama.pool import Pool
from jllama.row import Kept
from jllama.settings import Settings


class Session:
    """A conversation with a model.

    Args:
      llm: the model.
      template: its chat template.
      system: the system message, "" for none.
      settings: how it answers.

    Attributes:
      conversation: the turns so far.
      dropped: how many of the oldest turns did not fit the context any more when the last question was asked.

    Raises:
      GrammarError: the answers are to have a format that can't be compiled.
    """

    def __init__(self, llm: LLM, template: Template, system: str, settings: Settings) -> None:
        self.llm = llm
        self.settings = settings
        self.conversation = Conversation(template, system)
        self.dropped = 0
        self._kept: Kept | None = None
        if (form := settings.form) is not None:
            llm.grammars.check(form)

    def reset(self, system: str | None = None) -> None:
        """Forget all turns; with `system`, begin with another system message."""
        system = self.conversation.system if system is None else system
        self.conversation = Conversation(self.conversation.template, system)

    def ask(self, question: str) -> Generator[str, None, Completion]:
        """Answer a question, piece by piece; returns the completion. Only what is new of the conversation is read.

        A turn that is broken off, by closing the generator or by an exception, stays with what was said.

        Raises:
          ChatError: the question alone doesn't fit the context, or the template refuses it.
          TokenizerError: the question can't be encoded.
          FloatingPointError: the model's logits are not finite.
        """
        context = self.llm.params.config.max_seq_len
        room = min(self.settings.max_new_tokens, context // 2)  # for the answer
        ids, conversation, self.dropped = self.conversation.ask(question, context - room)
        self.llm.runner.check(ids, self.settings)
        answer = Answer(self.llm.tokenizer, Prompt(question, self.settings), ids)
        pool = Pool(self.llm.runner, self.llm.tokenizer.stop_ids, 1)
        kept, self._kept = self._kept, None
        try:
            yield from generation.follow(pool, answer, kept)
        finally:
            for row in pool.rows:  # none, where the prompt was not read to its end
                self._kept = pool.leave(row)
                self.conversation = conversation.add(question, answer.text)
        return answer.completion()
