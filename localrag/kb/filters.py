"""Filter documents by tag, source, field or metadata.

The metadata of a text is any JSON object of bounded size and depth. Values are compared as JSON: numbers by value, everything else exactly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from localrag.errors import KnowledgeBaseError, UsageError

_CONDITION = re.compile(r"\s*([A-Za-z][\w.-]{0,63})\s*=\s*(.*?)\s*", re.DOTALL)
_NEXT = re.compile(r",(?=\s*[A-Za-z][\w.-]{0,63}\s*=)")

# A pattern with more wildcards can take minutes on one value: each additional star multiplies the time.
MAX_WILDCARDS = 6
MAX_PATTERN_CHARS = 255

MAX_EQUAL = 64

MAX_METADATA_BYTES = 64 * 1024
MAX_METADATA_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Where:
    """Conditions on documents. For every key, one of its patterns must match; without conditions, all documents match.

    The key `source` is the displayed name of a document or a folder above it, `format` the extension of that name, `tag` a tag, and any
    other key a field of the file (author, date …). In a pattern, `*` matches any characters, "/" included, and `?` matches one. Case is
    ignored. `equal` lists metadata keys and JSON values that must be equal; a file has only the key `source`.
    """

    conditions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    equal: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Where:
        """Parse texts such as "tag=price" or "source=guide/*.md,format=md". Raises UsageError for an invalid condition."""
        conditions: dict[str, list[str]] = {}
        for text in texts:
            for part in _NEXT.split(text):
                match = _CONDITION.fullmatch(part)
                if match is None or not match[2]:
                    raise UsageError(
                        f"{part.strip()[:80]!r} is not a condition.", hint="Write it as KEY=PATTERN, such as tag=price or source=guide/*."
                    )
                key, pattern = match[1].lower(), match[2]
                _check(pattern)
                if pattern not in conditions.setdefault(key, []):
                    conditions[key].append(pattern)
        return cls(tuple((key, tuple(patterns)) for key, patterns in conditions.items()))

    @classmethod
    def of_sources(cls, patterns: Iterable[str]) -> Where:
        """Match documents whose source, or a folder above it, matches one of these patterns. Raises UsageError for an invalid pattern."""
        patterns = tuple(patterns)
        for pattern in patterns:
            _check(pattern)
        return cls((("source", patterns),))

    @classmethod
    def equals(cls, metadata: Mapping[str, object]) -> Where:
        """Match documents whose metadata has all these keys and values. Raises UsageError for invalid metadata or too many keys."""
        if len(metadata) > MAX_EQUAL:
            raise UsageError(f"A filter of {len(metadata)} keys is too long; the limit is {MAX_EQUAL}.", num_keys=len(metadata))
        check_depth(metadata)
        return cls(equal=tuple((key, canonical(value)) for key, value in metadata.items()))

    def __bool__(self) -> bool:
        return bool(self.conditions or self.equal)

    def __str__(self) -> str:
        patterns = [f"{key}={pattern}" for key, patterns in self.conditions for pattern in patterns]
        return ", ".join([*patterns, *(f"{key}={value}" for key, value in self.equal)])

    def entries(self) -> list[bytes]:
        """Return the digest of each pair of `equal`."""
        return [entry_of(key, value) for key, value in self.equal]

    def equal_source(self) -> str:
        """Return the source that `equal` requires, if that is its only key; otherwise "", which no document has."""
        if len(self.equal) != 1 or self.equal[0][0] != "source":
            return ""
        source = json.loads(self.equal[0][1])
        return source if isinstance(source, str) and is_unicode(source) and "\0" not in source else ""

    def globs(self) -> list[tuple[str, list[str]]]:
        """Return each condition as (key, globs). The key is "source" or a field; one glob must match the `folded` value."""
        conditions = []
        for key, patterns in self.conditions:
            globs = [folded(pattern) for pattern in patterns]
            if key == "source":
                conditions.append((key, [form for glob in globs for form in (glob, f"{glob.rstrip('/')}/*")]))
            elif key == "format":
                conditions.append(("source", [f"*.{glob.removeprefix('.')}" for glob in globs]))
            else:
                conditions.append((key, globs))
        return conditions

    def to_sql(self) -> tuple[str, list[str | bytes]]:
        """Return a SELECT of the ids of matching documents, and its values, for a SQLite connection with the function `folded`."""
        parts, values = list[str](), list[str | bytes]()
        for key, globs in self.globs():
            if key == "source":
                parts.append(f"({' OR '.join(['folded(d.source) GLOB ?'] * len(globs))})")
            else:
                matches = " OR ".join(["folded(value) GLOB ?"] * len(globs))
                parts.append(f"d.id IN (SELECT document_id FROM fields WHERE key = ? AND ({matches}))")  # noqa: S608  # no values in it
                values.append(key)
            values += [glob.replace("[", "[[]") for glob in globs]  # in SQLite's GLOB a bracket opens a set; here it is a character
        if self.equal:
            marks = ", ".join("?" * len(self.equal))
            parts.append(
                f"(d.id IN (SELECT document_id FROM entries WHERE entry IN ({marks}) "  # noqa: S608  # no values in it
                f"GROUP BY document_id HAVING count(*) = {len(self.equal)}) "
                "OR (d.source = ? AND d.id NOT IN (SELECT document_id FROM texts)))"
            )
            values += [*self.entries(), self.equal_source()]
        return f"SELECT d.id FROM documents d WHERE {' AND '.join(parts) or '1'}", values  # noqa: S608  # the parts above


@dataclass(frozen=True, slots=True)
class FolderRule:
    """Adds `tags` to documents whose source or path matches `pattern`, or that lie in a matching folder."""

    pattern: str
    tags: tuple[str, ...]

    def __post_init__(self) -> None:
        _check(self.pattern)

    def holds(self, *names: str) -> bool:
        regex = _regex(folded(self.pattern))
        return any(regex.fullmatch(folded(name)) for name in names)


def folded(text: str) -> str:
    """Return the case-folded text that patterns are compared with."""
    return text.casefold()


@lru_cache(maxsize=256)
def _regex(pattern: str) -> re.Pattern[str]:
    """Compile a source pattern to a regular expression with the same meaning as the SQL of `Where`."""
    # A run of stars counts as one, because each additional star multiplies the time.
    parts = [{"*": ".*", "?": "."}.get(part[0]) or re.escape(part) for part in re.findall(r"\*+|\?|[^*?]+", pattern.rstrip("/"), re.DOTALL)]
    return re.compile(f"{''.join(parts)}(/.*)?", re.DOTALL)


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8. Arguments with invalid bytes hold lone surrogates, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(pattern: str) -> None:
    if not is_unicode(pattern):
        raise UsageError(f"The pattern {pattern[:40]!r} is not UTF-8 text.", hint="Use ? for characters that cannot be written.")
    if len(pattern) > MAX_PATTERN_CHARS or len(re.findall(r"\*+|\?", pattern)) > MAX_WILDCARDS:
        raise UsageError(
            f"The pattern {pattern[:40]!r} has more than {MAX_WILDCARDS} wildcards or {MAX_PATTERN_CHARS} characters.",
            hint="Use a shorter pattern, or several conditions.",
        )


def dumped(metadata: Mapping[str, Any]) -> str:
    """Serialise metadata for storage. Raises UsageError if it is not JSON, or is too long or too deep."""
    check_depth(metadata)
    try:
        text = json.dumps(metadata, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        num_bytes = len(text.encode())
    except (TypeError, ValueError) as error:  # NaN is a ValueError, and so is a lone half of a surrogate pair
        raise UsageError("The metadata is not valid JSON.", hint="Numbers must be finite, and text must be Unicode.") from error
    if num_bytes > MAX_METADATA_BYTES:
        raise UsageError(f"The metadata has {num_bytes} bytes; the limit is {MAX_METADATA_BYTES}.", num_bytes=num_bytes)
    return text


def loaded(metadata: str) -> dict[str, Any]:
    """Read stored metadata. Raises KnowledgeBaseError if it is damaged."""
    try:
        value = json.loads(metadata)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    raise KnowledgeBaseError("The metadata of a text is damaged.", hint="Find the text with: localrag kb verify NAME")


def check_depth(metadata: Mapping[str, Any]) -> None:
    """Raise UsageError if objects and lists are nested deeper than MAX_METADATA_DEPTH."""
    level: list[Any] = [metadata]
    for _ in range(MAX_METADATA_DEPTH):
        level = [child for value in level for child in _children(value)]
    if any(isinstance(value, (dict, list)) for value in level):
        raise UsageError(f"The metadata is nested deeper than {MAX_METADATA_DEPTH} levels.", limit=MAX_METADATA_DEPTH)


def canonical(value: object) -> str:
    """Serialise a value to JSON that is identical for equal values. Raises UsageError for a number that is not finite."""
    try:
        return json.dumps(_plain(value), sort_keys=True, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise UsageError("The metadata is not valid JSON: numbers must be finite.") from None


def entry_of(key: str, value: str) -> bytes:
    """Return the digest of a metadata key and its `value` in canonical JSON."""
    return hashlib.sha256(f"{canonical(key)}:{value}".encode()).digest()


def entries_of(metadata: Mapping[str, Any]) -> frozenset[bytes]:
    """Return the digest of each key and value of metadata."""
    return frozenset(entry_of(key, canonical(value)) for key, value in metadata.items())


def _children(value: object) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _plain(value: object) -> object:
    """Convert whole floats to integers, so that 1.0 equals 1."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child) for child in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
