"""chat: a conversation that is kept."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from localrag.cli import display, options
from localrag.cli.text import emit, note, safe
from localrag.decoding import SamplingParams
from localrag.errors import UsageError

if TYPE_CHECKING:
    from localrag.cli.chat_room import Room
    from localrag.journal import ConversationRow, Conversations
    from localrag.session import Prepared
    from localrag.session.turns import Turn
    from localrag.settings import Settings

_NOTED_TURNS = 3


@click.command("chat")
@options.asking
@click.option("--session", "name", metavar="NAME", help="The conversation of that name, begun if it is not there.")
@click.option("--continue", "resumes", is_flag=True, help="Go on with the last conversation.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Makes sampling repeatable.")
@click.option("--temperature", type=options.Number(0, 100), default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--rewrite", "rewrites", is_flag=True, help="Have the model rewrite short follow-ups before they are searched for.")
@click.option("--no-keep", is_flag=True, help="Keep nothing of this.")
@click.option("--list", "lists", is_flag=True, help="List the conversations.")
@click.option("--search", "words", metavar="WORDS", help="Find turns of all conversations.")
@click.option("--rename", "new_name", metavar="NEW", help="Rename the conversation of --session.")
@click.option("--delete", is_flag=True, help="Delete the conversation of --session.")
@click.option("--yes", is_flag=True, help="With --delete: do not ask.")
@click.option(
    "--export", "exported", type=click.Path(path_type=Path), metavar="FILE", help="Write it as Markdown, or JSON into a .json file."
)
@options.as_json
def chat_command(
    name: str | None,
    resumes: bool,
    seed: int,
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
    """Talk with a model, and with your documents if --kb is given. The conversation is kept; /help lists what can be done in it.

    \b
      localrag chat --kb handbook
      localrag chat --continue
      localrag chat --session garden --export garden.md

    Lines that are piped in are asked one by one; with --json each answer is an object, and so is each error.
    """
    named = [option for option, given in (("--session", name), ("--continue", resumes)) if given]
    if len(named) > 1:
        raise UsageError("--session and --continue exclude each other.", hint="Leave one out.")
    if lists or words is not None:
        _find(asking["settings"], words, as_json=as_json)
        return 0
    if new_name is not None or delete or exported is not None:
        done = _manage(asking["settings"], name, resumes=resumes, new_name=new_name, delete=delete, yes=yes, exported=exported)
        if as_json:
            emit(done)
        return 0
    if asking["max_seconds"] is not None:
        raise UsageError("--max-seconds has no meaning in a conversation.", hint="Leave it out; Ctrl-C ends an answer and keeps it.")
    from localrag.cli.chat_room import Room, Wanted  # noqa: PLC0415  # weight

    sampling = SamplingParams(seed=seed, temperature=temperature, max_tokens=asking["max_tokens"], think_tokens=asking["think_tokens"])
    return _talk(Room(asking, sampling, Wanted(name=name, resumes=resumes, keeps=not no_keep), rewrites=rewrites), as_json=as_json)


def _talk(room: Room, *, as_json: bool) -> int:
    """The model is opened while the person types."""
    from localrag.cli import chat_commands, chat_desk, chat_editor, chat_loop  # noqa: PLC0415  # weight

    draws = chat_editor.is_terminal() and not as_json
    worker = chat_loop.Worker(room.cancel)
    opening = worker.start(lambda: _open(room, tells=draws or sys.stdin.isatty()))
    desk = chat_desk.Desk(room, partial(_ask, room, draws=draws, as_json=as_json), chat_commands.COMMANDS)
    editor: chat_editor.Editor = chat_editor.PlainEditor()
    if draws:
        editor = chat_editor.LineEditor(
            room.history_file,
            words=partial(chat_commands.words, room),
            toolbar=partial(_toolbar, room),
            opening=opening,
        )
    loop = chat_loop.Loop(room, editor, worker, opening, desk, as_json=as_json)
    try:
        loop.run()
    finally:
        worker.end_with(room.close)
    return 0 if sys.stdin.isatty() else loop.exit_code


def _open(room: Room, *, tells: bool) -> None:
    from localrag.cli import chat_text  # noqa: PLC0415  # weight

    room.open()
    for warning in room.session.warnings:
        note(f"Warning: {warning}")
    if tells and room.chat.turns:
        chat_text.transcript(room.chat.turns, last=_NOTED_TURNS)


def _ask(room: Room, question: str, *, draws: bool, as_json: bool) -> None:
    """One turn, shown as it comes."""
    from localrag.cli import chat_text, chat_view  # noqa: PLC0415  # weight

    if as_json:
        emit(room.say(question).to_dict())
        _warn(room)
        return
    room.status.activity = "reading"
    view = chat_view.make_view(draws=draws)

    def on_text(piece: str) -> None:
        room.status.activity = "writing"
        view(piece)

    def on_thought(piece: str) -> None:
        room.status.activity = "thinking"
        view.think(piece)

    def on_prepared(ready: Prepared) -> None:
        if ready.rewriting is not None and ready.rewriting.text:
            view.remark(chat_text.searched(ready.rewriting))
        view.wait(f"reading {len(ready.prompt.token_ids):,} tokens")

    try:
        view.wait("searching" if room.session.knowledge_bases else "reading")
        answer = room.say(question, on_text=on_text, on_thought=on_thought, on_prepared=on_prepared)
    finally:
        view.close()
        room.status.activity = ""
    display.remarks(answer, [kb.address for kb in room.session.knowledge_bases], tells_history=False)
    _warn(room)
    before = room.status.forgotten
    if news := room.look_ahead(write=False).beyond(before):
        note(chat_text.warning_of(news))


def _warn(room: Room) -> None:
    """What went wrong with keeping the conversation, once."""
    for warning in room.chat.warnings:
        note(f"Warning: {warning}")
    room.chat.warnings.clear()


def _toolbar(room: Room) -> str:
    from localrag.cli.chat_editor import toolbar  # noqa: PLC0415  # weight

    status = room.status
    if not status.model:
        return "loading the model; type your question"
    share = status.used / max(1, status.n_ctx)
    bar = "█" * round(10 * min(1.0, share)) + "░" * (10 - round(10 * min(1.0, share)))
    parts = [status.activity] if status.activity else []
    parts += [status.model, f"{bar} {status.used:,} of {status.n_ctx:,} ({status.bound})"]
    if status.forgotten:
        parts.append(f"{len(status.forgotten.summarised) + len(status.forgotten.left_out)} turns not in full")
    if status.used:
        parts += [f"{status.cached:,} cached, {status.evaluated:,} evaluated", f"{status.tokens_per_s:.0f} tokens/s"]
    if status.kbs:
        parts.append(", ".join(status.kbs))
    return toolbar([*parts, status.name], shutil.get_terminal_size().columns)


def _find(settings: Settings, words: str | None, *, as_json: bool) -> None:
    from localrag.cli import chat_text  # noqa: PLC0415  # weight
    from localrag.journal import Journal  # noqa: PLC0415  # weight

    with Journal.open(settings.home) as journal:
        if words is not None:
            found = journal.conversations.search(words)
            if as_json:
                emit({"found": [each.to_dict() for each in found]})
            else:
                shown = [(each.conversation, each.number, chat_text.short(each.snippet)) for each in found]
                display.table(("Conversation", "Turn", "Text"), shown, right=("Turn",))
            return
        kept = journal.conversations.all()
    if as_json:
        emit({"conversations": [each.to_dict() for each in kept]})
    else:
        from localrag.report import when  # noqa: PLC0415  # weight

        rows = [(each.name, each.num_turns, when(each.updated_at), chat_text.short(each.first_question)) for each in kept]
        display.table(("Conversation", "Turns", "Last", "First question"), rows, right=("Turns",))


def _manage(
    settings: Settings, name: str | None, *, resumes: bool, new_name: str | None, delete: bool, yes: bool, exported: Path | None
) -> dict[str, object]:
    """Do it, and return what was done, as an object for --json."""
    from localrag.cli import chat_text  # noqa: PLC0415  # weight
    from localrag.journal import Journal  # noqa: PLC0415  # weight

    with Journal.open(settings.home) as journal:
        kept = journal.conversations
        row = _one(kept, name, resumes=resumes)
        done: dict[str, object] = {"name": row.name}
        if exported is not None:
            chat_text.save(exported, row.name, _turns(kept, row))
            done["file"] = str(exported)
            note(f"Written to {safe(str(exported))}.")
        if new_name is not None:
            kept.rename(row.id, new_name)
            done["name"] = new_name.strip()
            note(f"Renamed to {new_name.strip()!r}.")
        if delete:
            if not yes:
                click.confirm(f"Delete {row.name!r} with {row.num_turns} turns?", abort=True, err=True)
            kept.delete(row.id)
            done["deleted"] = True
            note(f"Deleted {row.name!r}.")
    return done


def _one(kept: Conversations, name: str | None, *, resumes: bool) -> ConversationRow:
    row = kept.named(name) if name is not None else kept.latest() if resumes else None
    if row is None:
        hint = "To see them: localrag chat --list"
        raise UsageError(
            "Which conversation? Name one with --session." if name is None else f"There is no conversation {name!r}.", hint=hint
        )
    return row


def _turns(kept: Conversations, row: ConversationRow) -> list[Turn]:
    from localrag.session.turns import restored  # noqa: PLC0415  # weight

    return [restored(each) for each in kept.turns(row.id)]
