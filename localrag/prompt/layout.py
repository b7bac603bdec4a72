"""The order of a prompt lives here and nowhere else.

What changes least comes first: the template's opening, the system text, tools, memories, the summary of what was said long ago, the
conversation, then files, evidence and the question in the last user message; behind it what others proposed, and what sets those apart who
are asked the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localrag.conversation import Exchange, Split
from localrag.errors import UsageError
from localrag.prompt import inputs
from localrag.prompt.inputs import Item
from localrag.text.markup import EncodedPart, Part, encode
from localrag.text.thinking import without_thoughts
from localrag.text.tokens import ChatTemplate, Segment, Tokenizer
from localrag.types import Message, Role, ToolSpec


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """An item as it is sent: whole, or at a `level` that is shorter. `cost` as in Item."""

    item: Item
    text: str
    cost: int
    level: str = "full"

    @property
    def label(self) -> str:
        return self.item.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is sent of an offer. `texts` are the contents of messages that are sent shorter than they are, by their number."""

    tools: Sequence[ToolSpec] = ()
    memories: Sequence[Shown] = ()
    summary: str = ""
    history: Sequence[Exchange] = ()
    texts: Mapping[int, str] = field(default_factory=dict)
    attachments: Sequence[Shown] = ()
    evidence: Sequence[Shown] = ()
    """In the order in which it is read, of both sections that hold some; "cited" has the wording around it where it holds any."""
    sources_intro: str = inputs.SOURCES_INTRO
    again: Sequence[str] = ()
    """Labels of evidence that stands in an earlier message."""
    cite: str = ""
    """What is said about citing, with the label of the best piece of evidence for an example."""
    proposals: Sequence[Shown] = ()
    plan: Sequence[Shown] = ()
    instructions: str = ""
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class _Said:
    """A message as parts; `section` is whose the template's text behind it is."""

    role: Role
    parts: tuple[Part, ...]
    section: str = "template"


def encode_prompt(split: Split, choice: Choice, *, tokenizer: Tokenizer, template: ChatTemplate) -> list[EncodedPart]:
    """The whole prompt in parts, each with the tokens that belong to it.

    The template's own text belongs to the section "template". Text that follows an earlier message or a round of tools belongs to the
    section of that message, because it is there only with it.
    """
    said = [*_system(split, choice), *_history(split, choice), *_current(split, choice)]
    messages = [Message(each.role, "".join(part.text for part in each.parts)) for each in said]
    rendered = template.render(messages, choice.tools, thinks=choice.thinks)
    parts: list[Part] = []
    owner = "template"
    for segment in rendered:
        if segment.message is not None:
            parts += said[segment.message].parts
            owner = said[segment.message].section
        else:
            is_tool = segment.tools
            parts.append(Part("tools" if is_tool else owner, segment.text, is_markup=not segment.is_content))
    return encode(parts, tokenizer)


def _system(split: Split, choice: Choice) -> list[_Said]:
    """System text, memories and summary, as far as there are any, in one system message."""
    parts = [Part("system", split.system.strip())] if split.system.strip() else []
    blocks = []
    if choice.memories:
        facts = [Part("memories", shown.text, item=shown.label) for shown in choice.memories]
        blocks.append([Part("memories", inputs.MEMORIES_INTRO), *facts])
    if choice.summary:
        blocks.append([Part("summary", inputs.SUMMARY_INTRO + choice.summary.strip())])
    for block in blocks:
        lead = Part(block[0].section, "\n\n" if parts else "")
        parts += [Part(lead.section, lead.text + block[0].text), *block[1:]]
    return [_Said("system", _trimmed(parts))] if parts else []


def _history(split: Split, choice: Choice) -> list[_Said]:
    """What is kept of what was said before, and what is pinned of it, in the order in which it was said."""
    spoken = [("history", exchange) for exchange in choice.history] + [("pinned", exchange) for exchange in split.pinned]
    said = []
    for section, exchange in sorted(spoken, key=lambda pair: pair[1].messages[0].number):
        for number, message in exchange.messages:
            part = Part(section, choice.texts.get(number, as_sent(message)).strip(), item=f"message {number}")
            said.append(_Said(message.role, (part,), section))
    return said


def as_sent(message: Message) -> str:
    """What is sent of a message of a conversation: of an answer not what was thought before it, of a question also what came with it."""
    if message.role == "assistant":
        return without_thoughts(message.content)
    return message.sent or message.content


def _current(split: Split, choice: Choice) -> list[_Said]:
    """What is asked now; files and evidence go into the last user message, a round of tools follows it."""
    last_user = max((number for number, message in split.current if message.role == "user"), default=0)
    said = []
    for number, message in split.current:
        text = message.content.strip()
        if message.role != "user":
            part = Part("tools", choice.texts.get(number, text).strip(), item=f"message {number}")
            said.append(_Said(message.role, (part,), "tools"))
        elif not text:
            raise UsageError("The user text is empty.", hint="Give a text, or leave it out.")
        else:
            said.append(_Said("user", _question(text, choice) if number == last_user else (Part("question", text),)))
    return said


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
        parts.append(Part("pointers", inputs.AGAIN.format(labels=", ".join(f"[{label}]" for label in choice.again))))
        cite = cite or [Part("pointers", choice.cite)]
    if parts:
        parts.append(Part(owner, inputs.QUESTION_INTRO))
    parts += [Part("question", text), *([] if choice.instructions.strip() else cite)]
    for section, intro, items in (("proposals", inputs.PROPOSALS_INTRO, choice.proposals), ("plan", inputs.PLAN_INTRO, choice.plan)):
        if items:
            parts += [Part(section, intro), *(Part(section, shown.text, item=shown.label) for shown in items)]
    if choice.instructions.strip():
        parts += [Part("instructions", inputs.INSTRUCTIONS_INTRO + choice.instructions.strip()), *cite]
    return _trimmed(parts)


def _trimmed(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Without white space at the end: templates drop it, and they do not see the content here."""
    last = parts[-1]
    return (*parts[:-1], Part(last.section, last.text.rstrip(), item=last.item))


class PlainTemplate:
    """Implements `localrag.text.tokens.ChatTemplate` with no text of its own: the contents one behind the other."""

    thinking = None

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, thinks: bool = True) -> list[Segment]:  # noqa: ARG002
        return [Segment(message.content, index) for index, message in enumerate(messages)]


PLAIN = PlainTemplate()
