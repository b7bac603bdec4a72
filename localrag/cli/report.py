"""report: what became of the budgets of past asks, and what councils came to."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import council_report, display, options, text
from localrag.cli.files import write_whole
from localrag.errors import UsageError
from localrag.settings import Settings

if TYPE_CHECKING:
    from localrag.report import Report, SessionFigures

_MOST = 10
"""How many lines each list shows in a terminal; the JSON and the page have more."""
_BARS = "▁▂▃▄▅▆▇█"


@click.command("report")
@click.option("--session", metavar="NAME", help="Only this session.")
@click.option(
    "--last", type=click.IntRange(1, 1_000_000), default=20, show_default=True, metavar="N", help="The newest N asks, or runs of councils."
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with every window drawn.")
@click.option("--force", is_flag=True, help="Overwrite FILE even if it is no localrag report.")
@click.option("--council", type=council_report.RunId(), metavar="ID|last", help="Show this run of a council again, or the newest.")
@click.option("--councils", is_flag=True, help="List the runs of councils.")
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
    """Show what became of the budgets of past asks: what was used, what was cut, what was supplied and never cited.

    With --council, a run of a council is shown again, budget by budget up to its verdict.
    """
    if council is not None or councils:
        beside = {"--html": html is not None, "--session": session is not None, "--councils": councils and council is not None}
        _refuse("--councils" if council is None else "--council", beside)
        if council is None:
            council_report.show_all(settings.home, last, as_json=as_json)
        else:
            council_report.show(settings.home, council, as_json=as_json)
        return
    from localrag.journal import FILE_NAME, Journal  # noqa: PLC0415  # weight
    from localrag.report import page, report  # noqa: PLC0415  # weight

    if html is not None:
        html = _checked(html, force=force)
    asks, sessions = [], []
    if (settings.home / FILE_NAME).exists():
        with Journal.open(settings.home) as journal:
            sessions = [each.name for each in journal.sessions()]
            asks = journal.asks(session, last)
    if session is not None and not asks:
        raise _unknown(session, sessions)
    found = report(asks)
    if as_json:
        text.emit(found.to_dict())
    if not asks:
        text.note("The journal is empty: each ask leaves its budget there.")
    elif html is not None:
        write_whole(html, page(found), replace=True)
        text.note(f"Wrote {text.safe(str(html))}")
    elif not as_json:
        _show(found)


def _refuse(asked: str, beside: Mapping[str, bool]) -> None:
    """UsageError for the first option that is given beside one it does not go with."""
    for option, is_given in beside.items():
        if is_given:
            raise UsageError(f"{option} does not go with {asked}.", hint="Leave one of them out.")


def _unknown(session: str, sessions: Sequence[str]) -> UsageError:
    near = difflib.get_close_matches(session, sessions, n=3) or sessions[-3:]
    hint = f"Is it one of these? {', '.join(near)}" if near else "The journal is empty: each ask leaves its budget there."
    return UsageError(f"There is no session {session!r} in the journal.", hint=hint)


def _checked(path: Path, *, force: bool) -> Path:
    """The file that may be written, links followed. UsageError for one that should not be."""
    from localrag.report import MARK  # noqa: PLC0415  # weight

    if str(path) == "-":
        raise UsageError("A page is written to a file, not to standard output.", hint="Give --html a file name, such as report.html.")
    given = path
    try:
        path = path.expanduser().resolve()
        leads_nowhere = path.is_symlink()  # of a circle of links, Python 3.13 gives the path, and those before it an error
    except (RuntimeError, OSError):
        leads_nowhere = True
    if leads_nowhere:
        raise UsageError(f"{given} leads nowhere.", hint="Give --html the name of a file.")
    if not path.parent.is_dir():
        raise UsageError(f"The folder {path.parent} does not exist.", hint="Make it, or write the page to another folder.")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file.", hint="Give --html the name of a file.")
    if path.exists() and not force:
        with path.open("rb") as file:
            if MARK.encode() not in file.read(500):
                raise UsageError(f"{path} exists and is no report of localrag.", hint="Give another name, or --force to overwrite it.")
    return path


def _show(found: Report) -> None:
    """The report as tables."""
    columns = ("Session", "Asks", "In", "Out", "Utilization", "Lowest", "Highest", "Efficiency", "Trend")
    display.table(columns, [_session(each) for each in found.sessions], right=columns[1:8])
    _list(
        "Cut most often",
        {
            "Section": "section",
            "Asks": "num_asks",
            "Tokens not given": "missing_tokens",
            "Left out": "num_omitted",
            "Shortened": "num_shortened",
        },
        found.cut_sections,
    )
    _list(
        "Left out most often",
        {"Item": "label", "Times": "num_omitted", "Section": "section", "Source": "source", "Session": "session"},
        found.omitted_items,
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
        found.uncited_chunks,
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
    """A table under its title; `columns` maps a heading to the field that it shows."""
    click.echo(f"\n{title}")
    if not lines:
        click.echo("  nothing")
        return
    rows = [[getattr(line, field) for field in columns.values()] for line in lines[:_MOST]]
    numbers = [heading for heading, cell in zip(columns, rows[0], strict=True) if isinstance(cell, int)]
    display.table(tuple(columns), rows, right=numbers)
    if len(lines) > _MOST:
        click.echo(f"  and {len(lines) - _MOST} more")
