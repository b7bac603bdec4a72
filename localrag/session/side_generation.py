"""Something short that a conversation's model writes beside it: what is held of the conversation stays there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from localrag import citation
from localrag.conversation import Exchange, fit
from localrag.errors import InterruptedRunError
from localrag.summary import truncate
from localrag.text.markup import count_content

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.types import Completion, SamplingParams

JOIN_TOKENS = 2
MIN_SAID_TOKENS = 32


class SideGeneration:
    """Prompts of their own in the window of a conversation, whose prompt, `beside`, stays evaluated as far as it was."""

    def __init__(self, engine: Engine, *, n_ctx: int) -> None:
        self.engine = engine
        self.n_ctx = n_ctx
        self._count = partial(count_content, counter=engine.counter)

    def newest(self, history: Sequence[Exchange], limit: int) -> str:
        """The newest exchanges that take at most `limit` tokens, without the tags of sources, which mean nothing here; of the last one
        alone its beginning, if even that takes more. Empty where there is hardly any room."""
        if not history or limit < MIN_SAID_TOKENS:
            return ""
        kept, _ = fit(history, limit, lambda each: self._count(_transcript(each)) + JOIN_TOKENS)
        said = "\n".join(_transcript(each) for each in kept or history[-1:])
        return truncate(said, limit, self._count)

    def write(self, prompt_ids: list[int], sampling: SamplingParams, *, beside: Sequence[int]) -> Completion | None:
        """None where window or memory have no room for it. InterruptedRunError if a person stopped it."""
        num_cells = len(prompt_ids) + sampling.num_answer_tokens
        if num_cells > self.n_ctx:
            return None
        num_cells += self.engine.prefer(beside)
        if not self.engine.has_room_for(num_cells):
            return None
        self.engine.reserve(num_cells)
        completion = self.engine.generate(prompt_ids, sampling)
        self.engine.prefer(beside)
        if completion.finish_reason == "cancelled":
            raise InterruptedRunError("Interrupted.")
        return completion


def _transcript(exchange: Exchange) -> str:
    return citation.struck(exchange.transcript, (), bare=False)
