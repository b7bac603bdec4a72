"""Which sources an answer cites, checked against those it was given."""

from __future__ import annotations

from collections.abc import Iterable

from localrag.passages import CITATION, Citation, Hit


def cite(text: str, hits: Iterable[Hit]) -> list[Citation]:
    """The distinct labels that `text` cites, in order of first mention; `supplied` is False for an invented one."""
    supplied = {hit.label for hit in hits}
    labels = dict.fromkeys(match[0] for match in CITATION.finditer(text))
    return [Citation(label, label in supplied) for label in labels]
