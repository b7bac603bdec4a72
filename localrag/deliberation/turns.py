"""The turns of a council: the request for each role, in short sentences that small models follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from localrag.deliberation import proposals, verdict
from localrag.deliberation.proposals import Checked
from localrag.deliberation.replies import MAX_CALL_TOKENS, call_schema, form_schema, tool_specs
from localrag.deliberation.roles import JUDGE, PLANNER, Council, Member
from localrag.types import Hit, Message, Proposal, SamplingParams, ToolSpec

MAX_SEARCHES = 3
PLAN_TOKENS = 192
MIN_REVIEWED = 2
"""With fewer proposals there is nothing to rank."""
_LONG_TEXT = "word " * 256
"""Longer than the minimum of a proposal, with any tokenizer."""

CITE = " Answer from the sources above, and begin with the tag of the source that you use, like [{label}]."
"""Ends the prompt if there are sources; `{label}` is the tag of one of them. A small model copies the text that it read last."""
_PROPOSE = "Answer the question as {name}, in a few sentences. {persona}"
PLAN = (
    "Do not answer the question yet. Plan how to answer it. Write JSON with:\n"
    "strategy: one or two sentences.\n"
    "searches: up to 3 short texts to search the documents for, or none."
)
_REVIEW = (
    "You are {name}. {persona}\n\n"
    "Do not answer the question. Rank the proposals above by how well the sources support them. Write JSON with:\n"
    "ranking: the letter of each proposal, once, the best first."
)
_JUDGE = (
    "You are the judge. {persona} Answer the question from the sources and the proposals. Write JSON with:\n"
    "citations: the tags of the sources that answer it.\n"
    "text: your answer from them in a few sentences.\n"
    "decision: the answer in one sentence.\n"
    "confidence: low, medium or high.\n"
    "dissent: who proposes something else, and what."
)
_USE_TOOLS = "\n\nBefore you decide you may call tools, one at a time. Call conclude when you know enough."
_NO_PERSONA = "You trust the sources more than the proposals."

Kind = Literal["plan", "proposal", "review", "call", "verdict"]


class MakeSchema(Protocol):
    """Makes the JSON schema of a reply from the `labels` of the passages in its prompt and the `max_tokens` left for it."""

    def __call__(self, labels: Sequence[str], max_tokens: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTurn:
    """A request to one role, in addition to the system text, the conversation and the task that all roles share.

    `role` is a member's name, JUDGE or PLANNER; it selects the model, window and budget. `instructions` come last. `cited` are
    labels of `hits` that proposals cite. `rounds` are the tool calls and results so far, as messages.
    """

    role: str
    kind: Kind
    instructions: str
    sampling: SamplingParams
    cite: str = ""
    """Text about citing that comes last if there are sources; `{label}` is replaced by the tag of one of them."""
    hits: tuple[Hit, ...] = ()
    cited: frozenset[str] = frozenset()
    proposals: tuple[Proposal, ...] = ()
    plan: str = ""
    tools: tuple[ToolSpec, ...] = ()
    rounds: tuple[Message, ...] = ()
    make_schema: MakeSchema | None = None
    """Makes the schema of the reply after the prompt is composed. If None, the schema of `sampling` applies."""


def first_turns(council: Council) -> list[RoleTurn]:
    """Return the smallest turn of each kind: a role without room for it cannot take part.

    The parts of a `deliberate` turn that cannot be cut are never larger: the instructions, and the minimum of each proposal.
    Results of tools, and tokens that a budget reserves for evidence, are not included.
    """
    long_proposals = [Checked(member=member.name, text=_LONG_TEXT, finish_reason="length") for member in council.members]
    judged = judge(council, long_proposals)
    turns = [propose(member) for member in council.members]
    if council.plan:
        turns.append(plan(council))
    if council.review:
        turns += [review(member, long_proposals) for member in council.members if len(long_proposals) > MIN_REVIEWED]
    return [*turns, *([to_call(council, judged)] if council.judge.max_calls else []), judged]


def plan(council: Council) -> RoleTurn:
    search = {"type": "string", "minLength": 3, "maxLength": 100}
    schema = form_schema(
        {
            "strategy": {"type": "string", "minLength": 1, "maxLength": 240},
            "searches": {"type": "array", "items": search, "maxItems": MAX_SEARCHES},
        }
    )
    return RoleTurn(role=PLANNER, kind="plan", instructions=PLAN, sampling=_of_form(council.judge.sampling, PLAN_TOKENS, schema))


def propose(member: Member, hits: tuple[Hit, ...] = (), context: str = "") -> RoleTurn:
    instructions = propose_text(member.name, member.persona)
    return RoleTurn(
        role=member.name, kind="proposal", instructions=instructions, sampling=member.sampling, cite=CITE, hits=hits, plan=context
    )


def review(member: Member, spoken: Sequence[Checked], hits: tuple[Hit, ...] = (), context: str = "") -> RoleTurn:
    """Ask a member to rank the proposals of the others, of which there are at least MIN_REVIEWED."""
    other_proposals, names = proposals.anonymous(member.name, spoken)
    sampling = _of_form(member.sampling, proposals.MAX_TOKENS, proposals.schema(list(names)))
    return RoleTurn(
        role=member.name,
        kind="review",
        instructions=review_text(member.name, member.persona),
        sampling=replace(sampling, temperature=0.0),
        hits=hits,
        plan=context,
        proposals=other_proposals,
    )


def judge(council: Council, spoken: Sequence[Checked], hits: tuple[Hit, ...] = (), context: str = "") -> RoleTurn:
    """Ask the judge for a verdict on everything. `to_call` and `to_decide` add the form of the reply."""
    role = council.judge
    return RoleTurn(
        role=JUDGE,
        kind="verdict",
        instructions=judge_text(role.persona, with_tools=role.max_calls > 0),
        sampling=_of_form(role.sampling, role.sampling.num_answer_tokens, None),
        hits=hits,
        cited=proposals.union(spoken),
        proposals=tuple(each.proposal for each in spoken),
        plan=context,
        tools=tool_specs(role.tools) if role.max_calls else (),
    )


def to_call(council: Council, judged: RoleTurn) -> RoleTurn:
    """Ask the judge for a tool call, or the end of the calls."""
    return replace(judged, kind="call", sampling=_of_form(judged.sampling, MAX_CALL_TOKENS, call_schema(council.judge.tools)))


def to_decide(judged: RoleTurn, tool_hits: Mapping[str, Hit], share: int) -> RoleTurn:
    """Ask the judge for a verdict in a form that fits 1/`share` of its room. `tool_hits` are the hits from tools, by label."""
    members = [each.label for each in judged.proposals]

    def make_schema(labels: Sequence[str], max_tokens: int) -> dict[str, Any]:
        cited_first = sorted(labels, key=lambda label: label not in judged.cited)
        return verdict.schema([*tool_hits, *cited_first], members, max_tokens // share)

    return replace(judged, make_schema=make_schema)


def _of_form(sampling: SamplingParams, max_tokens: int, schema: Mapping[str, Any] | None) -> SamplingParams:
    """Return sampling parameters for a JSON reply, which no stop string may end."""
    return replace(sampling, max_tokens=max_tokens, think_tokens=0, json_schema=schema, stop=())


def propose_text(name: str, persona: str) -> str:
    return _PROPOSE.format(name=name, persona=persona.strip())


def review_text(name: str, persona: str) -> str:
    return _REVIEW.format(name=name, persona=persona.strip())


def judge_text(persona: str, *, with_tools: bool) -> str:
    return _JUDGE.format(persona=persona.strip() or _NO_PERSONA) + (_USE_TOOLS if with_tools else "")


def planning_text(
    strategy: str = "", searches: Sequence[str] = (), *, silent: Sequence[str] = (), points: Mapping[str, float] | None = None
) -> str:
    """Return the planning context: silent members, the ranking, the plan and the search queries.

    Facts that are not stated elsewhere come first, because the end is cut if there is too little room.
    """
    lists = (
        ("Said nothing", silent),
        ("Ranked by the specialists, the best first", [f"{name} ({each:.2f})" for name, each in (points or {}).items()]),
        ("Plan", [strategy] if strategy else []),
        ("Searched for", searches),
    )
    return "\n".join(f"{what}: {'; '.join(texts)}" for what, texts in lists if texts)
