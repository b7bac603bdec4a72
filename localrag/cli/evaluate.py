"""eval: how well a search finds what people judged relevant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import display, options
from localrag.cli.text import emit, note
from localrag.errors import UsageError
from localrag.kb import MODES, Mode
from localrag.session import open_embedder, open_engine
from localrag.settings import Settings

if TYPE_CHECKING:
    from localrag.kb.evaluate import Result
    from localrag.kb.rerank import Reranker

_COLUMNS = {"nDCG@10": "nDCG@10", "R@10": "Recall@10", "R@100": "Recall@100", "RR": "MRR"}


@click.command("eval")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, help="One way of searching; can be given again.  [default: all]")
@click.option("--rerank", metavar="llm|FOLDER", help="Also hybrid search with the best read again: by --model, or by a CrossEncoder.")
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
    """Measure retrieval on a collection with relevance judgments: corpus.jsonl, queries.jsonl and qrels.tsv in DIR, as BEIR has them."""
    from localrag.kb import evaluate as measuring  # noqa: PLC0415  # weight

    if plot_file is not None and plot_file.suffix.lower() != ".png":
        raise UsageError(f"The plot {plot_file.name} is no .png file.", hint="Name it FILE.png.")
    collection = measuring.read_collection(folder, max_queries=max_queries)
    embedder = open_embedder(settings)
    with display.Progress(f"Evaluating {folder.name}") as progress:
        store = measuring.open_index(collection, embedder, settings.home, lambda done, total: progress("indexing", done, total))
        try:
            with _reranker(rerank, model, chat_template, settings) as reranker:
                results = measuring.evaluate(collection, store, embedder, modes=modes or MODES, reranker=reranker, progress=progress)
            sizes = {"num_documents": store.num_documents, "num_chunks": store.num_chunks, "num_queries": len(collection.queries)}
        finally:
            store.close()
    if plot_file is not None:
        title = f"{folder.name}: {sizes['num_documents']} documents, {sizes['num_queries']} questions"
        measuring.plot(results, plot_file, title=title)
    gain = measuring.gain(results)
    if as_json:
        emit({"collection": folder.name, **sizes, "results": [result.to_dict() for result in results], "hybrid_gain": gain})
    else:
        _table(results, gain)


@contextmanager
def _reranker(named: str | None, model: str | None, chat_template: Path | None, settings: Settings) -> Iterator[Reranker | None]:
    """What reads the best again, open as long as it is needed."""
    if named is None:
        yield None
    elif named == "llm":
        from localrag.session.judge import Judge  # noqa: PLC0415  # weight

        with open_engine(model, settings=settings, chat_template=chat_template) as engine:
            yield Judge(engine)
    else:
        from localrag.kb.cross_encoder import CrossEncoderReranker  # noqa: PLC0415  # weight

        yield CrossEncoderReranker(Path(named).expanduser())


def _table(results: Sequence[Result], gain: float | None) -> None:
    columns = ("Mode", *_COLUMNS.values(), "ms a query")
    rows = [(one.name, *(f"{one.measures[name]:.4f}" for name in _COLUMNS), f"{one.p50_ms:.1f}") for one in results]
    display.table(columns, rows, right=columns[1:])
    if gain is not None:
        note(f"Hybrid reaches {gain:.3f} times the nDCG@10 of the better of keyword and semantic.")
