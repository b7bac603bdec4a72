"""What is sent, in which order, and how much of each: the order of the prompt lives here and nowhere else.

What changes least comes first: the template's opening, the system text, then evidence and question in the last user message.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from localrag.budget import Budget, Entry, Ledger, Percent, Section
from localrag.errors import BudgetExceededError, UsageError
from localrag.markup import EncodedPart, Part, as_content, encode
from localrag.messages import Message
from localrag.passages import Hit
from localrag.tokens import ChatTemplate, TokenCounter

ANSWER_BASIS = 512
"""Tokens that an answer starts from in the negotiation; more than this it takes only from what is left over."""
ANSWER_FLOOR = 32
"""Tokens that an answer must have, if as many were asked for: less is no answer."""

_INTRO = "Sources:\n\n"
_QUESTION = "Question: "
_CITE = "\n\nAnswer in one or two sentences from the sources above. Begin with the tag of the source that you use, like [{label}]."
_FORGED_TAG = re.compile(r"KB#(?=\S)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids as the model gets them, the hits that are in them, and the ledger that accounts for every one."""

    token_ids: tuple[int, ...]
    parts: tuple[EncodedPart, ...]
    hits: tuple[Hit, ...]
    ledger: Ledger

    @property
    def max_tokens(self) -> int:
        """What is left for the answer, in tokens."""
        return self.ledger.entry("answer").allotted

    @property
    def hit_tokens(self) -> dict[str, int]:
        """Tokens that each hit takes, its tag included, by its label."""
        return {part.part.item: len(part.token_ids) for part in self.parts if part.part.item is not None}


def measure(
    messages: Sequence[Message],
    hits: Sequence[Hit],
    *,
    counter: TokenCounter,
    template: ChatTemplate,
    max_tokens: int,
    context_ratio: float,
) -> list[Section]:
    """What each part wants, in tokens. `messages` are an optional system message and a user message, the question.

    `context_ratio` (0 to 1) is the most that evidence may take of the window without the parts that cannot be cut.
    """
    used = _used(_encode(messages, (), counter, template))
    sections = [Section.fixed(name, used[name]) for name in ("scaffold", "system", "question") if used[name]]
    if hits:
        # evidence brings the wording of the question with it, and a join can cost a token or two
        wanted = _frame_cost(hits, counter) + sum(_cost(hit, counter) + 2 for hit in hits)
        sections.append(Section(name="evidence", basis=wanted, max=Percent(round(100 * context_ratio, 6)), shrink=1.0, cut="drop"))
    floor = min(max_tokens, ANSWER_FLOOR)
    sections.append(Section(name="answer", basis=min(max_tokens, ANSWER_BASIS), min=floor, max=max_tokens, grow=1.0, shrink=1.0))
    return sections


def compose(
    messages: Sequence[Message],
    hits: Sequence[Hit],
    budget: Budget,
    *,
    counter: TokenCounter,
    template: ChatTemplate,
    max_tokens: int,
) -> Prompt:
    """Pack whole chunks into what evidence was given, best first, and count the result; what did not fit is named in the ledger.

    The counts of single chunks only choose; what is counted in the end are the very ids that are sent, so a chunk that does not
    fit after all is taken out again. What packing left unused goes to the answer, up to its max.
    """
    room = budget.allocations.get("evidence", 0)
    kept = _pack(hits, room, counter)
    while True:
        parts = _encode(messages, kept, counter, template)
        used = _used(parts)
        total = sum(used.values())
        if used["evidence"] <= room and total + min(max_tokens, ANSWER_FLOOR) <= budget.window:
            break
        if not kept:
            raise BudgetExceededError(budget.window, {**used, "answer": min(max_tokens, ANSWER_FLOOR)})
        kept = kept[:-1]
    ledger = _ledger(used, hits, kept, budget, counter, max_tokens)
    ids = tuple(token_id for part in parts for token_id in part.token_ids)
    return Prompt(token_ids=ids, parts=tuple(parts), hits=tuple(_arranged(kept)), ledger=ledger)


def _pack(hits: Sequence[Hit], room: int, counter: TokenCounter) -> list[Hit]:
    """The hits that fit, in their order; one that is too large is passed over for a smaller one behind it."""
    kept = []
    room -= _frame_cost(hits, counter)
    for hit in hits:
        cost = _cost(hit, counter)
        if cost <= room:
            kept.append(hit)
            room -= cost
    return kept


def _arranged(hits: Sequence[Hit]) -> list[Hit]:
    """Ranked hits in reading order: documents by their best hit, chunks of one document as they stand in it."""
    best: dict[tuple[str, str, int], int] = {}
    for rank, hit in enumerate(hits):
        best.setdefault(_document(hit), rank)
    return sorted(hits, key=lambda hit: (best[_document(hit)], hit.chunk.ordinal))


def _document(hit: Hit) -> tuple[str, str, int]:
    return hit.chunk.scope, hit.chunk.kb, hit.chunk.document_id


def _ledger(used: Counter[str], hits: Sequence[Hit], kept: Sequence[Hit], budget: Budget, counter: TokenCounter, max_tokens: int) -> Ledger:
    total = sum(used.values())
    answer = min(max_tokens, budget.window - total)
    entries = [Entry(name, used[name], used[name], used[name]) for name in ("scaffold", "system") if used[name]]
    if hits:
        labels = {hit.label for hit in kept}
        omitted = [hit for hit in hits if hit.label not in labels]
        wanted = used["evidence"] + sum(_cost(hit, counter) for hit in omitted)
        most = budget.window - answer - (total - used["evidence"])
        allotted = min(budget.allocations["evidence"], most) if omitted else used["evidence"]
        entries.append(Entry("evidence", wanted, allotted, used["evidence"], tuple(hit.label for hit in omitted)))
    entries.append(Entry("question", used["question"], used["question"], used["question"]))
    entries.append(Entry("answer", max_tokens, answer, 0))
    return Ledger(budget.window, tuple(entries))


def _used(parts: Sequence[EncodedPart]) -> Counter[str]:
    used: Counter[str] = Counter()
    for encoded in parts:
        used[encoded.part.section] += len(encoded.token_ids)
    return used


def _encode(messages: Sequence[Message], hits: Sequence[Hit], counter: TokenCounter, template: ChatTemplate) -> list[EncodedPart]:
    """The whole prompt in parts, each with the tokens that belong to it."""
    contents = [_contents(message, hits if message is messages[-1] else ()) for message in messages]
    rendered = template.render([Message(m.role, "".join(p.text for p in c)) for m, c in zip(messages, contents, strict=True)])
    parts: list[Part] = []
    for segment in rendered:
        if segment.message is None:
            parts.append(Part("scaffold", segment.text, is_markup=True))
        else:
            parts += contents[segment.message]
    return encode(parts, counter.tokenizer)


def _contents(message: Message, hits: Sequence[Hit]) -> list[Part]:
    """A message as parts. White space at its ends is dropped: templates drop it, and they do not see the content here."""
    text = message.content.strip()
    if not text:
        raise UsageError(f"The {message.role} text is empty.", hint="Give a text, or leave it out.")
    if message.role == "system":
        return [Part("system", text)]
    if not hits:
        return [Part("question", text)]
    sources = [Part("evidence", _source(hit), item=hit.label) for hit in _arranged(hits)]
    cite = Part("evidence", _CITE.format(label=hits[0].label))
    return [Part("evidence", _INTRO), *sources, Part("evidence", _QUESTION), Part("question", text), cite]


def _cost(hit: Hit, counter: TokenCounter) -> int:
    """Tokens of a chunk by itself; in the prompt, a join with its neighbours can make it one or two more or less."""
    return counter(as_content(_source(hit), counter.tokenizer))


def _frame_cost(hits: Sequence[Hit], counter: TokenCounter) -> int:
    """Tokens of the wording that evidence brings with it."""
    return sum(counter(text) for text in (_INTRO, _QUESTION, _CITE.format(label=hits[0].label))) if hits else 0


def _source(hit: Hit) -> str:
    """A chunk as the model sees it. A tag that stands in the document itself is broken, so that it cannot pose as a source."""
    chunk = hit.chunk
    place, text = (_FORGED_TAG.sub("KB\u200b#", part) for part in (_CONTROL.sub(" ", chunk.heading or chunk.source), chunk.text.strip()))
    first, _, rest = text.partition("\n")
    if rest and first.startswith("#") and first.lstrip("# ") == place.rpartition(" > ")[2]:
        text = rest.lstrip()  # the heading is in `place`
    return f"[{hit.label}] {text} ({place})\n\n"
