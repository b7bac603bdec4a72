"""Summaries by a model: the `write` callback of `summarize` and of a conversation's rolling summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from localrag.errors import BudgetExceededError, InterruptedRunError
from localrag.summary import ANSWER_TOKENS, usable
from localrag.text.markup import Part, encode
from localrag.text.sentences import whole_sentences
from localrag.text.thinking import without_thoughts
from localrag.text.tokens import ChatTemplate, TokenCounter
from localrag.types import Completion, Message, SamplingParams, Slot

PART_TOKENS = 1024
"""Maximum tokens read for one summary: long enough for a topic, short enough to wait for on a CPU."""

_INSTRUCTION = "\n\nSummarize the text above in two sentences."  # after the text: small models forget instructions before it
_JOIN_TOKENS = 8
_REPEAT_PENALTY = 1.1  # without it, small models end in loops


class Engine(Protocol):
    """The part of an engine that a Writer uses."""

    @property
    def counter(self) -> TokenCounter: ...
    @property
    def template(self) -> ChatTemplate: ...
    def make_slot(self, requested: int | None, /) -> Slot: ...
    def reserve(self, num_cells: int, /) -> None: ...
    def generate(self, prompt_ids: list[int], sampling: SamplingParams, /) -> Completion: ...


class Writer:
    """Summarise a text with a model: `writer(text, max_tokens)` decodes greedily and returns "" if the result is not usable.

    `max_text_tokens` is the maximum length of a text, as it is sent, that leaves room for the longest answer. Raises
    TemplateError for a model without a chat template.
    """

    def __init__(self, engine: Engine, *, n_ctx: int | None = None) -> None:
        self._engine = engine
        self._n_ctx = engine.make_slot(n_ctx).n_ctx
        frame = len(self._encode("x")) + ANSWER_TOKENS + _JOIN_TOKENS
        self.max_text_tokens = max(0, min(PART_TOKENS, self._n_ctx - frame))

    def __call__(self, text: str, max_tokens: int) -> str:
        """Raises BudgetExceededError if text and answer do not fit the window, InterruptedRunError if the user stopped it."""
        prompt_ids = self._encode(text)
        if len(prompt_ids) + max_tokens > self._n_ctx:
            raise BudgetExceededError(self._n_ctx, {"text": len(prompt_ids), "answer": max_tokens})
        self._engine.reserve(len(prompt_ids) + max_tokens)
        sampling = SamplingParams(max_tokens=max_tokens, repeat_penalty=_REPEAT_PENALTY)
        completion = self._engine.generate(prompt_ids, sampling)
        if completion.finish_reason == "cancelled":
            raise InterruptedRunError("Interrupted.")
        summary = without_thoughts(completion.text).strip()
        if completion.finish_reason == "length":
            summary = whole_sentences(summary)
        return usable(summary, text)

    def _encode(self, text: str) -> list[int]:
        return prompt_of(self._engine, [Message("user", (text.strip() + _INSTRUCTION).lstrip())])


def prompt_of(engine: Engine, messages: Sequence[Message]) -> list[int]:
    """Encode a prompt with just these messages, in tokens. A reasoning model does not think before its answer."""
    segments = engine.template.render(messages, thinks=False)
    parts = [Part("text" if segment.is_content else "template", segment.text, is_markup=not segment.is_content) for segment in segments]
    return [token for part in encode(parts, engine.counter.tokenizer) for token in part.token_ids]
