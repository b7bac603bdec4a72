"""The part of a conversation that a prompt contains: which turns are sent in full, without sources, or only as a summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

from localrag.budget.ledger import WRITTEN
from localrag.prompt.layout import AGAIN
from localrag.types import Chunk, Hit

if TYPE_CHECKING:
    from localrag.journal import StoredTurn, TurnState
    from localrag.prompt import Prompt
    from localrag.session.answer import Answer, Prepared


_POINTER = AGAIN.partition("{")[0]
_SOURCES = ("attachments", "cited", "evidence", "pointers")


@dataclass(slots=True, kw_only=True)
class Turn:
    """A question with its answer. `sent` is the full user message as sent, sources included; `hits` are those sources.

    `sent` is empty if no sources were sent or if there is no answer. An unanswered question is sent again with the next one, as plain
    text without its sources.
    """

    id: int
    question: str
    answer: str = ""
    state: TurnState = "running"
    about: Mapping[str, Any] = field(default_factory=dict)
    is_pinned: bool = False
    began_at: float = 0.0
    sent: str = ""
    hits: tuple[Hit, ...] = ()

    @property
    def points(self) -> bool:
        """Whether the message refers to passages in earlier messages."""
        return _POINTER in self.sent

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer, even an incomplete one."""
        return bool(self.answer.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """Turns that the model does not see in full, by number from 1: sent as a summary (`summarised`) or not at all (`left_out`).

    `coming` are the turns to be summarised next, once the window runs out of room."""

    summarised: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.summarised or self.left_out)

    def beyond(self, before: Forgotten) -> Forgotten:
        """The turns that are in this value but not in `before`."""
        return Forgotten(
            summarised=tuple(each for each in self.summarised if each not in before.summarised),
            left_out=tuple(each for each in self.left_out if each not in before.left_out),
        )


def sent_message(prepared: Prepared) -> str:
    """Return the last user message as it was sent if it contains sources, else an empty string."""
    contents = [list(parts) for is_markup, parts in groupby(prepared.prompt.parts, key=lambda each: each.part.is_markup) if not is_markup]
    question_parts = next((parts for parts in reversed(contents) if any(each.part.section == "question" for each in parts)), [])
    has_sources = any(each.part.section in _SOURCES for each in question_parts)
    return "".join(each.part.text for each in question_parts) if has_sources else ""


def drop_stale_sources(turns: Sequence[Turn], hits: Iterable[Hit], kb_names: Collection[str]) -> None:
    """Drop the sent sources of turns whose tags no longer identify the same text.

    This happens when a knowledge base is no longer searched, or was rebuilt. `hits` are the latest search results, `kb_names` the
    knowledge bases in use.
    """
    texts = {hit.label: hit.chunk.text for hit in hits}
    for turn in turns:
        for hit in turn.hits:
            chunk = hit.chunk
            scope = chunk.kb if len(kb_names) > 1 else ""
            is_asked = not chunk.kb or not kb_names or (chunk.kb in kb_names and chunk.scope == scope)
            if not is_asked or texts.get(hit.label, chunk.text) != chunk.text:
                turn.sent = ""


def turn_record(turn: Turn, answer: Answer) -> dict[str, Any]:
    """The data of a turn that the journal stores next to its texts."""
    cited = {each.label for each in answer.citations if each.supplied}
    return {
        "finish_reason": answer.finish_reason,
        "sent": turn.sent,
        "hits": [asdict(hit.chunk) | {"score": hit.score} | ({"spans": hit.spans} if hit.spans else {}) for hit in turn.hits],
        "citations": sorted(cited),
        "unsupported_citations": answer.unsupported_citations,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
        **({"reasoning": answer.reasoning} if answer.reasoning else {}),
    }


def restored(stored: StoredTurn) -> Turn:
    """Restore a stored turn. If its sources cannot be read, they are dropped; the question and answer stay."""
    try:
        hits = tuple(_hit(each) for each in stored.about.get("hits", ()))
        sent_text = str(stored.about.get("sent", "")) if stored.answer.strip() else ""
    except (TypeError, ValueError, KeyError):
        hits, sent_text = (), ""
    return Turn(
        id=stored.id,
        question=stored.question,
        answer=stored.answer,
        state=stored.state,
        about=stored.about,
        is_pinned=stored.is_pinned,
        began_at=stored.began_at,
        sent=sent_text,
        hits=hits,
    )


def _hit(stored: Mapping[str, Any]) -> Hit:
    fields = dict(stored)
    score = float(fields.pop("score"))
    spans = tuple((int(start), int(end)) for start, end in fields.pop("spans", ()))
    return Hit(Chunk(**fields), score, spans=spans)


CARRIED_SHARE = 0.5
"""Sources of earlier turns stay in their messages until together they take this share of the window."""
STEP_SHARE = 0.375
"""Share of the window that is summarised in one step, oldest turns first. A step this large is predictable, so its summary can be written
in advance. Measured: smaller steps cost more evaluation, larger ones keep less of the conversation."""
LEAST_SHARE, MOST_SHARE = 0.25, 0.75
"""After a step, history must fill between these shares of its room. If it would not, only the newest turns that fill half of it stay."""
GROWN = 2.0
"""Bring summarised turns back once the room for history grows beyond this factor, e.g. after a large file left the prompt or the window
changed."""
_MARKUP_TOKENS = 5
"""Approximate number of tokens that a chat template adds to a message."""


@dataclass(frozen=True, slots=True)
class HistoryWindow:
    """How much of the history a prompt contains. The first `settled` turns are sent as a summary, except pinned ones; the first `bare`
    turns are sent without their sources. `room` is the space for history, in tokens, when turns were last summarised."""

    settled: int = 0
    bare: int = 0
    room: int = 0

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Self:
        """The window stored with the last answer. An invalid or missing value counts as an untouched history."""
        stored = next((turn.about["standing"] for turn in reversed(turns) if "standing" in turn.about), None)
        match stored:
            case [int(settled), int(bare), int(room)] if 0 <= settled <= len(turns) and 0 <= bare <= len(turns) and room >= 0:
                return cls(settled, bare, room)
        return cls()

    def to_keep(self) -> list[int]:
        """The window as stored with a turn."""
        return [self.settled, self.bare, self.room]

    def carrying(self, turns: Sequence[Turn]) -> list[int]:
        """Indexes (from 0) of the turns whose sources are sent."""
        return [at for at, turn in enumerate(turns) if turn.sent and at >= self.bare and (at >= self.settled or turn.is_pinned)]


@dataclass(slots=True, kw_only=True)
class HistoryFitter:
    """Shrinks the history to fit one prompt. `count` counts tokens; `max_messages` limits the number of history messages."""

    turns: Sequence[Turn]
    count: Callable[[str], int]
    n_ctx: int
    max_messages: int | None = None
    _has_returned: bool = False

    def after(self, standing: HistoryWindow, prompt: Prompt, *, reached: int) -> HistoryWindow:
        """Return the same window if its prompt can be sent, else the window to try next.

        The prompt leaves out parts of the first `reached` turns. Sources are dropped before turns, all but the last turn's at once.
        """
        history = next((entry for entry in prompt.ledger.entries if entry.name == "history"), None)
        room = (0 if history is None else history.used) + _num_free(prompt)
        is_last = standing.settled >= len(self.turns) - 1
        carrying = standing.carrying(self.turns)
        is_cut = history is not None and bool(history.shortened) and (bool(carrying) or not is_last)
        carries_too_much = sum(self.count(self.turns[at].sent) for at in carrying) > CARRIED_SHARE * self.n_ctx
        if reached <= standing.settled and not is_cut and not carries_too_much:
            return self._with_more(standing, room)
        if len(carrying) > 1 or carries_too_much or (carrying and is_last):
            return replace(standing, bare=self._bare(carrying))
        return replace(standing, settled=max(reached, self._step(standing, room)), room=room)

    def planned(self, standing: HistoryWindow) -> int:
        """Number of turns that will be summarised after the next step; unchanged while that cannot be predicted."""
        tokens = 0
        for at in range(standing.settled, len(self.turns) - 1):
            tokens += self._size(at, len(self.turns))
            if tokens >= STEP_SHARE * self.n_ctx:
                return at + 1
        return standing.settled

    def _with_more(self, standing: HistoryWindow, room: int) -> HistoryWindow:
        """Bring turns back if there is much more room than when they were summarised. Happens once per prompt, so that fitting ends."""
        newest = self._newest(standing, room)
        if self._has_returned or room <= GROWN * standing.room or newest >= standing.settled:
            return standing
        self._has_returned = True
        return replace(standing, settled=newest, room=room)

    def _bare(self, carrying: Sequence[int]) -> int:
        """Keep the last turn's sources, unless they are the only ones or refer to sources that are dropped."""
        last = carrying[-1]
        return last if len(carrying) > 1 and not self.turns[last].points else len(self.turns)

    def _step(self, standing: HistoryWindow, room: int) -> int:
        """Number of turns to summarise now."""
        planned = self.planned(standing)
        remaining_tokens = sum(self._size(at, standing.bare) for at in range(planned, len(self.turns)))
        is_good = planned > standing.settled and LEAST_SHARE * room <= remaining_tokens <= MOST_SHARE * room
        return planned if is_good else max(standing.settled, self._newest(standing, room))

    def _newest(self, standing: HistoryWindow, room: int) -> int:
        """Number of turns before the newest ones that fill half of the room. Keeps the last turn if possible."""
        most = math.inf if self.max_messages is None else max(2, self.max_messages // 2)
        first, tokens, num_messages = len(self.turns), 0, 0
        while first:
            tokens += self._size(first - 1, standing.bare)
            num_messages += 2
            if tokens > room / 2 or num_messages > most:
                break
            first -= 1
        return max(0, min(first, len(self.turns) - 1))

    def _size(self, at: int, bare: int) -> int:
        """Approximate size of a turn in tokens, without its sources if it is among the first `bare`."""
        turn = self.turns[at]
        if turn.is_pinned:
            return 0
        question = turn.sent if turn.sent and at >= bare else turn.question
        return self.count(question) + self.count(turn.answer) + 2 * _MARKUP_TOKENS


def _num_free(prompt: Prompt) -> int:
    """Unused tokens that history could have taken: those not reserved for the rest of the prompt or the answer."""
    ledger = prompt.ledger
    num_reserved = sum(entry.allotted for entry in ledger.entries if entry.name in ("gap", *WRITTEN))
    return max(0, prompt.budget.window - ledger.prompt_tokens - num_reserved)
