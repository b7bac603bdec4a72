"""Which documents a search looks at: conditions on their tags, their sources and what the files say of themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from localrag.errors import UsageError
from localrag.kb.metadata import canonical, check_depth, entry_of

_CONDITION = re.compile(r"\s*([A-Za-z][\w.-]{0,63})\s*=\s*(.*?)\s*", re.DOTALL)
_NEXT = re.compile(r",(?=\s*[A-Za-z][\w.-]{0,63}\s*=)")

# A pattern with more wildcards can take minutes against one value: each further star multiplies the time.
MAX_WILDCARDS = 6
MAX_PATTERN_CHARS = 255

MAX_EQUAL = 64


@dataclass(frozen=True, slots=True)
class Where:
    """Conditions that a document has to meet: one of the patterns of every key. Without any, all documents pass.

    `source` is the name that a document is shown by, or a folder it lies in; `format` the ending of that name; `tag` a tag; any other key
    a field that its file has (author, date …). In a pattern `*` stands for any characters, also "/", and `?` for one. Case does not matter.
    `equal` are keys of the metadata of a text and their values as JSON: each has to be just that.
    """

    conditions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    equal: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Where:
        """From texts such as "tag=price" or "source=guide/*.md,format=md". UsageError for what is none."""
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
        """All of this has to stand in the metadata of a document. UsageError for too many keys, or what is no metadata."""
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
        """What each of `equal` is found by."""
        return [entry_of(key, value) for key, value in self.equal]

    def globs(self) -> list[tuple[str, list[str]]]:
        """Each condition as ("source" or the key of a field, patterns): one of them has to match what is `folded` of that value."""
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
        """A SELECT of the ids of the documents that pass, for a SQLite connection that knows `folded`, and its values."""
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
                f"d.id IN (SELECT document_id FROM entries WHERE entry IN ({marks}) "  # noqa: S608  # no values in it
                f"GROUP BY document_id HAVING count(*) = {len(self.equal)})"
            )
            values += self.entries()
        return f"SELECT d.id FROM documents d WHERE {' AND '.join(parts) or '1'}", values  # noqa: S608  # the parts above


@dataclass(frozen=True, slots=True)
class FolderRule:
    """The `tags` of documents whose source, or whose path in the file system, matches `pattern` or lies in a folder that does."""

    pattern: str
    tags: tuple[str, ...]

    def __post_init__(self) -> None:
        _check(self.pattern)

    def holds(self, *names: str) -> bool:
        regex = _regex(folded(self.pattern))
        return any(regex.fullmatch(folded(name)) for name in names)


def folded(text: str) -> str:
    """Text as patterns are compared with it."""
    return text.casefold()


@lru_cache(maxsize=256)
def _regex(pattern: str) -> re.Pattern[str]:
    """What the SQL above says of a source, as a regular expression."""
    # A run of stars is one: each further one would multiply the time again.
    parts = [{"*": ".*", "?": "."}.get(part[0]) or re.escape(part) for part in re.findall(r"\*+|\?|[^*?]+", pattern.rstrip("/"), re.DOTALL)]
    return re.compile(f"{''.join(parts)}(/.*)?", re.DOTALL)


def is_unicode(text: str) -> bool:
    """Whether no half of a surrogate pair stands alone, which cannot be stored as UTF-8: in an argument it is a byte that is not UTF-8."""
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
