"""A turn of a conversation: a question, its answer, and the sources that came with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

from localrag.budget.ledger import WRITTEN
from localrag.prompt.inputs import AGAIN
from localrag.types import Chunk, Hit

if TYPE_CHECKING:
    from localrag.journal import StoredTurn, TurnState
    from localrag.prompt import Prompt
    from localrag.session.answer import Answer, Prepared


_POINTER = AGAIN.partition("{")[0]
_SOURCES = ("attachments", "cited", "evidence", "pointers")


@dataclass(slots=True, kw_only=True)
class Turn:
    """A question with its answer. `sent` is the whole message that the model was sent for it, if sources came with it: `hits`.

    Without an answer it is empty: such a question is asked again with the next one, and then as it stands, without its sources.
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
        """Whether the message names passages that stand above it."""
        return _POINTER in self.sent

    @property
    def is_told(self) -> bool:
        """Whether there is an answer, if only its beginning."""
        return bool(self.answer.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What the model will see less of: turns, by their numbers from 1, of which it is sent a summary, and those of which it is sent
    nothing. `coming` are those that are summarised next, as soon as there is no more room for them."""

    summarised: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.summarised or self.left_out)

    def beyond(self, before: Forgotten) -> Forgotten:
        """What was not so before."""
        return Forgotten(
            summarised=tuple(each for each in self.summarised if each not in before.summarised),
            left_out=tuple(each for each in self.left_out if each not in before.left_out),
        )


def sent_message(prepared: Prepared) -> str:
    """The last message as it was sent, if sources came with it."""
    contents = [list(parts) for is_markup, parts in groupby(prepared.prompt.parts, key=lambda each: each.part.is_markup) if not is_markup]
    asked = next((parts for parts in reversed(contents) if any(each.part.section == "question" for each in parts)), [])
    has_sources = any(each.part.section in _SOURCES for each in asked)
    return "".join(each.part.text for each in asked) if has_sources else ""


def let_go_of_strangers(turns: Sequence[Turn], hits: Iterable[Hit], kb_names: Collection[str]) -> None:
    """Sources whose tags mean something else now leave the prompt: of knowledge bases that are not asked any more, or made anew.

    `hits` is what was found now, `kb_names` are the knowledge bases that are asked.
    """
    texts = {hit.label: hit.chunk.text for hit in hits}
    for turn in turns:
        for hit in turn.hits:
            chunk = hit.chunk
            scope = chunk.kb if len(kb_names) > 1 else ""
            is_asked = not chunk.kb or not kb_names or (chunk.kb in kb_names and chunk.scope == scope)
            if not is_asked or texts.get(hit.label, chunk.text) != chunk.text:
                turn.sent = ""


def to_keep(turn: Turn, answer: Answer) -> dict[str, Any]:
    cited = {each.label for each in answer.citations if each.supplied}
    return {
        "finish_reason": answer.finish_reason,
        "sent": turn.sent,
        "hits": [asdict(hit.chunk) | {"score": hit.score} for hit in turn.hits],
        "citations": sorted(cited),
        "unsupported_citations": answer.unsupported_citations,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
        **({"reasoning": answer.reasoning} if answer.reasoning else {}),
    }


def restored(stored: StoredTurn) -> Turn:
    """A turn as it was kept. What cannot be read of its sources is left out: its question and answer stand."""
    try:
        hits = tuple(_hit(each) for each in stored.about.get("hits", ()))
        sent = str(stored.about.get("sent", "")) if stored.answer.strip() else ""
    except (TypeError, ValueError, KeyError):
        hits, sent = (), ""
    return Turn(
        id=stored.id,
        question=stored.question,
        answer=stored.answer,
        state=stored.state,
        about=stored.about,
        is_pinned=stored.is_pinned,
        began_at=stored.began_at,
        sent=sent,
        hits=hits,
    )


def _hit(kept: Mapping[str, Any]) -> Hit:
    fields = dict(kept)
    score = float(fields.pop("score"))
    return Hit(Chunk(**fields), score)


CARRIED_SHARE = 0.5
"""Sources of earlier turns stay in the prompt where they were given until they take this share of the window."""
STEP_SHARE = 0.375
"""A step takes the oldest turns that have this share of the window together. Which they are is known long before, so that their summary
can be written in time. Measured: smaller steps cost more evaluations, larger ones leave less of what was said."""
LEAST_SHARE, MOST_SHARE = 0.25, 0.75
"""Of its room, history has between these shares after such a step. Where it would not, the newest turns stay that fill half of it."""
GROWN = 2.0
"""Where history has more than so many times the room that it had when it gave way, turns that were summarised come back: a large file has
left the prompt, or the window is another one."""
_MARKUP_TOKENS = 5
"""What a template puts around a message, about."""


@dataclass(frozen=True, slots=True)
class HistoryWindow:
    """Of the turns of a conversation, the first `settled` are sent as a summary, save those that are pinned, and the first `bare` without
    the sources that came with them. `room` is what history had, in tokens, when turns were last summarised."""

    settled: int = 0
    bare: int = 0
    room: int = 0

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Self:
        """Where the last answer left it. What was kept and cannot be true is as if nothing had given way."""
        kept = next((turn.about["standing"] for turn in reversed(turns) if "standing" in turn.about), None)
        match kept:
            case [int(settled), int(bare), int(room)] if 0 <= settled <= len(turns) and 0 <= bare <= len(turns) and room >= 0:
                return cls(settled, bare, room)
        return cls()

    def to_keep(self) -> list[int]:
        return [self.settled, self.bare, self.room]

    def carrying(self, turns: Sequence[Turn]) -> list[int]:
        """Which turns' sources are sent, counted from 0."""
        return [at for at, turn in enumerate(turns) if turn.sent and at >= self.bare and (at >= self.settled or turn.is_pinned)]


@dataclass(slots=True, kw_only=True)
class Giving:
    """What gives way of these turns for one prompt. `count` is tokens, `max_messages` the most that history may have."""

    turns: Sequence[Turn]
    count: Callable[[str], int]
    n_ctx: int
    max_messages: int | None = None
    _has_returned: bool = False

    def after(self, standing: HistoryWindow, prompt: Prompt, *, reached: int) -> HistoryWindow:
        """The same if the prompt that was made with it can be sent; else what to make the next one with.

        `reached` is up to which turn that prompt leaves something out. Sources go before turns: all but the last turn's at once.
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
        """Up to which turn the next step goes; no further than now while that is not known."""
        tokens = 0
        for at in range(standing.settled, len(self.turns) - 1):
            tokens += self._size(at, len(self.turns))
            if tokens >= STEP_SHARE * self.n_ctx:
                return at + 1
        return standing.settled

    def _with_more(self, standing: HistoryWindow, room: int) -> HistoryWindow:
        """With turns that come back, if there is much more room than when they went; once for a prompt, so that this ends."""
        newest = self._newest(standing, room)
        if self._has_returned or room <= GROWN * standing.room or newest >= standing.settled:
            return standing
        self._has_returned = True
        return replace(standing, settled=newest, room=room)

    def _bare(self, carrying: Sequence[int]) -> int:
        """The last turn's sources stay, unless they are all there are or name others that go."""
        last = carrying[-1]
        return last if len(carrying) > 1 and not self.turns[last].points else len(self.turns)

    def _step(self, standing: HistoryWindow, room: int) -> int:
        """Up to which turn all is summarised now."""
        planned = self.planned(standing)
        left = sum(self._size(at, standing.bare) for at in range(planned, len(self.turns)))
        is_good = planned > standing.settled and LEAST_SHARE * room <= left <= MOST_SHARE * room
        return planned if is_good else max(standing.settled, self._newest(standing, room))

    def _newest(self, standing: HistoryWindow, room: int) -> int:
        """How many turns are before the newest that take half of the room. The last one stays if it can."""
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
        """About the tokens of a turn in history, without its sources if it is one of the first `bare`."""
        turn = self.turns[at]
        if turn.is_pinned:
            return 0
        asked = turn.sent if turn.sent and at >= bare else turn.question
        return self.count(asked) + self.count(turn.answer) + 2 * _MARKUP_TOKENS


def _num_free(prompt: Prompt) -> int:
    """Tokens that history could have taken beside what it took: those that nothing else in the prompt, and no answer, was to have."""
    ledger = prompt.ledger
    written = sum(entry.allotted for entry in ledger.entries if entry.name in ("gap", *WRITTEN))
    return max(0, prompt.budget.window - ledger.prompt_tokens - written)
