"""A report as one HTML page that opens anywhere: no script, no network, everything from outside escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from localrag.journal import StoredAsk
from localrag.report.drawing import drawing
from localrag.report.figures import Report, SessionFigures, Trend, mean
from localrag.report.markup import count, number_cell, percent, table, text
from localrag.report.style import STYLE

MARK = '<meta name="generator" content="localrag report">'
"""By this a page is known as ours, within its first 500 characters."""

MOST = 8
"""How many lines the lists of the whole report show; the JSON has all."""


def page(report: Report) -> str:
    """The whole page."""
    asks = report.asks
    since, until = (when(ask.started_at) for ask in (asks[0], asks[-1])) if asks else ("", "")
    body = [
        f'<header><h1>Where the tokens went</h1><p class="soft">{count(len(asks), "ask")}, {since} to {until}</p></header>',
        _tiles(report),
        _sessions(report.sessions),
        _lists(report),
        "<h2>Ask by ask, newest first</h2>",
        *(_ask(ask) for ask in reversed(asks)),
        _FOOTER,
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{MARK}\n"
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>localrag report: {count(len(asks), 'ask')}</title>\n<style>{STYLE}</style>\n</head>\n"
    )
    return f"{head}<body>\n<main>\n{chr(10).join(filter(None, body))}\n</main>\n</body>\n</html>\n"


_FOOTER = """<footer class="soft"><p>The upper bar of each ask is a CSS flex container as wide as its window, one pixel a token, and only
then scaled to this page. Every section in it has its own numbers as flex-grow, flex-shrink, flex-basis, min-width and max-width, so
your browser shares the window out again while it draws. localrag gives whole tokens and the browser fractions: they differ by less
than one. The lower bar is what became of it: the pale part of a section is what it was allotted and did not use.</p>
<p>Utilization: prompt and answer, of the window. Efficiency: the evidence that the answer cites, of the evidence in the prompt, in
tokens.</p></footer>"""


def when(at: float) -> str:
    """Seconds since the epoch as local time."""
    try:
        return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "?"


def _tiles(report: Report) -> str:
    asks = report.asks
    efficiencies = [ask.efficiency for ask in asks if ask.efficiency is not None]
    tiles = (
        ("Tokens in", f"{sum(ask.prompt_tokens for ask in asks):,}"),
        ("Of these cached", f"{sum(ask.cached_tokens for ask in asks):,}"),
        ("Tokens out", f"{sum(ask.completion_tokens for ask in asks):,}"),
        ("Mean utilization", percent(mean(ask.utilization for ask in asks))),
        ("Highest utilization", percent(max((ask.utilization for ask in asks), default=None))),
        ("Mean efficiency", percent(mean(efficiencies))),
    )
    return f'<dl class="tiles">{"".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles)}</dl>'


def _sessions(sessions: Sequence[SessionFigures]) -> str:
    rows = [
        [
            f'<th scope="row">{text(each.name)}</th>',
            *map(number_cell, (f"{each.num_asks:,}", f"{each.prompt_tokens:,}", f"{each.completion_tokens:,}")),
            *map(number_cell, (percent(each.mean_utilization), percent(each.lowest_utilization), percent(each.highest_utilization))),
            number_cell(percent(each.mean_efficiency)),
            f"<td>{_trend(each)}</td>",
        ]
        for each in sessions
    ]
    columns = (
        "Session",
        "#Asks",
        "#Tokens in",
        "#Tokens out",
        "#Utilization",
        "#Lowest",
        "#Highest",
        "#Efficiency",
        "Trend of utilization",
    )
    return "<h2>Sessions</h2>" + table(columns, rows)


def _trend(session: SessionFigures) -> str:
    bars = "".join(f'<i style="height:{min(100, 100 * value):.0f}%"></i>' for value in session.utilizations[-40:])
    said = halves(session.utilization_trend)
    return f'<span class="trend" role="img" aria-label="Utilization by ask, {said}">{bars}</span> <span class="soft">{said}</span>'


def halves(trend: Trend) -> str:
    """The first half against the second, in words."""
    return f"{percent(trend.first)} to {percent(trend.second)}" if trend.first is not None else "one ask"


def _lists(report: Report) -> str:
    cut = [
        [f"<td>{text(each.section)}</td>", *map(number_cell, (f"{each.num_asks:,}", f"{each.missing_tokens:,}")),
         *map(number_cell, (f"{each.num_omitted:,}", f"{each.num_shortened:,}"))]
        for each in report.cut_sections[:MOST]
    ]  # fmt: skip
    omitted = [
        [f"<td>{text(each.label)}</td>", f'<td class="wide">{text(each.source)}</td>', f"<td>{text(each.section)}</td>",
         f"<td>{text(each.session)}</td>", number_cell(f"{each.num_omitted:,}")]
        for each in report.omitted_items[:MOST]
    ]  # fmt: skip
    uncited = [
        [f"<td>{text(each.label)}</td>", f'<td class="wide">{text(each.source)}</td>', f"<td>{text(each.kb)}</td>",
         *map(number_cell, (f"{each.num_retrieved:,}", f"{each.num_used:,}", f"{each.used_tokens:,}"))]
        for each in report.uncited_chunks[:MOST]
    ]  # fmt: skip
    return "\n".join(
        (
            _list("Cut most often", ("Section", "#Asks", "#Tokens not given", "#Left out", "#Shortened"), cut, len(report.cut_sections)),
            _list("Left out most often", ("Item", "Source", "Section", "Session", "#Times"), omitted, len(report.omitted_items)),
            _list(
                "Retrieved often, never cited",
                ("Passage", "Source", "Knowledge base", "#Retrieved", "#In the prompt", "#Tokens spent"),
                uncited,
                len(report.uncited_chunks),
            ),
        )
    )


def _list(title: str, columns: Sequence[str], rows: Sequence[Iterable[str]], num: int) -> str:
    if not rows:
        return f'<h2>{title}</h2><p class="soft">Nothing.</p>'
    more = f'<p class="soft">and {num - len(rows):,} more</p>' if num > len(rows) else ""
    return f"<h2>{title}</h2>{table(columns, rows)}{more}"


def _ask(ask: StoredAsk) -> str:
    facts = [
        when(ask.started_at), f"session {text(ask.session)}", text(ask.command), text(ask.model),
        f"window {ask.window:,}, bound by {text(ask.bound)}", text(ask.strategy), f"finish {text(ask.finish_reason)}",
        f"{percent(ask.utilization)} used",
    ]  # fmt: skip
    if ask.efficiency is not None:
        facts.append(f"{percent(ask.efficiency)} of its evidence cited")
    if "total_s" in ask.timings:
        facts.append(f"{ask.timings['total_s']:.1f} s")
    if ask.ledger.time is not None:
        limit = ask.ledger.time
        facts.append(f"limit {limit.max_seconds:g} s, planned {limit.planned_s:.1f} s")
    title = text(ask.question[:300]) + ("…" if len(ask.question) > 300 else "")
    line = " · ".join(fact for fact in facts if fact)
    return f'<article><h3>{title}</h3><p class="soft">{line}</p>{drawing(ask)}{_evidence(ask)}</article>'


def _evidence(ask: StoredAsk) -> str:
    if not ask.evidence:
        return ""
    rows = [
        [
            f"<td>{text(each.label)}</td>",
            f'<td class="wide">{text(each.source)}</td>',
            number_cell(f"{each.tokens:,}"),
            number_cell("" if each.relevance is None else f"{each.relevance:.3f}"),
            f"<td>{text(each.tier)}</td>",
            f"<td>{text(each.level)}</td>",
            f"<td>{text(each.state)}</td>",
            '<td class="yes">cited</td>' if each.cited else "<td></td>",
        ]
        for each in ask.evidence
    ]
    columns = ("Passage", "Source", "#Tokens", "#Relevance", "Tier", "Level", "State", "Cited")
    num_cited = sum(each.cited for each in ask.evidence)
    title = f"{count(len(rows), 'passage')} offered, {sum(each.is_in_prompt for each in ask.evidence)} in the prompt, {num_cited} cited"
    return f"<details><summary>{title}</summary>{table(columns, rows)}</details>"
