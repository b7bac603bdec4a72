"""What became of a budget: for each section what it wanted, was allotted and used, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

ANSWER = "answer"
"""The one section that the model writes; all others are the prompt."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One section's line, in tokens. `omitted` names each chunk, message or tool that was left out."""

    name: str
    wanted: int
    allotted: int
    used: int
    omitted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if min(self.wanted, self.allotted, self.used) < 0:
            raise ValueError(f"a count of tokens is negative: {self}")
        if self.used > self.allotted:
            raise ValueError(f"more tokens are used than were allotted: {self}")


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of one window, entries in the order of the prompt. ValueError, our own bug, if the numbers cannot be true."""

    window: int
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if len({entry.name for entry in self.entries}) < len(self.entries):
            raise ValueError(f"two entries have one name: {[entry.name for entry in self.entries]}")
        if self.window < 0 or self.spare < 0:
            raise ValueError(f"{self.window - self.spare} tokens are allotted in a window of {self.window}")

    @property
    def spare(self) -> int:
        """Tokens of the window that were allotted to no section."""
        return self.window - sum(entry.allotted for entry in self.entries)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens that the model is given."""
        return sum(entry.used for entry in self.entries if entry.name != ANSWER)

    def entry(self, name: str) -> Entry:
        """The entry of that name; KeyError if there is none."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def with_used(self, name: str, used: int) -> Ledger:
        """The same ledger, with that many tokens used by one entry; KeyError if there is none of that name."""
        changed = replace(self.entry(name), used=used)
        return replace(self, entries=tuple(changed if entry.name == name else entry for entry in self.entries))

    def to_dict(self) -> dict[str, Any]:
        """The object under `"ledger"` in `--json` output."""
        entries = [asdict(entry) | {"omitted": list(entry.omitted)} for entry in self.entries]
        return {"window": self.window, "entries": entries, "spare": self.spare}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ledger:
        """The ledger that `to_dict` wrote; ValueError if its `spare` does not follow from its entries."""
        ledger = cls(data["window"], tuple(Entry(**{**entry, "omitted": tuple(entry["omitted"])}) for entry in data["entries"]))
        if data["spare"] != ledger.spare:
            raise ValueError(f"spare is {data['spare']}, but the entries leave {ledger.spare}")
        return ledger
