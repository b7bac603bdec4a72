"""The flow of a council: plan → one search → proposals, all at once → reviews → judge → verdict.

A generator of steps that touches nothing: whoever drives it answers each step, as steps.py says.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from localrag.deliberation import calls, proposals, replies, turns, verdict, wording
from localrag.deliberation.calls import Call
from localrag.deliberation.proposals import Checked
from localrag.deliberation.roles import JUDGE, Council
from localrag.deliberation.steps import Ask, Reply, Search, Step, Tell, Turn, Use, Used
from localrag.deliberation.verdict import Verdict
from localrag.errors import EngineError
from localrag.types import Hit

Flow = Generator[Step, Any, Verdict]
Found = Mapping[str, tuple[Hit, ...]]

_MAX_SEARCH_CHARS = 200
_SHARES = (1, 3)
"""Of the judge's room: a verdict that is cut off is asked for once more, in a form for a third of it."""


def deliberate(council: Council, task: str) -> Flow:
    """A council's way from a task to its verdict. What each step is answered by stands in steps.py.

    EngineError if the judge gives none.
    """
    strategy, searches = (yield from _plan(council)) if council.plan else ("", ())
    found: Found = yield Search(tuple(dict.fromkeys((task, *searches))))
    context = wording.planning(strategy, searches)
    proposed = yield from _propose(council, found, context)
    spoken = [each for each in proposed if not each.is_silent]
    points = (yield from _review(council, found, context, spoken)) if council.review else {}
    silent = [each.member for each in proposed if each.is_silent]
    context = wording.planning(strategy, searches, silent=silent, points=points)
    cited = proposals.union(spoken)
    hits = tuple(sorted(found[JUDGE], key=lambda hit: hit.label not in cited))  # stable: each part stays ranked
    judged, read = yield from _use_tools(council, turns.judge(council, spoken, hits, context))
    return (yield from _decide(judged, read))


def _plan(council: Council) -> Generator[Step, Any, tuple[str, tuple[str, ...]]]:
    """A strategy, and what to search for besides the task; a plan that cannot be read is none."""
    (reply,) = yield Ask((turns.plan(council),))
    form = replies.read(reply.text)
    strategy = form.text("strategy")
    searches = tuple(dict.fromkeys(" ".join(each.split())[:_MAX_SEARCH_CHARS] for each in form.texts("searches")))[: turns.MAX_SEARCHES]
    yield Tell("planned", {"strategy": strategy, "searches": list(searches)})
    return strategy, searches


def _propose(council: Council, found: Found, context: str) -> Generator[Step, Any, list[Checked]]:
    asked = tuple(turns.propose(member, found[member.name], context) for member in council.members)
    given: tuple[Reply, ...] = yield Ask(asked)
    checked = [proposals.check(turn.role, reply.text, reply.finish_reason, reply.hits) for turn, reply in zip(asked, given, strict=True)]
    for each in checked:
        yield Tell("checked", {"member": each.member, **each.to_dict()})
    return checked


def _review(council: Council, found: Found, context: str, spoken: Sequence[Checked]) -> Generator[Step, Any, dict[str, float]]:
    """The points of the members whose proposals were ranked, the best first."""
    names = {member.name: proposals.anonymous(member.name, spoken)[1] for member in council.members}
    members = [member for member in council.members if len(names[member.name]) >= turns.MIN_REVIEWED]
    if not members:
        return {}
    asked = tuple(turns.review(member, spoken, found[member.name], context) for member in members)
    given: tuple[Reply, ...] = yield Ask(asked)
    ranked = {turn.role: proposals.parse(reply.text, names[turn.role]) for turn, reply in zip(asked, given, strict=True)}
    rankings = {reviewer: ranking for reviewer, ranking in ranked.items() if ranking}
    points = proposals.points(rankings, [each.member for each in spoken])
    yield Tell("ranking", {"rankings": {reviewer: list(ranking) for reviewer, ranking in rankings.items()}, "points": points})
    return points


def _use_tools(council: Council, judged: Turn) -> Generator[Step, Any, tuple[Turn, dict[str, Hit]]]:
    """The judge's turn with its calls and their results, and the hits that they gave. A call that is made again ends them."""
    made: list[Call] = []
    read: dict[str, Hit] = {}
    for _ in range(council.judge.max_calls):
        (reply,) = yield Ask((turns.to_call(council, judged),))
        call = calls.parse(reply.text, council.judge.tools)
        if call is None or call in made:
            break
        made.append(call)
        use = Use(call.tool, call.arguments, reply.text)
        used: Used = yield use
        read |= {hit.label: hit for hit in used.hits}
        if used.text:
            judged = replace(judged, rounds=(*judged.rounds, *use.messages(used.text)))
        if used.is_exhausted:
            break
    return judged, read


def _decide(judged: Turn, read: Mapping[str, Hit]) -> Flow:
    members = [each.label for each in judged.proposals]
    given: list[Verdict] = []
    for share in _SHARES:
        (reply,) = yield Ask((turns.to_decide(judged, read, share),))
        given.append(verdict.parse(reply.text, [*reply.hits, *read.values()], members, is_cut=reply.finish_reason != "stop"))
        if given[-1].is_whole or reply.finish_reason != "length":
            break
    best = max(given, key=lambda each: (each.is_whole, bool(each.decision), bool(each.text)))
    if not best.text and not best.decision:
        raise EngineError("The judge gave no verdict.", hint="Give it more room (max_tokens of the judge), or another model.")
    return best
