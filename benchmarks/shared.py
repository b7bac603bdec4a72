"""What every benchmark needs: the model, a prompt, medians, a table, and a file that keeps the numbers."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from localrag.catalog import Catalog
from localrag.engine.llama import library
from localrag.settings import Settings

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


def default_model() -> Path:
    catalog = Catalog.load(Settings.from_env())
    return catalog.open(catalog.model())


def long_question(num_chars: int) -> str:
    """The first pages of the handbook and a question about them."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples" / "handbook").rglob("*.md"))]
    return "From a handbook:\n\n" + "\n\n".join(pages)[:num_chars].strip() + "\n\nWhich of these materials withstand heat best, and why?"


def in_turn(measures: dict[str, Callable[[], dict[str, float]]], num_runs: int) -> dict[str, list[dict[str, float]]]:
    """Each measure once to warm up, then all of them in turn, so that a drift of the machine hits them alike."""
    for measure in measures.values():
        measure()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in measures}
    for _ in range(num_runs):
        for name, measure in measures.items():
            runs[name].append(measure())
    return runs


def compare(runs: dict[str, list[dict[str, float]]], ours: str) -> list[dict[str, object]]:
    """For each quantity and peer: the medians with their spread, and the median of the ratios pair by pair (ours is better above 1)."""
    rows: list[dict[str, object]] = []
    for quantity in runs[ours][0]:
        faster_is_less = quantity.endswith("_s")
        own = [run[quantity] for run in runs[ours]]
        for name, each in runs.items():
            theirs = [run[quantity] for run in each]
            pairs = [b / a if faster_is_less else a / b for a, b in zip(own, theirs, strict=True)]
            rows.append(
                {
                    "quantity": quantity,
                    "program": name,
                    "median": statistics.median(theirs),
                    "min": min(theirs),
                    "max": max(theirs),
                    "ours_is_better_by": statistics.median(pairs),
                }
            )
    return rows


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    cpu = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    versions = {name: importlib.metadata.version(name) for name in ("localrag", "llama-cpp-python")}
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **versions,
        "llama.cpp": library().llama_print_system_info().decode().strip(" |"),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def report(name: str, rows: Sequence[dict[str, object]], **facts: object) -> None:
    """Prints a comparison and writes results/NAME-TIME.json."""
    table = Table("Quantity", "Program", "Median", "Min", "Max", "Ratio (over 1: localrag is better)", title=name)
    for row in rows:
        numbers = (f"{row[column]:.3f}" for column in ("median", "min", "max", "ours_is_better_by"))
        table.add_row(str(row["quantity"]), str(row["program"]), *numbers)
    _report(name, table, rows, facts)


def report_table(name: str, rows: Sequence[dict[str, object]], **facts: object) -> None:
    """Prints rows as they are and writes results/NAME-TIME.json."""
    table = Table(*rows[0], title=name)
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    _report(name, table, rows, facts)


def _report(name: str, table: Table, rows: Sequence[dict[str, object]], facts: dict[str, object]) -> None:
    console = Console(width=130)
    console.print(table)
    about = machine()
    console.print(f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f}; {facts}", markup=False, highlight=False)
    RESULTS.mkdir(exist_ok=True)
    now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    path = RESULTS / f"{name}-{now}.json"
    path.write_text(json.dumps({"machine": about, "facts": facts, "rows": list(rows)}, indent=1))
    console.print(f"written to {path.relative_to(ROOT)}")
