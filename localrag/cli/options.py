"""Options that mean the same in every command."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from localrag.prompt import ANSWER_BASIS
from localrag.session import DEFAULT_CONTEXT_RATIO, DEFAULT_TOP_K
from localrag.settings import MAX_TEXT_BYTES, Settings

Command = TypeVar("Command", bound=Callable[..., Any])


class Text(click.ParamType[str]):
    """A text argument: the text itself, `-` for standard input, or `@file` for a file."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ANN401  # click's signature
        if value == "-":
            return read_stdin()
        if isinstance(value, str) and value.startswith("@"):
            try:
                with Path(value[1:]).expanduser().open("rb") as file:
                    return _decode(file.read(MAX_TEXT_BYTES + 1), value[1:])
            except OSError as error:
                self.fail(f"{value[1:]}: {error.strerror}.", param, ctx)
        return str(value)


def read_stdin() -> str:
    """All of standard input as text; UsageError if it is too long or no UTF-8."""
    return _decode(sys.stdin.buffer.read(MAX_TEXT_BYTES + 1), "standard input")


def read_piped() -> str:
    """What was piped or redirected into the command; empty for a terminal, a closed input, or a device."""
    try:
        mode = stat.S_IFMT(Path("/dev/stdin").stat().st_mode) if sys.platform == "linux" else stat.S_IFIFO
    except OSError:
        return ""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty() or mode not in {stat.S_IFIFO, stat.S_IFREG}:
        return ""
    return read_stdin()


def _decode(raw: bytes, origin: str) -> str:
    if len(raw) > MAX_TEXT_BYTES:
        raise click.UsageError(f"{origin} is longer than {MAX_TEXT_BYTES // 1024 // 1024} MiB; index it as a document instead.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{origin} is not UTF-8 text (byte {error.start}).") from None


def _settings(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> Settings:
    return Settings.from_env(models_file=value)


def models_file(command: Command) -> Command:
    return click.option(
        "--models",
        "settings",
        type=click.Path(path_type=Path),
        callback=_settings,
        metavar="FILE",
        help="The models.toml to use.",
    )(command)


def model(command: Command) -> Command:
    command = click.option(
        "--chat-template", type=click.Path(path_type=Path), metavar="FILE", help="A chat template in place of the model's own."
    )(command)
    return click.option("--model", metavar="NAME|FILE", help="A model of models.toml, a .gguf file, or echo.")(command)


def window(command: Command) -> Command:
    return click.option(
        "--ctx", "n_ctx", type=click.IntRange(min=1), metavar="TOKENS", help="The window; capped by training context and memory."
    )(command)


def as_json(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(command)


def asking(command: Command) -> Command:
    """The options that shape a prompt, shared by ask and budget."""
    for option in (
        click.option(
            "--max-tokens",
            type=click.IntRange(min=1),
            default=ANSWER_BASIS,
            show_default=True,
            metavar="N",
            help="The longest answer, in tokens.",
        ),
        click.option(
            "--top-k", type=click.IntRange(1, 1000), default=DEFAULT_TOP_K, show_default=True, metavar="N", help="Passages to retrieve."
        ),
        click.option(
            "--context-ratio",
            type=click.FloatRange(0, 1),
            default=DEFAULT_CONTEXT_RATIO,
            show_default=True,
            metavar="R",
            help="The most that evidence may take of the window, beside what cannot be cut.",
        ),
        click.option("--system", type=Text(), metavar="TEXT", help="A system text (- for stdin, @file for a file)."),
        click.option("--kb", "kbs", multiple=True, metavar="NAME", help="A knowledge base to answer from; can be given again."),
    ):
        command = option(command)
    return window(model(models_file(command)))
