"""Chat commands for sources, settings, budgets, memories and feedback."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from localrag.citation import parse_label
from localrag.cli import options, render
from localrag.cli.chat.render import cited_labels, given_to, passage_text, sources_text, usage, warning_of
from localrag.cli.chat.state import Command, Desk, Room, number, whole
from localrag.cli.terminal import note
from localrag.errors import UsageError
from localrag.journal import DEFAULT_IMPORTANCE
from localrag.kb import list_kbs
from localrag.kb.readers import is_document
from localrag.session.history_window import Turn
from localrag.settings import expanded
from localrag.text.sanitize import one_line, safe
from localrag.types import Hit

_EDITORS = ("sensible-editor", "nano", "vim", "vi", "notepad")
"""Editors to try if neither VISUAL nor EDITOR is set."""
_TAKE_LINES = frozenset(
    "editor emacs emacsclient gvim jed joe kak mcedit mg micro nano ne nvim pico sensible-editor vi view vim".split()  # noqa: SIM905  # a word list reads better as words
)
"""Editors that accept +LINE to open a file at a line."""


def open_file(path: Path, line: int | None = None) -> None:
    """Open a file in an editor and wait, or open a document in the system's viewer. UsageError if it is not a file or cannot be opened.

    The path is passed as one absolute argument, so that no name can be read as shell code or as an option. Only documents, by their
    extension, are passed to the system's viewer, which might execute other files.
    """
    path = path.absolute()
    if not path.is_file():
        raise UsageError(f"{safe(str(path))} is missing or not a file.", hint="It existed when it was indexed.")
    try:
        if is_document(path.name, b""):
            _launch(path)
        else:
            _edit(path, line)
    except OSError as error:
        raise UsageError(f"The file cannot be opened: {error.strerror or error}.", hint="Set EDITOR to an installed editor.") from None


def _edit(path: Path, line: int | None) -> None:
    command = _editor()
    at = [f"+{line}"] if line is not None and Path(command[0]).stem in _TAKE_LINES else []
    subprocess.run([*command, *at, str(path)], check=False)


def _editor() -> list[str]:
    command_line = os.environ.get("VISUAL", "").strip() or os.environ.get("EDITOR", "").strip()
    try:
        command = shlex.split(command_line, posix=os.name != "nt")
    except ValueError:
        raise UsageError(f"EDITOR has an unclosed quote: {command_line[:80]!r}.", hint="Close the quote.") from None
    command = command or [path for each in _EDITORS if (path := shutil.which(each))][:1]
    if not command:
        raise UsageError("No editor was found.", hint="Set EDITOR.")
    return command


def _launch(path: Path) -> None:
    if sys.platform == "win32":
        os.startfile(path)  # noqa: S606  # no shell
        return
    opener = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if opener is None:
        raise UsageError("No program to open documents was found.", hint=f"The file is {safe(str(path))}")
    started = subprocess.Popen(
        [opener, str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    threading.Thread(target=started.wait, daemon=True).start()  # reap the process when it ends


_LINE = re.compile(r"lines? (\d{1,9})\b")
_USAGE = "/sources [turn N] [NUMBER|TAG] [open]"
_OPEN_USAGE = "/open [turn N] NUMBER|TAG"


def _sources(desk: Desk, rest: str) -> None:
    """`/sources [turn N] [NUMBER|TAG] [open]`: show the sources of an answer, show one of them, or open its file."""
    words = rest.split()
    opens = words[-1:] == ["open"]
    _show_sources(desk, words[:-1] if opens else words, opens=opens)


def _open(desk: Desk, rest: str) -> None:
    """`/open [turn N] NUMBER|TAG`: the short form of /sources … open."""
    _show_sources(desk, rest.split(), opens=True)


def _show_sources(desk: Desk, words: list[str], *, opens: bool) -> None:
    chat = desk.room.chat
    turn = chat.turn(-1)
    if words[:1] == ["turn"]:
        turn = chat.turn(whole(words[1] if len(words) > 1 else "", "/open turn" if opens else "/sources turn", least=1))
        words = words[2:]
    hits = given_to(turn, chat.turns)
    if len(words) > 1 or (opens and not words and len(hits) != 1):
        raise UsageError("Name one source to open." if opens else "Name one source.", hint=f"Usage: {_OPEN_USAGE if opens else _USAGE}")
    if not words and not opens:
        note(sources_text(turn, hits))
        return
    hit = _chosen(words[0] if words else "1", hits, chat.turns)
    path = _path(desk, hit)
    if opens:
        _open_source(hit, path)
    else:
        note(passage_text(hit, path, is_cited=hit.label in cited_labels(turn)))


def _chosen(reference: str, hits: Sequence[Hit], turns: Sequence[Turn]) -> Hit:
    """Find a passage by its number among the answer's sources, or by its tag; the latest passage with that tag wins."""
    if reference.isdecimal():
        if not 1 <= whole(reference, "/sources") <= len(hits):
            raise UsageError(f"There is no source {reference[:20]}; the answer has {len(hits)}.", hint="/sources lists them.")
        return hits[int(reference) - 1]
    label = parse_label(reference)
    others = [hit for turn in reversed(turns) for hit in turn.hits]
    for hit in (*hits, *others):
        if label == (hit.chunk.scope, hit.chunk.id):
            return hit
    raise UsageError(
        f"No passage in this conversation has the tag {one_line(reference, 40)}.", hint="/sources lists the sources of the last answer."
    )


def _open_source(hit: Hit, path: Path | None) -> None:
    """Open the file of a source. UsageError if the file is unknown, or without a terminal."""
    if path is None:
        raise UsageError(f"The file of {hit.label} is unknown.", hint="Use /kb add NAME to add its knowledge base again.")
    if not sys.stdin.isatty():
        raise UsageError("Opening files needs a terminal.", hint=f"The file is {safe(str(path))}")
    line = _LINE.match(hit.chunk.place)
    open_file(path, int(line[1]) if line else None)
    note(f"Opened {safe(str(path))}{f', {safe(hit.chunk.place)}' if hit.chunk.place else ''}.")


def _path(desk: Desk, hit: Hit) -> Path | None:
    for kb in desk.room.session.knowledge_bases:
        if kb.name == hit.chunk.kb:
            return kb.paths().get(hit.chunk.source)
    return None


# --- settings ---


def switch_model(room: Room, name: str) -> None:
    """Go on with another model and name it. If it cannot be loaded, nothing changes."""
    room.use_model(name)
    for warning in room.session.warnings:
        note(f"Warning: {warning}")
    _note_model(room)


def _note_model(room: Room) -> None:
    note(f"{room.status.model}: window {room.status.n_ctx:,} tokens, limited by {room.status.bound}.")


def _model(desk: Desk, rest: str) -> None:
    if rest:
        switch_model(desk.room, rest)
        return
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight

    _note_model(desk.room)
    present = [row.name for row in Catalog.load(desk.room.settings).rows() if row.thing == "model" and row.present]
    note(f"To switch: /model NAME. On this machine: {', '.join(map(safe, (*present, 'echo')))}.")


def _kb(desk: Desk, rest: str) -> None:
    """`/kb [NAME …]`, `/kb add NAME …`, `/kb drop NAME …`: show, replace, extend or reduce the knowledge bases in use."""
    room, (verb, *names) = desk.room, rest.split() or [""]
    kbs = room.asking["kbs"]
    if verb == "add" and names:
        room.use_kbs(tuple(dict.fromkeys((*kbs, *names))))
    elif verb == "drop" and names:
        if missing := [each for each in names if each not in kbs]:
            raise UsageError(f"{missing[0]} is not in use.", hint=f"In use: {', '.join(kbs) or 'none'}.")
        room.use_kbs(tuple(each for each in kbs if each not in names))
    elif verb in ("add", "drop"):
        raise UsageError(f"/kb {verb} needs the NAME of a knowledge base.", hint="/kb alone lists them.")
    elif verb:
        room.use_kbs(tuple(dict.fromkeys((verb, *names))))
    note(f"Knowledge bases: {', '.join(room.status.kbs) or 'none; the model answers from its own knowledge'}.")
    others = [] if verb else [each for each in list_kbs(room.settings.kb_dir) if each not in room.asking["kbs"]]
    if others:
        note(f"To switch: /kb NAME. Others here: {', '.join(others)}.")


def _system(desk: Desk, rest: str) -> None:
    room = desk.room
    if rest:
        room.set_system("" if rest == "none" else rest)
    note(f"System prompt: {safe(room.chat.system) or 'none'}" + ("" if rest else "  (/system TEXT sets it, /system none removes it)"))


def _context_ratio(desk: Desk, rest: str) -> None:
    if rest:
        ratio = number(rest, "/context-ratio", 0.0, 1.0)
        desk.room.asking["context_ratio"] = ratio
    ratio_now = desk.room.asking["context_ratio"]
    note(f"New sources may use at most {0.5 if ratio_now is None else ratio_now:g} of the window.")


def _seed(desk: Desk, rest: str) -> None:
    room = desk.room
    if rest:
        room.sampling = replace(room.sampling, seed=whole(rest, "/seed", most=2**32 - 1), repeatable=True)
    note(f"Seed {room.sampling.seed}, temperature {room.sampling.temperature:g}.")


def _temperature(desk: Desk, rest: str) -> None:
    if rest:
        desk.room.sampling = replace(desk.room.sampling, temperature=number(rest, "/temperature", 0.0, 100.0))
    _seed(desk, "")


def _rewrite(desk: Desk, rest: str) -> None:
    if rest not in ("", "on", "off"):
        raise UsageError(f"/rewrite takes on or off, not {rest[:40]!r}.")
    if rest:
        desk.room.set_rewrites(rewrites=rest == "on")
    note(f"Short follow-up questions are {'rewritten by the model' if desk.room.rewrites else 'not rewritten'} before searching.")


# --- budget and prompt ---


def _budget(desk: Desk, _rest: str) -> None:
    if desk.room.last is None:
        note("There are no answers yet.")
        return
    render.ledger(desk.room.last.ledger, err=True)
    if forgotten := desk.room.look_ahead(write=False):
        note(warning_of(forgotten))


def _explain(desk: Desk, rest: str) -> None:
    last = desk.room.last
    if last is None:
        note("There are no answers yet.")
        return
    if rest == "full":
        render.prompt(last.prompt.parts, desk.room.session.engine.tokenizer, err=True)
    render.answerability(last.answerability, err=True)
    render.ledger(last.ledger, err=True)
    render.support(last)
    note(usage(last))


def _attach(desk: Desk, rest: str) -> None:
    room = desk.room
    if not rest:
        note(f"Attached to the next question: {', '.join(safe(each.label) for each in room.attached) or 'nothing'}.  (/attach FILE)")
        return
    attachment = options.attachment(expanded(Path(rest)))
    room.attached = [each for each in room.attached if each.label != attachment.label] + [attachment]
    tokens = room.session.engine.counter(attachment.text)
    note(f"Attached {safe(attachment.label)} ({tokens:,} tokens) to the next question.")


def _tokens(desk: Desk, rest: str) -> None:
    counter = desk.room.session.engine.counter
    if rest:
        click.echo(counter(rest))
    elif desk.room.last is not None:
        note(usage(desk.room.last))
    else:
        note("Use /tokens TEXT to count a text. /tokens alone shows the last turn's tokens.")


# --- memories and votes ---


def _memory(desk: Desk, _rest: str) -> None:
    memories = desk.room.journal.memories.all()
    for each in memories:
        note(f"  {each.id}  {safe(each.text)}  (importance {each.importance:g})")
    if not memories:
        note("No facts are remembered. Use /remember TEXT to keep a fact across conversations.")


def _remember(desk: Desk, rest: str) -> None:
    """Keep TEXT or the proposed facts #N; without arguments, have the model propose facts."""
    proposed = desk.room.proposed
    if not rest:
        _propose(desk)
        return
    numbers = rest.split()
    proposal_numbers = [each[1:] for each in numbers if each.startswith("#")]
    if len(proposal_numbers) < len(numbers):
        _keep(desk, rest)
        return
    if not proposed:
        raise UsageError("No facts have been proposed.", hint="/remember alone has the model propose facts.")
    for each in proposal_numbers:
        _keep(desk, proposed[whole(each, "/remember #", least=1, most=len(proposed)) - 1])


def _keep(desk: Desk, fact: str) -> None:
    memory_id = desk.room.journal.memories.add(fact, DEFAULT_IMPORTANCE)
    lasting = "" if desk.room.keeps else " until this chat ends (--no-keep)"
    note(f"Remembered as {memory_id}{lasting}. Use /forget {memory_id} to delete it.")


def _propose(desk: Desk) -> None:
    desk.room.proposed = facts = desk.room.chat.facts()
    for number_of, fact in enumerate(facts, 1):
        note(f"  #{number_of}  {safe(fact)}")
    note(
        "None of these is kept yet. Use /remember #1 to keep the first."
        if facts
        else "The model found nothing to remember. Use /remember TEXT to keep a fact."
    )


def _forget(desk: Desk, rest: str) -> None:
    desk.room.journal.memories.forget(whole(rest, "/forget", least=1))
    note("Deleted.")


def _good(desk: Desk, _rest: str) -> None:
    _mark(desk, useful=True)


def _bad(desk: Desk, _rest: str) -> None:
    _mark(desk, useful=False)


def _mark(desk: Desk, *, useful: bool) -> None:
    """Mark the passages that the last answer cites, or otherwise all of its sources, in the knowledge bases in use."""
    if not desk.room.keeps:
        raise UsageError("Passages cannot be marked with --no-keep.", hint="Start the chat without --no-keep.")
    turn = desk.room.chat.turn(-1)
    cited = set(turn.about.get("citations", ()))
    kbs = {kb.name: kb for kb in desk.room.session.knowledge_bases}
    kb_hits = [hit for each in desk.room.chat.turns for hit in each.hits if hit.chunk.kb in kbs]
    hits = [hit for hit in kb_hits if hit.label in cited] or [hit for hit in turn.hits if hit.chunk.kb in kbs]
    if not hits:
        raise UsageError("The last answer has no passages of a knowledge base in use.", hint="There is nothing to mark.")
    for name, kb in kbs.items():
        if ids := sorted({hit.chunk.id for hit in hits if hit.chunk.kb == name}):
            kb.mark(ids, useful=useful)
    labels = ", ".join(dict.fromkeys(hit.label for hit in hits))
    note(f"Marked as {'useful' if useful else 'useless'}: {labels}.")


COMMANDS = (
    Command(_model, "/model [NAME]", "show the model, or switch to another one"),
    Command(_kb, "/kb [[add|drop] NAME …]", "show the knowledge bases, switch to others, add some or drop some"),
    Command(_sources, "/sources [turn N] [NUMBER|TAG] [open]", "show the sources of an answer, or one of them in full"),
    Command(_open, _OPEN_USAGE, "open the file of a source in your editor or document viewer, e.g. /open KB#12"),
    Command(_attach, "/attach [FILE]", "send a file with the next question"),
    Command(_system, "/system [TEXT]", "show or set standing instructions for the model; none removes them"),
    Command(_context_ratio, "/context-ratio [R]", "show or set how much of the prompt new sources may fill, from 0 to 1"),
    Command(_seed, "/seed [N]", "show or set the seed; with the same seed, the same question gets the same answer"),
    Command(_temperature, "/temperature [T]", "show or set how freely the model chooses its words; 0 always takes the likeliest"),
    Command(_rewrite, "/rewrite [on|off]", "let the model complete short follow-up questions before searching, or not"),
    Command(_budget, "/budget", "show what filled the prompt, and what the next question leaves out"),
    Command(_explain, "/explain [full]", "show what filled the prompt, and how well the sources support each sentence; full: all of it"),
    Command(_tokens, "/tokens [TEXT]", "count the tokens of a text, or show those of the last turn"),
    Command(_memory, "/memory", "list the facts that are kept for all conversations"),
    Command(_remember, "/remember [TEXT|#N …]", "keep a fact, or the proposed facts #N; alone: have the model propose facts"),
    Command(_forget, "/forget ID", "delete a fact"),
    Command(_good, "/good", "mark the passages that the last answer cites as useful, so that they are found more easily"),
    Command(_bad, "/bad", "mark them as useless"),
)
