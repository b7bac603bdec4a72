"""Helpers for all benchmarks: the model, a prompt, medians, a table, and a file of results."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from localrag.catalog import Catalog
from localrag.engine.attention import flash_attention
from localrag.engine.llama_lib import library
from localrag.engine.threads import ThreadGovernor
from localrag.settings import Settings

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


def default_model() -> Path:
    catalog = Catalog.load(Settings.from_env())
    return catalog.open(catalog.model())


def long_question(num_chars: int) -> str:
    """The first pages of the handbook and a question about them."""
    return "From a handbook:\n\n" + handbook()[:num_chars].strip() + "\n\nWhich of these materials withstand heat best, and why?"


def handbook() -> str:
    """All pages of the handbook."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples" / "handbook").rglob("*.md"))]
    return "\n\n".join(pages)


def beginning(text: str, num_tokens: int, count: Callable[[str], int]) -> str:
    """The longest beginning of whole words that has at most so many tokens."""
    words = text.split(" ")
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(" ".join(words[:middle])) <= num_tokens else (low, middle - 1)
    return " ".join(words[:low])


def chosen_attention() -> bool:
    """Whether localrag uses flash attention here; measured now if it was not before, so that no run is charged with it."""
    return flash_attention(Settings.from_env().home, ThreadGovernor())


@contextmanager
def fresh_home() -> Iterator[Settings]:
    """A home that nothing else uses, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield furnished(Path(folder))


def furnished(home: Path) -> Settings:
    """A home with the models of the usual one and what was measured there of attention."""
    usual = Settings.from_env()
    chosen_attention()
    settings = Settings(home=home, models_file=next(iter(usual.models_files()), None))
    home.mkdir(parents=True, exist_ok=True)
    if usual.models_dir.is_dir() and not settings.models_dir.exists():
        settings.models_dir.symlink_to(usual.models_dir)
    if (usual.home / "attention.json").exists():
        shutil.copy(usual.home / "attention.json", home)
    return settings


def compiled_environment(**more: str) -> dict[str, str]:
    """Variables for a process whose start is measured: our modules are compiled once and kept, as where localrag is installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | more


def order_of_round(each: Sequence[T], number: int) -> list[T]:
    """All of them in turn, each round begun by the next one.

    So a drift of the machine hits them alike, and so does what a program leaves behind for the one after it (threads that still spin).
    """
    first = number % len(each)
    return [*each[first:], *each[:first]]


def in_turn(measures: dict[str, Callable[[], dict[str, float]]], num_runs: int) -> dict[str, list[dict[str, float]]]:
    """Each measure once to warm up, then all of them in rounds."""
    for measure in measures.values():
        measure()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in measures}
    for number in range(num_runs):
        for name in order_of_round(list(measures), number):
            runs[name].append(measures[name]())
    return runs


def compare(runs: dict[str, list[dict[str, float]]], ours: str, *, missing: Sequence[str] = ()) -> list[dict[str, object]]:
    """For each quantity and peer: the medians with their spread, and the median of the ratios pair by pair (ours is better above 1).

    Programs that are `missing` have rows without numbers.
    """
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
        rows += [{"quantity": quantity, "program": f"{name}: not installed"} for name in missing]
    return rows


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    cpu = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    versions = {name: importlib.metadata.version(name) for name in ("localrag", "llama-cpp-python")}
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["xllamacpp"] = importlib.metadata.version("xllamacpp")
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
        numbers = (f"{row[column]:.3f}" if column in row else "–" for column in ("median", "min", "max", "ours_is_better_by"))
        table.add_row(str(row["quantity"]), str(row["program"]), *numbers)
    keep(name, [table], facts, rows=rows)


def report_table(name: str, rows: Sequence[dict[str, object]], **facts: object) -> None:
    """Prints rows as they are and writes results/NAME-TIME.json."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(*columns, title=name)
    for row in rows:
        cells = (row.get(column, "–") for column in columns)
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    keep(name, [table], facts, rows=rows)


def keep(name: str, tables: Iterable[Table], facts: dict[str, object], **rows: Sequence[dict[str, object]]) -> None:
    """Prints tables and writes the rows that they are of to results/NAME-TIME.json."""
    console = Console(width=130)
    for table in tables:
        console.print(table)
    about = machine()
    console.print(f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f}; {facts}", markup=False, highlight=False)
    RESULTS.mkdir(exist_ok=True)
    now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    path = RESULTS / f"{name}-{now}.json"
    path.write_text(json.dumps({"machine": about, "facts": facts, **rows}, indent=1))
    console.print(f"written to {path.relative_to(ROOT)}")
