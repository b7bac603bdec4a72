"""What is chosen of everything that is offered: each section packed into its room, and what gives way should that not do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localrag.budget import Budget
from localrag.conversation import Covered, Exchange, fit
from localrag.messages import ToolSpec
from localrag.prompt import inputs
from localrag.prompt.measure import Demand
from localrag.prompt.pack import MIN_TRUNCATED_TOKENS, Packed, Shortening, pack, truncated_texts, with_less, without_last

SOURCES = ("cited", "evidence")
"""Sections of passages, which stand side by side."""
ITEMS = ("cited", "proposals", "plan", "evidence", "attachments", "memories")
"""Sections of items, in the order in which they are offered what others left unused."""
GIVING = ("evidence", "attachments", "memories", "history", "summary", "tools", "plan", "cited", "proposals")
"""Sections from which something can still be taken, first to last."""


@dataclass(slots=True)
class Draft:
    """What is chosen so far. `texts` are messages that are sent shorter than they are, by number."""

    tools: list[ToolSpec]
    packed: dict[str, Packed]
    kept: tuple[Exchange, ...] = ()
    dropped: tuple[Exchange, ...] = ()
    texts: dict[int, str] = field(default_factory=dict)
    covered: Covered = field(default_factory=Covered)
    sources_room: int = 0
    """Tokens that all sources together were given: what they take, and what nobody else took of the rest."""


def fill(wants: Demand, budget: Budget, shortening: Shortening) -> tuple[Draft, dict[str, int]]:
    """Everything packed into its room, and the rooms, grown by what other sections left unused."""
    rooms = {name: budget.allocations.get(name, 0) for name in GIVING}
    draft = Draft([], {name: Packed((), ()) for name in ITEMS})
    costs: dict[str, int] = {}

    def settle(name: str) -> None:
        costs[name] = _settle(name, rooms[name], wants, draft, shortening)

    def unspent() -> int:
        return budget.window - spent - sum(costs.values())

    def grow(name: str) -> None:
        """Settle it anew in what nobody took, if that is more."""
        room = min(_most(name, budget), costs[name] + max(0, unspent()))
        if costs[name] < wants.wanted(name) and room > max(rooms[name], costs[name]):
            rooms[name] = room
            settle(name)

    takers = [item.name for item in budget.items if item.spare and item.name in (*ITEMS, "tools", "history")]  # of what others leave
    spent = wants.set_aside.total() + rooms["summary"] + sum(budget.allocations.get(name, 0) for name in ("gap", "thinking", "answer"))
    for name in ("tools", "history", *(name for name in ITEMS if name != "evidence")):
        settle(name)
    if "cited" in wants.items:  # goes before the rest of the evidence, up to its maximum
        grow("cited")
        rooms["evidence"] = max(0, min(rooms["evidence"], unspent()))
    settle("evidence")
    for name in (*(name for name in (*ITEMS, "history", "tools") if name not in takers), *takers):
        grow(name)
    if draft.dropped and rooms["summary"]:
        frame = wants.counter("\n\n" + inputs.SUMMARY_INTRO) + 2
        draft.covered = shortening.to_summary(draft.dropped, rooms["summary"] - frame)
    unused = sum(rooms[name] - costs[name] for name in SOURCES)
    draft.sources_room = sum(costs[name] for name in SOURCES) + max(0, min(unused, unspent()))
    return draft, rooms


def _most(name: str, budget: Budget) -> int:
    """The most tokens that a section may have in this window, of tokens that nobody took."""
    return next((item.most if item.spare else item.max for item in budget.items if item.name == name), 0)


def _settle(name: str, room: int, wants: Demand, draft: Draft, shortening: Shortening) -> int:
    """Pack one section anew into its room; what it then takes."""
    count = wants.sent
    if name == "tools":
        return _settle_tools(room, wants, draft, count)
    if name == "history":
        return _settle_history(room, wants, draft, count)
    items = wants.items.get(name)
    if not items:
        return 0
    profile = wants.offer.profile
    is_framed = name == "evidence" and draft.packed["cited"].kept  # the wording is around both, and counted there
    frame = 0 if is_framed else wants.frame(name)
    tiers = profile.tiers if name == "evidence" else ()
    packed = pack(items, room - frame, profile.sections[name].cut, count=count, shortening=shortening, tiers=tiers)
    draft.packed[name] = packed
    return packed.cost + frame if packed.kept else 0


def _settle_tools(room: int, wants: Demand, draft: Draft, count: Callable[[str], int]) -> int:
    """The tool that must be called; results of calls, cut where they must be, for a call is never separated from its result; then
    the other schemas, in their order."""
    rounds = [number for number, message in wants.split.current if message.role != "user"]
    room -= wants.num_forced_tokens
    spent = wants.num_round_tokens
    if spent > room:
        texts = {number: wants.content(number) for number in rounds}
        markup = spent - sum(count(text) for text in texts.values())
        draft.texts |= truncated_texts(texts, room - markup, count)
        spent = markup + sum(count(draft.texts[number]) for number in texts)
    else:
        draft.texts = {number: text for number, text in draft.texts.items() if number not in rounds}
    draft.tools = []
    for tool in wants.tools:
        is_forced = tool.name == wants.forced_tool
        cost = 0 if is_forced else wants.tool_costs[tool.name]
        if is_forced or spent + cost <= room:
            draft.tools.append(tool)
            spent += cost
    return spent + wants.num_forced_tokens


def _settle_history(room: int, wants: Demand, draft: Draft, count: Callable[[str], int]) -> int:
    """The newest exchanges; with the strategy "truncate", the beginning of the one that does not fit whole."""
    kept, dropped = fit(wants.recent, room, wants.cost)
    older = wants.split.history[: len(wants.split.history) - len(wants.recent)]
    spoken = {number for exchange in wants.split.history for number, _ in exchange.messages}
    draft.texts = {number: text for number, text in draft.texts.items() if number not in spoken}
    spent = sum(map(wants.cost, kept))
    if dropped and wants.offer.profile.sections["history"].cut == "truncate":
        last = dropped[-1]
        texts = {number: wants.content(number) for number, _ in last.messages}
        markup = wants.cost(last) - sum(count(text) for text in texts.values())
        left = room - spent - markup
        if left >= MIN_TRUNCATED_TOKENS * len(texts):
            draft.texts |= truncated_texts(texts, left, count)
            kept, dropped = (last, *kept), dropped[:-1]
            spent += markup + sum(count(draft.texts[number]) for number in texts)
    draft.kept, draft.dropped = tuple(kept), (*older, *dropped)
    return spent


def give_way(draft: Draft, names: Sequence[str], wants: Demand) -> bool:
    """Take out one thing of the first of these sections that has one; False if none has."""
    return any(_takes_out(draft, name, wants) for name in names)


def _takes_out(draft: Draft, name: str, wants: Demand) -> bool:
    if name == "history" and draft.kept:
        draft.dropped = (*draft.dropped, draft.kept[0])
        draft.kept = draft.kept[1:]
        return True
    if name == "tools":
        return _takes_tool(draft, wants)
    if name == "summary" and draft.covered.text:
        draft.covered = Covered()
        return True
    if name == "proposals":
        shorter = with_less(draft.packed[name], wants.sent)
        draft.packed[name] = shorter or draft.packed[name]
        return shorter is not None
    if name in ITEMS and draft.packed[name].kept:
        draft.packed[name] = without_last(draft.packed[name])
        return True
    return False


def _takes_tool(draft: Draft, wants: Demand) -> bool:
    """The last schema that may go, or else half of the longest result."""
    last = next((tool for tool in reversed(draft.tools) if tool.name != wants.forced_tool), None)
    if last is not None:
        draft.tools.remove(last)
        return True
    current = {number for number, _ in wants.split.current}
    longest = max((number for number in draft.texts if number in current), key=lambda number: len(draft.texts[number]), default=None)
    if longest is None or not draft.texts[longest]:
        return False
    draft.texts[longest] = draft.texts[longest][: len(draft.texts[longest]) // 2]
    return True
