"""How far a conversation has given way: which of its turns are summarised, and which sources have left the prompt.

A prompt that begins with all of the one before it costs what is new in it; where the two part, all behind that place is evaluated anew.
So what gives way does it in large steps, and between two steps nothing changes that was sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from localrag.budget.ledger import WRITTEN

if TYPE_CHECKING:
    from localrag.prompt import Prompt
    from localrag.session.turns import Turn

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
