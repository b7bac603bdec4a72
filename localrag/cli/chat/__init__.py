"""The command chat: a saved conversation with a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from localrag.cli import options
from localrag.cli.files import STANDARD_OUTPUT, check_free_stdout
from localrag.cli.render import table
from localrag.cli.terminal import can_ask, emit, note
from localrag.errors import UsageError, counted
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.journal import ConversationRow, Conversations
    from localrag.session.history_window import Turn
    from localrag.settings import Settings


@click.command("chat")
@options.asking
@click.option("--session", "name", metavar="NAME", help="Name of the conversation to continue or start.")
@click.option("--continue", "resumes", is_flag=True, help="Continue the last conversation.")
@options.seed
@options.temperature
@click.option("--rewrite", "rewrites", is_flag=True, help="Have the model rewrite short follow-up questions before searching.")
@click.option("--no-keep", is_flag=True, help="Do not save this conversation.")
@click.option("--list", "lists", is_flag=True, help="List the conversations.")
@click.option("--search", "words", metavar="WORDS", help="Search all conversations.")
@click.option("--rename", "new_name", metavar="NEW", help="Rename the conversation of --session.")
@click.option("--delete", is_flag=True, help="Delete the conversation of --session.")
@click.option("--yes", is_flag=True, help="Delete without confirmation.")
@click.option(
    "--export",
    "exported",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the conversation as Markdown, or as JSON if FILE ends in .json (- for stdout).",
)
@options.as_json
@click.pass_context
def chat_command(
    ctx: click.Context,
    name: str | None,
    resumes: bool,
    seed: int | None,
    temperature: float,
    rewrites: bool,
    no_keep: bool,
    lists: bool,
    words: str | None,
    new_name: str | None,
    delete: bool,
    yes: bool,
    exported: Path | None,
    as_json: bool,
    **asking: Unpack[options.Asking],
) -> int:
    """Chat with a model; with --kb, about your documents. The conversation is saved. Type /help to list the chat commands.

    \b
      localrag chat --kb handbook
      localrag chat --continue
      localrag chat --session garden --export garden.md

    Each line on a piped standard input is one question. With --json, each answer and each error is printed as one object.
    """
    selectors = [option for option, value in (("--session", name), ("--continue", resumes)) if value]
    if len(selectors) > 1:
        raise UsageError("--session and --continue exclude each other.", hint="Leave one out.")
    if lists or words is not None:
        _find(asking["settings"], words, as_json=as_json)
        return 0
    if exported == STANDARD_OUTPUT:
        check_free_stdout("--export", as_json=as_json)
    if new_name is not None or delete or exported is not None:
        result = _manage(asking["settings"], name, resumes=resumes, new_name=new_name, delete=delete, yes=yes, exported=exported)
        if as_json:
            emit(result)
        return 0
    if asking["max_seconds"] is not None:
        raise UsageError("--max-seconds does not work in a chat.", hint="Leave it out. Ctrl-C stops an answer and keeps its text.")
    from localrag.cli.chat.loop import talk  # noqa: PLC0415  # weight
    from localrag.cli.chat.state import ConversationChoice, Room  # noqa: PLC0415  # weight

    sampling = options.sampling(asking, seed=seed, temperature=temperature)
    weak = frozenset(option.name for option in ctx.command.params if option.name and options.origin_of(ctx, option) is not None)
    choice = ConversationChoice(name=name, resumes=resumes, keeps=not no_keep, weak=weak)
    room = Room(asking, sampling, choice, rewrites=rewrites)
    if can_ask():
        options.offer_model(asking["settings"], room.model())  # before the first line is typed, while the model is loaded
    return talk(room, as_json=as_json)


def _find(settings: Settings, words: str | None, *, as_json: bool) -> None:
    from localrag.cli.chat.render import short  # noqa: PLC0415  # weight
    from localrag.journal import Journal  # noqa: PLC0415  # weight

    with Journal.open(settings.home) as journal:
        if words is not None:
            matches = journal.conversations.search(words)
            if as_json:
                emit({"found": [each.to_dict() for each in matches]})
            else:
                match_rows = [(each.conversation, each.number, short(each.snippet)) for each in matches]
                table(("Conversation", "Turn", "Text"), match_rows, right=("Turn",))
            return
        conversations = journal.conversations.all()
    if as_json:
        emit({"conversations": [each.to_dict() for each in conversations]})
    else:
        from localrag.report.page import when  # noqa: PLC0415  # weight

        rows = [(each.name, each.num_turns, when(each.updated_at), short(each.first_question)) for each in conversations]
        table(("Conversation", "Turns", "Last", "First question"), rows, right=("Turns",))


def _manage(
    settings: Settings, name: str | None, *, resumes: bool, new_name: str | None, delete: bool, yes: bool, exported: Path | None
) -> dict[str, object]:
    """Export, rename or delete a conversation, and return the object for --json."""
    from localrag.cli.chat.render import markdown, save  # noqa: PLC0415  # weight
    from localrag.journal import Journal  # noqa: PLC0415  # weight

    with Journal.open(settings.home) as journal:
        conversations = journal.conversations
        row = _one(conversations, name, resumes=resumes)
        result: dict[str, object] = {"name": row.name}
        if exported == STANDARD_OUTPUT:
            click.echo(markdown(row.name, _turns(conversations, row)))
        elif exported is not None:
            save(exported, row.name, _turns(conversations, row))
            result["file"] = str(exported)
            note(f"Wrote {safe(str(exported))}.")
        if new_name is not None:
            conversations.rename(row.id, new_name)
            result["name"] = new_name.strip()
            note(f"Renamed to {new_name.strip()!r}.")
        if delete:
            if not yes:
                click.confirm(f"Delete {row.name!r} with {counted(row.num_turns, 'turn')}?", abort=True, err=True)
            conversations.delete(row.id)
            result["deleted"] = True
            note(f"Deleted {row.name!r}.")
    return result


def _one(conversations: Conversations, name: str | None, *, resumes: bool) -> ConversationRow:
    row = conversations.named(name) if name is not None else conversations.latest() if resumes else None
    if row is None:
        hint = "To list conversations: localrag chat --list"
        raise UsageError("Name a conversation with --session." if name is None else f"There is no conversation {name!r}.", hint=hint)
    return row


def _turns(conversations: Conversations, row: ConversationRow) -> list[Turn]:
    from localrag.session.history_window import restored  # noqa: PLC0415  # weight

    return [restored(each) for each in conversations.turns(row.id)]
