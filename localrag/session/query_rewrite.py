"""Short generations next to a conversation whose KV cache stays in place, and the rewriting of follow-up questions."""

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
    """Runs separate prompts in the window of a conversation. The cached part of the conversation's prompt, `beside`, is not evicted."""

    def __init__(self, engine: Engine, *, n_ctx: int) -> None:
        self.engine = engine
        self.n_ctx = n_ctx
        self._count = partial(count_content, counter=engine.counter)

    def newest(self, history: Sequence[Exchange], limit: int) -> str:
        """The newest exchanges that fit in `limit` tokens, without source tags, which mean nothing here. If not even the last one fits,
        its beginning. Empty if there is hardly any room."""
        if not history or limit < MIN_SAID_TOKENS:
            return ""
        exchanges, _ = fit(history, limit, lambda each: self._count(_transcript(each)) + JOIN_TOKENS)
        transcript = "\n".join(_transcript(each) for each in exchanges or history[-1:])
        return truncate(transcript, limit, self._count)

    def write(self, prompt_ids: list[int], sampling: SamplingParams, *, beside: Sequence[int]) -> Completion | None:
        """Generate, or return None if the window or memory has no room. Raises InterruptedRunError if the user stops it."""
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
"""Maximum number of tokens of the conversation to read, newest first. Small models lose track in more."""
MAX_CHARS = 400
_LABELS = frozenset({"user", "assistant", "tool"})  # line labels in a transcript

_ASK = "{said}\n\nRewrite this question so that it can be understood without the above: {question}"
_EXAMPLES = (  # without them, small models answer the question
    ("User: How tall is Mont Blanc?\nAssistant: 4,806 m.", "And who climbed it first?", "Who climbed Mont Blanc first?"),
    ("User: Which tea has no caffeine?\nAssistant: Rooibos.", "How long must it steep?", "How long must rooibos tea steep?"),
    ("User: Can I wash wool at 60 °C?\nAssistant: No, it shrinks.", "What about cotton?", "Can I wash cotton at 60 °C?"),
)
_FOREIGN = frozenset(term for transcript, _, _ in _EXAMPLES for term in terms(transcript)) - _LABELS
"""Words of the examples, which small models sometimes copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRewrite:
    """A rewritten follow-up question and its cost. `text` is empty if the result was unusable."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"seconds": round(self.seconds, 4)}


class QueryRewriter:
    """Rewrites the last question of a conversation. The prompt is counted, and fits the window together with the longest answer."""

    def __init__(self, engine: Engine, *, n_ctx: int) -> None:
        self._side = SideGeneration(engine, n_ctx=n_ctx)

    def __call__(self, messages: Sequence[Message], *, beside: Sequence[int] = ()) -> QueryRewrite | None:
        """Rewrite the question, or return None if there is no room. `beside` is the next prompt; its cached part stays in the KV cache.

        Raises InterruptedRunError if the user stops it, UsageError if the conversation does not end with a question.
        """
        question, history = search_query(messages), split(messages).history
        room = self._side.n_ctx - ANSWER_TOKENS - JOIN_TOKENS - len(self._prompt("", question))
        transcript = self._side.newest(history, min(SAID_TOKENS, room))
        if not transcript:
            return None
        started = time.perf_counter()
        completion = self._side.write(self._prompt(transcript, question), SamplingParams(max_tokens=ANSWER_TOKENS), beside=beside)
        if completion is None:
            return None
        is_whole = completion.finish_reason == "stop"
        return QueryRewrite(
            text=usable(without_thoughts(completion.text), question, transcript) if is_whole else "",
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            completion_tokens=completion.completion_tokens,
            seconds=time.perf_counter() - started,
        )

    def _prompt(self, transcript: str, question: str) -> list[int]:
        messages = []
        for before, follow_up, alone in _EXAMPLES:
            messages += [Message("user", _ASK.format(said=before, question=follow_up)), Message("assistant", alone)]
        return prompt_of(self._side.engine, [*messages, Message("user", _ASK.format(said=transcript, question=question))])


def usable(output: str, question: str, transcript: str) -> str:
    """Turn a model's output into a one-line query. Empty unless it adds words of the conversation to the question and none of the
    examples."""
    lines = output.strip().splitlines()
    line = one_line(lines[0]).strip("\"'“”") if lines else ""
    line_terms, asked_terms, said_terms = (set(terms(text)) - _LABELS for text in (line, question, transcript))
    is_usable = (
        len(line) <= MAX_CHARS and (line_terms & said_terms) - asked_terms and not (line_terms & _FOREIGN) - said_terms - asked_terms
    )
    return line if is_usable else ""
