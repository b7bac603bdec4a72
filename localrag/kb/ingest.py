"""Read, chunk, embed, write: files become chunks of a knowledge base, a document a transaction.

Whatever stops a run, what was written stays, and the next run goes on with the files that are missing. A file of the same size and time of
change is not read, also where there was no text to index in it; one of the same bytes is not cut; and a chunk that is known already, of
whatever document, is not embedded.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from localrag.errors import KnowledgeBaseError, UsageError
from localrag.kb.calibration import min_similarity
from localrag.kb.chunking import CUTTER, Passage, cut
from localrag.kb.documents import DocumentRow, Known, Unread
from localrag.kb.embedding import EMBED_AT_ONCE, vectors_for
from localrag.kb.filters import FolderRule, is_unicode
from localrag.kb.known_files import KnownFiles, is_same
from localrag.kb.readers import UnreadableError
from localrag.kb.reading import Readers
from localrag.kb.truth import AnyStore
from localrag.kb.walk import Found, Skipped, read_file, reason_of, walk
from localrag.tokens import Embedder


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
    """The tags that documents get beside their own. `given` replaces those given before; None leaves them. `rules` hold for this run.

    UsageError for a tag that is not UTF-8 text.
    """

    given: tuple[str, ...] | None = None
    rules: tuple[FolderRule, ...] = ()

    def __post_init__(self) -> None:
        for tag in self.given or ():
            if not is_unicode(tag):
                raise UsageError(f"The tag {tag[:40]!r} is not UTF-8 text.", hint="Write it as UTF-8.")

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
        run = _Run(embedder, readers, store, make_store, KnownFiles(walk(paths, hidden=hidden)), tagging or Tagging(), progress)
        run.take_all()
    skipped = run.known.found.skipped
    if not run.added + run.updated + run.unchanged + run.renamed:
        raise _nothing_read(paths, skipped)
    removed, written = run.finish()
    return IngestResult(run.added, run.updated, run.unchanged, run.renamed, removed, run.num_embedded, written.num_chunks, tuple(skipped))


@dataclass(slots=True)
class _Run:
    """One run over the files: documents are gathered until they fill a batch, embedded together, and written one by one."""

    embedder: Embedder
    readers: Readers
    store: AnyStore | None
    make_store: Callable[[], AnyStore]
    known: KnownFiles
    tagging: Tagging
    progress: Callable[[Progress], None] | None
    added: int = 0
    updated: int = 0
    unchanged: int = 0
    renamed: int = 0
    num_embedded: int = 0
    _now_unread: dict[str, Unread] = field(default_factory=dict)
    _kept: list[tuple[Found, int]] = field(default_factory=list)  # with their documents' ids
    _stamps: list[tuple[int, int | None]] = field(default_factory=list)
    _waiting: list[_Prepared] = field(default_factory=list)
    _num_read: int = 0

    def take_all(self) -> None:
        if self.store is not None:
            self.known.documents, self.known.unread = self.store.documents(), self.store.unread()
        for file in self.known.found.files:
            self._num_read += 1
            self._take(file)
            num_waiting = sum(len(prepared.passages) for prepared in self._waiting)
            if num_waiting >= EMBED_AT_ONCE or (num_waiting and self._num_read == len(self.known.found.files)):
                self._write()
            self._report(file.source)

    def finish(self) -> tuple[int, AnyStore]:
        """Removes what vanished, and notes what is to be known of unchanged documents; the number of documents removed."""
        store = self._opened()
        vanished = self.known.vanished()
        retagged = self._retagged(store)
        if vanished or retagged:
            with store.writing():
                store.remove_documents(vanished)
                for document_id, origin, fields in retagged:
                    store.set_fields(document_id, sorted(fields), origin)
        if not store.is_local:
            with store.writing(moves_on=False):
                store.adopt([document_id for _, document_id in self._kept])
        unread = self.known.unread_before()
        if self._stamps or unread != self._now_unread:
            with store.writing(moves_on=False):
                store.stamp_documents(self._stamps)
                store.set_unread(unread, self._now_unread)
        return len(vanished), store

    def _take(self, file: Found) -> None:
        """Reads and cuts one file, unless it is known."""
        if document := self.known.document(file):
            self._keep(file, document)
            return
        if without_text := self.known.without_text(file):
            self._now_unread[file.path] = without_text
            self._skip(file, without_text.reason)
            return
        try:
            data, mtime_ns = read_file(file.path)
        except (UnreadableError, OSError) as error:
            self._skip(file, reason_of(error))
            return
        sha256 = hashlib.sha256(data).hexdigest()
        known = self.known.documents.get(file.path)
        if known is not None and is_same(known, sha256):
            self._stamps.append((known.id, mtime_ns))
            self._keep(file, known)
            return
        if (known is None or known.sha256 != sha256) and self._renamed(file, sha256, mtime_ns):
            return
        try:
            reading = self.readers.read(file.path, data)
            passages = cut(reading, self.embedder)
            if not passages:
                raise UnreadableError("it holds no text")  # noqa: TRY301  # one way to skip
        except (UnreadableError, KnowledgeBaseError, OSError) as error:
            self._skip(file, reason_of(error))
            if mtime_ns is not None and isinstance(error, UnreadableError) and error.lasts:
                self._now_unread[file.path] = Unread(len(data), mtime_ns, CUTTER, str(error))
            return
        row = DocumentRow(
            file.path, file.source, sha256, len(data), reading.title, reading.tags, reading.fields, mtime_ns=mtime_ns, cutter=CUTTER
        )
        self._waiting.append(_Prepared(file, row, passages))

    def _keep(self, file: Found, document: Known) -> None:
        self.unchanged += 1
        self._kept.append((file, document.id))

    def _skip(self, file: Found, reason: str) -> None:
        self.known.found.skipped.append(Skipped(file.source, reason))

    def _renamed(self, file: Found, sha256: str, mtime_ns: int | None) -> bool:
        """Whether this file is a stored document under a new name, which it then has."""
        if self.store is None:
            return False
        document = self.known.take_renamed(file, sha256, is_local=self.store.is_local)
        if document is None:
            return False
        with self.store.writing():
            self.store.move_document(document.id, file.path, file.source)
            self.store.stamp_documents([(document.id, mtime_ns)])
        self.renamed += 1
        self._kept.append((file, document.id))
        return True

    def _write(self) -> None:
        """Embeds what waits and is not known, and commits it, a document a transaction."""
        store = self._opened()
        store.check_embedder(self.embedder.fingerprint, self.embedder.dim)  # before the work, and again in the transaction
        passages = [passage for prepared in self._waiting for passage in prepared.passages]
        threshold = min_similarity(self.embedder) if store.embedder is None else None
        vectors = vectors_for(store, passages, self.embedder, partial(self._embedded, self.num_embedded))
        for prepared in self._waiting:
            with store.writing():
                store.claim_embedder(self.embedder.fingerprint, self.embedder.dim, threshold)
                document_id = store.put_document(prepared.row, prepared.passages, vectors)
                for origin, fields in self.tagging.of(prepared.file).items():
                    store.set_fields(document_id, sorted(fields), origin)
            self.updated += prepared.row.path in self.known.documents
            self.added += prepared.row.path not in self.known.documents
        self._waiting.clear()

    def _embedded(self, num_before: int, done: int, total: int) -> None:
        self.num_embedded = num_before + done
        if done < total:
            self._report(self._waiting[-1].file.source)

    def _opened(self) -> AnyStore:
        """The store; where this run makes it, another one may have been faster, and what that one wrote is not embedded again."""
        if self.store is None:
            self.store = self.make_store()
            self.known.documents = self.store.documents()
            waiting, self._waiting = self._waiting, []
            for prepared in waiting:
                known = self.known.documents.get(prepared.row.path)
                if known is not None and is_same(known, prepared.row.sha256):
                    self._keep(prepared.file, known)
                else:
                    self._waiting.append(prepared)
        return self.store

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
            self.progress(Progress(source, self._num_read - len(self._waiting), len(self.known.found.files), self.num_embedded))


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
