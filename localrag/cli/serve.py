"""The commands serve and mcp: serve localrag to other programs, over HTTP or over standard input and output."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import options
from localrag.cli.terminal import note
from localrag.errors import UsageError

if TYPE_CHECKING:
    from localrag.settings import Settings


@click.command("mcp", short_help="Serve MCP tools over standard input and output.")
@options.models_file
@options.model
@options.window
@click.option("--kb", "kbs", multiple=True, metavar="NAME", help="Knowledge base that clients may use. Repeatable.  [default: all]")
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
    """Serve the tools ask, search, read_chunk and budget over the Model Context Protocol, on standard input and output.

    MCP clients start this command themselves. An example configuration:

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
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on. Addresses other than loopback require a token.",
)
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True, help="Port to listen on.")
@click.option("--api-key", metavar="KEY", help=f"Bearer token that clients must send. The environment variable {KEY_VARIABLE} is safer.")
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin of web pages that may call the API (CORS), e.g. http://localhost:3000. Repeatable.",
)
@click.option(
    "--allow-host", "hosts", multiple=True, metavar="NAME", help="Host name under which clients may reach this server. Repeatable."
)
@click.option("--any-local-user", is_flag=True, help="Serve every user of this machine, not only the user who runs the server.")
@click.option(
    "--max-seconds",
    type=options.Number(1, 86_400),
    default=600,
    show_default=True,
    help="Maximum duration of a request in seconds, waiting included. An answer that takes longer is cut off.",
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
    """Serve an OpenAI-compatible API, with indexes, to programs on this machine.

    \b
      localrag serve
      curl http://127.0.0.1:8642/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "What is PLA?"}], "index_name": "handbook"}'
    """
    try:
        from localrag.catalog import Catalog  # noqa: PLC0415  # weight
        from localrag.server.app import make_app  # noqa: PLC0415  # an extra
        from localrag.server.engine_process import EngineOptions, EngineProcess  # noqa: PLC0415  # an extra
        from localrag.server.routing import ServerState  # noqa: PLC0415  # an extra
        from localrag.server.security import LOOPBACK, TOKEN_FILE, Guard, can_tell_users, home_token, listener, make_server  # noqa: PLC0415  # an extra  # noqa: PLC0415  # an extra
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("localrag"):
            raise
        raise UsageError(f"The server needs the package {error.name}.", hint="pip install 'localrag[server]'") from None
    catalog = Catalog.load(settings)
    if model != "echo":
        catalog.open(catalog.model(model))  # report a missing model now, not in every answer
    is_local = host in ("127.0.0.1", "::1", "localhost")
    key = api_key or os.environ.get(KEY_VARIABLE) or None  # an empty key would protect nothing
    if key is None and not is_local:
        key = secrets.token_urlsafe(32)
        note(f"Requests need this token: {key}")
    users: frozenset[int] | None = None
    if key is None and not any_local_user:
        try:
            key, where = home_token(settings.home), f"the token in {settings.home / TOKEN_FILE}"
        except OSError:  # the home is not writable
            key = secrets.token_urlsafe(32)
            where = f"this token: {key}"
        users = frozenset({os.geteuid(), 0}) if can_tell_users() else frozenset()
        if not users:
            note(f"This system cannot identify the user who sends a request, so every request needs {where}.")
    allowed_hosts = None if not is_local and not hosts else LOOPBACK | {each.lower() for each in hosts}
    engine_options = EngineOptions(
        settings=settings, model=model, n_ctx=n_ctx, chat_template=chat_template, budget=budget, keep=not no_keep
    )
    guard = Guard(hosts=allowed_hosts, origins=frozenset(origins), api_key=key, users=users)
    engine = EngineProcess(engine_options, max_seconds=max_seconds)
    app = make_app(ServerState(settings=settings, engine=engine, guard=guard, rejects_tools=catalog.rejects_tools))
    server_socket = listener(host, port)
    note(f"Serving on http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C stops it)")
    make_server(app, host=host, port=port).run([server_socket])
