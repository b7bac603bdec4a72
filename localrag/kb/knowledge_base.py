"""A knowledge base as the rest of localrag sees it: a name, a folder, and what can be done with it."""

from __future__ import annotations

import difflib
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from localrag.errors import KnowledgeBaseError, KnowledgeBaseNotFoundError
from localrag.kb.filters import Where
from localrag.kb.ingest import IngestResult, Plan, Progress, Tagging, ingest, plan
from localrag.kb.rerank import Reranker
from localrag.kb.retrieve import Mode, retrieve
from localrag.kb.store import Feedback, Store
from localrag.kb.transfer import export_to, import_from, read_name
from localrag.kb.turn import taken
from localrag.kb.verify import Verified, verify
from localrag.passages import Chunk, Hit
from localrag.tokens import Embedder

if TYPE_CHECKING:
    from localrag.kb.vectors import VectorIndex

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_FILE = "kb.sqlite"
_REMOVED = ".removed-"

INDEX_WAIT_S = 30.0
"""How long an indexer waits for another one to end."""


def list_kbs(kb_dir: Path) -> list[str]:
    """The names of the knowledge bases in a folder, sorted; none if the folder is not there."""
    if not kb_dir.is_dir():
        return []
    return sorted(entry.name for entry in kb_dir.iterdir() if _NAME.fullmatch(entry.name) and (entry / _FILE).is_file())


class RetrieveOptions(TypedDict, total=False):
    """See localrag/kb/retrieve.py."""

    where: Where | None
    learned: bool
    reranker: Reranker | None
    diversity: float


class KnowledgeBase:
    """Documents of one name below `kb_dir`, in the folder `kb_dir/name`. Use `open`; then `close`, or a `with` block."""

    def __init__(self, kb_dir: Path, name: str, store: Store | None) -> None:
        self.name = name
        self.path = kb_dir / name / _FILE
        self._store = store
        self._index: VectorIndex | None = None

    @classmethod
    def open(cls, kb_dir: Path, name: str, *, create: bool = False) -> KnowledgeBase:
        """Opens a knowledge base. With `create`, one that is not there is made when the first document is written, not before.

        KnowledgeBaseNotFoundError names the nearest ones; KnowledgeBaseError for a name that cannot be one, or a file that cannot be used.
        """
        _check_name(name)
        path = kb_dir / name / _FILE
        if path.is_file():
            return cls(kb_dir, name, Store(path))
        if create:
            return cls(kb_dir, name, None)
        raise _not_found(kb_dir, name)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def sources(self, where: Where | None = None) -> list[tuple[str, int]]:
        """(source, number of chunks) of every document that passes, by source."""
        return [] if self._store is None else self._store.sources(where)

    def fields(self, where: Where | None = None) -> dict[str, dict[str, list[str]]]:
        """The tags and other fields of the documents that pass and have any, by source: key to values."""
        return {} if self._store is None else self._store.fields(where)

    def paths(self) -> dict[str, Path]:
        """Where each source was read from."""
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
        """Adds and updates the documents below `paths`, and removes those whose files are gone. See localrag/kb/ingest.py.

        One at a time: `on_wait` is called if another process is at it, and KnowledgeBaseError says so if it still is after `wait_s`.
        """
        with ExitStack() as turn:

            def made() -> Store:
                turn.enter_context(taken(self.path.parent, wait_s=wait_s, on_wait=on_wait))
                self._store = Store(self.path, create=True)
                return self._store

            if self._store is not None:
                self._store.check_embedder(embedder.fingerprint, embedder.dim)
                turn.enter_context(taken(self.path.parent, wait_s=wait_s, on_wait=on_wait))
            return ingest(paths, embedder, store=self._store, make_store=made, progress=progress, tagging=tagging, hidden=hidden)

    def plan(self, paths: Sequence[Path], *, hidden: bool = False) -> Plan:
        """What `ingest` would do, without reading a file or writing anything."""
        return plan(paths, {} if self._store is None else self._store.documents(), hidden=hidden)

    def retrieve(
        self, query: str, embedder: Embedder | None, k: int = 8, mode: Mode = "hybrid", **options: Unpack[RetrieveOptions]
    ) -> list[Hit]:
        """The `k` best chunks that are relevant to a query, best first; none if none is. See localrag/kb/retrieve.py, also for the options.

        Only keyword mode does without an embedder.
        """
        if self._store is None:
            return []
        return retrieve(self._store, self._present_index, query, embedder, k=k, mode=mode, kb=self.name, **options)

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
                f"Knowledge base {self.name!r} has no passage {missing[0]}.",
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
        with taken(self.path.parent, wait_s=wait_s, on_wait=on_wait):
            self._index = None
            return verify(self._store)

    def export(self, file: Path) -> None:
        """Writes all of it into one file, which `import_kb` takes. See localrag/kb/transfer.py."""
        assert self._store is not None, "one that is not made yet"
        export_to(self._store, self.name, file)

    def remove(self) -> None:
        """Deletes the knowledge base. At no instant is there half of one under its name."""
        with taken(self.path.parent, wait_s=0):
            self.close()
        self._store = None
        kb_dir = self.path.parent.parent
        try:
            self.path.parent.rename(kb_dir / f"{_REMOVED}{secrets.token_hex(8)}")
        except OSError as error:
            raise KnowledgeBaseError(
                f"Cannot remove knowledge base {self.name!r}: {error.strerror or error}.", hint=f"Check that {kb_dir} can be written to."
            ) from error
        for leftover in kb_dir.glob(f"{_REMOVED}*"):  # also of a removal that was killed
            shutil.rmtree(leftover, ignore_errors=True)

    def _present_index(self) -> VectorIndex | None:
        from localrag.kb.vectors import load_index  # noqa: PLC0415  # imports numpy

        assert self._store is not None
        if self._index is None or self._index.generation != self._store.generation:
            self._index = load_index(self._store, self._index)
            if self._index is not None and self._index.wants_clusters:
                from localrag.kb.ann import start_build  # noqa: PLC0415  # imports faiss

                start_build(self._store.path)
        return self._index


def import_kb(kb_dir: Path, file: Path, name: str | None = None) -> str:
    """Makes a knowledge base of an exported file, by the name it had or another; gives its name. KnowledgeBaseError if there is one."""
    name = read_name(file) if name is None else name
    _check_name(name)
    import_from(file, kb_dir, name)
    return name


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise KnowledgeBaseError(
            f"{name!r} cannot be the name of a knowledge base.",
            hint="Use 1 to 64 lower-case letters, digits, '-' and '_', beginning with a letter or a digit.",
            kb=name,
        )


def _not_found(kb_dir: Path, name: str) -> KnowledgeBaseNotFoundError:
    names = list_kbs(kb_dir)
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    known = f" Did you mean {' or '.join(nearest)}?" if nearest else f" There is {', '.join(names[:5])}." if names else ""
    return KnowledgeBaseNotFoundError(
        f"There is no knowledge base {name!r}.{known}",
        hint=f"Make it with: localrag index PATH --kb {name}",
        kb=name,
        nearest=nearest,
    )
