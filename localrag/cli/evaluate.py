"""eval: how well a search finds what people judged relevant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import display, options
from localrag.cli.text import emit, note, safe
from localrag.errors import UsageError
from localrag.kb import MODES, Mode
from localrag.session import open_embedder, opened_reranker
from localrag.settings import Settings

if TYPE_CHECKING:
    from localrag.kb.evaluate import Collection, Result
    from localrag.kb.store import Store


@click.command("eval")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, help="One way of searching; can be given again.  [default: all]")
@click.option("--rerank", metavar="llm|NAME", help="Also hybrid search with the best read again: by --model, or by a CrossEncoder.")
@click.option("--queries", "max_queries", type=click.IntRange(min=1), metavar="N", help="Ask so many of the questions, not all.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.png", help="Draw the measures.")
@options.model
@options.models_file
@options.as_json
def eval_command(
    folder: Path,
    modes: tuple[Mode, ...],
    rerank: str | None,
    max_queries: int | None,
    plot_file: Path | None,
    model: str | None,
    chat_template: Path | None,
    settings: Settings,
    as_json: bool,
) -> None:
    """Measure retrieval on a collection with relevance judgments: corpus.jsonl, queries.jsonl and qrels.tsv in DIR, as BEIR has them.

    The collection is indexed once for each embedder, and its index kept in the home, below "eval".
    """
    from localrag.kb import evaluate as measuring  # noqa: PLC0415  # weight

    _check(plot_file, rerank, model)
    collection = measuring.read_collection(folder, max_queries=max_queries)
    embedder, name = open_embedder(settings), folder.resolve().name
    with (
        opened_reranker(rerank, settings=settings, model=model, chat_template=chat_template) as reranker,
        display.Progress(f"Evaluating {name}") as progress,
    ):
        store = measuring.open_index(collection, embedder, settings.home, lambda done, total: progress("indexing", done, total))
        try:
            if not store.num_documents:
                raise UsageError(f"{folder / 'corpus.jsonl'} holds no document with text.", hint="Check that it is the whole file.")
            num_missing = _num_missing(collection, store)
            results = measuring.evaluate(collection, store, embedder, modes=modes or MODES, reranker=reranker, progress=progress)
            sizes = {"num_documents": store.num_documents, "num_chunks": store.num_chunks, "num_queries": len(collection.queries)}
        finally:
            store.close()
    gain = measuring.gain(results)
    if as_json:
        found = [result.to_dict() for result in results]
        emit({"collection": name, **sizes, "num_missing": num_missing, "results": found, "hybrid_gain": gain})
    else:
        _table(results, gain)
        if num_missing:
            note(f"Warning: {num_missing} documents that are judged relevant are not in corpus.jsonl; they count as not found.")
    if plot_file is not None:
        measuring.plot(results, plot_file, title=f"{name}: {sizes['num_documents']} documents, {sizes['num_queries']} questions")
        note(f"Drew the measures into {safe(str(plot_file))}.")


def _check(plot_file: Path | None, rerank: str | None, model: str | None) -> None:
    """UsageError for what would only show after minutes of work."""
    if plot_file is not None and plot_file.suffix.lower() != ".png":
        raise UsageError(f"The plot {plot_file.name} is no .png file.", hint="Name it FILE.png.")
    if plot_file is not None and not plot_file.parent.is_dir():
        raise UsageError(f"There is no folder {plot_file.parent}.", hint="Make it, or name another FILE.png.")
    if model is not None and rerank != "llm":
        raise UsageError("--model is what reads again, and nothing is to be read again.", hint="Give it with --rerank llm.")


def _num_missing(collection: Collection, store: Store) -> int:
    """Documents that are judged relevant and are not there."""
    relevant = {document for grades in collection.qrels.values() for document, grade in grades.items() if grade > 0}
    return len(relevant.difference(store.documents()))


def _table(results: Sequence[Result], gain: float | None) -> None:
    from localrag.kb.evaluate import MEASURES  # noqa: PLC0415  # weight

    columns = ("Mode", *MEASURES.values(), "ms a query")
    rows = [(one.name, *(f"{one.measures[name]:.4f}" for name in MEASURES), f"{one.p50_ms:.1f}") for one in results]
    display.table(columns, rows, right=columns[1:])
    if gain is not None:
        note(f"Hybrid reaches {gain:.3f} times the nDCG@10 of the better of keyword and semantic.")
