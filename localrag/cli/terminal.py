"""The terminal and the standard streams: print data and messages safely, redraw a live area, and stop an answer at Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from localrag.errors import LocalragError, UsageError
from localrag.text.sanitize import CONTROL, HIDDEN, one_line, safe

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from typing_extensions import Buffer

    from localrag.engine.engine import Engine


_CLAIMED = "localrag.stdin"
_IN_JSON = re.compile(f"[{CONTROL}{HIDDEN}]")


def emit(data: object) -> None:
    """Print one JSON object on stdout, in ASCII if stdout's encoding requires it."""
    text = terminal_json(data)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        text = json.dumps(data, default=str).replace("\x7f", "\\u007f")
    click.echo(text)


def terminal_json(data: object) -> str:
    """Return JSON on one line with control characters escaped, so that it cannot control a terminal but parses to the same values."""
    return _IN_JSON.sub(_escape, json.dumps(data, ensure_ascii=False, default=str))


def _escape(match: re.Match[str]) -> str:
    """Escape one character for JSON; above U+FFFF, as a surrogate pair."""
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


class _Output(io.FileIO):
    """Standard output that remembers its last write error, because a command may turn that into another error."""

    error: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def open_streams() -> None:
    """Prepare the standard streams of a process, so that `stdout_error` can report write errors.

    A stream that was closed at the start (`>&-`) is replaced by a null device. Otherwise the next opened file, such as the journal, would
    become standard output. Reading returns nothing, and writing to standard output fails, so that an answer is not lost silently.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115  # stays open until the process ends
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and type(getattr(out.buffer, "raw", out.buffer)) is io.FileIO:  # otherwise a Windows console
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(out.fileno(), "w", closefd=False)),
            encoding=out.encoding,
            errors=out.errors,
            line_buffering=out.line_buffering,
            write_through=out.write_through,
        )


def claimed_stdin() -> BinaryIO:
    """Claim standard input for one argument and return it. UsageError if another argument has claimed it."""
    context = click.get_current_context(silent=True)
    if context is not None:
        claims = context.find_root().meta
        if claims.get(_CLAIMED):
            raise UsageError("Two arguments are -, but standard input can be read only once.", hint="Use a file for one of them.")
        claims[_CLAIMED] = True
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("Standard input is closed.", hint="Use a file instead of -.")
    return sys.stdin.buffer


def is_stdin_claimed() -> bool:
    """Return whether an argument of the command was `-`."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().meta.get(_CLAIMED))


def stdout_error() -> OSError | None:
    """Flush standard output and return its write error, earlier or now; None if there is none."""
    raised = None
    try:
        sys.stdout.flush()
    except OSError as error:
        raised = error
    except ValueError:  # closed by a Python caller
        return None
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error if isinstance(raw, _Output) and raw.error is not None else raised


def drop_output() -> None:
    """Discard unwritten output of both streams if they fail. Python would try again at exit and fail again."""
    for stream, error in ((sys.stdout, stdout_error()), (sys.stderr, None)):
        try:
            if error is not None:
                raise error
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                stream.flush()


def forgive_encoding() -> None:
    """If stdout is not UTF-8, print characters outside its encoding as question marks instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(errors="replace")


def note(text: str, *, hang: int = 0) -> None:
    """Print a message on stderr, wrapped on a terminal. Continuation lines get the first line's indent plus `hang` spaces.

    Errors of stderr are ignored.
    """
    with suppress(OSError):
        click.echo(wrapped(safe(text), hang=hang) if sys.stderr.isatty() else safe(text), err=True)


def wrapped(text: str, *, hang: int = 0) -> str:
    """Wrap text between words to the terminal's width. Longer words, such as paths, are not broken."""
    columns = shutil.get_terminal_size().columns
    if all(len(line) <= columns // 2 for line in text.split("\n")):  # fits in any case, as a character takes at most two cells
        return text
    from rich.cells import cell_len  # noqa: PLC0415  # weight

    lines = []
    for line in text.split("\n"):
        words = line.lstrip(" ").split(" ")
        indent = " " * (len(line) - len(line.lstrip(" ")))
        row = indent + words[0]
        for word in words[1:]:
            if cell_len(row) + 1 + cell_len(word) <= columns or not word:
                row += f" {word}"
            else:
                lines.append(row.rstrip(" "))
                row = f"{indent}{' ' * hang}{word}"
        lines.append(row)
    return "\n".join(lines)


def fault(error: LocalragError, *, as_json: bool) -> None:
    """Print an error: an object on stdout with `as_json`, otherwise a line and its hint on stderr, safe for a terminal."""
    if as_json:
        emit({"error": error.to_dict()})
        return
    click.secho(f"Error: {one_line(error.message)}", fg="red", err=True)
    if error.hint:
        note(f"  {one_line(error.hint)}")


def dim(text: str) -> None:
    """Print a dimmed message on stderr."""
    console(err=True).print(safe(text), style="dim", soft_wrap=True)


def console(*, err: bool = False) -> Console:
    """Return a rich console without markup or highlighting."""
    from rich.console import Console  # noqa: PLC0415  # weight

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with code 1

    width = None if (sys.stderr if err else sys.stdout).isatty() else 1000  # do not fold tables in a pipe
    return _Console(stderr=err, markup=False, highlight=False, emoji=False, width=width)


_SPECIAL = re.compile(r"[\\`*|~&]|(?<![^\W_])_|_(?![^\W_])")
_HTML = re.compile(r"<(?=[A-Za-z/!?])")
_LINK = re.compile(r"(?<=\])(?=[(:\[])|(?<=\[)(?=\[)|(?<=:)(?=//)|(?<=\bwww)(?=\.)", re.IGNORECASE)
_FENCE = re.compile(r"`{3,}|~{3,}")
_PREFIX = r"^((?:[ \t]|>|[*+-](?=[ \t])|\d{1,9}[.)](?=[ \t]))*)"
_HEADING = re.compile(rf"{_PREFIX}(?=#{{1,6}}(?:[ \t]|$)|(?:=+|-+)[ \t]*$)", re.MULTILINE)


def prose(text: str) -> str:
    """Escape links, HTML, fences and headings in a text of several paragraphs. Lists, code and emphasis stay."""
    text = _LINK.sub(lambda _: "\\", _HTML.sub("&lt;", text))
    text = _FENCE.sub(lambda match: "".join(f"\\{char}" for char in match[0]), text)
    return _HEADING.sub(r"\1\\", text)


def inline(text: str) -> str:
    """Escape all markup in a text for use within a line."""
    return _LINK.sub(lambda _: "\\", _HTML.sub("&lt;", _SPECIAL.sub(r"\\\g<0>", text)))


_TOOL_WAIT_S = 5
OSC52_BYTES = 74_994
"""Longest text for OSC 52. Several terminals ignore sequences of more than 100,000 characters, and base64 adds a third."""


def copy_text(text: str) -> str:
    """Put a text on the clipboard and return how: the name of a program, or "OSC 52".

    A program reports whether it worked. OSC 52 asks the terminal, also over SSH, which does not answer. UsageError if there is no way.
    """
    import base64  # noqa: PLC0415  # only there
    import subprocess  # noqa: PLC0415  # weight

    text = safe(text)  # a shell runs what is pasted into it
    for command, encoding in _clipboard_tools():
        try:
            done = subprocess.run(
                command,
                input=text.encode(encoding),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_TOOL_WAIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return Path(command[0]).name
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "linux", "unknown", ""):
        raise UsageError("This terminal has no clipboard.", hint="Install wl-clipboard, xclip or xsel, or write a file with /save FILE.")
    raw = text.encode()
    if len(raw) > OSC52_BYTES:
        raise UsageError(
            f"The text is too long for the terminal's clipboard: {len(raw):,} bytes of at most {OSC52_BYTES:,}.",
            hint="Write a file with /save FILE.",
        )
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(raw).decode()}\a")
    sys.stdout.flush()
    return "OSC 52"


def _clipboard_tools() -> Iterator[tuple[list[str], str]]:
    """Yield the commands that may reach the clipboard of this person's screen, each with the encoding of its input.

    Over SSH, a program without a forwarded display would fill the clipboard of the other machine.
    """
    env = os.environ
    is_remote = bool(env.get("SSH_CONNECTION") or env.get("SSH_TTY"))
    tools = (
        (bool(env.get("TMUX")), ["tmux", "load-buffer", "-w", "-"], "utf-8"),
        (bool(env.get("WAYLAND_DISPLAY")), ["wl-copy"], "utf-8"),
        (bool(env.get("DISPLAY")), ["xclip", "-selection", "clipboard", "-in"], "utf-8"),
        (bool(env.get("DISPLAY")), ["xsel", "--clipboard", "--input"], "utf-8"),
        (sys.platform == "darwin" and not is_remote, ["pbcopy"], "utf-8"),
        (sys.platform == "win32" and not is_remote, ["clip"], "utf-16"),
    )
    for may_reach, (name, *args), encoding in tools:
        if may_reach and (path := shutil.which(name)):
            yield [path, *args], encoding


REFRESHES_PER_S = 8


def can_ask() -> bool:
    """Whether a person is there to press a key: a terminal, no --json, and not a background thread."""
    context = click.get_current_context(silent=True)
    as_json = context is not None and context.params.get("as_json")
    if as_json or threading.current_thread() is not threading.main_thread():
        return False
    return bool(sys.stdin and sys.stdin.isatty() and sys.stderr and sys.stderr.isatty())


def silence_keys() -> Callable[[], None]:
    """Turn off the terminal's echo and return a function that restores it.

    A terminal echoes keys, and ^C, at the cursor. In a live area that would start a line which the area does not know about, so a stale
    line would remain above it.
    """
    try:
        import termios  # noqa: PLC0415
    except ImportError:  # on Windows
        return lambda: None
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, ValueError, AttributeError, termios.error):  # no terminal
        return lambda: None
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(number, termios.TCSANOW, silent)

    def restore() -> None:
        with suppress(termios.error, OSError):
            termios.tcsetattr(number, termios.TCSANOW, before)

    return restore


class Area:
    """A live area that redraws the result of `draw` from `open` until `close`, which erases it."""

    def __init__(self, out: Console, draw: Callable[[], RenderableType]) -> None:
        self._out = out
        self._draw = draw
        self._live: Live | None = None
        self._restore: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Start drawing. Does nothing if the area is already open."""
        from rich.live import Live  # noqa: PLC0415  # weight

        if self._live is None:
            self._live = Live(
                console=self._out,
                get_renderable=self._draw,
                refresh_per_second=REFRESHES_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._restore = silence_keys()
            self._live.start()

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            self._restore()


def end_answer(engine: Engine) -> None:
    """Cancel an engine's generation. KeyboardInterrupt if the engine is idle, to end a search, for example."""
    if engine.is_idle:
        raise KeyboardInterrupt
    engine.cancel_all()


@contextmanager
def first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C, to keep the text so far. The second Ctrl-C raises KeyboardInterrupt.

    If Ctrl-C is ignored, as in a shell's background jobs, it remains ignored.
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
