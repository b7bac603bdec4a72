"""A knowledge base as the rest of localrag sees it: a name, where it is kept, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypedDict, Unpack

from localrag.errors import KnowledgeBaseError
from localrag.kb.filters import Where
from localrag.kb.ingest import IngestResult, Progress, Tagging, ingest
from localrag.kb.location import Folder, check_name
from localrag.kb.plan import Plan, plan
from localrag.kb.rerank import Reranker
from localrag.kb.retrieve import Mode, retrieve
from localrag.kb.store import Feedback
from localrag.kb.texts import Texts, renew
from localrag.kb.transfer import import_from, read_name
from localrag.kb.truth import AnyStore, Place
from localrag.kb.turn import INDEX_WAIT_S
from localrag.kb.verify import Verified, verify
from localrag.passages import Chunk, Hit
from localrag.settings import Learning
from localrag.tokens import Embedder

__all__ = ["INDEX_WAIT_S", "KnowledgeBase", "RetrieveOptions", "import_kb", "name_of", "shown"]

_SERVERS = ("postgresql://", "postgres://")
_MAX_ID = 2**63 - 1  # what a store takes for a number at all


class RetrieveOptions(TypedDict, total=False):
    """See localrag/kb/retrieve.py."""

    where: Where | None
    learning: Learning
    reranker: Reranker | None
    diversity: float


class KnowledgeBase:
    """Documents of one name, in a folder of the home or on a PostgreSQL server. Use `open`; then `close`, or a `with` block."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @classmethod
    def open(cls, kb_dir: Path, name: str, *, create: bool = False) -> KnowledgeBase:
        """Opens the knowledge base in the folder `kb_dir/name`, or on a server by `postgresql://user@host:port/database#name`.

        With `create`, one that is not there is made when the first document is written, not before.

        KnowledgeBaseNotFoundError names the nearest ones; KnowledgeBaseError for a name that cannot be one, or what cannot be used.
        """
        place: Place
        if name.startswith(_SERVERS):
            from localrag.kb.postgres.server import ServerPlace  # noqa: PLC0415  # its library is an extra

            place = ServerPlace(name)
        else:
            place = Folder(kb_dir, name)
        try:
            place.open()
            if place.store is None and not create:
                raise place.not_found()  # noqa: TRY301  # it is closed below as for any error
        except BaseException:
            place.close()
            raise
        return cls(place)

    def close(self) -> None:
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Its name, as it stands in labels."""
        return self._place.name

    @property
    def address(self) -> str:
        """What it is opened by, without a password."""
        return self._place.address

    @property
    def path(self) -> Path:
        """Its file, where it is kept in one."""
        assert isinstance(self._place, Folder), "one on a server"
        return self._place.path

    @property
    def _store(self) -> AnyStore | None:
        return self._place.store

    @property
    def num_documents(self) -> int:
        return 0 if self._store is None else self._store.num_documents

    @property
    def num_chunks(self) -> int:
        return 0 if self._store is None else self._store.num_chunks

    @property
    def embedder(self) -> tuple[str, int] | None:
        """(fingerprint, dimensions) of the embedder it was indexed with; None as long as it is empty."""
        return None if self._store is None else self._store.embedder

    @property
    def texts(self) -> Texts:
        """Its documents that were given as texts, to be read and changed. See localrag/kb/texts.py."""
        return Texts(self._place)

    def sources(self, where: Where | None = None) -> list[tuple[str, int]]:
        """(source, number of chunks) of every document that passes, by source."""
        return [] if self._store is None else self._store.sources(where)

    def fields(self, where: Where | None = None) -> dict[str, dict[str, list[str]]]:
        """The tags and other fields of the documents that pass and have any, by source: key to values."""
        return {} if self._store is None else self._store.fields(where)

    def paths(self) -> dict[str, Path]:
        """Where each source that is a file was read from."""
        return {} if self._store is None else {source: Path(path) for source, path in self._store.paths().items()}

    def ingest(
        self,
        paths: Sequence[Path],
        embedder: Embedder,
        progress: Callable[[Progress], None] | None = None,
        *,
        tagging: Tagging | None = None,
        hidden: bool = False,
        wait_s: float = INDEX_WAIT_S,
        on_wait: Callable[[], None] | None = None,
    ) -> IngestResult:
        """Adds and updates the documents below `paths`, and removes those whose files are gone. See localrag/kb/ingest.py. Documents that
        were given as texts stay, and are cut anew where another version cut them.

        One at a time: `on_wait` is called if another process is at it, and KnowledgeBaseError says so if it still is after `wait_s`.
        What was removed or replaced since it was opened is opened, or made, anew.
        """
        with ExitStack() as turn:

            def take() -> None:
                turn.enter_context(self._place.taken(wait_s=wait_s, on_wait=on_wait))

            def made() -> AnyStore:
                take()
                return self._place.make()

            make_store: Callable[[], AnyStore] = made
            if self._store is not None:
                take()
                self._place.follow()  # it may have been removed or replaced since it was opened
                make_store = self._place.make
            if (store := self._place.store) is not None:
                store.check_embedder(embedder.fingerprint, embedder.dim)
                renew(store, embedder)
            result = ingest(paths, embedder, store=store, make_store=make_store, progress=progress, tagging=tagging, hidden=hidden)
            self._place.tend()
            return result

    def plan(self, paths: Sequence[Path], *, hidden: bool = False) -> Plan:
        """What `ingest` would do, without reading a file or writing anything."""
        if self._store is None:
            return plan(paths, {}, hidden=hidden)
        sources = {path: source for source, path in self._store.source_paths()}
        return plan(paths, self._store.documents(), self._store.unread(), sources, hidden=hidden)

    def retrieve(
        self, query: str, embedder: Embedder | None, k: int = 8, mode: Mode = "hybrid", **options: Unpack[RetrieveOptions]
    ) -> list[Hit]:
        """The `k` best chunks that are relevant to a query, best first; none if none is. See localrag/kb/retrieve.py, also for the options.

        Only keyword mode does without an embedder.
        """
        if self._store is None:
            return []
        return retrieve(self._store, self._place.index, query, embedder, k=k, mode=mode, kb=self.name, **options)

    def around(self, chunk_id: int, *, num_before: int = 1, num_behind: int = 1) -> list[Chunk]:
        """A chunk with those that stand directly before and behind it in its document, in its order; [] for an id that is not there."""
        if self._store is None or not 0 < chunk_id <= _MAX_ID:
            return []
        with self._store.reading():
            return self._store.chunks(self._store.around(chunk_id, num_before, num_behind), kb=self.name)

    def add_feedback(self, counts: Mapping[int, Feedback]) -> None:
        """Adds to what is known of chunks, by their ids."""
        if self._store is not None and counts:
            with self._store.writing(moves_on=False):
                self._store.add_feedback(counts)

    def mark(self, ids: Sequence[int], *, useful: bool) -> None:
        """What a person says of chunks. KnowledgeBaseError for an id that is not there."""
        there = set() if self._store is None else set(self._store.existing(ids))
        if missing := [one for one in ids if one not in there]:
            raise KnowledgeBaseError(
                f"Knowledge base {self.address!r} has no passage {missing[0]}.",
                hint="Use the number in a citation, such as 12 of [KB#12].",
                id=missing[0],
            )
        self.add_feedback(dict.fromkeys(ids, Feedback(useful=1) if useful else Feedback(useless=1)))

    def feedback(self) -> list[tuple[Chunk, Feedback]]:
        """What is known of chunks, those that helped most first."""
        if self._store is None:
            return []
        known = self._store.feedback()
        chunks = self._store.chunks(list(known), kb=self.name)
        found = [(chunk, known[chunk.id]) for chunk in chunks]
        return sorted(found, key=lambda pair: (pair[1].useless - pair[1].useful, -pair[1].cited, -pair[1].supplied, pair[0].id))

    def reset_feedback(self) -> None:
        if self._store is not None:
            with self._store.writing(moves_on=False):
                self._store.reset_feedback()

    def verify(self, *, wait_s: float = INDEX_WAIT_S, on_wait: Callable[[], None] | None = None) -> Verified:
        """Checks all of it and repairs what is derived. See localrag/kb/verify.py."""
        assert self._store is not None, "one that is not made yet"
        with self._place.taken(wait_s=wait_s, on_wait=on_wait):
            self._place.forget_index()
            return verify(self._store)

    def export(self, file: Path) -> None:
        """Writes all of it into one file, which `import_kb` takes. See localrag/kb/transfer.py."""
        self._place.export(file)

    def remove(self) -> None:
        """Deletes the knowledge base. At no instant is there half of one under its name."""
        self._place.remove()


def shown(name: str) -> str:
    """A name or an address that a person gave, as it may be shown and kept: without a password. Nothing is opened."""
    if not name.startswith(_SERVERS):
        return name
    from localrag.kb.postgres.address import parse  # noqa: PLC0415  # few need it

    try:
        return parse(name).shown
    except KnowledgeBaseError:
        return "a PostgreSQL server"


def name_of(address: str) -> str:
    """The name of a knowledge base, as it stands in labels, by what opens it. KnowledgeBaseError for what cannot open one."""
    if address.startswith(_SERVERS):
        from localrag.kb.postgres.address import parse  # noqa: PLC0415  # few need it

        return parse(address).name
    check_name(address)
    return address


def import_kb(kb_dir: Path, file: Path, name: str | None = None, *, replace: bool = False) -> str:
    """Makes a knowledge base of an exported file, by the name it had or another; gives its name.

    KnowledgeBaseError if there is one, unless it is to be replaced; it is when the file was found whole.
    """
    name = read_name(file) if name is None else name
    place = Folder(kb_dir, name)

    def make_room() -> None:
        if place.path.is_file() and not replace:
            raise KnowledgeBaseError(
                f"There is a knowledge base {name!r} already.", hint="Choose another name (--name), or remove that one.", kb=name
            )
        place.remove()  # perhaps only the lock of an indexer that was stopped before it made one

    import_from(file, kb_dir, name, make_room=make_room)
    return name
