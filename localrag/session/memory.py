"""Choose the stored facts to show to the model: important recent ones, and those related to the question. Propose new facts to store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrag.conversation import split
from localrag.session.query_rewrite import JOIN_TOKENS, SideGeneration
from localrag.summary.writer import prompt_of
from localrag.text.terms import terms
from localrag.types import Memory, Message, SamplingParams

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.journal import StoredMemory


_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallRule:
    """Minimum importance, and maximum age in days, of a fact that is shown regardless of the question."""

    min_importance: float = 0.6
    max_age_days: float = 7.0


class Recall:
    """The memories shown in one conversation. A memory stays once it is shown, since any change makes the prompt be evaluated again."""

    def __init__(self, rule: RecallRule) -> None:
        self._rule = rule
        self._told: set[int] = set()

    def memories(self, memories: Iterable[StoredMemory], question: str, *, now: float | None = None) -> list[Memory]:
        """The memories to show, most important first. Old or less important ones are shown only if they share a word with the question."""
        now = time.time() if now is None else now
        question_terms = set(terms(question))
        memories = list(memories)
        for memory in memories:
            is_new = now - memory.updated_at <= self._rule.max_age_days * _DAY_S
            if (is_new and memory.importance > self._rule.min_importance) or not question_terms.isdisjoint(terms(memory.text)):
                self._told.add(memory.id)
        prompt_memories = [memory for memory in memories if memory.id in self._told]
        return [
            Memory(label=f"memory {memory.id}", text=memory.text, importance=memory.importance)
            for memory in sorted(prompt_memories, key=lambda each: -each.importance)
        ]


MAX_FACTS = 3
MAX_CHARS = 120
ANSWER_TOKENS = 160
SAID_TOKENS = 512
"""Maximum number of tokens of the conversation to read, newest first."""

_ASK = "{said}\n\nWhat did the user say above about themselves or their wishes? Write short facts, or none."
_SCHEMA = {
    "type": "object",
    "properties": {
        "facts": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": MAX_CHARS}, "maxItems": MAX_FACTS},
    },
    "required": ["facts"],
    "additionalProperties": False,
}


def propose(engine: Engine, messages: Sequence[Message], *, n_ctx: int, beside: Sequence[int] = ()) -> list[str]:
    """Propose up to MAX_FACTS facts from the latest messages, each sharing at least one word with a message of the user.

    The cached part of the prompt `beside` stays in the KV cache. Raises InterruptedRunError if the user stops it.
    """
    side = SideGeneration(engine, n_ctx=n_ctx)
    history = split([*messages, Message("user", "?")]).history
    room = n_ctx - ANSWER_TOKENS - JOIN_TOKENS - len(_prompt(engine, ""))
    transcript = side.newest(history, min(SAID_TOKENS, room))
    if not transcript:
        return []
    completion = side.write(_prompt(engine, transcript), SamplingParams(max_tokens=ANSWER_TOKENS, json_schema=_SCHEMA), beside=beside)
    if completion is None or completion.finish_reason != "stop":
        return []
    user_terms = {term for message in messages if message.role == "user" for term in terms(message.content)}
    facts = (" ".join(str(each).split()) for each in json.loads(completion.text)["facts"])
    return [fact for fact in dict.fromkeys(facts) if fact and user_terms.intersection(terms(fact))]


def _prompt(engine: Engine, transcript: str) -> list[int]:
    return prompt_of(engine, [Message("user", _ASK.format(said=transcript))])
