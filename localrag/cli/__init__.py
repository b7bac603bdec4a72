"""The command line. Each command parses its options, calls the library and prints the result. Printing help imports nothing heavy."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from localrag.cli.terminal import drop_output, fault, forgive_encoding, open_streams, stdout_error
from localrag.errors import ConfigError, InterruptedRunError, LocalragError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# name → (module, one-line help). A command's module is imported only to run it or to print its help.
COMMANDS: dict[str, tuple[str, str]] = {
    "index": ("kb", "Add or update documents in a knowledge base."),
    "kb": ("kb", "List, show, verify, reembed, move, rename and remove knowledge bases."),
    "search": ("kb", "Find passages and show how each one scored."),
    "ask": ("ask", "Answer a question; with --kb, from your documents."),
    "chat": ("chat", "Chat with a model in a saved conversation."),
    "council": ("council", "Have specialists propose answers and a judge decide."),
    "budget": ("ask", "Show the token budget of a question without answering it."),
    "score": ("score", "Score how relevant files are to a task, factor by factor."),
    "summarize": ("summarize", "Summarize a file: detailed, summary or stub."),
    "report": ("report", "Show recorded token budgets and what is cut most often."),
    "tokens": ("models", "Count tokens with the model's own tokenizer."),
    "models": ("models", "List, show, recommend, fetch, verify and optimize models."),
    "memory": ("memory", "Manage facts that chats remember."),
    "serve": ("serve", "Serve the HTTP API to programs on this machine."),
    "mcp": ("serve", "Serve MCP tools over standard input and output."),
    "eval": ("evaluate", "Measure retrieval, or answers to questions with known answers."),
    "bundle": ("bundle", "Pack models and knowledge bases for an offline machine."),
    "unbundle": ("bundle", "Unpack models and knowledge bases from a bundle."),
    "completion": ("completion", "Print a shell completion script."),
    "config": ("config", "Show or set the defaults of options, such as kb and model."),
    "doctor": ("doctor", "Show what this machine can run, and where localrag keeps files."),
}


CONFIGURED = frozenset({"index", "search", "ask", "chat", "budget", "council", "summarize", "tokens", "serve", "mcp"})
"""The commands whose options can have defaults of one's own (see settings.OPTIONS)."""


class _Commands(click.Group):
    """A group that imports each command on first use."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"localrag.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if ctx.resilient_parsing and args:  # shell completion
            from localrag.cli.completion import name_completer  # noqa: PLC0415  # only there

            if (command := name_completer(args)) is not None:
                return args[0], command, args[1:]
        if args and args[0] not in COMMANDS and _is_question(args[0]):
            args = ["ask", *args]
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib  # noqa: PLC0415  # only for a typing error

            near = difflib.get_close_matches(args[0], COMMANDS, n=2)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"There is no command {args[0]!r}.{hint}")
        name, command, rest = super().resolve_command(ctx, args)
        if name in CONFIGURED and command is not None and not ctx.resilient_parsing:
            from localrag.cli.options import take_defaults  # noqa: PLC0415  # heavy, and loaded by these commands in any case

            take_defaults(ctx, name, command, rest)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> object:
        """Exit with code 0 when the reader closes the pipe, as `head` does. click would exit with code 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            drop_output()
            return 0

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Complete command names, with their one-line help and without importing them; then options."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415  # only for a shell

        items = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _is_question(word: str) -> bool:
    """Whether the first word of a command line is a question for `ask`. A mistyped command has neither white space nor a question mark."""
    return not word.startswith("-") and (len(word.split()) > 1 or word.endswith(("?", "？", "؟")))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="localrag", message="localrag %(version)s")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def cli(debug: bool) -> None:
    """Answer questions from your own documents with local models, and see where every token goes.

    localrag "How do I dry nylon?" is short for localrag ask "How do I dry nylon?".
    """


def main(args: Sequence[str] | None = None, *, is_process: bool = False) -> int:
    """Run a command line and return its exit code. An error prints one line on stderr, or one object on stdout with --json.

    Time limits count from this call, or with `is_process` from the start of the process.
    """
    started_at = None if is_process else time.perf_counter()
    args = list(sys.argv[1:] if args is None else args)
    at = args.index("--") if "--" in args else len(args)
    options, texts = args[:at], args[at:]
    debug, as_json = "--debug" in options, "--json" in options
    args = [*(option for option in options if option != "--debug"), *texts]
    try:
        result = cli.main(args=args, prog_name="localrag", standalone_mode=False, obj=started_at)
        if (unwritten := stdout_error()) is not None:
            raise unwritten
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as raised:
        click.echo(raised.format_message(), err=True)
        return UsageError.exit_code
    except (LocalragError, click.ClickException, click.Abort, KeyboardInterrupt, OSError) as raised:
        if debug:
            raise
        return _report(raised, as_json=as_json)
    except SystemExit:  # click exits if the reader of its help closes the pipe
        if not isinstance(stdout_error(), BrokenPipeError):
            raise
        drop_output()
        return 0


def _report(raised: BaseException, *, as_json: bool) -> int:
    """Print the error that ended a command, if it can still be printed, and return the exit code.

    If standard output cannot be written, report that as the cause, whatever error it led to.
    """
    unwritten = stdout_error()
    if isinstance(unwritten, BrokenPipeError):
        drop_output()
        return 0 if isinstance(raised, BrokenPipeError) else _as_error(raised).exit_code
    error = _as_error(raised) if unwritten is None else _unwritable(unwritten)
    try:
        fault(error, as_json=as_json and unwritten is None)
    except BrokenPipeError:
        pass
    except OSError:  # from standard output with --json, otherwise from standard error
        with suppress(OSError):
            fault(error, as_json=False)
    drop_output()
    return error.exit_code


def _unwritable(error: OSError) -> LocalragError:
    from localrag.files import file_error  # noqa: PLC0415  # only for an error

    cause = file_error(error, None, hint="Redirect it to a writable file or pipe.")
    reason = "it is closed" if error.errno == errno.EBADF else cause.reason
    return ConfigError(f"Standard output cannot be written: {reason}.", hint=cause.hint, **cause.numbers)


def _as_error(raised: BaseException) -> LocalragError:
    if isinstance(raised, LocalragError):
        return raised
    if isinstance(raised, click.ClickException):
        context = getattr(raised, "ctx", None)
        hint = f"See {context.command_path} --help." if context else None
        if isinstance(raised, click.BadParameter) and context is not None and raised.param is not None:
            from localrag.cli.options import origin_of  # noqa: PLC0415  # only for an error

            if (default := origin_of(context, raised.param)) is not None:
                hint = f"The value comes from {default.place}. To see all such values: localrag config list"
        return UsageError(raised.format_message(), hint=hint)
    if isinstance(raised, OSError):
        from localrag.files import file_error  # noqa: PLC0415  # only for an error

        place = os.fsdecode(raised.filename) if isinstance(raised.filename, str | bytes) else None
        cause = file_error(raised, place, hint="Check the path and its permissions (LOCALRAG_HOME sets localrag's home).")
        reason = f"{place}: {cause.reason}." if place else f"{cause.reason[:1].upper()}{cause.reason[1:]}."
        return ConfigError(reason, hint=cause.hint, **cause.numbers)
    return InterruptedRunError("Interrupted.")


def entry_point() -> None:
    open_streams()
    forgive_encoding()
    code = main(is_process=True)
    drop_output()
    sys.exit(code)
