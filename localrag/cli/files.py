"""Files that commands read and write: inputs, standard input as a file, output written whole, and results kept line by line."""

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
from typing import IO, TYPE_CHECKING, Any, BinaryIO, ClassVar, Self

import click

from localrag.cli.text import note
from localrag.errors import UsageError
from localrag.files import atomic_write, file_error, lock_open_file
from localrag.settings import MAX_TEXT_BYTES
from localrag.summary import Source
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.kb.reading import Readers


STANDARD_INPUT = "standard input"
STANDARD_OUTPUT = Path("-")
_CLAIMED = "localrag.stdin"


class InputFile(click.Path):
    """A file to read. `-` copies standard input into a file that is gone when the command ends, for readers that need one."""

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


def claimed_stdin() -> BinaryIO:
    """Standard input, for the one that reads it. UsageError where another argument of the command has claimed it."""
    context = click.get_current_context(silent=True)
    if context is not None:
        claims = context.find_root().meta
        if claims.get(_CLAIMED):
            raise UsageError("Two arguments are -, and standard input can be read only once.", hint="Give a file for one of them.")
        claims[_CLAIMED] = True
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("Standard input is closed.", hint="Give a file in place of -.")
    return sys.stdin.buffer


def is_stdin_claimed() -> bool:
    """Whether an argument of the command was `-`."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().meta.get(_CLAIMED))


def check_free_stdout(option: str, *, as_json: bool) -> None:
    """UsageError where --json writes to standard output too, which `option` was told to use."""
    if as_json:
        raise UsageError(f"{option} - and --json both write to standard output.", hint=f"Give {option} a file, or leave --json out.")


@contextmanager
def binary_stdout(option: str) -> Iterator[Path]:
    """The path of a file to be written, which then goes to standard output. UsageError where that is a terminal."""
    if sys.stdout.isatty():
        raise UsageError("What is written is not text, and standard output is a terminal.", hint=f"Give {option} a file, or redirect it.")
    with tempfile.TemporaryDirectory(prefix="localrag-") as folder:
        made = Path(folder) / "standard-output"
        yield made
        with made.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def label_of(path: Path) -> str:
    """A path fit to print: bytes that are not UTF-8 become `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read_source(path: Path, verb: str) -> Source:
    """A text file, or a document of a format that is read (localrag/kb/readers), that is to be, say, "summarized".

    `-` is standard input. UsageError for one that is not there, cannot be read, is not text or too long, or changes while it is read.
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
    """A file's text as it stands, or that of a document that is none (PDF, DOCX, EPUB …), which `readers` read. UnreadableError says why
    there is none. What a document shows beside its text, such as scanned pages, is named on stderr.
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
    """Write a file whole or not at all, for the eyes of its owner. FileExistsError if it exists and is not to be replaced."""
    with atomic_write(path, replace=replace) as out, naming(path):
        out.write(text.encode("utf-8", "replace"))
        out.flush()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError inside name this file: one of a file descriptor names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _stdin_bytes() -> tuple[bytes, float]:
    """All of standard input, as of now."""
    from localrag.kb.readers.base import UnreadableError  # noqa: PLC0415  # weight

    data = claimed_stdin().read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise UnreadableError(f"it is larger than {MAX_TEXT_BYTES // 1024 // 1024} MiB")
    return data, time.time()


def _unchanged(path: Path) -> tuple[bytes, float]:
    """A file's bytes and date, which were the same before and after it was read; it is read twice at most."""
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
    raise UnreadableError("it changes while it is read")


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


_MAX_LINE_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
_OPENING = b'{"id":'
"""What every line begins with."""


class ResultFile(ABC):
    """OUT, opened for one run at a time.

    A line is there whole and flushed to the disk when `append` returns. What a killed run left half written is cut off when the file is
    opened again, and lines that need not stay are dropped. UsageError where another run writes to it, or where it holds anything else
    than such lines.
    """

    run: ClassVar[str]
    """What a run is called."""

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
        """Whether a run of this kind can have written it."""

    @abstractmethod
    def is_kept(self, number: int, row: dict[str, object]) -> bool:
        """Whether such a line stays, which makes it part of this run. UsageError where it belongs to another one."""

    def append(self, row: Mapping[str, object]) -> None:
        """`row` begins with its id."""
        data = memoryview(_json(row) + b"\n")
        with naming(self.path):
            while data:  # once, unless the disk is full, and then the next says so
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        """The file, locked: another may replace it between its opening and its locking."""
        while True:
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0), 0o666)
            except OSError as error:
                known = file_error(error, self.path, hint="Check --out.")
                raise UsageError(f"{self.path} cannot be written: {known.reason}.", hint=known.hint, **known.numbers) from None
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                os.close(handle)
                raise UsageError(
                    f"{self.path} is not a file.", hint=f"Give --out a file, so that the {self.run} can go on when interrupted."
                )
            try:
                is_free = lock_open_file(handle)
            except OSError as error:
                os.close(handle)
                raise UsageError(f"{self.path} cannot be locked: {error.strerror or error}.", hint="Give --out on another disk.") from None
            if not is_free:
                os.close(handle)
                raise UsageError(f"Another {self.run} is writing to {self.path}.", hint="Wait for it, or give another --out.")
            with suppress(FileNotFoundError):
                if os.path.samestat(status, self.path.stat()):
                    return handle
            os.close(handle)

    def _take_up(self) -> None:
        """Cut off a torn end; drop the lines that do not stay."""
        kept: list[tuple[int, int]] = []
        end = num_dropped = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), 1):
                if not raw.endswith(b"\n"):
                    self._check_torn(number, raw)
                    break
                if self._stays(number, raw):
                    if kept and kept[-1][1] == end:
                        kept[-1] = (kept[-1][0], end + len(raw))
                    else:
                        kept.append((end, end + len(raw)))
                else:
                    num_dropped += 1
                end += len(raw)
        if num_dropped:
            with naming(self.path):
                self._rewrite(kept)
        elif os.fstat(self._handle).st_size > end:
            os.ftruncate(self._handle, end)

    def _check_torn(self, number: int, raw: bytes) -> None:
        """Only the beginning of a line of ours is cut off, and none is as long as the longest that is read."""
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
        return UsageError(f"Line {number} of {self.path} is no line of {article} {self.run}.", hint="Give another --out.", line=number)

    def _rewrite(self, kept: list[tuple[int, int]]) -> None:
        """The file anew with these stretches of bytes, put in the place of the old one at once, and locked before it is there."""
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.unlink(missing_ok=True)  # of a run that was killed here
        handle = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            lock_open_file(handle)
            with self.path.open("rb") as old:
                for start, end in kept:
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
    except UnicodeEncodeError:  # half a character, from a file's name or an id
        return json.dumps(row, separators=(",", ":"), default=str).encode()
