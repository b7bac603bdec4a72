"""Summaries in a model's own words: what `summarize` and a conversation's rolling summary call as `write`."""

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
"""The most that is read for one summary: long enough to be about something, short enough to be waited for on a CPU."""

_INSTRUCTION = "\n\nSummarize the text above in two sentences."  # behind the text: small models forget what stands before it
_JOIN_TOKENS = 8
_REPEAT_PENALTY = 1.1  # without it, small models end in loops


class Engine(Protocol):
    """What is used here of an engine."""

    @property
    def counter(self) -> TokenCounter: ...
    @property
    def template(self) -> ChatTemplate: ...
    def make_slot(self, requested: int | None, /) -> Slot: ...
    def reserve(self, num_cells: int, /) -> None: ...
    def generate(self, prompt_ids: list[int], sampling: SamplingParams, /) -> Completion: ...


class Writer:
    """`writer(text, max_tokens)` is a summary of a text by a model, greedily decoded; empty where the model wrote nothing usable.

    `max_text_tokens` is the most that a text may have, as it is sent, beside the longest answer. TemplateError for a model without a
    chat template.
    """

    def __init__(self, engine: Engine, *, n_ctx: int | None = None) -> None:
        self._engine = engine
        self._n_ctx = engine.make_slot(n_ctx).n_ctx
        frame = len(self._encode("x")) + ANSWER_TOKENS + _JOIN_TOKENS
        self.max_text_tokens = max(0, min(PART_TOKENS, self._n_ctx - frame))

    def __call__(self, text: str, max_tokens: int) -> str:
        """BudgetExceededError if text and answer do not fit the window, InterruptedRunError if a person stopped it."""
        prompt_ids = self._encode(text)
        if len(prompt_ids) + max_tokens > self._n_ctx:
            raise BudgetExceededError(self._n_ctx, {"text": len(prompt_ids), "answer": max_tokens})
        self._engine.reserve(len(prompt_ids) + max_tokens)
        sampling = SamplingParams(max_tokens=max_tokens, repeat_penalty=_REPEAT_PENALTY)
        completion = self._engine.generate(prompt_ids, sampling)
        if completion.finish_reason == "cancelled":
            raise InterruptedRunError("Interrupted.")
        written = without_thoughts(completion.text).strip()
        if completion.finish_reason == "length":
            written = whole_sentences(written)
        return usable(written, text)

    def _encode(self, text: str) -> list[int]:
        return prompt_of(self._engine, [Message("user", (text.strip() + _INSTRUCTION).lstrip())])


def prompt_of(engine: Engine, messages: Sequence[Message]) -> list[int]:
    """A prompt that holds these messages and nothing else, in tokens; a model that can think does not before it answers."""
    segments = engine.template.render(messages, thinks=False)
    parts = [Part("text" if segment.is_content else "template", segment.text, is_markup=not segment.is_content) for segment in segments]
    return [token for part in encode(parts, engine.counter.tokenizer) for token in part.token_ids]
