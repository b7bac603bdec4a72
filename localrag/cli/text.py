"""What all printing needs: where data and talk go, and text that cannot control a terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import TYPE_CHECKING

import click

from localrag.errors import LocalragError

if TYPE_CHECKING:
    from rich.console import Console

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
HIDDEN = re.compile("[\u061c\u200b\u2028\u2029\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e007f]")
COLOURS = {
    "scaffold": "bright_black",
    "system": "magenta",
    "tools": "blue",
    "memories": "bright_magenta",
    "summary": "bright_blue",
    "history": "bright_cyan",
    "pinned": "bright_yellow",
    "attachments": "bright_green",
    "evidence": "green",
    "pointers": "green",
    "question": "cyan",
    "answer": "yellow",
}


def emit(data: object) -> None:
    """One JSON object on stdout; in ASCII where half a character, of a file's name, or an old encoding allows no more."""
    text = json.dumps(data, ensure_ascii=False, default=str)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        text = json.dumps(data, default=str)
    click.echo(text)


def forgive_encoding() -> None:
    """Where stdout is not UTF-8, what it cannot write becomes a question mark, and not the end of an answer."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(errors="replace")


def note(text: str) -> None:
    """A line of talk."""
    click.echo(text, err=True)


def fault(error: LocalragError, *, as_json: bool) -> None:
    """An error: an object on stdout with --json, else a line and its way out, whatever file name or argument they repeat."""
    if as_json:
        emit({"error": error.to_dict()})
        return
    click.secho(f"Error: {one_line(error.message)}", fg="red", err=True)
    if error.hint:
        note(f"  {one_line(error.hint)}")


def dim(text: str) -> None:
    """A line of talk that a person may pass over."""
    console(err=True).print(safe(text), style="dim", soft_wrap=True)


def safe(text: str) -> str:
    """Text without what moves a cursor, colours a terminal or turns the direction of writing, and without half characters."""
    return CONTROL.sub("", text)


def one_line(text: object, max_chars: int = 0) -> str:
    """A text as one line, safe for a terminal, with its beginning only where it is longer than `max_chars` (0: whatever it is)."""
    line = " ".join(HIDDEN.sub(" ", safe(str(text).replace("\r", " "))).split())
    return line if not max_chars or len(line) <= max_chars else line[: max_chars - 1] + "…"


def console(*, err: bool = False) -> Console:
    """A rich console that marks up nothing on its own."""
    from rich.console import Console  # noqa: PLC0415  # weight

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process with code 1

    width = None if (sys.stderr if err else sys.stdout).isatty() else 1000  # a table in a pipe is not folded
    return _Console(stderr=err, markup=False, highlight=False, emoji=False, width=width)
