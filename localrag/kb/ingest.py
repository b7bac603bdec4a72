"""Read, chunk, embed, write: files become chunks of a knowledge base, a document a transaction.

Whatever stops a run, what was written stays, and the next run goes on with the files that are missing. A file of the same size and time of
change is not read, also where there was no text to index in it; one of the same bytes is not cut; and a chunk that is known already, of
whatever document, is not embedded.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os.path import lexists
from pathlib import Path, PurePath
from types import MappingProxyType

from localrag.errors import KnowledgeBaseError
from localrag.kb.chunking import CUTTER, Passage, cut
from localrag.kb.documents import DocumentRow, Known, Unread
from localrag.kb.filters import FolderRule
from localrag.kb.readers import UnreadableError
from localrag.kb.reading import Readers
from localrag.kb.truth import AnyStore
from localrag.kb.walk import Found, Skipped, Walk, is_unchanged, read_file, walk
from localrag.tokens import Embedder

EMBED_AT_ONCE = 64
"""Chunks that are embedded in one call, of as many documents as it takes: short documents one by one took 1.7 times the CPU time."""

_EMBED_AT_MOST = 512  # of a long document, so that its progress shows


@dataclass(frozen=True, slots=True)
class Progress:
    """`num_done` of `num_files` files are done with: stored, unchanged or skipped. `num_embedded` chunks were embedded in this run so far.

    `source` is the file that was read last; it may still wait for others to be embedded with.
    """

    source: str
    num_done: int
    num_files: int
    num_embedded: int


@dataclass(frozen=True, slots=True)
class Tagging:
    """The tags that documents get beside their own. `given` replaces those given before; None leaves them. `rules` hold for this run."""

    given: tuple[str, ...] | None = None
    rules: tuple[FolderRule, ...] = ()

    def of(self, file: Found) -> dict[str, set[tuple[str, str]]]:
        """By origin: the fields that this file is to have of it."""
        found = {"rule": {("tag", tag) for rule in self.rules if rule.holds(file.source, file.path) for tag in rule.tags}}
        if self.given is not None:
            found["given"] = {("tag", tag) for tag in self.given if tag}
        return found


@dataclass(frozen=True, slots=True)
class IngestResult:
    """Documents by what became of them, and what was left out. `renamed` ones kept their chunks under another path.

    `num_embedded` chunks were embedded in this run; the knowledge base now holds `num_chunks`.
    """

    added: int
    updated: int
    unchanged: int
    renamed: int
    removed: int
    num_embedded: int
    num_chunks: int
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, object]:
        """Fit for JSON."""
        return {**asdict(self), "skipped": [skip._asdict() for skip in self.skipped]}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would do, as far as that shows without reading: the sources of new files, of those that may have changed, and so on."""

    new: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, object]:
        """Fit for JSON."""
        return {**asdict(self), "skipped": [skip._asdict() for skip in self.skipped]}


@dataclass(frozen=True, slots=True)
class _Prepared:
    file: Found
    row: DocumentRow
    passages: list[Passage]


def ingest(
    paths: Sequence[Path],
    embedder: Embedder,
    *,
    store: AnyStore | None,
    make_store: Callable[[], AnyStore],
    progress: Callable[[Progress], None] | None = None,
    tagging: Tagging | None = None,
    hidden: bool = False,
) -> IngestResult:
    """Brings a store up to date with the files below `paths`. Nobody else may index into it meanwhile.

    A document whose file is gone, or is left out now, is removed; one whose file cannot be read this time stays as it was, and is named in
    `skipped`. Without a `store`, `make_store` is called when a file could be read, and not before. KnowledgeBaseError if no file below
    `paths` can be read.
    """
    with Readers() as readers:
        run = _Run(embedder, readers, store, make_store, walk(paths, hidden=hidden), tagging or Tagging(), progress)
        run.take_all()
    if not run.added + run.updated + run.unchanged + run.renamed:
        raise _nothing_read(paths, run.found.skipped)
    removed, written = run.finish()
    return IngestResult(
        run.added, run.updated, run.unchanged, run.renamed, removed, run.num_embedded, written.num_chunks, tuple(run.found.skipped)
    )


def plan(
    paths: Sequence[Path], known: Mapping[str, Known], unread: Mapping[str, Unread] = MappingProxyType({}), *, hidden: bool = False
) -> Plan:
    """What `ingest` would do with the files below `paths`. A file with a new name counts as new, and under its old one as removed."""
    found = walk(paths, hidden=hidden)
    kinds: dict[str, list[str]] = {"new": [], "changed": [], "unchanged": []}
    for file in found.files:
        document, without_text = known.get(file.path), unread.get(file.path)
        if document is not None and _is_current(file, document):
            kinds["unchanged"].append(file.source)
        elif without_text is not None and _is_current(file, without_text):
            found.skipped.append(Skipped(file.source, without_text.reason))
        else:
            kinds["new" if document is None else "changed"].append(file.source)
    removed = tuple(sorted(found.vanished(list(known))))
    new, changed, unchanged = (tuple(sources) for sources in kinds.values())
    return Plan(new, changed, unchanged, removed, tuple(found.skipped))


@dataclass(slots=True)
class _Run:
    """One run over the files: documents are gathered until they fill a batch, embedded together, and written one by one."""

    embedder: Embedder
    readers: Readers
    store: AnyStore | None
    make_store: Callable[[], AnyStore]
    found: Walk
    tagging: Tagging
    progress: Callable[[Progress], None] | None
    added: int = 0
    updated: int = 0
    unchanged: int = 0
    renamed: int = 0
    num_embedded: int = 0
    _known: dict[str, Known] = field(default_factory=dict)
    _unread: dict[str, Unread] = field(default_factory=dict)  # as it was before
    _now_unread: dict[str, Unread] = field(default_factory=dict)
    _gone: dict[str, list[str]] | None = None  # sha256 to the paths of stored documents whose files are not there any more
    _kept: list[tuple[Found, int]] = field(default_factory=list)  # with their documents' ids
    _stamps: list[tuple[int, int | None]] = field(default_factory=list)
    _waiting: list[_Prepared] = field(default_factory=list)
    _num_read: int = 0

    def take_all(self) -> None:
        if self.store is not None:
            self._known, self._unread = self.store.documents(), self.store.unread()
        for file in self.found.files:
            self._num_read += 1
            self._take(file)
            num_waiting = sum(len(prepared.passages) for prepared in self._waiting)
            if num_waiting >= EMBED_AT_ONCE or (num_waiting and self._num_read == len(self.found.files)):
                self._write()
            self._report(file.source)

    def finish(self) -> tuple[int, AnyStore]:
        """Removes what vanished, and notes what is to be known of unchanged documents; the number of documents removed."""
        store = self._opened()
        vanished = self.found.vanished(list(self._known))
        retagged = self._retagged(store)
        if vanished or retagged:
            with store.writing():
                store.remove_documents(vanished)
                for document_id, origin, fields in retagged:
                    store.set_fields(document_id, sorted(fields), origin)
        unread = self._unread_before()
        if self._stamps or unread != self._now_unread:
            with store.writing(moves_on=False):
                store.stamp_documents(self._stamps)
                store.set_unread(unread, self._now_unread)
        return len(vanished), store

    def _take(self, file: Found) -> None:
        """Reads and cuts one file, unless it is known."""
        if self._is_known(file):
            return
        known = self._known.get(file.path)
        try:
            data, mtime_ns = read_file(file.path)
        except (UnreadableError, OSError) as error:
            self._skip(file, error)
            return
        sha256 = hashlib.sha256(data).hexdigest()
        if known is not None and (known.sha256, known.cutter) == (sha256, CUTTER):
            self._stamps.append((known.id, mtime_ns))
            self._keep(file, known.id)
            return
        if (known is None or known.sha256 != sha256) and self._renamed(file, sha256, mtime_ns):
            return
        try:
            reading = self.readers.read(file.path, data)
            passages = cut(reading, self.embedder)
            if not passages:
                raise UnreadableError("it holds no text")  # noqa: TRY301  # one way to skip
        except (UnreadableError, KnowledgeBaseError, OSError) as error:
            self._skip(file, error)
            if mtime_ns is not None and isinstance(error, UnreadableError) and error.lasts:
                self._now_unread[file.path] = Unread(len(data), mtime_ns, CUTTER, str(error))
            return
        row = DocumentRow(
            file.path, file.source, sha256, len(data), reading.title, reading.tags, reading.fields, mtime_ns=mtime_ns, cutter=CUTTER
        )
        self._waiting.append(_Prepared(file, row, passages))

    def _is_known(self, file: Found) -> bool:
        """Whether a file is as it was when it was read; then what was found holds again."""
        known, unread = self._known.get(file.path), self._unread.get(file.path)
        if known is not None and _is_current(file, known):
            self._keep(file, known.id)
        elif unread is not None and _is_current(file, unread):
            self._now_unread[file.path] = unread
            self.found.skipped.append(Skipped(file.source, unread.reason))
        else:
            return False
        return True

    def _keep(self, file: Found, document_id: int) -> None:
        self.unchanged += 1
        self._kept.append((file, document_id))

    def _skip(self, file: Found, error: Exception) -> None:
        self.found.skipped.append(Skipped(file.source, _reason(error)))

    def _renamed(self, file: Found, sha256: str, mtime_ns: int | None) -> bool:
        """Whether this file is a stored document under a new name, which it then has. By another ending it is read as something else."""
        if self.store is None:
            return False
        if self._gone is None:
            self._gone = self._find_gone()
        suffix = PurePath(file.path).suffix.lower()
        old = next((path for path in self._gone.get(sha256, ()) if PurePath(path).suffix.lower() == suffix), None)
        if old is None or self._known[old].cutter != CUTTER:
            return False
        self._gone[sha256].remove(old)
        document = self._known.pop(old)
        self._known[file.path] = document
        with self.store.writing():
            self.store.move_document(document.id, file.path, file.source)
            self.store.stamp_documents([(document.id, mtime_ns)])
        self.renamed += 1
        self._kept.append((file, document.id))
        return True

    def _find_gone(self) -> dict[str, list[str]]:
        below = set(self.found.vanished(list(self._known)))
        is_local = self.store is not None and self.store.is_local
        here = {file.path for file in self.found.files}
        gone = defaultdict(list)
        for path, known in self._known.items():
            if path in below or (is_local and path not in here and not lexists(path)):
                gone[known.sha256].append(path)
        return gone

    def _write(self) -> None:
        """Embeds what waits and is not known, and commits it, a document a transaction."""
        store = self._opened()
        store.check_embedder(self.embedder.fingerprint, self.embedder.dim)  # before the work, and again in the transaction
        passages = {passage.sha256: passage for prepared in self._waiting for passage in prepared.passages}
        vectors = store.vectors_of(list(passages))
        missing = [sha256 for sha256 in passages if sha256 not in vectors]
        for at in range(0, len(missing), _EMBED_AT_MOST):
            batch = missing[at : at + _EMBED_AT_MOST]
            embedded = self.embedder.embed([passages[sha256].embedded for sha256 in batch])
            vectors.update((sha256, vector.astype("<f4").tobytes()) for sha256, vector in zip(batch, embedded, strict=True))
            self.num_embedded += len(batch)
            if at + _EMBED_AT_MOST < len(missing):
                self._report(self._waiting[-1].file.source)
        for prepared in self._waiting:
            with store.writing():
                store.claim_embedder(self.embedder.fingerprint, self.embedder.dim)
                document_id = store.put_document(prepared.row, prepared.passages, vectors)
                for origin, fields in self.tagging.of(prepared.file).items():
                    store.set_fields(document_id, sorted(fields), origin)
            self.updated += prepared.row.path in self._known
            self.added += prepared.row.path not in self._known
        self._waiting.clear()

    def _opened(self) -> AnyStore:
        """The store; where this run makes it, another one may have been faster, and what that one wrote is not embedded again."""
        if self.store is None:
            self.store = self.make_store()
            self._known = self.store.documents()
            waiting, self._waiting = self._waiting, []
            for prepared in waiting:
                known = self._known.get(prepared.row.path)
                if known is not None and (known.sha256, known.cutter) == (prepared.row.sha256, CUTTER):
                    self._keep(prepared.file, known.id)
                else:
                    self._waiting.append(prepared)
        return self.store

    def _unread_before(self) -> dict[str, Unread]:
        """What was known of the files that were looked at, and of those that vanished."""
        paths = {file.path for file in self.found.files}.union(self.found.vanished(list(self._unread)))
        return {path: unread for path, unread in self._unread.items() if path in paths}

    def _retagged(self, store: AnyStore) -> list[tuple[int, str, set[tuple[str, str]]]]:
        """(document id, origin, fields) where an unchanged document is to have other ones than it has."""
        present = store.fields_by_origin()
        return [
            (document_id, origin, fields)
            for file, document_id in self._kept
            for origin, fields in self.tagging.of(file).items()
            if present.get((document_id, origin), set()) != fields
        ]

    def _report(self, source: str) -> None:
        if self.progress is not None:
            self.progress(Progress(source, self._num_read - len(self._waiting), len(self.found.files), self.num_embedded))


def _is_current(file: Found, known: Known | Unread) -> bool:
    """Whether a file is what is known of it, as far as that shows without reading it."""
    return known.cutter == CUTTER and is_unchanged(file.path, known.num_bytes, known.mtime_ns)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)


def _nothing_read(paths: Sequence[Path], skipped: list[Skipped]) -> KnowledgeBaseError:
    where = ", ".join(str(path) for path in paths)
    reasons = Counter(reason for _, reason in skipped)
    why = "; ".join(f"{num} × {reason}" for reason, num in reasons.most_common(5)) or "there are no files"
    return KnowledgeBaseError(
        f"Nothing to index in {where}: {why}.",
        hint="Name a folder that holds documents, text or source files. Hidden and ignored files are read when they are named one by one.",
        num_skipped=len(skipped),
        reasons=dict(reasons.most_common(20)),
    )
