"""mcp: the tools of a Model Context Protocol server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import options
from localrag.errors import UsageError

if TYPE_CHECKING:
    from localrag.settings import Settings


@click.command("mcp", short_help="Serve MCP tools to the program that starts this.")
@options.models_file
@options.model
@options.window
@click.option("--kb", "kbs", multiple=True, metavar="NAME", help="A knowledge base that may be used; can be given again. [default: all]")
@click.option("--budget", metavar="NAME", help="A [budgets.NAME] table of models.toml.")
@click.option("--no-keep", is_flag=True, help="Keep nothing of the answers in the journal.")
def mcp_command(
    settings: Settings,
    model: str | None,
    chat_template: Path | None,
    n_ctx: int | None,
    kbs: tuple[str, ...],
    budget: str | None,
    no_keep: bool,
) -> None:
    """Serve ask, search, read_chunk and budget as tools of the Model Context Protocol, on standard input and output.

    A program that has MCP servers starts this itself:

    \b
      {"mcpServers": {"localrag": {"command": "localrag", "args": ["mcp", "--kb", "handbook"]}}}
    """
    try:
        from localrag.mcp.desk import Wanted  # noqa: PLC0415  # an extra
        from localrag.mcp.stdio import serve  # noqa: PLC0415  # an extra
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("localrag"):
            raise
        raise UsageError(f"The MCP server needs the package {error.name}.", hint="pip install 'localrag[mcp]'") from None
    serve(Wanted(settings=settings, kbs=kbs, model=model, n_ctx=n_ctx, chat_template=chat_template, budget=budget, keep=not no_keep))
