"""Where another prompt is likely to part from this one: there its evaluation is cut, so that the other can go on from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from localrag.budget import Budget, Entry, Ledger, Shortened, TimeLimit, settle
from localrag.budget.sections import ORDER, PROTECTED
from localrag.errors import BudgetExceededError
from localrag.prompt import inputs
from localrag.prompt.layout import Choice, encode_prompt
from localrag.prompt.measure import JOIN_TOKENS, Demand, thinking_of, used_by
from localrag.prompt.packing import GIVING, SOURCES, Draft, Shortening, fill, give_way
from localrag.text.markup import EncodedPart
from localrag.text.thinking import Thinking
from localrag.types import Hit

MIN_APART_TOKENS = 256
"""Smaller batches than this are slower (measured), so breakpoints are no nearer to each other, but for the last."""
MIN_SHARED_TOKENS = 64
"""A shorter beginning is evaluated again as fast."""


def breakpoints(parts: Sequence[EncodedPart]) -> tuple[int, ...]:
    """Positions, in tokens: before messages and passages, far enough apart, before the question that is asked last, and before the
    instructions behind it.

    Each but these two depends only on what stands before it, so a conversation that goes on, or another choice of passages behind the
    same first ones, has the same breakpoints as far as it is the same. They lie a token before the text that may differ: that token can
    reach over into it, as " What" does behind "Question:".
    """
    found: list[int] = []
    position = last = 0
    ends = {"question": 0, "instructions": 0}
    for index, part in enumerate(parts):
        owner = part.part
        is_start = not owner.is_markup and (index == 0 or parts[index - 1].part.is_markup or owner.item is not None)
        if owner.section in ends:
            ends[owner.section] = position
        elif is_start and position - last >= MIN_APART_TOKENS:
            found.append(position)
            last = position
        position += len(part.token_ids)
    asked = max(ends.values())
    if asked:
        shared = {end for end in ends.values() if end > MIN_SHARED_TOKENS}
        found = sorted(shared.union(point for point in found if point < asked))
    return tuple(point - 1 for point in found)


def account(
    wants: Demand,
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
    """The entries in the order of the prompt. A section that got all of itself is allotted what it used; of the others' rooms,
    `slack` tokens can still be shown as allotted and not used. `item_tokens` are by section and label.
    """
    entries = []
    for name in ORDER:
        if name == "answer":
            entries.append(Entry(name, answer if wants.offer.max_tokens is None else wants.offer.max_tokens, answer, 0))
        elif name == "thinking" and thinking:
            entries.append(Entry(name, wants.offer.think_tokens, thinking, 0))
        elif name == "gap" and gap:
            entries.append(Entry(name, gap, gap, 0))
        elif name == "summary" and used[name]:
            entries.append(Entry(name, used[name], used[name], used[name], covered=draft.covered.names))
        elif name in PROTECTED and used[name]:
            entries.append(Entry(name, used[name], used[name], used[name]))
        elif name in rooms and name != "summary" and (wants.wanted(name) or _merged(name, wants)):
            entry = _entry(name, wants, draft, used[name], rooms[name], item_tokens, slack)
            slack -= entry.allotted - entry.used
            entries.append(entry)
    return tuple(entries)


def _entry(name: str, wants: Demand, draft: Draft, used: int, room: int, item_tokens: Mapping[tuple[str, str], int], slack: int) -> Entry:
    omitted = _omitted(name, wants, draft)
    shortened = _shortened(name, wants, draft, item_tokens)
    is_whole = not omitted and not shortened
    wanted = used if is_whole else max(used, wants.wanted(name))
    allotted = used if is_whole else used + min(max(0, room - used), slack)
    parts = _tiers(wants, draft, item_tokens, allotted - used) if name == "evidence" else ()
    reasons = _merged(name, wants)
    return Entry(name, wanted, allotted, used, (*omitted, *reasons), shortened, parts=parts, omitted_reasons=reasons)


def _merged(name: str, wants: Demand) -> dict[str, str]:
    """Passages of a section for which no room was wanted, each with the reason."""
    offer = wants.offer
    if name not in SOURCES:
        return {}
    own = [hit for hit in offer.hits if (hit.label in offer.cited) == (name == "cited")]
    copies = {chunk.label: f"identical to {hit.label}" for hit in own for chunk in hit.copies}
    return copies | dict(offer.left_out) if name == "evidence" else copies


def _omitted(name: str, wants: Demand, draft: Draft) -> tuple[str, ...]:
    if name == "tools":
        kept = {tool.name for tool in draft.tools}
        return tuple(tool.name for tool in wants.offer.tools if tool.name not in kept)
    if name == "history":
        return tuple(each for exchange in draft.dropped for each in exchange.names)
    return tuple(item.label for item in draft.packed[name].omitted)


def _shortened(name: str, wants: Demand, draft: Draft, item_tokens: Mapping[tuple[str, str], int]) -> tuple[Shortened, ...]:
    if name in draft.packed:
        shown = [each for each in draft.packed[name].kept if each.level != "full"]
        return tuple(Shortened(each.label, each.level, item_tokens[name, each.label], each.item.cost) for each in shown)
    current = {number for number, message in wants.split.current if message.role != "user"}
    spoken = {number for exchange in draft.kept for number, _ in exchange.messages}
    found = []
    for number, text in sorted(draft.texts.items()):
        if number in (current if name == "tools" else spoken):
            tokens, whole = item_tokens[name, f"message {number}"], wants.message_costs[number]
            if len(text) < len(wants.content(number)):
                found.append(Shortened(f"message {number}", "truncated", tokens, whole))
    return tuple(found)


def _tiers(wants: Demand, draft: Draft, item_tokens: Mapping[tuple[str, str], int], slack: int) -> tuple[Entry, ...]:
    """Evidence tier by tier; hits below all thresholds come last."""
    packed = draft.packed["evidence"]
    entries = []
    for tier in (*(tier.name for tier in wants.offer.profile.tiers), None):
        items = [item for item in wants.items.get("evidence", ()) if item.tier == tier]
        if not items:
            continue
        omitted = tuple(item.label for item in packed.omitted if item.tier == tier)
        used = sum(item_tokens["evidence", shown.label] for shown in packed.kept if shown.item.tier == tier)
        unused = min(slack, max(0, packed.tier_rooms.get(tier, 0) - used)) if omitted else 0
        slack -= unused
        wanted = max(used, sum(item.cost for item in items)) if omitted else used
        entries.append(Entry(tier or "other", wanted, used + unused, used, omitted))
    return tuple(entries)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids as the model gets them, the hits that are in them, and the ledger that accounts for every one.

    `levels` says of each hit or file in it, by its label, in which form it is there ("full", "truncated", …); `omitted_costs` of
    each that is not, how many tokens it would have taken; `tiers` of each hit, to which tier it belongs.
    """

    token_ids: tuple[int, ...]
    parts: tuple[EncodedPart, ...]
    hits: tuple[Hit, ...]
    ledger: Ledger
    budget: Budget
    thinking: Thinking | None = None
    """How the model thinks before it answers, if it does."""
    earlier: tuple[Hit, ...] = ()
    """Hits that stand in earlier messages that are in it."""
    levels: dict[str, str] = field(default_factory=dict)
    omitted_costs: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, str | None] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        """What is left for the answer, in tokens."""
        return self.ledger.entry("answer").allotted

    @property
    def num_cells(self) -> int:
        """Cells that it can come to need: itself, the longest answer, and what an engine's counts may be wrong by."""
        thoughts = self.thinking.max_tokens if self.thinking is not None else 0
        return len(self.token_ids) + thoughts + self.max_tokens + self.budget.allocations.get("gap", 0)

    @property
    def settled(self) -> Budget:
        """The negotiation as the ledger accounts for it: for each section the same number of tokens (see budget.settle)."""
        return settle(self.budget, self.ledger.window, {entry.name: entry.allotted for entry in self.ledger.entries})

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """Positions from which another prompt that begins like this one can go on (see breakpoints.py)."""
        return breakpoints(self.parts)

    @property
    def item_tokens(self) -> dict[str, int]:
        """Tokens that each hit, file, memory, message or proposal takes, its tag included, by its label."""
        found: Counter[str] = Counter()
        for (_, label), tokens in _tokens_by_item(self.parts).items():
            found[label] += tokens
        return dict(found)


def compose(
    wants: Demand,
    budget: Budget,
    shortening: Shortening,
    *,
    window: int | None = None,
    time: TimeLimit | None = None,
    answer_limit: Callable[[int], int] | None = None,
) -> Prompt:
    """The prompt that a budget allows.

    The costs of single things only choose; what is counted in the end are the very ids that are sent, so something that does not
    fit after all is taken out again. What packing left unused is offered to the other sections, and then goes to the answer.
    `window` is the slot's, where a limit of time made the budget smaller; `answer_limit` is what such a limit leaves to an answer
    after a prompt of so many tokens. BudgetExceededError if what cannot be cut does not fit.
    """
    gap, floor, think = budget.allocations.get("gap", 0), _floor(wants, budget), wants.num_thinking_tokens
    draft, rooms = fill(wants, budget, shortening)
    while True:
        parts = _encode(wants, draft)
        used = used_by(parts)
        held = used | wants.reserved | Counter({"gap": gap, "thinking": think, "answer": floor})
        over = [name for name in GIVING if used[name] > rooms[name]]
        if not over and held.total() <= budget.window:
            break
        if not give_way(draft, over or GIVING, wants):
            raise BudgetExceededError(budget.window, {name: held[name] for name in ORDER if held[name]})
    total = used.total()
    whole = budget.window if window is None else window
    left = whole - total - gap
    think = min(budget.allocations.get("thinking", 0), left - floor)
    answer = left - think if wants.offer.max_tokens is None else min(wants.offer.max_tokens, left - think)
    if wants.thinks:
        most = wants.offer.profile.allowance("thinking", budget.window, wants.set_aside.total())
        think = max(think, min(wants.offer.think_tokens, most, left - answer))
    if answer_limit is not None:
        answer = max(floor, min(answer, answer_limit(total)))
    tokens = _tokens_by_item(parts)
    ledger = Ledger(
        whole, account(wants, draft, used, rooms, tokens, answer=answer, gap=gap, thinking=think, slack=left - think - answer), time
    )
    ids = tuple(chain.from_iterable(part.token_ids for part in parts))
    packs = [draft.packed[name] for name in ("attachments", *SOURCES)]
    return Prompt(
        token_ids=ids,
        parts=tuple(parts),
        hits=tuple(_hits(wants, draft)),
        ledger=ledger,
        budget=budget,
        thinking=thinking_of(parts, think, wants.end_ids, template=wants.template, tokenizer=wants.counter.tokenizer),
        earlier=tuple(_earlier(wants, draft)),
        levels={shown.label: shown.level for packed in packs for shown in packed.kept},
        omitted_costs={item.label: item.cost for packed in packs for item in packed.omitted},
        tiers={item.label: item.tier for name in SOURCES for item in wants.items.get(name, ())},
    )


def _floor(wants: Demand, budget: Budget) -> int:
    """The fewest tokens for an answer."""
    least = wants.offer.profile.sections["answer"].min
    floor = least if isinstance(least, int) else budget.allocations["answer"]
    return floor if wants.offer.max_tokens is None else min(wants.offer.max_tokens, floor)


def _encode(wants: Demand, draft: Draft) -> list[EncodedPart]:
    shown = {each.label: each for name in SOURCES for each in draft.packed[name].kept}
    best = next((hit.label for hit in wants.offer.hits if hit.label in shown), next(iter(wants.offer.again), ""))
    choice = Choice(
        tools=draft.tools,
        memories=draft.packed["memories"].kept,
        summary=draft.covered.text,
        history=draft.kept,
        texts=draft.texts,
        attachments=draft.packed["attachments"].kept,
        evidence=[shown[hit.label] for hit in _hits(wants, draft)],
        sources_intro=_sources_intro(wants, draft),
        again=wants.offer.again,
        cite=wants.cite(best),
        proposals=draft.packed["proposals"].kept,
        plan=draft.packed["plan"].kept,
        instructions=wants.offer.instructions,
        thinks=wants.thinks,
    )
    return encode_prompt(wants.split, choice, tokenizer=wants.counter.tokenizer, template=wants.template)


def _sources_intro(wants: Demand, draft: Draft) -> str:
    """What stands before the sources; where some were left out, the numbers, each source counted by itself."""
    costs = [shown.cost - JOIN_TOKENS for name in SOURCES for shown in draft.packed[name].kept]
    found = len(wants.offer.hits)
    if not wants.offer.tells_omitted or len(costs) == found:
        return inputs.SOURCES_INTRO
    return inputs.PARTIAL_SOURCES_INTRO.format(shown=len(costs), found=found, tokens=f"{sum(costs):,}", room=f"{draft.sources_room:,}")


def _tokens_by_item(parts: Sequence[EncodedPart]) -> Counter[tuple[str, str]]:
    """Tokens by section and label: a proposal can have the name of a file."""
    counts: Counter[tuple[str, str]] = Counter()
    for part in parts:
        if part.part.item is not None:
            counts[part.part.section, part.part.item] += len(part.token_ids)
    return counts


def _hits(wants: Demand, draft: Draft) -> list[Hit]:
    """The passages of both sections, as they are read."""
    kept = {shown.label for name in SOURCES for shown in draft.packed[name].kept}
    return _arranged([hit for hit in wants.offer.hits if hit.label in kept])


def _earlier(wants: Demand, draft: Draft) -> Iterator[Hit]:
    """The hits of earlier messages that are sent whole."""
    for exchange in (*wants.split.pinned, *draft.kept):
        for number, _ in exchange.messages:
            if number not in draft.texts:
                yield from wants.offer.earlier.get(number, ())


def _arranged(hits: Sequence[Hit]) -> list[Hit]:
    """Ranked hits in reading order: documents by their best hit, chunks of one document as they stand in it."""
    best: dict[tuple[str, str, int], int] = {}
    for rank, hit in enumerate(hits):
        best.setdefault(_document(hit), rank)
    return sorted(hits, key=lambda hit: (best[_document(hit)], hit.chunk.ordinal))


def _document(hit: Hit) -> tuple[str, str, int]:
    return hit.chunk.scope, hit.chunk.kb, hit.chunk.document_id
