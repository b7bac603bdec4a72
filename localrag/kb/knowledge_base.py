"""The public interface of a knowledge base: open it by name or address, index, search, verify, export and remove it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from localrag.errors import KnowledgeBaseError, KnowledgeBaseNotFoundError, UsageError
from localrag.files import create_private, sync_folder
from localrag.kb.database import INDEX_WAIT_S, taken, unwritable
from localrag.kb.filters import Where
from localrag.kb.ingest import IngestResult, ReembedResult, Tagging, ingest, reembed
from localrag.kb.names import FILE, NAME, SERVER_PREFIXES, invalid_name, list_kbs, name_taken, not_found
from localrag.kb.plan import IndexProgress, Plan, plan
from localrag.kb.protocols import AnyStore, Feedback, KbLocation, Reranker
from localrag.kb.retrieve import Mode, retrieve
from localrag.kb.store import Store
from localrag.kb.texts import TEXT_PREFIX, Texts, renew, text_path
from localrag.kb.transfer import export_to, import_from, read_name
from localrag.kb.verify import VerifyResult, verify
from localrag.settings import Learning
from localrag.text.tokens import Embedder
from localrag.types import Chunk, Hit

if TYPE_CHECKING:
    from localrag.kb.vectors import VectorIndex

_REMOVED = ".removed-"
_INDEXED = "indexed"
"""Name of the empty file whose modification time tells when documents were last indexed or removed."""
_MAX_ID = 2**63 - 1  # the largest integer that a store takes


class RetrieveOptions(TypedDict, total=False):
    """The options of `KnowledgeBase.retrieve`. See localrag/kb/retrieve.py."""

    where: Where | None
    learning: Learning
    reranker: Reranker | None
    diversity: float


class KnowledgeBase:
    """A named set of documents, in a folder of the home or on a PostgreSQL server. Create it with `open`; `close` it or use `with`."""

    def __init__(self, location: KbLocation) -> None:
        if not hasattr(location, "store"):
            raise UsageError(
                f"KnowledgeBase takes an open location, not {type(location).__name__}.",
                hint=f"KnowledgeBase.open(settings.kb_dir, {str(location)!r}) opens one by its name.",
            )
        self._location = location

    @classmethod
    def open(cls, kb_dir: Path, name: str, *, create: bool = False) -> KnowledgeBase:
        """Open the knowledge base in the folder `kb_dir/name`, or on the server `postgresql://user@host:port/database#name`.

        With `create`, a missing knowledge base is created when the first document is written. Otherwise KnowledgeBaseNotFoundError is
        raised, which suggests similar names. Raises KnowledgeBaseError for an invalid name or an unusable file.
        """
        location: KbLocation
        if name.startswith(SERVER_PREFIXES):
            from localrag.kb.postgres.server import ServerLocation  # noqa: PLC0415  # its library is an extra

            location = ServerLocation(name)
        else:
            location = FolderLocation(kb_dir, name)
        try:
            location.open()
            if location.store is None and not create:
                raise location.not_found()  # noqa: TRY301  # closed below, as for any error
        except BaseException:
            location.close()
            raise
        return cls(location)

    def close(self) -> None:
        self._location.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The name, as used in labels of chunks."""
        return self._location.name

    @property
    def address(self) -> str:
        """The name or address that opens it, without a password."""
        return self._location.address

    @property
    def path(self) -> Path:
        """The database file. Only for a knowledge base of the home."""
        assert isinstance(self._location, FolderLocation), "on a server"
        return self._location.path

    @property
    def _store(self) -> AnyStore | None:
        return self._location.store

    @property
    def num_documents(self) -> int:
        return 0 if self._store is None else self._store.num_documents

    @property
    def num_chunks(self) -> int:
        return 0 if self._store is None else self._store.num_chunks

    @property
    def embedder(self) -> tuple[str, int] | None:
        """(fingerprint, dimensions) of the embedder that indexed it; None while it is empty."""
        return None if self._store is None else self._store.embedder

    @property
    def texts(self) -> Texts:
        """The documents that were given as texts instead of files. See localrag/kb/texts.py."""
        return Texts(self._location)

    def sources(self, where: Where | None = None) -> list[tuple[str, int]]:
        """Return (source, number of chunks) of every matching document, ordered by source."""
        return [] if self._store is None else self._store.sources(where)

    def fields(self, where: Where | None = None) -> dict[str, dict[str, list[str]]]:
        """Return source → key → values of tags and other fields, for matching documents that have any."""
        return {} if self._store is None else self._store.fields(where)

    def paths(self) -> dict[str, Path]:
        """Return source → path of every document that is a file."""
        return {} if self._store is None else {source: Path(path) for source, path in self._store.paths().items()}

    def ingest(
        self,
        paths: Sequence[Path],
        embedder: Embedder,
        progress: Callable[[IndexProgress], None] | None = None,
        *,
        tagging: Tagging | None = None,
        hidden: bool = False,
        wait_s: float = INDEX_WAIT_S,
        on_wait: Callable[[], None] | None = None,
    ) -> IngestResult:
        """Add and update the documents below `paths`, and remove those whose files are gone. See localrag/kb/ingest.py.

        Documents given as texts stay; those that another version cut are cut again. Only one process indexes at a time: `on_wait` is called
        if another one is indexing, and KnowledgeBaseBusyError is raised if it still is after `wait_s` seconds. A knowledge base that was
        removed or replaced since it was opened is opened or created again.
        """
        with ExitStack() as turn:

            def take() -> None:
                turn.enter_context(self._location.taken(wait_s=wait_s, on_wait=on_wait))

            def made() -> AnyStore:
                take()
                return self._location.make()

            make_store: Callable[[], AnyStore] = made
            if self._store is not None:
                take()
                self._location.reopen()  # it may have been removed or replaced since it was opened
                make_store = self._location.make
            if (store := self._location.store) is not None:
                store.check_embedder(embedder.fingerprint, embedder.dim)
                renew(store, embedder)
            result = ingest(paths, embedder, store=store, make_store=make_store, progress=progress, tagging=tagging, hidden=hidden)
            self._location.maintain_index()
            return result

    def reembed(
        self,
        embedder: Embedder,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        *,
        wait_s: float = INDEX_WAIT_S,
        on_wait: Callable[[], None] | None = None,
    ) -> ReembedResult:
        """Embed all passages with another embedder and switch to it in one transaction. See localrag/kb/ingest.py.

        Waits for another indexer as `ingest` does. Raises KnowledgeBaseNotFoundError if there is no knowledge base yet.
        """
        with self._location.taken(wait_s=wait_s, on_wait=on_wait):
            self._location.reopen()
            if self._store is None:
                raise self._location.not_found()
            result = reembed(self._store, embedder, progress)
            self._location.maintain_index()
            return result

    def plan(self, paths: Sequence[Path], *, hidden: bool = False, progress: Callable[[IndexProgress], None] | None = None) -> Plan:
        """Return what `ingest` would do. Files are read; nothing is embedded or written."""
        return plan(paths, self._store, hidden=hidden, progress=progress)

    def retrieve(
        self, query: str, embedder: Embedder | None, k: int = 8, mode: Mode = "hybrid", **options: Unpack[RetrieveOptions]
    ) -> list[Hit]:
        """Return the `k` chunks most relevant to a query, best first. Returns fewer, or none, if not enough chunks are relevant.

        See localrag/kb/retrieve.py for the options. Only keyword mode works without an embedder.
        """
        if self._store is None:
            return []
        return retrieve(self._store, self._location.index, query, embedder, k=k, mode=mode, kb=self.name, **options)

    def chunks(self, where: Where | None = None) -> list[Chunk]:
        """Return every chunk of the matching documents, ordered by source and position."""
        if self._store is None:
            return []
        with self._store.reading():
            return self._store.chunks(self._store.passing(where), kb=self.name)

    def around(self, chunk_id: int, *, num_before: int = 1, num_behind: int = 1) -> list[Chunk]:
        """Return a chunk with its neighbours in the document, in order; [] for an unknown id."""
        if self._store is None or not 0 < chunk_id <= _MAX_ID:
            return []
        with self._store.reading():
            return self._store.chunks(self._store.around(chunk_id, num_before, num_behind), kb=self.name)

    def add_feedback(self, counts: Mapping[int, Feedback]) -> None:
        """Add counts to the feedback of chunks. `counts` maps chunk ids to the numbers to add."""
        if self._store is not None and counts:
            with self._store.writing(moves_on=False):
                self._store.add_feedback(counts)

    def mark(self, ids: Sequence[int], *, useful: bool) -> None:
        """Mark chunks as useful or useless. Raises KnowledgeBaseError for an unknown id."""
        stored = set() if self._store is None else set(self._store.existing(ids))
        if missing := [one for one in ids if one not in stored]:
            raise KnowledgeBaseError(
                f"Knowledge base {self.address!r} has no passage {missing[0]}.",
                hint="Use the number in a citation, such as 12 of [KB#12].",
                id=missing[0],
            )
        self.add_feedback(dict.fromkeys(ids, Feedback(useful=1) if useful else Feedback(useless=1)))

    def feedback(self) -> list[tuple[Chunk, Feedback]]:
        """Return every chunk that has feedback, with its feedback, most useful first."""
        if self._store is None:
            return []
        feedback = self._store.feedback()
        pairs = [(chunk, feedback[chunk.id]) for chunk in self._store.chunks(list(feedback), kb=self.name)]
        return sorted(pairs, key=lambda pair: (pair[1].useless - pair[1].useful, -pair[1].cited, -pair[1].supplied, pair[0].id))

    def reset_feedback(self) -> None:
        if self._store is not None:
            with self._store.writing(moves_on=False):
                self._store.reset_feedback()

    def verify(self, *, wait_s: float = INDEX_WAIT_S, on_wait: Callable[[], None] | None = None) -> VerifyResult:
        """Check the whole knowledge base and repair derived data. See localrag/kb/verify.py."""
        with self._location.taken(wait_s=wait_s, on_wait=on_wait):
            return verify(self._location)

    def export(self, file: Path) -> None:
        """Write the knowledge base to one file for `import_kb`. See localrag/kb/transfer.py."""
        self._location.export(file)

    def matching(self, documents: Sequence[str]) -> dict[str, str]:
        """Return path → source of the documents that these texts name; `remove_documents` takes the paths.

        A text is the path of an indexed file or folder of this machine. Otherwise it is a source, a folder above it, or a pattern with
        `*` and `?` (see Where). Raises KnowledgeBaseError for one that names no document.
        """
        found: dict[str, str] = {}
        files = {} if self._store is None else {path: source for source, path in self._store.source_paths()}
        for text in documents:
            place = os.path.realpath(text) if text else ""
            one = {path: source for path, source in files.items() if path == place or path.startswith(f"{place or os.sep}{os.sep}")}
            if not one and self._store is not None:
                one = _matching(self._store, files, Where.of_sources([text]))
            if not one:
                raise KnowledgeBaseError(
                    f"Knowledge base {self.address!r} has no document {text[:200]!r} of this machine.",
                    hint=f"To list its documents: localrag kb show {self.address}",
                    document=text[:200],
                )
            found |= one
        return found

    def remove_documents(
        self, paths: Iterable[str], *, wait_s: float = INDEX_WAIT_S, on_wait: Callable[[], None] | None = None
    ) -> list[str]:
        """Remove the documents at these paths (see `matching`) in one transaction, and return the paths that were there.

        Their files stay: a later `ingest` of their folder adds them again. Waits for another indexer as `ingest` does.
        """
        with self._location.taken(wait_s=wait_s, on_wait=on_wait):
            self._location.reopen()
            if self._store is None:
                raise self._location.not_found()
            wanted = list(dict.fromkeys(paths))
            texts = self._store.texts.known([path.removeprefix(TEXT_PREFIX) for path in wanted if path.startswith(TEXT_PREFIX)])
            known = {*self._store.documents(), *map(text_path, texts)}
            there = [path for path in wanted if path in known]
            if there:
                with self._store.writing():
                    self._store.remove_documents(there)
                self._location.maintain_index()
            return there

    def rename(self, name: str) -> None:
        """Give the knowledge base another name, atomically. On a server, `name` is the part after #.

        Open sessions, saved conversations and settings keep the old name. Raises KnowledgeBaseError if the name is invalid or taken, or if
        another process is indexing.
        """
        self._location.rename(name)

    def remove(self) -> None:
        """Delete the knowledge base, atomically."""
        self._location.remove()


def _matching(store: AnyStore, files: Mapping[str, str], where: Where) -> dict[str, str]:
    """Return path → source of the matching documents: files of this machine, and texts."""
    sources = {source for source, _ in store.sources(where)}
    rows = store.texts.page(where, offset=0, limit=store.texts.count(where), max_chars=1)
    texts = store.texts.known([row.id for row in rows])
    return {path: source for path, source in files.items() if source in sources} | {text_path(one): one for one in texts}


class FolderLocation:
    """A knowledge base in the folder `kb_dir/name`. Implements `KbLocation`. Raises KnowledgeBaseError for an invalid name."""

    def __init__(self, kb_dir: Path, name: str) -> None:
        if not NAME.fullmatch(name):
            raise invalid_name(name)
        self.name = name
        self.address = name
        self.path = kb_dir / name / FILE
        self.store: Store | None = None
        self._index: VectorIndex | None = None
        self._opened: os.stat_result

    def open(self) -> None:
        if self.path.is_file():
            self.store = Store(self.path)
            self._opened = self.path.stat()

    def reopen(self) -> None:
        if self.store is not None and not (self.path.is_file() and os.path.samestat(self.path.stat(), self._opened)):
            self.store.close()
            self.store = self._index = None
        if self.store is None:
            self.open()

    def make(self) -> Store:
        self.store = Store(self.path, create=True)
        self._opened = self.path.stat()
        return self.store

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def taken(self, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        return taken(self.path.parent, wait_s=wait_s, on_wait=on_wait)

    def not_found(self) -> KnowledgeBaseNotFoundError:
        return not_found(self.name, self.name, list_kbs(self.path.parent.parent))

    def index(self) -> VectorIndex | None:
        from localrag.kb.vectors import load_index  # noqa: PLC0415  # imports numpy

        assert self.store is not None
        if self._index is None or self._index.generation != self.store.generation:
            self._index = load_index(self.store, self._index)
            if self._index is not None and self._index.wants_clusters:
                from localrag.kb.ann import start_build  # noqa: PLC0415  # imports faiss

                start_build(self.store.path)
        return self._index

    def index_problems(self) -> list[str]:
        from localrag.kb.vectors import verify_index  # noqa: PLC0415  # imports numpy

        assert self.store is not None
        self._index = None
        with self.store.reading():
            return verify_index(self.store)

    def maintain_index(self) -> None:
        """Note the time. The index is built on the first search."""
        with suppress(OSError):
            create_private(self.path.parent / _INDEXED)
            os.utime(self.path.parent / _INDEXED)

    @property
    def indexed_at(self) -> float:
        """When documents were last indexed or removed, in seconds since the epoch. OSError if the knowledge base is gone."""
        with suppress(FileNotFoundError):
            return (self.path.parent / _INDEXED).stat().st_mtime
        return self.path.stat().st_mtime  # indexed by an earlier version, or imported

    @property
    def num_bytes(self) -> int:
        """The size of all its files on disk."""
        return sum(entry.stat().st_size for entry in os.scandir(self.path.parent) if entry.is_file(follow_symlinks=False))

    def export(self, file: Path) -> None:
        assert self.store is not None, "does not exist yet"
        export_to(self.store, self.name, file)

    def rename(self, name: str) -> None:
        """Rename the folder. The system refuses to replace one that another process has filled meanwhile."""
        new = FolderLocation(self.path.parent.parent, name)
        if new.path.is_file():
            raise name_taken(name)
        if new.path.parent.is_dir():
            new.remove()  # an empty folder: an indexer that was stopped leaves its lock
        with self.taken(wait_s=0):
            self.close()
            self.store = self._index = None
            try:
                self.path.parent.rename(new.path.parent)
            except OSError as error:
                raise name_taken(name) if new.path.is_file() else unwritable("Cannot rename it", error, new.path.parent) from error
            with suppress(OSError):
                sync_folder(new.path.parent.parent)
        self.name = self.address = name
        self.path = new.path
        self.open()

    def remove(self) -> None:
        """Delete the folder. It is renamed first, so that the name never refers to a half-deleted knowledge base."""
        with self.taken(wait_s=0):
            self.close()
        self.store = None
        kb_dir = self.path.parent.parent
        try:
            self.path.parent.rename(kb_dir / f"{_REMOVED}{secrets.token_hex(8)}")
        except OSError as error:
            raise KnowledgeBaseError(
                f"Cannot remove knowledge base {self.name!r}: {error.strerror or error}.", hint=f"Check that {kb_dir} can be written to."
            ) from error
        for leftover in kb_dir.glob(f"{_REMOVED}*"):  # including those of killed removals
            shutil.rmtree(leftover, ignore_errors=True)


def import_kb(kb_dir: Path, file: Path, name: str | None = None, *, replace: bool = False) -> str:
    """Import an exported file under its original name or another one; return the name.

    Raises KnowledgeBaseError if that knowledge base exists, unless `replace` is set. It is replaced only after the file has been verified.
    """
    name = read_name(file) if name is None else name
    location = FolderLocation(kb_dir, name)

    def make_room() -> None:
        if location.path.is_file() and not replace:
            raise name_taken(name, "--name")
        location.remove()  # may be an empty folder: an indexer that was stopped leaves its lock

    import_from(file, kb_dir, name, make_room=make_room)
    return name
