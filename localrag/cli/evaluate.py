"""eval: how well a search finds what people judged relevant, or how well questions with known answers are answered."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import display, options
from localrag.cli.text import emit, note, safe
from localrag.errors import UsageError
from localrag.kb import MODES, Mode
from localrag.session import TopK, open_embedder, opened_reranker
from localrag.settings import Settings

if TYPE_CHECKING:
    from localrag.kb.evaluate import Collection, Result
    from localrag.kb.store import Store


@click.command("eval")
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path, exists=True, file_okay=False), required=False)
@click.option(
    "--qa", "qa_file", type=click.Path(path_type=Path), metavar="FILE.jsonl", help="Questions with known answers, in place of DIR."
)
@click.option(
    "--mode", "modes", type=click.Choice(MODES), multiple=True, help="DIR: one way of searching; can be given again.  [default: all]"
)
@click.option("--rerank", metavar="llm|NAME", help="DIR: also hybrid search with the best read again: by --model, or by a CrossEncoder.")
@click.option("--kb", "kbs", multiple=True, metavar="NAME", help="--qa: a knowledge base to answer from; can be given again.")
@click.option(
    "--context-ratio",
    "ratios",
    type=options.Number(0, 1),
    multiple=True,
    metavar="R",
    help="--qa: the most that evidence may take of the window; given again, a row for each.  [default: the budget's, 0.5]",
)
@click.option("--council", metavar="NAME", help="--qa: a row for this council of models.toml too.")
@click.option("--top-k", type=options.Depth(), metavar="N", help="--qa: passages to retrieve, or fit.  [default: 4; a council's own]")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="--qa: the longest answer.  [default: 512; a council's own]")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="--qa: makes sampling repeatable.  [default: 0]")
@click.option("--system", type=options.Text(), metavar="TEXT", help="--qa: a system text of the asks (@file for a file).")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="OUT.jsonl", help="--qa: where each answer goes; what is there is not asked again."
)
@click.option("--queries", "max_queries", type=click.IntRange(min=1), metavar="N", help="Ask so many of the questions, not all.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.png", help="Draw the measures.")
@options.window
@options.model
@options.models_file
@options.as_json
def eval_command(
    folder: Path | None,
    qa_file: Path | None,
    modes: tuple[Mode, ...],
    rerank: str | None,
    kbs: tuple[str, ...],
    ratios: tuple[float, ...],
    council: str | None,
    top_k: TopK | None,
    max_tokens: int | None,
    seed: int | None,
    system: str | None,
    out: Path | None,
    max_queries: int | None,
    plot_file: Path | None,
    n_ctx: int | None,
    model: str | None,
    chat_template: Path | None,
    settings: Settings,
    as_json: bool,
) -> None:
    """Measure retrieval on a collection with relevance judgments, or with --qa the answers to questions whose answers are known.

    DIR holds corpus.jsonl, queries.jsonl and qrels.tsv, as BEIR has them. It is indexed once for each embedder, and its index kept in the
    home, below "eval". A line of FILE.jsonl is {"id", "question", "answers": [["spelling", …], …], "sources": ["page", …]}, and
    "answers": [] says that no page answers it (docs/how-to/quality.md).

    \b
      localrag eval cranfield
      localrag eval --qa questions.jsonl --kb handbook --context-ratio 0.2 --context-ratio 0.8 --out answers.jsonl
    """
    of_folder: dict[str, object] = {"--mode": modes, "--rerank": rerank}
    of_qa: dict[str, object] = {
        "--kb": kbs,
        "--context-ratio": ratios,
        "--council": council,
        "--top-k": top_k,
        "--ctx": n_ctx,
        "--max-tokens": max_tokens,
        "--seed": seed,
        "--system": system,
        "--out": out,
    }
    _check_one(folder, qa_file, {name: bool(value) or value == 0 for name, value in (of_folder if qa_file else of_qa).items()})
    _check_plot(plot_file)
    _check_installed(*(["ir_measures"] if folder is not None else []), *(["matplotlib"] if plot_file is not None else []))
    if folder is not None:
        _check_model(model, rerank)
        _measure(
            folder,
            modes,
            rerank,
            max_queries=max_queries,
            plot_file=plot_file,
            settings=settings,
            model=model,
            chat_template=chat_template,
            as_json=as_json,
        )
        return
    assert qa_file is not None, "one of both is there"
    from localrag.cli import evaluate_answers  # noqa: PLC0415  # weight
    from localrag.session.quality import Means  # noqa: PLC0415  # weight

    means = Means(
        settings=settings,
        model=model,
        chat_template=chat_template,
        kbs=tuple(dict.fromkeys(kbs)),
        n_ctx=n_ctx,
        top_k=top_k,
        max_tokens=max_tokens,
        seed=seed or 0,
        system=system,
    )
    evaluate_answers.run(
        qa_file, means, tuple(dict.fromkeys(ratios)), council, max_queries=max_queries, out=out, plot_file=plot_file, as_json=as_json
    )


def _check_one(folder: Path | None, qa_file: Path | None, others: dict[str, bool]) -> None:
    """UsageError unless one of both is given, and none of the options that only the other one takes."""
    if (folder is None) == (qa_file is None):
        said = "DIR and --qa exclude each other." if folder else "There is neither DIR nor --qa."
        raise UsageError(said, hint="Give a collection to search, or a file of questions to answer with --qa FILE.jsonl.")
    if named := [name for name, given in others.items() if given]:
        here, there = ("--qa", "DIR") if qa_file else ("DIR", "--qa")
        raise UsageError(f"{named[0]} has no meaning with {here}.", hint=f"Leave it out; it goes with {there}.")


def _check_plot(plot_file: Path | None) -> None:
    """UsageError for what would only show after minutes of work."""
    if plot_file is not None and plot_file.suffix.lower() != ".png":
        raise UsageError(f"The plot {plot_file.name} is no .png file.", hint="Name it FILE.png.")
    if plot_file is not None and not plot_file.parent.is_dir():
        raise UsageError(f"There is no folder {plot_file.parent}.", hint="Make it, or name another FILE.png.")


def _check_installed(*packages: str) -> None:
    """UsageError for a package of the extra that is not here; it is first imported when the work is done."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"The evaluation needs the package {package}.", hint="pip install 'localrag[eval]'")


def _check_model(model: str | None, rerank: str | None) -> None:
    if model is not None and rerank != "llm":
        raise UsageError("--model is what reads again, and nothing is to be read again.", hint="Give it with --rerank llm.")


def _measure(
    folder: Path,
    modes: tuple[Mode, ...],
    rerank: str | None,
    *,
    max_queries: int | None,
    plot_file: Path | None,
    settings: Settings,
    model: str | None,
    chat_template: Path | None,
    as_json: bool,
) -> None:
    """The retrieval measures of a collection."""
    from localrag.kb import evaluate as measuring  # noqa: PLC0415  # weight

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
        _plot(results, plot_file, f"{name}: {sizes['num_documents']} documents, {sizes['num_queries']} questions")


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


def _plot(results: Sequence[Result], file: Path, title: str) -> None:
    from localrag.kb.evaluate import MEASURES  # noqa: PLC0415  # weight
    from localrag.report.bars import Bars, draw  # noqa: PLC0415  # weight

    rows = [Bars(f"{one.name} ({one.p50_ms:.0f} ms)", [one.measures[name] for name in MEASURES]) for one in results]
    draw(rows, list(MEASURES.values()), file, title=title)
    note(f"Drew the measures into {safe(str(file))}.")
