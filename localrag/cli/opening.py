"""A file opened where a person reads it: text in their editor, at its line, and documents in the program that the system has for them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from localrag.cli.text import safe
from localrag.errors import UsageError
from localrag.kb.readers import is_document

_EDITORS = ("sensible-editor", "nano", "vim", "vi", "notepad")
"""Looked for where neither VISUAL nor EDITOR names one."""
_TAKE_LINES = frozenset(
    "editor emacs emacsclient gvim jed joe kak mcedit mg micro nano ne nvim pico sensible-editor vi view vim".split()  # noqa: SIM905  # a word list reads better as words
)
"""Editors that go to a line that is given as +LINE."""


def open_file(path: Path, line: int | None = None) -> None:
    """Open a file; an editor is waited for. UsageError if it is no file, or if there is nothing to open it with.

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
