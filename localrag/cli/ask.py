"""The commands ask and budget: answer a question or a file of questions, or show the budget of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from localrag.cli import options, render
from localrag.cli.files import STANDARD_OUTPUT, InputFile
from localrag.cli.terminal import end_answer, first_interrupt, note
from localrag.errors import UsageError, counted
from localrag.question import Question
from localrag.session import Answer, Session
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.session.exhaustive import Step


class _AskCommand(click.Command):
    """Accepts `--explain` and `--explain=full`. As an optional value in click, `--explain` would consume the question."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--explain-full" if arg == "--explain=full" else arg for arg in args])


@click.command("ask", cls=_AskCommand)
@click.argument("question", type=options.Text(), required=False)
@options.evidence_argument
@options.asking
@click.option(
    "--batch",
    "source",
    type=InputFile(),
    metavar="IN.jsonl",
    help='A file of questions (- for stdin), one {"id", "question"} object per line. Other keys are copied to the answer.',
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="OUT.jsonl",
    help="File for the answers of --batch (- for stdout); questions already answered there are skipped.",
)
@click.option("--force", is_flag=True, help="With --batch: keep answers to other questions in OUT and re-ask changed questions.")
@click.option("--exhaustive", is_flag=True, help="Read every matching passage, in several passes if needed, then answer.")
@options.seed
@options.temperature
@click.option("--session", "name", default="ask", show_default=True, metavar="NAME", help="Session name for the record in the journal.")
@click.option("--no-keep", is_flag=True, help="Do not record this in the journal.")
@click.option("--explain", is_flag=True, help="Show how the window was divided. --explain=full also shows the exact prompt.")
@click.option("--explain-full", is_flag=True, hidden=True)
@click.option("--dry-run", is_flag=True, help="Build the prompt but do not run the model. With --json, show the exact prompt.")
@options.as_json
def ask_command(
    question: str | None,
    piped: bytes | None,
    source: Path | None,
    out: Path | None,
    force: bool,
    exhaustive: bool,
    seed: int | None,
    temperature: float,
    name: str,
    no_keep: bool,
    explain: bool,
    explain_full: bool,
    dry_run: bool,
    as_json: bool,
    **asking: Unpack[options.Asking],
) -> int:
    """Answer QUESTION. Piped text is used as evidence. To use a file on standard input too, add - after the question.

    \b
      localrag ask "At what temperature is PLA annealed?" --kb handbook
      cat build.log | localrag ask "What failed?"
      localrag ask "What failed?" - < build.log
      localrag ask --batch questions.jsonl --out answers.jsonl --kb handbook
    """
    others = {"--json": as_json, "--dry-run": dry_run, "--explain": explain or explain_full, "--exhaustive": exhaustive}
    _check_exhaustive(asking, exhaustive=exhaustive, dry_run=dry_run)
    question = _checked(question, source, out, force=force, others=[name for name, is_given in others.items() if is_given])
    sampling = options.sampling(asking, seed=seed, temperature=temperature)
    request = options.question(asking, question, sampling)
    text, stdin_bytes = options.piped_evidence(piped)
    request = request.but(piped=text)
    open_session = options.opener(asking, vocab_only=dry_run, keep=not (no_keep or dry_run), name=name)
    if source is not None and out is not None:
        return _ask_all(source, out, open_session, request, force=force)
    explained: render.Explain = "full" if explain_full or (dry_run and as_json) else "ledger" if explain else ""
    with open_session() as session:
        model, tokenizer = session.engine.name, session.engine.tokenizer
        if dry_run:
            ready = session.prepare(request)
            render.prepared(
                ready,
                model,
                task=question,
                tokenizer=tokenizer,
                as_json=as_json,
                settings=asking["settings"],
                stdin_bytes=stdin_bytes,
                explain=explained,
            )
            return 0
        answer = _answered(session, request, as_json=as_json, exhaustive=exhaustive)
        render.answer(
            answer,
            tokenizer=tokenizer,
            as_json=as_json,
            explain=explained,
            settings=asking["settings"],
            stdin_bytes=stdin_bytes,
            asked_kbs=[kb.address for kb in session.knowledge_bases],
        )
    return 130 if answer.finish_reason == "cancelled" else 0


def _checked(question: str | None, source: Path | None, out: Path | None, *, force: bool, others: list[str]) -> str:
    """Return the question, or "" for a batch. UsageError for options that conflict. `others` are options that --batch rejects."""
    if source is None:
        if out is not None or force:
            raise UsageError(
                f"{'--out' if out is not None else '--force'} needs --batch.", hint="Add a file of questions: --batch IN.jsonl"
            )
        if question is None:
            raise UsageError("QUESTION is missing.", hint="Give a question, or a file of questions: --batch IN.jsonl --out OUT.jsonl")
        return question
    if question is not None:
        raise UsageError("QUESTION and --batch exclude each other.", hint="Put the question into the file, or leave out --batch.")
    if out is None:
        raise UsageError("--batch needs a file for the answers.", hint="Add --out OUT.jsonl, or --out - for standard output.")
    if force and out == STANDARD_OUTPUT:
        raise UsageError("--force needs an answer file, but --out - writes to standard output.", hint="Leave out --force.")
    if others:
        raise UsageError(f"{others[0]} does not work with --batch.", hint="Leave it out. Every line of OUT is a complete answer object.")
    return ""


def _check_exhaustive(asking: options.Asking, *, exhaustive: bool, dry_run: bool) -> None:
    if not exhaustive:
        return
    if not asking["kbs"]:
        raise UsageError("--exhaustive needs a knowledge base.", hint="Name one with --kb.")
    if dry_run:
        raise UsageError("--exhaustive and --dry-run exclude each other.", hint="Leave one out.")


def _answered(session: Session, question: Question, *, as_json: bool, exhaustive: bool) -> Answer:
    """Answer a question. Unless the output is JSON, print the text as it is generated."""
    stream = None if as_json else render.AnswerStream()
    with first_interrupt(lambda: end_answer(session.engine)):
        if exhaustive:
            answer = _answered_from_all(session, question, stream)
        else:
            answer = session.ask(question, on_text=stream, on_thought=None if stream is None else stream.think, keep_partial=True)
    if stream is not None:
        stream.close()
    return answer


def _answered_from_all(session: Session, question: Question, stream: render.AnswerStream | None) -> Answer:
    from localrag.session.exhaustive import ask_all  # noqa: PLC0415  # weight: few asks read everything

    with render.Progress("Reading all matching passages") as progress:

        def on_text(text: str) -> None:
            progress.stop()  # the answer replaces the bar
            if stream is not None:
                stream(text)

        def on_step(at: Step) -> None:
            progress(f"pass {at.num_passes + 1}, {counted(at.num_facts, 'fact')} noted", at.num_read, at.num_matching)

        def on_thought(text: str) -> None:
            progress.stop()
            if stream is not None:
                stream.think(text)

        return ask_all(session, question, on_text=on_text, on_thought=on_thought, on_step=on_step)


def _ask_all(source: Path, out: Path, open_session: Callable[[], Session], template: Question, *, force: bool) -> int:
    """Answer the questions of a file. `template` holds the default options."""
    from localrag.cli.batch import BatchRun  # noqa: PLC0415  # weight: most asks are single

    with BatchRun(source, out, template, force=force) as run:
        if run.is_done:
            note(f"Nothing to do: {safe(str(out))} already has every answer.")
            return 0
        with open_session() as session, first_interrupt(lambda: run.stop(session.engine)):
            return run.run(session)


@click.command("budget")
@click.argument("task", type=options.Text(), required=False)
@options.asking
@click.option("--council", metavar="NAME", help="Show the budget of every role of a council in models.toml; TASK is optional.")
@click.option("--show-allocation", is_flag=True, help="List the items of each tier and section, their tokens and the items left out.")
@options.as_json
def budget_command(task: str | None, council: str | None, show_allocation: bool, as_json: bool, **asking: Unpack[options.Asking]) -> None:
    """Show the token budget of TASK. Loads only the tokenizer, and generates nothing."""
    if council is not None:
        from localrag.cli.council import show  # noqa: PLC0415  # weight

        settings, model, n_ctx, max_tokens = asking["settings"], asking["model"], asking["n_ctx"], asking["max_tokens"]
        show(council, task, settings=settings, model=model, n_ctx=n_ctx, max_tokens=max_tokens, as_json=as_json)
        return
    if task is None:
        raise UsageError("TASK is missing.", hint="Give a task, or a council with --council NAME.")
    question = options.question(asking, task)
    with options.opener(asking, vocab_only=True, keep=False)() as session:
        ready = session.prepare(question)
        name, tokenizer, settings = session.engine.name, session.engine.tokenizer, asking["settings"]
        render.prepared(ready, name, task=task, tokenizer=tokenizer, as_json=as_json, settings=settings, with_allocation=show_allocation)
