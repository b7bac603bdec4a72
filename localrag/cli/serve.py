"""serve: the HTTP API."""

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

KEY_VARIABLE = "LOCALRAG_API_KEY"
DEFAULT_PORT = 8642


@click.command("serve")
@options.models_file
@options.model
@options.window
@click.option("--budget", metavar="NAME", help="A [budgets.NAME] table of models.toml.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Any but this machine's own needs a token.")
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--api-key", metavar="KEY", help=f"The bearer token to ask for; better given as {KEY_VARIABLE}.")
@click.option("--allow-origin", "origins", multiple=True, metavar="ORIGIN", help="A web page that may ask, such as http://localhost:3000.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="A name by which this server may be called.")
@click.option(
    "--max-seconds",
    type=options.Number(1, 86_400),
    default=600,
    show_default=True,
    help="The longest that a request may take, waiting included; its answer ends then with what was written.",
)
@click.option("--no-keep", is_flag=True, help="Keep nothing of the answers in the journal.")
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
    max_seconds: float,
    no_keep: bool,
) -> None:
    """Serve the API of OpenAI, with indexes, to programs of this machine.

    \b
      localrag serve
      curl http://127.0.0.1:8642/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "What is PLA?"}], "index_name": "handbook"}'
    """
    try:
        from localrag.catalog import Catalog  # noqa: PLC0415  # weight
        from localrag.server.app import Shared, make_app  # noqa: PLC0415  # an extra
        from localrag.server.engine_process import EngineProcess, Wanted  # noqa: PLC0415  # an extra
        from localrag.server.gate import LOOPBACK, Guard  # noqa: PLC0415  # an extra
        from localrag.server.listening import listener, make_server  # noqa: PLC0415  # an extra
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
    known = None if not is_local and not hosts else LOOPBACK | {each.lower() for each in hosts}
    wanted = Wanted(settings=settings, model=model, n_ctx=n_ctx, chat_template=chat_template, budget=budget, keep=not no_keep)
    guard = Guard(hosts=known, origins=frozenset(origins), api_key=key)
    engine = EngineProcess(wanted, max_seconds=max_seconds)
    app = make_app(Shared(settings=settings, engine=engine, guard=guard, rejects_tools=catalog.rejects_tools))
    opened = listener(host, port)
    note(f"Serving on http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)")
    make_server(app, host=host, port=port).run([opened])
