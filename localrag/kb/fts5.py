"""What is looked for, in the language of SQLite's full text (FTS5)."""

from __future__ import annotations

from collections.abc import Iterable

from localrag.kb.query import Term


def any_of(terms: Iterable[Term]) -> str:
    """The expression that any of these terms matches."""
    return " OR ".join(each for term in terms for each in _expressions(term))


def _expressions(term: Term) -> list[str]:
    return [_quoted(term.text) + "*" * term.is_prefix, *map(_quoted, term.stems)]


def _quoted(text: str) -> str:
    """Within quotation marks nothing is syntax but they themselves."""
    return '"' + text.replace('"', '""') + '"'
