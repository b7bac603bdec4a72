"""An MCP server in a process of its own, asked by the client of the official SDK."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, StdioServerParameters, stdio_client
from mcp_types import CallToolResult, Tool

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "localrag", "mcp")


def environment(home: Path) -> dict[str, str]:
    """Of a server in that home; a client of the SDK hands on little of its own."""
    return {"LOCALRAG_HOME": str(home), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


class Connection:
    """A client that waits for each answer."""

    def __init__(self, portal: BlockingPortal, client: Client, log: Path) -> None:
        self._portal = portal
        self.client = client
        self.log = log

    def tools(self) -> dict[str, Tool]:
        return {tool.name: tool for tool in self._portal.call(self.client.list_tools).tools}

    def use(self, name: str, **arguments: object) -> CallToolResult:
        return self._portal.call(self.client.call_tool, name, arguments)

    def given(self, name: str, **arguments: object) -> dict:
        """What a tool gives; the SDK has checked it against the tool's schema."""
        result = self.use(name, **arguments)
        assert not result.is_error, text_of(result)
        return result.structured_content

    def refused(self, name: str, **arguments: object) -> str:
        """The one line of an error."""
        result = self.use(name, **arguments)
        assert result.is_error, result.structured_content
        assert result.structured_content is None
        line = text_of(result)
        assert len(result.content) == 1
        assert line
        assert line.isprintable()
        assert "Traceback" not in line
        return line

    def abandoned(self, name: str, after_s: float, **arguments: object) -> None:
        """A call that the client cancels."""

        async def call() -> None:
            with anyio.move_on_after(after_s) as scope:
                await self.client.call_tool(name, arguments)
            assert scope.cancelled_caught, "it was answered before"

        self._portal.call(call)

    def both_abandoned(self, first: tuple[str, dict], second: tuple[str, dict], after_s: float) -> None:
        """Two calls, the second sent while the first is at work, that the client cancels in the other order."""

        async def call() -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(self.client.call_tool, *first)
                await anyio.sleep(after_s)
                with anyio.move_on_after(after_s / 3):
                    await self.client.call_tool(*second)
                group.cancel_scope.cancel()

        self._portal.call(call)


def text_of(result: CallToolResult) -> str:
    return "\n".join(part.text for part in result.content)


@contextmanager
def connected(home: Path, *args: str, log: Path, mode: str = "auto") -> Iterator[Connection]:
    parameters = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *args], env=environment(home))
    with log.open("w+", encoding="utf-8") as errors, start_blocking_portal() as portal:
        client = Client(stdio_client(parameters, errlog=errors), mode=mode)
        with portal.wrap_async_context_manager(client):
            yield Connection(portal, client, log)
