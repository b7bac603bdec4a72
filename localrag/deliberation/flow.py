"""The procedure of a council: plan → one search → proposals, in parallel → reviews → judge → verdict.

`deliberate` is a generator of steps, without a model, files or a clock. The driver sends the result of each step back into it;
the class of a step says which.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localrag.deliberation import proposals, turns, verdict
from localrag.deliberation.proposals import Checked
from localrag.deliberation.replies import Call, parse_call, read
from localrag.deliberation.roles import JUDGE, Council
from localrag.deliberation.turns import RoleTurn
from localrag.deliberation.verdict import Verdict
from localrag.errors import EngineError
from localrag.types import Hit, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to a RoleTurn: its text, the finish reason ("error" with no text if the model failed), and the hits in the prompt."""

    text: str
    finish_reason: str
    hits: tuple[Hit, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """Turns that may run in parallel. The driver sends a tuple of Reply, in the same order."""

    turns: tuple[RoleTurn, ...]


@dataclass(frozen=True, slots=True)
class Search:
    """One search for several queries. The driver sends a mapping of each role to its hits, best first; a member's tags filter its hits."""

    queries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """A tool call, with the `reply` that contained it. The driver sends Used."""

    tool: str
    arguments: Mapping[str, str]
    reply: str = ""

    def messages(self, result: str) -> tuple[Message, Message]:
        """Return the call and its result as messages for later prompts."""
        return Message("assistant", self.reply), Message("tool", result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The result of a tool: the text that is sent and counted, the hits in it, and whether its room is used up."""

    text: str
    hits: tuple[Hit, ...] = ()
    is_exhausted: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    """An event to show and record: `event` is its name, `data` is JSON. The driver sends None."""

    event: str
    data: Mapping[str, Any]


Step = Ask | Search | Use | Tell


Flow = Generator[Step, Any, Verdict]
HitsByRole = Mapping[str, tuple[Hit, ...]]

_MAX_SEARCH_CHARS = 200
_SHARES = (1, 3)
"""Divisors of the judge's room: a verdict that is cut off is requested once more, in a form that fits a third of the room."""


def deliberate(council: Council, task: str) -> Flow:
    """Run a council from a task to its verdict. Raises EngineError if the judge gives no verdict."""
    strategy, searches = (yield from _plan(council)) if council.plan else ("", ())
    hits_by_role: HitsByRole = yield Search(tuple(dict.fromkeys((task, *searches))))
    context = turns.planning_text(strategy, searches)
    proposed = yield from _propose(council, hits_by_role, context)
    spoken = [each for each in proposed if not each.is_silent]
    points = (yield from _review(council, hits_by_role, context, spoken)) if council.review else {}
    silent = [each.member for each in proposed if each.is_silent]
    context = turns.planning_text(strategy, searches, silent=silent, points=points)
    cited = proposals.union(spoken)
    hits = tuple(sorted(hits_by_role[JUDGE], key=lambda hit: hit.label not in cited))  # stable: both parts stay ranked
    judged, tool_hits = yield from _use_tools(council, turns.judge(council, spoken, hits, context))
    return (yield from _decide(judged, tool_hits))


def _plan(council: Council) -> Generator[Step, Any, tuple[str, tuple[str, ...]]]:
    """Return a strategy and extra search queries; both are empty if the plan cannot be read."""
    (reply,) = yield Ask((turns.plan(council),))
    form = read(reply.text)
    strategy = form.text("strategy")
    searches = tuple(dict.fromkeys(" ".join(each.split())[:_MAX_SEARCH_CHARS] for each in form.texts("searches")))[: turns.MAX_SEARCHES]
    yield Tell("planned", {"strategy": strategy, "searches": list(searches)})
    return strategy, searches


def _propose(council: Council, hits_by_role: HitsByRole, context: str) -> Generator[Step, Any, list[Checked]]:
    asked_turns = tuple(turns.propose(member, hits_by_role[member.name], context) for member in council.members)
    replies: tuple[Reply, ...] = yield Ask(asked_turns)
    checked = [
        proposals.check(turn.role, reply.text, reply.finish_reason, reply.hits) for turn, reply in zip(asked_turns, replies, strict=True)
    ]
    for each in checked:
        yield Tell("checked", {"member": each.member, **each.to_dict()})
    return checked


def _review(council: Council, hits_by_role: HitsByRole, context: str, spoken: Sequence[Checked]) -> Generator[Step, Any, dict[str, float]]:
    """Return the points of the ranked members, best first."""
    names = {member.name: proposals.anonymous(member.name, spoken)[1] for member in council.members}
    members = [member for member in council.members if len(names[member.name]) >= turns.MIN_REVIEWED]
    if not members:
        return {}
    asked_turns = tuple(turns.review(member, spoken, hits_by_role[member.name], context) for member in members)
    replies: tuple[Reply, ...] = yield Ask(asked_turns)
    ranked = {turn.role: proposals.parse(reply.text, names[turn.role]) for turn, reply in zip(asked_turns, replies, strict=True)}
    rankings = {reviewer: ranking for reviewer, ranking in ranked.items() if ranking}
    points = proposals.points(rankings, [each.member for each in spoken])
    yield Tell("ranking", {"rankings": {reviewer: list(ranking) for reviewer, ranking in rankings.items()}, "points": points})
    return points


def _use_tools(council: Council, judged: RoleTurn) -> Generator[Step, Any, tuple[RoleTurn, dict[str, Hit]]]:
    """Return the judge's turn with its calls and results, and the hits from them. A repeated call ends the loop."""
    calls: list[Call] = []
    tool_hits: dict[str, Hit] = {}
    for _ in range(council.judge.max_calls):
        (reply,) = yield Ask((turns.to_call(council, judged),))
        call = parse_call(reply.text, council.judge.tools)
        if call is None or call in calls:
            break
        calls.append(call)
        use = Use(call.tool, call.arguments, reply.text)
        used: Used = yield use
        tool_hits |= {hit.label: hit for hit in used.hits}
        if used.text:
            judged = replace(judged, rounds=(*judged.rounds, *use.messages(used.text)))
        if used.is_exhausted:
            break
    return judged, tool_hits


def _decide(judged: RoleTurn, tool_hits: Mapping[str, Hit]) -> Flow:
    members = [each.label for each in judged.proposals]
    verdicts: list[Verdict] = []
    for share in _SHARES:
        (reply,) = yield Ask((turns.to_decide(judged, tool_hits, share),))
        verdicts.append(verdict.parse(reply.text, [*reply.hits, *tool_hits.values()], members, is_cut=reply.finish_reason != "stop"))
        if verdicts[-1].is_whole or reply.finish_reason != "length":
            break
    best = max(verdicts, key=lambda each: (each.is_whole, bool(each.decision), bool(each.text)))
    if not best.text and not best.decision:
        raise EngineError("The judge gave no verdict.", hint="Give it more room (max_tokens of the judge), or another model.")
    return best
