"""The answers of a batch: a JSON object a line, so that a batch that was killed goes on where it was."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from localrag.cli.batch_questions import Asked, Id, Questions
from localrag.errors import LocalragError, UsageError
from localrag.locking import try_lock
from localrag.session import Answer

_MAX_LINE_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
_OPENING = b'{"id":'
"""What every line begins with."""


class Answers:
    """OUT, opened for one batch at a time. `done` are the ids whose answers it holds.

    A line is there whole and flushed to the disk when `write` returns. What a killed batch left half written is cut off when it is
    opened again, and lines that say what went wrong make way for another try.
    """

    def __init__(self, path: Path, questions: Questions, *, force: bool) -> None:
        """UsageError where another batch writes to it, where it holds anything but answers, or answers to other questions.

        With `force`, answers to questions that IN has no more stay, and questions that were changed are asked again.
        """
        self.path = Path(os.path.realpath(path))
        self.done: set[Id] = set()
        self._questions = questions
        self._force = force
        self._handle = self._open()
        try:
            self._take_up()
        except BaseException:
            self.close()
            raise

    def write(self, asked: Asked, outcome: Answer | LocalragError) -> None:
        said = outcome.to_dict() if isinstance(outcome, Answer) else {"line": asked.line, "error": outcome.to_dict()}
        line = {"id": asked.id, **({"request": asked.mark} if isinstance(outcome, Answer) else {}), **said}
        data = memoryview(_json(line) + b"\n")
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
                raise UsageError(f"{self.path} is not a file.", hint="Give --out a file, so that the batch can go on when interrupted.")
            if not try_lock(handle):
                os.close(handle)
                raise UsageError(f"Another batch is writing to {self.path}.", hint="Wait for it, or give another --out.")
            with suppress(FileNotFoundError):
                if os.path.samestat(status, self.path.stat()):
                    return handle
            os.close(handle)

    def _take_up(self) -> None:
        """Learn what is done; cut off a torn end; drop the lines that are to be asked again."""
        kept: list[tuple[int, int]] = []
        end = num_dropped = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), 1):
                if not raw.endswith(b"\n"):
                    self._check_torn(number, raw)
                    break
                if self._is_kept(number, raw):
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
        """Only the beginning of a line of ours is cut off."""
        if not raw.startswith(_OPENING[: len(raw)]):
            raise self._foreign(number)
        with suppress(ValueError, RecursionError):
            if _kind(json.loads(raw)) == "other":
                raise self._foreign(number)

    def _is_kept(self, number: int, raw: bytes) -> bool:
        try:
            row = json.loads(raw)
        except (ValueError, RecursionError):
            raise self._foreign(number) from None
        kind = _kind(row)
        if kind == "other":
            raise self._foreign(number)
        if kind == "error":
            return False
        mark = self._questions.marks.get(row["id"])
        if mark == row["request"]:
            self.done.add(row["id"])
        elif not self._force:
            said = "is not asked" if mark is None else "asks something else"
            raise UsageError(
                f"Line {number} of {self.path} answers {json.dumps(row['id'])[:80]}, which {said} in this batch.",
                hint="Give another --out, or --force to keep answers to other questions and to ask changed ones again.",
                line=number,
            )
        return mark is None or mark == row["request"]

    def _foreign(self, number: int) -> UsageError:
        return UsageError(f"Line {number} of {self.path} is no line of a batch.", hint="Give another --out.", line=number)

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


def _kind(row: object) -> str:
    """Of a line of OUT: answer, error, or other for what no batch wrote."""
    if not isinstance(row, dict) or "id" not in row or isinstance(row["id"], bool):
        return "other"
    if isinstance(row.get("error"), dict) and isinstance(row.get("line"), int) and isinstance(row["id"], str | int | None):
        return "error"
    return "answer" if isinstance(row["id"], str | int) and isinstance(row.get("request"), str) and "answer" in row else "other"


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
