"""Read files in a child process, so that a file which hangs, crashes or exhausts its reader costs that file and not this process.

Readers limit themselves where they can. The limits here catch the rest. reading_worker.py is the child's program.
"""

from __future__ import annotations

from typing import Self

from localrag.errors import KnowledgeBaseError
from localrag.kb.readers import needs_threads
from localrag.kb.readers.base import Locator, Reading, Section, UnreadableError
from localrag.kb.reading_worker import MEMORY_EXIT
from localrag.process import Child, ChildExitError, ChildStartError, signal_name
from localrag.text.sanitize import one_line

CPU_LIMIT_S = 30.0
WALL_LIMIT_S = 120.0  # a busy machine may take this long for CPU_LIMIT_S; the only time limit on systems without limits of CPU time
MEMORY_LIMIT_BYTES = 1 << 30
MAX_TEXT_CHARS = 20 << 20  # shown as "MB" in errors
WORKER = "localrag.kb.reading_worker"
_UNUSABLE = "its reader gave no usable answer"


class Readers:
    """Runs the readers of `localrag.kb.readers` in a child process, which is started with the first file and again whenever it dies.

        with Readers() as readers:
            reading = readers.read("guide/heat.pdf", data)

    The memory limit applies to the growth of the child and works on Linux. The limit of CPU time works wherever the system supports it,
    and the limit of wall-clock time everywhere. `worker` is the module that the child runs. Not thread-safe.
    """

    def __init__(
        self,
        *,
        cpu_limit_s: float = CPU_LIMIT_S,
        wall_limit_s: float = WALL_LIMIT_S,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        max_text_chars: int = MAX_TEXT_CHARS,
        worker: str = WORKER,
    ) -> None:
        self.cpu_limit_s = cpu_limit_s
        self.wall_limit_s = wall_limit_s
        self.memory_limit_bytes = memory_limit_bytes
        self.max_text_chars = max_text_chars
        self._worker = worker
        self._child: Child | None = None
        self._has_threads = False  # whether the child has started a library's threads, before it forbids itself to start more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The child's process id; None if there is no child."""
        return None if self._child is None else self._child.pid

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
        if self._child is not None and not self._child.is_running:
            self.close()
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
        try:
            child = self._child = self._child or self._started()
            request = {"name": name, "cpu_s": self.cpu_limit_s}
            header, text = child.ask(request, data, limit_s=self.wall_limit_s, max_bytes=4 * self.max_text_chars)
            reading = None if "error" in header else _reading(header, text.decode())
        except ChildStartError as error:
            self.close()
            reason = _line(error.reason)
            raise KnowledgeBaseError(f"The process that reads files did not start: {reason}.", hint=error.hint) from None
        except ChildExitError as error:
            self.close()
            raise self._death(error) from None
        except (ValueError, TypeError, KeyError, IndexError):
            self.close()
            raise _DeathError(_UNUSABLE, may_be_others=True) from None
        if header.get("ends"):
            self.close()
        if reading is None:
            raise UnreadableError(_line(str(header["error"])), lasts=header.get("lasts") is True)
        return reading

    def _started(self) -> Child:
        job = {"memory_limit_bytes": self.memory_limit_bytes, "max_text_chars": self.max_text_chars, "threads": self._has_threads}
        return Child(self._worker, job)

    def _death(self, error: ChildExitError) -> _DeathError:
        """Say why there was no answer."""
        if error.expired:
            return _DeathError(f"reading it took more than {self.wall_limit_s:g} s")
        name = signal_name(error.code)
        if name == "SIGXCPU":
            return _DeathError(f"reading it took more than {self.cpu_limit_s:g} s of CPU time", lasts=True)
        if error.code == MEMORY_EXIT:
            return _DeathError(f"reading it took more than {_size(self.memory_limit_bytes)} of memory", may_be_others=True, lasts=True)
        return _DeathError(f"its reader died ({f'signal {name}' if name else f'exit code {error.code}'})", may_be_others=True)


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
