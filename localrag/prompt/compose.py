"""Pack what was given room into a prompt, count the very ids that are sent, and account for all that was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from localrag.budget import Budget, Ledger, TimeLimit
from localrag.conversation import Covered, fit
from localrag.errors import BudgetExceededError
from localrag.markup import EncodedPart, as_content
from localrag.passages import Hit
from localrag.prompt import offer
from localrag.prompt.accounts import ORDER, Draft, account
from localrag.prompt.borders import borders
from localrag.prompt.layout import Choice, encode_prompt
from localrag.prompt.measure import Wants
from localrag.prompt.pack import MIN_TRUNCATED_TOKENS, Packed, Shortening, pack, truncated_texts, without_last

_ITEMS = ("evidence", "attachments", "memories")
"""Sections of items, in the order in which they are offered what others left unused."""
_GIVING = (*_ITEMS, "history", "summary", "tools")
"""Sections from which something can still be taken, first to last."""


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
    levels: dict[str, str] = field(default_factory=dict)
    omitted_costs: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, str | None] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        """What is left for the answer, in tokens."""
        return self.ledger.entry("answer").allotted

    @property
    def borders(self) -> tuple[int, ...]:
        """Positions from which another prompt that begins like this one can go on (see borders.py)."""
        return borders(self.parts)

    @property
    def item_tokens(self) -> dict[str, int]:
        """Tokens that each hit, file, memory or message takes, its tag included, by its label."""
        return _item_tokens(self.parts)


def compose(
    wants: Wants,
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
    gap, floor = budget.allocations.get("gap", 0), min(wants.offer.max_tokens, _answer_floor(wants, budget))
    draft, rooms = _draft(wants, budget, shortening)
    while True:
        parts = _encode(wants, draft)
        used = _used(parts)
        total = sum(used.values())
        over = [name for name in _GIVING if used[name] > rooms[name]]
        if not over and total + gap + floor <= budget.window:
            break
        if not _give_way(draft, over or _GIVING, wants):
            raise BudgetExceededError(budget.window, {**{name: used[name] for name in ORDER if used[name]}, "gap": gap, "answer": floor})
    whole = budget.window if window is None else window
    answer = min(wants.offer.max_tokens, whole - total - gap)
    if answer_limit is not None:
        answer = max(floor, min(answer, answer_limit(total)))
    tokens = _item_tokens(parts)
    ledger = Ledger(whole, account(wants, draft, used, rooms, tokens, answer=answer, gap=gap, slack=whole - total - gap - answer), time)
    ids = tuple(chain.from_iterable(part.token_ids for part in parts))
    kept = {shown.label for shown in draft.packed["evidence"].kept}
    hits = tuple(_arranged([hit for hit in wants.offer.hits if hit.label in kept]))
    packs = [draft.packed[name] for name in ("attachments", "evidence")]
    return Prompt(
        token_ids=ids,
        parts=tuple(parts),
        hits=hits,
        ledger=ledger,
        budget=budget,
        levels={shown.label: shown.level for packed in packs for shown in packed.kept},
        omitted_costs={item.label: item.cost for packed in packs for item in packed.omitted},
        tiers={item.label: item.tier for item in wants.items.get("evidence", ())},
    )


def _answer_floor(wants: Wants, budget: Budget) -> int:
    least = wants.offer.profile.sections["answer"].min
    return least if isinstance(least, int) else budget.allocations["answer"]


def _draft(wants: Wants, budget: Budget, shortening: Shortening) -> tuple[Draft, dict[str, int]]:
    """Everything packed into its room, and the rooms, grown by what other sections left unused."""
    rooms = {name: budget.allocations.get(name, 0) for name in ("tools", "memories", "summary", "history", "attachments", "evidence")}
    draft = Draft([], {name: Packed((), ()) for name in _ITEMS})
    costs: dict[str, int] = {}

    def settle(name: str) -> None:
        costs[name] = _settle(name, rooms[name], wants, draft, shortening)

    for name in ("tools", "history", *_ITEMS):
        settle(name)
    spent = sum(wants.fixed.values()) + budget.allocations.get("gap", 0) + budget.allocations["answer"] + rooms["summary"]
    pool = budget.window - spent - sum(costs.values())
    for name in (*_ITEMS, "history", "tools"):
        most = _most(name, budget)
        if pool > 0 and costs[name] < wants.wanted(name) and min(most, costs[name] + pool) > rooms[name]:
            pool += costs[name]
            rooms[name] = min(most, pool)
            settle(name)
            pool -= costs[name]
    if draft.dropped and rooms["summary"]:
        frame = wants.counter("\n\n" + offer.SUMMARY_INTRO) + 2
        draft.covered = shortening.to_summary(draft.dropped, rooms["summary"] - frame)
    return draft, rooms


def _most(name: str, budget: Budget) -> int:
    """The most tokens that a section may have in this window."""
    return next((item.max for item in budget.items if item.name == name), 0)


def _settle(name: str, room: int, wants: Wants, draft: Draft, shortening: Shortening) -> int:
    """Pack one section anew into its room; what it then takes."""
    count = _sent(wants)
    if name == "tools":
        return _settle_tools(room, wants, draft, count)
    if name == "history":
        return _settle_history(room, wants, draft, count)
    items = wants.items.get(name)
    if not items:
        return 0
    profile = wants.offer.profile
    frame = wants.frame(name)
    tiers = profile.tiers if name == "evidence" else ()
    packed = pack(items, room - frame, profile.sections[name].cut, count=count, shortening=shortening, tiers=tiers)
    draft.packed[name] = packed
    return packed.cost + frame if packed.kept else 0


def _settle_tools(room: int, wants: Wants, draft: Draft, count: Callable[[str], int]) -> int:
    """Results of calls first, cut where they must be, for a call is never separated from its result; then schemas, in their order."""
    rounds = {number: message for number, message in wants.split.current if message.role != "user"}
    spent = wants.num_round_tokens
    if spent > room:
        texts = {number: message.content.strip() for number, message in rounds.items()}
        markup = spent - sum(count(text) for text in texts.values())
        draft.texts |= truncated_texts(texts, room - markup, count)
        spent = markup + sum(count(draft.texts[number]) for number in texts)
    else:
        draft.texts = {number: text for number, text in draft.texts.items() if number not in rounds}
    draft.tools = []
    for tool in wants.tools:
        cost = wants.tool_costs[tool.name]
        if spent + cost <= room:
            draft.tools.append(tool)
            spent += cost
    return spent


def _settle_history(room: int, wants: Wants, draft: Draft, count: Callable[[str], int]) -> int:
    """The newest exchanges; with the strategy "truncate", the beginning of the one that does not fit whole."""
    kept, dropped = fit(wants.recent, room, wants.cost)
    older = wants.split.history[: len(wants.split.history) - len(wants.recent)]
    spoken = {number for exchange in wants.split.history for number, _ in exchange.messages}
    draft.texts = {number: text for number, text in draft.texts.items() if number not in spoken}
    spent = sum(map(wants.cost, kept))
    if dropped and wants.offer.profile.sections["history"].cut == "truncate":
        last = dropped[-1]
        texts = {number: message.content.strip() for number, message in last.messages}
        markup = wants.cost(last) - sum(count(text) for text in texts.values())
        left = room - spent - markup
        if left >= MIN_TRUNCATED_TOKENS * len(texts):
            draft.texts |= truncated_texts(texts, left, count)
            kept, dropped = (last, *kept), dropped[:-1]
            spent += markup + sum(count(draft.texts[number]) for number in texts)
    draft.kept, draft.dropped = tuple(kept), (*older, *dropped)
    return spent


def _sent(wants: Wants) -> Callable[[str], int]:
    """Tokens of a content as it is sent."""
    counter = wants.counter
    return lambda text: counter(as_content(text, counter.tokenizer))


def _encode(wants: Wants, draft: Draft) -> list[EncodedPart]:
    evidence = draft.packed["evidence"].kept
    ranked = {hit.label: hit for hit in wants.offer.hits}
    order = {hit.label: place for place, hit in enumerate(_arranged([ranked[shown.label] for shown in evidence]))}
    choice = Choice(
        tools=draft.tools,
        memories=draft.packed["memories"].kept,
        summary=draft.covered.text,
        history=draft.kept,
        texts=draft.texts,
        attachments=draft.packed["attachments"].kept,
        evidence=sorted(evidence, key=lambda shown: order[shown.label]),
        cite=wants.offer.cite.format(label=next((hit.label for hit in wants.offer.hits if hit.label in order), "")),
    )
    return encode_prompt(wants.split, choice, tokenizer=wants.counter.tokenizer, template=wants.template)


def _give_way(draft: Draft, names: Sequence[str], wants: Wants) -> bool:
    """Take out one thing of the first of these sections that has one; False if none has."""
    for name in names:
        if name == "history" and draft.kept:
            draft.dropped = (*draft.dropped, draft.kept[0])
            draft.kept = draft.kept[1:]
            return True
        if name == "tools" and draft.tools:
            draft.tools = draft.tools[:-1]
            return True
        if name == "tools" and (texts := {n: t for n, t in draft.texts.items() if any(n == m for m, _ in wants.split.current) and t}):
            longest = max(texts, key=lambda number: len(texts[number]))
            draft.texts[longest] = texts[longest][: len(texts[longest]) // 2]
            return True
        if name == "summary" and draft.covered.text:
            draft.covered = Covered()
            return True
        if name in _ITEMS and draft.packed[name].kept:
            draft.packed[name] = without_last(draft.packed[name])
            return True
    return False


def _used(parts: Sequence[EncodedPart]) -> Counter[str]:
    used: Counter[str] = Counter()
    for encoded in parts:
        used[encoded.part.section] += len(encoded.token_ids)
    return used


def _item_tokens(parts: Sequence[EncodedPart]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for part in parts:
        if part.part.item is not None:
            counts[part.part.item] += len(part.token_ids)
    return dict(counts)


def _arranged(hits: Sequence[Hit]) -> list[Hit]:
    """Ranked hits in reading order: documents by their best hit, chunks of one document as they stand in it."""
    best: dict[tuple[str, str, int], int] = {}
    for rank, hit in enumerate(hits):
        best.setdefault(_document(hit), rank)
    return sorted(hits, key=lambda hit: (best[_document(hit)], hit.chunk.ordinal))


def _document(hit: Hit) -> tuple[str, str, int]:
    return hit.chunk.scope, hit.chunk.kb, hit.chunk.document_id
