"""Pack what was given room into a prompt, count the very ids that are sent, and account for all that was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from localrag.budget import Budget, Ledger, TimeLimit, settle
from localrag.budget.sections import ORDER
from localrag.errors import BudgetExceededError
from localrag.markup import EncodedPart
from localrag.passages import Hit
from localrag.prompt import inputs
from localrag.prompt.breakpoints import breakpoints
from localrag.prompt.layout import Choice, encode_prompt
from localrag.prompt.ledger_entries import account
from localrag.prompt.measure import Demand, used_by
from localrag.prompt.pack import Shortening
from localrag.prompt.packing import GIVING, SOURCES, Draft, fill, give_way
from localrag.prompt.template_cost import JOIN_TOKENS
from localrag.prompt.thoughts import thinking_of
from localrag.thinking import Thinking


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
