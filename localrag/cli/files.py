"""Text files that a person names at the command line."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.errors import UsageError
from localrag.settings import MAX_TEXT_BYTES
from localrag.summary import Source

if TYPE_CHECKING:
    from localrag.kb.reading import Readers


def label_of(path: Path) -> str:
    """A path fit to print: bytes that are not UTF-8 become `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read_source(path: Path, verb: str) -> Source:
    """A text file, or a document of a format that is read (localrag/kb/readers), that is to be, say, "summarized".

    UsageError for one that is not there, cannot be read, is no text or too long, or changes again while it is read.
    """
    from localrag.kb.readers import UnreadableError  # noqa: PLC0415  # weight: none of it is needed to print help
    from localrag.kb.reading import Readers  # noqa: PLC0415

    label = label_of(path)
    try:
        data, modified = _unchanged(Path(os.path.realpath(path)))
        with Readers() as readers:
            return Source(label=label, text=text_of(path.name, data, readers), modified=modified)
    except UnreadableError as error:
        raise UsageError(f"{label} cannot be {verb}: {error}.", hint="Give one text file.") from None
    except OSError as error:
        raise UsageError(f"{label} cannot be {verb}: {error.strerror or error}.", hint="Check the path and its permissions.") from None


def text_of(name: str, data: bytes, readers: Readers) -> str:
    """A file's text as it stands, or that of a document that is none (PDF, DOCX, EPUB …), which `readers` read. UnreadableError says why
    there is none.
    """
    from localrag.kb.readers import is_document, is_text  # noqa: PLC0415  # weight
    from localrag.kb.readers.text import decode  # noqa: PLC0415

    return readers.read(name, data).text if is_document(name, data) else decode(data, known=is_text(name))


def write_whole(path: Path, text: str, *, replace: bool) -> None:
    """Writes a file whole or not at all, for the eyes of its owner. FileExistsError for one that is there and is not to be replaced."""
    number, made = tempfile.mkstemp(dir=path.parent, prefix=".localrag-")
    try:
        with os.fdopen(number, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            Path(made).replace(path)
        else:
            _put_new(Path(made), path)
    finally:
        with suppress(OSError):
            Path(made).unlink()


def _put_new(made: Path, path: Path) -> None:
    """Puts a file in a place where none is, nor was made meanwhile."""
    try:
        path.hardlink_to(made)
    except FileExistsError:
        raise
    except OSError:  # FAT, as on many sticks, has no links
        path.touch(exist_ok=False)
        made.replace(path)


def _unchanged(path: Path) -> tuple[bytes, float]:
    """A file's bytes and date, which were the same before and after it was read; it is read twice at most."""
    from localrag.kb.readers.base import UnreadableError  # noqa: PLC0415  # weight
    from localrag.kb.walk import read_bytes  # noqa: PLC0415

    for _ in range(2):
        before = path.stat()
        if stat.S_ISDIR(before.st_mode):
            raise UnreadableError("it is a folder")
        if before.st_size > MAX_TEXT_BYTES:
            raise UnreadableError(f"it is larger than {MAX_TEXT_BYTES // 1024 // 1024} MiB")
        data = read_bytes(str(path))
        after = path.stat()
        if len(data) == after.st_size and _state(before) == _state(after):
            return data, after.st_mtime
    raise UnreadableError("it changes while it is read")


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns
