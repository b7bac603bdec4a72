"""What begins with / in a chat."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import chat_text, options, views
from localrag.cli.chat_room import Room
from localrag.cli.text import note, safe
from localrag.errors import UsageError
from localrag.journal import DEFAULT_IMPORTANCE

if TYPE_CHECKING:
    from localrag.session.chat import Turn

Ask = Callable[[str], None]
_MAX_FOUND = 20


@dataclass(frozen=True, slots=True)
class Command:
    """`run(desk, rest)` does it; `rest` is what stands behind its name."""

    run: Callable[[Desk, str], None]
    usage: str
    help: str


class Desk:
    """Does what lines of a chat say. `ask` asks a question; `prefilled` is what the next line begins as."""

    def __init__(self, room: Room, ask: Ask) -> None:
        self.room = room
        self.ask = ask
        self.prefilled = ""
        self.is_open = True

    def handle(self, text: str) -> bool:
        """Do a line; False if the chat is to end. A line that begins with // is a question that begins with /."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].partition(" ")
            self._command(name.strip()).run(self, rest.strip())
        else:
            self.ask(text[1:] if text.startswith("//") else text)
        return self.is_open

    @staticmethod
    def _command(name: str) -> Command:
        command = COMMANDS.get(name)
        if command is None:
            near = difflib.get_close_matches(name, COMMANDS, n=2)
            hint = f"Did you mean {' or '.join('/' + each for each in near)}?" if near else "See /help; // begins a question with a slash."
            raise UsageError(f"There is no command /{name[:40]}.", hint=hint)
        return command


def words(room: Room, line: str) -> Iterable[tuple[str, str]]:
    """Completions of a line that begins with a command, each with what it is."""
    name, found, rest = line.partition(" ")
    if not found:
        yield from (("/" + each, command.help) for each, command in COMMANDS.items())
        return
    if name == "/kb":
        yield from (("add", "use one more"), ("drop", "use one less"))
        if rest:
            from localrag.kb import list_kbs  # noqa: PLC0415  # weight

            yield from ((each, "knowledge base") for each in list_kbs(room.settings.kb_dir))
    elif name == "/model":
        from localrag.catalog import Catalog  # noqa: PLC0415  # weight

        yield from ((each, "model") for each in (*Catalog.load(room.settings).models, "echo"))


# --- what it is held with ---


def _model(desk: Desk, rest: str) -> None:
    if rest:
        desk.room.use_model(rest)
    status = desk.room.status
    note(f"{status.model}: window {status.n_ctx:,} tokens, bound by {status.bound}.")


def _kb(desk: Desk, rest: str) -> None:
    room, (verb, *names) = desk.room, rest.split() or [""]
    kbs = room.asking["kbs"]
    if verb == "add" and names:
        room.use_kbs(tuple(dict.fromkeys((*kbs, *names))))
    elif verb == "drop" and names:
        if missing := [each for each in names if each not in kbs]:
            raise UsageError(f"{missing[0]} is not used here.", hint=f"Used: {', '.join(kbs) or 'none'}.")
        room.use_kbs(tuple(each for each in kbs if each not in names))
    elif verb:
        raise UsageError("/kb add NAME or /kb drop NAME; alone it shows which are used.")
    note(f"Knowledge bases: {', '.join(room.asking['kbs']) or 'none, so the model answers from what it knows'}.")


def _system(desk: Desk, rest: str) -> None:
    room = desk.room
    if rest:
        room.set_system("" if rest == "none" else rest)
    note(f"System text: {safe(room.chat.system) or 'none'}" + ("" if rest else "  (/system TEXT sets it, /system none takes it away)"))


def _context_ratio(desk: Desk, rest: str) -> None:
    if rest:
        ratio = _number(rest, "/context-ratio", 0.0, 1.0)
        desk.room.asking["context_ratio"] = ratio
    ratio_now = desk.room.asking["context_ratio"]
    note(f"New sources may take {0.5 if ratio_now is None else ratio_now:g} of the window at most.")


def _seed(desk: Desk, rest: str) -> None:
    room = desk.room
    if rest:
        room.sampling = replace(room.sampling, seed=_whole(rest, "/seed", most=2**32 - 1))
    note(f"Seed {room.sampling.seed}, temperature {room.sampling.temperature:g}.")


def _temperature(desk: Desk, rest: str) -> None:
    if rest:
        desk.room.sampling = replace(desk.room.sampling, temperature=_number(rest, "/temperature", 0.0, 100.0))
    _seed(desk, "")


# --- what is seen ---


def _budget(desk: Desk, _rest: str) -> None:
    if desk.room.last is None:
        note("Nothing was asked yet.")
        return
    views.ledger(desk.room.last.ledger, err=True)
    if forgotten := desk.room.look_ahead(write=False):
        note(chat_text.warning_of(forgotten))


def _explain(desk: Desk, rest: str) -> None:
    last = desk.room.last
    if last is None:
        note("Nothing was asked yet.")
        return
    if rest == "full":
        views.prompt(last.prompt.parts, desk.room.session.engine.tokenizer, err=True)
    views.ledger(last.ledger, err=True)
    note(chat_text.usage(last))


def _sources(desk: Desk, rest: str) -> None:
    turn = desk.room.chat.turn(_whole(rest, "/sources", least=1) if rest else -1)
    note(chat_text.sources(turn, desk.room.chat.turns))


def _attach(desk: Desk, rest: str) -> None:
    room = desk.room
    if not rest:
        note(f"With the next question: {', '.join(safe(each.label) for each in room.attached) or 'nothing'}.  (/attach FILE)")
        return
    attachment = options.attachment(Path(rest).expanduser())
    room.attached = [each for each in room.attached if each.label != attachment.label] + [attachment]
    tokens = room.session.engine.counter(attachment.text)
    note(f"{safe(attachment.label)}, {tokens:,} tokens, goes with the next question.")


def _tokens(desk: Desk, rest: str) -> None:
    counter = desk.room.session.engine.counter
    if rest:
        click.echo(counter(rest))
    elif desk.room.last is not None:
        note(chat_text.usage(desk.room.last))
    else:
        note("/tokens TEXT counts a text; alone it shows the last turn's.")


# --- memories and votes ---


def _memory(desk: Desk, _rest: str) -> None:
    kept = desk.room.journal.memories.all()
    for each in kept:
        note(f"  {each.id}  {safe(each.text)}  (importance {each.importance:g})")
    if not kept:
        note("Nothing is remembered. /remember TEXT keeps a fact across conversations.")


def _remember(desk: Desk, rest: str) -> None:
    memory_id = desk.room.journal.memories.add(rest, DEFAULT_IMPORTANCE)
    note(f"Remembered as {memory_id}; /forget {memory_id} takes it back.")


def _forget(desk: Desk, rest: str) -> None:
    desk.room.journal.memories.forget(_whole(rest, "/forget", least=1))
    note("Forgotten.")


def _good(desk: Desk, _rest: str) -> None:
    _mark(desk, useful=True)


def _bad(desk: Desk, _rest: str) -> None:
    _mark(desk, useful=False)


def _mark(desk: Desk, *, useful: bool) -> None:
    """The passages that the last answer cites, or else those that came with it."""
    turn = desk.room.chat.turn(-1)
    cited = set(turn.about.get("citations", ()))
    given = [hit for each in desk.room.chat.turns for hit in each.hits if hit.chunk.kb]
    hits = [hit for hit in given if hit.label in cited] or [hit for hit in turn.hits if hit.chunk.kb]
    for kb in desk.room.session.knowledge_bases:
        ids = sorted({hit.chunk.id for hit in hits if hit.chunk.kb == kb.name})
        if ids:
            kb.mark(ids, useful=useful)
    if not hits:
        raise UsageError("The last answer has no passage of a knowledge base.", hint="There is nothing to mark.")
    labels = ", ".join(dict.fromkeys(hit.label for hit in hits))
    note(f"Marked as {'useful' if useful else 'useless'}: {labels}.")


# --- turns ---


def _retry(desk: Desk, _rest: str) -> None:
    turn = desk.room.retried()
    note(f"Seed {desk.room.sampling.seed}, temperature {desk.room.sampling.temperature:g}.")
    desk.ask(turn.question)


def _undo(desk: Desk, rest: str) -> None:
    taken = desk.room.chat.undo(_whole(rest, "/undo", least=1) if rest else 1)
    note(f"Taken back: {', '.join(chat_text.short(turn.question) for turn in taken)}")


def _edit(desk: Desk, rest: str) -> None:
    """`/edit [N] [TEXT]`: turns from N on are taken back, and N is asked anew, with another text."""
    first, _, text = rest.partition(" ")
    turns = desk.room.chat.turns
    number = int(first) if first.isdecimal() else len(turns)
    text = text.strip() if first.isdecimal() else rest
    old = desk.room.chat.turn(number)
    desk.room.chat.undo(len(turns) - number + 1)
    if text:
        desk.ask(text)
    else:
        desk.prefilled = old.question


def _pin(desk: Desk, rest: str) -> None:
    _set_pin(desk, rest, is_pinned=True)


def _unpin(desk: Desk, rest: str) -> None:
    _set_pin(desk, rest, is_pinned=False)


def _set_pin(desk: Desk, rest: str, *, is_pinned: bool) -> None:
    turn: Turn = desk.room.chat.pin(_whole(rest, "/pin", least=1) if rest else -1, is_pinned=is_pinned)
    note(f"{'Is kept whole whatever comes' if is_pinned else 'Is no longer pinned'}: {chat_text.short(turn.question)}")


def _history(desk: Desk, _rest: str) -> None:
    for number, turn in enumerate(desk.room.chat.turns, 1):
        note(f"  {number}{' pinned' if turn.is_pinned else ''}  {chat_text.short(turn.question)}{chat_text.state_of(turn)}")


# --- conversations ---


def _fork(desk: Desk, rest: str) -> None:
    first, _, name = rest.partition(" ")
    room = desk.room
    number = int(first) if first.isdecimal() else len(room.chat.turns)
    name = (name if first.isdecimal() else rest).strip() or f"{room.status.name} from {number}"
    made = room.chat.fork(number, name)
    room.enter(name, made)
    note(f"This is {name!r} now, which begins with {number} turns of the other one.")


def _new(desk: Desk, rest: str) -> None:
    desk.room.begin(rest or None)
    note(f"A new conversation: {desk.room.status.name!r}.")


def _resume(desk: Desk, rest: str) -> None:
    if not rest:
        raise UsageError("/resume NAME goes on with that conversation.", hint="To see them: /list")
    desk.room.resume(rest)
    chat_text.transcript(desk.room.chat.turns, last=3)


def _rename(desk: Desk, rest: str) -> None:
    room = desk.room
    room.journal.conversations.rename(room.chat.id, rest)
    room.status.name = room.session.name = rest.strip()
    note(f"This conversation is {room.status.name!r} now.")


def _list(desk: Desk, _rest: str) -> None:
    for row in desk.room.journal.conversations.all()[-_MAX_FOUND:]:
        note(f"  {row.name}  {row.num_turns} turns  {chat_text.short(row.first_question)}")


def _search(desk: Desk, rest: str) -> None:
    found = desk.room.journal.conversations.search(rest, _MAX_FOUND)
    for each in found:
        note(f"  {each.conversation}, turn {each.number}: {chat_text.short(each.snippet)}")
    if not found:
        note("Nothing was found.")


def _save(desk: Desk, rest: str) -> None:
    if not rest:
        raise UsageError("/save FILE writes the conversation: as Markdown, or as JSON into a .json file.")
    path = Path(rest).expanduser()
    chat_text.save(path, desk.room.status.name, desk.room.chat.turns)
    note(f"Written to {safe(str(path))}.")


def _help(_desk: Desk, _rest: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    for command in COMMANDS.values():
        note(f"  {command.usage:{width}}  {command.help}")
    note("Enter sends, Alt-Enter begins a new line, ``` opens a block of lines. Ctrl-C ends an answer and keeps it, Ctrl-D leaves.")


def _exit(desk: Desk, _rest: str) -> None:
    desk.is_open = False


def _number(text: str, name: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise UsageError(f"{name} takes a number from {least:g} to {most:g}, not {text[:40]!r}.")
    return value


def _whole(text: str, name: str, *, least: int = 0, most: int = 10**9) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise UsageError(f"{name} takes a whole number from {least} to {most}, not {text[:40]!r}.")
    return int(text)


def _table(rows: Sequence[tuple[Callable[[Desk, str], None], str, str]]) -> dict[str, Command]:
    return {usage[1:].partition(" ")[0]: Command(run, usage, text) for run, usage, text in rows}


COMMANDS = _table(
    (
        (_help, "/help", "what there is"),
        (_model, "/model [NAME]", "show or change the model"),
        (_kb, "/kb [add|drop NAME]", "show, add or drop knowledge bases"),
        (_system, "/system [TEXT]", "show or set the system text; none takes it away"),
        (_context_ratio, "/context-ratio [R]", "the most that new sources may take of the window, 0 to 1"),
        (_seed, "/seed [N]", "show or set the seed"),
        (_temperature, "/temperature [T]", "0 takes the likeliest token"),
        (_budget, "/budget", "who had what of the window, and what the next question leaves out"),
        (_explain, "/explain [full]", "the last turn's ledger; full: the very prompt"),
        (_sources, "/sources [N]", "what the last answer, or that of turn N, was given: file, place and text"),
        (_attach, "/attach [FILE]", "send a file with the next question"),
        (_tokens, "/tokens [TEXT]", "count a text, or show the last turn's tokens"),
        (_memory, "/memory", "the facts that are kept across conversations"),
        (_remember, "/remember TEXT", "keep a fact"),
        (_forget, "/forget ID", "forget one"),
        (_good, "/good", "the passages that the last answer cites were useful"),
        (_bad, "/bad", "they were not"),
        (_history, "/history", "the turns, with their numbers"),
        (_pin, "/pin [N]", "never summarise nor leave out a turn"),
        (_unpin, "/unpin [N]", "let it be summarised again"),
        (_retry, "/retry", "answer the last question anew, with another seed"),
        (_edit, "/edit [N] [TEXT]", "take back turn N and all behind it, and ask it otherwise"),
        (_undo, "/undo [N]", "take back the last turn, or the last N"),
        (_fork, "/fork [N] [NAME]", "go on from turn N in a conversation of its own"),
        (_new, "/new [NAME]", "begin another conversation"),
        (_resume, "/resume NAME", "go on with another conversation"),
        (_rename, "/rename NAME", "give this conversation a name"),
        (_list, "/list", "the last conversations"),
        (_search, "/search WORDS", "find turns of all conversations"),
        (_save, "/save FILE", "write this conversation as Markdown, or as JSON into a .json file"),
        (_exit, "/exit", "leave; so does Ctrl-D"),
    )
)
