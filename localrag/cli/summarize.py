"""The command summarize: shorten a file to one of four levels of detail."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import options
from localrag.cli.files import read_source
from localrag.cli.terminal import emit, note
from localrag.errors import LocalragError
from localrag.session import open_engine
from localrag.settings import Settings
from localrag.summary import LEVELS, Level, Summary, SummaryCache, summarize
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.summary.writer import Writer


@click.command("summarize")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--level", type=click.Choice(LEVELS), default="summary", show_default=True, help="Level of detail.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum length, in tokens.  [default: 2000 detailed, 500 summary, 100 stub]",
)
@click.option("--no-model", is_flag=True, help="Select sentences from the file. The model is used only to count tokens.")
@click.option("--max-age", type=options.Number(min=0), metavar="HOURS", help="Regenerate cached summaries older than this.")
@click.option("--no-cache", is_flag=True, help="Do not read or write the summary cache.")
@options.models_file
@options.model
@options.as_json
def summarize_command(
    file: Path,
    level: Level,
    max_tokens: int | None,
    no_model: bool,
    max_age: float | None,
    no_cache: bool,
    settings: Settings,
    model: str | None,
    chat_template: Path | None,
    as_json: bool,
) -> None:
    """Summarize FILE: an outline (detailed), a paragraph written by the model (summary), or two or three lines (stub).

    Summaries are cached until the file changes.

    \b
      localrag summarize src/app.py --level detailed
      localrag summarize report.md --max-tokens 200 --no-model
    """
    source = read_source(file, "summarized")
    writes = level == "summary" and not no_model
    with (
        open_engine(model, settings=settings, chat_template=chat_template, vocab_only=not writes) as engine,
        _cache(settings.home, is_enabled=not no_cache and level in {"detailed", "summary"}) as cache,
    ):
        writer = _writer(engine) if writes else None
        summary = summarize(
            source,
            level,
            count=_counter(engine),
            limit=max_tokens,
            write=writer,
            write_tokens=writer.max_text_tokens if writer is not None else 0,
            cache=cache,
            cache_model=f"{engine.name} {engine.tokenizer.name}",
            max_age_s=None if max_age is None else max_age * 3600,
        )
    _print(source.label, summary, as_json=as_json)


def _counter(engine: Engine) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text in a prompt."""
    from localrag.text.markup import count_content  # noqa: PLC0415  # weight

    return lambda text: count_content(text, engine.counter)


def _writer(engine: Engine) -> Writer | None:
    """Return a writer, or None, with a note, for a model file that has only a vocabulary."""
    from localrag.summary.writer import Writer  # noqa: PLC0415  # weight

    if engine.can_generate:
        return Writer(engine)
    note(f"{safe(engine.name)} has no weights, so sentences are selected from the file instead.")
    return None


@contextmanager
def _cache(home: Path, *, is_enabled: bool) -> Iterator[SummaryCache | None]:
    """Open the summary cache in the journal. If the journal cannot be used, print a note and yield None."""
    if not is_enabled:
        yield None
        return
    from localrag.journal import Journal  # noqa: PLC0415  # weight: sqlite3

    try:
        journal = Journal.open(home)
    except LocalragError as error:
        note(f"Not cached: {error.message}")
        yield None
        return
    with journal:
        yield journal.summaries


def _print(label: str, summary: Summary, *, as_json: bool) -> None:
    if as_json:
        fields = asdict(summary)
        names = {"level": "level", "method": "method", "tokens": "num_tokens", "source_tokens": "num_source_tokens", "limit": "limit"}
        emit({"path": label, **{name: fields[key] for name, key in names.items()}, "cached": summary.cached, "text": summary.text})
        return
    click.echo(safe(summary.text) if sys.stdout.isatty() else summary.text)
    of = "" if summary.limit is None else f", at most {summary.limit:,}"
    cache_note = ", cached" if summary.cached else ""
    note(f"{safe(label)}: {summary.num_tokens:,} of {summary.num_source_tokens:,} tokens{of} ({summary.method}{cache_note})")
