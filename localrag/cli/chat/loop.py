"""The chat loop: read a line, run it on the thread that owns the model, and do background work while the user types."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunningError
from functools import partial
from typing import TypeVar

from localrag.cli.chat import commands
from localrag.cli.chat.editor import Editor, LineEditor, PlainEditor, is_terminal, toolbar
from localrag.cli.chat.render import make_view, searched, transcript, warning_of
from localrag.cli.chat.state import Desk, Room
from localrag.cli.render import remarks
from localrag.cli.terminal import emit, fault, first_interrupt, note
from localrag.errors import InterruptedRunError, LocalragError, counted
from localrag.session import Prepared

T = TypeVar("T")
_NOTED_TURNS = 3

_POLL_S = 0.05
IDLE_AFTER_S = 1.0
"""Seconds without input before background work starts."""
_LEAVING = ("exit", "quit")
"""Lines that end a chat on a terminal. In a pipe, every line without a slash is a question."""


class Worker:
    """A thread that runs jobs in order. `wait` raises a job's error."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="chat")
        self._cancel = cancel

    def start(self, work: Callable[[], T]) -> Future[T]:
        return self._executor.submit(work)

    def wait(self, running: Future[T]) -> T:
        """Return a job's result. Ctrl-C stops its answer and keeps the text."""
        while True:
            try:
                with first_interrupt(self._cancel):
                    return running.result()
            except KeyboardInterrupt:  # a second Ctrl-C before the first has taken effect
                self._cancel()

    def end(self, running: Future[object]) -> None:
        """Cancel a background job and wait until it has ended."""
        while not running.done():
            self._cancel()
            try:
                running.exception(_POLL_S)
            except StillRunningError:
                continue

    def end_with(self, close: Callable[[], None]) -> None:
        """Run `close` as the last job, then stop the thread."""
        self.wait(self._executor.submit(close))
        self._executor.shutdown()


class Idle:
    """Writes summaries for the next question while the user is idle. `stop` ends this at once."""

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
            forgotten = self._room.look_ahead(write=False)
            if (forgotten.summarised or forgotten.coming) and self._is_wanted:
                self._room.status.activity = "summarising"
                self._room.look_ahead(write=True)
        except InterruptedRunError:
            pass
        finally:
            self._room.status.activity = ""

    def stop(self) -> None:
        """End the background work. Its errors are reported by the question that needs its result."""
        self._is_wanted = False
        if self._running is not None:
            self._worker.end(self._running)
            self._running = None


class Loop:
    """Reads and runs lines until the desk is closed or the input ends."""

    def __init__(self, room: Room, editor: Editor, worker: Worker, opening: Future[None], desk: Desk, *, as_json: bool) -> None:
        self._room = room
        self._editor = editor
        self._worker = worker
        self._opening = opening
        self._desk = desk
        self._idle = Idle(room, worker)
        self._as_json = as_json
        self.exit_code = 0
        """The exit code of the first line that failed, or 0."""

    def run(self) -> None:
        """Run the loop. Errors of single lines are printed; an error while loading the model is raised."""
        while True:
            try:
                prefilled, self._desk.prefilled = self._desk.prefilled, ""
                text = self._editor.read(prefilled=prefilled)
            except EOFError:
                break
            except KeyboardInterrupt:
                note("To leave, press Ctrl-D or type exit.")
                continue
            self._opening.result()
            self._idle.stop()
            if sys.stdin.isatty() and text.strip().lower() in _LEAVING:
                break
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


def talk(room: Room, *, as_json: bool) -> int:
    """Run a chat to its end and return the exit code. The model is loaded while the user types."""
    draws = is_terminal() and not as_json
    if sys.stdin.isatty() and not as_json:
        note("Type a question and press Enter. /help lists the commands, and exit leaves.")
    worker = Worker(room.cancel)
    opening = worker.start(lambda: _open(room, tells=draws or sys.stdin.isatty()))
    desk = Desk(room, partial(_ask, room, draws=draws, as_json=as_json), commands.COMMANDS)
    editor: Editor = PlainEditor()
    if draws:
        editor = LineEditor(
            room.history_file,
            words=partial(commands.words, room),
            toolbar=partial(_toolbar, room),
            opening=opening,
        )
    loop = Loop(room, editor, worker, opening, desk, as_json=as_json)
    try:
        loop.run()
    finally:
        worker.end_with(room.close)
    return 0 if sys.stdin.isatty() else loop.exit_code


def _open(room: Room, *, tells: bool) -> None:
    room.open()
    for warning in room.session.warnings:
        note(f"Warning: {warning}")
    if tells and room.chat.turns:
        transcript(room.chat.turns, last=_NOTED_TURNS)


def _ask(room: Room, question: str, *, draws: bool, as_json: bool) -> None:
    """Ask a question and show the answer as it is generated."""
    if as_json:
        emit(room.say(question).to_dict())
        _warn(room)
        return
    room.status.activity = "reading"
    view = make_view(draws=draws)

    def on_text(piece: str) -> None:
        room.status.activity = "writing"
        view(piece)

    def on_thought(piece: str) -> None:
        room.status.activity = "thinking"
        view.think(piece)

    def on_prepared(ready: Prepared) -> None:
        if ready.rewriting is not None and ready.rewriting.text:
            view.remark(searched(ready.rewriting))
        view.wait(f"reading {len(ready.prompt.token_ids):,} tokens")

    try:
        view.wait("searching" if room.session.knowledge_bases else "reading")
        answer = room.say(question, on_text=on_text, on_thought=on_thought, on_prepared=on_prepared)
    finally:
        view.close()
        room.status.activity = ""
    kbs = [kb.address for kb in room.session.knowledge_bases]
    remarks(answer, kbs, tells_history=False, known_warnings=room.session.warnings)
    _warn(room)
    before = room.status.forgotten
    if newly_forgotten := room.look_ahead(write=False).beyond(before):
        note(warning_of(newly_forgotten))


def _warn(room: Room) -> None:
    """Print each warning about saving the conversation once."""
    for warning in room.chat.warnings:
        note(f"Warning: {warning}")
    room.chat.warnings.clear()


def _toolbar(room: Room) -> str:
    status = room.status
    if not status.model:
        return "loading the model; you can already type your question"
    share = status.used / max(1, status.n_ctx)
    bar = "█" * round(10 * min(1.0, share)) + "░" * (10 - round(10 * min(1.0, share)))
    parts = [status.activity] if status.activity else []
    parts += [status.model, f"{bar} {status.used:,} of {status.n_ctx:,} ({status.bound})"]
    if status.forgotten:
        parts.append(f"{counted(len(status.forgotten.summarised) + len(status.forgotten.left_out), 'turn')} not in full")
    if status.used:
        parts += [f"{status.cached:,} cached, {status.evaluated:,} evaluated", f"{status.tokens_per_s:.0f} tokens/s"]
    if status.kbs:
        parts.append(", ".join(status.kbs))
    return toolbar([*parts, status.name], shutil.get_terminal_size().columns)
