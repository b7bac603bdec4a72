"""The chunks that documents are cut into, and what a search returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


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
    those of the rankings that hold it, each on its own scale: of "semantic" the cosine similarity, of "keyword" BM25.
    """

    chunk: Chunk
    score: float
    contributions: Mapping[str, float] = field(default_factory=dict)
    relevance: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.chunk.label


@dataclass(frozen=True, slots=True)
class Citation:
    """One `[KB#id]` in an answer; `supplied` says whether that chunk was in the prompt."""

    label: str
    supplied: bool


CITATION = re.compile(r"\bKB#(?:[a-z0-9][a-z0-9_-]{0,63}/)?\d{1,18}\b")
"""How a model cites a chunk in running text; the brackets around it, which small models forget, do not matter."""

_TAG = re.compile(r"KB#(?=\S)")
_LABEL = re.compile(r"\[?(?:KB#)?(?:([a-z0-9][a-z0-9_-]{0,63})/)?([0-9]{1,18})\]?", re.IGNORECASE)


def parse_label(text: str) -> tuple[str, int] | None:
    """The scope and the id that a label names: of `KB#pets/12`, `[KB#12]` or `12`. None for any other text."""
    match = _LABEL.fullmatch(text.strip())
    return None if match is None else ((match[1] or "").lower(), int(match[2]))


def untagged(text: str) -> str:
    """A text of somebody else as it is sent: each tag in it is broken by a zero-width space, so that it cannot pose as a source."""
    return _TAG.sub("KB\u200b#", text)
