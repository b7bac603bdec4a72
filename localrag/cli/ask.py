"""ask and budget: one prepared prompt, with or without an answer."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

import click

from localrag.cli import display, options
from localrag.decoding import SamplingParams
from localrag.session import Session
from localrag.settings import Settings


class _AskCommand(click.Command):
    """`--explain` is a flag that may have a value: click would take the question for it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--explain-full" if arg == "--explain=full" else arg for arg in args])


@click.command("ask", cls=_AskCommand)
@click.argument("question", type=options.Text())
@options.asking
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Makes sampling repeatable.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--session", "name", default="ask", show_default=True, metavar="NAME", help="The session to keep the ledger under.")
@click.option("--no-keep", is_flag=True, help="Keep nothing of this in the journal.")
@click.option("--explain", is_flag=True, help="Show who got which part of the window; --explain=full shows the very prompt too.")
@click.option("--explain-full", is_flag=True, hidden=True)
@click.option("--dry-run", is_flag=True, help="Stop before the first token is evaluated; with --json, show the exact prompt.")
@options.as_json
def ask_command(
    question: str,
    settings: Settings,
    model: str | None,
    chat_template: Path | None,
    n_ctx: int | None,
    kbs: tuple[str, ...],
    budget: str | None,
    max_tokens: int,
    seed: int,
    temperature: float,
    name: str,
    no_keep: bool,
    explain: bool,
    explain_full: bool,
    dry_run: bool,
    as_json: bool,
    **shape: Unpack[options.Shape],
) -> int:
    """Answer QUESTION; text that is piped in is evidence.

    \b
      localrag ask "At what temperature is PLA annealed?" --kb handbook
      cat build.log | localrag ask "What failed?"
    """
    asked = options.asked(shape, piped=options.read_piped())
    explained: display.Explain = "full" if explain_full else "ledger" if explain else ""
    sampling = SamplingParams(seed=seed, temperature=temperature, max_tokens=max_tokens)
    with Session.open(
        model,
        kbs=kbs,
        n_ctx=n_ctx,
        chat_template=chat_template,
        vocab_only=dry_run,
        budget=budget,
        name=name,
        keep=not (no_keep or dry_run),
        settings=settings,
    ) as session:
        if dry_run:
            ready = session.prepare(question, max_tokens=max_tokens, **asked)
            explained = "full" if explain_full or as_json else ""
            display.prepared(
                ready, session.engine.name, task=question, tokenizer=session.engine.tokenizer, as_json=as_json, explain=explained
            )
            return 0
        stream = None if as_json else display.AnswerStream()
        with _first_interrupt(session.engine.cancel_all):
            answer = session.ask(question, sampling=sampling, on_text=stream, **asked)
        if stream is not None:
            stream.close()
        display.answer(answer, tokenizer=session.engine.tokenizer, as_json=as_json, explain=explained, asked_kbs=kbs)
    return 130 if answer.finish_reason == "cancelled" else 0


@contextmanager
def _first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`, which keeps what was written; the second is a KeyboardInterrupt, wherever the program is.

    Where Ctrl-C is ignored, as in a shell's background jobs, it stays so.
    """

    def handle(_signal: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@click.command("budget")
@click.argument("task", type=options.Text())
@options.asking
@click.option("--show-allocation", is_flag=True, help="List tiers and sections with their items, what they take, and what was left out.")
@options.as_json
def budget_command(
    task: str,
    settings: Settings,
    model: str | None,
    chat_template: Path | None,
    n_ctx: int | None,
    kbs: tuple[str, ...],
    budget: str | None,
    max_tokens: int,
    show_allocation: bool,
    as_json: bool,
    **shape: Unpack[options.Shape],
) -> None:
    """Show the budget that asking TASK would have. No weights are loaded and nothing is generated."""
    asked = options.asked(shape)
    with Session.open(
        model, kbs=kbs, n_ctx=n_ctx, chat_template=chat_template, vocab_only=True, budget=budget, keep=False, settings=settings
    ) as session:
        ready = session.prepare(task, max_tokens=max_tokens, **asked)
        name, tokenizer = session.engine.name, session.engine.tokenizer
        display.prepared(ready, name, task=task, tokenizer=tokenizer, as_json=as_json, with_allocation=show_allocation)
