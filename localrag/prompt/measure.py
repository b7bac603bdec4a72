"""What each part of an offer wants, in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from localrag.budget import Budget, Section, negotiate
from localrag.conversation import Exchange, Split, newest, split
from localrag.errors import UsageError
from localrag.markup import EncodedPart, as_content
from localrag.messages import Message, ToolSpec, strip_reasoning
from localrag.prompt import offer
from localrag.prompt.layout import Choice, encode_prompt
from localrag.prompt.offer import Item, Offer
from localrag.tokens import ChatTemplate, TokenCounter
from localrag.tool_results import compact

FIXED = ("scaffold", "system", "question")
JOIN_TOKENS = 2
"""What joining a text to its neighbours can cost beyond its own tokens (measured: at most 2)."""
SUMMARY_TOKENS = 400
"""The longest summary of what was said long ago."""
MAX_TOOLS_CHARS = 200_000
"""Schemas beyond this are not even shown to the template."""

_PROBE_MESSAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wants:
    """An offer, counted. `history` is all that was said before; of it, `recent` is what the limit of messages lets in.

    Costs are upper bounds of what each thing takes in the prompt, by section and label or number; `fixed` and `rounds`, the
    messages of a round of tools, are what they take now.
    """

    offer: Offer
    split: Split
    counter: TokenCounter
    template: ChatTemplate
    fixed: Counter[str]
    items: dict[str, list[Item]]
    tool_costs: dict[str, int]
    tools: tuple[ToolSpec, ...]
    message_costs: dict[int, int]
    recent: tuple[Exchange, ...]
    _wanted: dict[str, int] = field(default_factory=dict)

    def content(self, number: int) -> str:
        """What is sent of the message of that number, if it is sent whole."""
        return _said(self.offer.messages[number - 1])

    def cost(self, exchange: Exchange) -> int:
        return sum(self.message_costs[number] for number, _ in exchange.messages)

    @property
    def num_history_tokens(self) -> int:
        return self.wanted("history")

    @property
    def num_round_tokens(self) -> int:
        """Tokens of the calls and results of tools that belong to what is asked now."""
        return sum(self.message_costs[number] for number, message in self.split.current if message.role != "user")

    @property
    def num_rigid_tokens(self) -> int:
        """Of those, what is left when every call and result is cut to nothing: the template's text around them."""
        rounds = [number for number, message in self.split.current if message.role != "user"]
        return sum(self.message_costs[number] - self.counter(as_content(self.content(number), self.counter.tokenizer)) for number in rounds)

    def frame(self, section: str) -> int:
        """Tokens of the wording that a section brings with it."""
        items = self.items.get(section)
        if not items:
            return 0
        label = items[0].label if section == "evidence" else ""
        wording = {
            "evidence": (offer.SOURCES_INTRO, offer.QUESTION_INTRO, self.offer.cite.format(label=label)),
            "attachments": (offer.QUESTION_INTRO,),
            "memories": ("\n\n" + offer.MEMORIES_INTRO,),
        }
        return sum(self.counter(text) for text in wording[section])

    def wanted(self, section: str) -> int:
        """The most that a section could use."""
        if section not in self._wanted:
            self._wanted[section] = self._sum(section)
        return self._wanted[section]

    def _sum(self, section: str) -> int:
        if section == "history":
            return sum(map(self.cost, self.split.history))
        if section == "tools":
            return self.num_round_tokens + sum(self.tool_costs.values())
        return self.frame(section) + sum(item.cost for item in self.items.get(section, ()))

    @property
    def sections(self) -> list[Section]:
        """What goes into the negotiation."""
        profile = self.offer.profile
        sections = [Section.fixed(name, self.fixed[name]) for name in FIXED if self.fixed[name]]
        if profile.gap:
            sections.append(Section(name="gap", basis=profile.gap, min=profile.gap, max=profile.gap, shrink=0.0))
        for name in ("tools", "memories", "history", "attachments", "evidence"):
            is_limited = name == "history" and len(self.recent) < len(self.split.history)
            wanted = sum(map(self.cost, self.recent)) if is_limited else self.wanted(name)
            if wanted:
                sections.append(profile.sections[name].section(name, wanted))
            if name == "tools" and self.num_rigid_tokens:
                sections[-1] = replace(sections[-1], min=self.num_rigid_tokens)
        answer = profile.sections["answer"]
        basis = min(answer.basis, self.offer.max_tokens) if isinstance(answer.basis, int) else answer.basis
        sections.append(replace(answer, basis=basis).section("answer", self.offer.max_tokens))
        return sections

    def share(self, window: int) -> Budget:
        """Negotiate a window; where history has to give way to its summary, with a section for that too."""
        budget = negotiate(window, self.sections)
        if self.offer.profile.sections["history"].cut != "summarize" or self._holds_history(budget):
            return budget
        tokens = min(SUMMARY_TOKENS, max(1, self.num_history_tokens // 2))
        return negotiate(window, [*self.sections, self.offer.profile.sections["summary"].section("summary", tokens)])

    def _holds_history(self, budget: Budget) -> bool:
        return budget.allocations.get("history", 0) >= self.num_history_tokens


def measure(given: Offer, *, counter: TokenCounter, template: ChatTemplate) -> Wants:
    """Count everything that is offered, with the wording and the markup that it brings with it.

    UsageError for an empty question and for two things of one name, TemplateError for a template that cannot render the conversation.
    """
    _check_names(given)
    parts = split(given.messages)
    tokenizer = counter.tokenizer
    bare = Split(parts.system, (), tuple(pair for pair in parts.current if pair[1].role == "user"))
    encoded = encode_prompt(bare, Choice(), tokenizer=tokenizer, template=template)
    tools, tool_costs = _tools(given.tools, bare, encoded, counter, template)
    rounds = [pair for pair in parts.current if pair[1].role != "user"]
    spoken = [pair for exchange in parts.history for pair in exchange.messages]
    markup = _markup_costs(parts, counter, template) if spoken or rounds else {}
    dearest = max(markup.values(), default=0)
    message_costs = {
        number: counter(as_content(_said(message), tokenizer)) + markup.get(message.role, dearest) + 1
        for number, message in (*spoken, *rounds)
    }
    most = given.profile.max_messages
    recent = parts.history if most is None else newest(parts.history, most)[0]
    return Wants(
        offer=given,
        split=parts,
        counter=counter,
        template=template,
        fixed=_used(encoded),
        items=_items(given, counter),
        tool_costs=tool_costs,
        tools=tools,
        message_costs=message_costs,
        recent=tuple(recent),
    )


def _check_names(given: Offer) -> None:
    """Ledgers name things by their labels, so these must tell them apart."""
    for kind, labels in (
        ("passages", [hit.label for hit in given.hits]),
        ("attachments", [each.label for each in given.attachments]),
        ("memories", [each.label for each in given.memories]),
        ("tools", [tool.name for tool in given.tools]),
    ):
        twice = [label for label, times in Counter(labels).items() if times > 1]
        if twice:
            raise UsageError(f"Two {kind} have the name {twice[0][:200]!r}.", hint="Give each of them once, under a name of its own.")


def _said(message: Message) -> str:
    return (strip_reasoning(message.content) if message.role == "assistant" else message.content).strip()


def _used(parts: Iterable[EncodedPart]) -> Counter[str]:
    """Tokens by section."""
    used: Counter[str] = Counter()
    for encoded in parts:
        used[encoded.part.section] += len(encoded.token_ids)
    return used


def _items(given: Offer, counter: TokenCounter) -> dict[str, list[Item]]:
    """Hits, files and memories as items, each in the order in which they are kept."""

    def item(section: str, label: str, score: float, body: str, dress: Callable[[str], str], **more: object) -> Item:
        cost = counter(as_content(dress(body), counter.tokenizer)) + JOIN_TOKENS
        return Item(section, label, score, body, dress, cost, **more)  # type: ignore[arg-type]  # tier and modified

    tier = given.profile.tier
    items = {
        "memories": [item("memories", m.label, m.importance, m.text, partial(offer.fact, m)) for m in given.memories],
        "attachments": [
            item("attachments", a.label, a.relevance, a.text, partial(offer.file, a), modified=a.modified) for a in given.attachments
        ],
        "evidence": [
            item("evidence", h.label, h.score, h.chunk.text, partial(offer.source, h), tier=tier(h.relevance)) for h in given.hits
        ],
    }
    for name in ("memories", "attachments"):
        items[name].sort(key=lambda each: -each.score)  # stable: equals stay as they were given
    return {name: found for name, found in items.items() if found}


def _tools(
    offered: Sequence[ToolSpec], bare: Split, without: Sequence[EncodedPart], counter: TokenCounter, template: ChatTemplate
) -> tuple[tuple[ToolSpec, ...], dict[str, int]]:
    """The tools that a template is shown, and what each costs. The wording around them is spread over them, the first one first."""
    if not offered:
        return (), {}
    costs = {tool.name: counter(compact(tool.to_dict())) + JOIN_TOKENS for tool in offered}
    shown, num_chars = [], 0
    for tool in offered[:128]:
        num_chars += len(compact(tool.to_dict()))
        if num_chars > MAX_TOOLS_CHARS:
            break
        shown.append(tool)
    if shown:
        encoded = encode_prompt(bare, Choice(tools=shown[:1]), tokenizer=counter.tokenizer, template=template)
        real = sum(_used(encoded).values()) - sum(_used(without).values())
        costs[shown[0].name] = max(costs[shown[0].name], real)  # the wording that introduces tools comes with the first
        if len(shown) > 1:
            encoded = encode_prompt(bare, Choice(tools=shown), tokenizer=counter.tokenizer, template=template)
            excess = sum(_used(encoded).values()) - sum(_used(without).values()) - sum(costs[tool.name] for tool in shown)
            each = max(0, -(-excess // len(shown)))
            costs |= {tool.name: costs[tool.name] + each for tool in shown}
    return tuple(shown), costs


def _markup_costs(parts: Split, counter: TokenCounter, template: ChatTemplate) -> dict[str, int]:
    """Tokens of the template's text that follows a message, by its role, found by rendering some of the conversation without contents."""
    spoken = [pair for exchange in parts.history for pair in exchange.messages][-_PROBE_MESSAGES:]
    while len(spoken) > 1 and spoken[0][1].role != "user":
        spoken.pop(0)
    probe = [Exchange(tuple(spoken))] if spoken else []
    empty = dict.fromkeys((number for number, _ in (*spoken, *parts.current)), "")
    roles = [message.role for _, message in spoken] + [message.role for _, message in parts.current if message.role != "user"]
    encoded = encode_prompt(
        Split("", (), parts.current), Choice(history=probe, texts=empty), tokenizer=counter.tokenizer, template=template
    )
    costs: dict[str, int] = {}
    behind = [part for part in encoded if part.part.section in ("history", "tools")]
    left = iter(roles)
    role = ""
    for part in behind:
        if part.part.is_markup:
            costs[role] = max(costs.get(role, 0), len(part.token_ids))
        else:
            role = next(left)
    return costs
