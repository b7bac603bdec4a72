"""The command report: summarize the ledgers in the journal, and show its council runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localrag.cli import council_render, options, render, terminal
from localrag.cli.files import STANDARD_OUTPUT, check_free_stdout, write_whole
from localrag.errors import UsageError
from localrag.settings import Settings
from localrag.text.sanitize import one_line, safe

if TYPE_CHECKING:
    from localrag.journal import Journal, StoredCouncil
    from localrag.report import Report, SessionFigures


NEWEST = "last"
_MAX_ID = 2**63 - 1
_MOST_NAMED = 5
_MOST_TASK_CHARS = 60
_EMPTY = "No council has run yet. To run one: localrag council TASK"
_LINES = {
    "planned": council_render.planned_lines,
    "search": council_render.search_lines,
    "budget": council_render.budget_lines,
    "ranking": council_render.ranking_lines,
    "tool": council_render.tool_lines,
    "verdict": council_render.verdict_lines,
    "error": council_render.error_lines,
    "end": council_render.end_lines,
}
_MADE_OF = {"planned": ("plan",), "ranking": ("review",), "tool": ("call",), "verdict": ("call", "verdict")}
"""The kinds of answers that an event was made from."""


class RunId(click.ParamType[int | str]):
    """The ID of a run, or `last`."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:  # noqa: ANN401  # click's signature
        if value == NEWEST:
            return NEWEST
        if not (str(value).isascii() and str(value).isdecimal() and len(str(value)) <= len(str(_MAX_ID))):
            self.fail(f"{value!r} is neither the ID of a run nor {NEWEST}.", param, ctx)
        return min(int(value), _MAX_ID)


def show_run(home: Path, run: int | str, *, as_json: bool) -> None:
    """Print a complete council run. UsageError if the ID is unknown."""
    with _journal(home) as journal:
        council = _run_of(journal, run)
    if as_json:
        terminal.emit(council.to_dict())
        return
    for line in _transcript(council):
        click.echo(council_render.printable(line))


def list_runs(home: Path, last: int, *, as_json: bool) -> None:
    """List the newest council runs, newest last."""
    rows = []
    if _journal_file(home).exists():
        with _journal(home) as journal:
            rows = journal.councils.last(last)
    if as_json:
        terminal.emit({"councils": [row.to_dict() for row in rows]})
    elif not rows:
        terminal.note(_EMPTY)
    else:
        from localrag.report.page import when  # noqa: PLC0415  # weight

        table_rows = ((row.id, when(row.started_at), row.name, one_line(row.task, _MOST_TASK_CHARS), row.state) for row in rows)
        printed = ([council_render.printable(one_line(cell)) for cell in row] for row in table_rows)
        render.table(("ID", "When", "Council", "Task", "State"), printed, right=("ID",))


def _journal_file(home: Path) -> Path:
    from localrag.journal import FILE_NAME  # noqa: PLC0415  # weight

    return home / FILE_NAME


def _journal(home: Path) -> Journal:
    from localrag.journal import Journal  # noqa: PLC0415  # weight

    if not _journal_file(home).exists():
        raise UsageError("The journal has no council runs.", hint=_EMPTY)
    return Journal.open(home)


def _run_of(journal: Journal, run: int | str) -> StoredCouncil:
    newest = [row.id for row in reversed(journal.councils.last(_MOST_NAMED))]
    if not newest:
        raise UsageError("The journal has no council runs.", hint=_EMPTY)
    council = journal.councils.get(newest[0] if isinstance(run, str) else run)
    if council is None:
        raise UsageError(f"The journal has no council run {run}.", hint=f"Newest runs: {', '.join(map(str, newest))}.")
    return council


def _transcript(run: StoredCouncil) -> Iterator[str]:
    """Yield the lines of a run, with a blank line before each step."""
    from localrag.report.page import when  # noqa: PLC0415  # weight

    yield f"Council {one_line(run.name)}, run {run.id}: {run.state}"
    yield when(run.started_at)
    yield ""
    yield from council_render.paragraphs(run.task)
    roles = [line for event in run.events if event.get("event") == "start" for line in council_render.start_lines(event)]
    yield from ["", *roles] if roles else []
    for lines in _steps(run.events):
        yield ""
        yield from lines
    if run.state == "interrupted":
        yield ""
        yield "Interrupted: the process ended before the verdict."
    elif run.state == "running":
        yield ""
        yield "Still running."


def _steps(events: Iterable[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the lines of each event. An answer is shown in the event made from it, or by itself if there is none."""
    waiting: dict[str, Mapping[str, Any]] = {}
    last_budget: Mapping[str, Any] | None = None
    for event in events:
        name, role = str(event.get("event")), str(event.get("role"))
        if name == "said":
            if role in waiting and waiting[role].get("error"):
                yield council_render.said_lines(waiting[role])
            waiting[role] = event
        elif name == "checked":
            yield council_render.proposal_lines(event, waiting.pop(str(event.get("member")), None))
        else:
            is_over = name in ("error", "end")
            for said_by in [each for each, reply in waiting.items() if is_over or reply.get("kind") in _MADE_OF.get(name, ())]:
                answer = waiting.pop(said_by)
                if is_over or answer.get("error"):
                    yield council_render.said_lines(answer)
            if name == "budget" and (again := council_render.budget_again(event, last_budget)):
                yield again
            elif name in _LINES:
                yield _LINES[name](event)
            last_budget = event if name == "budget" else last_budget
    yield from map(council_render.said_lines, waiting.values())


_MOST = 10
"""Maximum rows of each list in a terminal. The JSON and the HTML page show more."""
_BARS = "▁▂▃▄▅▆▇█"


@click.command("report")
@click.option("--session", metavar="NAME", help="Show only this session.")
@click.option(
    "--last",
    type=click.IntRange(1, 1_000_000),
    default=20,
    show_default=True,
    metavar="N",
    help="Number of asks, or council runs, to show, newest first.",
)
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML page with a chart of every window (- for stdout)."
)
@click.option("--force", is_flag=True, help="Overwrite FILE even if it is not a localrag report.")
@click.option("--council", type=RunId(), metavar="ID|last", help="Show the council run with this ID, or the last one.")
@click.option("--councils", is_flag=True, help="List council runs.")
@options.models_file
@options.as_json
def report_command(
    session: str | None,
    last: int,
    html: Path | None,
    force: bool,
    council: int | str | None,
    councils: bool,
    settings: Settings,
    as_json: bool,
) -> None:
    """Show how past questions used their token budgets: tokens used, content cut, and passages supplied but never cited.

    With --council, show the budgets, proposals and verdict of a council run.
    """
    if council is not None or councils:
        others = {"--html": html is not None, "--session": session is not None, "--councils": councils and council is not None}
        _refuse("--councils" if council is None else "--council", others)
        if council is None:
            list_runs(settings.home, last, as_json=as_json)
        else:
            show_run(settings.home, council, as_json=as_json)
        return
    from localrag.journal import FILE_NAME, Journal  # noqa: PLC0415  # weight
    from localrag.report import report  # noqa: PLC0415  # weight
    from localrag.report.page import page  # noqa: PLC0415  # weight

    if html is not None:
        html = _checked(html, force=force, as_json=as_json)
    asks, sessions = [], []
    if (settings.home / FILE_NAME).exists():
        with Journal.open(settings.home) as journal:
            sessions = [each.name for each in journal.sessions()]
            asks = journal.asks(session, last)
    if session is not None and not asks:
        raise _unknown(session, sessions)
    summary = report(asks)
    if as_json:
        terminal.emit(summary.to_dict())
    if not asks:
        terminal.note("The journal is empty. Each question that you ask is recorded there.")
    elif html is not None:
        _write(html, page(summary))
    elif not as_json:
        _show(summary)


def _refuse(option: str, others: Mapping[str, bool]) -> None:
    """UsageError for the first given option that does not work with `option`."""
    for other, is_given in others.items():
        if is_given:
            raise UsageError(f"{other} does not work with {option}.", hint="Leave one out.")


def _unknown(session: str, sessions: Sequence[str]) -> UsageError:
    near = difflib.get_close_matches(session, sessions, n=3) or sessions[-3:]
    hint = f"Did you mean {' or '.join(near)}?" if near else "The journal is empty. Each question that you ask is recorded there."
    return UsageError(f"There is no session {session!r} in the journal.", hint=hint)


def _write(html: Path, text: str) -> None:
    if html == STANDARD_OUTPUT:
        click.echo(text)
        return
    write_whole(html, text, replace=True)
    terminal.note(f"Wrote {safe(str(html))}")


def _checked(path: Path, *, force: bool, as_json: bool) -> Path:
    """Resolve links and return the file to write. UsageError if it must not be overwritten."""
    from localrag.report.page import MARK  # noqa: PLC0415  # weight

    if path == STANDARD_OUTPUT:
        check_free_stdout("--html", as_json=as_json)
        return path
    original_path = path
    try:
        path = path.expanduser().resolve()
        is_broken = path.is_symlink()  # for a link cycle, Python 3.13 returns the path; earlier versions raise an error
    except (RuntimeError, OSError):
        is_broken = True
    if is_broken:
        raise UsageError(f"{original_path} is a broken link.", hint="Use another file for --html.")
    if not path.parent.is_dir():
        raise UsageError(f"There is no folder {path.parent}.", hint="Create it, or use another file for --html.")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file.", hint="Use another file for --html.")
    if path.exists() and not force:
        with path.open("rb") as file:
            if MARK.encode() not in file.read(500):
                raise UsageError(f"{path} exists and is not a localrag report.", hint="Use another file, or --force to overwrite it.")
    return path


def _show(summary: Report) -> None:
    """Print the report as tables."""
    columns = ("Session", "Asks", "In", "Out", "Utilization", "Lowest", "Highest", "Efficiency", "Trend")
    render.table(columns, [_session(each) for each in summary.sessions], right=columns[1:8])
    _list(
        "Cut most often",
        {
            "Section": "section",
            "Asks": "num_asks",
            "Tokens not given": "missing_tokens",
            "Left out": "num_omitted",
            "Shortened": "num_shortened",
        },
        summary.cut_sections,
    )
    _list(
        "Left out most often",
        {"Item": "label", "Times": "num_omitted", "Section": "section", "Source": "source", "Session": "session"},
        summary.omitted_items,
    )
    _list(
        "Retrieved often, never cited",
        {
            "Passage": "label",
            "Retrieved": "num_retrieved",
            "In the prompt": "num_used",
            "Tokens spent": "used_tokens",
            "Source": "source",
            "KB": "kb",
        },
        summary.uncited_chunks,
    )


def _session(each: SessionFigures) -> tuple[object, ...]:
    bars = "".join(_BARS[min(len(_BARS) - 1, int(value * len(_BARS)))] for value in each.utilizations[-20:])
    trend = each.utilization_trend
    halves = f"{_percent(trend.first)} to {_percent(trend.second)}" if trend.first is not None else ""
    shares = (each.mean_utilization, each.lowest_utilization, each.highest_utilization, each.mean_efficiency)
    return each.name, each.num_asks, each.prompt_tokens, each.completion_tokens, *map(_percent, shares), f"{bars} {halves}".strip()


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def _list(title: str, columns: Mapping[str, str], lines: Sequence[object]) -> None:
    """Print a table with a title. `columns` maps each heading to a field."""
    click.echo(f"\n{title}")
    if not lines:
        click.echo("  nothing")
        return
    rows = [[getattr(line, field) for field in columns.values()] for line in lines[:_MOST]]
    numbers = [heading for heading, cell in zip(columns, rows[0], strict=True) if isinstance(cell, int)]
    render.table(tuple(columns), rows, right=numbers)
    if len(lines) > _MOST:
        click.echo(f"  and {len(lines) - _MOST} more")
