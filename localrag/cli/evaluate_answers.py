"""eval --qa: questions with known answers, asked in several ways, and a table of what came of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from localrag.cli import display
from localrag.cli.batch import Progress
from localrag.cli.evaluate_lines import Key, Lines
from localrag.cli.text import emit, note, safe
from localrag.errors import InterruptedRunError, UsageError
from localrag.grading import REFUSALS, Outcome, Question, Share, Tally, compare, grade, read_questions, spread, tally
from localrag.grading.grades import is_page
from localrag.grading.tallies import Graded
from localrag.kb import shown
from localrag.session import open_knowledge_base
from localrag.session.quality import AskWay, CouncilWay, Means, Way

COLUMNS = {
    "in_evidence": "In evidence",
    "is_right": "Right",
    "cites_holder": "Cites it",
    "is_refused": "Refused",
    "is_refused_wrongly": "Refused wrongly",
}
"""The shares of a Tally as a person reads them."""


def run(
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
    """Ask all of it, and show what came of it. InterruptedRunError where a person stopped it."""
    if not means.kbs:
        raise UsageError("--qa asks a knowledge base, and none is named.", hint="Name one with --kb.")
    if out is not None and out.exists() and file.exists() and out.samefile(file):
        raise UsageError("--qa and --out are the same file.", hint="Give --out a file of its own.")
    read = read_questions(file)
    questions = spread(read.questions, max_queries)
    num_astray = _num_astray(questions, means)
    ways = _ways(means, ratios, council)
    job = _Job(questions, ways, read.refusals or REFUSALS)
    job.answer(out)
    graded = {way.name: job.graded(way) for way in ways}
    tallies = [tally(name, each) for name, each in graded.items()]
    _show(tallies, graded, _about(file, means), num_astray=num_astray, as_json=as_json)
    if plot_file is not None:
        _plot(tallies, plot_file, f"{file.name}: {len(questions)} questions")


class _Job:
    """Questions by ways, and what came of each so far."""

    def __init__(self, questions: Sequence[Question], ways: Sequence[Way], refusals: Sequence[str]) -> None:
        self._questions = questions
        self._ways = ways
        self._refusals = refusals
        self._outcomes: dict[Key, Outcome] = {}

    def answer(self, out: Path | None) -> None:
        """Ask what is not in OUT."""
        total = len(self._questions) * len(self._ways)
        try:
            with ExitStack() as opened:
                lines = None if out is None else opened.enter_context(Lines(out, self._questions, self._ways))
                if lines is not None and lines.outcomes:
                    self._outcomes |= lines.outcomes
                    note(f"{len(self._outcomes)} of {total} are answered already.")
                progress = opened.enter_context(Progress(total, len(self._outcomes)))
                for way in self._ways:
                    self._ask(way, lines, progress)
        except (InterruptedRunError, KeyboardInterrupt):
            hint = "The same command goes on with them." if out is not None else "With --out FILE it could go on with them."
            raise InterruptedRunError(f"Interrupted: {total - len(self._outcomes)} of {total} are left.", hint=hint) from None

    def _ask(self, way: Way, lines: Lines | None, progress: Progress) -> None:
        left = [question for question in self._questions if (question.id, way.name) not in self._outcomes]
        if not left:
            return
        with way.opened() as answering:
            for question in left:
                outcome = answering(question.question)
                if lines is not None:
                    lines.write(question, way, outcome, grade(question, outcome, self._refusals))
                self._outcomes[question.id, way.name] = outcome
                progress.add_tokens(outcome.completion_tokens)
                progress.advance()

    def graded(self, way: Way) -> list[Graded]:
        found = [(question, self._outcomes[question.id, way.name]) for question in self._questions]
        return [(question, outcome, grade(question, outcome, self._refusals)) for question, outcome in found]


def _ways(means: Means, ratios: Sequence[float], council: str | None) -> list[Way]:
    if council is not None and (means.chat_template is not None or means.system is not None):
        option = "--system" if means.chat_template is None else "--chat-template"
        raise UsageError(f"{option} is for asks, and a council has its own.", hint="Set it in models.toml, or leave --council out.")
    asks = [AskWay(means, ratio) for ratio in ratios or (None,)]
    return [*asks, *([] if council is None else [CouncilWay.of(council, means)])]


def _num_astray(questions: Sequence[Question], means: Means) -> int:
    """Questions that name a page that no knowledge base has."""
    found: set[str] = set()
    for name in means.kbs:
        with open_knowledge_base(name, settings=means.settings) as kb:
            found.update(source for source, _ in kb.sources())
    known = {page: any(is_page(source, page) for source in found) for question in questions for page in question.pages}
    return sum(not all(known[page] for page in question.pages) for question in questions)


def _about(file: Path, means: Means) -> dict[str, object]:
    return {"file": file.name, "model": means.model_name, "kbs": [shown(each) for each in means.kbs]}


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
    columns = ("Way", "Questions", *COLUMNS.values(), "Invented", "s", "Evaluated", "Written", "Errors")
    display.table(columns, [_row(each) for each in tallies], right=columns[1:-1])
    for each in compared:
        note(
            f"Right with {each.way} alone {each.num_only_way}, with {each.other} alone {each.num_only_other} "
            f"(sign test, p = {each.p_value:.3f})."
        )
    if failed:
        note(f"{len(failed)} could not be answered; the first: {safe(failed[0].error_text)}")
    for one, other in alike:
        note(f"Warning: {one} and {other} sent the very same prompts: the ratio bound nothing. Try --top-k fit, or a smaller --ctx.")
    if num_astray:
        note(f"Warning: {num_astray} questions name sources that the knowledge base does not have; check --kb.")


def _row(row: Tally) -> tuple[str, ...]:
    shares = (_cell(share, is_right=name == "is_right") for name, share in row.shares.items())
    means = f"{row.mean_s:.1f}", f"{row.mean_evaluated_tokens:.0f}", f"{row.mean_completion_tokens:.0f}"
    errors = ", ".join(f"{num} {name}" for name, num in row.errors.items())
    return row.way, str(row.num_questions), *shares, str(row.num_invented), *means, errors


def _cell(share: Share, *, is_right: bool) -> str:
    if not share.of:
        return "–"
    low, high = share.interval
    return f"{share.num}/{share.of}" + (f" ({100 * low:.0f}–{100 * high:.0f} %)" if is_right else "")


def _alike(graded: Mapping[str, Sequence[Graded]]) -> list[tuple[str, str]]:
    """Pairs of ways that sent the same prompts for all questions."""
    prompts = {way: [outcome.prompt for _, outcome, _ in each] for way, each in graded.items()}
    asked = [way for way, each in prompts.items() if any(each)]
    return [(one, other) for at, one in enumerate(asked) for other in asked[at + 1 :] if prompts[one] == prompts[other]]


def _plot(tallies: Sequence[Tally], file: Path, title: str) -> None:
    from localrag.report.bars import Bars, draw  # noqa: PLC0415  # weight

    known = [name for name in COLUMNS if any(each.shares[name].of for each in tallies)]
    rows = []
    for each in tallies:
        shares = [each.shares[name] for name in known]
        rows.append(Bars(each.way, [share.value for share in shares], [share.interval for share in shares]))
    draw(rows, [COLUMNS[name] for name in known], file, title=title)
    note(f"Drew the measures into {safe(str(file))}.")
