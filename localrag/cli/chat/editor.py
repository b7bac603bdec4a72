"""The input of a chat: a line editor on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from localrag.errors import UsageError
from localrag.files import create_private, make_private_folder
from localrag.settings import MAX_TEXT_BYTES
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


FENCE = "```"
PROMPT = "> "
_REFRESH_S = 0.5


class Editor(Protocol):
    """Reads the user's next input."""

    def read(self, *, prefilled: str = "") -> str:
        """Return the next input. EOFError at the end of input, KeyboardInterrupt on Ctrl-C."""
        ...


def is_open(text: str) -> bool:
    """Return whether a ``` block is still open."""
    return sum(line.lstrip().startswith(FENCE) for line in text.splitlines()) % 2 == 1


def is_terminal() -> bool:
    """Return whether a line editor can be used: stdin and stdout are a terminal with cursor control."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


class PlainEditor:
    """Reads lines from standard input. A ``` block is read as one input."""

    def read(self, *, prefilled: str = "") -> str:
        lines: list[str] = []
        in_block = False
        if prefilled:
            click.echo(f"(Previous text: {safe(prefilled)})", err=True)
        while True:
            if sys.stdin.isatty():
                click.echo(PROMPT if not lines else "… ", nl=False, err=True)
            raw = sys.stdin.buffer.readline(MAX_TEXT_BYTES + 1)
            if not raw and not lines:
                raise EOFError
            if len(raw) > MAX_TEXT_BYTES:
                raise UsageError(
                    f"A line is longer than {MAX_TEXT_BYTES // 1024 // 1024} MiB.", hint="Index it as a document, or use /attach."
                )
            lines.append(raw.decode("utf-8", "replace").rstrip("\r\n"))
            in_block ^= is_open(lines[-1])
            if not raw or not in_block:
                return "\n".join(lines)


class LineEditor:
    """A line editor with history across runs. Enter sends; Alt-Enter, or Enter in a ``` block, starts a new line; a paste does not send."""

    def __init__(
        self,
        history: Path | None,
        *,
        words: Callable[[str], Iterable[tuple[str, str]]],
        toolbar: Callable[[], str],
        opening: Future[None],
    ) -> None:
        """Set up the editor. `history` is the file of past inputs, or None for no history. `words(line)` returns the completions of a line
        that starts with /, each with a description. `opening` completes when the model is loaded.
        """
        from prompt_toolkit import PromptSession  # noqa: PLC0415  # weight
        from prompt_toolkit.history import FileHistory, InMemoryHistory  # noqa: PLC0415

        self._opening = opening
        if history is not None:
            make_private_folder(history.parent)
            create_private(history)
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            multiline=True,
            prompt_continuation=lambda *_: "… ",
            key_bindings=_bindings(),
            completer=_completer(words),
            complete_while_typing=False,
            bottom_toolbar=toolbar,
            refresh_interval=_REFRESH_S,
            enable_open_in_editor=True,
        )

    def read(self, *, prefilled: str = "") -> str:
        return self._session.prompt(default=prefilled, pre_run=self._watch)

    def _watch(self) -> None:
        """End the editing at once if loading the model fails, without waiting for input."""
        import asyncio  # noqa: PLC0415  # weight

        from prompt_toolkit.application import get_app  # noqa: PLC0415

        app = get_app()

        def end(error: BaseException | None) -> None:
            if error is not None and not app.is_done:
                app.exit(exception=error)

        async def wait() -> None:
            end(await asyncio.to_thread(self._opening.exception))

        if self._opening.done():
            end(self._opening.exception())
        else:
            app.create_background_task(wait())


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415  # weight

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer(words: Callable[[str], Iterable[tuple[str, str]]]) -> Any:  # noqa: ANN401  # a Completer, imported late
    from prompt_toolkit.completion import Completer, Completion, PathCompleter  # noqa: PLC0415  # weight
    from prompt_toolkit.document import Document  # noqa: PLC0415

    paths = PathCompleter(expanduser=True)

    class _Words(Completer):
        """Completes commands and their arguments: knowledge bases, models and files."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            line = document.text_before_cursor
            if not line.startswith("/") or "\n" in line:
                return
            command, _, rest = line.partition(" ")
            if command in ("/attach", "/save"):
                yield from paths.get_completions(Document(rest, len(rest)), complete_event)
                return
            last = line.rpartition(" ")[2]
            for word, description in words(line):
                if word.startswith(last):
                    yield Completion(word, start_position=-len(last), display_meta=description)

    return _Words()


def toolbar(parts: Sequence[str], width: int) -> str:
    """Join as many of the first parts as fit in a line of `width` characters."""
    text = ""
    for part in parts:
        longer = f"{text} · {part}" if text else part
        if len(longer) > width:
            break
        text = longer
    return text
