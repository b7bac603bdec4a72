"""What is kept of a section's items in the room that it was given, by the strategy that it has for too much."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from localrag import citation
from localrag.budget import Cut, Percent, Section, Tier, negotiate
from localrag.conversation import Covered, Exchange
from localrag.prompt.inputs import Item
from localrag.prompt.layout import Shown
from localrag.prompt.measure import frame_of, least_of
from localrag.prompt.template_cost import JOIN_TOKENS
from localrag.summary import LEVELS, LIMITS, Level, cut_middle, truncate

Count = Callable[[str], int]
"""Tokens of a text as it is sent."""

MIN_TRUNCATED_TOKENS = 24
"""What is left of a text after truncation is at least this long, or it is left out."""
_SHRINK = {"detailed": 2, "summary": 4, "stub": 8}
"""A level takes at most this part of the whole, so that each step saves something also for a short text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortening:
    """How texts are made shorter: an item to a level of at most so many tokens, and exchanges to one summary of at most so many."""

    to_level: Callable[[Item, Level, int], str]
    to_summary: Callable[[Sequence[Exchange], int], Covered]


@dataclass(frozen=True, slots=True)
class Packed:
    """What is kept and what is left out, in the order of the items, and what each tier was given."""

    kept: tuple[Shown, ...]
    omitted: tuple[Item, ...]
    tier_rooms: Mapping[str | None, int] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        return sum(shown.cost for shown in self.kept)


def pack(items: Sequence[Item], room: int, cut: Cut, *, count: Count, shortening: Shortening, tiers: Sequence[Tier] = ()) -> Packed:
    """Whole items, best first, into so many tokens; what does not fit goes by the strategy `cut`.

    With `tiers`, each tier's items are first served from its share of the room; what one does not use, others get.
    """
    rooms = _tier_rooms(items, max(0, room), tiers)
    if sum(item.cost for item in items) <= room:
        return Packed(tuple(map(_whole, items)), (), rooms)
    if cut == "summarize":
        return replace(_step_down(items, room, count, shortening), tier_rooms=rooms)
    if cut == "middle":
        return _evenly(items, room, count)
    kept = _fill(items, room, dict(rooms))
    left = room - sum(item.cost for item in kept)
    shown = {item: _whole(item) for item in kept}
    if cut == "truncate":
        first = next(item for item in items if item not in shown)
        shortened = _truncated(first, left, count)
        if shortened is not None:
            shown[first] = shortened
    return replace(_in_order(items, shown), tier_rooms=rooms)


def _whole(item: Item) -> Shown:
    return Shown(item, item.dress(item.body), item.cost)


def _in_order(items: Sequence[Item], shown: dict[Item, Shown]) -> Packed:
    return Packed(tuple(shown[item] for item in items if item in shown), tuple(item for item in items if item not in shown))


def _tier_rooms(items: Sequence[Item], room: int, tiers: Sequence[Tier]) -> dict[str | None, int]:
    """Each tier's share of the room: a flex container inside the section."""
    wanted = {tier.name: sum(item.cost for item in items if item.tier == tier.name) for tier in tiers}
    total = sum(tier.share for tier in tiers)
    if not total:
        return {}
    sections = [
        Section(name=tier.name, basis=Percent(100 * tier.share / total), grow=tier.share, content=wanted[tier.name])
        for tier in tiers
        if wanted[tier.name]
    ]
    rooms: dict[str | None, int] = {}
    rooms.update(negotiate(room, sections).allocations)
    return rooms


def _fill(items: Sequence[Item], room: int, tier_rooms: dict[str | None, int]) -> list[Item]:
    """Items that fit, best first, one that is too large passed over: first within their tiers, then in what the tiers left."""
    kept: dict[Item, None] = {}
    for item in items:
        if item.cost <= tier_rooms.get(item.tier, 0):
            kept[item] = None
            tier_rooms[item.tier] -= item.cost
    left = room - sum(item.cost for item in kept)
    for item in items:
        if item not in kept and item.cost <= left:
            kept[item] = None
            left -= item.cost
    return list(kept)


def _truncated(item: Item, room: int, count: Count) -> Shown | None:
    """The beginning of an item, if enough of it fits."""
    frame = frame_of(item, count)
    if room - frame < MIN_TRUNCATED_TOKENS:
        return None
    body = truncate(item.body, room - frame, count)
    return _shown(item, body, "truncated", count, room) if body else None


def _shown(item: Item, body: str, level: str, count: Count, room: int) -> Shown | None:
    text = item.dress(body)
    cost = count(text) + JOIN_TOKENS
    return Shown(item, text, cost, level) if cost <= room else None


def _step_down(items: Sequence[Item], room: int, count: Count, shortening: Shortening) -> Packed:
    """Levels down, lowest score first, each level through all the items before the next; then out, lowest score first."""
    shown = {item: _whole(item) for item in items}
    weakest_first = sorted(items, key=lambda item: item.score)
    total = sum(each.cost for each in shown.values())
    for level in LEVELS[1:]:
        for item in weakest_first:
            if total <= room:
                return _in_order(items, shown)
            smaller = _at_level(item, level, count, shortening)
            if smaller is not None and smaller.cost < shown[item].cost:
                total += smaller.cost - shown[item].cost
                shown[item] = smaller
    for item in weakest_first:
        if total <= room:
            break
        total -= shown.pop(item).cost
    return _in_order(items, shown)


def _at_level(item: Item, level: Level, count: Count, shortening: Shortening) -> Shown | None:
    most = LIMITS[level]
    scaled = item.cost // _SHRINK[level]
    limit = scaled if most is None else min(most, scaled)
    body = shortening.to_level(item, level, limit) if limit > 0 else ""
    return _shown(item, body, level, count, item.cost) if body else None


def _evenly(items: Sequence[Item], room: int, count: Count) -> Packed:
    """Every item, those without their middle of which there is more than a fair share; one for which even that is too little, not."""
    frames = [min(item.cost, frame_of(item, count)) for item in items]
    fair = _fair_share([item.cost - frame for item, frame in zip(items, frames, strict=True)], room - sum(frames))
    shown: dict[Item, Shown] = {}
    for item, frame in zip(items, frames, strict=True):
        each = _whole(item) if item.cost <= frame + fair else _without_middle(item, frame + fair, count)
        if each is not None:
            shown[item] = each
    return _in_order(items, shown)


def _without_middle(item: Item, room: int, count: Count) -> Shown | None:
    limit = room - frame_of(item, count)
    while limit > 0:
        body = cut_middle(item.body, limit, count, whole=citation.WHOLE)
        shown = _shown(item, body, "truncated", count, room) if body else None
        if shown is not None:
            return shown
        limit -= 1 + limit // 8  # joined they can take more than apart
    return None


def with_less(packed: Packed, count: Count) -> Packed | None:
    """The same with a quarter less of the longest of which there is more than the least; None where there is none."""
    for longest in sorted(packed.kept, key=lambda shown: -shown.cost):
        room = max(least_of(longest.item, count), longest.cost * 3 // 4)
        shorter = _without_middle(longest.item, room, count) if room < longest.cost else None
        if shorter is not None:
            return replace(packed, kept=tuple(shorter if shown is longest else shown for shown in packed.kept))
    return None


def truncated_texts(texts: dict[int, str], room: int, count: Count) -> dict[int, str]:
    """Texts cut so that together they take at most so many tokens, the longest ones first; those that fit stay as they are."""
    sizes = {key: count(text) for key, text in texts.items()}
    fair = _fair_share(list(sizes.values()), room)
    return {key: text if sizes[key] <= fair else truncate(text, fair, count) for key, text in texts.items()}


def _fair_share(sizes: list[int], room: int) -> int:
    """The largest limit such that all sizes, cut to it, add up to at most `room`."""
    left = max(0, room)
    for position, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - position)
        if size > share:
            return share
        left -= size
    return max(sizes, default=0)


def without_last(packed: Packed) -> Packed:
    """The same without the item that has the lowest score of those kept."""
    weakest = min(packed.kept, key=lambda shown: shown.item.score)
    return replace(packed, kept=tuple(shown for shown in packed.kept if shown is not weakest), omitted=(*packed.omitted, weakest.item))
