"""The loop of a chat: a line is read, then done, by the one thread that owns the model; what can wait is done while a person types."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunningError
from typing import TypeVar

from localrag.cli.chat_desk import Desk
from localrag.cli.chat_editor import Editor
from localrag.cli.chat_room import Room
from localrag.cli.interrupt import first_interrupt
from localrag.cli.text import fault, note
from localrag.errors import InterruptedRunError, LocalragError

T = TypeVar("T")

_POLL_S = 0.05
IDLE_AFTER_S = 1.0
"""How long a person must be idle before the machine is used for what can wait."""


class Worker:
    """One thread that does what it is told, in order. Errors come back to who waits."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="chat")
        self._cancel = cancel

    def start(self, work: Callable[[], T]) -> Future[T]:
        return self._executor.submit(work)

    def wait(self, running: Future[T]) -> T:
        """The result. Ctrl-C ends what is written, so that it is kept."""
        while True:
            try:
                with first_interrupt(self._cancel):
                    return running.result()
            except KeyboardInterrupt:  # a second one, while the first has its effect
                self._cancel()

    def end(self, running: Future[object]) -> None:
        """Have something that can wait end now, whatever it came to."""
        while not running.done():
            self._cancel()
            try:
                running.exception(_POLL_S)
            except StillRunningError:
                continue

    def end_with(self, close: Callable[[], None]) -> None:
        """Have `close` be the last thing that is done."""
        self.wait(self._executor.submit(close))
        self._executor.shutdown()


class Idle:
    """Summaries that the next question may need, written while a person types or thinks. `stop` ends it at once."""

    def __init__(self, room: Room, worker: Worker) -> None:
        self._room = room
        self._worker = worker
        self._running: Future[object] | None = None
        self._is_wanted = False

    def start(self) -> None:
        self._is_wanted = True
        self._running = self._worker.start(self._work)

    def _work(self) -> None:
        began = time.monotonic()
        while time.monotonic() - began < IDLE_AFTER_S:
            if not self._is_wanted:
                return
            time.sleep(_POLL_S)
        try:
            found = self._room.look_ahead(write=False)
            if (found.summarised or found.coming) and self._is_wanted:
                self._room.status.activity = "summarising"
                self._room.look_ahead(write=True)
        except InterruptedRunError:
            pass
        finally:
            self._room.status.activity = ""

    def stop(self) -> None:
        """Errors are told when the question that needs it is asked."""
        self._is_wanted = False
        if self._running is not None:
            self._worker.end(self._running)
            self._running = None


class Loop:
    """Reads, has the desk do it, and goes on until that is closed or the input ends."""

    def __init__(self, room: Room, editor: Editor, worker: Worker, opening: Future[None], desk: Desk, *, as_json: bool) -> None:
        self._room = room
        self._editor = editor
        self._worker = worker
        self._opening = opening
        self._desk = desk
        self._idle = Idle(room, worker)
        self._as_json = as_json
        self.exit_code = 0
        """That of the first line that failed; 0 if none did."""

    def run(self) -> None:
        """Errors of single questions are told, and the chat goes on. What keeps the model from being opened ends it."""
        while True:
            try:
                prefilled, self._desk.prefilled = self._desk.prefilled, ""
                text = self._editor.read(prefilled=prefilled)
            except EOFError:
                break
            except KeyboardInterrupt:
                note("Ctrl-D or /exit leaves.")
                continue
            self._opening.result()
            self._idle.stop()
            if text.strip() and not self._does(text):
                break
            self._idle.start()
        self._opening.result()
        self._idle.stop()

    def _does(self, text: str) -> bool:
        try:
            return self._worker.wait(self._worker.start(lambda: self._desk.handle(text)))
        except InterruptedRunError:
            note("Interrupted.")
        except LocalragError as error:
            self.exit_code = self.exit_code or error.exit_code
            fault(error, as_json=self._as_json)
        return True
