"""The parent's side of the process that reads files: start it, ask it, end it. Its other side is reading_worker.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from localrag.errors import KnowledgeBaseError
from localrag.kb.reading_worker import LENGTHS, MAX_HEADER_BYTES, send

_TICK_S = 0.2
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # what Python itself may need to start


class ReadingProcess:
    """A process that answers messages. It ends with `stop()`, with this object, or with the interpreter, whichever is first."""

    def __init__(self, worker: Path, arguments: list[str]) -> None:
        folders = [str(Path(__file__).parents[2]), *filter(os.path.isabs, sys.path)]
        try:
            # Without the site module it starts faster and runs no .pth file; its own session keeps Ctrl-C from it.
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(worker), *arguments, *dict.fromkeys(folders)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise KnowledgeBaseError(f"The process that reads files did not start: {error}.", hint="Check the machine's limits.") from error
        self.clock = _Clock(self.process)
        self.stop = weakref.finalize(self, _end, self.process, self.clock)

    def ask(self, header: dict[str, object], data: bytes, limit_s: float, max_bytes: int) -> tuple[dict[str, object], bytes]:
        """Its answer; EOFError where there will be none, or none in time, and ValueError where it is none."""
        assert self.process.stdin
        self.clock.start(limit_s)
        try:
            with suppress(OSError):  # it has ended, which is found out below
                send(self.process.stdin, header, data)
            return self._receive(max_bytes)
        finally:
            self.clock.stop()

    def receive(self, limit_s: float, max_bytes: int) -> tuple[dict[str, object], bytes]:
        """What it says unasked."""
        self.clock.start(limit_s)
        try:
            return self._receive(max_bytes)
        finally:
            self.clock.stop()

    def exit_code(self) -> int:
        """How it ended; it is killed if it has closed its pipe and goes on."""
        try:
            return self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _receive(self, max_bytes: int) -> tuple[dict[str, object], bytes]:
        assert self.process.stdout
        pipe = self.process.stdout
        num_header, num_data = LENGTHS.unpack(_exactly(pipe, LENGTHS.size))
        if num_header > MAX_HEADER_BYTES or num_data > max_bytes:
            raise ValueError("not an answer")
        header = json.loads(_exactly(pipe, num_header))
        if not isinstance(header, dict):
            raise ValueError("not an answer")  # noqa: TRY004  # all that is wrong with an answer is the same to the caller
        return header, _exactly(pipe, num_data)


class _Clock:
    """Kills a process at a deadline. One thread for all of its files: a Timer for each costs as much as a small file does."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.expired = False
        self.closed = threading.Event()
        self._process = process
        self._deadline: float | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, limit_s: float) -> None:
        with self._lock:
            self._deadline = time.monotonic() + limit_s

    def stop(self) -> None:
        with self._lock:
            self._deadline = None

    def _watch(self) -> None:
        while not self.closed.wait(_TICK_S):
            with self._lock:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self.expired = True
                    self._process.kill()
                    return


def _end(process: subprocess.Popen[bytes], clock: _Clock) -> None:
    clock.closed.set()
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was not sent is lost
            assert pipe
            pipe.close()
    process.wait()


def _exactly(pipe: IO[bytes], num_bytes: int) -> bytes:
    data = pipe.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data
