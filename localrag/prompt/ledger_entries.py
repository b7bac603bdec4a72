"""From what was chosen to the entries of a ledger: what each section wanted, was allotted and used, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from localrag.budget import Entry, Shortened
from localrag.budget.sections import ORDER, PROTECTED
from localrag.prompt.measure import Demand
from localrag.prompt.packing import SOURCES, Draft


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
