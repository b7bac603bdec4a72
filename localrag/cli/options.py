"""Options that mean the same in every command."""

from __future__ import annotations

import math
import stat
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import click

from localrag.budget import OVERFLOWS, Overflow
from localrag.cli.files import read_source
from localrag.errors import UsageError
from localrag.kb.filters import Where
from localrag.messages import Attachment
from localrag.prompt import ANSWER_BASIS
from localrag.session import DEFAULT_TOP_K, Options, Session, TopK
from localrag.session.finding import MAX_DEPTH
from localrag.settings import MAX_TEXT_BYTES, Settings, expanded
from localrag.thinking import DEFAULT_TOKENS, MIN_TOKENS

Command = TypeVar("Command", bound=Callable[..., Any])


class Text(click.ParamType[str]):
    """A text argument: the text itself, `-` for standard input, or `@file` for a file."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ANN401  # click's signature
        if ctx is not None and ctx.resilient_parsing:
            return str(value)  # a shell completes the line: nothing is waited for
        if value == "-":
            return read_stdin()
        if isinstance(value, str) and value.startswith("@"):
            try:
                with expanded(Path(value[1:])).open("rb") as file:
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


class Asking(TypedDict):
    """The options of `asking`, as click hands them over."""

    settings: Settings
    model: str | None
    chat_template: Path | None
    n_ctx: int | None
    kbs: tuple[str, ...]
    budget: str | None
    max_tokens: int
    think_tokens: int
    system: str | None
    attached: tuple[Path, ...]
    top_k: TopK
    rerank: str | None
    where: Where
    context_ratio: float | None
    overflow: tuple[tuple[Overflow, str | None], ...]
    max_seconds: float | None
    weigh: bool


class Number(click.FloatRange):
    """A number in a range; nan, which is in none and compares as if it were in all, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401  # click's signature
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class Depth(click.ParamType[TopK]):
    """A number of passages, or `fit`."""

    name = "depth"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TopK:  # noqa: ANN401  # click's signature
        if value == "fit":
            return "fit"
        if not str(value).removeprefix("-").isdecimal():
            self.fail(f"{value!r} is neither a number of passages nor fit.", param, ctx)
        return click.IntRange(1, MAX_DEPTH).convert(value, param, ctx)


class ThinkTokens(click.ParamType[int]):
    """A number of tokens for thoughts, or 0."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401  # click's signature
        number = click.INT.convert(value, param, ctx)
        if number != 0 and not MIN_TOKENS <= number < 2**31:
            self.fail(f"{number} is neither 0 nor {MIN_TOKENS} or more.", param, ctx)
        return number


class Strategy(click.ParamType[tuple[Overflow, str | None]]):
    """An overflow strategy, for all sections or for one: `truncate`, `history=truncate`."""

    name = "strategy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Overflow, str | None]:  # noqa: ANN401  # click's signature
        section, found, strategy = str(value).rpartition("=")
        for overflow in OVERFLOWS:
            if strategy == overflow:
                return overflow, section if found else None
        return self.fail(f"{value!r} is none of {', '.join(OVERFLOWS)}, with or without SECTION= before it.", param, ctx)


def opener(asking: Asking, *, vocab_only: bool, keep: bool, name: str = "ask") -> Callable[[], Session]:
    """What opens the session that the options ask for. UsageError for options that need a knowledge base where none is named."""
    for option, given in (("--where", bool(asking["where"])), ("--rerank", asking["rerank"] is not None)):
        if given and not asking["kbs"]:
            raise UsageError(f"{option} is about the passages of a knowledge base, and none is named.", hint="Name one with --kb.")
    if vocab_only and asking["rerank"] == "llm":
        raise UsageError("--rerank llm has the model read, and nothing is evaluated here.", hint="Leave it out, or name a CrossEncoder.")
    return partial(
        Session.open,
        asking["model"],
        kbs=asking["kbs"],
        n_ctx=asking["n_ctx"],
        chat_template=asking["chat_template"],
        vocab_only=vocab_only,
        rerank=asking["rerank"],
        budget=asking["budget"],
        name=name,
        keep=keep,
        settings=asking["settings"],
    )


def asked(asking: Asking, *, piped: str = "") -> Options:
    """The options of a prompt, the files that came with it read."""
    options = Options(
        system=asking["system"],
        attachments=[attachment(path) for path in dict.fromkeys(asking["attached"])],
        top_k=asking["top_k"],
        where=asking["where"],
        context_ratio=asking["context_ratio"],
        overflow=asking["overflow"],
        weigh=asking["weigh"],
        piped=piped,
    )
    if asking["max_seconds"] is not None:
        options["max_seconds"] = asking["max_seconds"]
        options["started_at"] = _started_at()
    return options


def attachment(path: Path) -> Attachment:
    """A file that a person names. UsageError as for files.read_source."""
    source = read_source(path, "attached")
    return Attachment(label=source.label, text=source.text, modified=source.modified)


def _started_at() -> float:
    """When a person began to wait, on the clock of time.perf_counter(): see `main`."""
    started_at: float | None = click.get_current_context().obj
    if started_at is not None:
        return started_at
    import psutil  # noqa: PLC0415  # weight

    return time.perf_counter() - (time.time() - psutil.Process().create_time())


def _conditions(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> Where:
    return Where.parse(values)


where_option = click.option(
    "--where",
    multiple=True,
    callback=_conditions,
    metavar="KEY=PATTERN",
    help="Only documents that pass, such as tag=price, source=guide/* or author=Ann; can be given again.",
)
rerank_option = click.option(
    "--rerank",
    metavar="llm|NAME",
    help="Have the best passages read again: by the model itself, or by a CrossEncoder of models.toml or its folder.",
)
_ASKING = (
    click.option(
        "--max-tokens",
        type=click.IntRange(min=1),
        default=ANSWER_BASIS,
        show_default=True,
        metavar="N",
        help="The longest answer, in tokens.",
    ),
    click.option(
        "--think-tokens",
        type=ThinkTokens(),
        default=DEFAULT_TOKENS,
        show_default=True,
        metavar="N",
        help="The most that a reasoning model thinks before it answers, in tokens; 0: nothing.",
    ),
    click.option(
        "--top-k",
        type=Depth(),
        default=DEFAULT_TOP_K,
        show_default=True,
        metavar="N",
        help="Passages to retrieve; fit: as many as the window may hold.",
    ),
    rerank_option,
    where_option,
    click.option(
        "--max-seconds",
        type=Number(0, 86_400, min_open=True),
        metavar="S",
        help="Fit prompt and answer into so many seconds, as fast as this machine was found to be.",
    ),
    click.option(
        "--overflow",
        type=Strategy(),
        multiple=True,
        metavar="[SECTION=]STRATEGY",
        help=f"What becomes of what is too much: {', '.join(OVERFLOWS)}; for all sections, or for one. Can be given again.",
    ),
    click.option(
        "--context-ratio",
        type=Number(0, 1),
        metavar="R",
        help="The most that evidence may take of the window, beside what cannot be cut. [default: the budget's, 0.5]",
    ),
    click.option("--budget", metavar="NAME", help="A [budgets.NAME] table of models.toml."),
    click.option("--weigh", is_flag=True, help="Let the relevance of the files weigh their passages (see localrag score)."),
    click.option(
        "--attach",
        "attached",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="FILE",
        help="A text file to read with the question; can be given again.",
    ),
    click.option("--system", type=Text(), metavar="TEXT", help="A system text (- for stdin, @file for a file)."),
    click.option("--kb", "kbs", multiple=True, metavar="NAME", help="A knowledge base to answer from; can be given again."),
)


def asking(command: Command) -> Command:
    """The options that shape a prompt, shared by ask and budget: those of `Asking`."""
    for option in _ASKING:
        command = option(command)
    return window(model(models_file(command)))
