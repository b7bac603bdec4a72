"""The parent's side of the process that renders a chat template: start it, ask it, end it. Its other side is template_worker.py."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from localrag.errors import TemplateError

MAX_REPLY_BYTES = 16 << 20  # 1 Mi characters, each as up to 12 bytes of JSON
START_LIMIT_S = 30.0  # for Python and jinja2 to start on a machine that is busy; not the template's fault
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # what Python itself may need to start
WORKER = Path(__file__).with_name("template_worker.py")


class RenderProcess:
    """A child process that renders templates. It ends with `stop()`, with this object, or with the interpreter, whichever is first."""

    def __init__(self, memory_limit_bytes: int) -> None:
        try:
            # Without the site module it starts faster and runs no .pth file; its own session keeps Ctrl-C from it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WORKER), str(memory_limit_bytes), *_import_paths("jinja2", "markupsafe", "localrag")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise _start_error(str(error)) from error
        self._ready = False
        self.stop = weakref.finalize(self, _end, self._process)

    @property
    def is_running(self) -> bool:
        return self.stop.alive and self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Waits until Python and jinja2 have started: on a busy machine that takes long, and is no fault of a template."""
        if not self._ready:
            try:
                self.ask(b"", START_LIMIT_S)
            except TimeoutError:
                raise _start_error(f"no sign of life within {START_LIMIT_S:g} s") from None
            except EOFError:
                raise _start_error("it ended") from None
            self._ready = True

    def tell(self, line: bytes) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError):  # it has ended, which the next question finds out
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def ask(self, line: bytes, limit_s: float) -> bytes:
        """Its answer to a line. TimeoutError when there is none in time, EOFError when there will be none; either way it is ended."""
        assert self._process.stdout
        expired = threading.Event()
        timer = threading.Timer(limit_s, _kill, (self._process, expired))
        timer.daemon = True
        timer.start()
        answer = b""
        try:
            self.tell(line)
            answer = self._process.stdout.readline(MAX_REPLY_BYTES)
        finally:
            timer.cancel()
            timer.join()
            whole = answer.endswith(b"\n")
            if expired.is_set() or not whole:  # also when interrupted: this answer would be taken for the next one
                self.stop()
        if whole:
            return answer
        raise TimeoutError if expired.is_set() else EOFError


def _kill(process: subprocess.Popen[bytes], expired: threading.Event) -> None:
    expired.set()
    process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not sent is lost
            assert pipe
            pipe.close()
    process.wait()


def _import_paths(*packages: str) -> list[str]:
    """The folders that packages are imported from here: the worker looks nowhere else but in the standard library."""
    specs = {package: importlib.util.find_spec(package) for package in packages}
    missing = [package for package, spec in specs.items() if spec is None or spec.origin is None]
    if missing:
        raise _start_error(f"{', '.join(missing)} is not installed")
    return list(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs.values() if spec and spec.origin))


def _start_error(reason: str) -> TemplateError:
    return TemplateError(f"The process that renders chat templates did not start: {reason}.", hint="Install localrag and jinja2 again.")
