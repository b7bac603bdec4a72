"""What was kept of all questions as one page of Markdown (table.md), with plots (SVG), for README and docs to take over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.proof import plots, results
from benchmarks.proof.bench import Row
from benchmarks.proof.programs import PROGRAMS
from benchmarks.proof.tables import TABLES, cell, table

_LONGEST = 1000  # characters of what is no reason of one line: machine and versions


def write(folder: Path, out: Path) -> list[Path]:
    """Makes the page and the plots of what `folder` holds; the files that were written."""
    kept = {question: results.load(question, folder) for question in TABLES}
    kept = {question: found for question, found in kept.items() if found["rows"]}
    out.mkdir(parents=True, exist_ok=True)
    drawn = plots.write({question: found["rows"] for question, found in kept.items()}, out)
    page = out / "table.md"
    page.write_text(markdown(kept, drawn), encoding="utf-8")
    return [page, *drawn.values()]


def markdown(kept: Mapping[str, Row], drawn: Mapping[str, Path]) -> str:
    """The page: what it was measured on, then a section a question, its plot below its table."""
    parts = [about(kept)] if kept else ["Nothing was measured yet.\n"]
    for question, (title, make) in TABLES.items():
        if question not in kept:
            continue
        parts.append(f"## {title}\n\n{make(kept[question]['rows'])}")
        if question in drawn:
            parts.append(f"![{title}]({drawn[question].name})\n")
    return "\n".join(parts)


def about(kept: Mapping[str, Row]) -> str:
    """The machine and the versions of the last sitting, and where the programs' ways differ."""
    last = max(kept.values(), key=lambda found: max(row.get("measured", "") for row in found["rows"].values()))
    machine, facts = last["machine"], last["facts"]
    said = f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, load {machine.get('load', 0.0):.1f} at the start; "
    said += f"Python {machine.get('python', '?')}, llama-cpp-python {machine.get('llama-cpp-python', '?')}; "
    said += f"{facts.get('model')}, {facts.get('embedder')}, window {facts.get('n_ctx')}, answers of at most {facts.get('max_tokens')} "
    said += f"tokens, temperature 0; medians of {facts.get('runs')} runs taken in turn, with the least and the most.\n"
    lines = []
    for program in PROGRAMS:
        found = machine.get("programs", {}).get(program.name)
        if found is None:
            continue
        installed = found if isinstance(found, str) else ", ".join(f"{name} {version}" for name, version in found.items())
        lines.append([program.label, cell(installed, longest=_LONGEST), cell(program.differs)])
    return f"{cell(said, longest=_LONGEST)}\n\n{table(['program', 'versions', 'what its ways are'], lines)}"
