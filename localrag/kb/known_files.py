"""Which files need not be read, or not be cut: what was found of them in earlier runs holds again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from os.path import lexists
from pathlib import PurePath

from localrag.kb.chunking import CUTTER
from localrag.kb.documents import Known, Unread
from localrag.kb.walk import Found, Walk, is_unchanged


def is_current(file: Found, known: Known | Unread) -> bool:
    """Whether a file is what is known of it, as far as that shows without reading it."""
    return known.cutter == CUTTER and is_unchanged(file.path, known.num_bytes, known.mtime_ns)


def is_same(known: Known, sha256: str) -> bool:
    """Whether a file of this sha256 is a stored document as it would be stored today."""
    return (known.sha256, known.cutter) == (sha256, CUTTER)


@dataclass(slots=True)
class KnownFiles:
    """What is known of the files of a walk, by their absolute paths: stored documents, and files that have no text."""

    found: Walk
    documents: dict[str, Known] = field(default_factory=dict)
    unread: dict[str, Unread] = field(default_factory=dict)
    _gone: dict[str, list[str]] | None = None  # sha256 to the paths of stored documents whose files are not there any more

    def document(self, file: Found) -> Known | None:
        """The stored document that a file is, if that shows without reading it."""
        known = self.documents.get(file.path)
        return known if known is not None and is_current(file, known) else None

    def without_text(self, file: Found) -> Unread | None:
        """Why there is nothing to index in a file, if that is known and shows without reading it."""
        unread = self.unread.get(file.path)
        return unread if unread is not None and is_current(file, unread) else None

    def take_renamed(self, file: Found, sha256: str, *, is_local: bool) -> Known | None:
        """The stored document that is this file under a new name, and is known by that from now on. By another ending it is read as
        something else.

        `is_local`: all documents are files of this machine, so that those that are not there are gone, and not only those of the walk.
        """
        if self._gone is None:
            self._gone = self._find_gone(is_local=is_local)
        suffix = PurePath(file.path).suffix.lower()
        old = next((path for path in self._gone.get(sha256, ()) if PurePath(path).suffix.lower() == suffix), None)
        if old is None or self.documents[old].cutter != CUTTER:
            return None
        self._gone[sha256].remove(old)
        document = self.documents[file.path] = self.documents.pop(old)
        return document

    def vanished(self) -> list[str]:
        """The paths of stored documents whose files are gone, or left out now."""
        return self.found.vanished(list(self.documents))

    def unread_before(self) -> dict[str, Unread]:
        """What was known of files without text, among those that were looked at and those that vanished."""
        paths = {file.path for file in self.found.files}.union(self.found.vanished(list(self.unread)))
        return {path: unread for path, unread in self.unread.items() if path in paths}

    def _find_gone(self, *, is_local: bool) -> dict[str, list[str]]:
        below = set(self.vanished())
        here = {file.path for file in self.found.files}
        gone = defaultdict(list)
        for path, known in self.documents.items():
            if path in below or (is_local and path not in here and not lexists(path)):
                gone[known.sha256].append(path)
        return gone
