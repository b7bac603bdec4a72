"""Chunks to vectors: what is stored already, of whatever document, is not embedded again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from localrag.kb.chunking import Passage
from localrag.kb.truth import AnyStore
from localrag.tokens import Embedder

EMBED_AT_ONCE = 128
"""Chunks that are embedded in one call, of as many documents as it takes: short documents one by one took 1.7 times the CPU time. Those
of similar length are evaluated together. What is waiting is lost with a process that is killed."""

_AT_MOST = 512  # in one call, of a long document, so that its progress shows


def vectors_for(
    store: AnyStore, passages: Iterable[Passage], embedder: Embedder, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> dict[bytes, bytes]:
    """The vectors of passages by their sha256, as they are stored. `progress` hears of chunks embedded, and of how many are to be."""
    texts = {passage.sha256: passage.embedded for passage in passages}
    vectors = store.vectors_of(list(texts))
    missing = [sha256 for sha256 in texts if sha256 not in vectors]
    for at in range(0, len(missing), _AT_MOST):
        batch = missing[at : at + _AT_MOST]
        embedded = embedder.embed([texts[sha256] for sha256 in batch])
        vectors.update((sha256, vector.astype("<f4").tobytes()) for sha256, vector in zip(batch, embedded, strict=True))
        progress(at + len(batch), len(missing))
    return vectors
