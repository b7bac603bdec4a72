"""Serve MCP over standard input and output. Tools are listed immediately, run one at a time, and stopped if the client cancels."""

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
from localrag.mcp.tools import INSTRUCTIONS, TOOLS, ServerOptions, ToolDefinition, ToolService
from localrag.session import open_knowledge_base
from localrag.settings import expanded
from localrag.text.sanitize import Redactor, one_line

MAX_CHARS = 1200
_MAX_FAULTS, _MAX_NAME_CHARS = 4, 40


def error_line(error: Exception, redact: Redactor) -> str:
    """Describe an error to the client on one line. For an unexpected error, only its class is named."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False, include_input=False)
        text = f"{'; '.join(_fault(fault['loc'], fault['msg']) for fault in faults[:_MAX_FAULTS])}."
    elif isinstance(error, LocalragError):
        text = f"{error.message} {error.hint or ''}"
    elif isinstance(error, OSError):
        disk_error = file_error(error, None, hint="Check the disk and the permissions of the home of localrag.")
        text = f"{disk_error.reason[:1].upper()}{disk_error.reason[1:]}. {disk_error.hint}"
    else:
        text = f"localrag failed ({type(error).__name__}). See its log for details."
    return one_line(redact(text), MAX_CHARS)


def _fault(location: Iterable[int | str], message: str) -> str:
    return f"{'.'.join(str(part)[:_MAX_NAME_CHARS] for part in location)}: {message}"


LOG = logging.getLogger("localrag.mcp")
_STOP_S = 0.05
"""Seconds between requests to stop a cancelled call, which may be just about to begin generation."""
Result = TypeVar("Result")


def serve(options: ServerOptions) -> None:
    """Serve until standard input ends. Raises errors as ToolService does, and KnowledgeBaseError if one of `kbs` does not exist."""
    redact = Redactor(_private_folders(options))
    service = ToolService(options, redact)
    for address in options.kbs:  # fail now, while a person can see the error; later, a client would only show a failed tool
        open_knowledge_base(address, settings=options.settings).close()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # only this ends the thread that reads standard input; all data are committed
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep stray output of libraries away from the client, also at exit
    try:
        anyio.run(_serve, service, redact, io.TextIOWrapper(out, encoding="utf-8", newline="\n"))
    except* BrokenPipeError:  # the client disconnected
        pass


async def _serve(service: ToolService, redact: Redactor, out: io.TextIOWrapper) -> None:
    with ThreadPoolExecutor(1, "tools") as thread:
        server = _make_server(service, _Worker(thread, service.stop), redact)
        try:
            async with stdio_server(stdout=anyio.wrap_file(out)) as (read_stream, write_stream):
                await server.run(read_stream, write_stream, server.create_initialization_options())
        finally:
            thread.submit(service.close)


def _make_server(service: ToolService, worker: _Worker, redact: Redactor) -> Server[dict[str, Any]]:
    async def list_tools(_context: object, _params: PaginatedRequestParams | None) -> ListToolsResult:
        kbs = list(service.kbs)
        return ListToolsResult(tools=[tool.to_mcp(name, kbs) for name, tool in TOOLS.items()])

    async def call_tool(_context: object, params: CallToolRequestParams) -> CallToolResult:
        tool = TOOLS.get(params.name)
        if tool is None:
            raise MCPError(INVALID_PARAMS, f"There is no tool {params.name[:80]!r}. The tools are {', '.join(TOOLS)}.")
        try:
            return await _call(tool, params.arguments or {}, service, worker)
        except Exception as error:  # noqa: BLE001  # no error of a tool may end the server
            if not isinstance(error, LocalragError | ValidationError):
                LOG.warning("%s: %s", type(error).__name__, error)
            return CallToolResult(content=[TextContent(text=error_line(error, redact))], is_error=True)

    server: Server[dict[str, Any]] = Server(
        "localrag",
        version=version("localrag"),
        title="localrag",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    server.middleware.clear()  # OpenTelemetry tracing of each message
    return server


async def _call(tool: ToolDefinition, values: dict[str, Any], service: ToolService, worker: _Worker) -> CallToolResult:
    arguments = tool.arguments.model_validate(values)
    result = await worker.run(partial(tool.run, service, arguments))
    content: list[ContentBlock] = [TextContent(text=_sendable(text)) for text in tool.to_text(result)]
    return CallToolResult(content=content, structured_content=_sendable(result.model_dump(mode="json")))


class _Worker:
    """Runs calls one at a time in the thread that owns the model. `stop` ends the current call as soon as possible."""

    def __init__(self, thread: ThreadPoolExecutor, stop: Callable[[], None]) -> None:
        self._thread = thread
        self._stop = stop

    async def run(self, work: Callable[[Callable[[], bool]], Result]) -> Result:
        """Run `work` and return its result. If cancelled, it is not started, or stopped as soon as possible."""
        cancelled = threading.Event()
        future = self._thread.submit(work, cancelled.is_set)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancelled.set()
            future.cancel()  # succeeds only if it has not started
            with anyio.CancelScope(shield=True):
                while not future.done():
                    self._stop()
                    await anyio.sleep(_STOP_S)
            raise


def _sendable(value: Any) -> Any:  # noqa: ANN401  # JSON
    """Replace lone surrogates, which the name of a file may contain, so that a JSON value can be sent as UTF-8."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _private_folders(options: ServerOptions) -> list[Path]:
    """Return the folders that an error message might reveal."""
    files = [*options.settings.models_files(), options.chat_template, Path(options.model) if options.model else None]
    parents = [expanded(path).absolute().parent for path in files if path is not None]
    return [options.settings.home, Path.home(), Path.cwd(), Path(localrag.__file__).parent, *parents]
