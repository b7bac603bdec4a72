"""The order of a prompt. No other module knows it.

Text that changes least comes first, so that prefixes can be reused: the template's opening, system text, tools, memories, the
summary, the conversation, then files, evidence and the question in the last user message. Proposals follow, and the
instructions that differ between council roles come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localrag.conversation import Exchange, Split
from localrag.errors import UsageError
from localrag.prompt.inputs import (
    AGAIN,
    INSTRUCTIONS_INTRO,
    MEMORIES_INTRO,
    PLAN_INTRO,
    PROPOSALS_INTRO,
    QUESTION_INTRO,
    SOURCES_INTRO,
    SUMMARY_INTRO,
    Item,
)
from localrag.text.markup import EncodedPart, Part, encode
from localrag.text.thinking import without_thoughts
from localrag.text.tokens import ChatTemplate, Segment, Tokenizer
from localrag.types import Message, Role, ToolSpec


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """An item in the form that is sent: whole, or shortened to a `level`. `cost` is as in Item."""

    item: Item
    text: str
    cost: int
    level: str = "full"

    @property
    def label(self) -> str:
        return self.item.label


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
    """One message of the prompt in parts. `section` owns the template's text after it."""

    role: Role
    parts: tuple[Part, ...]
    section: str = "template"


def encode_prompt(split: Split, choice: Choice, *, tokenizer: Tokenizer, template: ChatTemplate) -> list[EncodedPart]:
    """Lay out and tokenise the whole prompt, part by part.

    The template's own text belongs to the section "template", except after an earlier message or a tool round: that text
    belongs to the section of the message, because it is there only with it.
    """
    message_parts = [*_system(split, choice), *_history(split, choice), *_current(split, choice)]
    messages = [Message(each.role, "".join(part.text for part in each.parts)) for each in message_parts]
    rendered = template.render(messages, choice.tools, thinks=choice.thinks)
    parts: list[Part] = []
    owner = "template"
    for segment in rendered:
        if segment.message is not None:
            parts += message_parts[segment.message].parts
            owner = message_parts[segment.message].section
        else:
            is_tool = segment.tools
            parts.append(Part("tools" if is_tool else owner, segment.text, is_markup=not segment.is_content))
    return encode(parts, tokenizer)


def _system(split: Split, choice: Choice) -> list[_MessageParts]:
    """Put the system text, memories and summary into one system message."""
    parts = [Part("system", split.system.strip())] if split.system.strip() else []
    blocks = []
    if choice.memories:
        facts = [Part("memories", shown.text, item=shown.label) for shown in choice.memories]
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
            message_parts.append(_MessageParts(message.role, (part,), section))
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
            message_parts.append(_MessageParts(message.role, (part,), "tools"))
        elif not text:
            raise UsageError("The user text is empty.", hint="Write a text, or leave it out.")
        else:
            message_parts.append(_MessageParts("user", _question(text, choice) if number == last_user else (Part("question", text),)))
    return message_parts


def _question(text: str, choice: Choice) -> tuple[Part, ...]:
    parts = [Part("attachments", shown.text, item=shown.label) for shown in choice.attachments]
    owner, cite = "attachments", []
    if choice.evidence:
        owner = "cited" if any(shown.item.section == "cited" for shown in choice.evidence) else "evidence"
        parts += [Part(owner, choice.sources_intro)]
        parts += [Part(shown.item.section, shown.text, item=shown.label) for shown in choice.evidence]
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
            parts += [Part(section, intro), *(Part(section, shown.text, item=shown.label) for shown in items)]
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

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, thinks: bool = True) -> list[Segment]:  # noqa: ARG002
        return [Segment(message.content, index) for index, message in enumerate(messages)]


PLAIN = PlainTemplate()
