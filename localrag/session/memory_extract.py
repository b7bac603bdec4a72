"""Facts that a model proposes to remember of what a person said. None is kept unless the person says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localrag.conversation import split
from localrag.decoding import SamplingParams
from localrag.messages import Message
from localrag.session.side_generation import JOIN_TOKENS, SideGeneration
from localrag.terms import terms
from localrag.writer import prompt_of

if TYPE_CHECKING:
    from localrag.engine.engine import Engine

MAX_FACTS = 3
MAX_CHARS = 120
ANSWER_TOKENS = 160
SAID_TOKENS = 512
"""The most that is read of what was said, newest first."""

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
    """At most MAX_FACTS facts from the newest of a conversation; none of which the person said no word.

    What the engine holds of the prompt `beside` stays there. InterruptedRunError if a person stopped it.
    """
    aside = SideGeneration(engine, n_ctx=n_ctx)
    history = split([*messages, Message("user", "?")]).history
    room = n_ctx - ANSWER_TOKENS - JOIN_TOKENS - len(_prompt(engine, ""))
    said = aside.newest(history, min(SAID_TOKENS, room))
    if not said:
        return []
    completion = aside.write(_prompt(engine, said), SamplingParams(max_tokens=ANSWER_TOKENS, json_schema=_SCHEMA), beside=beside)
    if completion is None or completion.finish_reason != "stop":
        return []
    told = {term for message in messages if message.role == "user" for term in terms(message.content)}
    facts = (" ".join(str(each).split()) for each in json.loads(completion.text)["facts"])
    return [fact for fact in dict.fromkeys(facts) if fact and told.intersection(terms(fact))]


def _prompt(engine: Engine, said: str) -> list[int]:
    return prompt_of(engine, [Message("user", _ASK.format(said=said))])
