"""Compute figures from the asks of a journal: usage, cuts, and passages that were supplied in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

from localrag.journal import StoredAsk

OFTEN = 2
"""A passage retrieved at least this many times counts as retrieved often."""


@dataclass(frozen=True, slots=True)
class Trend:
    """The means of the first and the second half of a series, without the middle value; None for a half without values."""

    first: float | None
    second: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Trend:
        half = len(values) // 2
        return cls(mean(values[:half]), mean(values[len(values) - half :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """One session. Utilization and efficiency are 0 to 1; `utilizations` is by ask, oldest first."""

    name: str
    num_asks: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    mean_utilization: float
    lowest_utilization: float
    highest_utilization: float
    mean_efficiency: float | None
    utilization_trend: Trend
    efficiency_trend: Trend
    utilizations: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A section that got less than it wanted in `num_asks` asks: the items left out or shortened, and the tokens missing."""

    section: str
    num_asks: int
    num_omitted: int
    num_shortened: int
    missing_tokens: int


@dataclass(frozen=True, slots=True)
class Item:
    """An item left out of prompts. `session` is empty for a passage of a knowledge base, which is the same in all sessions."""

    label: str
    section: str
    source: str
    session: str
    num_omitted: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage retrieved often and never cited. It was in the prompt `num_used` times and took `used_tokens` in total."""

    label: str
    source: str
    kb: str
    chunk_id: int
    num_retrieved: int
    num_used: int
    used_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of all asks. Each list begins with the most significant entry; ties are sorted by name."""

    asks: Sequence[StoredAsk]
    sessions: list[SessionFigures]
    cut_sections: list[Cut]
    omitted_items: list[Item]
    uncited_chunks: list[Chunk]

    def to_dict(self) -> dict[str, object]:
        """The report in `--json` output."""
        lists = ("sessions", "cut_sections", "omitted_items", "uncited_chunks")
        return {
            "num_asks": len(self.asks),
            **{name: [asdict(each) for each in getattr(self, name)] for name in lists},
            "asks": [each.to_dict() for each in self.asks],
        }


def report(asks: Sequence[StoredAsk]) -> Report:
    """Compute the figures of these asks, which are sorted oldest first."""
    names = dict.fromkeys(ask.session for ask in asks)
    return Report(
        asks=asks,
        sessions=[_session(name, [ask for ask in asks if ask.session == name]) for name in names],
        cut_sections=_cut_sections(asks),
        omitted_items=_omitted_items(asks),
        uncited_chunks=_uncited_chunks(asks),
    )


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, or None without values."""
    values = list(values)
    return fmean(values) if values else None


def _session(name: str, asks: Sequence[StoredAsk]) -> SessionFigures:
    utilizations = tuple(ask.utilization for ask in asks)
    efficiencies = [ask.efficiency for ask in asks if ask.efficiency is not None]
    return SessionFigures(
        name=name,
        num_asks=len(asks),
        prompt_tokens=sum(ask.prompt_tokens for ask in asks),
        completion_tokens=sum(ask.completion_tokens for ask in asks),
        cached_tokens=sum(ask.cached_tokens for ask in asks),
        mean_utilization=fmean(utilizations),
        lowest_utilization=min(utilizations),
        highest_utilization=max(utilizations),
        mean_efficiency=mean(efficiencies),
        utilization_trend=Trend.of(utilizations),
        efficiency_trend=Trend.of(efficiencies),
        utilizations=utilizations,
    )


def _cut_sections(asks: Sequence[StoredAsk]) -> list[Cut]:
    times, omitted, shortened, missing = (Counter[str]() for _ in range(4))
    for ask in asks:
        for entry in ask.ledger.entries:
            less = max(0, entry.wanted - entry.allotted)
            cut = [each for each in entry.shortened if not each.is_chosen]
            if less or entry.without_room or cut:
                times[entry.name] += 1
                omitted[entry.name] += len(entry.without_room)
                shortened[entry.name] += len(cut)
                missing[entry.name] += less
    cuts = [Cut(name, times[name], omitted[name], shortened[name], missing[name]) for name in times]
    return sorted(cuts, key=lambda cut: (-cut.num_asks, -cut.missing_tokens, cut.section))


def _omitted_items(asks: Sequence[StoredAsk]) -> list[Item]:
    """Count omitted items. A passage of a knowledge base is the same in all asks; any other label is unique only within its session."""
    times: Counter[tuple[object, ...]] = Counter()
    fields: dict[tuple[object, ...], tuple[str, str, str, str]] = {}
    for ask in asks:
        passages = {each.label: each for each in ask.evidence}
        for entry in ask.ledger.entries:
            for label in entry.without_room:
                passage = passages.get(label)
                lasts = passage is not None and bool(passage.kb)
                key = (entry.name, passage.kb, passage.source, passage.chunk_id) if passage and lasts else (entry.name, ask.session, label)
                times[key] += 1
                fields[key] = (label, entry.name, passage.source if passage else "", "" if lasts else ask.session)
    items = [Item(*fields[key], num) for key, num in times.items()]
    return sorted(items, key=lambda item: (-item.num_omitted, item.section, item.label, item.source, item.session))


@dataclass(slots=True)
class _Seen:
    """The uses of one passage."""

    label: str = ""
    num_retrieved: int = 0
    used: list[int] = field(default_factory=list)
    is_cited: bool = False


def _uncited_chunks(asks: Sequence[StoredAsk]) -> list[Chunk]:
    """Return the chunks. Piped text is excluded: nobody chose it, and its ids do not last."""
    uses: dict[tuple[str, str, int], _Seen] = {}
    for ask in asks:
        for each in (each for each in ask.evidence if each.kb):
            one = uses.setdefault((each.kb, each.source, each.chunk_id), _Seen())
            one.label = each.label
            one.num_retrieved += 1
            one.used += [each.tokens] if each.is_in_prompt else []
            one.is_cited |= each.cited
    chunks = [
        Chunk(one.label, source, kb, chunk_id, one.num_retrieved, len(one.used), sum(one.used))
        for (kb, source, chunk_id), one in uses.items()
        if not one.is_cited and one.num_retrieved >= OFTEN
    ]
    return sorted(chunks, key=lambda one: (-one.num_retrieved, -one.used_tokens, one.source, one.kb, one.chunk_id))
