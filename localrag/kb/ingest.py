"""Index files: read, cut, embed and store what changed; embed all with another embedder; calibrate an embedder's relevance threshold.

A passage whose text is already stored, in any document, is not embedded again.

Cosine similarities of different embedders are not comparable: unrelated passages are near 0 for one and near 0.7 for another. Before the
first vectors of an embedder are stored, it is therefore measured on pairs of questions and answers. The relevance threshold lies between
the similarity of unrelated pairs and that of matching pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from localrag.errors import KnowledgeBaseError, UsageError
from localrag.kb.chunking import CUTTER, Passage, cut
from localrag.kb.database import embedded
from localrag.kb.filters import FolderRule, is_unicode
from localrag.kb.names import has_control
from localrag.kb.plan import INCOMPLETE, SECRET, IndexProgress, KnownFiles, ReadFile, decide, is_same
from localrag.kb.protocols import AnyStore, DocumentRow, StoredDocument, UnreadFile
from localrag.kb.readers import UnreadableError
from localrag.kb.reading import Readers
from localrag.kb.walk import FileEntry, SkippedFile, reason_of, walk
from localrag.text.tokens import Embedder, embed_queries

EMBED_AT_ONCE = 128
"""Chunks to embed in one call, from several documents if they are short. One document at a time, short ones took 1.7 times the CPU time.
Chunks in a batch that is not yet written are lost if the process is killed, so a run begins with one document."""
_GROWTH = 8
"""Largest size of a batch, in chunks for each one embedded before. With 2, indexing the handbook (145 chunks) took 17 % longer."""

_MAX_AT_ONCE = 512  # chunks of a long document per call, so that progress is reported in between

SHARE = 0.47
"""Position of the threshold between the similarity of unrelated passages (0) and that of answers (1). all-MiniLM-L6-v2 has 0.02 and 0.62
on these pairs, which gives the threshold 0.30 that was measured on other questions (see retrieve.MIN_SIMILARITY)."""
MIN_GAP = 0.05
"""Least difference between the two similarities. An embedder with a smaller one does not tell answers from unrelated passages."""

PAIRS = (
    ("How long do eggs have to boil to be hard?", "For a firm yolk, leave the eggs in boiling water for ten minutes, then cool them."),
    ("What is the capital of Kenya?", "Nairobi, founded in 1899 as a railway depot, is Kenya's capital and its largest city."),
    ("Why do leaves turn red in autumn?", "When chlorophyll breaks down in the fall, red anthocyanins become visible in the foliage."),
    (
        "How do I reset the router's password?",
        "Hold the small button on the back of the router for ten seconds; the factory login works again.",
    ),
    ("When was the printing press invented?", "Johannes Gutenberg built his press with movable type in Mainz around 1440."),
    ("Which vitamin prevents scurvy?", "Sailors without fresh fruit fell ill with scurvy, for they lacked vitamin C."),
    ("What notice period applies to the lease?", "The tenant may terminate the rental agreement by giving three months' written notice."),
    ("How fast does sound travel in air?", "At 20 degrees Celsius sound moves through air at about 343 metres per second."),
    ("What should I do about a flat bicycle tyre?", "Take the wheel off, find the hole in the inner tube, and glue a patch on it."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci worked on the portrait of Lisa Gherardini for many years."),
    (
        "How is the interest on savings taxed?",
        "Earnings on bank deposits above the allowance are subject to a withholding tax of 25 percent.",
    ),
    ("How do I undo the last commit in git?", "git reset --soft HEAD~1 takes back the most recent commit and keeps its changes staged."),
    ("What do bees make honey from?", "Worker bees collect the nectar of flowers and thicken it into honey in the comb."),
    ("At what temperature does iron melt?", "Iron becomes liquid at 1,538 degrees Celsius; cast iron at considerably less."),
    (
        "How often should a dog be vaccinated?",
        "After the puppy's first shots, most vaccines for dogs are refreshed every one to three years.",
    ),
    (
        "Why is the night sky dark?",
        "The universe is of finite age, so the light of the most distant stars has not reached us; hence darkness.",
    ),
    ("What are the symptoms of the flu?", "Influenza begins suddenly, with fever, aching limbs, headache and a dry cough."),
    ("How many players does a football team have?", "In association football each side fields eleven players, one of whom keeps the goal."),
    (
        "How do I prune tomato plants?",
        "Break out the side shoots of the tomatoes every week so that the plant's strength goes into its fruit.",
    ),
    (
        "What caused the fall of the Berlin Wall?",
        "Mass protests and a botched press conference in November 1989 opened the border in Berlin.",
    ),
    ("How does a heat pump work?", "It evaporates a refrigerant with heat from outside, compresses it, and gives the heat off indoors."),
    ("Which key is Beethoven's fifth symphony in?", "The Fifth by Ludwig van Beethoven stands in C minor and ends in a radiant C major."),
    ("How can I get a wine stain out of a carpet?", "Dab the red wine up at once, then put salt or soda water on the rug; never rub it."),
    (
        "When does the warranty on the washing machine end?",
        "The manufacturer guarantees this washer for 24 months from the date of purchase.",
    ),
)
"""24 questions on different topics, each with a passage that answers it. Used to calibrate an embedder."""


def vectors_for(
    store: AnyStore, passages: Iterable[Passage], embedder: Embedder, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> dict[bytes, bytes]:
    """Return sha256 → vector (float32 bytes) of each passage, embedding only those that are not stored.

    `progress(done, total)` is called after each batch.
    """
    texts = {passage.sha256: passage.embedded for passage in passages}
    vectors = store.vectors_of(list(texts))
    missing = [sha256 for sha256 in texts if sha256 not in vectors]
    for at in range(0, len(missing), _MAX_AT_ONCE):
        batch = missing[at : at + _MAX_AT_ONCE]
        embedded = embedder.embed([texts[sha256] for sha256 in batch])
        vectors.update((sha256, vector.astype("<f4").tobytes()) for sha256, vector in zip(batch, embedded, strict=True))
        progress(at + len(batch), len(missing))
    return vectors


def min_similarity(embedder: Embedder) -> float | None:
    """Measure the least cosine similarity of a relevant passage; None if the embedder does not tell answers from unrelated passages."""
    import numpy as np  # noqa: PLC0415  # heavy

    if any(embedder.count(text) > embedder.max_tokens for pair in PAIRS for text in pair):
        return None
    questions, passages = (list(texts) for texts in zip(*PAIRS, strict=True))
    similarities = embed_queries(embedder, questions) @ embedder.embed(passages).T
    answers = float(np.median(similarities.diagonal()))
    unrelated = float(np.median(similarities[~np.eye(len(PAIRS), dtype=bool)]))
    if not answers - unrelated >= MIN_GAP:
        return None
    return max(0.0, unrelated + SHARE * (answers - unrelated))


@dataclass(frozen=True, slots=True)
class ReembedResult:
    """The number of passages in the knowledge base, and of texts that were embedded in this run: fewer if an earlier one was interrupted,
    and none if the embedder is the same.
    """

    num_chunks: int
    num_embedded: int
    dim: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def reembed(store: AnyStore, embedder: Embedder, progress: Callable[[int, int], None] = lambda _done, _total: None) -> ReembedResult:
    """Embed all passages with another embedder, beside the vectors in use, and switch to the new ones in one transaction.

    The caller holds the index lock. Searches go on with the old vectors meanwhile. An interrupted run leaves those as they are, and the
    next one goes on where it stopped. Passages keep their ids, feedback and text: they are not cut again, so KnowledgeBaseError is raised,
    without any change, for a passage that is too long for the embedder. `progress(done, total)` is called after each batch.
    """
    num_chunks, num_embedded = store.num_chunks, 0
    if store.embedder == (embedder.fingerprint, embedder.dim):
        return ReembedResult(num_chunks, 0, embedder.dim)
    threshold = min_similarity(embedder)
    with store.writing(moves_on=False):
        store.stage_embedder(embedder.fingerprint, embedder.dim)
    after = 0
    while batch := store.unstaged(after, EMBED_AT_ONCE):
        texts = {one.sha256: embedded(one.heading, one.text) for one in batch}
        longest = max(texts.values(), key=embedder.count)
        if embedder.count(longest) > embedder.max_tokens:
            raise KnowledgeBaseError(
                f"A passage has {embedder.count(longest)} tokens, but the embedder takes at most {embedder.max_tokens}.",
                hint="The knowledge base is unchanged. Index its documents into a new one with this embedder.",
                num_tokens=embedder.count(longest),
                max_tokens=embedder.max_tokens,
            )
        rows = embedder.embed(list(texts.values()))
        with store.writing(moves_on=False):
            store.stage_vectors({sha256: row.astype("<f4").tobytes() for sha256, row in zip(texts, rows, strict=True)})
        num_embedded += len(texts)
        after = batch[-1].id
        progress(num_embedded, num_chunks)
    with store.writing():
        store.switch_embedder(threshold)
    return ReembedResult(num_chunks, num_embedded, embedder.dim)


@dataclass(frozen=True, slots=True)
class Tagging:
    """Tags to add to documents. `given` replaces the tags that people gave earlier, None keeps them; `rules` apply to this run only.

    Raises UsageError for a tag that is not UTF-8 text or contains control characters.
    """

    given: tuple[str, ...] | None = None
    rules: tuple[FolderRule, ...] = ()

    def __post_init__(self) -> None:
        for tag in self.given or ():
            if not is_unicode(tag):
                raise UsageError(f"The tag {tag[:40]!r} is not UTF-8 text.", hint="Write it as UTF-8.")
            if has_control(tag):
                raise UsageError(f"The tag {tag[:40]!r} contains control characters.", hint="Write it without them.")

    def of(self, file: FileEntry) -> dict[str, set[tuple[str, str]]]:
        """Return origin → fields to set on this file."""
        fields = {"rule": {("tag", tag) for rule in self.rules if rule.holds(file.source, file.path) for tag in rule.tags}}
        if self.given is not None:
            fields["given"] = {("tag", tag) for tag in self.given if tag}
        return fields


@dataclass(frozen=True, slots=True)
class IngestResult:
    """The number of documents by outcome, and the skipped files with reasons. Renamed documents keep their chunks.

    `num_embedded` chunks were embedded in this run; the knowledge base now holds `num_chunks`. `partial` lists documents that have parts
    without text.
    """

    added: int
    updated: int
    unchanged: int
    renamed: int
    removed: int
    num_embedded: int
    num_chunks: int
    skipped: tuple[SkippedFile, ...]
    partial: tuple[SkippedFile, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the result as JSON-serialisable data."""
        file_lists = {name: [file._asdict() for file in getattr(self, name)] for name in ("skipped", "partial")}
        return {**asdict(self), **file_lists}


@dataclass(frozen=True, slots=True)
class _Prepared:
    file: FileEntry
    row: DocumentRow
    passages: list[Passage]


def ingest(
    paths: Sequence[Path],
    embedder: Embedder,
    *,
    store: AnyStore | None,
    make_store: Callable[[], AnyStore],
    progress: Callable[[IndexProgress], None] | None = None,
    tagging: Tagging | None = None,
    hidden: bool = False,
) -> IngestResult:
    """Bring a store up to date with the files below `paths`. The caller holds the index lock.

    A document whose file is gone or now excluded is removed. If its file cannot be read this time, the document stays as it was and the
    file is listed in `skipped`. Without a `store`, `make_store` is called when the first file has been read. Raises KnowledgeBaseError if
    no file below `paths` can be read.
    """
    with Readers() as readers:
        run = _Run(embedder, readers, store, make_store, KnownFiles(walk(paths, hidden=hidden)), tagging or Tagging(), progress)
        run.take_all()
    skipped = run.known.walk.skipped
    if not run.added + run.updated + run.unchanged + run.renamed:
        raise _nothing_read(paths, skipped)
    removed, final_store = run.finish()
    return IngestResult(
        run.added,
        run.updated,
        run.unchanged,
        run.renamed,
        removed,
        run.num_embedded,
        final_store.num_chunks,
        tuple(skipped),
        tuple(run.partial),
    )


@dataclass(slots=True)
class _Run:
    """One index run. Documents are collected into a batch, embedded together, and committed one by one."""

    embedder: Embedder
    readers: Readers
    store: AnyStore | None
    make_store: Callable[[], AnyStore]
    known: KnownFiles
    tagging: Tagging
    progress: Callable[[IndexProgress], None] | None
    added: int = 0
    updated: int = 0
    unchanged: int = 0
    renamed: int = 0
    num_embedded: int = 0
    partial: list[SkippedFile] = field(default_factory=list)
    _now_unread: dict[str, UnreadFile] = field(default_factory=dict)
    _kept: list[tuple[FileEntry, int]] = field(default_factory=list)  # unchanged or renamed files with their document ids
    _stamps: list[tuple[int, int | None]] = field(default_factory=list)
    _waiting: list[_Prepared] = field(default_factory=list)
    _num_read: int = 0

    def take_all(self) -> None:
        if self.store is not None:
            self.known.load(self.store)
        for file in self.known.walk.files:
            self._num_read += 1
            self._take(file)
            num_waiting = sum(len(prepared.passages) for prepared in self._waiting)
            at_once = min(EMBED_AT_ONCE, max(1, _GROWTH * self.num_embedded))
            if num_waiting >= at_once or (num_waiting and self._num_read == len(self.known.walk.files)):
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

    def _take(self, file: FileEntry) -> None:
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

    def _prepare(self, file: FileEntry, scan: ReadFile) -> None:
        reading = scan.reading
        try:
            passages = cut(reading, self.embedder)
            if not passages:
                raise UnreadableError("it holds no text")  # noqa: TRY301  # handled below, as other reasons to skip
        except (UnreadableError, KnowledgeBaseError) as error:
            self._skip(file, reason_of(error))
            return
        fields = (*(pair for pair in reading.fields if pair[0] not in (INCOMPLETE, SECRET)), *scan.notes())
        row = DocumentRow(
            file.path, file.source, scan.sha256, scan.num_bytes, reading.title, reading.tags, fields, mtime_ns=scan.mtime_ns, cutter=CUTTER
        )
        self.partial += [SkippedFile(file.source, line) for line in reading.missing]
        self._waiting.append(_Prepared(file, row, passages))

    def _keep(self, file: FileEntry, document: StoredDocument, *, is_renamed: bool = False) -> None:
        self.renamed += is_renamed
        self.unchanged += not is_renamed
        self.partial += [SkippedFile(file.source, line) for line in self.known.notes(document, INCOMPLETE)]
        self._kept.append((file, document.id))

    def _skip(self, file: FileEntry, reason: str) -> None:
        self.known.walk.skipped.append(SkippedFile(file.source, reason))

    def _rename(self, file: FileEntry, document: StoredDocument) -> None:
        """Rename a stored document after its file was renamed."""
        assert self.store is not None
        with self.store.writing():
            self.store.move_document(document.id, file.path, file.source)

    def _write(self) -> None:
        """Embed the waiting documents and commit them, one transaction for each."""
        store = self._opened()
        store.check_embedder(self.embedder.fingerprint, self.embedder.dim)  # fail early; checked again in the transaction
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
        """Return the store, creating it if necessary. If another run created it first, documents that it wrote are not embedded again."""
        if self.store is None:
            self.store = self.make_store()
            self.known.documents = self.store.documents()
            waiting, self._waiting = self._waiting, []
            for prepared in waiting:
                document = self.known.documents.get(prepared.row.path)
                if document is not None and is_same(document, prepared.row.sha256):
                    self._keep(prepared.file, document)
                else:
                    self._waiting.append(prepared)
        return self.store

    def _retagged(self, store: AnyStore) -> list[tuple[int, str, set[tuple[str, str]]]]:
        """Return (document id, origin, fields) of unchanged documents whose fields change."""
        present = store.fields_by_origin()
        return [
            (document_id, origin, fields)
            for file, document_id in self._kept
            for origin, fields in self.tagging.of(file).items()
            if present.get((document_id, origin), set()) != fields
        ]

    def _report(self, source: str) -> None:
        if self.progress is not None:
            self.progress(IndexProgress(source, self._num_read - len(self._waiting), len(self.known.walk.files), self.num_embedded))


def _nothing_read(paths: Sequence[Path], skipped: list[SkippedFile]) -> KnowledgeBaseError:
    where = ", ".join(str(path) for path in paths)
    reasons = Counter(reason for _, reason in skipped)
    why = "; ".join(f"{num} × {reason}" for reason, num in reasons.most_common(5)) or "there are no files"
    return KnowledgeBaseError(
        f"Nothing to index in {where}: {why}.",
        hint="Name a folder with documents, text or source files. To read a hidden or ignored file, name that file itself. "
        "--hidden reads all hidden files, and files that may hold a secret.",
        num_skipped=len(skipped),
        reasons=dict(reasons.most_common(20)),
    )
