"""One ask as the journal keeps it: the question, the numbers and the names. Neither the prompt nor the answer is in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from localrag.budget import Budget, Ledger

State = Literal["used", "shortened", "omitted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """A section as it went into the negotiation, percentages turned into tokens, and what it was given there.

    `max` is None for a section without a limit. What packing changed afterwards stands in the ledger. TypeError for what is no number.
    """

    name: str
    basis: int
    min: int
    max: int | None
    grow: float
    shrink: float
    allotted: int

    def __post_init__(self) -> None:
        if not all(isinstance(each, int | float) for each in (self.basis, self.min, self.max or 0, self.grow, self.shrink, self.allotted)):
            raise TypeError(f"a section is described by numbers, not by {self}")


def allotments(budget: Budget) -> tuple[Allotment, ...]:
    """A negotiation and its outcome, section by section."""
    return tuple(Allotment(**asdict(item), allotted=budget.allocations[item.name]) for item in budget.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRecord:
    """A passage that was offered to the prompt. `tokens` is what it takes there or, where it was omitted, would have taken.

    `label` is its name in that answer, such as `KB#12`; `kb` and `chunk_id` are what it is known by for good. `relevance`, `tier`
    and `level` are None or empty where nothing decided them. ValueError, our own bug, for a relevance that is no finite number.
    """

    label: str
    source: str
    kb: str
    chunk_id: int
    tokens: int
    relevance: float | None = None
    tier: str = ""
    level: str = ""
    state: State = "used"
    cited: bool = False

    def __post_init__(self) -> None:
        if self.relevance is not None and not math.isfinite(self.relevance):
            raise ValueError(f"the relevance of {self.label} is {self.relevance}")

    @property
    def is_in_prompt(self) -> bool:
        return self.state != "omitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRecord:
    """What an ask leaves behind. `started_at` is seconds since the epoch, `timings` are seconds by name.

    `strategy` says what was done about too much, `bound` what capped the window. The first 10,000 characters of a question are kept.
    """

    session: str
    command: str
    model: str
    model_sha256: str | None
    question: str
    started_at: float
    window: int
    finish_reason: str
    strategy: str
    bound: str
    ledger: Ledger
    sections: Sequence[Allotment]
    evidence: Sequence[EvidenceRecord] = ()
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)

    @property
    def utilization(self) -> float:
        """The part of the window that was used, 0 to 1: prompt and answer."""
        return (self.prompt_tokens + self.completion_tokens) / self.window if self.window else 0.0

    @property
    def efficiency(self) -> float | None:
        """The part of the evidence in the prompt, in tokens, that the answer cites, 0 to 1; None without evidence."""
        supplied = sum(each.tokens for each in self.evidence if each.is_in_prompt)
        return sum(each.tokens for each in self.evidence if each.is_in_prompt and each.cited) / supplied if supplied else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAsk(AskRecord):
    """An ask of the journal. Ids grow in the order of recording and are never used again."""

    id: int

    def to_dict(self) -> dict[str, object]:
        """The ask in `--json` output."""
        kept = (
            "id",
            "session",
            "command",
            "model",
            "model_sha256",
            "question",
            "started_at",
            "window",
            "finish_reason",
            "strategy",
            "bound",
        )
        return {
            **{name: getattr(self, name) for name in kept},
            "usage": {name: getattr(self, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")},
            "utilization": self.utilization,
            "efficiency": self.efficiency,
            "ledger": self.ledger.to_dict(),
            "sections": [asdict(each) for each in self.sections],
            "evidence": [asdict(each) for each in self.evidence],
            "timings": dict(self.timings),
        }


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session of the journal: how many asks, and when the first and the last began, in seconds since the epoch."""

    name: str
    num_asks: int
    first_at: float
    last_at: float
