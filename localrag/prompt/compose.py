"""Compose a prompt within its budget: token ids, ledger, and the cache breakpoints at which another prompt may diverge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from localrag.budget import Budget, Entry, Ledger, Shortened, TimeLimit, settle
from localrag.budget.sections import ORDER, PROTECTED
from localrag.errors import BudgetExceededError
from localrag.prompt.layout import PARTIAL_SOURCES_INTRO, SOURCES_INTRO, Choice, as_sent, encode_prompt
from localrag.prompt.measure import JOIN_TOKENS, Demand, thinking_of, used_by
from localrag.prompt.packing import GIVING, SOURCES, Draft, Shortening, fill, give_way
from localrag.text.markup import EncodedPart
from localrag.text.sentences import excerpt
from localrag.text.thinking import Thinking
from localrag.types import Hit

if TYPE_CHECKING:
    from localrag.prompt.quotes import Quotable

MIN_APART_TOKENS = 256
"""Minimum distance of breakpoints, except for the last: smaller batches are slower (measured)."""
MIN_SHARED_TOKENS = 64
"""A shorter prefix is evaluated again just as fast."""


def breakpoints(parts: Sequence[EncodedPart]) -> tuple[int, ...]:
    """Return the cache breakpoints as token positions: before messages and passages (at a minimum distance), before the last
    question, and before the instructions after it.

    All but the last two depend only on the text before them, so a longer conversation, or another selection after the same
    first passages, has the same breakpoints up to where it diverges. Each is one token before the text that may differ, because
    that token can extend into it, as " What" does after "Question:".
    """
    points: list[int] = []
    position = last = 0
    ends = {"question": 0, "instructions": 0}
    for index, part in enumerate(parts):
        owner = part.part
        is_start = not owner.is_markup and (index == 0 or parts[index - 1].part.is_markup or owner.item is not None)
        if owner.section in ends:
            ends[owner.section] = position
        elif is_start and position - last >= MIN_APART_TOKENS:
            points.append(position)
            last = position
        position += len(part.token_ids)
    last_end = max(ends.values())
    if last_end:
        shared = {end for end in ends.values() if end > MIN_SHARED_TOKENS}
        points = sorted(shared.union(point for point in points if point < last_end))
    return tuple(point - 1 for point in points)


def account(
    demand: Demand,
    draft: Draft,
    used: Counter[str],
    rooms: Mapping[str, int],
    item_tokens: Mapping[tuple[str, str], int],
    *,
    answer: int,
    gap: int,
    thinking: int,
    slack: int,
) -> tuple[Entry, ...]:
    """Return the entries in prompt order.

    A section sent in full is allotted what it used. In the others, up to `slack` tokens can be allotted but unused.
    `item_tokens` are by section and label.
    """
    entries = []
    for name in ORDER:
        if name == "answer":
            entries.append(Entry(name, answer if demand.inputs.max_tokens is None else demand.inputs.max_tokens, answer, 0))
        elif name == "thinking" and thinking:
            entries.append(Entry(name, demand.inputs.think_tokens, thinking, 0))
        elif name == "gap" and gap:
            entries.append(Entry(name, gap, gap, 0))
        elif name == "summary" and used[name]:
            entries.append(Entry(name, used[name], used[name], used[name], covered=draft.covered.names))
        elif name in PROTECTED and used[name]:
            entries.append(Entry(name, used[name], used[name], used[name]))
        elif name in rooms and name != "summary" and (demand.wanted(name) or _merged(name, demand)):
            entry = _entry(name, demand, draft, used[name], rooms[name], item_tokens, slack)
            slack -= entry.allotted - entry.used
            entries.append(entry)
    return tuple(entries)


def _entry(name: str, demand: Demand, draft: Draft, used: int, room: int, item_tokens: Mapping[tuple[str, str], int], slack: int) -> Entry:
    omitted = _omitted(name, demand, draft)
    shortened = _shortened(name, demand, draft, item_tokens)
    is_whole = not omitted and all(each.is_chosen for each in shortened)
    num_wanted = used if is_whole else max(used, demand.wanted(name))
    allotted = used if is_whole else used + min(max(0, room - used), slack)
    parts = _tiers(demand, draft, item_tokens, allotted - used) if name == "evidence" else ()
    reasons = _merged(name, demand)
    return Entry(name, num_wanted, allotted, used, (*omitted, *reasons), shortened, parts=parts, omitted_reasons=reasons)


def _merged(name: str, demand: Demand) -> dict[str, str]:
    """Return the labels of a section's passages that needed no room, each with the reason."""
    inputs = demand.inputs
    if name not in SOURCES:
        return {}
    own = [hit for hit in inputs.hits if (hit.label in inputs.cited) == (name == "cited")]
    copies = {chunk.label: f"identical to {hit.label}" for hit in own for chunk in hit.copies}
    return copies | dict(inputs.left_out) if name == "evidence" else copies


def _omitted(name: str, demand: Demand, draft: Draft) -> tuple[str, ...]:
    if name == "tools":
        tool_names = {tool.name for tool in draft.tools}
        return tuple(tool.name for tool in demand.inputs.tools if tool.name not in tool_names)
    if name == "history":
        return tuple(each for exchange in draft.dropped for each in exchange.names)
    return tuple(item.label for item in draft.packed[name].omitted)


def _shortened(name: str, demand: Demand, draft: Draft, item_tokens: Mapping[tuple[str, str], int]) -> tuple[Shortened, ...]:
    if name in draft.packed:
        partial_items = [each for each in draft.packed[name].kept if each.level != "full"]
        return tuple(
            Shortened(each.label, each.level, item_tokens[name, each.label], each.item.whole_cost or each.item.cost, each.sentences)
            for each in partial_items
        )
    current = {number for number, message in demand.split.current if message.role != "user"}
    spoken = {number for exchange in draft.kept for number, _ in exchange.messages}
    shortened = []
    for number, text in sorted(draft.texts.items()):
        if number in (current if name == "tools" else spoken):
            tokens, whole = item_tokens[name, f"message {number}"], demand.message_costs[number]
            if len(text) < len(demand.content(number)):
                shortened.append(Shortened(f"message {number}", "truncated", tokens, whole))
    return tuple(shortened)


def _tiers(demand: Demand, draft: Draft, item_tokens: Mapping[tuple[str, str], int], slack: int) -> tuple[Entry, ...]:
    """Return evidence entries by tier; hits below all thresholds come last."""
    packed = draft.packed["evidence"]
    entries = []
    for tier in (*(tier.name for tier in demand.inputs.profile.tiers), None):
        items = [item for item in demand.items.get("evidence", ()) if item.tier == tier]
        if not items:
            continue
        omitted = tuple(item.label for item in packed.omitted if item.tier == tier)
        used = sum(item_tokens["evidence", each.label] for each in packed.kept if each.item.tier == tier)
        unused = min(slack, max(0, packed.tier_rooms.get(tier, 0) - used)) if omitted else 0
        slack -= unused
        num_wanted = max(used, sum(item.cost for item in items)) if omitted else used
        entries.append(Entry(tier or "other", num_wanted, used + unused, used, omitted))
    return tuple(entries)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The token ids that the model gets, the hits in them, and the ledger.

    `levels` maps the label of each hit or file in the prompt to its form ("full", "truncated", …), `omitted_costs` the label of
    each omitted one to the tokens it would have taken, and `tiers` the label of each hit to its tier.
    """

    token_ids: tuple[int, ...]
    parts: tuple[EncodedPart, ...]
    hits: tuple[Hit, ...]
    ledger: Ledger
    budget: Budget
    thinking: Thinking | None = None
    """How the model thinks before it answers, if it does."""
    earlier: tuple[Hit, ...] = ()
    """Hits in earlier messages that are part of the prompt."""
    levels: dict[str, str] = field(default_factory=dict)
    omitted_costs: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, str | None] = field(default_factory=dict)
    quotable: Quotable | None = None
    """The sentences that the answer may quote; None if it may not quote."""

    @property
    def max_tokens(self) -> int:
        """Tokens left for the answer."""
        return self.ledger.entry("answer").allotted

    @property
    def num_cells(self) -> int:
        """Cells that the prompt may need: its tokens, thoughts, the longest answer, and the gap."""
        thoughts = self.thinking.max_tokens if self.thinking is not None else 0
        return len(self.token_ids) + thoughts + self.max_tokens + self.budget.allocations.get("gap", 0)

    @property
    def settled(self) -> Budget:
        """The negotiation restated to match the ledger: each section has the same number of tokens (see budget.settle)."""
        return settle(self.budget, self.ledger.window, {entry.name: entry.allotted for entry in self.ledger.entries})

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """Positions at which another prompt with the same beginning can resume (see `breakpoints`)."""
        return breakpoints(self.parts)

    @property
    def text_end(self) -> int:
        """Position of the template's markup after the last text. The next turn of a conversation begins alike up to there."""
        last = max((index for index, part in enumerate(self.parts) if not part.part.is_markup), default=-1)
        return sum(len(part.token_ids) for part in self.parts[: last + 1])

    @property
    def item_tokens(self) -> dict[str, int]:
        """Tokens of each hit, file, memory, message or proposal by its label, including its tag."""
        counts: Counter[str] = Counter()
        for (_, label), tokens in _tokens_by_item(self.parts).items():
            counts[label] += tokens
        return dict(counts)


def compose(
    demand: Demand,
    budget: Budget,
    shortening: Shortening,
    *,
    window: int | None = None,
    time: TimeLimit | None = None,
    answer_limit: Callable[[int], int] | None = None,
) -> Prompt:
    """Compose the prompt within a budget.

    Costs of single items only guide the selection. The final count is of the actual ids, so an item that does not fit after all
    is taken out again. Tokens that packing leaves unused are offered to other sections and then go to the answer.

    `window` is the slot's, if a time limit made the budget smaller. `answer_limit` returns the tokens that the time limit
    leaves for an answer after a prompt of the given length. Raises BudgetExceededError if the parts that cannot be cut do not
    fit.
    """
    gap, floor, think = budget.allocations.get("gap", 0), _floor(demand, budget), demand.num_thinking_tokens
    draft, rooms = fill(demand, budget, shortening)
    while True:
        parts = _encode(demand, draft)
        used = used_by(parts)
        section_tokens = used | demand.reserved | Counter({"gap": gap, "thinking": think, "answer": floor})
        over = [name for name in GIVING if used[name] > rooms[name]]
        if not over and section_tokens.total() <= budget.window:
            break
        if not give_way(draft, over or GIVING, demand):
            raise BudgetExceededError(budget.window, {name: section_tokens[name] for name in ORDER if section_tokens[name]})
    total = used.total()
    whole = budget.window if window is None else window
    room = whole - total - gap
    think = min(budget.allocations.get("thinking", 0), room - floor)
    answer = room - think if demand.inputs.max_tokens is None else min(demand.inputs.max_tokens, room - think)
    if demand.thinks:
        most = demand.inputs.profile.allowance("thinking", budget.window, demand.set_aside.total())
        think = max(think, min(demand.inputs.think_tokens, most, room - answer))
    if answer_limit is not None:
        answer = max(floor, min(answer, answer_limit(total)))
    tokens = _tokens_by_item(parts)
    ledger = Ledger(
        whole, account(demand, draft, used, rooms, tokens, answer=answer, gap=gap, thinking=think, slack=room - think - answer), time
    )
    ids = tuple(chain.from_iterable(part.token_ids for part in parts))
    packs = [draft.packed[name] for name in ("attachments", *SOURCES)]
    return Prompt(
        token_ids=ids,
        parts=tuple(parts),
        hits=tuple(_hits(demand, draft)),
        ledger=ledger,
        budget=budget,
        thinking=thinking_of(parts, think, demand.end_ids, template=demand.template, tokenizer=demand.counter.tokenizer),
        earlier=tuple(_earlier(demand, draft)),
        levels={each.label: each.level for packed in packs for each in packed.kept},
        omitted_costs={item.label: item.cost for packed in packs for item in packed.omitted},
        tiers={item.label: item.tier for name in SOURCES for item in demand.items.get(name, ())},
        quotable=_quotable(demand, draft),
    )


def _quotable(demand: Demand, draft: Draft) -> Quotable | None:
    """Return the numbered sentences of the prompt, those of earlier messages included; None if there are none."""
    if not demand.inputs.quotes:
        return None
    from localrag.prompt.quotes import Quotable, numbered_text  # noqa: PLC0415  # weight: few answers quote

    bodies = {each.label: each.body for name in SOURCES for each in draft.packed[name].kept}
    sent = [as_sent(message) for message in demand.inputs.messages]
    earlier = [(hit, excerpt(hit.chunk.text, hit.spans) if hit.spans else hit.chunk.text) for hit in _earlier(demand, draft)]
    numbered = [(hit, body) for hit, body in earlier if any(numbered_text(hit, body).strip() in text for text in sent)]
    return Quotable.of([*numbered, *((hit, bodies[hit.label]) for hit in _hits(demand, draft))])


def _floor(demand: Demand, budget: Budget) -> int:
    """Return the fewest tokens for an answer."""
    least = demand.inputs.profile.sections["answer"].min
    floor = least if isinstance(least, int) else budget.allocations["answer"]
    return floor if demand.inputs.max_tokens is None else min(demand.inputs.max_tokens, floor)


def _encode(demand: Demand, draft: Draft) -> list[EncodedPart]:
    sources = {each.label: each for name in SOURCES for each in draft.packed[name].kept}
    best = next((hit.label for hit in demand.inputs.hits if hit.label in sources), next(iter(demand.inputs.again), ""))
    choice = Choice(
        tools=draft.tools,
        memories=draft.packed["memories"].kept,
        summary=draft.covered.text,
        history=draft.kept,
        texts=draft.texts,
        attachments=draft.packed["attachments"].kept,
        evidence=[sources[hit.label] for hit in _hits(demand, draft)],
        sources_intro=_sources_intro(demand, draft),
        again=demand.inputs.again,
        cite=demand.cite(best),
        proposals=draft.packed["proposals"].kept,
        plan=draft.packed["plan"].kept,
        instructions=demand.inputs.instructions,
        thinks=demand.thinks,
    )
    return encode_prompt(demand.split, choice, tokenizer=demand.counter.tokenizer, template=demand.template)


def _sources_intro(demand: Demand, draft: Draft) -> str:
    """Return the text before the sources. If some were left out, it gives the numbers, with each source counted separately."""
    costs = [each.cost - JOIN_TOKENS for name in SOURCES for each in draft.packed[name].kept]
    num_hits = len(demand.inputs.hits)
    if not demand.inputs.tells_omitted or len(costs) == num_hits:
        return SOURCES_INTRO
    return PARTIAL_SOURCES_INTRO.format(shown=len(costs), found=num_hits, tokens=f"{sum(costs):,}", room=f"{draft.sources_room:,}")


def _tokens_by_item(parts: Sequence[EncodedPart]) -> Counter[tuple[str, str]]:
    """Count tokens by section and label: a proposal can have the same name as a file."""
    counts: Counter[tuple[str, str]] = Counter()
    for part in parts:
        if part.part.item is not None:
            counts[part.part.section, part.part.item] += len(part.token_ids)
    return counts


def _hits(demand: Demand, draft: Draft) -> list[Hit]:
    """Return the passages of both sections in reading order."""
    labels = {each.label for name in SOURCES for each in draft.packed[name].kept}
    return _arranged([hit for hit in demand.inputs.hits if hit.label in labels])


def _earlier(demand: Demand, draft: Draft) -> Iterator[Hit]:
    """Yield the hits of earlier messages that are sent whole."""
    for exchange in (*demand.split.pinned, *draft.kept):
        for number, _ in exchange.messages:
            if number not in draft.texts:
                yield from demand.inputs.earlier.get(number, ())


def _arranged(hits: Sequence[Hit]) -> list[Hit]:
    """Put ranked hits in reading order: documents by their best hit, chunks of a document by position."""
    best: dict[tuple[str, str, int], int] = {}
    for rank, hit in enumerate(hits):
        best.setdefault(_document(hit), rank)
    return sorted(hits, key=lambda hit: (best[_document(hit)], hit.chunk.ordinal))


def _document(hit: Hit) -> tuple[str, str, int]:
    return hit.chunk.scope, hit.chunk.kb, hit.chunk.document_id
