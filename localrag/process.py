"""Run a supervised child process: start it, send it requests, enforce its time limits and end it. A child limits itself with this module.

    child = Child("localrag.kb.reading_worker", {"max_chars": 1000})
    reply, text = child.ask({"name": "a.pdf"}, data, limit_s=120, max_bytes=4000)

The child runs as `python -I -S -c START MODULE JOB PATH...`: it imports MODULE from the PATHs and calls its `main(job, parent)`. A message
is a line of JSON, followed by "num_bytes" bytes of data if it has that key. The child first sends `{"ready": true}` or `{"error": reason}`.

The parent kills a child that takes too long. A child sets its own limits before it touches untrusted data; they hold even if the parent
has died. On Windows they do not exist, and the parent's clock is the only limit.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
if sys.platform != "win32":
    import resource

START = "import sys; sys.path += sys.argv[3:]; from localrag.process import main; main()"
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that Python may need to start. A child gets no others, since they may contain secrets."""
START_LIMIT_S = 60.0
"""Time to start Python and import the child's modules on a busy machine."""
MAX_LINE_BYTES = 64 << 20
_EXIT_WAIT_S = 1.0
_STATM, _STAT = Path("/proc/self/statm"), Path("/proc/self/stat")
_STARTED_AT = 19
"""Index of the start time (clock ticks since boot) among the fields after the name in a process's stat file."""


class ChildStartError(Exception):
    """The child did not start. `reason` is a clause; `hint` says how to fix it."""

    def __init__(self, reason: str, *, hint: str = "Install localrag again.") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class ChildExitError(Exception):
    """The child ended without a reply: its time ran out (`expired`), or it exited with `code`, which is negative for a signal."""

    def __init__(self, code: int, *, expired: bool) -> None:
        super().__init__(f"exit code {code}")
        self.code = code
        self.expired = expired


def signal_name(code: int) -> str:
    """Name the signal in an exit code, such as SIGKILL for -9; empty if the process was not killed."""
    if code >= 0:
        return ""
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"SIG{-code}"


class Child:
    """A child process. It ends with `stop()`, with this object, or with the interpreter, whichever comes first.

    It gets the parent's environment variables named in `kept`, and `variables`. Output other than messages is discarded, or included in
    `lines` if `with_output` is set. Not thread-safe. ChildStartError if the process cannot be created.
    """

    def __init__(
        self,
        module: str,
        job: Mapping[str, object],
        *,
        folders: Sequence[Path] = (),
        kept: Sequence[str] = KEPT_VARIABLES,
        variables: Mapping[str, str] | None = None,
        with_output: bool = False,
    ) -> None:
        import subprocess  # noqa: PLC0415  # takes 6 ms, and children do not need it

        paths = dict.fromkeys([str(Path(__file__).parents[1]), *map(str, folders), *filter(os.path.isabs, sys.path)])
        try:
            # Without the site module it starts faster and runs no .pth files. In its own session it does not receive Ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", START, module, json.dumps(job), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if with_output else subprocess.DEVNULL,
                env={name: os.environ[name] for name in kept if name in os.environ} | dict(variables or {}),
                start_new_session=True,
            )
        except OSError as error:
            raise ChildStartError(str(error), hint="Check the machine's limits.") from error
        self._clock = _Clock(self._process)
        self.stop = weakref.finalize(self, _end, self._process, self._clock)
        self._clock.start()
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def expired(self) -> bool:
        """Whether it was killed because its time ran out."""
        return self._clock.expired

    @property
    def is_running(self) -> bool:
        return self.stop.alive and self._process.poll() is None

    def tell(self, message: Mapping[str, object], data: bytes = b"") -> None:
        """Send a message without waiting for a reply. If the child has ended, the next `ask` raises the error."""
        assert self._process.stdin
        with suppress(OSError):
            send(self._process.stdin, message, data)

    def ask(
        self, message: Mapping[str, object], data: bytes = b"", *, limit_s: float, max_bytes: int = 0
    ) -> tuple[dict[str, object], bytes]:
        """Send a message and return the reply, with at most `max_bytes` of data. Startup time does not count toward `limit_s`.

        ChildStartError if the child never became ready, ChildExitError if it ended or took longer than `limit_s`, ValueError if it sent
        anything but a message. All of these, and interruptions, end the child, since a late reply could be mistaken for the next one.
        """
        if not self.stop.alive:
            raise ChildExitError(self.exit_code(), expired=self.expired)
        is_answered = False
        try:
            self._wait_until_ready()
            with self.within(limit_s):
                self.tell(message, data)
                reply = self._receive(max_bytes)
            is_answered = True
            return reply
        finally:
            if self.expired or not is_answered:
                self.stop()

    def lines(self, max_bytes: int) -> Iterator[bytes]:
        """Yield the lines of all output until the child closes it. Longer lines come in pieces of `max_bytes`."""
        assert self._process.stdout
        while line := self._process.stdout.readline(max_bytes):
            yield line

    @contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """Kill the child if the block takes longer than `limit_s`."""
        self._clock.set(limit_s)
        try:
            yield
        finally:
            self._clock.set(math.inf)

    def exit_code(self, wait_s: float | None = None) -> int:
        """Wait for the child to end, and return its exit code. Kill it after `wait_s` seconds; None waits without limit."""
        import subprocess  # noqa: PLC0415  # as above

        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        try:
            with self.within(START_LIMIT_S):
                reply, _ = self._receive(0)
        except ChildExitError as error:
            reason = f"it did not respond within {START_LIMIT_S:g} s" if error.expired else "it ended"
            raise ChildStartError(reason) from None
        except ValueError:
            raise ChildStartError("it sent an invalid message") from None
        if reply.get("ready") is not True:
            raise ChildStartError(str(reply.get("error")))
        self._is_ready = True

    def _receive(self, max_bytes: int) -> tuple[dict[str, object], bytes]:
        assert self._process.stdout
        received = receive(self._process.stdout, max_bytes)
        if received is None:
            expired = self.expired
            raise ChildExitError(self.exit_code(_EXIT_WAIT_S), expired=expired)
        return received


class _Clock:
    """Kills a process at a deadline. One thread serves all requests, since a Timer for each costs as much as reading a small file."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.expired = False
        self._process = process
        self._deadline = self._wakes_at = math.inf
        self._is_closed = False
        self._changed = threading.Condition()

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def set(self, limit_s: float) -> None:
        with self._changed:
            self._deadline = time.monotonic() + limit_s
            if self._deadline < self._wakes_at:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                remaining_s = self._deadline - time.monotonic()
                if remaining_s <= 0:
                    self.expired = True
                    self._process.kill()
                    return
                self._wakes_at = self._deadline
                self._changed.wait(None if remaining_s == math.inf else remaining_s)


def _end(process: subprocess.Popen[bytes], clock: _Clock) -> None:
    clock.close()
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # unsent data is lost
            assert pipe
            pipe.close()
    process.wait()


def send(pipe: IO[bytes], message: Mapping[str, object], data: bytes = b"") -> None:
    """Write a message. ValueError, before anything is written, if its JSON is longer than MAX_LINE_BYTES; OSError propagates."""
    line = json.dumps({**message, "num_bytes": len(data)} if data else message, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ValueError("the message is too long")
    pipe.write(line)
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes], max_bytes: int) -> tuple[dict[str, object], bytes] | None:
    """Read a message with at most `max_bytes` of data; None at the end of the pipe. ValueError for anything but a message."""
    line = pipe.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        if len(line) == MAX_LINE_BYTES:
            raise ValueError("the line is too long")
        return None
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    num_bytes = message.pop("num_bytes", 0) if isinstance(message, dict) else None
    if not isinstance(num_bytes, int) or not 0 <= num_bytes <= max_bytes:
        raise ValueError("not a message")
    data = pipe.read(num_bytes)
    return (message, data) if len(data) == num_bytes else None


class Parent:
    """The connection to the process that started this one. Reserves standard input and output: libraries print to standard error."""

    def __init__(self) -> None:
        self.requests: IO[bytes] = os.fdopen(os.dup(0), "rb")
        self.replies: IO[bytes] = os.fdopen(os.dup(1), "wb")
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        os.dup2(2, 1)

    def receive(self) -> tuple[dict[str, object], bytes] | None:
        """Wait for the next message; None when the parent has exited."""
        return receive(self.requests, sys.maxsize)

    def send(self, message: Mapping[str, object], data: bytes = b"") -> None:
        send(self.replies, message, data)


def main() -> None:
    """Entry point of a child: import the module named on the command line and call its `main`."""
    parent = Parent()
    try:
        run = import_module(sys.argv[1]).main
    except Exception as error:  # noqa: BLE001  # the parent reports it
        parent.send({"error": f"{type(error).__name__}: {error}"})
        return
    run(json.loads(sys.argv[2]), parent)


def confine(more_bytes: int) -> None:
    """Confine this process to computing: let it grow by `more_bytes`, but not write files or start processes."""
    limit_memory(more_bytes)
    limit_files(0)
    forbid_processes()


def limit_memory(more_bytes: int) -> None:
    """Let this process grow by `more_bytes`, on systems that report its size cheaply, and leave no core file."""
    if sys.platform == "win32":
        return
    _set(resource.RLIMIT_CORE, 0)
    if size := size_bytes():
        _set(resource.RLIMIT_AS, size + more_bytes)


def limit_files(max_bytes: int) -> None:
    """Let this process write files of at most `max_bytes`. Python ignores the signal for a larger one: the write fails."""
    if sys.platform != "win32":
        _set(resource.RLIMIT_FSIZE, max_bytes)


def forbid_processes() -> None:
    """Forbid this process to start processes and threads. Has no effect for the superuser."""
    if sys.platform != "win32":
        _set(resource.RLIMIT_NPROC, 0)


def limit_computing(more_s: float) -> None:
    """End this process with SIGXCPU after `more_s` more seconds of CPU time. A later call can raise or lower the limit."""
    if sys.platform == "win32":
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    seconds = math.ceil(usage.ru_utime + usage.ru_stime + more_s)
    with suppress(ValueError, OSError):  # keep the hard limit, since a lowered one cannot be raised again
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else min(seconds, hard), hard))


def limit_self(*, spare_bytes: int, cpu_s: float, max_file_bytes: int = 0) -> None:
    """Let this process grow by `spare_bytes`, use `cpu_s` more seconds of CPU time, and write files of at most `max_file_bytes`."""
    limit_memory(spare_bytes)
    limit_files(max_file_bytes)
    limit_computing(cpu_s)


def age_s() -> float:
    """Return the seconds since this process started, accurate to one clock tick (10 ms) on Linux.

    psutil is not used there: it adds the start time to a boot time in whole seconds, which is off by up to 1 s.
    """
    if sys.platform == "linux":
        with suppress(OSError, ValueError, IndexError):
            started_at = int(_STAT.read_bytes().rpartition(b")")[2].split()[_STARTED_AT]) / os.sysconf("SC_CLK_TCK")
            return time.clock_gettime(time.CLOCK_BOOTTIME) - started_at
    import psutil  # noqa: PLC0415  # heavy

    return time.time() - float(psutil.Process().create_time())


def size_bytes() -> int:
    """Return the size of this process's address space in bytes; 0 on systems that do not report it cheaply."""
    try:
        return int(_STATM.read_bytes().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _set(name: int, limit: int) -> None:
    with suppress(ValueError, OSError):  # a lower limit is already set
        resource.setrlimit(name, (limit, limit))
