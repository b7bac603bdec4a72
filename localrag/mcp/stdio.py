"""The protocol over standard input and output: tools are listed at once, run one at a time, and stopped when the client cancels."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
)
from pydantic import ValidationError

import localrag
from localrag.errors import LocalragError
from localrag.files import file_error
from localrag.mcp.tools import INSTRUCTIONS, TOOLS, Desk, Offered, Wanted
from localrag.session import open_knowledge_base
from localrag.session.redact import Redactor
from localrag.settings import expanded
from localrag.text.sanitize import one_line

MAX_CHARS = 1200
_MAX_FAULTS, _MAX_NAME_CHARS = 4, 40


def told(error: Exception, hush: Redactor) -> str:
    """The line; of what is no error of localrag or of the arguments, only its kind."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False, include_input=False)
        text = f"{'; '.join(_fault(each['loc'], each['msg']) for each in faults[:_MAX_FAULTS])}."
    elif isinstance(error, LocalragError):
        text = f"{error.message} {error.hint or ''}"
    elif isinstance(error, OSError):
        known = file_error(error, None, hint="Check the disk and the permissions of the home of localrag.")
        text = f"{known.reason[:1].upper()}{known.reason[1:]}. {known.hint}"
    else:
        text = f"localrag failed ({type(error).__name__}). Its log has more."
    return one_line(hush(text), MAX_CHARS)


def _fault(where: Iterable[int | str], what: str) -> str:
    return f"{'.'.join(str(each)[:_MAX_NAME_CHARS] for each in where)}: {what}"


LOG = logging.getLogger("localrag.mcp")
_STOP_S = 0.05
"""How often what is wanted no more is told to end: it may be about to begin."""
Given = TypeVar("Given")


def serve(wanted: Wanted) -> None:
    """Serve until standard input ends. Errors as of Desk, and KnowledgeBaseError for one of `kbs` that does not exist."""
    hush = Redactor(_folders(wanted))
    desk = Desk(wanted, hush)
    for address in wanted.kbs:  # now, while a person sees it: a client would show no more than a tool that fails
        open_knowledge_base(address, settings=wanted.settings).close()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # standard input is read in a thread that nothing else ends; what is kept is committed
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody else writes to the client, not even in the end
    try:
        anyio.run(_serve, desk, hush, io.TextIOWrapper(out, encoding="utf-8", newline="\n"))
    except* BrokenPipeError:  # the client went away
        pass


async def _serve(desk: Desk, hush: Redactor, out: io.TextIOWrapper) -> None:
    with ThreadPoolExecutor(1, "desk") as thread:
        server = _make_server(desk, _Turn(thread, desk.stop), hush)
        try:
            async with stdio_server(stdout=anyio.wrap_file(out)) as (read_stream, write_stream):
                await server.run(read_stream, write_stream, server.create_initialization_options())
        finally:
            thread.submit(desk.close)


def _make_server(desk: Desk, turn: _Turn, hush: Redactor) -> Server[dict[str, Any]]:
    async def list_tools(_context: object, _params: PaginatedRequestParams | None) -> ListToolsResult:
        kbs = list(desk.kbs)
        return ListToolsResult(tools=[tool.listed(name, kbs) for name, tool in TOOLS.items()])

    async def call_tool(_context: object, params: CallToolRequestParams) -> CallToolResult:
        tool = TOOLS.get(params.name)
        if tool is None:
            raise MCPError(INVALID_PARAMS, f"There is no tool {params.name[:80]!r}. There are {', '.join(TOOLS)}.")
        try:
            return await _used(tool, params.arguments or {}, desk, turn)
        except Exception as error:  # noqa: BLE001  # whatever a tool meets, the server goes on
            if not isinstance(error, LocalragError | ValidationError):
                LOG.warning("%s: %s", type(error).__name__, error)
            return CallToolResult(content=[TextContent(text=told(error, hush))], is_error=True)

    server: Server[dict[str, Any]] = Server(
        "localrag",
        version=version("localrag"),
        title="localrag",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    server.middleware.clear()  # what would trace each message for OpenTelemetry
    return server


async def _used(tool: Offered, given: dict[str, Any], desk: Desk, turn: _Turn) -> CallToolResult:
    arguments = tool.arguments.model_validate(given)
    result = await turn.run(partial(tool.use, desk, arguments))
    content: list[ContentBlock] = [TextContent(text=_sendable(text)) for text in tool.read(result)]
    return CallToolResult(content=content, structured_content=_sendable(result.model_dump(mode="json")))


class _Turn:
    """Does one thing after the other in the thread that all of it belongs to. `stop` ends what is being done, as far as it can be."""

    def __init__(self, thread: ThreadPoolExecutor, stop: Callable[[], None]) -> None:
        self._thread = thread
        self._stop = stop

    async def run(self, work: Callable[[Callable[[], bool]], Given]) -> Given:
        """What `work` gives; cancelled, it is not begun, or ended as soon as it can be."""
        stopped = threading.Event()
        done = self._thread.submit(work, stopped.is_set)
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            stopped.set()
            done.cancel()  # if it was not begun
            with anyio.CancelScope(shield=True):
                while not done.done():
                    self._stop()
                    await anyio.sleep(_STOP_S)
            raise


def _sendable(value: Any) -> Any:  # noqa: ANN401  # JSON
    """The same, fit for UTF-8: a name of a file may hold half a character."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _folders(wanted: Wanted) -> list[Path]:
    """Those that an error could name."""
    files = [*wanted.settings.models_files(), wanted.chat_template, Path(wanted.model) if wanted.model else None]
    beside = [expanded(path).absolute().parent for path in files if path is not None]
    return [wanted.settings.home, Path.home(), Path.cwd(), Path(localrag.__file__).parent, *beside]
