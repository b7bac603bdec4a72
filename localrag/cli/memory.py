"""The command memory: facts that are kept across conversations."""

from __future__ import annotations

import click

from localrag.cli import options, render
from localrag.cli.terminal import emit, note
from localrag.errors import UsageError
from localrag.journal import DEFAULT_IMPORTANCE, Journal
from localrag.report.page import when
from localrag.settings import Settings

importance_option = click.option("--importance", type=options.Number(0, 1), metavar="0..1", help="Importance of the fact.")


@click.group("memory")
def memory_command() -> None:
    """Manage facts that chats remember.

    A chat includes facts that share a word with the question, and important facts from the last week. To change what counts as important
    (min_importance, 0.6) and how long it counts (max_age_days, 7), edit [memories] in models.toml.
    """


@memory_command.command("list")
@options.models_file
@options.as_json
def list_command(settings: Settings, as_json: bool) -> None:
    """List all facts, oldest first."""
    with Journal.open(settings.home) as journal:
        memories = journal.memories.all()
    if as_json:
        emit({"memories": [each.to_dict() for each in memories]})
        return
    rows = [(each.id, f"{each.importance:g}", when(each.updated_at), each.text) for each in memories]
    render.table(("ID", "Importance", "Last changed", "Fact"), rows, right=("ID", "Importance"))


@memory_command.command("add")
@click.argument("text", type=options.Text())
@importance_option
@options.models_file
@options.as_json
def add_command(text: str, importance: float | None, settings: Settings, as_json: bool) -> None:
    """Add a fact."""
    with Journal.open(settings.home) as journal:
        memory_id = journal.memories.add(text, DEFAULT_IMPORTANCE if importance is None else importance)
    _report({"id": memory_id}, f"Remembered as {memory_id}.", as_json=as_json)


@memory_command.command("edit")
@click.argument("memory_id", metavar="ID", type=click.IntRange(min=1))
@click.argument("text", type=options.Text(), required=False)
@importance_option
@options.models_file
@options.as_json
def edit_command(memory_id: int, text: str | None, importance: float | None, settings: Settings, as_json: bool) -> None:
    """Change the text or the importance of a fact."""
    if text is None and importance is None:
        raise UsageError("There is nothing to change.", hint="Give TEXT or --importance.")
    with Journal.open(settings.home) as journal:
        journal.memories.edit(memory_id, text=text, importance=importance)
    _report({"id": memory_id}, f"Changed {memory_id}.", as_json=as_json)


@memory_command.command("forget")
@click.argument("memory_id", metavar="ID", type=click.IntRange(min=1))
@options.models_file
@options.as_json
def forget_command(memory_id: int, settings: Settings, as_json: bool) -> None:
    """Delete a fact."""
    with Journal.open(settings.home) as journal:
        journal.memories.forget(memory_id)
    _report({"id": memory_id, "forgotten": True}, f"Forgot {memory_id}.", as_json=as_json)


def _report(data: dict[str, object], text: str, *, as_json: bool) -> None:
    if as_json:
        emit(data)
    else:
        note(text)
