"""ask and budget: one prepared prompt, with or without an answer."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from localrag.cli import display, options
from localrag.decoding import SamplingParams
from localrag.session import Session
from localrag.settings import Settings


@click.command("ask")
@click.argument("question", type=options.Text())
@options.asking
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Makes sampling repeatable.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--explain", is_flag=True, help="Show who got which part of the window.")
@click.option("--dry-run", is_flag=True, help="Stop before the first token is evaluated; with --json, show the exact prompt.")
@options.as_json
def ask_command(
    question: str,
    settings: Settings,
    model: str | None,
    chat_template: Path | None,
    kbs: tuple[str, ...],
    system: str | None,
    top_k: int,
    context_ratio: float,
    n_ctx: int | None,
    max_tokens: int,
    seed: int,
    temperature: float,
    explain: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Answer QUESTION; text that is piped in is evidence.

    \b
      localrag ask "At what temperature is PLA annealed?" --kb handbook
      cat build.log | localrag ask "What failed?"
    """
    piped = options.read_piped()
    sampling = SamplingParams(seed=seed, temperature=temperature, max_tokens=max_tokens)
    with Session.open(model, kbs=kbs, n_ctx=n_ctx, chat_template=chat_template, vocab_only=dry_run, settings=settings) as session:
        if dry_run:
            prepared = session.prepare(
                question, system=system, top_k=top_k, context_ratio=context_ratio, max_tokens=max_tokens, piped=piped
            )
            display.prepared(prepared, session.engine.name, as_json=as_json, with_prompt=True)
            return 0
        stream = None if as_json else display.AnswerStream()
        with _first_interrupt(session.engine.cancel_all):
            answer = session.ask(
                question, system=system, top_k=top_k, context_ratio=context_ratio, sampling=sampling, piped=piped, on_text=stream
            )
        if stream is not None:
            stream.close()
    display.answer(answer, as_json=as_json, explain=explain, asked_kbs=kbs)
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
@click.option("--show-allocation", is_flag=True, help="Also list the passages, what they take, and what was left out.")
@options.as_json
def budget_command(
    task: str,
    settings: Settings,
    model: str | None,
    chat_template: Path | None,
    kbs: tuple[str, ...],
    system: str | None,
    top_k: int,
    context_ratio: float,
    n_ctx: int | None,
    max_tokens: int,
    show_allocation: bool,
    as_json: bool,
) -> None:
    """Show the budget that asking TASK would have. No weights are loaded and nothing is generated."""
    with Session.open(model, kbs=kbs, n_ctx=n_ctx, chat_template=chat_template, vocab_only=True, settings=settings) as session:
        prepared = session.prepare(task, system=system, top_k=top_k, context_ratio=context_ratio, max_tokens=max_tokens)
        display.prepared(prepared, session.engine.name, as_json=as_json, with_passages=show_allocation)
