"""What each role is asked for, one turn each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localrag.deliberation import calls, proposals, replies, verdict, wording
from localrag.deliberation.proposals import Checked
from localrag.deliberation.roles import JUDGE, PLANNER, Council, Member
from localrag.deliberation.steps import Turn
from localrag.types import Hit, SamplingParams

MAX_SEARCHES = 3
PLAN_TOKENS = 192
MIN_REVIEWED = 2
"""There is nothing to rank in fewer."""
_LONG_TEXT = "word " * 256
"""More than is left of a proposal at least, by any tokenizer."""


def first_turns(council: Council) -> list[Turn]:
    """What each role will be asked for at least: whoever has no room for that cannot take part.

    What cannot be cut of a turn of `deliberate` is no more than that of one of these: its instructions, and what there has to be of each
    proposal. What tools bring is not counted, nor what a budget sets aside for evidence.
    """
    said = [Checked(member=member.name, text=_LONG_TEXT, finish_reason="length") for member in council.members]
    judged = judge(council, said)
    turns = [propose(member) for member in council.members]
    if council.plan:
        turns.append(plan(council))
    if council.review:
        turns += [review(member, said) for member in council.members if len(said) > MIN_REVIEWED]
    return [*turns, *([to_call(council, judged)] if council.judge.max_calls else []), judged]


def plan(council: Council) -> Turn:
    search = {"type": "string", "minLength": 3, "maxLength": 100}
    schema = replies.schema(
        {
            "strategy": {"type": "string", "minLength": 1, "maxLength": 240},
            "searches": {"type": "array", "items": search, "maxItems": MAX_SEARCHES},
        }
    )
    return Turn(role=PLANNER, kind="plan", instructions=wording.PLAN, sampling=_of_form(council.judge.sampling, PLAN_TOKENS, schema))


def propose(member: Member, hits: tuple[Hit, ...] = (), context: str = "") -> Turn:
    instructions = wording.propose(member.name, member.persona)
    return Turn(
        role=member.name, kind="proposal", instructions=instructions, sampling=member.sampling, cite=wording.CITE, hits=hits, plan=context
    )


def review(member: Member, spoken: Sequence[Checked], hits: tuple[Hit, ...] = (), context: str = "") -> Turn:
    """A member ranks what the others propose, of whom there are MIN_REVIEWED or more."""
    shown, names = proposals.anonymous(member.name, spoken)
    sampling = _of_form(member.sampling, proposals.MAX_TOKENS, proposals.schema(list(names)))
    return Turn(
        role=member.name,
        kind="review",
        instructions=wording.review(member.name, member.persona),
        sampling=replace(sampling, temperature=0.0),
        hits=hits,
        plan=context,
        proposals=shown,
    )


def judge(council: Council, spoken: Sequence[Checked], hits: tuple[Hit, ...] = (), context: str = "") -> Turn:
    """The judge is shown all that there is. What it is asked for stands in the words; `to_call` and `to_decide` give it a form."""
    given = council.judge
    return Turn(
        role=JUDGE,
        kind="verdict",
        instructions=wording.judge(given.persona, with_tools=given.max_calls > 0),
        sampling=_of_form(given.sampling, given.sampling.num_answer_tokens, None),
        hits=hits,
        cited=proposals.union(spoken),
        proposals=tuple(each.proposal for each in spoken),
        plan=context,
        tools=calls.specs(given.tools) if given.max_calls else (),
    )


def to_call(council: Council, judged: Turn) -> Turn:
    """The judge calls a tool, or ends the calls."""
    return replace(judged, kind="call", sampling=_of_form(judged.sampling, calls.MAX_TOKENS, calls.schema(council.judge.tools)))


def to_decide(judged: Turn, read: Mapping[str, Hit], share: int) -> Turn:
    """The judge gives its verdict, in a form that a `share`-th of its room holds. `read` are the hits that tools gave it."""
    members = [each.label for each in judged.proposals]

    def make_schema(labels: Sequence[str], max_tokens: int) -> dict[str, Any]:
        cited_first = sorted(labels, key=lambda label: label not in judged.cited)
        return verdict.schema([*read, *cited_first], members, max_tokens // share)

    return replace(judged, make_schema=make_schema)


def _of_form(sampling: SamplingParams, max_tokens: int, schema: Mapping[str, Any] | None) -> SamplingParams:
    """For a form, which no stop string may end."""
    return replace(sampling, max_tokens=max_tokens, think_tokens=0, json_schema=schema, stop=())
