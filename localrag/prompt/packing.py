"""Fill the sections within their rooms, using the cut of each section for content that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from localrag import citation
from localrag.budget import Budget, Cut, Percent, Section, Tier, negotiate
from localrag.conversation import Covered, Exchange, fit
from localrag.prompt.layout import SUMMARY_INTRO, Item, Shown
from localrag.prompt.measure import JOIN_TOKENS, Demand, frame_of, least_of
from localrag.summary import LEVELS, LIMITS, Level, cut_middle, truncate
from localrag.types import ToolSpec

Count = Callable[[str], int]
"""Tokens of a text as it is sent."""

MIN_TRUNCATED_TOKENS = 24
"""A text whose truncated form would be shorter than this is left out."""
_SHRINK = {"detailed": 2, "summary": 4, "stub": 8}
"""Divisor of the full cost for each level, so that every step saves tokens even for a short text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortening:
    """Functions that shorten texts: an item to a level, and exchanges to one summary, each within a number of tokens."""

    to_level: Callable[[Item, Level, int], str]
    to_summary: Callable[[Sequence[Exchange], int], Covered]

    @classmethod
    def made_by(cls, make: Callable[[], Shortening]) -> Shortening:
        """Return a Shortening that calls `make` when the first text is shortened, since most prompts fit."""
        once = cache(make)
        return cls(
            to_level=lambda item, level, limit: once().to_level(item, level, limit),
            to_summary=lambda exchanges, limit: once().to_summary(exchanges, limit),
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """The kept and the omitted items of a section, in the order of the items, and the room of each tier."""

    kept: tuple[Shown, ...]
    omitted: tuple[Item, ...]
    tier_rooms: Mapping[str | None, int] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        return sum(each.cost for each in self.kept)


def pack(items: Sequence[Item], room: int, cut: Cut, *, count: Count, shortening: Shortening, tiers: Sequence[Tier] = ()) -> Packed:
    """Pack whole items, best first, into `room` tokens. `cut` decides what to do with items that do not fit.

    With `tiers`, each tier's items are first served from its share of the room; unused room goes to the others.
    """
    rooms = _tier_rooms(items, max(0, room), tiers)
    if sum(item.cost for item in items) <= room:
        return Packed(tuple(map(_whole, items)), (), rooms)
    if cut == "summarize":
        return replace(_step_down(items, room, count, shortening), tier_rooms=rooms)
    if cut == "middle":
        return _evenly(items, room, count)
    whole_items = _fill(items, room, dict(rooms))
    remaining_tokens = room - sum(item.cost for item in whole_items)
    forms = {item: _whole(item) for item in whole_items}
    if cut == "truncate":
        first = next(item for item in items if item not in forms)
        shortened = _truncated(first, remaining_tokens, count)
        if shortened is not None:
            forms[first] = shortened
    return replace(_in_order(items, forms), tier_rooms=rooms)


def _whole(item: Item) -> Shown:
    return Shown(item, item.dress(item.body), item.cost, item.level, item.body)


def _in_order(items: Sequence[Item], forms: dict[Item, Shown]) -> Packed:
    return Packed(tuple(forms[item] for item in items if item in forms), tuple(item for item in items if item not in forms))


def _tier_rooms(items: Sequence[Item], room: int, tiers: Sequence[Tier]) -> dict[str | None, int]:
    """Return each tier's share of the room: a flex container inside the section."""
    tier_costs = {tier.name: sum(item.cost for item in items if item.tier == tier.name) for tier in tiers}
    total = sum(tier.share for tier in tiers)
    if not total:
        return {}
    sections = [
        Section(name=tier.name, basis=Percent(100 * tier.share / total), grow=tier.share, content=tier_costs[tier.name])
        for tier in tiers
        if tier_costs[tier.name]
    ]
    rooms: dict[str | None, int] = {}
    rooms.update(negotiate(room, sections).allocations)
    return rooms


def _fill(items: Sequence[Item], room: int, tier_rooms: dict[str | None, int]) -> list[Item]:
    """Select items that fit, best first, skipping those that are too large: first within their tiers, then in the unused room."""
    selection: dict[Item, None] = {}
    for item in items:
        if item.cost <= tier_rooms.get(item.tier, 0):
            selection[item] = None
            tier_rooms[item.tier] -= item.cost
    remaining_tokens = room - sum(item.cost for item in selection)
    for item in items:
        if item not in selection and item.cost <= remaining_tokens:
            selection[item] = None
            remaining_tokens -= item.cost
    return list(selection)


def _truncated(item: Item, room: int, count: Count) -> Shown | None:
    """Return the beginning of an item, if enough of it fits."""
    limit = room - frame_of(item, count)
    while limit >= MIN_TRUNCATED_TOKENS:
        body = truncate(item.body, limit, count)
        form = _shown(item, body, "truncated", count, room) if body else None
        if form is not None or not body:
            return form
        limit -= 1 + limit // 8  # the tags of sentences take tokens too
    return None


def _shown(item: Item, body: str, level: str, count: Count, room: int) -> Shown | None:
    text = item.dress(body)
    cost = count(text) + JOIN_TOKENS
    return Shown(item, text, cost, level, body) if cost <= room else None


def _step_down(items: Sequence[Item], room: int, count: Count, shortening: Shortening) -> Packed:
    """Lower levels of detail, lowest score first, one level for all items before the next; then drop items, lowest score first."""
    forms = {item: _whole(item) for item in items}
    weakest_first = sorted(items, key=lambda item: item.score)
    total = sum(each.cost for each in forms.values())
    for level in LEVELS[1:]:
        for item in weakest_first:
            if total <= room:
                return _in_order(items, forms)
            smaller = _at_level(item, level, count, shortening)
            if smaller is not None and smaller.cost < forms[item].cost:
                total += smaller.cost - forms[item].cost
                forms[item] = smaller
    for item in weakest_first:
        if total <= room:
            break
        total -= forms.pop(item).cost
    return _in_order(items, forms)


def _at_level(item: Item, level: Level, count: Count, shortening: Shortening) -> Shown | None:
    most = LIMITS[level]
    scaled = item.cost // _SHRINK[level]
    limit = scaled if most is None else min(most, scaled)
    body = shortening.to_level(item, level, limit) if limit > 0 else ""
    return _shown(item, body, level, count, item.cost) if body else None


def _evenly(items: Sequence[Item], room: int, count: Count) -> Packed:
    """Keep every item. Items above a fair share lose their middle; an item that does not fit even so is omitted."""
    frames = [min(item.cost, frame_of(item, count)) for item in items]
    fair = _fair_share([item.cost - frame for item, frame in zip(items, frames, strict=True)], room - sum(frames))
    forms: dict[Item, Shown] = {}
    for item, frame in zip(items, frames, strict=True):
        each = _whole(item) if item.cost <= frame + fair else _without_middle(item, frame + fair, count)
        if each is not None:
            forms[item] = each
    return _in_order(items, forms)


def _without_middle(item: Item, room: int, count: Count) -> Shown | None:
    limit = room - frame_of(item, count)
    while limit > 0:
        body = cut_middle(item.body, limit, count, whole=citation.WHOLE)
        form = _shown(item, body, "truncated", count, room) if body else None
        if form is not None:
            return form
        limit -= 1 + limit // 8  # joined texts can take more tokens than separate ones
    return None


def with_less(packed: Packed, count: Count) -> Packed | None:
    """Shorten the longest item by a quarter, if it is above its minimum, else the next one. Return None if no item can be shortened."""
    for longest in sorted(packed.kept, key=lambda each: -each.cost):
        room = max(least_of(longest.item, count), longest.cost * 3 // 4)
        shorter = _without_middle(longest.item, room, count) if room < longest.cost else None
        if shorter is not None:
            return replace(packed, kept=tuple(shorter if each is longest else each for each in packed.kept))
    return None


def truncated_texts(texts: dict[int, str], room: int, count: Count) -> dict[int, str]:
    """Truncate texts, longest first, so that they take at most `room` tokens together; texts that fit stay unchanged."""
    sizes = {key: count(text) for key, text in texts.items()}
    fair = _fair_share(list(sizes.values()), room)
    return {key: text if sizes[key] <= fair else truncate(text, fair, count) for key, text in texts.items()}


def _fair_share(sizes: list[int], room: int) -> int:
    """Return the largest limit such that all sizes, capped at it, add up to at most `room`."""
    remaining_tokens = max(0, room)
    for position, size in enumerate(sorted(sizes)):
        share = remaining_tokens // (len(sizes) - position)
        if size > share:
            return share
        remaining_tokens -= size
    return max(sizes, default=0)


def without_last(packed: Packed) -> Packed:
    """Drop the kept item with the lowest score."""
    weakest = min(packed.kept, key=lambda each: each.item.score)
    return replace(packed, kept=tuple(each for each in packed.kept if each is not weakest), omitted=(*packed.omitted, weakest.item))


SOURCES = ("cited", "evidence")
"""Sections of passages. They are shown together."""
ITEMS = ("cited", "proposals", "plan", "evidence", "attachments", "memories")
"""Sections of items, in the order in which they are offered unused tokens."""
GIVING = ("evidence", "attachments", "memories", "history", "summary", "tools", "plan", "cited", "proposals")
"""Sections that can give way, first to last."""


@dataclass(slots=True)
class Draft:
    """The selection so far. `texts` are shortened contents of messages, by number."""

    tools: list[ToolSpec]
    packed: dict[str, Packed]
    kept: tuple[Exchange, ...] = ()
    dropped: tuple[Exchange, ...] = ()
    texts: dict[int, str] = field(default_factory=dict)
    covered: Covered = field(default_factory=Covered)
    sources_room: int = 0
    """Tokens available to all sources: those that they take, and unused ones that no other section took."""


def fill(demand: Demand, budget: Budget, shortening: Shortening) -> tuple[Draft, dict[str, int]]:
    """Pack every section into its room. Return the draft and the rooms, grown by tokens that other sections left unused."""
    rooms = {name: budget.allocations.get(name, 0) for name in GIVING}
    draft = Draft([], {name: Packed((), ()) for name in ITEMS})
    costs: dict[str, int] = {}

    def settle(name: str) -> None:
        costs[name] = _settle(name, rooms[name], demand, draft, shortening)

    def unspent() -> int:
        return budget.window - spent - sum(costs.values())

    def grow(name: str) -> None:
        """Pack a section again if unused tokens give it more room."""
        room = min(_most(name, budget), costs[name] + max(0, unspent()))
        if costs[name] < demand.wanted(name) and room > max(rooms[name], costs[name]):
            rooms[name] = room
            settle(name)

    takers = [item.name for item in budget.items if item.spare and item.name in (*ITEMS, "tools", "history")]  # they get unused tokens last
    spent = demand.set_aside.total() + rooms["summary"] + sum(budget.allocations.get(name, 0) for name in ("gap", "thinking", "answer"))
    for name in ("tools", "history", *(name for name in ITEMS if name != "evidence")):
        settle(name)
    if "cited" in demand.items:  # has priority over other evidence, up to its maximum
        grow("cited")
        rooms["evidence"] = max(0, min(rooms["evidence"], unspent()))
    settle("evidence")
    for name in (*(name for name in (*ITEMS, "history", "tools") if name not in takers), *takers):
        grow(name)
    if draft.dropped and rooms["summary"]:
        frame = demand.counter("\n\n" + SUMMARY_INTRO) + 2
        draft.covered = shortening.to_summary(draft.dropped, rooms["summary"] - frame)
    unused = sum(rooms[name] - costs[name] for name in SOURCES)
    draft.sources_room = sum(costs[name] for name in SOURCES) + max(0, min(unused, unspent()))
    return draft, rooms


def _most(name: str, budget: Budget) -> int:
    """Return the maximum tokens of a section in this window, including unused ones."""
    return next((item.most if item.spare else item.max for item in budget.items if item.name == name), 0)


def _settle(name: str, room: int, demand: Demand, draft: Draft, shortening: Shortening) -> int:
    """Pack one section into its room again, and return its tokens."""
    count = demand.sent
    if name == "tools":
        return _settle_tools(room, demand, draft, count)
    if name == "history":
        return _settle_history(room, demand, draft, count)
    items = demand.items.get(name)
    if not items:
        return 0
    profile = demand.inputs.profile
    is_framed = name == "evidence" and draft.packed["cited"].kept  # "cited" owns the wording around both
    frame = 0 if is_framed else demand.frame(name)
    tiers = profile.tiers if name == "evidence" else ()
    packed = pack(items, room - frame, profile.sections[name].cut, count=count, shortening=shortening, tiers=tiers)
    draft.packed[name] = packed
    return packed.cost + frame if packed.kept else 0


def _settle_tools(room: int, demand: Demand, draft: Draft, count: Callable[[str], int]) -> int:
    """Pack the tool that must be called, then the results of calls, then the other schemas in order.

    A call is never separated from its result, so results are truncated if they do not fit.
    """
    rounds = [number for number, message in demand.split.current if message.role != "user"]
    room -= demand.num_forced_tokens
    spent = demand.num_round_tokens
    if spent > room:
        texts = {number: demand.content(number) for number in rounds}
        markup = spent - sum(count(text) for text in texts.values())
        draft.texts |= truncated_texts(texts, room - markup, count)
        spent = markup + sum(count(draft.texts[number]) for number in texts)
    else:
        draft.texts = {number: text for number, text in draft.texts.items() if number not in rounds}
    draft.tools = []
    for tool in demand.tools:
        is_forced = tool.name == demand.forced_tool
        cost = 0 if is_forced else demand.tool_costs[tool.name]
        if is_forced or spent + cost <= room:
            draft.tools.append(tool)
            spent += cost
    return spent + demand.num_forced_tokens


def _settle_history(room: int, demand: Demand, draft: Draft, count: Callable[[str], int]) -> int:
    """Pack the newest exchanges. With the cut "truncate", the exchange that does not fit whole is truncated."""
    exchanges, dropped = fit(demand.recent, room, demand.cost)
    older = demand.split.history[: len(demand.split.history) - len(demand.recent)]
    spoken = {number for exchange in demand.split.history for number, _ in exchange.messages}
    draft.texts = {number: text for number, text in draft.texts.items() if number not in spoken}
    spent = sum(map(demand.cost, exchanges))
    if dropped and demand.inputs.profile.sections["history"].cut == "truncate":
        last = dropped[-1]
        texts = {number: demand.content(number) for number, _ in last.messages}
        markup = demand.cost(last) - sum(count(text) for text in texts.values())
        remaining_tokens = room - spent - markup
        if remaining_tokens >= MIN_TRUNCATED_TOKENS * len(texts):
            draft.texts |= truncated_texts(texts, remaining_tokens, count)
            exchanges, dropped = (last, *exchanges), dropped[:-1]
            spent += markup + sum(count(draft.texts[number]) for number in texts)
    draft.kept, draft.dropped = tuple(exchanges), (*older, *dropped)
    return spent


def give_way(draft: Draft, names: Sequence[str], demand: Demand) -> bool:
    """Take one item out of the first of these sections that has one. Return False if none has."""
    return any(_takes_out(draft, name, demand) for name in names)


def _takes_out(draft: Draft, name: str, demand: Demand) -> bool:
    if name == "history" and draft.kept:
        draft.dropped = (*draft.dropped, draft.kept[0])
        draft.kept = draft.kept[1:]
        return True
    if name == "tools":
        return _takes_tool(draft, demand)
    if name == "summary" and draft.covered.text:
        draft.covered = Covered()
        return True
    if name == "proposals":
        shorter = with_less(draft.packed[name], demand.sent)
        draft.packed[name] = shorter or draft.packed[name]
        return shorter is not None
    if name in ITEMS and draft.packed[name].kept:
        draft.packed[name] = without_last(draft.packed[name])
        return True
    return False


def _takes_tool(draft: Draft, demand: Demand) -> bool:
    """Drop the last schema that may be dropped, else halve the longest result."""
    last = next((tool for tool in reversed(draft.tools) if tool.name != demand.forced_tool), None)
    if last is not None:
        draft.tools.remove(last)
        return True
    current = {number for number, _ in demand.split.current}
    longest = max((number for number in draft.texts if number in current), key=lambda number: len(draft.texts[number]), default=None)
    if longest is None or not draft.texts[longest]:
        return False
    draft.texts[longest] = draft.texts[longest][: len(draft.texts[longest]) // 2]
    return True
