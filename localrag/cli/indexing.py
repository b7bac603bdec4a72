"""What `index` and `kb verify` print: how far it is, what was done, and what was left out."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import click

from localrag.cli import display
from localrag.cli.text import console, emit, note, safe
from localrag.kb.prior import prior

if TYPE_CHECKING:
    from localrag.kb import IngestResult, Plan, Progress, Skipped, Verified
    from localrag.kb.store import Feedback
    from localrag.passages import Chunk

_NUM_NAMED = 3
"""Skipped files that are named for each reason, unless all are asked for."""


class IndexingBar:
    """Files, chunks, chunks a second and time left, on stderr: a bar on a terminal, one line at the start elsewhere."""

    def __init__(self, kb: str) -> None:
        self._title = f"Indexing {kb}"
        self._bar: Any = None
        self._task: Any = None
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        if not sys.stderr.isatty():
            note(f"{self._title}: reading and embedding")
            return self
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415  # weight

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("files, {task.fields[chunks]} chunks, {task.fields[speed]}/s,"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[source]}", markup=False),
        )
        self._bar = Progress(*columns, console=console(err=True), transient=True)
        self._task = self._bar.add_task(self._title, total=None, chunks=0, speed="0", source="")
        self._bar.start()
        return self

    def __call__(self, at: Progress) -> None:
        if self._bar is not None:
            speed = at.num_embedded / max(1e-3, time.monotonic() - self._started_at)
            self._bar.update(
                self._task,
                completed=at.num_done,
                total=at.num_files,
                chunks=at.num_embedded,
                speed=f"{speed:.0f}",
                source=safe(at.source)[-60:],
            )

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def indexed(name: str, result: IngestResult, *, as_json: bool, verbose: bool) -> None:
    """What indexing did, and the files that were skipped."""
    if as_json:
        emit({"kb": name, **result.to_dict()})
        return
    _skipped(result.skipped, verbose=verbose)
    words = ["added", "updated", "unchanged", *(["renamed"] if result.renamed else []), "removed"]
    changes = ", ".join(f"{getattr(result, word)} {word}" for word in words)
    click.echo(f"{name}: {changes}, {len(result.skipped)} skipped; {result.num_chunks} chunks, {result.num_embedded} of them new")


def planned(name: str, plan: Plan, *, as_json: bool, verbose: bool) -> None:
    """What indexing would do; data are the files that would be read."""
    if as_json:
        emit({"kb": name, "dry_run": True, **plan.to_dict()})
        return
    for source in (*plan.new, *plan.changed):
        click.echo(safe(source))
    for source in plan.removed:
        note(f"would be removed: {safe(source)}")
    _skipped(plan.skipped, verbose=verbose)
    numbers = (
        f"{len(plan.new)} new",
        f"{len(plan.changed)} to look at again",
        f"{len(plan.unchanged)} unchanged",
        f"{len(plan.removed)} removed",
    )
    note(f"{name}: {', '.join(numbers)}, {len(plan.skipped)} skipped; nothing was read or written")


def verified(name: str, found: Verified, *, as_json: bool) -> None:
    """What is wrong, what was repaired, and which documents are not up to date."""
    if as_json:
        emit({"kb": name, **found.to_dict()})
        return
    for line in found.repaired:
        note(f"repaired: {safe(line)}")
    for problem in found.problems:
        note(f"problem: {safe(problem)}")
    for what, sources in (("changed since it was indexed", found.changed), ("not on disk any more", found.missing)):
        for source in sources:
            note(f"{safe(source)}: {what}")
    if found.is_sound:
        click.echo(f"{name} is sound: {found.num_documents} documents, {found.num_chunks} chunks")


def feedback(known: Sequence[tuple[Chunk, Feedback]], *, as_json: bool) -> None:
    """What is known of the use of passages, and what it adds to their scores."""
    if as_json:
        rows = [{"id": chunk.label, "source": chunk.source, **counts._asdict(), "weight": prior(counts)} for chunk, counts in known]
        emit({"passages": rows})
    elif known:
        table = [(chunk.label, safe(chunk.source), *counts, f"{prior(counts):+.1%}") for chunk, counts in known]
        names = ("Found", "Supplied", "Cited", "Useful", "Useless", "Weight")
        display.table(("Passage", "Document", *names), table, right=names)
    else:
        note("Nothing is known yet: ask something, and mark what helped.")


def _skipped(skipped: Sequence[Skipped], *, verbose: bool) -> None:
    """By reason, the most frequent last, next to the summary."""
    by_reason: dict[str, list[str]] = {}
    for source, reason in skipped:
        by_reason.setdefault(reason, []).append(safe(source))
    for reason, sources in sorted(by_reason.items(), key=lambda group: len(group[1])):
        if len(sources) == 1:
            note(f"skipped {sources[0]}: {safe(reason)}")
            continue
        num_named = len(sources) if verbose else _NUM_NAMED
        left = f" and {len(sources) - num_named} more (--verbose names them)" if len(sources) > num_named else ""
        note(f"skipped {len(sources)}, {safe(reason)}: {', '.join(sources[:num_named])}{left}")
