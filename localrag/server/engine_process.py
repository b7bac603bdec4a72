"""Supervise the engine's process: start it, send it requests in fair order, pass on its replies, and restart it when it dies."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from localrag.engine.jobs import SERVE
from localrag.server.engine_worker import MAX_LINE_BYTES, line_of
from localrag.server.errors import LOG, Problem
from localrag.settings import Settings

MAX_WAITING = 32
MAX_WAITING_OF_ONE = 8
"""Rate limit: maximum number of waiting requests in total and per client. Further requests get status 429."""
RETRY_AFTER_S = 5
MAX_SECONDS = 600.0
"""Maximum duration of a request in seconds, waiting included."""
STOP_S = 10.0
"""Seconds that running answers have to finish when the server stops."""
PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""Seconds between start attempts: the first step and the maximum."""
_ENDED = "The engine process ended during this request. It is being restarted."


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The arguments of Session.open for the engine's process."""

    settings: Settings
    model: str | None = None
    n_ctx: int | None = None
    chat_template: Path | None = None
    budget: str | None = None
    keep: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {
            "home": str(self.settings.home),
            "models_file": str(self.settings.models_file) if self.settings.models_file else None,
            "prefix_bytes": self.settings.prefix_bytes,
            "learn": self.settings.learn,
            "model": self.model,
            "n_ctx": self.n_ctx,
            "chat_template": str(self.chat_template) if self.chat_template else None,
            "budget": self.budget,
            "keep": self.keep,
        }


@dataclass(slots=True, eq=False)
class _Task:
    """A request and its replies so far."""

    id: int
    client: str
    message: dict[str, Any]
    ends_at: float
    """On the clock of time.monotonic()."""
    replies: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)


class EngineProcess:
    """Runs requests in the engine's process. Belongs to one event loop.

    At most SERVE.num_sequences requests run at once. The others wait here, and clients take turns. If the process dies, its running
    requests fail with a Problem, waiting requests are kept, and a new process is started.
    """

    def __init__(self, options: EngineOptions, *, max_seconds: float = MAX_SECONDS) -> None:
        self.about: dict[str, Any] = {}
        """Facts about the model, once it is loaded."""
        self.failure: dict[str, Any] | None = None
        """The error if the model cannot be loaded."""
        self.num_starts = 0
        self._options = options
        self._max_seconds = max_seconds
        self._ids = count(1)
        self._running: dict[int, _Task] = {}
        self._waiting: OrderedDict[str, deque[_Task]] = OrderedDict()
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._has_changed = asyncio.Event()
        self._is_up = False
        """Whether the process accepts requests now."""
        self._ends = False

    # --- lifecycle ---

    def start(self) -> None:
        """Start the process, without waiting until the model is loaded."""
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    async def opened(self) -> None:
        """Wait until the model is loaded or has failed to load. Problem 503 if that takes longer than the limit for a request."""
        try:
            async with asyncio.timeout(self._max_seconds):
                await self._ready.wait()
        except TimeoutError:
            raise _no_time() from None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def close(self) -> None:
        """Give running requests STOP_S seconds to finish, then end the process."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self._running or self._waiting:
                    self._has_changed.clear()
                    await self._has_changed.wait()
        self._ends = True
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            if process.returncode is None:
                process.kill()
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor

    async def _supervise(self) -> None:
        """Start the process, and restart it when it dies: at once if it was up, otherwise after increasing pauses."""
        num_failed = 0
        while not self._ends and self.failure is None:
            try:
                self._process = process = await _started()
            except OSError as error:  # temporarily out of memory or file descriptors
                LOG.error("The engine process cannot be started (%s). Trying again.", error.strerror)
                num_failed += 1
                await asyncio.sleep(_pause_s(num_failed))
                continue
            self.num_starts += 1
            self._send(self._options.to_dict())
            try:
                await self._hear(process)
            finally:
                if process.returncode is None:
                    process.kill()
                code = await process.wait()
            num_failed = 0 if self._is_up else num_failed + 1
            self._is_up = False
            self._drop_running()
            if not self._ends and self.failure is None:
                LOG.error("The engine process ended (%s). Restarting it.", code)
                await asyncio.sleep(_pause_s(num_failed))

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            message = json.loads(line)
            if "ready" in message:
                if not self.about:
                    for warning in message["warnings"]:
                        LOG.warning("%s", warning)
                self.about, self._is_up = message["ready"], True
                self._ready.set()
                self._feed()
            elif "failed" in message:
                self.failure = message["failed"]
                LOG.error("The model cannot be loaded: %s", self.failure.get("message"))
                self._ready.set()
            else:
                self._hand_on(message)

    def _hand_on(self, message: dict[str, Any]) -> None:
        task = self._running.get(message["id"])
        if task is None:
            return
        task.replies.put_nowait(message)
        if "done" in message or "problem" in message:
            del self._running[task.id]
            self._feed()
            self._has_changed.set()

    def _drop_running(self) -> None:
        """Fail all running requests after the process died. None is retried, because any of them may have killed it."""
        running, self._running = self._running, {}
        for task in running.values():
            task.replies.put_nowait({"id": task.id, "problem": [503, _ENDED]})
        if self.failure is not None:
            waiting, self._waiting = self._waiting, OrderedDict()
            for task in (each for tasks in waiting.values() for each in tasks):
                task.replies.put_nowait({"id": task.id, "problem": [503, "There is no model."]})

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(line_of(message))

    # --- requests ---

    async def run(self, client: str, message: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Send a message to the engine, after waiting for a place, and yield the replies. The last one has "done".

        An answer that reaches its time limit ends with `finish_reason` "time". Problem if the engine refuses the request; 429 if too many
        requests wait; 503 if there is no model, or no place in time. Closing the generator cancels the request.
        """
        task = self._queued(client, message)
        try:
            while True:
                reply = await self._reply(task)
                if "problem" in reply:
                    raise Problem(*reply["problem"])
                yield reply
                if "done" in reply:
                    return
        finally:
            self._leave(task)

    async def _reply(self, task: _Task) -> dict[str, Any]:
        """Return the next reply. The time limit is checked here while the request waits, and by the engine while it runs."""
        while task.id not in self._running and task.replies.empty():
            remaining_s = task.ends_at - time.monotonic()
            if remaining_s <= 0:
                raise _no_time()
            with suppress(TimeoutError):
                return await asyncio.wait_for(task.replies.get(), remaining_s)
        return await task.replies.get()

    def _queued(self, client: str, message: Mapping[str, Any]) -> _Task:
        if self.failure is not None:
            raise Problem(503, "There is no model.")
        mine = self._waiting.get(client, ())
        if self.num_waiting >= MAX_WAITING or len(mine) >= MAX_WAITING_OF_ONE:
            raise Problem(429, "Too many requests are waiting.", headers={"Retry-After": str(RETRY_AFTER_S)})
        number = next(self._ids)
        task = _Task(number, client, {**message, "id": number}, time.monotonic() + self._max_seconds)
        self._waiting.setdefault(client, deque()).append(task)
        self._feed()
        return task

    def _feed(self) -> None:
        """Send waiting requests to the engine, taking turns between clients, while there are free places."""
        while self._is_up and self._waiting and len(self._running) < SERVE.num_sequences:
            client, tasks = self._waiting.popitem(last=False)
            task = tasks.popleft()
            if tasks:
                self._waiting[client] = tasks
            self._running[task.id] = task
            self._send({**task.message, "max_seconds": max(0.1, task.ends_at - time.monotonic())})

    def _leave(self, task: _Task) -> None:
        """Cancel a request whose replies are no longer read."""
        self._has_changed.set()
        if task.id in self._running:
            del self._running[task.id]
            self._send({"op": "cancel", "id": task.id})
            self._feed()
            return
        mine = self._waiting.get(task.client)
        if mine is not None and task in mine:
            mine.remove(task)
            if not mine:
                del self._waiting[task.client]


async def _started() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "localrag.server.engine_worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        start_new_session=True,  # Ctrl-C goes only to the server, which lets running answers finish
    )


def _pause_s(num_failed: int) -> float:
    return min(MAX_PAUSE_S, num_failed * PAUSE_S)


def _no_time() -> Problem:
    return Problem(503, "The request timed out while waiting for the model.", headers={"Retry-After": str(RETRY_AFTER_S)})
