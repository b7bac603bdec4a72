"""Show an answer in a notebook: its text, its sources and its ledger as a piece of HTML, all external text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from localrag.budget import Entry, Ledger
from localrag.report.page import number_cell, plain, table, text
from localrag.types import Citation, Hit


def answer_html(answer: str, remark: str, *, citations: Sequence[Citation], hits: Sequence[Hit], ledger: Ledger) -> str:
    """Render an answer as HTML without scripts or styles of its own, except inline ones.

    Each citation names its source when the mouse rests on it; one of a passage that was not supplied is struck through. `remark` is shown
    below the text, such as what cut the answer short.
    """
    sources = {hit.label: f"{hit.chunk.source} {hit.chunk.place}".strip() for hit in hits}
    parts = [f'<p style="white-space: pre-wrap">{"".join(_cited(answer, citations, sources))}</p>']
    if remark:
        parts.append(f"<p><em>{text(remark)}</em></p>")
    if hits:
        cited = {each.label for each in citations if each.supplied}
        rows = [_source_row(hit, is_cited=hit.label in cited) for hit in hits]
        parts.append(_section(f"Sources: {len(hits)}", table(("Tag", "Source", "Place", "Heading", "#Score", "Cited"), rows)))
    used = sum(entry.used for entry in ledger.entries)
    rows = [_ledger_row(entry) for entry in ledger.entries]
    parts.append(
        _section(f"Ledger: {used:,} of {ledger.window:,} tokens", table(("Section", "#Wanted", "#Allotted", "#Used", "#Left out"), rows))
    )
    return f"<div>{''.join(parts)}</div>"


def _cited(answer: str, citations: Iterable[Citation], sources: dict[str, str]) -> Iterator[str]:
    """Yield the text with its citations marked. Citations of one bracket share a mark."""
    marks: dict[tuple[int, int], list[Citation]] = {}
    for each in citations:
        for span in each.spans:
            marks.setdefault(span, []).append(each)
    at = 0
    for (start, end), cited in sorted(marks.items()):
        if start < at:
            continue
        yield plain(answer[at:start])
        title = plain("; ".join(sources.get(each.label, "not supplied") for each in cited))
        name = "mark" if all(each.supplied for each in cited) else "del"
        yield f'<{name} title="{title}">{plain(answer[start:end])}</{name}>'
        at = end
    yield plain(answer[at:])


def _source_row(hit: Hit, *, is_cited: bool) -> list[str]:
    chunk = hit.chunk
    cells = (f"[{hit.label}]", chunk.source, chunk.place, chunk.heading)
    return [*(f"<td>{text(cell)}</td>" for cell in cells), number_cell(f"{hit.score:.2f}"), f"<td>{'yes' if is_cited else ''}</td>"]


def _ledger_row(entry: Entry) -> list[str]:
    numbers = (entry.wanted, entry.allotted, entry.used)
    left_out = f"{len(entry.omitted):,}" if entry.omitted else ""
    return [f"<td>{plain(entry.name)}</td>", *(number_cell(f"{each:,}") for each in numbers), number_cell(left_out)]


def _section(title: str, body: str) -> str:
    return f"<details><summary>{plain(title)}</summary>{body}</details>"
