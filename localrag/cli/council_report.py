"""report --council and --councils: runs of councils that the journal keeps, shown again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localrag.cli import council_text, display, text
from localrag.errors import UsageError

if TYPE_CHECKING:
    from localrag.journal import Journal, StoredCouncil

NEWEST = "last"
_MAX_ID = 2**63 - 1
_MOST_NAMED = 5
_MOST_TASK_CHARS = 60
_EMPTY = "No council has been held yet: localrag council holds one."
_LINES = {
    "planned": council_text.planned_lines,
    "search": council_text.search_lines,
    "budget": council_text.budget_lines,
    "ranking": council_text.ranking_lines,
    "tool": council_text.tool_lines,
    "verdict": council_text.verdict_lines,
    "error": council_text.error_lines,
    "end": council_text.end_lines,
}
_MADE_OF = {"planned": ("plan",), "ranking": ("review",), "tool": ("call",), "verdict": ("call", "verdict")}
"""Of which answers an event was made."""


class RunId(click.ParamType[int | str]):
    """The id of a run, or `last`."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:  # noqa: ANN401  # click's signature
        if value == NEWEST:
            return NEWEST
        if not (str(value).isascii() and str(value).isdecimal() and len(str(value)) <= len(str(_MAX_ID))):
            self.fail(f"{value!r} is neither the number of a run nor {NEWEST}.", param, ctx)
        return min(int(value), _MAX_ID)


def show(home: Path, run: int | str, *, as_json: bool) -> None:
    """One run, whole. UsageError if there is none of that id."""
    with _opened(home) as journal:
        found = _found(journal, run)
    if as_json:
        text.emit(found.to_dict())
        return
    for line in _transcript(found):
        click.echo(council_text.printable(line))


def show_all(home: Path, last: int, *, as_json: bool) -> None:
    """The newest runs as a list, the newest last."""
    rows = []
    if _path(home).exists():
        with _opened(home) as journal:
            rows = journal.councils.last(last)
    if as_json:
        text.emit({"councils": [row.to_dict() for row in rows]})
    elif not rows:
        text.note(_EMPTY)
    else:
        from localrag.report import when  # noqa: PLC0415  # weight

        shown = ((row.id, when(row.started_at), row.name, text.one_line(row.task, _MOST_TASK_CHARS), row.state) for row in rows)
        printed = ([council_text.printable(text.one_line(cell)) for cell in row] for row in shown)
        display.table(("ID", "When", "Council", "Task", "State"), printed, right=("ID",))


def _path(home: Path) -> Path:
    from localrag.journal import FILE_NAME  # noqa: PLC0415  # weight

    return home / FILE_NAME


def _opened(home: Path) -> Journal:
    from localrag.journal import Journal  # noqa: PLC0415  # weight

    if not _path(home).exists():
        raise UsageError("There is no run of a council in the journal.", hint=_EMPTY)
    return Journal.open(home)


def _found(journal: Journal, run: int | str) -> StoredCouncil:
    newest = [row.id for row in reversed(journal.councils.last(_MOST_NAMED))]
    if not newest:
        raise UsageError("There is no run of a council in the journal.", hint=_EMPTY)
    found = journal.councils.get(newest[0] if isinstance(run, str) else run)
    if found is None:
        raise UsageError(f"There is no run {run} of a council in the journal.", hint=f"The newest: {', '.join(map(str, newest))}.")
    return found


def _transcript(run: StoredCouncil) -> Iterator[str]:
    """A run as it was told, a blank line before each step."""
    from localrag.report import when  # noqa: PLC0415  # weight

    yield f"Council {text.one_line(run.name)}, run {run.id}: {run.state}"
    yield when(run.started_at)
    yield ""
    yield from council_text.paragraphs(run.task)
    roles = [line for event in run.events if event.get("event") == "start" for line in council_text.start_lines(event)]
    yield from ["", *roles] if roles else []
    for lines in _steps(run.events):
        yield ""
        yield from lines
    if run.state == "interrupted":
        yield ""
        yield "Interrupted: its process ended before the verdict. All that was told until then stands above."
    elif run.state == "running":
        yield ""
        yield "It still runs."


def _steps(events: Iterable[Mapping[str, Any]]) -> Iterator[list[str]]:
    """The lines of each event that shows something. An answer shows as what was made of it, and by itself where nothing was."""
    waiting: dict[str, Mapping[str, Any]] = {}
    for event in events:
        name, role = str(event.get("event")), str(event.get("role"))
        if name == "said":
            if role in waiting and waiting[role].get("error"):
                yield council_text.said_lines(waiting[role])
            waiting[role] = event
        elif name == "checked":
            yield council_text.proposal_lines(event, waiting.pop(str(event.get("member")), None))
        else:
            is_over = name in ("error", "end")
            for said_by in [each for each, said in waiting.items() if is_over or said.get("kind") in _MADE_OF.get(name, ())]:
                said = waiting.pop(said_by)
                if is_over or said.get("error"):
                    yield council_text.said_lines(said)
            if name in _LINES:
                yield _LINES[name](event)
    yield from map(council_text.said_lines, waiting.values())
