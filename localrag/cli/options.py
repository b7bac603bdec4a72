"""Options and argument types that several commands share."""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, get_args

import click

from localrag.budget import OVERFLOWS, Overflow
from localrag.cli.files import STANDARD_INPUT, InputFile, read_source
from localrag.cli.terminal import can_ask, claimed_stdin, is_stdin_claimed, note
from localrag.errors import LocalragError, ModelNotFoundError, UsageError, counted
from localrag.files import secure_home
from localrag.kb.filters import Where
from localrag.process import age_s
from localrag.prompt import ANSWER_BASIS
from localrag.question import DEFAULT_CITE, DEFAULT_UNANSWERABLE, Cite, EvidenceKind, Question, TopK, Unanswerable
from localrag.session import Session
from localrag.session.retrieval import DEFAULT_TOP_K, MAX_DEPTH, SENTENCE_TOKENS
from localrag.settings import (
    MAX_TEXT_BYTES,
    OPTIONS,
    Default,
    Settings,
    Value,
    default_home,
    defaults,
    expanded,
    named_default_model,
)
from localrag.text.sanitize import one_line, safe
from localrag.types import DEFAULT_THINK_TOKENS, MIN_THINK_TOKENS, Attachment, SamplingParams

if TYPE_CHECKING:
    from localrag.catalog import Catalog
    from localrag.session.recommend import Candidate
    from localrag.types import ModelSpec

Command = TypeVar("Command", bound=Callable[..., Any])
_DEFAULTS = "localrag.defaults"


def take_defaults(ctx: click.Context, name: str, command: click.Command, args: Sequence[str]) -> None:
    """Let click use the defaults that people set for the options of a command. Help shows the built-in ones, and reads no file."""
    options = args[: args.index("--")] if "--" in args else args
    if not {"-h", "--help"}.isdisjoint(options):
        return
    values = defaults(Settings.from_env().home)
    ctx.meta[_DEFAULTS] = values
    chosen: dict[str, Value] = {}
    for option in command.params:
        key = next((flag[2:] for flag in option.opts if flag[2:] in values and name in OPTIONS[flag[2:]]), None)
        if key is None or option.name is None:
            continue
        value = values[key].value
        if option.multiple or not isinstance(value, tuple):
            chosen[option.name] = value
        elif len(value) == 1:
            chosen[option.name] = value[0]
    ctx.default_map = {name: chosen}


def origin_of(ctx: click.Context, option: click.Parameter) -> Default | None:
    """Return the default that a person set and that gave an option of this command its value; None for one of the command line."""
    if option.name is None or ctx.get_parameter_source(option.name) is not click.core.ParameterSource.DEFAULT_MAP:
        return None
    values: dict[str, Default] = ctx.find_root().meta.get(_DEFAULTS, {})
    return next((values[flag[2:]] for flag in option.opts if flag[2:] in values), None)


def without_empty(_ctx: click.Context, _param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Drop empty names, so that --kb "" means none where a default is set."""
    return tuple(name for name in names if name)


def _model_or_nearer(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    """Prefer the default_model of a models.toml that is nearer than the place where the model was set.

    That is the file of --models, and for a model set in the home also ./models.toml and the file of LOCALRAG_MODELS.
    """
    default = origin_of(ctx, param)
    if default is None:
        return name
    settings: Settings = ctx.params.get("settings") or Settings.from_env()
    nearer: list[Path] = []
    if default.origin == "home":
        nearer = [file for file in settings.models_files() if file != settings.home / "models.toml"]
    elif settings.models_file is not None and ctx.get_parameter_source("settings") is click.core.ParameterSource.COMMANDLINE:
        nearer = [settings.models_file]
    return None if nearer and named_default_model(nearer) else name


class Text(click.ParamType[str]):
    """A text argument: the text itself, `-` for standard input, or `@file` for a file."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ANN401  # click's signature
        if ctx is not None and ctx.resilient_parsing:
            return str(value)  # shell completion must not wait for input
        if value == "-":
            return read_stdin()
        if isinstance(value, str) and value.startswith("@"):
            try:
                with expanded(Path(value[1:])).open("rb") as file:
                    return _decode(file.read(MAX_TEXT_BYTES + 1), value[1:])
            except OSError as error:
                self.fail(f"{value[1:]}: {error.strerror}.", param, ctx)
        return str(value)


class Evidence(click.ParamType[bytes]):
    """The argument `-`: all of standard input, as bytes."""

    name = "evidence"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:  # noqa: ANN401  # click's signature
        if value == "-":
            return b"" if ctx is not None and ctx.resilient_parsing else claimed_stdin().read(MAX_TEXT_BYTES + 1)
        return self.fail(f"Unexpected argument {value!r} after the question.", param, ctx)


def read_stdin() -> str:
    """Read all of standard input as text. UsageError if it is too long, is not UTF-8, or belongs to another argument."""
    return _decode(claimed_stdin().read(MAX_TEXT_BYTES + 1), STANDARD_INPUT)


evidence_argument = click.argument("piped", metavar="[-]", type=Evidence(), required=False)
"""`-` after the question: use standard input as evidence, whether it is a pipe, a file or a terminal."""


def piped_evidence(piped: bytes | None) -> tuple[str, int]:
    """Return the evidence on standard input and its size in bytes. Standard input is read if it is a pipe or the command line has `-`.

    Files, terminals, sockets and devices are not read: in `while read q; do localrag ask "$q"; done < questions.txt`, the file belongs to
    the loop. A note on stderr reports the number of bytes read, or a file that was not read.
    """
    if piped is None:
        if is_stdin_claimed() or sys.stdin is None or sys.stdin.closed:
            return "", 0
        kind = _kind_of_stdin()
        if kind != stat.S_IFIFO:
            if kind == stat.S_IFREG and _has_more():
                note("Standard input is a file and was not read. Add - after the question to use it as evidence.")
            return "", 0
        piped = claimed_stdin().read(MAX_TEXT_BYTES + 1)
    text = _decode(piped, STANDARD_INPUT)
    if piped:
        note(f"Read {counted(len(piped), 'byte')} from standard input as evidence. To prevent this, add </dev/null.")
    return text, len(piped)


def _kind_of_stdin() -> int:
    """Return the file type of standard input (a stat.S_IF… constant), or 0 if it is unknown."""
    try:
        return stat.S_IFMT(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):
        return 0


def _has_more() -> bool:
    """Return whether the file on standard input has unread bytes."""
    with suppress(OSError, ValueError):
        number = sys.stdin.fileno()
        return os.lseek(number, 0, os.SEEK_CUR) < os.fstat(number).st_size
    return False


def _decode(raw: bytes, origin: str) -> str:
    if len(raw) > MAX_TEXT_BYTES:
        raise click.UsageError(f"{origin} is longer than {MAX_TEXT_BYTES // 1024 // 1024} MiB; index it as a document instead.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{origin} is not UTF-8 text (byte {error.start}).") from None


def _settings(ctx: click.Context, _param: click.Parameter, value: Path | None) -> Settings:
    settings = Settings.from_env(models_file=value)
    if not ctx.resilient_parsing and (secured := secure_home(settings.home, default_home())):
        note(one_line(secured))
    return settings


def models_file(command: Command) -> Command:
    return click.option(
        "--models",
        "settings",
        type=click.Path(path_type=Path),
        callback=_settings,
        metavar="FILE",
        help="A models.toml file with the highest priority: it overrides the project's, the home's and the built-in one.",
    )(command)


def model(command: Command) -> Command:
    command = click.option("--chat-template", type=InputFile(), metavar="FILE", help="A chat template to use instead of the model's own.")(
        command
    )
    option = click.option(
        "--model", "-m", callback=_model_or_nearer, metavar="NAME|FILE", help="A model in models.toml, a .gguf file, or echo."
    )
    return option(command)


def window(command: Command) -> Command:
    return click.option(
        "--ctx",
        "-c",
        "n_ctx",
        type=click.IntRange(min=1),
        metavar="TOKENS",
        help="Context window; capped by the training context and by memory.",
    )(command)


def as_json(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(command)


class Asking(TypedDict):
    """The values that click passes for the options of `asking`."""

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
    top_k: TopK | None
    rerank: str | None
    where: Where | None
    context_ratio: float | None
    overflow: tuple[tuple[Overflow, str | None], ...]
    max_seconds: float | None
    weigh: bool
    cite: Cite | None
    unanswerable: Unanswerable | None
    evidence: EvidenceKind | None
    evidence_tokens: int | None
    quote: bool


class Number(click.FloatRange):
    """A number in a range. Rejects nan, which click's range check would accept."""

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
            self.fail(f"{value!r} is neither a number nor fit.", param, ctx)
        return click.IntRange(1, MAX_DEPTH).convert(value, param, ctx)


class ThinkTokens(click.ParamType[int]):
    """A token limit for reasoning: 0, or at least MIN_THINK_TOKENS."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401  # click's signature
        number = click.INT.convert(value, param, ctx)
        if number != 0 and not MIN_THINK_TOKENS <= number < 2**31:
            self.fail(f"{number} is neither 0 nor at least {MIN_THINK_TOKENS}.", param, ctx)
        return number


class Strategy(click.ParamType[tuple[Overflow, str | None]]):
    """An overflow strategy for all sections or for one, e.g. `truncate` or `history=truncate`."""

    name = "strategy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Overflow, str | None]:  # noqa: ANN401  # click's signature
        section, separator, strategy = str(value).rpartition("=")
        for overflow in OVERFLOWS:
            if strategy == overflow:
                return overflow, section if separator else None
        return self.fail(f"{value!r} is not STRATEGY or SECTION=STRATEGY. Strategies: {', '.join(OVERFLOWS)}.", param, ctx)


def opener(asking: Asking, *, vocab_only: bool, keep: bool, name: str = "ask") -> Callable[[], Session]:
    """Return a function that opens a session with these options. UsageError for an option that needs --kb without it.

    On a terminal, the function offers to fetch a missing model.
    """
    for option, is_given in (("--where", bool(asking["where"])), ("--rerank", asking["rerank"] is not None)):
        if is_given and not asking["kbs"]:
            raise UsageError(f"{option} needs a knowledge base.", hint="Name one with --kb.")
    if vocab_only and asking["rerank"] == "llm":
        raise UsageError("--rerank llm needs the model, which this command does not run.", hint="Leave it out, or name a cross-encoder.")
    open_it = partial(
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

    def open_session() -> Session:
        try:
            return open_it()
        except ModelNotFoundError:
            if not offer_model(asking["settings"], asking["model"]):
                raise
            return open_it()

    return open_session


def offer_model(settings: Settings, model: str | None) -> bool:
    """Offer to fetch the model that a command needs, if it is in models.toml but not on this machine. Returns whether it was fetched.

    For the default model that ships, the recommended one is offered, and becomes the default in the home. One key decides. Without a
    terminal, or if the user declines, raises ModelNotFoundError with the command that fetches it.
    """
    from localrag.catalog import Catalog, save_in_home  # noqa: PLC0415  # only if a model is missing

    if model == "echo":
        return False
    catalog = Catalog.load(settings)
    spec = catalog.model(model)
    if spec.kind == "path" or catalog.is_here(spec):
        return False
    choice = None
    if model is None and catalog.default_ships:
        with suppress(LocalragError):  # without a recommendation, the default itself is offered
            from localrag.session.recommend import recommend  # noqa: PLC0415  # weight

            choice = recommend(settings, on_measure=tell_measuring if can_ask() else lambda: None).best
    wanted = spec if choice is None else catalog.model(choice.name)
    what = wanted.name if choice is None else f"{wanted.name} ({_in_short(choice)})"
    missing = ModelNotFoundError(f"{spec.name} is not on this machine.", hint=f"localrag models pull {what}", name=spec.name)
    if not can_ask():
        raise missing
    fetches = choice is None or not choice.is_here
    note(f"{spec.name} is not on this machine. {'To fetch' if choice is None else 'Recommended here'}: {what}.")
    deeds = [*(["fetch it"] if fetches else []), *(["make it your default"] if choice is not None else [])]
    note(f"Press Enter to {' and '.join(deeds)}, or any other key to stop.")
    if click.getchar() not in {"\r", "\n", "y", "Y"}:
        raise missing
    fetch(catalog, wanted)
    if choice is not None:
        where = save_in_home(settings, default_model=wanted.name)
        note(f"{wanted.name} is now the default model ({safe(str(where))}).")
    return True


def tell_measuring() -> None:
    """Say why a recommendation takes some seconds."""
    note("Measuring the speed of this machine…")


def _in_short(choice: Candidate) -> str:
    from localrag.cli import render  # noqa: PLC0415  # only here

    facts = [render.size(choice.size_bytes), f"license {choice.license}" if choice.license else ""]
    if choice.first_token_s is not None and choice.tokens_per_s is not None:
        facts.append(f"about {choice.first_token_s:.0f} s to the first token, then {choice.tokens_per_s:.0f} tokens/s")
    return ", ".join(filter(None, facts))


def fetch(catalog: Catalog, spec: ModelSpec) -> Path:
    """Fetch a model or embedder with its progress on stderr; the path of its file."""
    from localrag.cli import render  # noqa: PLC0415  # only here

    with render.Progress(spec.name) as progress:
        return catalog.pull(spec, progress)


seed = click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Random seed. The same seed gives the same text.  [default: 0]")
temperature = click.option(
    "--temperature", type=Number(0, 100), default=0.0, show_default=True, help="Sampling temperature. 0 always picks the most likely token."
)


def sampling(asking: Asking, *, seed: int | None, temperature: float) -> SamplingParams:
    """Return the sampling parameters. An explicit seed makes the answer repeatable."""
    return SamplingParams(
        seed=seed or 0,
        repeatable=seed is not None,
        temperature=temperature,
        max_tokens=asking["max_tokens"],
        think_tokens=asking["think_tokens"],
    )


def question(asking: Asking, text: str, sampling: SamplingParams | None = None) -> Question:
    """Build a question from the options and read its attached files. Without `sampling`, only the token limits are set."""
    max_seconds = asking["max_seconds"]
    return Question.of(
        text,
        system=asking["system"],
        sampling=sampling or SamplingParams(max_tokens=asking["max_tokens"], think_tokens=asking["think_tokens"]),
        attachments=[attachment(path) for path in dict.fromkeys(asking["attached"])],
        where=asking["where"],
        top_k=asking["top_k"],
        weigh=asking["weigh"],
        cite=asking["cite"],
        unanswerable=asking["unanswerable"],
        evidence=asking["evidence"],
        evidence_tokens=asking["evidence_tokens"],
        quote=asking["quote"],
        context_ratio=asking["context_ratio"],
        overflow=asking["overflow"],
        max_seconds=max_seconds,
        started_at=None if max_seconds is None else started_at(),
    )


def attachment(path: Path) -> Attachment:
    """Read a file to attach to a question. UsageError as in files.read_source."""
    source = read_source(path, "attached")
    return Attachment(label=source.label, text=source.text, modified=source.modified)


def started_at() -> float:
    """Return when the command was started, on the clock of time.perf_counter(); see `main`."""
    started_at: float | None = click.get_current_context().obj
    if started_at is not None:
        return started_at
    return time.perf_counter() - age_s()


def _conditions(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> Where | None:
    return Where.parse(values) if values else None


where_option = click.option(
    "--where",
    multiple=True,
    callback=_conditions,
    metavar="KEY=PATTERN",
    help="Search only documents that match, e.g. tag=price, source=guide/* or author=Ann. Repeatable.",
)
rerank_option = click.option(
    "--rerank",
    metavar="llm|NAME",
    help="Rerank the best passages, with the model itself or with a cross-encoder (a name in models.toml, a .gguf file or a folder).",
)
max_seconds = click.option(
    "--max-seconds",
    type=Number(0, 86_400, min_open=True),
    metavar="S",
    help="Finish within S seconds, retrieval and reranking included. Uses the speed measured on this machine.",
)
cite_option = click.option(
    "--cite",
    type=click.Choice(get_args(Cite)),
    help="enforced: an answer with evidence begins with the tag of a source, or [none], and can name no other. free: the model may cite or "
    f"not.  [default: {DEFAULT_CITE}]",
)
evidence_option = click.option(
    "--evidence",
    type=click.Choice(get_args(EvidenceKind)),
    help="What to send of the passages: their sentences nearest to the question, or all of each.  [default: sentences for small models]",
)
evidence_tokens_option = click.option(
    "--evidence-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Maximum tokens of the passages in the prompt.  [default: {SENTENCE_TOKENS} for sentences]",
)
quote_option = click.option(
    "--quote",
    is_flag=True,
    help="The model may choose a sentence of the sources, such as [KB#12.3], and its exact text is copied into the answer. Includes "
    "--cite enforced.",
)
unanswerable_option = click.option(
    "--unanswerable",
    type=click.Choice(get_args(Unanswerable)),
    help="What to do if the knowledge base probably does not answer the question. say: say so and list the nearest passages, without "
    f"asking the model. answer: let the model answer. error: fail with exit code 6.  [default: {DEFAULT_UNANSWERABLE}]",
)
_ASKING = (
    click.option(
        "--max-tokens",
        "-n",
        type=click.IntRange(min=1),
        default=ANSWER_BASIS,
        show_default=True,
        metavar="N",
        help="Maximum length of the answer, in tokens.",
    ),
    click.option(
        "--think-tokens",
        type=ThinkTokens(),
        default=DEFAULT_THINK_TOKENS,
        show_default=True,
        metavar="N",
        help="Maximum length of a model's reasoning, in tokens. 0 disables reasoning.",
    ),
    click.option(
        "--top-k",
        type=Depth(),
        metavar="N",
        help="Number of passages to send, or fit for as many as the window can hold. Unless --context-ratio is set, passages also use the "
        f"window's spare tokens.  [default: up to {DEFAULT_TOP_K}, by relevance]",
    ),
    evidence_option,
    evidence_tokens_option,
    rerank_option,
    where_option,
    max_seconds,
    click.option(
        "--overflow",
        type=Strategy(),
        multiple=True,
        metavar="[SECTION=]STRATEGY",
        help=f"What to do with content that does not fit, for all sections or for one: {', '.join(OVERFLOWS)}. Repeatable.",
    ),
    click.option(
        "--context-ratio",
        type=Number(0, 1),
        metavar="R",
        help="Maximum share of the window for evidence, after sections that cannot be cut.  [default: the budget's value, 0.5]",
    ),
    click.option("--budget", metavar="NAME", help="A [budgets.NAME] table of models.toml."),
    cite_option,
    unanswerable_option,
    quote_option,
    click.option("--weigh", is_flag=True, help="Weight passages by the relevance of their files (see localrag score)."),
    click.option(
        "--attach",
        "attached",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="FILE",
        help="A text file to send with the question. Repeatable.",
    ),
    click.option("--system", type=Text(), metavar="TEXT", help="System prompt (- for stdin, @file for a file)."),
    click.option(
        "--kb", "-k", "kbs", multiple=True, callback=without_empty, metavar="NAME", help="A knowledge base to answer from. Repeatable."
    ),
)


def asking(command: Command) -> Command:
    """Add the options of `Asking`, which shape a prompt, to a command."""
    for option in _ASKING:
        command = option(command)
    return window(model(models_file(command)))
