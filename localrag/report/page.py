"""Render a report as one HTML page that opens anywhere: no scripts, no network, all external text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape

from localrag.budget import Entry
from localrag.budget.sections import SPECS, colour_of
from localrag.journal import Allotment, StoredAsk
from localrag.report import Report, SessionFigures, Trend, mean
from localrag.text.sanitize import safe


def plain(value: str) -> str:
    """Escape text for an attribute."""
    return escape(safe(value))


def text(value: str) -> str:
    """Escape text and isolate it, so that its writing direction does not affect its surroundings."""
    return f"<bdi>{plain(value)}</bdi>" if value else ""


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def count(num: int, thing: str) -> str:
    return f"{num:,} {thing}{'' if num == 1 else 's'}"


def number_cell(value: str) -> str:
    return f'<td class="n">{value}</td>'


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Render a table of HTML cells. A column name that begins with # marks numbers. A wide table scrolls on its own, also with the
    keyboard.
    """
    heads = "".join(f'<th scope="col" class="n">{c[1:]}</th>' if c.startswith("#") else f'<th scope="col">{c}</th>' for c in columns)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


SPARE_COLOUR = "var(--spare)"

STYLE = """
@property --page { syntax: "<length>"; inherits: true; initial-value: 0px; }
@property --k { syntax: "<number>"; inherits: true; initial-value: 1; }
:root {
  color-scheme: light dark;
  --paper: #f6f6f3; --card: #ffffff; --ink: #1b1e24; --soft: #5c6370; --line: #dcdcd6; --spare: #e9e9e4; --mark: #25803f;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #0f1216; --card: #15181d; --ink: #e7e9ee; --soft: #9aa3b2; --line: #2b3038; --spare: #23272e; --mark: #5cc27c; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1.02rem; line-height: 1.4; margin: 0 0 .15rem; font-weight: 600; overflow-wrap: anywhere; }
p { margin: .25rem 0; }
.soft, caption, figcaption { color: var(--soft); font-size: .86rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0 0; padding: 0; }
.tiles div, article, .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles div { padding: .7rem .9rem; }
.tiles dt { color: var(--soft); font-size: .82rem; }
.tiles dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
article { padding: 1.1rem 1.25rem 1.25rem; margin: 0 0 1.25rem; }
article .scroll { border: 0; border-radius: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; padding: .5rem .75rem 0; }
th, td { padding: .38rem .75rem; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: .82rem; white-space: nowrap; }
tbody th { font-weight: 500; white-space: nowrap; }
article th:first-child, article td:first-child { padding-left: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { min-width: 12rem; overflow-wrap: anywhere; }
.part { padding-left: 1.35rem !important; color: var(--soft); }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .5em; vertical-align: -.05em; }
.spare { border: 1px dashed var(--soft); }
figure { margin: .9rem 0 .4rem; }
figcaption { margin: .55rem 0 .25rem; }
.frame { container-type: inline-size; overflow-x: auto; overflow-y: hidden; border-radius: 6px; background: var(--spare); }
@supports (transform: scaleX(tan(atan2(1cqi, 1px)))) { .frame { overflow: clip; } }
.window {
  --page: 100cqi; --k: tan(atan2(var(--page), var(--width)));
  display: flex; width: var(--width); transform: scaleX(var(--k)); transform-origin: 0 0;
}
.given { height: 2.6rem; }
.used { height: 1.3rem; }
.window > div { position: relative; overflow: hidden; color: #fff; box-shadow: inset calc(-1px / var(--k)) 0 var(--card); }
.window > div > i { position: absolute; inset: 0 auto 0 0; background: var(--c); }
.given > div { background: var(--c); }
.used > div { background: color-mix(in srgb, var(--c) 30%, var(--card)); }
.window span {
  position: absolute; left: 0; width: calc(100% * var(--k)); transform: scaleX(calc(1 / var(--k))); transform-origin: 0 0;
  padding: 0 .45rem; line-height: 1.1; font-size: .8rem; white-space: nowrap; overflow: hidden; text-overflow: ellipsis;
}
.window b { display: block; font-weight: 600; margin-top: .42rem; overflow: hidden; text-overflow: ellipsis; }
.axis { display: flex; justify-content: space-between; color: var(--soft); font-size: .75rem; font-variant-numeric: tabular-nums; }
.trend { display: inline-flex; align-items: flex-end; gap: 1px; height: 1.3rem; vertical-align: bottom; }
.trend i { width: 4px; background: var(--mark); border-radius: 1px 1px 0 0; min-height: 1px; }
.yes { color: var(--mark); font-weight: 600; }
details { margin-top: .6rem; }
td details { margin: 0; }
summary { cursor: pointer; color: var(--soft); font-size: .88rem; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; max-width: 46rem; }
@media (max-width: 40rem) {
  main { padding: 1.25rem .75rem 3rem; }
  article { padding: .9rem .8rem 1rem; }
  th, td { padding: .35rem .5rem; }
  .tiles { grid-template-columns: repeat(2, 1fr); }
  .window span.small { display: none; }
  .wide { min-width: 7rem; }
}
@media print { body { background: none; } article { break-inside: avoid; } }
"""


def shrink_multiple(window: int, sections: Sequence[Allotment]) -> float:
    """Return the factor for all shrink factors in a drawing, so that CSS gives the exact sizes; 1 if none is needed.

    If the shrink factors of the flexible sections add up to less than 1, CSS removes only that fraction of the excess and
    overflows; localrag never does. Multiplying all factors by the same number keeps their ratio, and makes the smallest 1.
    Sections that end between their limits are flexible to the end, so if their factors reach 1, CSS needs no correction.
    """
    hypothetical = sum(max(each.min, _capped(each)) for each in sections)
    factors = [each.shrink for each in sections if each.shrink > 0]
    if hypothetical <= window or not factors or min(factors) >= 1:
        return 1.0
    flexible = sum(each.shrink for each in sections if each.min < each.allotted < _capped(each))
    return 1.0 if flexible >= 1 else 1 / min(factors)


def item_style(section: Allotment, multiple: float = 1.0) -> str:
    """Return the CSS of the section as a flex item."""
    most = "none" if section.max is None else f"{section.max}px"
    shrink = _number(section.shrink * multiple)
    return f"flex:{_number(section.grow)} {shrink} {section.basis}px;min-width:{section.min}px;max-width:{most}"


def _capped(section: Allotment) -> int:
    return section.basis if section.max is None else min(section.basis, section.max)


def _number(value: float) -> str:
    return f"{value:.12g}" if 1e-6 <= value < 1e15 or not value else f"{value:.15f}"


_LABELLED, _LABELLED_ON_A_PHONE = 0.06, 0.18
"""A section with a smaller share of the window has no label in the drawing; the table names it."""
_NAMED = 12
"""Number of omitted items that are visible without unfolding."""


def drawing(ask: StoredAsk) -> str:
    """Render the two bars, the table that is their legend, and the numbers of the negotiation."""
    order = {entry.name: at for at, entry in enumerate(ask.ledger.entries)}
    sections = sorted(ask.sections, key=lambda each: order.get(each.name, len(order)))  # the order does not affect the drawing
    multiple = shrink_multiple(ask.window, sections)
    return "".join(
        (
            "<figure>",
            _negotiated(ask, sections, multiple) if sections else "",
            _used(ask),
            f'<div class="axis" aria-hidden="true"><span>0</span><span>{ask.window:,} tokens</span></div></figure>',
            _accounts(ask),
            _numbers(sections, multiple) if sections else "",
        )
    )


def _negotiated(ask: StoredAsk, sections: Sequence[Allotment], multiple: float) -> str:
    items = []
    for each in sections:
        share = each.allotted / max(1, ask.window)
        size = "" if share >= _LABELLED_ON_A_PHONE else ' class="small"'
        label = f"<span{size}><b>{plain(each.name)}</b>{each.allotted:,}</span>" if share >= _LABELLED else ""
        hint = f"{plain(each.name)}: {each.allotted:,} tokens"
        items.append(f'<div class="section" style="{item_style(each, multiple)};--c:{colour_of(each.name)}" title="{hint}">{label}</div>')
    summary = ", ".join(f"{plain(each.name)} {each.allotted:,}" for each in sections)
    bar = f'<div class="window given" role="img" aria-label="Allotted: {summary}" style="--width:{ask.window}px">{"".join(items)}</div>'
    return f'<figcaption>Allotted</figcaption><div class="frame">{bar}</div>'


def _used(ask: StoredAsk) -> str:
    items = [
        f'<div style="flex:none;width:{each.allotted}px;--c:{colour_of(each.name)}" '
        f'title="{plain(each.name)}: {each.used:,} of {each.allotted:,} tokens used"><i style="width:{each.used}px"></i></div>'
        for each in ask.ledger.entries
    ]
    summary = ", ".join(f"{plain(each.name)} {each.used:,} of {each.allotted:,}" for each in ask.ledger.entries)
    bar = f'<div class="window used" role="img" aria-label="Used: {summary}" style="--width:{ask.ledger.window}px">{"".join(items)}</div>'
    return f'<figcaption>Used</figcaption><div class="frame">{bar}</div>'


def _accounts(ask: StoredAsk) -> str:
    rows = [row for entry in ask.ledger.entries for row in _entry_rows(entry)]
    swatch = f'<i class="swatch spare" style="background:{SPARE_COLOUR}"></i>'
    rows.append([f'<th scope="row">{swatch}spare</th>', "<td></td>", number_cell(f"{ask.ledger.spare:,}"), "<td></td>", "<td></td>"])
    return table(("Section", "#Wanted", "#Allotted", "#Used", "Left out"), rows)


def _entry_rows(entry: Entry) -> Iterator[list[str]]:
    """Yield a section's row, and a row for each of its tiers."""
    swatch = f'<i class="swatch" style="background:{colour_of(entry.name)}"></i>'
    hint = f' title="{plain(SPECS[entry.name].help)}"' if entry.name in SPECS else ""
    yield [f'<th scope="row"{hint}>{swatch}{text(entry.name)}</th>', *_amounts(entry)]
    for part in entry.parts:
        yield [f'<th scope="row" class="part">{text(part.name)}</th>', *_amounts(part)]


def _amounts(entry: Entry) -> list[str]:
    shortened = [f"{each.id} to {each.form} ({each.tokens:,} of {each.of:,})" for each in entry.shortened]
    omitted = [(f"{text(reason)}: " if reason else "", names) for reason, names in entry.omitted_by_reason.items()]
    groups = (*omitted, ("shortened: ", shortened), ("summarized: ", entry.covered))
    left_out = "".join(f"<div>{start}{_names(names)}</div>" for start, names in groups if names)
    numbers = (number_cell(f"{value:,}") for value in (entry.wanted, entry.allotted, entry.used))
    return [*numbers, f'<td class="wide">{left_out}</td>']


def _names(names: Sequence[str]) -> str:
    """List all names, the first ones visible."""
    first, rest = (", ".join(map(text, each)) for each in (names[:_NAMED], names[_NAMED:]))
    more = f"<details><summary>and {len(names) - _NAMED:,} more</summary>{rest}</details>" if rest else ""
    return f"{first}{more}"


def _numbers(sections: Sequence[Allotment], multiple: float) -> str:
    rows = [
        [
            f'<th scope="row">{text(each.name)}</th>',
            *map(number_cell, (f"{each.basis:,}", f"{each.min:,}", "none" if each.max is None else f"{each.max:,}")),
            *map(number_cell, (f"{each.grow:g}", f"{each.shrink:g}", f"{each.allotted:,}")),
        ]
        for each in sections
    ]
    note = ""
    if multiple != 1:
        note = (
            f'<p class="soft">Drawn with all shrink factors times {multiple:.4g}, their ratio unchanged: they add up to less than 1, '
            "and CSS would overflow where localrag never does.</p>"
        )
    columns = ("Section", "#Basis", "#Min", "#Max", "#Grow", "#Shrink", "#Allotted")
    return f"<details><summary>The numbers of the negotiation</summary>{table(columns, rows)}</details>{note}"


MARK = '<meta name="generator" content="localrag report">'
"""Marks a page as ours, within its first 500 characters."""

MOST = 8
"""Most rows in the lists of the report; the JSON output has all."""


def page(report: Report) -> str:
    """Render the whole page."""
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
    """Format seconds since the epoch as local time."""
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
    summary = halves(session.utilization_trend)
    return f'<span class="trend" role="img" aria-label="Utilization by ask, {summary}">{bars}</span> <span class="soft">{summary}</span>'


def halves(trend: Trend) -> str:
    """Describe the first half against the second."""
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
        skipped = f", no time for {text(', '.join(limit.skipped))}" if limit.skipped else ""
        facts.append(f"limit {limit.max_seconds:g} s, planned {limit.planned_s:.1f} s{skipped}")
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
