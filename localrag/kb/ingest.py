"""Read, chunk, embed, write: files become chunks of a knowledge base, one transaction for each document.

If a run is stopped, everything written stays, and the next run continues with the missing files. A file with the same size and modification
time is not read, even if it had no text; one with the same bytes is not cut; and a chunk that any document has already is not embedded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from localrag.errors import KnowledgeBaseError, UsageError
from localrag.kb.chunking import CUTTER, Passage, cut
from localrag.kb.embedding import EMBED_AT_ONCE, min_similarity, vectors_for
from localrag.kb.filters import FolderRule, is_unicode
from localrag.kb.names import has_control
from localrag.kb.plan import INCOMPLETE, SECRET, KnownFiles, Progress, ReadFile, decide, is_same
from localrag.kb.protocols import AnyStore, DocumentRow, Known, Unread
from localrag.kb.readers import UnreadableError
from localrag.kb.reading import Readers
from localrag.kb.walk import Found, Skipped, reason_of, walk
from localrag.tokens import Embedder


@dataclass(frozen=True, slots=True)
class Tagging:
    """Tags to add to those of the files. `given` replaces the tags given before, None keeps them; `rules` apply to this run.

    Raises UsageError for a tag that is not UTF-8 text or holds control characters.
    """

    given: tuple[str, ...] | None = None
    rules: tuple[FolderRule, ...] = ()

    def __post_init__(self) -> None:
        for tag in self.given or ():
            if not is_unicode(tag):
                raise UsageError(f"The tag {tag[:40]!r} is not UTF-8 text.", hint="Write it as UTF-8.")
            if has_control(tag):
                raise UsageError(f"The tag {tag[:40]!r} holds control characters.", hint="Write it without them.")

    def of(self, file: Found) -> dict[str, set[tuple[str, str]]]:
        """origin → the fields that this file gets."""
        found = {"rule": {("tag", tag) for rule in self.rules if rule.holds(file.source, file.path) for tag in rule.tags}}
        if self.given is not None:
            found["given"] = {("tag", tag) for tag in self.given if tag}
        return found


@dataclass(frozen=True, slots=True)
class IngestResult:
    """Numbers of documents by outcome, and the files that were skipped. `renamed` ones kept their chunks under another path.

    `num_embedded` chunks were embedded in this run; the knowledge base now holds `num_chunks`. `partial` names documents with parts
    without text.
    """

    added: int
    updated: int
    unchanged: int
    renamed: int
    removed: int
    num_embedded: int
    num_chunks: int
    skipped: tuple[Skipped, ...]
    partial: tuple[Skipped, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Fit for JSON."""
        named = {name: [each._asdict() for each in getattr(self, name)] for name in ("skipped", "partial")}
        return {**asdict(self), **named}


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
    """Bring a store up to date with the files below `paths`. Nobody else may index into it meanwhile.

    A document whose file is gone, or is left out now, is removed; one whose file cannot be read this time stays as it was and is listed in
    `skipped`. Without a `store`, `make_store` is called once a file could be read. Raises KnowledgeBaseError if no file below `paths` can
    be read.
    """
    with Readers() as readers:
        run = _Run(embedder, readers, store, make_store, KnownFiles(walk(paths, hidden=hidden)), tagging or Tagging(), progress)
        run.take_all()
    skipped = run.known.found.skipped
    if not run.added + run.updated + run.unchanged + run.renamed:
        raise _nothing_read(paths, skipped)
    removed, written = run.finish()
    return IngestResult(
        run.added,
        run.updated,
        run.unchanged,
        run.renamed,
        removed,
        run.num_embedded,
        written.num_chunks,
        tuple(skipped),
        tuple(run.partial),
    )


@dataclass(slots=True)
class _Run:
    """One run over the files: documents wait until they fill a batch, are embedded together, and written one by one."""

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
    partial: list[Skipped] = field(default_factory=list)
    _now_unread: dict[str, Unread] = field(default_factory=dict)
    _kept: list[tuple[Found, int]] = field(default_factory=list)  # with document ids
    _stamps: list[tuple[int, int | None]] = field(default_factory=list)
    _waiting: list[_Prepared] = field(default_factory=list)
    _num_read: int = 0

    def take_all(self) -> None:
        if self.store is not None:
            self.known.load(self.store)
        for file in self.known.found.files:
            self._num_read += 1
            self._take(file)
            num_waiting = sum(len(prepared.passages) for prepared in self._waiting)
            if num_waiting >= EMBED_AT_ONCE or (num_waiting and self._num_read == len(self.known.found.files)):
                self._write()
            self._report(file.source)

    def finish(self) -> tuple[int, AnyStore]:
        """Remove vanished documents and update the notes on unchanged ones; return the number removed and the store."""
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
        """Read and cut one file, unless it is unchanged."""
        decision = decide(file, self.known, self.readers, is_local=None if self.store is None else self.store.is_local)
        if decision.unread is not None:
            self._now_unread[file.path] = decision.unread
        if decision.document is not None:
            if decision.kind == "renamed":
                self._rename(file, decision.document)
            if decision.is_noted:
                self._stamps.append((decision.document.id, decision.mtime_ns))
            self._keep(file, decision.document, is_renamed=decision.kind == "renamed")
        elif decision.read is None:
            self._skip(file, decision.reason)
        else:
            self._prepare(file, decision.read)

    def _prepare(self, file: Found, read: ReadFile) -> None:
        reading = read.reading
        try:
            passages = cut(reading, self.embedder)
            if not passages:
                raise UnreadableError("it holds no text")  # noqa: TRY301  # one way to skip
        except (UnreadableError, KnowledgeBaseError) as error:
            self._skip(file, reason_of(error))
            return
        fields = (*(pair for pair in reading.fields if pair[0] not in (INCOMPLETE, SECRET)), *read.notes())
        row = DocumentRow(
            file.path, file.source, read.sha256, read.num_bytes, reading.title, reading.tags, fields, mtime_ns=read.mtime_ns, cutter=CUTTER
        )
        self.partial += [Skipped(file.source, line) for line in reading.missing]
        self._waiting.append(_Prepared(file, row, passages))

    def _keep(self, file: Found, document: Known, *, is_renamed: bool = False) -> None:
        self.renamed += is_renamed
        self.unchanged += not is_renamed
        self.partial += [Skipped(file.source, line) for line in self.known.notes(document, INCOMPLETE)]
        self._kept.append((file, document.id))

    def _skip(self, file: Found, reason: str) -> None:
        self.known.found.skipped.append(Skipped(file.source, reason))

    def _rename(self, file: Found, document: Known) -> None:
        """Rename a stored document as its file was."""
        assert self.store is not None
        with self.store.writing():
            self.store.move_document(document.id, file.path, file.source)

    def _write(self) -> None:
        """Embed the waiting documents and commit them, one transaction for each."""
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
        """The store, made if need be. Another run may have made it first; documents that it wrote are not embedded again."""
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
        """(document id, origin, fields) of unchanged documents whose fields change."""
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
        hint="Name a folder that holds documents, text or source files. Hidden and ignored files are read when they are named one by one; "
        "--hidden reads all hidden files, and those that may hold a secret.",
        num_skipped=len(skipped),
        reasons=dict(reasons.most_common(20)),
    )
