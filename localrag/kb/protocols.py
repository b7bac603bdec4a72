"""The records that the parts of a knowledge base exchange, and the protocols of its replaceable parts.

A store keeps documents, chunks, full text and vectors: localrag/kb/store.py in a SQLite file, localrag/kb/postgres/ on a server. An index
finds near vectors, a place opens both, and a reranker reads the best hits again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from localrag.errors import KnowledgeBaseError, KnowledgeBaseNotFoundError
from localrag.kb.chunking import Passage
from localrag.kb.filters import Where, loaded
from localrag.kb.query import Term
from localrag.types import Chunk

if TYPE_CHECKING:
    from localrag.kb.vector_cache import Vectors

Origin = str
"""The origin of a field: "file", "rule" of a folder, or "given" by a person."""


@dataclass(frozen=True, slots=True)
class GivenText:
    """A document that was given as text: all of it, its metadata as JSON, and the digests that the metadata is found by."""

    id: str
    text: str
    metadata: str
    entries: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A document as it is to be stored. `path` is absolute and identifies it; `sha256` is of the file's `num_bytes` bytes.

    `mtime_ns` is None if the file may have changed since without that showing; `cutter` is the version of what read and cut it.
    `fields` and `tags` are those of the file itself. With `given` it is not a file but a text: see `Text.row` in localrag/kb/texts.py.
    """

    path: str
    source: str
    sha256: str
    num_bytes: int
    title: str = ""
    tags: tuple[str, ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    mtime_ns: int | None = None
    cutter: int = 0
    given: GivenText | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """A stored document, with what tells whether its file has changed since."""

    id: int
    sha256: str
    num_bytes: int
    mtime_ns: int | None
    cutter: int


@dataclass(frozen=True, slots=True)
class Unread:
    """A file without text to index, and the reason. It is not read again until it or the version `cutter` changes."""

    num_bytes: int
    mtime_ns: int
    cutter: int
    reason: str


class Feedback(NamedTuple):
    """How often a chunk was retrieved, supplied in a prompt, cited, and marked by a person as useful or useless."""

    retrieved: int = 0
    supplied: int = 0
    cited: int = 0
    useful: int = 0
    useless: int = 0


class StoredChunk(NamedTuple):
    """A chunk with everything that is stored of it. `vector` is None if it is missing."""

    id: int
    ordinal: int
    start: int
    end: int
    place: str
    heading: str
    text: str
    sha256: bytes
    vector: bytes | None


class Position(NamedTuple):
    """Where a chunk stands in its document, of which `source` and `num_bytes` are told."""

    chunk_id: int
    document_id: int
    ordinal: int
    start: int
    end: int
    place: str
    source: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TextRow:
    """A document with its text or the beginning of it; `num_chars` counts the characters of the whole text.

    `sha256` covers text and metadata. For a file, `id` is its source, `text` its passages with empty lines between them, `metadata` holds
    the source only, and `sha256` covers its bytes.
    """

    id: str
    text: str
    num_chars: int
    metadata_json: str
    sha256: str

    @property
    def metadata(self) -> dict[str, Any]:
        """Raises KnowledgeBaseError if it is damaged."""
        return loaded(self.metadata_json)

    @property
    def is_whole(self) -> bool:
        return len(self.text) == self.num_chars

    @classmethod
    def listed(cls, text_id: str | None, source: str, text: str, num_chars: int, metadata: str | None, sha256: str) -> TextRow:
        """The row of any document. A file, whose `text_id` is None, has neither an id nor metadata of its own."""
        if text_id is None:
            return cls(source, text, num_chars, json.dumps({"source": source}), sha256)
        return cls(text_id, text, num_chars, metadata or "", sha256)


class AnyTexts(Protocol):
    """The documents that were given as texts. `SqliteTexts` in localrag/kb/store.py says what each method does."""

    def known(self, ids: Sequence[str]) -> dict[str, Known]: ...
    def outdated(self, cutter: int) -> list[str]: ...
    def whole(self, ids: Sequence[str]) -> dict[str, TextRow]: ...
    def page(self, where: Where, *, offset: int, limit: int, max_chars: int) -> list[TextRow]: ...
    def count(self, where: Where) -> int: ...
    def names(self, document_ids: Sequence[int]) -> dict[int, tuple[str, str | None, str | None]]: ...
    def all(self) -> Iterator[tuple[TextRow, frozenset[bytes]]]: ...


class AnyStore(Protocol):
    """Documents, chunks, full text and vectors. `Store` in localrag/kb/store.py says what each method does.

    Every failure of what lies below arrives as a KnowledgeBaseError with a way out. A store belongs to the thread that opened it.
    """

    @property
    def is_local(self) -> bool: ...
    @property
    def full_texts(self) -> tuple[str, ...]: ...
    @property
    def texts(self) -> AnyTexts: ...

    def close(self) -> None: ...
    def reading(self) -> AbstractContextManager[None]: ...
    def writing(self, *, moves_on: bool = True) -> AbstractContextManager[None]: ...

    @property
    def generation(self) -> int: ...
    @property
    def embedder(self) -> tuple[str, int] | None: ...
    @property
    def min_similarity(self) -> float | None: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    def sources(self, where: Where | None = None) -> list[tuple[str, int]]: ...
    def documents(self) -> dict[str, Known]: ...
    def unread(self) -> dict[str, Unread]: ...
    def fields(self, where: Where | None = None) -> dict[str, dict[str, list[str]]]: ...
    def fields_by_origin(self) -> dict[tuple[int, Origin], set[tuple[str, str]]]: ...
    def paths(self) -> dict[str, str]: ...
    def source_paths(self) -> list[tuple[str, str]]: ...
    def titles(self) -> list[tuple[str, str]]: ...
    def elsewhere(self) -> dict[str, int]: ...
    def stamp(self, generation: int) -> int | None: ...
    def vectors(self, after: int = 0) -> Iterator[tuple[int, bytes]]: ...
    def existing(self, ids: Sequence[int]) -> list[int]: ...
    def vectors_of(self, sha256s: Sequence[bytes]) -> dict[bytes, bytes]: ...
    def allowed(self, where: Where | None) -> list[int] | None: ...
    def passing(self, where: Where | None) -> list[int]: ...
    def keyword_ids(self, terms: Sequence[Term], limit: int, where: Where | None = None) -> list[tuple[int, float]]: ...
    def character_ids(self, terms: Sequence[Term], limit: int, where: Where | None = None) -> list[tuple[int, float]]: ...
    def keyword_holders(self, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]: ...
    def character_holders(self, terms: Sequence[Term], among: Sequence[int]) -> list[tuple[int, list[int]]]: ...
    def chunks(self, ids: Sequence[int], *, kb: str = "") -> list[Chunk]: ...
    def around(self, chunk_id: int, before: int, behind: int) -> list[int]: ...
    def feedback(self, ids: Sequence[int] | None = None) -> dict[int, Feedback]: ...

    def all_rows(self) -> Iterator[StoredChunk]: ...
    def positions(self) -> Iterator[Position]: ...
    def problems(self) -> list[str]: ...
    def full_text_is_sound(self, name: str) -> bool: ...

    def check_embedder(self, fingerprint: str, dim: int) -> None: ...
    def adopt(self, ids: Sequence[int]) -> None: ...
    def claim_embedder(self, fingerprint: str, dim: int, min_similarity: float | None = None) -> None: ...
    def put_document(self, row: DocumentRow, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]) -> int: ...
    def move_document(self, document_id: int, path: str, source: str) -> None: ...
    def stamp_documents(self, stamps: Iterable[tuple[int, int | None]]) -> None: ...
    def set_unread(self, gone: Iterable[str], found: Mapping[str, Unread]) -> None: ...
    def remove_documents(self, paths: Iterable[str]) -> None: ...
    def drop_chunks(self, ids: Sequence[int]) -> list[str]: ...
    def rebuild_full_text(self, name: str) -> None: ...
    def set_fields(self, document_id: int, fields: Sequence[tuple[str, str]], origin: Origin) -> bool: ...
    def add_feedback(self, counts: Mapping[int, Feedback]) -> None: ...
    def reset_feedback(self) -> None: ...


class AnyIndex(Protocol):
    """Cosine similarity over the chunks of one generation of a store. `VectorIndex` in localrag/kb/vectors.py says what each does."""

    @property
    def generation(self) -> int: ...
    def search(self, query: Vectors, k: int, among: Sequence[int] | None = None) -> list[tuple[int, float]]: ...
    def similarities(self, query: Vectors, ids: Sequence[int]) -> dict[int, float]: ...


class Place(Protocol):
    """Where one knowledge base is kept. It may not exist yet."""

    name: str
    """Its name, as used in the labels of chunks."""
    address: str
    """The name or address that opens it, without a password: for people, journals and ledgers."""

    @property
    def store(self) -> AnyStore | None:
        """The open store; None until the knowledge base exists."""

    def open(self) -> None:
        """Open the store if the knowledge base exists."""

    def follow(self) -> None:
        """Reopen the store: another process may have made, removed or replaced the knowledge base. Call it while holding the turn."""

    def make(self) -> AnyStore:
        """Open the store; make the knowledge base if it does not exist."""

    def close(self) -> None: ...

    def taken(self, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """The turn to index. See localrag/kb/index_lock.py."""

    def not_found(self) -> KnowledgeBaseNotFoundError:
        """The error that names the nearest ones that are there."""

    def index(self) -> AnyIndex | None:
        """The index of the store's current generation, inside `store.reading()`; None if nothing was ever stored."""

    def index_problems(self) -> list[str]:
        """Compare the index with the store; remove and name the parts that are wrong."""

    def tend(self) -> None:
        """Maintain the index after documents were indexed, while holding the turn."""

    def export(self, file: Path) -> None:
        """Write all of it to one file. See localrag/kb/transfer.py."""

    def remove(self) -> None:
        """Delete it atomically. Raises KnowledgeBaseError if another process is indexing."""


class Reranker(Protocol):
    """Scores how well each text answers a query, higher is better; only the order of the scores counts. None keeps the texts' order."""

    def scores(self, query: str, texts: Sequence[str], /) -> list[float] | None: ...


@runtime_checkable
class TimedScores(Protocol):
    """A reranker with a deadline: `ends_at` is a time of time.perf_counter(). Returns None if it cannot finish by then."""

    def scores_until(self, query: str, texts: Sequence[str], ends_at: float, /) -> list[float] | None: ...


def other_embedder(name: str, known: tuple[str, int], given: tuple[str, int]) -> KnowledgeBaseError:
    """The error for an embedder whose vectors are not comparable with those stored in `name`; both are (fingerprint, dimensions)."""
    return KnowledgeBaseError(
        f"Knowledge base {name!r} was indexed with another embedder ({known[1]} dimensions, {known[0][:12]}…) "
        f"than this one ({given[1]} dimensions, {given[0][:12]}…), so their vectors do not compare.",
        hint=f"Use the embedder it was indexed with, or index the documents into a new one: localrag index PATH --kb {name}-2",
        dim=known[1],
        given_dim=given[1],
    )
