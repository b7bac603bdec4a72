"""Read and write the files of commands: inputs, standard input as a file, atomic output, and result files written line by line."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Self

import click

from localrag.cli.terminal import claimed_stdin, note
from localrag.errors import UsageError
from localrag.files import atomic_write, file_error, lock_open_file
from localrag.settings import MAX_TEXT_BYTES
from localrag.summary import Source
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.kb.reading import Readers


STANDARD_INPUT = "standard input"
STANDARD_OUTPUT = Path("-")


class InputFile(click.Path):
    """A path to a file to read. For `-`, standard input is copied into a temporary file, deleted when the command ends."""

    def __init__(self, *, exists: bool = False) -> None:
        super().__init__(path_type=Path, dir_okay=not exists, exists=exists, allow_dash=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401  # click's signature
        if str(value) != "-" or ctx is None or ctx.resilient_parsing:
            return super().convert(value, param, ctx)
        folder = ctx.with_resource(tempfile.TemporaryDirectory(prefix="localrag-"))
        copy = Path(folder) / "standard-input"
        with copy.open("xb") as out:
            shutil.copyfileobj(claimed_stdin(), out)
        return copy


def check_free_stdout(option: str, *, as_json: bool) -> None:
    """UsageError if both `option` and --json would write to standard output."""
    if as_json:
        raise UsageError(f"{option} - and --json both write to standard output.", hint=f"Use a file for {option}, or leave out --json.")


@contextmanager
def binary_stdout(option: str) -> Iterator[Path]:
    """Yield the path of a temporary file, then copy the file to standard output. UsageError if that is a terminal."""
    if sys.stdout.isatty():
        raise UsageError("Binary data cannot be written to a terminal.", hint=f"Use a file for {option}, or redirect standard output.")
    with tempfile.TemporaryDirectory(prefix="localrag-") as folder:
        path = Path(folder) / "standard-output"
        yield path
        with path.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def label_of(path: Path) -> str:
    """Return a printable path, with bytes that are not UTF-8 as `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read_source(path: Path, verb: str) -> Source:
    """Read a text file or a supported document (localrag/kb/readers); `-` is standard input. `verb`, e.g. "summarized", is for errors.

    UsageError if the file is missing, unreadable, not text or too long, or if it changes while it is read.
    """
    from localrag.kb.readers import UnreadableError  # noqa: PLC0415  # weight: none of it is needed to print help
    from localrag.kb.reading import Readers  # noqa: PLC0415

    label = STANDARD_INPUT if str(path) == "-" else label_of(path)
    try:
        data, modified = _stdin_bytes() if str(path) == "-" else _unchanged(Path(os.path.realpath(path)))
        with Readers() as readers:
            return Source(label=label, text=text_of(path.name, data, readers), modified=modified)
    except UnreadableError as error:
        raise UsageError(f"{label} cannot be {verb}: {error}.", hint="Give one text file.") from None
    except OSError as error:
        raise UsageError(f"{label} cannot be {verb}: {error.strerror or error}.", hint="Check the path and its permissions.") from None


def text_of(name: str, data: bytes, readers: Readers) -> str:
    """Return the text of a text file or, using `readers`, of a document (PDF, DOCX, EPUB …). UnreadableError if there is no text.

    Parts that have no text, such as scanned pages, are reported on stderr.
    """
    from localrag.kb.readers import is_document, is_text  # noqa: PLC0415  # weight
    from localrag.kb.readers.text import decode  # noqa: PLC0415

    if not is_document(name, data):
        return decode(data, known=is_text(name))
    reading = readers.read(name, data)
    for line in reading.missing:
        note(f"incomplete {safe(name)}: {safe(line)}")
    return reading.text


def write_whole(path: Path, text: str, *, replace: bool) -> None:
    """Write a file atomically, readable only by its owner. FileExistsError if it exists and `replace` is false."""
    with atomic_write(path, replace=replace) as out, naming(path):
        out.write(text.encode("utf-8", "replace"))
        out.flush()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this file's name to an OSError raised inside. Errors on file descriptors carry no name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _stdin_bytes() -> tuple[bytes, float]:
    """Return all of standard input and the current time."""
    from localrag.kb.readers.base import UnreadableError  # noqa: PLC0415  # weight

    data = claimed_stdin().read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise UnreadableError(f"it is larger than {MAX_TEXT_BYTES // 1024 // 1024} MiB")
    return data, time.time()


def _unchanged(path: Path) -> tuple[bytes, float]:
    """Return a file's bytes and modification time, checked to be unchanged during the read. Tries twice."""
    from localrag.kb.readers.base import UnreadableError  # noqa: PLC0415  # weight
    from localrag.kb.walk import read_file  # noqa: PLC0415

    for _ in range(2):
        before = path.stat()
        if stat.S_ISDIR(before.st_mode):
            raise UnreadableError("it is a folder")
        if before.st_size > MAX_TEXT_BYTES:
            raise UnreadableError(f"it is larger than {MAX_TEXT_BYTES // 1024 // 1024} MiB")
        data = read_file(str(path)).data
        after = path.stat()
        if len(data) == after.st_size and _state(before) == _state(after):
            return data, after.st_mtime
    raise UnreadableError("it changed while it was read")


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


_MAX_LINE_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
_OPENING = b'{"id":'
"""The first bytes of every line."""


class ResultFile(ABC):
    """An OUT file of JSON lines, locked by one run at a time.

    When `append` returns, the line is complete and flushed to disk. Opening the file again cuts off a line that a killed run left
    unfinished, and drops lines that are not kept. UsageError if another run is writing to it, or if it holds other content.
    """

    run: ClassVar[str]
    """The word for a run in messages."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._handle = self._open()
        try:
            self._take_up()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def is_line(self, row: object) -> bool:
        """Return whether a run of this kind can have written this row."""

    @abstractmethod
    def is_kept(self, number: int, row: dict[str, object]) -> bool:
        """Return whether to keep a line as part of this run. UsageError if it belongs to another run."""

    def append(self, row: Mapping[str, object]) -> None:
        """Append a row, whose first key must be its id, and flush it to disk."""
        data = memoryview(_json(row) + b"\n")
        with naming(self.path):
            while data:  # a short write means a full disk; the next write then raises the error
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        """Open and lock the file. Try again if it was replaced between opening and locking."""
        while True:
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0), 0o666)
            except OSError as error:
                cause = file_error(error, self.path, hint="Check --out.")
                raise UsageError(f"{self.path} cannot be written: {cause.reason}.", hint=cause.hint, **cause.numbers) from None
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                os.close(handle)
                raise UsageError(
                    f"{self.path} is not a regular file.", hint=f"Use a regular file for --out, so that the {self.run} can be resumed."
                )
            try:
                is_free = lock_open_file(handle)
            except OSError as error:
                os.close(handle)
                raise UsageError(f"{self.path} cannot be locked: {error.strerror or error}.", hint="Use another disk for --out.") from None
            if not is_free:
                os.close(handle)
                raise UsageError(f"Another {self.run} is writing to {self.path}.", hint="Wait for it, or use another --out.")
            with suppress(FileNotFoundError):
                if os.path.samestat(status, self.path.stat()):
                    return handle
            os.close(handle)

    def _take_up(self) -> None:
        """Cut off an unfinished last line, and drop the lines that are not kept."""
        ranges: list[tuple[int, int]] = []
        end = num_dropped = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), 1):
                if not raw.endswith(b"\n"):
                    self._check_torn(number, raw)
                    break
                if self._stays(number, raw):
                    if ranges and ranges[-1][1] == end:
                        ranges[-1] = (ranges[-1][0], end + len(raw))
                    else:
                        ranges.append((end, end + len(raw)))
                else:
                    num_dropped += 1
                end += len(raw)
        if num_dropped:
            with naming(self.path):
                self._rewrite(ranges)
        elif os.fstat(self._handle).st_size > end:
            os.ftruncate(self._handle, end)

    def _check_torn(self, number: int, raw: bytes) -> None:
        """UsageError unless the unfinished line can be the start of one of our lines."""
        if len(raw) == _MAX_LINE_BYTES or not raw.startswith(_OPENING[: len(raw)]):
            raise self._foreign(number)
        with suppress(ValueError, RecursionError):
            if not self.is_line(json.loads(raw)):
                raise self._foreign(number)

    def _stays(self, number: int, raw: bytes) -> bool:
        try:
            row = json.loads(raw)
        except (ValueError, RecursionError):
            raise self._foreign(number) from None
        if not isinstance(row, dict) or not self.is_line(row):
            raise self._foreign(number)
        return self.is_kept(number, row)

    def _foreign(self, number: int) -> UsageError:
        article = "an" if self.run[0] in "aeiou" else "a"
        return UsageError(f"Line {number} of {self.path} was not written by {article} {self.run}.", hint="Use another --out.", line=number)

    def _rewrite(self, ranges: list[tuple[int, int]]) -> None:
        """Atomically replace the file by a locked copy with only these byte ranges."""
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.unlink(missing_ok=True)  # left by a run that was killed here
        handle = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            lock_open_file(handle)
            with self.path.open("rb") as old:
                for start, end in ranges:
                    old.seek(start)
                    _copy(old, handle, end - start)
            fresh.chmod(stat.S_IMODE(os.fstat(self._handle).st_mode))
            os.fsync(handle)
            fresh.replace(self.path)
        except BaseException:
            os.close(handle)
            raise
        os.close(self._handle)
        self._handle = handle


def _copy(source: IO[bytes], handle: int, num_bytes: int) -> None:
    while num_bytes:
        piece = source.read(min(num_bytes, _PIECE_BYTES))
        num_bytes -= len(piece)
        while piece:
            piece = piece[os.write(handle, piece) :]


def _json(row: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=str).encode()
    except UnicodeEncodeError:  # a lone surrogate, from a file name or an id
        return json.dumps(row, separators=(",", ":"), default=str).encode()
