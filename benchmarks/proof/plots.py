"""Bars of what was kept: the first token of a cold ask, the error of each counter, the quality of each search. SVG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.proof.bench import Row
from benchmarks.proof.programs import OURS, PROGRAMS

_OURS, _THEIRS = "#1f6f8b", "#b9b9b9"
_LABELS = {program.name: program.label for program in PROGRAMS}
Rows = Mapping[str, Row]


def write(kept: Mapping[str, Rows], out: Path) -> dict[str, Path]:
    """A file for each question that has a plot and numbers to draw."""
    import matplotlib as mpl  # noqa: PLC0415  # weight

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "localrag"  # the same numbers give the same file
    drawn = {}
    for question, (draw, title) in _PLOTS.items():
        bars = draw(kept[question]) if question in kept else {}
        if bars:
            drawn[question] = out / f"{question}.svg"
            _bars(bars, title, drawn[question])
    return drawn


def cold(rows: Rows) -> dict[str, float]:
    """Median seconds to the first token, of those who search by themselves."""
    able = [program for program in PROGRAMS if program.retrieves and rows.get(program.name, {}).get("runs")]
    return {program.label: statistics.median(run["first_s"] for run in rows[program.name]["runs"]) for program in able}


def counting(rows: Rows) -> dict[str, float]:
    """The mean size of a counter's errors, in percent of what was evaluated."""
    found = {}
    for name, row in rows.items():
        if "prompts" in row and "cannot" not in row:
            errors = [abs(each["counted"] / each["evaluated"] - 1) for each in row["prompts"].values()]
            found[f"{_LABELS.get(name, name)}: {row['way']}" if row["way"] != name else name] = 100 * statistics.mean(errors)
    return found


def retrieval(rows: Rows) -> dict[str, float]:
    """nDCG@10 of each search."""
    ways = [(program.label, way, reached) for program in PROGRAMS for way, reached in rows.get(program.name, {}).get("ways", {}).items()]
    return {f"{label}: {way}": reached["nDCG@10"] for label, way, reached in ways}


def index(rows: Rows) -> dict[str, float]:
    """Median seconds."""
    able = [program for program in PROGRAMS if rows.get(program.name, {}).get("runs")]
    return {program.label: statistics.median(run["total_s"] for run in rows[program.name]["runs"]) for program in able}


_PLOTS: dict[str, Any] = {
    "cold": (cold, "Seconds from the start of a process to the first token"),
    "counting": (counting, "Mean error of the counted tokens, %"),
    "retrieval": (retrieval, "nDCG@10"),
    "index": (index, "Seconds to index the documents"),
}


def _bars(bars: Mapping[str, float], title: str, file: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  # weight

    names = list(bars)[::-1]
    figure = Figure(figsize=(9, 1 + 0.42 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    colours = [_OURS if name.startswith(OURS.label) else _THEIRS for name in names]
    drawn = axes.barh(names, [bars[name] for name in names], color=colours)
    axes.bar_label(drawn, [f"{bars[name]:.3g}" for name in names], padding=3)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(file, metadata={"Date": None})
