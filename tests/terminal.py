"""A terminal with a screen, in which a program of ours runs as a person would run it."""

import contextlib
import os
import sys
import time
from pathlib import Path

import pexpect
import pyte

ROOT = Path(__file__).parents[1]
WAIT_S = 60.0
"""A machine under load takes its time; nothing here measures speed."""


class _Screen(pyte.HistoryScreen):
    """A screen that answers what it is asked, such as where its cursor stands."""

    answer = staticmethod(lambda _: None)

    def write_process_input(self, data):
        self.answer(data)


class Terminal:
    """`Terminal("chat", "--model", "echo", home=...)`; what scrolled away is kept."""

    def __init__(self, *args, home, term="xterm-256color", rows=30, columns=100, env=None, program=("-m", "localrag")):
        self.screen = _Screen(columns, rows, history=5000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        variables = {**os.environ, "LOCALRAG_HOME": str(home), "TERM": term, **(env or {})}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            variables.pop(name, None)
        self.child = pexpect.spawn(
            sys.executable, [*program, *args], env=variables, dimensions=(rows, columns), cwd=str(ROOT), timeout=WAIT_S
        )
        self.screen.answer = lambda data: self.child.send(data.encode())
        self.raw = b""
        self._text, self._text_of = "", -1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.close(force=True)

    def read(self, seconds=0.1):
        """Take in what comes within so many seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):
                data = self.child.read_nonblocking(65536, timeout=min(left, 0.05))
                self.raw += data
                self._stream.feed(data)
            if not self.child.isalive() and not self._more():
                return

    def _more(self):
        try:
            data = self.child.read_nonblocking(65536, timeout=0)
        except (pexpect.TIMEOUT, pexpect.EOF):
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    @property
    def text(self):
        """All lines, those that scrolled away as well."""
        if self._text_of != len(self.raw):
            self._text, self._text_of = self._shown(), len(self.raw)
        return self._text

    def _shown(self):
        above = ["".join(line[x].data for x in range(self.screen.columns)).rstrip() for line in self.screen.history.top]
        return "\n".join([*above, *(line.rstrip() for line in self.screen.display)])

    def wait_for(self, *texts):
        """Until all of these are to be seen, now or above."""
        end = time.monotonic() + WAIT_S
        while not all(text in self.text for text in texts):
            assert time.monotonic() < end, f"{[text for text in texts if text not in self.text]} did not come:\n{self.text}"
            assert self.child.isalive() or self._more(), f"it ended:\n{self.text}"
            self.read(0.03)

    def wait_until(self, is_so):
        end = time.monotonic() + WAIT_S
        while not is_so(self.text):
            assert time.monotonic() < end, self.text
            self.read(0.03)

    def send(self, keys):
        """Press keys. One with Ctrl waits a moment, as a person would: it is lost while a program sets up the terminal for its prompt."""
        self.child.delaybeforesend = 0.05 if keys < " " else None
        self.child.send(keys)

    def enter(self, line):
        """Type a line and send it."""
        self.send(line)
        self.read(0.05)
        self.send("\r")

    def end(self):
        """Wait for its end; the exit code."""
        end = time.monotonic() + WAIT_S
        while self.child.isalive():
            assert time.monotonic() < end, self.text
            self.read(0.03)
        self.child.close()
        return self.child.exitstatus
