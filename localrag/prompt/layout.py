"""The inputs of a prompt, the fixed wording around each, and their order. No other module knows that order.

Text that changes least comes first, so that prefixes can be reused: the template's opening, system text, tools, memories, the
summary, the conversation, then files, evidence and the question in the last user message. Proposals follow, and the
instructions that differ between council roles come last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from localrag.budget import Profile
from localrag.citation import untagged
from localrag.conversation import Exchange, Split
from localrag.errors import UsageError
from localrag.text.markup import EncodedPart, Part, encode
from localrag.text.thinking import without_thoughts
from localrag.text.tokens import ChatTemplate, Segment, Tokenizer
from localrag.types import Attachment, Hit, Memory, Message, Proposal, Role, ToolSpec

if TYPE_CHECKING:
    from localrag.text.tool_calls import CallMarkup

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

EXCERPT = ", excerpt"
"""Marks a passage of which only some sentences are sent."""

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
    quotes: bool = False
    """Whether the sentences of the evidence are numbered, so that the answer can quote them (see quotes.py)."""
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
    dropped first. `dress` adds the wording to a `body` of any length. `modified` is in seconds since the epoch. For the excerpt of a
    passage, `sentences` is the number of its sentences and that of the passage, and `whole_cost` the cost of all of it.
    """

    section: str
    label: str
    score: float
    body: str
    dress: Callable[[str], str]
    cost: int
    tier: str | None = None
    modified: float | None = None
    sentences: tuple[int, int] | None = None
    whole_cost: int = 0

    @property
    def level(self) -> str:
        """The form in which it is sent if all of it fits."""
        return "full" if self.sentences is None else "sentences"


def source_text(hit: Hit, body: str | None = None, *, safe: Callable[[str], str] = untagged) -> str:
    """Format a chunk for the prompt. `safe` breaks up a tag inside the document, so that it cannot pose as a source."""
    chunk = hit.chunk
    text = safe((chunk.text if body is None else body).strip())
    place = _one_line(chunk.heading or chunk.source)
    first, _, rest = text.partition("\n")
    if rest and first.startswith("#") and first.lstrip("# ") == place.rpartition(" > ")[2]:
        text = rest.lstrip()  # the heading is in `place`
    return f"[{hit.label}] {text} ({place}{_elsewhere(hit)}{EXCERPT if hit.spans else ''})\n\n"


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


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """An item in the form that is sent: whole, or shortened to a `level`, with that `body`. `cost` is as in Item."""

    item: Item
    text: str
    cost: int
    level: str = "full"
    body: str = ""

    @property
    def label(self) -> str:
        return self.item.label

    @property
    def sentences(self) -> tuple[int, int] | None:
        """The number of sentences chosen and of the passage's, if they are sent as chosen."""
        return self.item.sentences if self.level == self.item.level else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The selected inputs. `texts` are the shortened contents of messages, by number."""

    tools: Sequence[ToolSpec] = ()
    memories: Sequence[Shown] = ()
    summary: str = ""
    history: Sequence[Exchange] = ()
    texts: Mapping[int, str] = field(default_factory=dict)
    attachments: Sequence[Shown] = ()
    evidence: Sequence[Shown] = ()
    """Passages of "cited" and "evidence" in reading order. If any are "cited", that section owns the wording around both."""
    sources_intro: str = SOURCES_INTRO
    again: Sequence[str] = ()
    """Labels of evidence in an earlier message."""
    cite: str = ""
    """Text about citing, with the label of the best source as an example."""
    proposals: Sequence[Shown] = ()
    plan: Sequence[Shown] = ()
    instructions: str = ""
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class _MessageParts:
    """One message of the prompt in parts. `section` owns the template's text after it, and the calls of `message`."""

    role: Role
    parts: tuple[Part, ...]
    section: str = "template"
    message: Message | None = None

    @property
    def whole(self) -> Message:
        """The message as the template gets it."""
        content = "".join(part.text for part in self.parts)
        return Message(self.role, content) if self.message is None else replace(self.message, content=content, sent="")


def encode_prompt(split: Split, choice: Choice, *, tokenizer: Tokenizer, template: ChatTemplate) -> list[EncodedPart]:
    """Lay out and tokenise the whole prompt, part by part.

    The template's own text belongs to the section "template", except after an earlier message or a tool round: that text
    belongs to the section of the message, because it is there only with it. Calls belong to the section of their message.
    """
    message_parts = [*_system(split, choice), *_history(split, choice), *_current(split, choice)]
    messages = [each.whole for each in message_parts]
    rendered = template.render(messages, choice.tools, thinks=choice.thinks)
    parts: list[Part] = []
    owner = "template"
    for segment in rendered:
        if segment.message is not None:
            own = message_parts[segment.message]
            is_result = own.role == "tool" and len(own.parts) == 1
            parts += [replace(own.parts[0], text=segment.text)] if is_result else own.parts  # templates may escape a result
            owner = own.section
        elif segment.call is not None:
            own = message_parts[segment.call]
            owner = own.section
            parts.append(
                Part(owner, segment.text, is_markup=not segment.is_content, item=own.parts[0].item if segment.is_content else None)
            )
        else:
            is_tool = segment.tools
            parts.append(Part("tools" if is_tool else owner, segment.text, is_markup=not segment.is_content))
    return encode(parts, tokenizer)


def _system(split: Split, choice: Choice) -> list[_MessageParts]:
    """Put the system text, memories and summary into one system message."""
    parts = [Part("system", split.system.strip())] if split.system.strip() else []
    blocks = []
    if choice.memories:
        facts = [Part("memories", each.text, item=each.label) for each in choice.memories]
        blocks.append([Part("memories", MEMORIES_INTRO), *facts])
    if choice.summary:
        blocks.append([Part("summary", SUMMARY_INTRO + choice.summary.strip())])
    for block in blocks:
        lead = Part(block[0].section, "\n\n" if parts else "")
        parts += [Part(lead.section, lead.text + block[0].text), *block[1:]]
    return [_MessageParts("system", _trimmed(parts))] if parts else []


def _history(split: Split, choice: Choice) -> list[_MessageParts]:
    """Return the kept and the pinned exchanges in their original order."""
    spoken = [("history", exchange) for exchange in choice.history] + [("pinned", exchange) for exchange in split.pinned]
    message_parts = []
    for section, exchange in sorted(spoken, key=lambda pair: pair[1].messages[0].number):
        for number, message in exchange.messages:
            part = Part(section, choice.texts.get(number, as_sent(message)).strip(), item=f"message {number}")
            message_parts.append(_MessageParts(message.role, (part,), section, message))
    return message_parts


def as_sent(message: Message) -> str:
    """Return the text that is sent for a message: an answer without its thoughts, a question with the sources that came with it."""
    if message.role == "assistant":
        return without_thoughts(message.content)
    return message.sent or message.content


def _current(split: Split, choice: Choice) -> list[_MessageParts]:
    """Return the current question. Files and evidence go into the last user message; a tool round follows it."""
    last_user = max((number for number, message in split.current if message.role == "user"), default=0)
    message_parts = []
    for number, message in split.current:
        text = message.content.strip()
        if message.role != "user":
            part = Part("tools", choice.texts.get(number, text).strip(), item=f"message {number}")
            message_parts.append(_MessageParts(message.role, (part,), "tools", message))
        elif not text:
            raise UsageError("The user text is empty.", hint="Write a text, or leave it out.")
        else:
            message_parts.append(_MessageParts("user", _question(text, choice) if number == last_user else (Part("question", text),)))
    return message_parts


def _question(text: str, choice: Choice) -> tuple[Part, ...]:
    parts = [Part("attachments", each.text, item=each.label) for each in choice.attachments]
    owner, cite = "attachments", []
    if choice.evidence:
        owner = "cited" if any(each.item.section == "cited" for each in choice.evidence) else "evidence"
        parts += [Part(owner, choice.sources_intro)]
        parts += [Part(each.item.section, each.text, item=each.label) for each in choice.evidence]
        cite = [Part(owner, choice.cite)] if choice.cite else []
    if choice.again:
        owner = owner if parts else "pointers"
        parts.append(Part("pointers", AGAIN.format(labels=", ".join(f"[{label}]" for label in choice.again))))
        cite = cite or [Part("pointers", choice.cite)]
    if parts:
        parts.append(Part(owner, QUESTION_INTRO))
    parts += [Part("question", text), *([] if choice.instructions.strip() else cite)]
    for section, intro, items in (("proposals", PROPOSALS_INTRO, choice.proposals), ("plan", PLAN_INTRO, choice.plan)):
        if items:
            parts += [Part(section, intro), *(Part(section, each.text, item=each.label) for each in items)]
    if choice.instructions.strip():
        parts += [Part("instructions", INSTRUCTIONS_INTRO + choice.instructions.strip()), *cite]
    return _trimmed(parts)


def _trimmed(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Remove white space at the end: templates strip it, but they do not see the content here."""
    last = parts[-1]
    return (*parts[:-1], Part(last.section, last.text.rstrip(), item=last.item))


class PlainTemplate:
    """A `ChatTemplate` without any text of its own: the contents one after another."""

    thinking = None
    notes: tuple[str, ...] = ()

    @property
    def call_markup(self) -> CallMarkup:
        from localrag.text.tool_calls import PLAIN as AS_JSON  # noqa: PLC0415  # weight: few prompts are plain

        return AS_JSON

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, thinks: bool = True) -> list[Segment]:  # noqa: ARG002
        return [Segment(message.text, index) for index, message in enumerate(messages)]


PLAIN = PlainTemplate()
