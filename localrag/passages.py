"""The chunks that documents are cut into, and what a search returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of one document: `text` is its characters `start` to `end` (code points, end exclusive).

    `id` is unique within `kb` and never reused. `heading` is the path of headings above it, joined by " > ". `scope` goes into
    the label where ids of several knowledge bases, or of piped text, meet in one prompt. `place` is where a person finds it in the file,
    such as "page 3" or "lines 10-24"; empty where that is not known.
    """

    id: int
    document_id: int
    ordinal: int
    text: str
    start: int
    end: int
    source: str
    heading: str = ""
    kb: str = ""
    scope: str = ""
    place: str = ""

    @property
    def label(self) -> str:
        """The name by which the model cites this chunk and by which ledgers name it, such as `KB#12` or `KB#pets/12`."""
        return f"KB#{self.scope}/{self.id}" if self.scope else f"KB#{self.id}"


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that a search returned. `score` is the sum of `contributions`; both are higher for better.

    `relevance` is how near it is to the question in itself, 0 to 1, whatever else was found; None where that is not known. `scores` are
    those of the rankings that hold it, each on its own scale: of "semantic" the cosine similarity, of "keyword" BM25. `copies` are other
    chunks with the same text (see `merged`): this one stands for them in a prompt.
    """

    chunk: Chunk
    score: float
    contributions: Mapping[str, float] = field(default_factory=dict)
    relevance: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    copies: tuple[Chunk, ...] = ()

    @property
    def label(self) -> str:
        return self.chunk.label


def comparable(text: str) -> str:
    """What two texts have in common if they are identical: each without its letter case, and with single spaces for white space."""
    return " ".join(text.split()).casefold()


def merged(hits: Iterable[Hit], *, kept: Collection[str] = ()) -> list[Hit]:
    """Each text once, in the order of the hits: the first hit of a text stands for the others, which become its `copies`.

    Hits whose labels are in `kept` are never merged into another one, and stand for the others first. Texts are the same if they are
    `comparable`; a single word that differs keeps them apart.
    """
    hits = list(hits)
    keys = [comparable(hit.chunk.text) for hit in hits]
    heads: dict[str, str] = {}
    for hit, key in zip(hits, keys, strict=True):
        if hit.label in kept:
            heads.setdefault(key, hit.label)
    chosen: dict[tuple[str, str], Hit] = {}
    copies: dict[str, dict[str, Chunk]] = {}
    for hit, key in zip(hits, keys, strict=True):
        if heads.setdefault(key, hit.label) == hit.label or hit.label in kept:
            chosen.setdefault((key, hit.label), hit)
        copies.setdefault(key, {}).update({chunk.label: chunk for chunk in (hit.chunk, *hit.copies)})
    return [
        replace(hit, copies=tuple(chunk for name, chunk in copies[key].items() if heads[key] == label and (key, name) not in chosen))
        for (key, label), hit in chosen.items()
    ]


def expanded(hits: Iterable[Hit]) -> list[Hit]:
    """The opposite of `merged`: each hit with those that it stands for behind it, as hits of their own."""
    return [replace(hit, chunk=chunk, copies=()) for hit in hits for chunk in (hit.chunk, *hit.copies)]


@dataclass(frozen=True, slots=True)
class Citation:
    """One source that an answer cites; `supplied` says whether that chunk was in the prompt.

    `spans` are the places of the answer that cite it, as (start, end) in code points, end exclusive; empty where they are not known.
    """

    label: str
    supplied: bool
    spans: tuple[tuple[int, int], ...] = field(default=(), compare=False)
