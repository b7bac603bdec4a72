"""Shares as bars, for pictures of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Bars:
    """One row of a measurement: its shares from 0 to 1, a bar each, and where each of them lies for sure, if that is known."""

    name: str
    shares: Sequence[float]
    intervals: Sequence[tuple[float, float]] = ()


def draw(rows: Sequence[Bars], measures: Sequence[str], file: Path, *, title: str) -> None:
    """The bars of all rows beside each other, measure by measure, as a PNG."""
    import matplotlib as mpl  # noqa: PLC0415  # weight

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # weight

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    width = 0.8 / len(rows)
    for at, row in enumerate(rows):
        places = [place + (at - (len(rows) - 1) / 2) * width for place in range(len(measures))]
        reach = None
        if row.intervals:
            pairs = list(zip(row.shares, row.intervals, strict=True))
            reach = [[max(0.0, share - low) for share, (low, _) in pairs], [max(0.0, high - share) for share, (_, high) in pairs]]
        bars = axes.bar(places, row.shares, width, label=row.name, yerr=reach, error_kw={"lw": 0.8, "alpha": 0.6})
        axes.bar_label(bars, fmt="%.3f", fontsize=7, padding=2)
    axes.set_xticks(range(len(measures)), measures)
    axes.set_ylim(0, 1.05)
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=min(4, len(rows)), fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        figure.savefig(file, format="png", dpi=150)
    finally:
        plt.close(figure)
