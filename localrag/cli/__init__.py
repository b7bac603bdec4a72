"""The command line: a command parses, calls once and prints. Nothing heavy is imported to print help."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from localrag.cli.text import fault, forgive_encoding
from localrag.errors import ConfigError, InterruptedRunError, LocalragError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# name → (module, one line of help); a command's module is imported when it runs or prints its own help
COMMANDS: dict[str, tuple[str, str]] = {
    "index": ("kb", "Add or update documents in a knowledge base."),
    "kb": ("kb", "List, show, verify, export, import and remove knowledge bases."),
    "search": ("kb", "Find passages, each with what its score is made of."),
    "ask": ("ask", "Answer a question, from your documents if --kb is given."),
    "chat": ("chat", "Talk with a model, in a conversation that is kept."),
    "council": ("council", "Have specialists propose and a judge decide."),
    "budget": ("ask", "Show the budget an ask would have, without generating."),
    "score": ("score", "Score files for a task, factor by factor."),
    "summarize": ("summarize", "Make a file shorter: detailed, summary or stub."),
    "report": ("report", "Show the ledgers that were kept, and what is cut most."),
    "tokens": ("tokens", "Count tokens exactly, with the model's own tokenizer."),
    "models": ("models", "List, show, fetch, verify and optimize models."),
    "memory": ("memory", "Keep facts that chats are told, list and forget them."),
    "serve": ("serve", "Serve the HTTP API to programs of this machine."),
    "mcp": ("mcp", "Serve MCP tools to the program that starts this."),
    "eval": ("evaluate", "Measure retrieval, or answers to questions with known answers."),
    "bundle": ("bundle", "Pack all of it for a machine without a network."),
    "unbundle": ("bundle", "Take models and knowledge bases out of a bundle."),
    "completion": ("completion", "Print what makes a shell complete commands and names."),
    "doctor": ("doctor", "Show what this machine can run, and what localrag keeps."),
}


class _Commands(click.Group):
    """Commands by name, each imported when it is wanted."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"localrag.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if ctx.resilient_parsing and args:  # the shell completes
            from localrag.cli.names import stand_in  # noqa: PLC0415  # only there

            if (command := stand_in(args)) is not None:
                return args[0], command, args[1:]
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib  # noqa: PLC0415  # only for a typing error

            near = difflib.get_close_matches(args[0], COMMANDS, n=2)
            hint = f" Did you mean {' or '.join(near)}?" if near else " See localrag --help."
            ctx.fail(f"There is no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """A reader that went away, as `head` does, is no error; click would end the process with code 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _let_go_of_stdout()
            return 0

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Commands with their line of help, none of them imported; then the options."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415  # only for a shell

        found = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="localrag", message="localrag %(version)s")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def cli(debug: bool) -> None:
    """Answers from your own documents, with local models: every token counted, fitted and accounted for."""


def main(args: Sequence[str] | None = None, *, is_process: bool = False) -> int:
    """Run a command line and return its exit code. Every error becomes one line on stderr, or one object on stdout with --json.

    A limit of time counts from here, or, where the command line is a process of its own (`is_process`), from when that was started.
    """
    started_at = None if is_process else time.perf_counter()
    args = list(sys.argv[1:] if args is None else args)
    at = args.index("--") if "--" in args else len(args)
    options, texts = args[:at], args[at:]
    debug, as_json = "--debug" in options, "--json" in options
    args = [*(option for option in options if option != "--debug"), *texts]
    try:
        result = cli.main(args=args, prog_name="localrag", standalone_mode=False, obj=started_at)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as raised:
        click.echo(raised.format_message(), err=True)
        return UsageError.exit_code
    except (LocalragError, click.ClickException, click.Abort, KeyboardInterrupt, OSError) as raised:
        if debug:
            raise
        error = _as_error(raised)
        try:
            fault(error, as_json=as_json)
        except BrokenPipeError:
            _let_go_of_stdout()
        return error.exit_code


def _let_go_of_stdout() -> None:
    """Nobody reads it any more, and what it still holds would be written at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _as_error(raised: BaseException) -> LocalragError:
    if isinstance(raised, LocalragError):
        return raised
    if isinstance(raised, click.ClickException):
        context = getattr(raised, "ctx", None)
        return UsageError(raised.format_message(), hint=f"See {context.command_path} --help." if context else None)
    if isinstance(raised, OSError):
        place = f"{raised.filename}: " if raised.filename else ""
        return ConfigError(
            f"{place}{raised.strerror or raised}.", hint="Check the path and its permissions (LOCALRAG_HOME moves the home)."
        )
    return InterruptedRunError("Interrupted.")


def entry_point() -> None:
    forgive_encoding()
    sys.exit(main(is_process=True))
