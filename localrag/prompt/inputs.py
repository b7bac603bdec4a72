"""The inputs of a prompt, and the fixed wording around each of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from localrag.budget import Profile
from localrag.citation import untagged
from localrag.types import Attachment, Hit, Memory, Message, Proposal, ToolSpec

ANSWER_BASIS = 512
"""Tokens with which an answer enters the negotiation; it gets more only from leftover tokens."""

SOURCES_INTRO = "Sources:\n\n"
QUESTION_INTRO = "Question: "
CITE = "\n\nAnswer in one or two sentences from the sources above. Begin with the tag of the source that you use, like [{label}]."
AGAIN = "See also {labels} above.\n\n"
MEMORIES_INTRO = "What is known from before:\n"
SUMMARY_INTRO = "The conversation so far, in short:\n"
PARTIAL_SOURCES_INTRO = "Sources (showing {shown} of {found}, {tokens} of {room} tokens):\n\n"
PROPOSALS_INTRO = "\n\nProposals:"
PLAN_INTRO = "\n\nPlanning:\n"
INSTRUCTIONS_INTRO = "\n\n"

MAX_PLACES = 8
"""Maximum number of other places named for a text that occurs in several."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInputs:
    """Everything that may go into one prompt, before selection.

    `messages` is a whole conversation that ends with the current question. `hits` are ranked, best first; `tools` are in order
    of preference. `max_tokens` limits the answer; None means the rest of the window.
    """

    messages: Sequence[Message]
    needs_question: bool = True
    """Whether the conversation must end with a question. If not, it can be sent as it is, without sources or anything else that
    goes with a question.
    """
    pinned: frozenset[int] = frozenset()
    """Numbers of messages, from 1, that are always sent in full with their exchanges, or the prompt is refused."""
    settled: int = 0
    """Messages up to this number are left to the summary, unless pinned, even if there is room for them. Ignored if history must
    be sent in full (its cut is "error").
    """
    earlier: Mapping[int, Sequence[Hit]] = field(default_factory=dict)
    """Hits sent with earlier messages, by message number: they can be cited again."""
    again: Sequence[str] = ()
    """Labels of earlier hits that the question is about. The section "pointers" refers the model to them."""
    hits: Sequence[Hit] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Labels of passages that were found but are not among the hits, with the reason for the ledger."""
    tools: Sequence[ToolSpec] = ()
    must_call: Collection[str] = ()
    """Names of tools of which the answer must call one. The one with the fewest tokens is always sent, or the prompt is refused."""
    memories: Sequence[Memory] = ()
    attachments: Sequence[Attachment] = ()
    cite: str = CITE
    """Text after the question (or after the instructions) if there is evidence; `{label}` is replaced by the tag of a source."""
    cited: frozenset[str] = frozenset()
    """Labels of hits in a section of their own, which is served before other evidence: council members cite them."""
    tells_omitted: bool = False
    """Whether the prompt says how many of the sources are shown, if some are left out."""
    proposals: Sequence[Proposal] = ()
    plan: str = ""
    instructions: str = ""
    """The last text, after the question: the role and its task. Everything before it is shared by all roles."""
    max_tokens: int | None = ANSWER_BASIS
    think_tokens: int = 0
    """Maximum tokens of a reasoning model's thoughts before the answer; 0 turns thinking off."""
    profile: Profile = field(default_factory=Profile)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Content that can be left out or shortened.

    `cost` is its tokens, including what joining it to its neighbours may add. The item with the lowest `score` in a section is
    dropped first. `dress` adds the wording to a `body` of any length. `modified` is in seconds since the epoch.
    """

    section: str
    label: str
    score: float
    body: str
    dress: Callable[[str], str]
    cost: int
    tier: str | None = None
    modified: float | None = None


def source_text(hit: Hit, body: str | None = None) -> str:
    """Format a chunk for the prompt. A tag inside the document is broken up, so that it cannot pose as a source."""
    chunk = hit.chunk
    text = untagged((chunk.text if body is None else body).strip())
    place = _one_line(chunk.heading or chunk.source)
    first, _, rest = text.partition("\n")
    if rest and first.startswith("#") and first.lstrip("# ") == place.rpartition(" > ")[2]:
        text = rest.lstrip()  # the heading is in `place`
    return f"[{hit.label}] {text} ({place}{_elsewhere(hit)})\n\n"


def _elsewhere(hit: Hit) -> str:
    """Name other places with the same text: what applies in one place applies in the others, and only the place tells them apart."""
    chunk = hit.chunk
    others = dict.fromkeys((each.source, each.heading) for each in hit.copies)
    others.pop((chunk.source, chunk.heading), None)
    if not others:
        return ""
    places = [_one_line(source if heading == chunk.heading else f"{source} > {heading}") for source, heading in others]
    more = f" and {len(places) - MAX_PLACES} more" if len(places) > MAX_PLACES else ""
    return f"; same text in {', '.join(places[:MAX_PLACES])}{more}"


def file_text(attachment: Attachment, body: str | None = None) -> str:
    """Format an attached file for the prompt."""
    return f"File {_one_line(attachment.label)}:\n\n{untagged((attachment.text if body is None else body).strip())}\n\n"


def memory_text(memory: Memory, body: str | None = None) -> str:
    """Format a memory as one line of the prompt."""
    return f"- {_one_line(memory.text if body is None else body)}\n"


def proposal_text(proposal: Proposal, body: str | None = None) -> str:
    """Format a council member's proposal for another role. Its tags stay, because they have been checked."""
    return f"\n\n{_one_line(proposal.label)}: {(proposal.text if body is None else body).strip()}".rstrip()


def plan_text(text: str) -> str:
    """Format the plan for the prompt."""
    return untagged(text.strip())


def _one_line(text: str) -> str:
    return untagged(_CONTROL.sub(" ", text)).strip()
