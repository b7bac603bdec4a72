"""The embedders of a server: opened when they are first needed, and shared by all its threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localrag.session.opening import open_embedder
from localrag.settings import Settings
from localrag.tokens import Embedder

if TYPE_CHECKING:
    import numpy as np

_AT_ONCE = 32  # texts, before another thread has its turn: a question waits for no more


class Embedders:
    """One for what is stored, and one for what is asked: the same where llama.cpp has no copy for questions. `given` stands for both."""

    def __init__(self, settings: Settings, given: Embedder | None = None) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        shared = None if given is None else _InTurn(given)
        self._name = None if given is None else given.fingerprint
        self._opened: dict[bool, _InTurn | None] = {False: shared, True: shared}

    @property
    def name(self) -> str:
        """Errors as of Catalog.load."""
        if self._name is None:
            from localrag.catalog import Catalog  # noqa: PLC0415  # weight

            self._name = Catalog.load(self._settings).embedder().name
        return self._name

    def for_texts(self) -> Embedder:
        """The one that vectors are stored of. Errors as of open_embedder."""
        return self._get(for_queries=False)

    def for_queries(self) -> Embedder:
        """Errors as of open_embedder."""
        return self._get(for_queries=True)

    def _get(self, *, for_queries: bool) -> Embedder:
        with self._lock:
            found, other = self._opened[for_queries], self._opened[not for_queries]
            if found is None:
                opened = open_embedder(self._settings, for_queries=for_queries)
                found = other if other is not None and other.is_like(opened) else _InTurn(opened)
                self._opened[for_queries] = found
            return found


class _InTurn:
    """Implements `localrag.tokens.Embedder` for threads: one at a time embeds."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        return self._embedder.fingerprint

    @property
    def dim(self) -> int:
        return self._embedder.dim

    @property
    def max_tokens(self) -> int:
        return self._embedder.max_tokens

    def count(self, text: str) -> int:
        return self._embedder.count(text)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        import numpy as np  # noqa: PLC0415  # heavy

        parts = []
        for at in range(0, max(1, len(texts)), _AT_ONCE):
            with self._lock:
                parts.append(self._embedder.embed(texts[at : at + _AT_ONCE]))
        return np.concatenate(parts)

    def is_like(self, other: Embedder) -> bool:
        """Whether that one would do the same work in the same way, so that it need not be loaded too."""
        return type(self._embedder) is type(other) and self.fingerprint == other.fingerprint
