"""Records that the parts of a knowledge base exchange, and the protocols of its replaceable parts.

A store keeps documents, chunks, full text and vectors: in a SQLite file (localrag/kb/store.py) or on a server (localrag/kb/postgres/). An
index finds near vectors, a location opens both, and a reranker rescores the best hits.
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
"""The origin of a field: "file", "rule" (a folder rule) or "given" (by a person)."""


@dataclass(frozen=True, slots=True)
class GivenText:
    """A document given as text: its whole text, its metadata as JSON, and the digests that metadata filters match."""

    id: str
    text: str
    metadata: str
    entries: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A document to store. The absolute `path` identifies it; `sha256` covers the `num_bytes` bytes of the file.

    `mtime_ns` is None if a later change of the file might not show in it. `cutter` is the version of the code that read and cut it.
    `fields` and `tags` come from the file itself. If `given` is set, the document is a text: see `Text.row` in localrag/kb/texts.py.
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
class StoredDocument:
    """A stored document, with the properties that show whether its file has changed."""

    id: int
    sha256: str
    num_bytes: int
    mtime_ns: int | None
    cutter: int


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file without text to index, and the reason. It is not read again until the file or the version `cutter` changes."""

    num_bytes: int
    mtime_ns: int
    cutter: int
    reason: str


class Feedback(NamedTuple):
    """How often a chunk was retrieved, supplied in a prompt, cited, and marked as useful or useless by people."""

    retrieved: int = 0
    supplied: int = 0
    cited: int = 0
    useful: int = 0
    useless: int = 0


class StoredChunk(NamedTuple):
    """A chunk with all its stored columns. `vector` is None if it is missing."""

    id: int
    ordinal: int
    start: int
    end: int
    place: str
    heading: str
    text: str
    sha256: bytes
    vector: bytes | None


class Unstaged(NamedTuple):
    """A chunk that another embedder has yet to embed."""

    id: int
    sha256: bytes
    heading: str
    text: str


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
    """A document with its text, or the beginning of its text. `num_chars` is the length of the whole text.

    `sha256` covers text and metadata. For a file, `id` is the source, `text` the passages joined by empty lines, `metadata` has the source
    only, and `sha256` covers the file's bytes.
    """

    id: str
    text: str
    num_chars: int
    metadata_json: str
    sha256: str

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata, parsed. Raises KnowledgeBaseError if it is damaged."""
        return loaded(self.metadata_json)

    @property
    def is_whole(self) -> bool:
        return len(self.text) == self.num_chars

    @classmethod
    def listed(cls, text_id: str | None, source: str, text: str, num_chars: int, metadata: str | None, sha256: str) -> TextRow:
        """Make the row of any document. For a file, `text_id` is None, and id and metadata are derived from the source."""
        if text_id is None:
            return cls(source, text, num_chars, json.dumps({"source": source}), sha256)
        return cls(text_id, text, num_chars, metadata or "", sha256)


class AnyTexts(Protocol):
    """The documents given as texts. See `SqliteTexts` in localrag/kb/store.py for what each method does."""

    def known(self, ids: Sequence[str]) -> dict[str, StoredDocument]: ...
    def outdated(self, cutter: int) -> list[str]: ...
    def whole(self, ids: Sequence[str]) -> dict[str, TextRow]: ...
    def page(self, where: Where, *, offset: int, limit: int, max_chars: int) -> list[TextRow]: ...
    def count(self, where: Where) -> int: ...
    def names(self, document_ids: Sequence[int]) -> dict[int, tuple[str, str | None, str | None]]: ...
    def all(self) -> Iterator[tuple[TextRow, frozenset[bytes]]]: ...


class AnyStore(Protocol):
    """Documents, chunks, full text and vectors. See `Store` in localrag/kb/store.py for what each method does.

    Every failure of the underlying database is raised as a KnowledgeBaseError with a hint. A store belongs to the thread that opened it.
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
    def documents(self) -> dict[str, StoredDocument]: ...
    def unread(self) -> dict[str, UnreadFile]: ...
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
    def stage_embedder(self, fingerprint: str, dim: int) -> None: ...
    def unstaged(self, after: int, limit: int) -> list[Unstaged]: ...
    def stage_vectors(self, vectors: Mapping[bytes, bytes]) -> None: ...
    def switch_embedder(self, min_similarity: float | None) -> None: ...
    def put_document(self, row: DocumentRow, passages: Sequence[Passage], vectors: Mapping[bytes, bytes]) -> int: ...
    def move_document(self, document_id: int, path: str, source: str) -> None: ...
    def stamp_documents(self, stamps: Iterable[tuple[int, int | None]]) -> None: ...
    def set_unread(self, gone_paths: Iterable[str], unread: Mapping[str, UnreadFile]) -> None: ...
    def remove_documents(self, paths: Iterable[str]) -> None: ...
    def drop_chunks(self, ids: Sequence[int]) -> list[str]: ...
    def rebuild_full_text(self, name: str) -> None: ...
    def set_fields(self, document_id: int, fields: Sequence[tuple[str, str]], origin: Origin) -> bool: ...
    def add_feedback(self, counts: Mapping[int, Feedback]) -> None: ...
    def reset_feedback(self) -> None: ...


class AnyIndex(Protocol):
    """Cosine similarity search over the chunks of one store generation. See `VectorIndex` in localrag/kb/vectors.py for the methods."""

    @property
    def generation(self) -> int: ...
    def search(self, query: Vectors, k: int, among: Sequence[int] | None = None) -> list[tuple[int, float]]: ...
    def similarities(self, query: Vectors, ids: Sequence[int]) -> dict[int, float]: ...


class KbLocation(Protocol):
    """The location of one knowledge base, which may not exist yet: a folder or a server."""

    name: str
    """The name, as used in labels of chunks."""
    address: str
    """The name or address that opens it, without a password: for people, journals and ledgers."""

    @property
    def store(self) -> AnyStore | None:
        """The open store; None until the knowledge base exists."""

    def open(self) -> None:
        """Open the store if the knowledge base exists."""

    def reopen(self) -> None:
        """Reopen the store if another process created, removed or replaced the knowledge base. The caller holds the index lock."""

    def make(self) -> AnyStore:
        """Open the store, creating the knowledge base if it does not exist."""

    def close(self) -> None: ...

    def taken(self, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Hold the index lock. See localrag/kb/database.py."""

    def not_found(self) -> KnowledgeBaseNotFoundError:
        """Make the error for a missing knowledge base, which suggests similar names."""

    def index(self) -> AnyIndex | None:
        """Load the index of the store's current generation, inside `store.reading()`; None if nothing was ever stored."""

    def index_problems(self) -> list[str]:
        """Compare the index with the store. Remove wrong parts and return the problems."""

    def maintain_index(self) -> None:
        """Maintain the index after documents were indexed. The caller holds the index lock."""

    def export(self, file: Path) -> None:
        """Write the knowledge base to one file. See localrag/kb/transfer.py."""

    def rename(self, name: str) -> None:
        """Give the knowledge base another name atomically. Raises KnowledgeBaseError if that name is invalid or taken."""

    def remove(self) -> None:
        """Delete the knowledge base atomically. Raises KnowledgeBaseError if another process is indexing."""


class Reranker(Protocol):
    """Scores how well each text answers a query. Higher is better, and only the order matters. None keeps the order of the texts."""

    def scores(self, query: str, texts: Sequence[str], /) -> list[float] | None: ...


@runtime_checkable
class TimedScores(Protocol):
    """A reranker with a deadline. `ends_at` is a time of time.perf_counter(); the result is None if it cannot finish by then."""

    def scores_until(self, query: str, texts: Sequence[str], ends_at: float, /) -> list[float] | None: ...


def other_embedder(name: str, kb_embedder: tuple[str, int], embedder: tuple[str, int]) -> KnowledgeBaseError:
    """Make the error for an embedder whose vectors cannot be compared with those in `name`. Both are (fingerprint, dimensions)."""
    return KnowledgeBaseError(
        f"Knowledge base {name!r} was indexed with another embedder ({kb_embedder[1]} dimensions, {kb_embedder[0][:12]}…) "
        f"than this one ({embedder[1]} dimensions, {embedder[0][:12]}…), so their vectors cannot be compared.",
        hint="Use the embedder it was indexed with, with the same prefixes, or embed it again with the other one: "
        f"localrag kb reembed {name} --embedder EMBEDDER",
        dim=kb_embedder[1],
        given_dim=embedder[1],
    )
