"""docs/reference/cli.md: every command as click knows it, and every exit code."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator

import click

from docgen.sources import GENERATED
from localrag import errors
from localrag.cli import COMMANDS, cli

_INTRODUCTION = """\
# Commands

{generated}

Each command answers `--help` with what stands here. Answers and data go to standard output, talk to standard error; with `--json` there is
one JSON object on standard output and nothing else. [Output](output.md) says what such an object holds, and which environment variables
count.

{overview}

## Exit codes

Every error that localrag raises on purpose has one of these as its exit code, one line that says what is wrong, and a way out.

```text
{errors}
```
"""


def page() -> str:
    context = click.Context(cli, info_name="localrag")
    rows = "\n".join(f"| [`{name}`](#localrag-{name}) | {text} |" for name, (_, text) in COMMANDS.items())
    overview = f"| command | |\n| --- | --- |\n{rows}"
    head = _INTRODUCTION.format(generated=GENERATED, overview=overview, errors=_tree())
    parts = [head.strip()]
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        parts += _command(command, name, context, level=2)
    return "\n\n".join(parts) + "\n"


def _tree() -> str:
    """The drawing of the errors, with its codes."""
    doc = inspect.cleandoc(errors.__doc__ or "")
    lines = [line for line in doc.splitlines() if line.startswith("    ")]
    return textwrap.dedent("\n".join(lines))


def _command(command: click.Command, name: str, parent: click.Context, *, level: int) -> Iterator[str]:
    """A command and those below it, each a heading, its use, its help and its options."""
    context = click.Context(command, info_name=name, parent=parent)
    yield f"{'#' * level} {context.command_path}"
    yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```"
    yield from _help(command.help or "")
    records = (param.get_help_record(context) for param in command.get_params(context) if "--help" not in param.opts)
    rows = [f"| `{_bars(opts)}` | {_bars(_escaped(' '.join(text.split())))} |" for opts, text in filter(None, records) if text]
    if rows:
        yield "\n".join(["| option | |", "| --- | --- |", *rows])
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            child = command.get_command(context, each)
            assert child is not None
            yield from _command(child, each, context, level=level + 1)


def _help(text: str) -> Iterator[str]:
    """Paragraphs; one that click is told not to wrap is an example."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield f"```text\n{textwrap.dedent(paragraph[2:]).rstrip()}\n```"
        elif paragraph.strip():
            yield _escaped(" ".join(paragraph.split()))


def _bars(text: str) -> str:
    """A cell of a table may hold a bar only so."""
    return text.replace("|", r"\|")


def _escaped(text: str) -> str:
    """Text that is no HTML."""
    return text.replace("<", "&lt;")
