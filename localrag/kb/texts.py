"""Documents given as texts, with ids chosen by the caller. They are not files, and `localrag index` leaves them alone.

A text is stored whole with its metadata. As with files, its chunks contain no invisible characters. Each document is written in one
transaction, and an unchanged chunk keeps its id. `renew` cuts a document again from the stored text if another version cut it or `verify`
removed some of its chunks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from localrag.errors import UsageError
from localrag.kb.chunking import CUTTER, Passage, cut
from localrag.kb.database import INDEX_WAIT_S
from localrag.kb.filters import Where, canonical, dumped, entries_of, is_unicode, loaded
from localrag.kb.ingest import EMBED_AT_ONCE, min_similarity, vectors_for
from localrag.kb.names import escaped
from localrag.kb.plan import is_same
from localrag.kb.protocols import AnyStore, DocumentRow, GivenText, KbLocation, TextRow
from localrag.kb.readers.base import MAX_TEXT_CHARS, Reading, Section, clean, one_line
from localrag.text.tokens import Embedder

MAX_ID_CHARS = 256

Outcome = Literal["updated", "unchanged", "not_found"]
_Prepared = tuple[DocumentRow, list[Passage]]

_AT_ONCE = 16  # whole texts
_FIELD = re.compile(r"[a-z][\w.-]{0,63}")  # as in the conditions of filters.py
_NAMES = ("source", "file_name", "filename", "title")
"""Metadata keys that may name a document, in order of preference."""


@dataclass(frozen=True, slots=True)
class Text:
    """A document: id, text and metadata (a JSON object). Create it with `of`, which checks them."""

    id: str
    text: str
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, text: str, metadata: Mapping[str, Any] | None = None, *, text_id: str = "") -> Text:
        """Check and create a document. The default id is the sha256 of the text. Raises UsageError for text that is empty or unstorable."""
        if "\0" in text or not is_unicode(text):
            raise UsageError("The text contains a NUL character or a lone surrogate.", hint="Give text, not the bytes of a file.")
        if len(text) > MAX_TEXT_CHARS:
            raise UsageError(f"The text has {len(text)} characters; the limit is {MAX_TEXT_CHARS}.", num_chars=len(text))
        if not clean(text).strip():
            raise UsageError("The text is empty.", hint="Leave it out.")
        if len(text_id) > MAX_ID_CHARS or not text_id.isprintable():
            raise UsageError(f"An id must have 1 to {MAX_ID_CHARS} printable characters.")
        dumped(metadata or {})
        return cls(text_id or hashlib.sha256(text.encode()).hexdigest(), text, metadata or {})

    @property
    def sha256(self) -> str:
        """The sha256 over text and metadata."""
        return hashlib.sha256(canonical([self.text, self.metadata]).encode()).hexdigest()

    def reading(self) -> Reading:
        """Return the text to cut, without invisible characters."""
        text = clean(self.text)
        return Reading(text, (Section(0, len(text)),), own_lines=True)

    def row(self) -> DocumentRow:
        """Return the document's row, without its chunks."""
        return DocumentRow(
            text_path(self.id),
            _source(self),
            self.sha256,
            len(self.text.encode()),
            fields=_fields(self.metadata),
            cutter=CUTTER,
            given=GivenText(self.id, self.text, dumped(self.metadata), entries_of(self.metadata)),
        )


class Texts:
    """The documents of a knowledge base that were given as texts. `page` and `remove` include files.

    Writers take turns: `on_wait` is called if another process is indexing, and KnowledgeBaseBusyError is raised if it still is after
    `wait_s` seconds. KnowledgeBaseNotFoundError is raised if the knowledge base has been removed.
    """

    def __init__(self, location: KbLocation) -> None:
        self._location = location

    def put(
        self, texts: Sequence[Text], embedder: Embedder, *, wait_s: float = INDEX_WAIT_S, on_wait: Callable[[], None] | None = None
    ) -> None:
        """Store texts, replacing those with the same ids. A missing knowledge base is created."""
        if not texts:
            return
        with self._locked(wait_s, on_wait):
            to_write = {text.id: text for text in texts}
            if (store := self._location.store) is not None:
                to_write = _changed(store, to_write)
            self._write(to_write.values(), embedder)

    def update(
        self, texts: Sequence[Text], embedder: Embedder, *, wait_s: float = INDEX_WAIT_S, on_wait: Callable[[], None] | None = None
    ) -> list[Outcome]:
        """Replace texts whose ids exist, and return the outcome of each."""
        with self._locked(wait_s, on_wait):
            digests = {text_id: one.sha256 for text_id, one in self._there().texts.known([text.id for text in texts]).items()}
            to_write: dict[str, Text] = {}
            outcomes: list[Outcome] = []
            for text in texts:
                before, now = digests.get(text.id), text.sha256
                outcomes.append("not_found" if before is None else "unchanged" if before == now else "updated")
                if before is not None:
                    digests[text.id], to_write[text.id] = now, text
            self._write(_changed(self._there(), to_write).values(), embedder)
            return outcomes

    def remove(self, ids: Sequence[str], *, wait_s: float = INDEX_WAIT_S, on_wait: Callable[[], None] | None = None) -> set[str]:
        """Delete documents by id, in one transaction, and return the ids that existed.

        The id of a file is its source; the next `localrag index` of its folder stores it again.
        """
        with self._locked(wait_s, on_wait):
            store = self._there()
            texts = set(store.texts.known([one for one in ids if one.isprintable()]))
            files = _files(store, set(ids) - texts)
            if texts or files:
                with store.writing():
                    store.remove_documents([*map(text_path, sorted(texts)), *(path for _, path in files)])
            return texts.union(source for source, _ in files)

    def files(self, ids: Sequence[str]) -> set[str]:
        """Return those of the ids that are sources of files and not ids of texts."""
        store = self._there()
        texts = store.texts.known([one for one in ids if one.isprintable()])
        return {source for source, _ in _files(store, set(ids) - texts.keys())}

    def get(self, text_id: str) -> TextRow | None:
        """Return the whole text with this id; None if there is none."""
        if self._location.store is None or not text_id.isprintable():
            return None
        return self._location.store.texts.whole([text_id]).get(text_id)

    def page(
        self, *, offset: int = 0, limit: int = 10, max_chars: int = MAX_TEXT_CHARS, where: Where | None = None
    ) -> tuple[list[TextRow], int]:
        """Return a page of matching documents, files included, oldest first, and the total number that match."""
        if (store := self._location.store) is None:
            return [], 0
        where = where or Where()
        with store.reading():
            rows = store.texts.page(where, offset=offset, limit=limit, max_chars=min(max_chars, MAX_TEXT_CHARS))
            return rows, store.texts.count(where)

    def names(self, document_ids: Sequence[int]) -> dict[int, tuple[str, dict[str, Any]]]:
        """Return document id (as in a chunk) → (id, metadata). For a file, both are its source. Unknown ids are left out."""
        if (store := self._location.store) is None:
            return {}
        return {
            number: (source, {"source": source}) if text_id is None else (text_id, loaded(metadata or ""))
            for number, (source, text_id, metadata) in store.texts.names(list(set(document_ids))).items()
        }

    @contextmanager
    def _locked(self, wait_s: float, on_wait: Callable[[], None] | None) -> Iterator[None]:
        with self._location.taken(wait_s=wait_s, on_wait=on_wait):
            self._location.reopen()
            yield

    def _there(self) -> AnyStore:
        if self._location.store is None:
            raise self._location.not_found()
        return self._location.store

    def _write(self, texts: Iterable[Text], embedder: Embedder) -> None:
        for batch in _prepared(texts, embedder):
            _store(self._location.store or self._location.make(), batch, embedder)
        self._location.maintain_index()


def _files(store: AnyStore, sources: set[str]) -> list[tuple[str, str]]:
    """Return (source, path) of the files with these sources. Several files may share a source."""
    return [(source, path) for source, path in store.source_paths() if source in sources] if sources else []


def renew(store: AnyStore, embedder: Embedder) -> None:
    """Cut and embed texts again that another version cut or that lost chunks. The caller holds the index lock."""
    ids = store.texts.outdated(CUTTER)
    for at in range(0, len(ids), _AT_ONCE):
        rows = store.texts.whole(ids[at : at + _AT_ONCE]).values()
        for batch in _prepared((Text(row.id, row.text, row.metadata) for row in rows), embedder):
            _store(store, batch, embedder)


def _changed(store: AnyStore, texts: Mapping[str, Text]) -> dict[str, Text]:
    documents = store.texts.known(list(texts))
    return {one: text for one, text in texts.items() if one not in documents or not is_same(documents[one], text.sha256)}


def _prepared(texts: Iterable[Text], embedder: Embedder) -> Iterator[list[_Prepared]]:
    """Cut texts, and yield them in groups to embed together."""
    batch: list[_Prepared] = []
    for text in texts:
        batch.append((text.row(), cut(text.reading(), embedder)))
        if sum(len(passages) for _, passages in batch) >= EMBED_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _store(store: AnyStore, prepared: list[_Prepared], embedder: Embedder) -> None:
    store.check_embedder(embedder.fingerprint, embedder.dim)  # fail early; checked again in the transaction
    threshold = min_similarity(embedder) if store.embedder is None else None
    vectors = vectors_for(store, (passage for _, passages in prepared for passage in passages), embedder)
    for row, passages in prepared:
        with store.writing():
            store.claim_embedder(embedder.fingerprint, embedder.dim, threshold)
            store.put_document(row, passages, vectors)


TEXT_PREFIX = "text:"


def text_path(text_id: str) -> str:
    """Return the path that identifies a text. No file has such a path, since those of files are absolute."""
    return f"{TEXT_PREFIX}{text_id}"


def _source(text: Text) -> str:
    """Return the displayed name of a text: from its metadata, or its id."""
    names = (next(_lines(text.metadata.get(key)), "") for key in _NAMES)
    return escaped(next(filter(None, names), text.id))


def _fields(metadata: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the fields for filters: each string, number and boolean, alone or in a list, under a key that a condition can name."""
    fields: dict[tuple[str, str], None] = {}
    for key, value in metadata.items():
        name = "tag" if key.lower() == "tags" else key.lower()
        if _FIELD.fullmatch(name):
            fields |= {(name, line): None for line in _lines(value) if line}
    return tuple(fields)


def _lines(value: object) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, (str, bool, int, float)):
            yield one_line(item if isinstance(item, str) else json.dumps(item))
