"""The command eval: measure retrieval on a judged collection, or answers to questions with known answers."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import click

from localrag.cli import options, render
from localrag.cli.batch import Progress
from localrag.cli.files import STANDARD_OUTPUT, InputFile, ResultFile
from localrag.cli.terminal import emit, note
from localrag.errors import InterruptedRunError, UsageError, counted
from localrag.grading import (
    REFUSALS,
    Grade,
    Graded,
    Outcome,
    PairedTest,
    Question,
    Share,
    Tally,
    compare,
    compare_runs,
    grade,
    is_page,
    read_questions,
    read_run,
    spread,
    tally,
)
from localrag.kb import MODES, Mode, shown
from localrag.question import DEFAULT_CITE, DEFAULT_UNANSWERABLE, Cite, EvidenceKind, TopK, Unanswerable
from localrag.session import Retriever, open_embedder, opened_reranker
from localrag.session.answerability import MIN_QUESTIONS
from localrag.session.quality import AskWay, CouncilWay, Means, Way, calibrated, conversation_searches
from localrag.settings import Settings
from localrag.text.sanitize import safe
from localrag.types import Message

if TYPE_CHECKING:
    from localrag.kb.evaluate import Collection, Result
    from localrag.kb.protocols import Reranker
    from localrag.kb.store import Store
    from localrag.text.tokens import Embedder


Key = tuple[str, str]
"""The id of a question, and the name of the way it was asked."""


def mark(question: Question, way: Way) -> str:
    """Hash the question and the way it is asked. The known answers are not included, so they can be corrected later."""
    asked = [[message.role, message.content] for message in question.messages] or question.question
    content = json.dumps([asked, dict(way.about)], sort_keys=True)
    return blake2b(content.encode(), digest_size=8).hexdigest()


class Lines(ResultFile):
    """The OUT file of an evaluation. `outcomes` holds the recorded answers. Questions that failed are asked again."""

    run: ClassVar[str] = "evaluation"

    def __init__(self, path: Path, questions: Iterable[Question], ways: Iterable[Way]) -> None:
        """UsageError if the file holds answers to other questions, or to these questions asked in other ways."""
        ways = list(ways)
        self._marks: dict[Key, str] = {(question.id, way.name): mark(question, way) for question in questions for way in ways}
        self.outcomes: dict[Key, Outcome] = {}
        super().__init__(path)

    def write(self, question: Question, way: Way, outcome: Outcome, grade: Grade) -> None:
        """Append an answer. The grade is for readers of the file; a resumed evaluation computes it again."""
        key = question.id, way.name
        row = {"id": question.id, "way": way.name, "request": self._marks[key], "question": question.question}
        known = {"answerable": question.is_answerable, "has_answers": bool(question.answers)}
        self.append(row | known | outcome.to_dict() | {"grade": grade.to_dict()})

    def is_line(self, row: object) -> bool:
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("id", "way", "request", "text")):
            return False
        try:
            Outcome.from_dict(row)
        except (KeyError, TypeError):
            return False
        return True

    def is_kept(self, number: int, row: dict[str, Any]) -> bool:
        key = row["id"], row["way"]
        request = self._marks.get(key)
        if request != row["request"]:
            difference = "this run does not ask" if request is None else "has changed, or is asked with other options"
            raise UsageError(
                f"Line {number} of {self.path} answers {json.dumps(row['id'])[:80]} by {json.dumps(row['way'])[:80]}, which {difference}.",
                hint="Use another --out.",
                line=number,
            )
        outcome = Outcome.from_dict(row)
        if outcome.error or key in self.outcomes:
            return False
        self.outcomes[key] = outcome
        return True


@dataclass(frozen=True, slots=True)
class Bars:
    """One row of a chart: a bar for each share (0 to 1), and the confidence interval of each share if known."""

    name: str
    shares: Sequence[float]
    intervals: Sequence[tuple[float, float]] = ()


def draw_bars(rows: Sequence[Bars], measures: Sequence[str], file: Path, *, title: str) -> None:
    """Draw a grouped bar chart as a PNG: one group per measure, one bar per row."""
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


_LARGE = 20
"""Means from here on are shown with one decimal."""

COLUMNS = {
    "in_evidence": "In evidence",
    "is_right": "Right",
    "cites_holder": "Cites it",
    "is_refused": "Refused",
    "is_refused_wrongly": "Refused wrongly",
}
"""Column titles for the shares of a Tally."""
MEANS = {
    "mean_evidence_tokens": "Evidence",
    "mean_prompt_tokens": "Prompt",
    "mean_evaluated_tokens": "Evaluated",
    "mean_completion_tokens": "Written",
    "mean_first_token_s": "First token, s",
    "mean_s": "Answer, s",
}
"""Column titles for the means of a Tally, in tokens and seconds."""


def ask_all(
    file: Path,
    means: Means,
    ratios: Sequence[float],
    council: str | None,
    *,
    max_queries: int | None,
    out: Path | None,
    plot_file: Path | None,
    as_json: bool,
) -> None:
    """Ask all questions in all ways and print the measures. InterruptedRunError after Ctrl-C."""
    if out is not None and out.exists() and file.exists() and out.samefile(file):
        raise UsageError("--qa and --out are the same file.", hint="Use another file for --out.")
    question_file = read_questions(file)
    judged = [each for each in question_file.questions if each.is_judged]
    questions = spread(judged, max_queries)
    has_conversations = any(each.messages for each in questions)
    if has_conversations and council is not None:
        raise UsageError("A council cannot be asked in a conversation.", hint="Leave out --council.")
    means = _with_kbs(means, file, has_conversations=has_conversations)
    if num_others := len(question_file.questions) - len(judged):
        note(f"{counted(num_others, 'conversation')} not asked: neither answerable nor unanswerable.")
    num_astray = _num_astray(questions, means)
    ways = _ways(means, ratios, council)
    job = _Job(questions, ways, question_file.refusals or REFUSALS)
    job.answer(out)
    graded = {way.name: job.graded(way) for way in ways}
    tallies = [tally(name, each) for name, each in graded.items()]
    _show(tallies, graded, _about(file, means), num_astray=num_astray, as_json=as_json)
    if plot_file is not None:
        _plot_answers(tallies, plot_file, f"{file.name}: {counted(len(questions), 'question')}")


def _with_kbs(means: Means, file: Path, *, has_conversations: bool) -> Means:
    """Return the means with the corpus beside a file of conversations, unless knowledge bases are named. UsageError if there is neither."""
    if means.kbs:
        return means
    if not has_conversations or not (file.parent / "corpus.jsonl").is_file():
        raise UsageError("--qa needs a knowledge base.", hint="Name one with --kb.")
    return replace(means, collection=_indexed(file.parent, means.settings))


def _calibrate(file: Path, means: Means, *, as_json: bool) -> None:
    """Calibrate with the questions of a file, and print how well it tells the unanswerable ones."""
    questions = [each for each in read_questions(file).questions if each.is_judged]
    means = _with_kbs(means, file, has_conversations=any(each.messages for each in questions))
    with render.Progress("Searching") as progress:
        done = itertools.count(1)
        fitted = calibrated(
            [(each.messages or (Message("user", each.question),), each.is_answerable) for each in questions],
            means,
            on_question=lambda: progress("questions", next(done), len(questions)),
        )
    if as_json:
        emit({"file": file.name, "kbs": _kb_names(file, means), **fitted.to_dict()})
        return
    columns = ("Threshold", "Refused wrongly", "Caught")
    rows = [(f"{each.threshold:.3f}", f"{100 * each.refused_wrongly:.0f} %", f"{100 * each.caught:.0f} %") for each in fitted.curve]
    render.table(columns, rows, right=columns)
    note(
        f"{fitted.num_answerable} answerable and {fitted.num_unanswerable} unanswerable questions. On questions that it was not fitted to: "
        f"AUC {fitted.auc:.3f}, {100 * fitted.unseen.refused_wrongly:.0f} % refused wrongly, {100 * fitted.unseen.caught:.0f} % caught. "
        f"Stored with the threshold {fitted.calibration.threshold:.3f}."
    )


def _indexed(folder: Path, settings: Settings) -> tuple[Path, str]:
    """Index the corpus of a folder of conversations. Return the folder and the name of the knowledge base."""
    from localrag.kb import evaluate as measuring  # noqa: PLC0415  # weight

    collection, embedder = measuring.Collection(measuring.corpus_of(folder), {}, {}), open_embedder(settings)
    with render.Progress(f"Indexing {folder.resolve().name}") as progress:
        measuring.open_index(collection, embedder, settings.home, lambda done, total: progress("indexing", done, total)).close()
    return settings.home / measuring.FOLDER, measuring.index_name(collection, embedder)


class _Job:
    """Questions to ask in each way, and the outcomes so far."""

    def __init__(self, questions: Sequence[Question], ways: Sequence[Way], refusals: Sequence[str]) -> None:
        self._questions = questions
        self._ways = ways
        self._refusals = refusals
        self._outcomes: dict[Key, Outcome] = {}

    def answer(self, out: Path | None) -> None:
        """Ask the questions that OUT does not answer yet."""
        total = len(self._questions) * len(self._ways)
        try:
            with ExitStack() as stack:
                lines = None if out is None else stack.enter_context(Lines(out, self._questions, self._ways))
                if lines is not None and lines.outcomes:
                    self._outcomes |= lines.outcomes
                    note(f"{len(self._outcomes)} of {total} answers exist already.")
                progress = stack.enter_context(Progress(total, len(self._outcomes)))
                for way in self._ways:
                    self._ask(way, lines, progress)
        except (InterruptedRunError, KeyboardInterrupt):
            hint = "Run the same command to continue." if out is not None else "Use --out FILE to be able to continue."
            raise InterruptedRunError(f"Interrupted: {total - len(self._outcomes)} of {total} answers are left.", hint=hint) from None

    def _ask(self, way: Way, lines: Lines | None, progress: Progress) -> None:
        questions = [question for question in self._questions if (question.id, way.name) not in self._outcomes]
        if not questions:
            return
        with way.opened() as answering:
            for question in questions:
                outcome = answering(question.messages or question.question)
                if lines is not None:
                    lines.write(question, way, outcome, grade(question, outcome, self._refusals))
                self._outcomes[question.id, way.name] = outcome
                progress.add_tokens(outcome.completion_tokens)
                progress.advance()

    def graded(self, way: Way) -> list[Graded]:
        outcomes = [(question, self._outcomes[question.id, way.name]) for question in self._questions]
        return [(question, outcome, grade(question, outcome, self._refusals)) for question, outcome in outcomes]


def _ways(means: Means, ratios: Sequence[float], council: str | None) -> list[Way]:
    if council is not None and (means.chat_template is not None or means.system is not None):
        option = "--system" if means.chat_template is None else "--chat-template"
        raise UsageError(f"{option} does not apply to councils.", hint="Set it in models.toml, or leave out --council.")
    asks = [AskWay(means, ratio) for ratio in ratios or (None,)]
    return [*asks, *([] if council is None else [CouncilWay.of(council, means)])]


def _num_astray(questions: Sequence[Question], means: Means) -> int:
    """Count the questions that name a page missing from every knowledge base."""
    sources: set[str] = set()
    with means.opened_kbs() as knowledge_bases:
        sources.update(source for kb in knowledge_bases for source, _ in kb.sources())
    is_present = {page: any(is_page(source, page) for source in sources) for question in questions for page in question.pages}
    return sum(not all(is_present[page] for page in question.pages) for question in questions)


def _about(file: Path, means: Means) -> dict[str, object]:
    return {"file": file.name, "model": means.model_name, "kbs": _kb_names(file, means)}


def _kb_names(file: Path, means: Means) -> list[str]:
    return [shown(each) for each in means.kbs] if means.collection is None else [file.resolve().parent.name]


def _show(
    tallies: Sequence[Tally], graded: Mapping[str, Sequence[Graded]], about: Mapping[str, object], *, num_astray: int, as_json: bool
) -> None:
    first, *others = tallies
    compared = [compare(other.way, graded[other.way], first.way, graded[first.way]) for other in others]
    alike = _alike(graded)
    failed = [outcome for each in graded.values() for _, outcome, _ in each if outcome.error]
    if as_json:
        rows = {"ways": [each.to_dict() for each in tallies], "compared": [each.to_dict() for each in compared]}
        emit({**about, **rows, "same_prompts": alike, "num_sources_not_found": num_astray})
        return
    columns = ("Way", "Questions", *COLUMNS.values(), "Invented", "Support", "No unsupported claims", "Errors")
    render.table(columns, [_row(each) for each in tallies], right=columns[1:-1])
    click.echo()
    columns = ("Means", *MEANS.values())
    render.table(columns, [_means(each) for each in tallies], right=columns[1:])
    for each in compared:
        note(
            f"Right only with {each.way}: {each.num_only_way}; right only with {each.other}: {each.num_only_other} "
            f"(sign test, p = {each.p_value:.3f})."
        )
    if failed:
        note(f"{len(failed)} failed. First error: {safe(failed[0].error_text)}")
    for one, other in alike:
        note(f"Warning: {one} and {other} sent identical prompts, so the ratio had no effect. Try --top-k fit, or a smaller --ctx.")
    if num_astray:
        note(f"Warning: {counted(num_astray, 'question')} with sources missing from the knowledge base. Check --kb.")


def _row(row: Tally) -> tuple[str, ...]:
    shares = (_cell(share, is_right=name == "is_right") for name, share in row.shares.items())
    support = "–" if row.mean_support is None else f"{row.mean_support:.2f}"
    supported = _cell(row.is_supported, is_right=False)
    errors = ", ".join(f"{num} {name}" for name, num in row.errors.items())
    return row.way, str(row.num_questions), *shares, str(row.num_invented), support, supported, errors


def _means(row: Tally) -> tuple[str, ...]:
    return row.way, *(f"{getattr(row, name):.{1 if name.endswith('_s') else 0}f}" for name in MEANS)


def _cell(share: Share, *, is_right: bool) -> str:
    if not share.of:
        return "–"
    low, high = share.interval
    return f"{share.num}/{share.of}" + (f" ({100 * low:.0f}–{100 * high:.0f} %)" if is_right else "")


def _alike(graded: Mapping[str, Sequence[Graded]]) -> list[tuple[str, str]]:
    """Return the pairs of ways that sent the same prompts for all questions."""
    prompts = {way: [outcome.prompt for _, outcome, _ in each] for way, each in graded.items()}
    ways = [way for way, each in prompts.items() if any(each)]
    return [(one, other) for at, one in enumerate(ways) for other in ways[at + 1 :] if prompts[one] == prompts[other]]


def _compare_files(one: Path, other: Path, *, as_json: bool) -> None:
    """Compare two OUT files on the same questions, and print the paired tests."""
    compared = compare_runs(read_run(one), read_run(other))
    if as_json:
        emit({"a": one.name, "b": other.name, "compared": [each.to_dict() for each in compared]})
        return
    columns = ("Measure", "Pairs", "A", "B", "B − A", "95 % interval", "Only A", "Only B", "p")
    for each in compared:
        if len(compared) > 1 or each.way != each.other:
            click.echo(safe(f"A: {each.way}, B: {each.other}"))
        render.table(columns, [_test_row(test) for test in each.tests], right=columns[1:])
    note(f"A: {safe(str(one))}, B: {safe(str(other))}. p: exact McNemar test for shares, paired bootstrap for means.")


def _test_row(test: PairedTest) -> tuple[str, ...]:
    def shown(value: float, sign: str = "") -> str:
        return f"{value:{sign}.1f}" if max(abs(test.a), abs(test.b)) >= _LARGE else f"{value:{sign}.3f}"

    only = ("", "") if test.is_mean else (str(test.num_only_a), str(test.num_only_b))
    interval = f"{shown(test.low, '+')} to {shown(test.high, '+')}"
    numbers = shown(test.a), shown(test.b), shown(test.difference, "+"), interval
    return test.measure, str(test.num_pairs), *numbers, *only, f"{test.p_value:.4f}"


def _plot_answers(tallies: Sequence[Tally], file: Path, title: str) -> None:

    names = [name for name in COLUMNS if any(each.shares[name].of for each in tallies)]
    rows = []
    for each in tallies:
        shares = [each.shares[name] for name in names]
        rows.append(Bars(each.way, [share.value for share in shares], [share.interval for share in shares]))
    draw_bars(rows, [COLUMNS[name] for name in names], file, title=title)
    note(f"Plotted the measures to {safe(str(file))}.")


@click.command("eval")
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path, exists=True, file_okay=False), required=False)
@click.option(
    "--qa", "qa_file", type=InputFile(), metavar="FILE.jsonl", help="Measure answers to the questions in this file, instead of DIR."
)
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, help="DIR: search mode to measure. Repeatable.  [default: all]")
@click.option(
    "--rerank", metavar="llm|NAME", help="DIR: also measure hybrid search with a reranker: llm (uses --model) or a cross-encoder."
)
@click.option("--kb", "kbs", multiple=True, metavar="NAME", help="--qa: a knowledge base to answer from. Repeatable.")
@click.option(
    "--context-ratio",
    "ratios",
    type=options.Number(0, 1),
    multiple=True,
    metavar="R",
    help="--qa: maximum share of the window for evidence. Repeatable; each value adds a row.  [default: the budget's value, 0.5]",
)
@click.option("--council", metavar="NAME", help="--qa: also measure this council of models.toml.")
@click.option(
    "--top-k",
    type=options.Depth(),
    metavar="N",
    help="--qa: number of passages to retrieve, or fit.  [default: as in ask; a council's own]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="--qa: maximum length of an answer, in tokens.  [default: 512; a council's own]",
)
@click.option("--quote", is_flag=True, help="--qa: as in ask; not for a council.")
@click.option("--evidence", type=click.Choice(get_args(EvidenceKind)), help="--qa: as in ask; not for a council.")
@click.option("--evidence-tokens", type=click.IntRange(min=1), metavar="N", help="--qa: as in ask; not for a council.")
@click.option("--cite", type=click.Choice(get_args(Cite)), help=f"--qa: as in ask; not for a council.  [default: {DEFAULT_CITE}]")
@click.option(
    "--unanswerable",
    type=click.Choice(get_args(Unanswerable)),
    help=f"--qa: as in ask; not for a council.  [default: {DEFAULT_UNANSWERABLE}]",
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="--qa: instead of asking the model, learn from these questions when the sources do not answer one, and store it for the embedder. "
    f"Needs {MIN_QUESTIONS} questions with answers and {MIN_QUESTIONS} without.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="--qa: random seed, for repeatable sampling.  [default: 0]")
@click.option("--system", type=options.Text(), metavar="TEXT", help="--qa: system prompt (@file for a file).")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="OUT.jsonl",
    help="File for the measures of each question and, with --qa, the answers. --qa skips questions already answered there.",
)
@click.option(
    "--compare",
    "runs",
    nargs=2,
    type=InputFile(exists=True),
    metavar="A.jsonl B.jsonl",
    help="Compare two --out files on the same questions by paired tests, instead of DIR.",
)
@click.option("--queries", "max_queries", type=click.IntRange(min=1), metavar="N", help="Ask only N of the questions.")
@click.option(
    "--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.png", help="Plot the measures to a PNG file."
)
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
    evidence: EvidenceKind | None,
    evidence_tokens: int | None,
    cite: Cite | None,
    unanswerable: Unanswerable | None,
    calibrate: bool,
    quote: bool,
    max_tokens: int | None,
    seed: int | None,
    system: str | None,
    out: Path | None,
    runs: tuple[Path, Path] | None,
    max_queries: int | None,
    plot_file: Path | None,
    n_ctx: int | None,
    model: str | None,
    chat_template: Path | None,
    settings: Settings,
    as_json: bool,
) -> None:
    """Measure retrieval on a collection with relevance judgments or, with --qa, the answers to questions with known answers.

    DIR holds corpus.jsonl, queries.jsonl and qrels.tsv in BEIR's format, or corpus.jsonl and conversations.jsonl in MTRAG's: the last turn
    of each conversation is then searched as in a chat, with the turns before it. DIR is indexed once per embedder; the index is kept in
    localrag's home, under "eval".

    Each line of FILE.jsonl is {"id", "question", "answers": [["spelling", …], …], "sources": ["page", …]}, or a conversation. An empty
    "answers" list means that no page answers the question (docs/how-to/quality.md).

    \b
      localrag eval cranfield
      localrag eval --qa questions.jsonl --kb handbook --context-ratio 0.2 --context-ratio 0.8 --out answers.jsonl
      localrag eval --compare before.jsonl after.jsonl
    """
    of_folder: dict[str, object] = {"--mode": modes, "--rerank": rerank}
    of_qa: dict[str, object] = {
        "--kb": kbs,
        "--context-ratio": ratios,
        "--council": council,
        "--top-k": top_k,
        "--ctx": n_ctx,
        "--max-tokens": max_tokens,
        "--evidence": evidence,
        "--evidence-tokens": evidence_tokens,
        "--cite": cite,
        "--unanswerable": unanswerable,
        "--calibrate": calibrate or None,
        "--quote": quote or None,
        "--seed": seed,
        "--system": system,
    }
    if runs is not None:
        both = {"DIR": folder, "--qa": qa_file, "--out": out, "--queries": max_queries, "--plot": plot_file, "--model": model}
        _check_alone({**both, **of_folder, **of_qa})
        _compare_files(*runs, as_json=as_json)
        return
    _check_one(folder, qa_file, {name: bool(value) or value == 0 for name, value in (of_folder if qa_file else of_qa).items()})
    if out == STANDARD_OUTPUT:
        raise UsageError("The measures go to standard output, so --out needs a file.", hint="Use --out OUT.jsonl.")
    if calibrate:
        _check_calibration({**of_qa, "--model": model, "--chat-template": chat_template, "--queries": max_queries, "--plot": plot_file})
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
            out=out,
            settings=settings,
            model=model,
            chat_template=chat_template,
            as_json=as_json,
        )
        return
    assert qa_file is not None, "_check_one allows no other case"
    from localrag.session.quality import Means  # noqa: PLC0415  # weight

    means = Means(
        settings=settings,
        model=model,
        chat_template=chat_template,
        kbs=tuple(dict.fromkeys(kbs)),
        n_ctx=n_ctx,
        top_k=top_k,
        evidence=evidence,
        evidence_tokens=evidence_tokens,
        cite=cite,
        unanswerable=unanswerable,
        quote=quote,
        max_tokens=max_tokens,
        seed=seed or 0,
        repeatable=seed is not None,
        system=system,
    )
    if calibrate:
        _calibrate(qa_file, means, as_json=as_json)
        return
    ask_all(qa_file, means, tuple(dict.fromkeys(ratios)), council, max_queries=max_queries, out=out, plot_file=plot_file, as_json=as_json)


def _check_one(folder: Path | None, qa_file: Path | None, others: dict[str, bool]) -> None:
    """UsageError unless exactly one of DIR and --qa is given, without the options that apply only to the other."""
    if (folder is None) == (qa_file is None):
        message = "DIR and --qa exclude each other." if folder else "DIR or --qa is missing."
        raise UsageError(message, hint="Give a collection to search, a file of questions (--qa FILE.jsonl), or --compare A.jsonl B.jsonl.")
    if conflicts := [name for name, is_given in others.items() if is_given]:
        here, there = ("--qa", "DIR") if qa_file else ("DIR", "--qa")
        raise UsageError(f"{conflicts[0]} does not work with {here}.", hint=f"Leave it out. It works only with {there}.")


def _check_calibration(others: Mapping[str, object]) -> None:
    """UsageError for options that a calibration does not use."""
    conflicts = [name for name, value in others.items() if (value or value == 0) and name not in ("--kb", "--calibrate")]
    if conflicts:
        raise UsageError(f"{conflicts[0]} does not work with --calibrate.", hint="Leave it out. No model is asked.")


def _check_alone(others: Mapping[str, object]) -> None:
    """UsageError if --compare is given with other options, which would do nothing."""
    if conflicts := [name for name, value in others.items() if value or value == 0]:
        raise UsageError(f"{conflicts[0]} does not work with --compare.", hint="Leave it out: --compare only reads two files.")


def _check_plot(plot_file: Path | None) -> None:
    """UsageError for a plot file that could not be written after the measurement, which may take minutes."""
    if plot_file is not None and plot_file.suffix.lower() != ".png":
        raise UsageError(f"The plot {plot_file.name} is not a .png file.", hint="Name it FILE.png.")
    if plot_file is not None and not plot_file.parent.is_dir():
        raise UsageError(f"There is no folder {plot_file.parent}.", hint="Create it, or name another FILE.png.")


def _check_installed(*packages: str) -> None:
    """UsageError for a missing package of the extra `eval`. The packages are imported only after the measurement."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"The evaluation needs the package {package}.", hint="pip install 'localrag[eval]'")


def _check_model(model: str | None, rerank: str | None) -> None:
    if model is not None and rerank != "llm":
        raise UsageError("With DIR, --model needs --rerank llm.", hint="Add --rerank llm, or leave out --model.")


def _measure(
    folder: Path,
    modes: tuple[Mode, ...],
    rerank: str | None,
    *,
    max_queries: int | None,
    plot_file: Path | None,
    out: Path | None,
    settings: Settings,
    model: str | None,
    chat_template: Path | None,
    as_json: bool,
) -> None:
    """Measure retrieval on a collection and print the results."""
    from localrag.kb import evaluate as measuring  # noqa: PLC0415  # weight

    collection = measuring.read_collection(folder, max_queries=max_queries)
    embedder, name = open_embedder(settings), folder.resolve().name
    with (
        ExitStack() as stack,
        opened_reranker(rerank, settings=settings, model=model, chat_template=chat_template) as reranker,
        render.Progress(f"Evaluating {name}") as progress,
    ):
        lines = None if out is None else stack.enter_context(RetrievalLines(out))
        store = measuring.open_index(collection, embedder, settings.home, lambda done, total: progress("indexing", done, total))
        try:
            if not store.num_documents:
                raise UsageError(f"{collection.corpus} has no document with text.", hint="Check that the file is complete.")
            num_missing = _num_missing(collection, store)
            sizes = {"num_documents": store.num_documents, "num_chunks": store.num_chunks, "num_queries": len(collection.queries)}
            if collection.conversations:
                results = _conversation_results(collection, embedder, settings, modes or MODES, reranker, progress)
            else:
                results = measuring.evaluate(collection, store, embedder, modes=modes or MODES, reranker=reranker, progress=progress)
        finally:
            store.close()
        if lines is not None:
            lines.write(results)
    gain = measuring.gain(results)
    parts, subcollections = _parts(collection)
    if as_json:
        rows = [result.to_dict() | _parts_json(result, parts, subcollections) for result in results]
        emit({"collection": name, **sizes, "num_missing": num_missing, "results": rows, "hybrid_gain": gain})
    else:
        if parts:
            _conversation_tables(results, parts, subcollections)
        else:
            _table(results)
        if gain is not None:
            note(f"Hybrid reaches {gain:.3f} times the nDCG@10 of the better single mode, keyword or semantic.")
        if num_missing:
            note(f"Warning: {counted(num_missing, 'relevant document')} missing from corpus.jsonl. They count as not found.")
    if plot_file is not None:
        _plot_retrieval(
            results, plot_file, f"{name}: {counted(sizes['num_documents'], 'document')}, {counted(sizes['num_queries'], 'question')}"
        )


class RetrievalLines(ResultFile):
    """The OUT file of a retrieval measurement: one line per question and search mode, all written at the end."""

    run: ClassVar[str] = "evaluation"

    def write(self, results: Iterable[Result]) -> None:
        for result in results:
            for one, scores in result.scores.items():
                self.append({"id": one, "way": result.name, "scores": dict(scores)})

    def is_line(self, row: object) -> bool:
        return (
            isinstance(row, dict) and all(isinstance(row.get(name), str) for name in ("id", "way")) and isinstance(row.get("scores"), dict)
        )

    def is_kept(self, number: int, row: dict[str, Any]) -> bool:  # noqa: ARG002  # every line belongs to another run
        raise UsageError(f"{self.path} holds the measures of another run.", hint="Use another --out.")


def _conversation_results(
    collection: Collection,
    embedder: Embedder,
    settings: Settings,
    modes: Sequence[Mode],
    reranker: Reranker | None,
    progress: Callable[[str, int, int], None],
) -> list[Result]:
    """Search for each question as every command does after the turns before it, and alone in each mode."""
    from localrag.kb import KnowledgeBase  # noqa: PLC0415  # weight
    from localrag.kb import evaluate as measuring  # noqa: PLC0415

    with KnowledgeBase.open(settings.home / measuring.FOLDER, measuring.index_name(collection, embedder)) as kb:
        retriever = Retriever(knowledge_bases=[kb], embedder=open_embedder(settings, for_queries=True), learning="off")
        searches = conversation_searches(retriever, collection.conversations, modes, reranker)
        return measuring.measured(collection, searches, measuring.CONVERSATION_MEASURES, progress)


Parts = Mapping[str, Sequence[str]]
"""Name → ids of some questions of a collection."""


def _parts(collection: Collection) -> tuple[Parts, Parts]:
    """Return the first questions and the follow-ups of conversations, and the questions by subcollection. Empty for BEIR."""
    from localrag.session.retrieval import asked_before  # noqa: PLC0415  # weight

    parts: dict[str, list[str]] = {}
    subcollections: dict[str, list[str]] = {}
    for one, messages in collection.conversations.items():
        parts.setdefault("follow_ups" if asked_before(messages) else "first", []).append(one)
        if one in collection.subcollections:
            subcollections.setdefault(collection.subcollections[one], []).append(one)
    return parts, dict(sorted(subcollections.items()))


def _parts_json(result: Result, parts: Parts, subcollections: Parts) -> dict[str, object]:
    def measures(ids: Sequence[str]) -> dict[str, object]:
        return {"num_queries": len(ids), **result.over(ids)}

    if not parts:
        return {}
    by_name = {name: measures(ids) for name, ids in parts.items()}
    return {**by_name, "subcollections": {name: measures(ids) for name, ids in subcollections.items()}}


def _conversation_tables(results: Sequence[Result], parts: Parts, subcollections: Parts) -> None:
    from localrag.kb.evaluate import CONVERSATION_MEASURES  # noqa: PLC0415  # weight

    titles = {"first": "first questions", "follow_ups": "follow-ups"}
    groups = {titles[name]: parts[name] for name in titles if name in parts}
    columns = ["Search"]
    for title in CONVERSATION_MEASURES.values():
        columns += [title, *groups]
    rows = []
    for result in results:
        cells = [result.name]
        for measure, mean in result.measures.items():
            cells += [f"{mean:.4f}", *(f"{result.over(ids)[measure]:.4f}" for ids in groups.values())]
        rows.append([*cells, f"{result.p50_ms:.1f}"])
    columns.append("ms/query")
    render.table(columns, rows, right=columns[1:])
    sizes = ", ".join(counted(len(ids), title.removesuffix("s")) for title, ids in groups.items())
    note(f"{sizes}. conversation: searched with the turns before, as ask, chat and serve do; the others: the last turn alone.")
    if not subcollections:
        return
    for measure, title in CONVERSATION_MEASURES.items():
        columns = [title, *(f"{name} ({len(ids)})" for name, ids in subcollections.items())]
        rows = [[one.name, *(f"{one.over(ids)[measure]:.4f}" for ids in subcollections.values())] for one in results]
        click.echo()
        render.table(columns, rows, right=columns[1:])


def _num_missing(collection: Collection, store: Store) -> int:
    """Count the documents that are judged relevant but missing from the collection."""
    relevant = {document for grades in collection.qrels.values() for document, grade in grades.items() if grade > 0}
    return len(relevant.difference(store.documents()))


def _table(results: Sequence[Result]) -> None:
    from localrag.kb.evaluate import MEASURES  # noqa: PLC0415  # weight

    columns = ("Mode", *MEASURES.values(), "ms/query")
    rows = [(one.name, *(f"{one.measures[name]:.4f}" for name in MEASURES), f"{one.p50_ms:.1f}") for one in results]
    render.table(columns, rows, right=columns[1:])


def _plot_retrieval(results: Sequence[Result], file: Path, title: str) -> None:
    from localrag.kb.evaluate import CONVERSATION_MEASURES, MEASURES  # noqa: PLC0415  # weight

    rows = [Bars(f"{one.name} ({one.p50_ms:.0f} ms)", list(one.measures.values())) for one in results]
    titles = MEASURES | CONVERSATION_MEASURES
    draw_bars(rows, [titles[name] for name in results[0].measures], file, title=title)
    note(f"Plotted the measures to {safe(str(file))}.")
