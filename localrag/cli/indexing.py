"""Print progress and results of `index` and `kb`, and watch folders for changes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from localrag.cli import render
from localrag.cli.terminal import console, emit, fault, note
from localrag.errors import InterruptedRunError, KnowledgeBaseError, LocalragError, counted
from localrag.kb.retrieve import feedback_boost
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.kb import IndexProgress, IngestResult, Plan, SkippedFile, VerifyResult
    from localrag.kb.protocols import Feedback
    from localrag.settings import Learning
    from localrag.types import Chunk

    Index = Callable[[IngestResult | None], IngestResult]
    """Runs the indexing once. Its argument is the result of the previous run, or None."""

TELL_EVERY_S = 15.0
"""Seconds between lines of progress if stderr is not a terminal."""
_NUM_NAMED = 3
"""Number of skipped files to name for each reason without --verbose. Files that may hold secrets are always named."""
_MAX_VALUE_CHARS = 60
"""Maximum length of a metadata value in a table."""


def check_paths(paths: Sequence[Path]) -> None:
    """KnowledgeBaseError for a missing path. Call this before loading anything heavy."""
    for path in paths:
        if not os.path.lexists(os.path.realpath(path)):
            raise KnowledgeBaseError(f"There is no file or folder {path}.", hint="Check the path.", path=str(path))


def first(index: Index) -> IngestResult | None:
    """Run the indexing before watching starts. Returns None if there is nothing to index yet."""
    try:
        return index(None)
    except KnowledgeBaseError as error:
        if "reasons" not in error.numbers:
            raise
        note(safe(error.message))
        return None


def follow(paths: Sequence[Path], kb_dir: Path, index: Index, last: IngestResult | None, *, as_json: bool) -> int:
    """Index again after every change, until Ctrl-C. Errors are printed, and the next change tries again.

    KnowledgeBaseError if one of the paths disappears, because its changes can no longer be watched, even if it returns.
    """
    from localrag.kb.walk import changes  # noqa: PLC0415  # weight

    note("Watching for changes. Press Ctrl-C to stop.")
    try:
        for num_changed in changes(paths, but=kb_dir):
            try:
                last = index(last)
            except LocalragError as error:
                if not num_changed and last is None and "reasons" in error.numbers:
                    continue  # this error has just been printed
                check_paths(paths)
                fault(error, as_json=as_json)
    except KeyboardInterrupt:
        note("\nStopped watching.")
    return InterruptedRunError.exit_code


class IndexingBar:
    """Progress on stderr: documents, chunks, chunks per second and time left. A bar on a terminal.

    Otherwise one line, unless `again`, and then one every `every_s` seconds.
    """

    def __init__(self, kb: str, *, title: str = "Indexing", again: bool = False, every_s: float = TELL_EVERY_S) -> None:
        self._title = f"{title} {kb}"
        self._again = again
        self._every_s = every_s
        self._bar: Any = None
        self._task: Any = None
        self._started_at = self._told_at = time.monotonic()

    def __enter__(self) -> Self:
        if not sys.stderr.isatty():
            if not self._again:
                note(f"{self._title}: reading and embedding")
            return self
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415  # weight

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("documents, {task.fields[chunks]} chunks, {task.fields[speed]}/s, time left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[source]}", markup=False),
        )
        self._bar = Progress(*columns, console=console(err=True), transient=True)
        self._task = self._bar.add_task(self._title, total=None, chunks=0, speed="0", source="")
        self._bar.start()
        return self

    def __call__(self, at: IndexProgress) -> None:
        now = time.monotonic()
        speed = at.num_embedded / max(1e-3, now - self._started_at)
        if self._bar is None and now - self._told_at >= self._every_s:
            self._told_at = now
            left_s = (now - self._started_at) * (at.num_files - at.num_done) / max(1, at.num_done)
            left = f", about {duration(left_s)} left" if at.num_done else ""
            documents = f"{at.num_done:,} of {counted(at.num_files, 'document')}"
            note(f"{self._title}: {documents}, {counted(at.num_embedded, 'chunk')}, {speed:.0f}/s{left}")
        elif self._bar is not None:
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


def indexed(name: str, result: IngestResult, *, as_json: bool, verbose: bool, before: IngestResult | None = None) -> None:
    """Print what a run indexed and skipped. Skipped files that the run `before` reported are not repeated."""
    old_skips = {*before.skipped, *before.partial} if before is not None else set()
    skipped = [skip for skip in result.skipped if skip not in old_skips]
    partial = [skip for skip in result.partial if skip not in old_skips]
    if before is not None and not (skipped or partial or result.added or result.updated or result.renamed or result.removed):
        return
    if as_json:
        emit({"kb": name, **result.to_dict()})
        return
    _skipped(skipped, verbose=verbose)
    _partial(partial)
    words = ["added", "updated", "unchanged", *(["renamed"] if result.renamed else []), "removed"]
    changes = ", ".join(f"{getattr(result, word)} {word}" for word in words)
    chunks = f"{counted(result.num_chunks, 'chunk')}, {result.num_embedded} new"
    click.echo(f"{name}: {changes}, {_left_out(result)}; {chunks}")


def planned(name: str, plan: Plan, *, as_json: bool, verbose: bool) -> None:
    """Print what a run would do: the files to add or update on stdout, everything else on stderr."""
    if as_json:
        emit({"kb": name, "dry_run": True, **plan.to_dict()})
        return
    for source in (*plan.new, *plan.changed):
        click.echo(safe(source))
    for source in plan.renamed:
        note(f"would be renamed: {safe(source)}")
    for source in plan.removed:
        note(f"would be removed: {safe(source)}")
    _skipped(plan.skipped, verbose=verbose)
    _partial(plan.partial)
    words = ["new", "changed", "unchanged", *(["renamed"] if plan.renamed else []), "removed"]
    numbers = ", ".join(f"{len(getattr(plan, word))} {word}" for word in words)
    note(f"{name}: {numbers}, {_left_out(plan)}; nothing was embedded or written")
    if not (plan.new or plan.changed or plan.unchanged or plan.renamed):
        note("There is nothing to index. A run would fail and remove nothing.")


def knowledge_bases(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of knowledge bases with their sizes and ages."""
    now = time.time()
    table = [
        (row["name"], row["num_documents"], row["num_chunks"], render.size(row["size_bytes"]), age(row["indexed_at"], now)) for row in rows
    ]
    render.table(("Name", "Documents", "Chunks", "Size", "Indexed"), table, right=("Documents", "Chunks", "Size"))


def age(at: float | None, now: float) -> str:
    """Return how long ago a time was, in its largest unit; "" for None."""
    if at is None:
        return ""
    seconds = max(0.0, now - at)
    for name, length in (("year", 365 * 86_400), ("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), name)} ago"
    return "just now"


def duration(seconds: float) -> str:
    """Format a time left: seconds, minutes or hours."""
    whole = round(seconds)
    return f"{whole} s" if whole < 90 else f"{round(whole / 60)} min" if whole < 5400 else f"{whole / 3600:.1f} h"


def documents(sources: Sequence[tuple[str, int]], fields: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """Print a table of documents given as (source, number of chunks), with columns for tags and metadata if any has some."""
    rows = []
    for source, num_chunks in sources:
        metadata = {key: ", ".join(value[:_MAX_VALUE_CHARS] for value in values) for key, values in fields.get(source, {}).items()}
        tags = metadata.pop("tag", "")
        rows.append((source, num_chunks, tags, "; ".join(f"{key}={value}" for key, value in metadata.items())))
    columns = ("Document", "Chunks", "Tags", "Fields")
    positions = [at for at, column in enumerate(columns) if column in columns[:2] or any(row[at] for row in rows)]
    render.table([columns[at] for at in positions], [[row[at] for at in positions] for row in rows], right=("Chunks",))


def verified(name: str, result: VerifyResult, *, as_json: bool) -> None:
    """Print the result of a check: problems, repairs, and outdated documents."""
    if as_json:
        emit({"kb": name, **result.to_dict()})
        return
    for line in result.repaired:
        note(f"repaired: {safe(line)}")
    for problem in result.problems:
        note(f"problem: {safe(problem)}")
    for reason, sources in (("changed since it was indexed", result.changed), ("no longer on disk", result.missing)):
        for source in sources:
            note(f"{safe(source)}: {reason}")
    for line in result.not_compared:
        note(f"not compared with files: {safe(line)}")
    if result.changed or result.missing:
        note(f"To update it: localrag index PATH --kb {name}")
    if result.problems:
        note(f"It cannot be repaired. Remove it (localrag kb remove {name}) and index the documents again.")
    if result.is_sound:
        click.echo(f"{name} is sound: {counted(result.num_documents, 'document')}, {counted(result.num_chunks, 'chunk')}")


def feedback(passages: Sequence[tuple[Chunk, Feedback]], *, learning: Learning, as_json: bool) -> None:
    """Print the feedback on passages, and its effect on their scores."""
    if as_json:
        rows = [
            {"id": chunk.label, "source": chunk.source, **counts._asdict(), "weight": feedback_boost(counts, learning)}
            for chunk, counts in passages
        ]
        emit({"passages": rows})
    elif passages:
        table = [(chunk.label, safe(chunk.source), *counts, f"{feedback_boost(counts, learning):+.1%}") for chunk, counts in passages]
        names = ("Found", "Supplied", "Cited", "Useful", "Useless", "Weight")
        render.table(("Passage", "Document", *names), table, right=names)
    else:
        note("There is no feedback yet. Ask a question, then mark the passages that helped.")


def _left_out(result: IngestResult | Plan) -> str:
    return f"{len(result.skipped)} skipped" + (f", {len({one.source for one in result.partial})} incomplete" if result.partial else "")


def _partial(partial: Sequence[SkippedFile]) -> None:
    """Name every incomplete document, because it looks complete otherwise."""
    for source, reason in partial:
        note(f"incomplete {safe(source)}: {safe(reason)}")


def _skipped(skipped: Sequence[SkippedFile], *, verbose: bool) -> None:
    """Print skipped files by reason. The most frequent reason comes last, next to the summary."""
    from localrag.kb.walk import MAY_BE_READ  # noqa: PLC0415  # weight

    by_reason: dict[str, list[str]] = {}
    for source, reason in skipped:
        by_reason.setdefault(reason, []).append(safe(source))
    for reason, sources in sorted(by_reason.items(), key=lambda group: len(group[1])):
        if len(sources) == 1:
            note(f"skipped {sources[0]}: {safe(reason)}")
            continue
        num_named = len(sources) if verbose or reason.endswith(MAY_BE_READ) else _NUM_NAMED
        rest = f" and {len(sources) - num_named} more (--verbose names them)" if len(sources) > num_named else ""
        note(f"skipped {len(sources)}, {safe(reason)}: {', '.join(sources[:num_named])}{rest}")
