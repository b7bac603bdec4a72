"""The state that all routes of one server share, and the dependency by which a route asks for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from localrag.kb import list_kbs
from localrag.server.engine_process import EngineProcess
from localrag.server.metrics import Metrics
from localrag.server.security import Guard
from localrag.session.opening import open_embedder
from localrag.settings import Settings
from localrag.tokens import Embedder

if TYPE_CHECKING:
    import numpy as np

_EMBED_BATCH = 32
"""Texts that one thread embeds before another has its turn: a question waits for no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a server answers with."""

    settings: Settings
    engine: EngineProcess | None = None
    """None for a server of indexes alone."""
    guard: Guard = field(default_factory=Guard)
    rejects_tools: bool = False
    """Whether tools beside an index are refused, rather than answered without the index."""
    metrics: Metrics = field(default_factory=Metrics)
    embedder: InitVar[Embedder | None] = None
    """In place of the one of models.toml."""
    embedders: Embedders = field(init=False)

    def __post_init__(self, embedder: Embedder | None) -> None:
        object.__setattr__(self, "embedders", Embedders(self.settings, embedder))

    def has_index(self, name: str) -> bool:
        return name in list_kbs(self.settings.kb_dir)


async def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(_state)]
"""The type of a route's parameter that takes the state of its server."""


class Embedders:
    """The embedders of a server, opened when they are first needed, and shared by all its threads.

    One embeds what is stored, and one what is asked: the same where llama.cpp has no copy for questions. `embedder` stands for both.
    """

    def __init__(self, settings: Settings, embedder: Embedder | None = None) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        shared = None if embedder is None else _SerialEmbedder(embedder)
        self._name = None if embedder is None else embedder.fingerprint
        self._opened: dict[bool, _SerialEmbedder | None] = {False: shared, True: shared}

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
                found = other if other is not None and other.is_like(opened) else _SerialEmbedder(opened)
                self._opened[for_queries] = found
            return found


class _SerialEmbedder:
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
        for at in range(0, max(1, len(texts)), _EMBED_BATCH):
            with self._lock:
                parts.append(self._embedder.embed(texts[at : at + _EMBED_BATCH]))
        return np.concatenate(parts)

    def is_like(self, other: Embedder) -> bool:
        """Whether that one would do the same work in the same way, so that it need not be loaded too."""
        return type(self._embedder) is type(other) and self.fingerprint == other.fingerprint
