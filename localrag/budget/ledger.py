"""The account of a budget: for each section the tokens wanted, allotted and used, and the items left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

ANSWER = "answer"
WRITTEN = ("thinking", ANSWER)
"""Sections that the model writes; all others are the prompt."""

_OPTIONAL = ("shortened", "covered", "parts", "omitted_reasons", "copied")
"""Fields of an entry that `--json` leaves out if they are empty."""


@dataclass(frozen=True, slots=True)
class Shortened:
    """An item sent in a shorter form. `level` is "truncated", "detailed", "summary" or "stub"; `tokens` of its `of` tokens remain.

    The level "sentences" is that of a passage of which only the best sentences were chosen, whatever the room; `sentences` is the
    number chosen and the number in the passage.
    """

    id: str
    level: str
    tokens: int
    of: int
    sentences: tuple[int, int] | None = None

    @property
    def is_chosen(self) -> bool:
        """Whether it was shortened by choice, not for want of room."""
        return self.sentences is not None

    @property
    def form(self) -> str:
        """Its level for people, such as "3 of 7 sentences"."""
        return self.level if self.sentences is None else "{} of {} sentences".format(*self.sentences)

    def to_dict(self) -> dict[str, Any]:
        """Return the object in `--json` output. `sentences` is left out for other levels."""
        data: dict[str, Any] = {"id": self.id, "level": self.level, "tokens": self.tokens, "of": self.of}
        return data if self.sentences is None else {**data, "sentences": list(self.sentences)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Shortened:
        return cls(**{**data, "sentences": tuple(data["sentences"]) if "sentences" in data else None})


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The effect of a time limit. `is_bound`: the time limit, not the window, decided how much was sent. Speeds are in tokens per
    second.

    `skipped` names the steps that were left out to save time, such as "rerank".
    """

    max_seconds: float
    is_bound: bool
    planned_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    skipped: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the object under `"time"` in `--json` output. `skipped` is left out if it is empty."""
        data = asdict(self) | {"skipped": list(self.skipped)}
        return {key: value for key, value in data.items() if value or key != "skipped"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TimeLimit:
        return cls(**{**data, "skipped": tuple(data.get("skipped", ()))})


@dataclass(frozen=True, slots=True)
class Entry:
    """The ledger line of one section, in tokens.

    `omitted` names each chunk, message or tool that was left out, `shortened` each that was sent in a shorter form, and
    `covered` each message that the summary covers. `parts` are the tiers of a section; they add up to it, except for the
    section's own wording. `omitted_reasons` gives the reason for names in `omitted`, such as "identical to KB#1"; a name
    without a reason did not fit. `copied` of the `used` tokens were copied into the answer from sources, not written.
    """

    name: str
    wanted: int
    allotted: int
    used: int
    omitted: tuple[str, ...] = ()
    shortened: tuple[Shortened, ...] = ()
    covered: tuple[str, ...] = ()
    parts: tuple[Entry, ...] = ()
    omitted_reasons: Mapping[str, str] = field(default_factory=dict)
    copied: int = 0

    def __post_init__(self) -> None:
        if min(self.wanted, self.allotted, self.used, self.copied) < 0:
            raise ValueError(f"a count of tokens is negative: {self}")
        if self.copied > self.used:
            raise ValueError(f"more tokens are copied than used: {self}")
        if self.used > self.allotted:
            raise ValueError(f"more tokens are used than were allotted: {self}")

    @property
    def without_room(self) -> tuple[str, ...]:
        """Items omitted because they did not fit: all that have no other reason."""
        return tuple(name for name in self.omitted if name not in self.omitted_reasons)

    @property
    def omitted_by_reason(self) -> dict[str, tuple[str, ...]]:
        """The names in `omitted`, grouped by reason; those without a reason are under ""."""
        names_by_reason: dict[str, list[str]] = {}
        for name in self.omitted:
            names_by_reason.setdefault(self.omitted_reasons.get(name, ""), []).append(name)
        return {reason: tuple(names) for reason, names in names_by_reason.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in `--json` output. Optional fields are left out if they are empty."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}  # asdict would copy thousands of names
        data |= {name: list(data[name]) for name in ("omitted", "covered")}
        data |= {"shortened": [each.to_dict() for each in self.shortened], "parts": [part.to_dict() for part in self.parts]}
        data["omitted_reasons"] = dict(self.omitted_reasons)
        return {key: value for key, value in data.items() if value or key not in _OPTIONAL}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        fields = {
            **data,
            "omitted": tuple(data["omitted"]),
            "shortened": tuple(map(Shortened.from_dict, data.get("shortened", ()))),
            "covered": tuple(data.get("covered", ())),
            "parts": tuple(cls.from_dict(each) for each in data.get("parts", ())),
            "omitted_reasons": dict(data.get("omitted_reasons", {})),
        }
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of one window, with entries in prompt order. Raises ValueError, a bug in localrag, for numbers that cannot be true."""

    window: int
    entries: tuple[Entry, ...]
    time: TimeLimit | None = None

    def __post_init__(self) -> None:
        if len({entry.name for entry in self.entries}) < len(self.entries):
            raise ValueError(f"two entries have one name: {[entry.name for entry in self.entries]}")
        if self.window < 0 or self.spare < 0:
            raise ValueError(f"{self.window - self.spare} tokens are allotted in a window of {self.window}")

    @property
    def spare(self) -> int:
        """Tokens of the window that were not allotted."""
        return self.window - sum(entry.allotted for entry in self.entries)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return sum(entry.used for entry in self.entries if entry.name not in WRITTEN)

    def entry(self, name: str) -> Entry:
        """Return the entry with that name. Raises KeyError."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def with_used(self, name: str, used: int, *, copied: int = 0) -> Ledger:
        """Return the same ledger with `used` tokens in one entry, of which `copied` were copied. Raises KeyError."""
        changed = replace(self.entry(name), used=used, copied=copied)
        return replace(self, entries=tuple(changed if entry.name == name else entry for entry in self.entries))

    def unsent(self) -> Ledger:
        """Return the same ledger for a prompt that was not sent: nothing is used."""

        def unused(entry: Entry) -> Entry:
            return replace(entry, used=0, parts=tuple(map(unused, entry.parts)))

        return replace(self, entries=tuple(map(unused, self.entries)))

    def to_dict(self) -> dict[str, Any]:
        """Return the object under `"ledger"` in `--json` output."""
        data = {"window": self.window, "entries": [entry.to_dict() for entry in self.entries], "spare": self.spare}
        return data if self.time is None else data | {"time": self.time.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ledger:
        """Read the ledger that `to_dict` wrote. Raises ValueError if its `spare` does not match its entries."""
        time = TimeLimit.from_dict(data["time"]) if data.get("time") else None
        ledger = cls(data["window"], tuple(Entry.from_dict(entry) for entry in data["entries"]), time)
        if data["spare"] != ledger.spare:
            raise ValueError(f"spare is {data['spare']}, but the entries leave {ledger.spare}")
        return ledger
