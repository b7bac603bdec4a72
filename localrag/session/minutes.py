"""The minutes of a council's run: each event is told as it happens, and kept in the journal if it is to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrag.errors import LocalragError
from localrag.session.recorder import open_journal

if TYPE_CHECKING:
    from localrag.journal import Journal

Event = dict[str, Any]
"""What happened, fit for JSON; "event" names it. docs/how-to/council.md lists them."""


class Minutes:
    """Tells `on_event`. A fault of the journal costs no verdict: it becomes a warning, and nothing more is kept."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._journal: Journal | None = None
        self.id: int | None = None
        """Of the run in the journal; None where it is not kept."""
        self.warnings: list[str] = []

    def begin(self, home: Path, council: str, task: str, about: Mapping[str, Any]) -> None:
        """Keep the run from now on."""
        self._journal, warnings = open_journal(home)
        self.warnings += warnings
        self.id = self._kept(lambda journal: journal.councils.begin(council, task, about))

    def tell(self, event: str, data: Mapping[str, Any]) -> None:
        told: Event = {"event": event, **data}
        number = self.id
        if number is not None:
            self._kept(lambda journal: journal.councils.add(number, told))
        self._on_event(told)

    def end(self, state: str) -> None:
        number = self.id
        if number is not None:
            self._kept(lambda journal: journal.councils.end(number, state))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _kept(self, keep: Callable[[Journal], int | None]) -> int | None:
        try:
            return None if self._journal is None else keep(self._journal)
        except (LocalragError, OSError) as error:
            self.warnings.append(f"This is not kept in the journal: {error}")
            self.id = None
            return None
