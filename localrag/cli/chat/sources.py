"""/sources: the sources of an answer, one passage in full, or its file opened in an editor or viewer."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from localrag.citation import parse_label
from localrag.cli.chat.render import cited_labels, given_to, passage_text, sources_text
from localrag.cli.chat.state import Desk, whole
from localrag.cli.text import note
from localrag.errors import UsageError
from localrag.kb.readers import is_document
from localrag.session.history_window import Turn
from localrag.text.sanitize import one_line, safe
from localrag.types import Hit

_EDITORS = ("sensible-editor", "nano", "vim", "vi", "notepad")
"""Looked for where neither VISUAL nor EDITOR names one."""
_TAKE_LINES = frozenset(
    "editor emacs emacsclient gvim jed joe kak mcedit mg micro nano ne nvim pico sensible-editor vi view vim".split()  # noqa: SIM905  # a word list reads better as words
)
"""Editors that go to a line that is given as +LINE."""


def open_file(path: Path, line: int | None = None) -> None:
    """Open a file and wait if it opens in an editor. UsageError if it is not a file, or if no program opens it.

    The path is one argument and absolute, so whatever its name is, it is neither read by a shell nor taken for an option. The system is
    only asked to open what its name says is a document: of text, it might run what it is given.
    """
    path = path.absolute()
    if not path.is_file():
        raise UsageError(f"{safe(str(path))} is not there, or is no file.", hint="It was there when it was indexed.")
    try:
        if is_document(path.name, b""):
            _launch(path)
        else:
            _edit(path, line)
    except OSError as error:
        raise UsageError(f"It cannot be opened: {error.strerror or error}.", hint="Set EDITOR to an editor that is there.") from None


def _edit(path: Path, line: int | None) -> None:
    command = _editor()
    at = [f"+{line}"] if line is not None and Path(command[0]).stem in _TAKE_LINES else []
    subprocess.run([*command, *at, str(path)], check=False)


def _editor() -> list[str]:
    named = os.environ.get("VISUAL", "").strip() or os.environ.get("EDITOR", "").strip()
    try:
        command = shlex.split(named, posix=os.name != "nt")
    except ValueError:
        raise UsageError(f"EDITOR cannot be read: {named[:80]!r}.", hint="Close its quotes.") from None
    command = command or [found for each in _EDITORS if (found := shutil.which(each))][:1]
    if not command:
        raise UsageError("There is no editor to open it with.", hint="Set EDITOR.")
    return command


def _launch(path: Path) -> None:
    if sys.platform == "win32":
        os.startfile(path)  # noqa: S606  # no shell
        return
    opener = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if opener is None:
        raise UsageError("There is no program here that opens documents.", hint=f"The file is {safe(str(path))}")
    started = subprocess.Popen(
        [opener, str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    threading.Thread(target=started.wait, daemon=True).start()  # whenever it is closed


_LINE = re.compile(r"lines? (\d{1,9})\b")
_USAGE = "/sources [turn N] [NUMBER|TAG] [open]"


def sources(desk: Desk, rest: str) -> None:
    """`/sources [turn N] [NUMBER|TAG] [open]`: all that the answer was given, or one passage of it, or its file."""
    words, chat = rest.split(), desk.room.chat
    turn = chat.turn(-1)
    if words[:1] == ["turn"]:
        turn = chat.turn(whole(words[1] if len(words) > 1 else "", "/sources turn", least=1))
        words = words[2:]
    opens = words[-1:] == ["open"]
    words = words[:-1] if opens else words
    given = given_to(turn, chat.turns)
    if len(words) > 1 or (opens and not words and len(given) != 1):
        raise UsageError(f"{_USAGE} shows what an answer was given, or one passage of it, or opens its file.")
    if not words and not opens:
        note(sources_text(turn, given))
        return
    hit = _chosen(words[0] if words else "1", given, chat.turns)
    path = _path(desk, hit)
    if opens:
        _open_source(hit, path)
    else:
        note(passage_text(hit, path, is_cited=hit.label in cited_labels(turn)))


def _chosen(wanted: str, given: Sequence[Hit], turns: Sequence[Turn]) -> Hit:
    """A passage by its number among those that were given, or by its tag, by which the last one of the conversation is meant."""
    if wanted.isdecimal():
        if not 1 <= whole(wanted, "/sources") <= len(given):
            raise UsageError(f"There is no source {wanted[:20]}: the answer was given {len(given)}.", hint="/sources lists them.")
        return given[int(wanted) - 1]
    label = parse_label(wanted)
    others = [hit for turn in reversed(turns) for hit in turn.hits]
    for hit in (*given, *others):
        if label == (hit.chunk.scope, hit.chunk.id):
            return hit
    raise UsageError(
        f"Nothing in this conversation has the tag {one_line(wanted, 40)}.", hint="/sources lists what the last answer was given."
    )


def _open_source(hit: Hit, path: Path | None) -> None:
    """UsageError where no file is known, or nobody could see an editor."""
    if path is None:
        raise UsageError(f"It is not known here which file {hit.label} is from.", hint="/kb add NAME uses its knowledge base again.")
    if not sys.stdin.isatty():
        raise UsageError("A file is opened on a terminal only.", hint=f"It is {safe(str(path))}")
    line = _LINE.match(hit.chunk.place)
    open_file(path, int(line[1]) if line else None)
    note(f"Opened {safe(str(path))}{f', {safe(hit.chunk.place)}' if hit.chunk.place else ''}.")


def _path(desk: Desk, hit: Hit) -> Path | None:
    for kb in desk.room.session.knowledge_bases:
        if kb.name == hit.chunk.kb:
            return kb.paths().get(hit.chunk.source)
    return None
