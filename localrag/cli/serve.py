"""serve and mcp: localrag for other programs, over HTTP, or over standard input and output."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import options
from localrag.cli.text import note
from localrag.errors import UsageError

if TYPE_CHECKING:
    from localrag.settings import Settings


@click.command("mcp", short_help="Serve MCP tools over standard input and output.")
@options.models_file
@options.model
@options.window
@click.option("--kb", "kbs", multiple=True, metavar="NAME", help="A knowledge base that clients may use. Repeatable.  [default: all]")
@click.option("--budget", metavar="NAME", help="A [budgets.NAME] table of models.toml.")
@click.option("--no-keep", is_flag=True, help="Do not record answers in the journal.")
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
        from localrag.mcp.stdio import serve  # noqa: PLC0415  # an extra
        from localrag.mcp.tools import ServerOptions  # noqa: PLC0415  # an extra
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("localrag"):
            raise
        raise UsageError(f"The MCP server needs the package {error.name}.", hint="pip install 'localrag[mcp]'") from None
    serve(ServerOptions(settings=settings, kbs=kbs, model=model, n_ctx=n_ctx, chat_template=chat_template, budget=budget, keep=not no_keep))


KEY_VARIABLE = "LOCALRAG_API_KEY"
DEFAULT_PORT = 8642


@click.command("serve")
@options.models_file
@options.model
@options.window
@click.option("--budget", metavar="NAME", help="A [budgets.NAME] table of models.toml.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on; any other than loopback needs a token."
)
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--api-key", metavar="KEY", help=f"Bearer token that clients must send; prefer the variable {KEY_VARIABLE}.")
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin of a web page that may call the API, such as http://localhost:3000. Repeatable.",
)
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="Host name that clients may use for this server. Repeatable.")
@click.option("--any-local-user", is_flag=True, help="Serve every user of this machine, not only the one who runs the server.")
@click.option(
    "--max-seconds",
    type=options.Number(1, 86_400),
    default=600,
    show_default=True,
    help="Maximum duration of a request, waiting included; then the answer ends with what was written.",
)
@click.option("--no-keep", is_flag=True, help="Do not record answers in the journal.")
def serve_command(
    settings: Settings,
    model: str | None,
    chat_template: Path | None,
    n_ctx: int | None,
    budget: str | None,
    host: str,
    port: int,
    api_key: str | None,
    origins: tuple[str, ...],
    hosts: tuple[str, ...],
    any_local_user: bool,
    max_seconds: float,
    no_keep: bool,
) -> None:
    """Serve the API of OpenAI, with indexes, to your programs on this machine.

    \b
      localrag serve
      curl http://127.0.0.1:8642/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "What is PLA?"}], "index_name": "handbook"}'
    """
    try:
        from localrag.catalog import Catalog  # noqa: PLC0415  # weight
        from localrag.server.app import make_app  # noqa: PLC0415  # an extra
        from localrag.server.engine_process import EngineProcess, Wanted  # noqa: PLC0415  # an extra
        from localrag.server.routing import ServerState  # noqa: PLC0415  # an extra
        from localrag.server.security import LOOPBACK, TOKEN_FILE, Guard, can_tell_users, home_token, listener, make_server  # noqa: PLC0415  # an extra  # noqa: PLC0415  # an extra
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("localrag"):
            raise
        raise UsageError(f"The server needs the package {error.name}.", hint="pip install 'localrag[server]'") from None
    catalog = Catalog.load(settings)
    if model != "echo":
        catalog.open(catalog.model(model))  # what is not there is said now, and not by each answer
    is_local = host in ("127.0.0.1", "::1", "localhost")
    key = api_key or os.environ.get(KEY_VARIABLE) or None  # an empty one is none: anybody would have it
    if key is None and not is_local:
        key = secrets.token_urlsafe(32)
        note(f"Requests need this token: {key}")
    users: frozenset[int] | None = None
    if key is None and not any_local_user:
        try:
            key, where = home_token(settings.home), f"the token in {settings.home / TOKEN_FILE}"
        except OSError:  # a home that cannot be written to
            key = secrets.token_urlsafe(32)
            where = f"this token: {key}"
        users = frozenset({os.geteuid(), 0}) if can_tell_users() else frozenset()
        if not users:
            note(f"This system does not tell which user sends a request. Every request needs {where}.")
    known = None if not is_local and not hosts else LOOPBACK | {each.lower() for each in hosts}
    wanted = Wanted(settings=settings, model=model, n_ctx=n_ctx, chat_template=chat_template, budget=budget, keep=not no_keep)
    guard = Guard(hosts=known, origins=frozenset(origins), api_key=key, users=users)
    engine = EngineProcess(wanted, max_seconds=max_seconds)
    app = make_app(ServerState(settings=settings, engine=engine, guard=guard, rejects_tools=catalog.rejects_tools))
    opened = listener(host, port)
    note(f"Serving on http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)")
    make_server(app, host=host, port=port).run([opened])
