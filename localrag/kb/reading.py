"""Read files in a child process, so that a file which hangs, crashes or exhausts its reader costs that file and not this process.

Readers limit themselves where they can. The limits here catch the rest. reading_worker.py is the child's program.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Self

from localrag.errors import KnowledgeBaseError
from localrag.kb.readers import needs_threads
from localrag.kb.readers.base import Locator, Reading, Section, UnreadableError
from localrag.kb.reading_process import ReadingProcess
from localrag.kb.reading_worker import MEMORY_EXIT
from localrag.text.sanitize import one_line

CPU_LIMIT_S = 30.0
WALL_LIMIT_S = 120.0  # a busy machine may take this long for CPU_LIMIT_S; the only time limit on systems without limits of CPU time
MEMORY_LIMIT_BYTES = 1 << 30
MAX_TEXT_CHARS = 20 << 20  # shown as "MB" in errors
START_LIMIT_S = 60.0
WORKER = Path(__file__).with_name("reading_worker.py")
_UNUSABLE = "its reader gave no usable answer"


class Readers:
    """Runs the readers of `localrag.kb.readers` in a child process, which is started with the first file and again whenever it dies.

        with Readers() as readers:
            reading = readers.read("guide/heat.pdf", data)

    The memory limit applies to the growth of the child and works on Linux. The limit of CPU time works wherever the system supports it,
    and the limit of wall-clock time everywhere. `worker` is the child's program. Not thread-safe.
    """

    def __init__(
        self,
        *,
        cpu_limit_s: float = CPU_LIMIT_S,
        wall_limit_s: float = WALL_LIMIT_S,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        max_text_chars: int = MAX_TEXT_CHARS,
        worker: Path = WORKER,
    ) -> None:
        self.cpu_limit_s = cpu_limit_s
        self.wall_limit_s = wall_limit_s
        self.memory_limit_bytes = memory_limit_bytes
        self.max_text_chars = max_text_chars
        self._worker = worker
        self._child: ReadingProcess | None = None
        self._has_threads = False  # of the library that needs some: a child starts them before it forbids itself to

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process id of the child; None while there is none."""
        return None if self._child is None else self._child.process.pid

    def close(self) -> None:
        """End the child. Reading another file starts a new one."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def read(self, name: str, data: bytes) -> Reading:
        """Read the bytes of a file with this name.

        Raises UnreadableError with the reason if there is no text or a limit was exceeded, and KnowledgeBaseError if no child can be
        started. The result does not depend on earlier files: if a child that has read other files dies, a fresh one tries again.
        """
        if needs_threads(name, data) and not self._has_threads:
            self.close()
            self._has_threads = True
        is_used = self._child is not None
        try:
            return self._read_once(name, data)
        except _DeathError as death:
            if not (is_used and death.may_be_others):
                raise UnreadableError(str(death), lasts=death.lasts) from None
        try:
            return self._read_once(name, data)
        except _DeathError as death:
            raise UnreadableError(str(death), lasts=death.lasts) from None

    def _read_once(self, name: str, data: bytes) -> Reading:
        if self._child is None:
            self._child = self._started()
        child = self._child
        try:
            header, text = child.ask({"name": name, "cpu_s": self.cpu_limit_s}, data, self.wall_limit_s, 4 * self.max_text_chars)
            reading = None if "error" in header else _reading(header, text.decode())
        except EOFError:
            death = self._death(child)
            self.close()
            raise death from None
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            self.close()
            raise _DeathError(_UNUSABLE, may_be_others=True) from None
        except BaseException:  # interrupted: its answer would be taken for the next one
            self.close()
            raise
        if header.get("ends"):
            self.close()
        if reading is None:
            raise UnreadableError(_line(str(header["error"])), lasts=header.get("lasts") is True)
        return reading

    def _started(self) -> ReadingProcess:
        child = ReadingProcess(self._worker, [str(self.memory_limit_bytes), str(self.max_text_chars), str(int(self._has_threads))])
        reason = "it ended"
        try:
            header, _ = child.receive(START_LIMIT_S, 0)
            if header.get("ready") is True:
                return child
            reason = _line(str(header.get("error")))
        except EOFError:
            reason = f"no sign of life within {START_LIMIT_S:g} s" if child.clock.expired else reason
        except (ValueError, RecursionError):
            reason = "it does not speak as it should"
        except BaseException:
            child.stop()
            raise
        child.stop()
        raise KnowledgeBaseError(f"The process that reads files did not start: {reason}.", hint="Install localrag again.")

    def _death(self, child: ReadingProcess) -> _DeathError:
        """Return the reason why the child did not answer, as an error."""
        code = child.exit_code()
        if child.clock.expired:
            return _DeathError(f"reading it took more than {self.wall_limit_s:g} s")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"{-code}"
        if name == "SIGXCPU":
            return _DeathError(f"reading it took more than {self.cpu_limit_s:g} s of CPU time", lasts=True)
        if code == MEMORY_EXIT:
            return _DeathError(f"reading it took more than {_size(self.memory_limit_bytes)} of memory", may_be_others=True, lasts=True)
        return _DeathError(f"its reader died ({f'signal {name}' if code < 0 else f'exit code {code}'})", may_be_others=True)


class _DeathError(Exception):
    """The child died. `may_be_others`: an earlier file may be the cause. `lasts`: another attempt would fail as well."""

    def __init__(self, reason: str, *, may_be_others: bool = False, lasts: bool = False) -> None:
        super().__init__(reason)
        self.may_be_others = may_be_others
        self.lasts = lasts


def _reading(header: dict[str, object], text: str) -> Reading:
    """Make a Reading from an answer. Raises ValueError, TypeError, KeyError or IndexError if the answer is inconsistent."""
    headings, kinds = _texts(header["headings"]), _texts(header["kinds"])
    sections = [Section(start, end, headings[heading], body) for start, end, heading, body in _groups(header["sections"], 4)]
    places = [Locator(start, kinds[kind], number) for start, kind, number in _groups(header["places"], 3)]
    at = 0
    for section in sections:
        if not (at <= section.start <= section.end <= len(text) and (section.body == 0 or section.start <= section.body <= section.end)):
            raise ValueError(_UNUSABLE)
        at = section.end
    starts = [place.start for place in places]
    if starts != sorted(starts) or max(starts, default=0) > len(text):
        raise ValueError(_UNUSABLE)
    language = header["language"]
    fields = [_texts(pair) for pair in _list(header["fields"])]
    return Reading(
        text,
        tuple(sections),
        title=str(header["title"]),
        tags=_texts(header["tags"]),
        markdown=header["markdown"] is True,
        language=None if language is None else str(language),
        places=tuple(places),
        own_lines=header["own_lines"] is True,
        fields=tuple((key, value) for key, value in fields),
        missing=tuple(map(_line, _texts(header["missing"]))),
    )


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(_UNUSABLE)
    return value


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, _list(value)))


def _groups(value: object, size: int) -> list[tuple[int, ...]]:
    """Split non-negative integers into groups of `size`. Raises ValueError or TypeError for anything else."""
    numbers = [number for number in _list(value) if isinstance(number, int) and number >= 0]
    if len(numbers) != len(_list(value)) or len(numbers) % size:
        raise ValueError(_UNUSABLE)
    return list(zip(*[iter(numbers)] * size, strict=True))


def _line(text: str) -> str:
    """Return a text as one line without control characters, worded to follow a file's name."""
    return one_line(text, 300) or _UNUSABLE


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):g} GB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MB"
