"""What could be said to the model, and the words in which each thing is put."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from localrag.budget import Profile
from localrag.citation import untagged
from localrag.types import Attachment, Hit, Memory, Message, Proposal, ToolSpec

ANSWER_BASIS = 512
"""Tokens that an answer starts from in the negotiation; more than this it takes only from what is left over."""

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
"""Of a text that stands in several places, this many of the others are named."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInputs:
    """Everything that is offered for one prompt, before anything is chosen.

    `messages` is a whole conversation that ends with what is asked now. `hits` are ranked, best first; `tools` are in order of
    preference. `max_tokens` is the longest answer; None: what history, evidence and the rest leave of the window.
    """

    messages: Sequence[Message]
    needs_question: bool = True
    """Whether it must end with a question. One that need not is sent as it stands, without sources and all that goes with a question."""
    pinned: frozenset[int] = frozenset()
    """Numbers of messages, from 1, that are sent whole, each with the exchange that it belongs to, or nothing is."""
    settled: int = 0
    """Up to the message of this number, what is not pinned is left to the summary, also where there would be room for it, unless history
    must be sent whole (its cut is "error")."""
    earlier: Mapping[int, Sequence[Hit]] = field(default_factory=dict)
    """Hits that stand in what was `sent` for earlier messages, by their numbers: they can be cited again."""
    again: Sequence[str] = ()
    """Labels of those of them that the question is about: the model is told to look there, in a section of its own, "pointers"."""
    hits: Sequence[Hit] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Labels of passages that were found and are not among the hits, each with the reason that the ledger gives."""
    tools: Sequence[ToolSpec] = ()
    must_call: Collection[str] = ()
    """Names of tools, one of which the answer must call. The one of them that takes the fewest tokens is sent, or nothing is."""
    memories: Sequence[Memory] = ()
    attachments: Sequence[Attachment] = ()
    cite: str = CITE
    """What follows the question, or the instructions if there are any, where there is evidence; `{label}` becomes a source's tag."""
    cited: frozenset[str] = frozenset()
    """Labels of those hits that have a section of their own, served before the rest of the evidence: a council's members cite them."""
    tells_omitted: bool = False
    """Whether the model is told how many of the sources it is shown, where that is not all."""
    proposals: Sequence[Proposal] = ()
    plan: str = ""
    instructions: str = ""
    """What stands last, behind the question: who is asked, and for what. What is before it is shared by all who are asked the same."""
    max_tokens: int | None = ANSWER_BASIS
    think_tokens: int = 0
    """The most that a reasoning model thinks before it answers; with 0 it is kept from thinking."""
    profile: Profile = field(default_factory=Profile)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Something that can be left out or shortened.

    `cost` is its tokens, what joining it to its neighbours can cost included; of a section's items, the one with the lowest `score`
    goes first. `dress` makes the text that is sent from a `body` of any length. `modified` is in seconds since the epoch.
    """

    section: str
    label: str
    score: float
    body: str
    dress: Callable[[str], str]
    cost: int
    tier: str | None = None
    modified: float | None = None


def source(hit: Hit, body: str | None = None) -> str:
    """A chunk as the model sees it. A tag that stands in the document itself is broken, so that it cannot pose as a source."""
    chunk = hit.chunk
    text = untagged((chunk.text if body is None else body).strip())
    place = _one_line(chunk.heading or chunk.source)
    first, _, rest = text.partition("\n")
    if rest and first.startswith("#") and first.lstrip("# ") == place.rpartition(" > ")[2]:
        text = rest.lstrip()  # the heading is in `place`
    return f"[{hit.label}] {text} ({place}{_elsewhere(hit)})\n\n"


def _elsewhere(hit: Hit) -> str:
    """Where else the text of a hit stands: what holds in one place holds in the others too, and only the place tells them apart."""
    chunk = hit.chunk
    others = dict.fromkeys((each.source, each.heading) for each in hit.copies)
    others.pop((chunk.source, chunk.heading), None)
    if not others:
        return ""
    places = [_one_line(source if heading == chunk.heading else f"{source} > {heading}") for source, heading in others]
    more = f" and {len(places) - MAX_PLACES} more" if len(places) > MAX_PLACES else ""
    return f"; same text in {', '.join(places[:MAX_PLACES])}{more}"


def file(attachment: Attachment, body: str | None = None) -> str:
    """A file that came with the question as the model sees it."""
    return f"File {_one_line(attachment.label)}:\n\n{untagged((attachment.text if body is None else body).strip())}\n\n"


def fact(memory: Memory, body: str | None = None) -> str:
    """A memory as the model sees it: a line."""
    return f"- {_one_line(memory.text if body is None else body)}\n"


def proposal(given: Proposal, body: str | None = None) -> str:
    """What a member of a council proposes, as another one sees it. Its tags are left: they were checked."""
    return f"\n\n{_one_line(given.label)}: {(given.text if body is None else body).strip()}".rstrip()


def planned(text: str) -> str:
    """What was planned, as the reader sees it."""
    return untagged(text.strip())


def _one_line(text: str) -> str:
    return untagged(_CONTROL.sub(" ", text)).strip()
