"""Filters: conditions on the tags, sources and fields of documents, and on the metadata of texts.

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

# A pattern with more wildcards can take minutes on one value: each further star multiplies the time.
MAX_WILDCARDS = 6
MAX_PATTERN_CHARS = 255

MAX_EQUAL = 64

MAX_METADATA_BYTES = 64 * 1024
MAX_METADATA_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Where:
    """Conditions on documents: for every key, one of its patterns must match. Without conditions, all documents match.

    `source` is the name that a document is shown by, or a folder above it; `format` the ending of that name; `tag` a tag; any other key
    a field of the file (author, date …). In a pattern `*` matches any characters, "/" included, and `?` one. Case is ignored.
    `equal` are keys of the metadata of a text with values as JSON, which must be equal. A file has one such key, `source`.
    """

    conditions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    equal: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Where:
        """Parse texts such as "tag=price" or "source=guide/*.md,format=md". Raises UsageError for an invalid condition."""
        found: dict[str, list[str]] = {}
        for text in texts:
            for each in _NEXT.split(text):
                match = _CONDITION.fullmatch(each)
                if match is None or not match[2]:
                    raise UsageError(
                        f"{each.strip()[:80]!r} is not a condition.", hint="Write it as KEY=PATTERN, such as tag=price or source=guide/*."
                    )
                key, pattern = match[1].lower(), match[2]
                _check(pattern)
                if pattern not in found.setdefault(key, []):
                    found[key].append(pattern)
        return cls(tuple((key, tuple(patterns)) for key, patterns in found.items()))

    @classmethod
    def equals(cls, metadata: Mapping[str, object]) -> Where:
        """Match documents whose metadata has all these keys and values. Raises UsageError for too many keys or invalid metadata."""
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
        """The digest of each pair of `equal`."""
        return [entry_of(key, value) for key, value in self.equal]

    def equal_source(self) -> str:
        """The source that `equal` asks for if it asks for nothing else; otherwise "", which no document has."""
        if len(self.equal) != 1 or self.equal[0][0] != "source":
            return ""
        source = json.loads(self.equal[0][1])
        return source if isinstance(source, str) and is_unicode(source) and "\0" not in source else ""

    def globs(self) -> list[tuple[str, list[str]]]:
        """Each condition as ("source" or the key of a field, patterns), one of which must match the `folded` value."""
        found = []
        for key, patterns in self.conditions:
            each = [folded(pattern) for pattern in patterns]
            if key == "source":
                found.append((key, [glob for pattern in each for glob in (pattern, f"{pattern.rstrip('/')}/*")]))
            elif key == "format":
                found.append(("source", [f"*.{pattern.removeprefix('.')}" for pattern in each]))
            else:
                found.append((key, each))
        return found

    def to_sql(self) -> tuple[str, list[str | bytes]]:
        """A SELECT of the ids of matching documents, for a SQLite connection that knows `folded`, and its values."""
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
    """Adds `tags` to documents whose source or path matches `pattern`, or lies in a folder that does."""

    pattern: str
    tags: tuple[str, ...]

    def __post_init__(self) -> None:
        _check(self.pattern)

    def holds(self, *names: str) -> bool:
        regex = _regex(folded(self.pattern))
        return any(regex.fullmatch(folded(name)) for name in names)


def folded(text: str) -> str:
    """Text in the form that patterns are compared with."""
    return text.casefold()


@lru_cache(maxsize=256)
def _regex(pattern: str) -> re.Pattern[str]:
    """A pattern for a source as a regular expression, equal to the SQL of `Where`."""
    # A run of stars is one: each further one would multiply the time again.
    parts = [{"*": ".*", "?": "."}.get(part[0]) or re.escape(part) for part in re.findall(r"\*+|\?|[^*?]+", pattern.rstrip("/"), re.DOTALL)]
    return re.compile(f"{''.join(parts)}(/.*)?", re.DOTALL)


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8: it has no lone surrogate, which stands for a byte that is not UTF-8 in an argument."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(pattern: str) -> None:
    if not is_unicode(pattern):
        raise UsageError(f"The pattern {pattern[:40]!r} is not UTF-8 text.", hint="Put ? in the place of what cannot be written.")
    if len(pattern) > MAX_PATTERN_CHARS or len(re.findall(r"\*+|\?", pattern)) > MAX_WILDCARDS:
        raise UsageError(
            f"The pattern {pattern[:40]!r} has more than {MAX_WILDCARDS} wildcards or {MAX_PATTERN_CHARS} characters.",
            hint="Use a shorter pattern, or several conditions.",
        )


def dumped(metadata: Mapping[str, Any]) -> str:
    """Serialise metadata for storage. Raises UsageError if it is not JSON, too long or too deep."""
    check_depth(metadata)
    try:
        text = json.dumps(metadata, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        num_bytes = len(text.encode())
    except (TypeError, ValueError) as error:  # NaN is a ValueError, and so is a lone half of a surrogate pair
        raise UsageError("The metadata is not JSON that can be kept.", hint="Numbers are finite, and text is Unicode.") from error
    if num_bytes > MAX_METADATA_BYTES:
        raise UsageError(f"The metadata has {num_bytes} bytes, and the limit is {MAX_METADATA_BYTES}.", num_bytes=num_bytes)
    return text


def loaded(metadata: str) -> dict[str, Any]:
    """Read stored metadata. Raises KnowledgeBaseError if it is damaged."""
    try:
        found = json.loads(metadata)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    raise KnowledgeBaseError("The metadata of a text is damaged.", hint="See which: localrag kb verify NAME")


def check_depth(metadata: Mapping[str, Any]) -> None:
    """Raises UsageError for objects and lists that are nested deeper than MAX_METADATA_DEPTH."""
    level: list[Any] = [metadata]
    for _ in range(MAX_METADATA_DEPTH):
        level = [inside for each in level for inside in _inside(each)]
    if any(isinstance(each, (dict, list)) for each in level):
        raise UsageError(f"The metadata is nested deeper than {MAX_METADATA_DEPTH} levels.", limit=MAX_METADATA_DEPTH)


def canonical(value: object) -> str:
    """JSON that is the same for equal values. Raises UsageError for a number that is not finite."""
    try:
        return json.dumps(_plain(value), sort_keys=True, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise UsageError("The metadata is not JSON: its numbers are finite.") from None


def entry_of(key: str, value: str) -> bytes:
    """The digest of a key of the metadata and its `value` in canonical JSON."""
    return hashlib.sha256(f"{canonical(key)}:{value}".encode()).digest()


def entries_of(metadata: Mapping[str, Any]) -> frozenset[bytes]:
    """The digests of all keys and values of metadata."""
    return frozenset(entry_of(key, canonical(value)) for key, value in metadata.items())


def _inside(value: object) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _plain(value: object) -> object:
    """A value with whole numbers as integers, so that 1.0 equals 1."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
