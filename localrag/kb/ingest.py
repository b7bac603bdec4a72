"""Read, chunk, embed, write: files become chunks of a knowledge base, a document a transaction.

Whatever stops a run, what was written stays, and the next run goes on with the files that are missing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from localrag.errors import KnowledgeBaseError
from localrag.kb.chunking import Passage, cut
from localrag.kb.readers import UnreadableError, read
from localrag.kb.store import DocumentRow, Store
from localrag.kb.walk import Found, Skipped, read_bytes, walk
from localrag.tokens import Embedder

EMBED_AT_ONCE = 64
"""Chunks that are embedded in one call, of as many documents as it takes: short documents one by one took 1.7 times the CPU time."""


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
class IngestResult:
    """Documents by what became of them, and what was left out.

    `num_embedded` chunks were embedded in this run; the knowledge base now holds `num_chunks`.
    """

    added: int
    updated: int
    unchanged: int
    removed: int
    num_embedded: int
    num_chunks: int
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, object]:
        """Fit for JSON."""
        return {**asdict(self), "skipped": [skip._asdict() for skip in self.skipped]}


@dataclass(frozen=True, slots=True)
class _Prepared:
    row: DocumentRow
    passages: list[Passage]


def ingest(
    paths: Sequence[Path],
    embedder: Embedder,
    *,
    known: Mapping[str, str],
    open_store: Callable[[], Store],
    progress: Callable[[Progress], None] | None = None,
) -> IngestResult:
    """Brings a store up to date with the files below `paths`.

    `known` maps the absolute path of each stored document to the sha256 of its bytes: the same bytes are not embedded again. A document
    whose file is gone, or is left out now, is removed; one whose file cannot be read this time stays as it was, and is named in `skipped`.
    `open_store` is called when a file could be read, and not before. KnowledgeBaseError if no file below `paths` can be read.
    """
    found = walk(paths)
    run = _Run(embedder, known, open_store, skipped=list(found.skipped))
    for num_read, file in enumerate(found.files, start=1):
        run.take(file)
        if num_read == len(found.files):
            run.write()
        if progress:
            progress(Progress(file.source, num_read - run.num_waiting, len(found.files), run.num_embedded))
    if not run.added + run.updated + run.unchanged:
        raise _nothing_read(paths, run.skipped)
    vanished = found.vanished(list(known))
    store = open_store()
    if vanished:
        with store.writing():
            store.remove_documents(vanished)
    return IngestResult(run.added, run.updated, run.unchanged, len(vanished), run.num_embedded, store.num_chunks, tuple(run.skipped))


@dataclass(slots=True)
class _Run:
    """One run over the files: documents are gathered until they fill a batch, embedded together, and written one by one."""

    embedder: Embedder
    known: Mapping[str, str]
    open_store: Callable[[], Store]
    skipped: list[Skipped]
    added: int = 0
    updated: int = 0
    unchanged: int = 0
    num_embedded: int = 0
    _waiting: list[_Prepared] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take(self, file: Found) -> None:
        """Reads and cuts one file; embeds and writes once enough is waiting."""
        try:
            data = read_bytes(file.path)
            sha256 = hashlib.sha256(data).hexdigest()
            if self.known.get(file.path) == sha256:
                self.unchanged += 1
                return
            self._waiting.append(_prepare(file, data, sha256, self.embedder))
        except (UnreadableError, KnowledgeBaseError, OSError) as error:
            self.skipped.append(Skipped(file.source, _reason(error)))
            return
        if sum(len(prepared.passages) for prepared in self._waiting) >= EMBED_AT_ONCE:
            self.write()

    def write(self) -> None:
        """Embeds what waits, and commits it, a document a transaction."""
        if not self._waiting:
            return
        store = self.open_store()
        store.check_embedder(self.embedder.fingerprint, self.embedder.dim)  # before the work, and again in the transaction
        vectors = self.embedder.embed([passage.embedded for prepared in self._waiting for passage in prepared.passages])
        at = 0
        for prepared in self._waiting:
            own = vectors[at : at + len(prepared.passages)]
            at += len(own)
            with store.writing():
                store.claim_embedder(self.embedder.fingerprint, self.embedder.dim)
                store.put_document(prepared.row, prepared.passages, [vector.astype("<f4").tobytes() for vector in own])
            self.num_embedded += len(own)
            self.updated += prepared.row.path in self.known
            self.added += prepared.row.path not in self.known
        self._waiting.clear()


def _prepare(file: Found, data: bytes, sha256: str, embedder: Embedder) -> _Prepared:
    reading = read(file.path, data)
    passages = cut(reading, embedder)
    if not passages:
        raise UnreadableError("it holds no text")
    return _Prepared(DocumentRow(file.path, file.source, sha256, len(data), reading.title, reading.tags), passages)


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
        hint="Name a folder that holds Markdown, text or source files. Hidden and ignored files are read when they are named one by one.",
        num_skipped=len(skipped),
        reasons=dict(reasons.most_common(20)),
    )
