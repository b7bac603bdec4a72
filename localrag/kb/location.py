"""A knowledge base in a folder of the home: its file, the index beside it, and the turn to write to both."""

from __future__ import annotations

import difflib
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.errors import KnowledgeBaseError, KnowledgeBaseNotFoundError
from localrag.kb.names import FILE, NAME, list_kbs
from localrag.kb.store import Store
from localrag.kb.transfer import export_to
from localrag.kb.turn import taken

if TYPE_CHECKING:
    from localrag.kb.vectors import VectorIndex

_REMOVED = ".removed-"


def check_name(name: str) -> None:
    """KnowledgeBaseError for what cannot be the name of a knowledge base."""
    if not NAME.fullmatch(name):
        raise KnowledgeBaseError(
            f"{name!r} cannot be the name of a knowledge base.",
            hint="Use 1 to 64 lower-case letters, digits, '-' and '_', beginning with a letter or a digit.",
            kb=name,
        )


def not_found(address: str, name: str, names: list[str]) -> KnowledgeBaseNotFoundError:
    """The error for a `name` that is not among those that are there."""
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    known = f" Did you mean {' or '.join(nearest)}?" if nearest else f" There is {', '.join(names[:5])}." if names else ""
    return KnowledgeBaseNotFoundError(
        f"There is no knowledge base {address!r}.{known}",
        hint=f"Make it with: localrag index PATH --kb {address}",
        kb=address,
        nearest=nearest,
    )


class Folder:
    """The knowledge base `name` below `kb_dir`, in the folder `kb_dir/name`. KnowledgeBaseError for a name that cannot be one."""

    def __init__(self, kb_dir: Path, name: str) -> None:
        check_name(name)
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

    def follow(self) -> None:
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

    def forget_index(self) -> None:
        self._index = None

    def tend(self) -> None:
        """The index is made when it is needed."""

    def export(self, file: Path) -> None:
        assert self.store is not None, "one that is not made yet"
        export_to(self.store, self.name, file)

    def remove(self) -> None:
        """At no instant is there half of one under its name."""
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
        for leftover in kb_dir.glob(f"{_REMOVED}*"):  # also of a removal that was killed
            shutil.rmtree(leftover, ignore_errors=True)
