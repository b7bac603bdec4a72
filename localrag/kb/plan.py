"""Plan an index run: `decide` says what to do with one file, `plan` with all of them, without embedding anything.

A file that is unchanged since an earlier run (see `KnownFiles`) is not read or cut again.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from os.path import lexists
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from localrag.errors import KnowledgeBaseError
from localrag.kb.chunking import CUTTER
from localrag.kb.protocols import AnyStore, StoredDocument, UnreadFile
from localrag.kb.readers import Reading, UnreadableError
from localrag.kb.reading import Readers
from localrag.kb.walk import MAY_BE_READ, Content, FileEntry, SkippedFile, Walk, found_secret, is_unchanged, read_file, reason_of, walk

Kind = Literal["new", "changed", "unchanged", "renamed", "skipped"]

INCOMPLETE, SECRET = "incomplete", "contains_secret"
"""Fields that only localrag sets: parts of the file without text, and the kind of secret in it."""


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """The progress of an index run: `num_done` of `num_files` files are stored, unchanged or skipped.

    `num_embedded` chunks have been embedded in this run. `source` is the file read last, which may not be embedded yet.
    """

    source: str
    num_done: int
    num_files: int
    num_embedded: int


@dataclass(slots=True)
class KnownFiles:
    """The results of earlier runs for the files of a walk, by absolute path: documents, and files without text.

    `fields` maps document ids to the fields of their files.
    """

    walk: Walk
    documents: dict[str, StoredDocument] = field(default_factory=dict)
    unread: dict[str, UnreadFile] = field(default_factory=dict)
    fields: dict[int, set[tuple[str, str]]] = field(default_factory=dict)
    _gone: dict[str, list[str]] | None = None  # sha256 → paths of stored documents whose files are gone

    def load(self, store: AnyStore) -> None:
        """Load documents, unread files and fields from a store."""
        self.documents, self.unread = store.documents(), store.unread()
        self.fields = {document_id: pairs for (document_id, origin), pairs in store.fields_by_origin().items() if origin == "file"}

    def notes(self, document: StoredDocument, key: str) -> list[str]:
        """Return the notes on a stored document under the key INCOMPLETE or SECRET."""
        return sorted(value for name, value in self.fields.get(document.id, ()) if name == key)

    def document(self, file: FileEntry) -> StoredDocument | None:
        """Return the stored document of a file whose size and modification time are unchanged; otherwise None."""
        document = self.documents.get(file.path)
        return document if document is not None and _is_current(file, document) else None

    def without_text(self, file: FileEntry) -> UnreadFile | None:
        """Return the record of a file without text whose size and modification time are unchanged; otherwise None."""
        unread = self.unread.get(file.path)
        return unread if unread is not None and _is_current(file, unread) else None

    def take_renamed(self, file: FileEntry, sha256: str, *, is_local: bool) -> StoredDocument | None:
        """Find the stored document of a file that was renamed, and move it to the new path; None if there is none.

        A file with another extension does not match, since it may be read as another format. `is_local` means that all documents are files
        of this machine, so that any missing file counts as gone, not only those below the roots of the walk.
        """
        if self._gone is None:
            self._gone = self._find_gone(is_local=is_local)
        suffix = PurePath(file.path).suffix.lower()
        old = next((path for path in self._gone.get(sha256, ()) if PurePath(path).suffix.lower() == suffix), None)
        if old is None or self.documents[old].cutter != CUTTER:
            return None
        if self.notes(self.documents[old], SECRET) and not self.walk.hidden:
            return None
        self._gone[sha256].remove(old)
        document = self.documents[file.path] = self.documents.pop(old)
        return document

    def vanished(self) -> list[str]:
        """Return the paths of stored documents whose files are gone or now excluded."""
        return self.walk.vanished(list(self.documents))

    def unread_before(self) -> dict[str, UnreadFile]:
        """Return the earlier records of files without text that were walked or have vanished."""
        paths = {file.path for file in self.walk.files}.union(self.walk.vanished(list(self.unread)))
        return {path: unread for path, unread in self.unread.items() if path in paths}

    def _find_gone(self, *, is_local: bool) -> dict[str, list[str]]:
        below = set(self.vanished())
        here = {file.path for file in self.walk.files}
        gone_paths = defaultdict(list)
        for path, document in self.documents.items():
            if path in below or (is_local and path not in here and not lexists(path)):
                gone_paths[document.sha256].append(path)
        return gone_paths


class ReadFile(NamedTuple):
    """A file as read. `mtime_ns` is None if a later change might not alter it; `secret` is the kind of secret found, or ""."""

    sha256: str
    num_bytes: int
    mtime_ns: int | None
    reading: Reading
    secret: str

    def notes(self) -> tuple[tuple[str, str], ...]:
        """Return the notes to store as fields: missing parts, and the kind of secret."""
        return (*((INCOMPLETE, line) for line in self.reading.missing), *(((SECRET, self.secret),) if self.secret else ()))


class Decision(NamedTuple):
    """What to do with a file.

    `document` is the stored document of an unchanged or renamed file; if `is_noted`, its modification time is set to `mtime_ns`. `read` is
    the content of a new or changed file. `reason` says why a file is skipped; `unread` is the record to store about it.
    """

    kind: Kind
    document: StoredDocument | None = None
    mtime_ns: int | None = None
    is_noted: bool = False
    read: ReadFile | None = None
    reason: str = ""
    unread: UnreadFile | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The sources that an index run would add, update, keep, rename and remove, and the files it would skip, with reasons.

    `partial` lists documents that have parts without text.
    """

    new: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    renamed: tuple[str, ...]
    removed: tuple[str, ...]
    skipped: tuple[SkippedFile, ...]
    partial: tuple[SkippedFile, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the plan as JSON-serialisable data."""
        file_lists = {name: [file._asdict() for file in getattr(self, name)] for name in ("skipped", "partial")}
        return {**asdict(self), **file_lists}


def decide(file: FileEntry, known_files: KnownFiles, readers: Readers, *, is_local: bool | None) -> Decision:
    """Decide what to do with a file. It is read unless it is unchanged. `is_local` is that of the store; None without a store."""
    if document := known_files.document(file):
        return _without_secret(file, known_files, Decision("unchanged", document))
    if without_text := known_files.without_text(file):
        return Decision("skipped", reason=without_text.reason, unread=without_text)
    try:
        content = read_file(file.path)
    except (UnreadableError, OSError) as error:
        return Decision("skipped", reason=reason_of(error))
    sha256 = hashlib.sha256(content.data).hexdigest()
    stored = known_files.documents.get(file.path)
    if stored is not None and is_same(stored, sha256):
        return _without_secret(file, known_files, Decision("unchanged", stored, content.mtime_ns, is_noted=True))
    is_other = stored is None or stored.sha256 != sha256
    if is_other and is_local is not None and (renamed := known_files.take_renamed(file, sha256, is_local=is_local)):
        return _without_secret(file, known_files, Decision("renamed", renamed, content.mtime_ns, is_noted=True))
    return _without_secret(file, known_files, _read(file, content, sha256, readers, "new" if stored is None else "changed"))


def _is_current(file: FileEntry, record: StoredDocument | UnreadFile) -> bool:
    """Whether a file has the recorded size and modification time and was cut by this version."""
    return record.cutter == CUTTER and is_unchanged(file.path, record.num_bytes, record.mtime_ns)


def is_same(document: StoredDocument, sha256: str) -> bool:
    """Whether a stored document has this sha256 and was cut by this version, so that storing it again would change nothing."""
    return (document.sha256, document.cutter) == (sha256, CUTTER)


def _read(file: FileEntry, content: Content, sha256: str, readers: Readers, kind: Kind) -> Decision:
    num_bytes, mtime_ns = len(content.data), content.mtime_ns
    try:
        reading = readers.read(file.path, content.data)
        if not any(reading.text[section.start : section.end].strip() for section in reading.sections):
            raise UnreadableError("it holds no text")  # noqa: TRY301  # handled below, as other reasons to skip
    except (UnreadableError, KnowledgeBaseError, OSError) as error:
        lasts = isinstance(error, UnreadableError) and error.lasts
        unread = UnreadFile(num_bytes, mtime_ns, CUTTER, str(error)) if lasts and mtime_ns is not None else None
        return Decision("skipped", reason=reason_of(error), unread=unread)
    return Decision(kind, read=ReadFile(sha256, num_bytes, mtime_ns, reading, found_secret(reading.text)))


def _without_secret(file: FileEntry, known_files: KnownFiles, decision: Decision) -> Decision:
    """Return the decision, or one to skip the file if it holds a secret. A stored document may hold one after a run with `--hidden`."""
    if decision.document is not None:
        secret = next(iter(known_files.notes(decision.document, SECRET)), "")
    else:
        secret = decision.read.secret if decision.read is not None else ""
    if not secret or known_files.walk.hidden:
        return decision
    known_files.walk.left_out.add(file.path)
    return Decision("skipped", reason=f"holds {secret}{MAY_BE_READ}")


def plan(
    paths: Sequence[Path], store: AnyStore | None, *, hidden: bool = False, progress: Callable[[IndexProgress], None] | None = None
) -> Plan:
    """Return what `ingest` would do with the files below `paths`. Files are read; nothing is embedded or written."""
    known_files = KnownFiles(walk(paths, hidden=hidden))
    sources: dict[str, str] = {}
    if store is not None:
        known_files.load(store)
        sources = {path: source for source, path in store.source_paths()}
    walked = known_files.walk
    kinds: dict[Kind, list[str]] = {"new": [], "changed": [], "unchanged": [], "renamed": [], "skipped": []}
    partial: list[SkippedFile] = []
    with Readers() as readers:
        for number, file in enumerate(list(walked.files)):
            decision = decide(file, known_files, readers, is_local=None if store is None else store.is_local)
            kinds[decision.kind].append(file.source)
            if decision.kind == "skipped":
                walked.skipped.append(SkippedFile(file.source, decision.reason))
            elif decision.document is not None:
                partial += [SkippedFile(file.source, value) for value in known_files.notes(decision.document, INCOMPLETE)]
            elif decision.read is not None:
                partial += [SkippedFile(file.source, value) for value in decision.read.reading.missing]
            if progress is not None:
                progress(IndexProgress(file.source, number + 1, len(walked.files), 0))
    new, changed, unchanged, renamed = (tuple(kinds[kind]) for kind in ("new", "changed", "unchanged", "renamed"))
    is_empty = not (new or changed or unchanged or renamed)  # as on an unmounted disk, where `ingest` removes nothing
    removed = () if is_empty else tuple(sorted(sources.get(path, path) for path in known_files.vanished()))
    return Plan(new, changed, unchanged, renamed, removed, tuple(walked.skipped), tuple(partial))
