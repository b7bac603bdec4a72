"""Something short that a conversation's model writes beside it: what is held of the conversation stays there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from localrag import citation
from localrag.conversation import Exchange, fit, search_query, split
from localrag.errors import InterruptedRunError
from localrag.summary import truncate
from localrag.summary.writer import prompt_of
from localrag.text.markup import count_content
from localrag.text.sanitize import one_line
from localrag.text.terms import terms
from localrag.text.thinking import without_thoughts
from localrag.types import Message, SamplingParams

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


ANSWER_TOKENS = 64
SAID_TOKENS = 256
"""The most that is read of what was said before, newest first; small models lose the thread in more."""
MAX_CHARS = 400
_LABELS = frozenset({"user", "assistant", "tool"})  # of a transcript's lines

_ASK = "{said}\n\nRewrite this question so that it can be understood without the above: {question}"
_EXAMPLES = (  # without them, small models answer the question
    ("User: How tall is Mont Blanc?\nAssistant: 4,806 m.", "And who climbed it first?", "Who climbed Mont Blanc first?"),
    ("User: Which tea has no caffeine?\nAssistant: Rooibos.", "How long must it steep?", "How long must rooibos tea steep?"),
    ("User: Can I wash wool at 60 °C?\nAssistant: No, it shrinks.", "What about cotton?", "Can I wash cotton at 60 °C?"),
)
_FOREIGN = frozenset(term for said, _, _ in _EXAMPLES for term in terms(said)) - _LABELS
"""What small models carry over from the examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRewrite:
    """What a model made of a follow-up, and what that took. `text` is empty where it was of no use."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"seconds": round(self.seconds, 4)}


class QueryRewriter:
    """Rewrites the last question of a conversation. Its prompt is counted and fits the window beside the longest answer."""

    def __init__(self, engine: Engine, *, n_ctx: int) -> None:
        self._aside = SideGeneration(engine, n_ctx=n_ctx)

    def __call__(self, messages: Sequence[Message], *, beside: Sequence[int] = ()) -> QueryRewrite | None:
        """None where there is no room for it. What the engine holds of the prompt `beside`, which comes next, stays there.

        InterruptedRunError if a person stopped it, UsageError for a conversation that does not end with a question.
        """
        question, history = search_query(messages), split(messages).history
        room = self._aside.n_ctx - ANSWER_TOKENS - JOIN_TOKENS - len(self._prompt("", question))
        said = self._aside.newest(history, min(SAID_TOKENS, room))
        if not said:
            return None
        started = time.perf_counter()
        completion = self._aside.write(self._prompt(said, question), SamplingParams(max_tokens=ANSWER_TOKENS), beside=beside)
        if completion is None:
            return None
        is_whole = completion.finish_reason == "stop"
        return QueryRewrite(
            text=usable(without_thoughts(completion.text), question, said) if is_whole else "",
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            completion_tokens=completion.completion_tokens,
            seconds=time.perf_counter() - started,
        )

    def _prompt(self, said: str, question: str) -> list[int]:
        messages = []
        for before, asked, alone in _EXAMPLES:
            messages += [Message("user", _ASK.format(said=before, question=asked)), Message("assistant", alone)]
        return prompt_of(self._aside.engine, [*messages, Message("user", _ASK.format(said=said, question=question))])


def usable(written: str, question: str, said: str) -> str:
    """What a model wrote, as one line to search for; empty unless it adds something to the question that was said before, and nothing
    of the examples."""
    lines = written.strip().splitlines()
    line = one_line(lines[0]).strip("\"'“”") if lines else ""
    found, asked, known = (set(terms(text)) - _LABELS for text in (line, question, said))
    is_usable = len(line) <= MAX_CHARS and (found & known) - asked and not (found & _FOREIGN) - known - asked
    return line if is_usable else ""
