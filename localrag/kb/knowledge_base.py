"""A knowledge base as the rest of localrag sees it: a name, a folder, and what can be done with it."""

from __future__ import annotations

import difflib
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from localrag.errors import KnowledgeBaseError, KnowledgeBaseNotFoundError
from localrag.kb.ingest import IngestResult, Progress, ingest
from localrag.kb.retrieve import Mode, retrieve
from localrag.kb.store import Store
from localrag.passages import Hit
from localrag.tokens import Embedder

if TYPE_CHECKING:
    from localrag.kb.vectors import VectorIndex

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_FILE = "kb.sqlite"
_REMOVED = ".removed-"


def list_kbs(kb_dir: Path) -> list[str]:
    """The names of the knowledge bases in a folder, sorted; none if the folder is not there."""
    if not kb_dir.is_dir():
        return []
    return sorted(entry.name for entry in kb_dir.iterdir() if _NAME.fullmatch(entry.name) and (entry / _FILE).is_file())


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
        if not _NAME.fullmatch(name):
            raise KnowledgeBaseError(
                f"{name!r} cannot be the name of a knowledge base.",
                hint="Use 1 to 64 lower-case letters, digits, '-' and '_', beginning with a letter or a digit.",
                kb=name,
            )
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

    def sources(self) -> list[tuple[str, int]]:
        """(source, number of chunks) of every document, by source."""
        return [] if self._store is None else self._store.sources()

    def paths(self) -> dict[str, Path]:
        """Where each source was read from."""
        return {} if self._store is None else {source: Path(path) for source, path in self._store.paths().items()}

    def ingest(self, paths: Sequence[Path], embedder: Embedder, progress: Callable[[Progress], None] | None = None) -> IngestResult:
        """Adds and updates the documents below `paths`, and removes those whose files are gone. See localrag/kb/ingest.py."""
        if self._store is not None:
            self._store.check_embedder(embedder.fingerprint, embedder.dim)
        known = {} if self._store is None else self._store.documents()
        return ingest(paths, embedder, known=known, open_store=self._made, progress=progress)

    def retrieve(self, query: str, embedder: Embedder | None, k: int = 8, mode: Mode = "hybrid") -> list[Hit]:
        """The `k` best chunks that are relevant to a query, best first; none if none is. See localrag/kb/retrieve.py.

        Only keyword mode does without an embedder.
        """
        if self._store is None:
            return []
        return retrieve(self._store, self._present_index, query, embedder, k=k, mode=mode, kb=self.name)

    def remove(self) -> None:
        """Deletes the knowledge base. At no instant is there half of one under its name."""
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

    def _made(self) -> Store:
        if self._store is None:
            self._store = Store(self.path, create=True)
        return self._store

    def _present_index(self) -> VectorIndex | None:
        from localrag.kb.vectors import load_index  # noqa: PLC0415  # imports faiss

        assert self._store is not None
        if self._index is None or self._index.generation != self._store.generation:
            self._index = load_index(self._store)
        return self._index


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
