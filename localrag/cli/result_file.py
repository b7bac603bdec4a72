"""What a long run came to: a JSON object a line, so that a run that was killed goes on where it was."""

from __future__ import annotations

import json
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar, Self

from localrag.errors import UsageError
from localrag.locking import try_lock

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
                raise UsageError(f"{self.path} cannot be written: {error.strerror or error}.", hint="Check --out.") from None
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                os.close(handle)
                raise UsageError(
                    f"{self.path} is not a file.", hint=f"Give --out a file, so that the {self.run} can go on when interrupted."
                )
            if not try_lock(handle):
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
            try_lock(handle)
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
