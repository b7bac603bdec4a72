"""Text that a reader puts together piece by piece, with its headings and places: bounded, and fit to be stored.

A Composer also sees to what stands between paragraphs, lines and rows.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from localrag.kb.readers.base import Place, Reading, Section, UnreadableError

MAX_TEXT_CHARS = 20_000_000
MAX_NAME_CHARS = 200
"""Of a heading in a path, a title or a field: a path is stored with every chunk, and one long name would multiply the text."""

MAX_PLACES = 1_048_576  # the rows of the longest sheet
MAX_HEADINGS = 100_000

_MAX_RANGES = 20  # of numbers that are named
_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")  # zero width, bidi control, tags
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")  # a lone half of a surrogate pair cannot be stored as UTF-8
_UNFIT_ENCODINGS = frozenset({"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape"})


class Mark(NamedTuple):
    """A heading: its lines are characters `start` to `body` of the text; `level` 1 is the highest. Without a name it is only a border."""

    start: int
    body: int
    level: int
    name: str


@dataclass(slots=True)
class Draft:
    """A Reading in the making. UnreadableError once its text is over MAX_TEXT_CHARS."""

    size: int = 0
    marks: list[Mark] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)

    def write(self, text: str) -> None:
        """Adds text, without characters that a person cannot see."""
        text = clean(text)
        self.size += len(text)
        check_size(self.size)
        self._parts.append(text)

    def heading(self, level: int, name: str, shown: str | None = None) -> None:
        """Begins a section. `shown` is what stands for the heading in the text: by default its name, and an empty line."""
        start = self.size
        self.write(f"{name}\n\n" if shown is None else shown)
        self.marks.append(Mark(start, self.size, level, one_line(name)))

    def place(self, kind: str, number: int) -> None:
        """What is written from here on stands at `number` of `kind`."""
        self.places.append(Place(self.size, kind, number))

    def reading(
        self,
        *,
        title: str = "",
        prefix: str | None = None,
        tags: Sequence[str] = (),
        fields: Sequence[tuple[str, str]] = (),
        markdown: bool = False,
        missing: Sequence[str] = (),
    ) -> Reading:
        """What was written. Heading paths begin with `prefix`, by default the title."""
        text, title = "".join(self._parts), one_line(title)
        return Reading(
            text,
            tuple(sections(text, self.marks, title if prefix is None else one_line(prefix))),
            title,
            tuple(dict.fromkeys(tag for tag in map(one_line, tags) if tag)),
            markdown=markdown,
            places=tuple(self.places),
            fields=tuple((key, value) for key, value in ((key, one_line(value)) for key, value in fields) if value),
            missing=tuple(missing),
        )


class Composer:
    """Takes headings, paragraphs and places in their order. UnreadableError as soon as there is too much of them."""

    def __init__(self) -> None:
        self._draft = Draft()
        self._place: tuple[str, int] | None = None
        self._first_heading = ""

    def heading(self, level: int, name: str) -> None:
        """A heading; it ends those of its level and below. 0 is the level of a document's title. Without a name it is only a border."""
        name = one_line(name)
        if len(self._draft.marks) == MAX_HEADINGS:
            raise UnreadableError(f"it has more than {MAX_HEADINGS:,} headings")
        if level <= 1:
            self._first_heading = self._first_heading or name
        if name:
            self._begin("\n\n")
        self._draft.heading(level, name, shown=name)

    def paragraph(self, text: str) -> None:
        """Text after an empty line."""
        self._add(text, "\n\n")

    def line(self, text: str) -> None:
        """Text on the line after the text before it."""
        self._add(text, "\n")

    def place(self, kind: str, number: int) -> None:
        """What is added next stands at this place of the file."""
        self._place = (kind, number)

    def reading(self, title: str = "", fields: tuple[tuple[str, str], ...] = (), missing: tuple[str, ...] = ()) -> Reading:
        """All of it. `title` goes in front of the heading paths; the first heading of level 0 or 1 stands in for a missing one."""
        return self._draft.reading(title=title or self._first_heading, fields=fields, missing=missing)

    def _add(self, text: str, separator: str) -> None:
        text = text.strip("\r\n").rstrip()
        if text and self._place is None and self._draft.size:  # the common case, with one write
            self._draft.write(separator + text)
        elif text:
            self._begin(separator)
            self._draft.write(text)

    def _begin(self, separator: str) -> None:
        if self._draft.size:
            self._draft.write(separator)
        if self._place is not None:
            self._draft.place(*self._place)
            self._place = None
            if len(self._draft.places) > MAX_PLACES:
                raise UnreadableError(f"it has more than {MAX_PLACES:,} rows")


def sections(text: str, marks: Sequence[Mark], prefix: str = "", *, begin: int = 0) -> Iterator[Section]:
    """From character `begin` on, one from each heading to the next, its own heading included; a heading without text of its own joins
    the section after it.

    UnreadableError if the paths take more room than a text may.
    """
    start = marks[0].start if marks else len(text)  # without headings, one section
    if text[begin:start].strip():
        yield Section(begin, start, prefix)
    path: list[Mark] = []
    joined: list[Mark] = []  # the headings that the section begins with
    num_path_chars = 0
    for mark, following in zip_longest(marks, marks[1:]):
        path = [above for above in path if above.level < mark.level] + [mark]
        joined.append(mark)
        end = following.start if following else len(text)
        if following and not text[mark.body : end].strip():
            continue
        names = [step.name for step in path if step.name]
        heading = " > ".join(names if not prefix or names[:1] == [prefix] else [prefix, *names])
        num_path_chars += len(heading)
        check_size(num_path_chars)  # long headings above many short ones are repeated with each
        # What stands before `body` can be left to the path: not so a heading that is not in the path.
        is_in_path = all(each in path for each in joined if each.start < each.body)
        yield Section(start, end, heading, mark.body if is_in_path else 0)
        start = end
        joined.clear()


def check_size(num_chars: int) -> None:
    """UnreadableError if that is more text than a file may hold."""
    if num_chars > MAX_TEXT_CHARS:
        raise UnreadableError(f"it holds more than {MAX_TEXT_CHARS // 1_000_000} MB of text")


def clean(text: str) -> str:
    """Text without control characters, and without those that are there and cannot be seen."""
    return _CONTROL.sub(" ", _INVISIBLE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def one_line(text: str) -> str:
    """A name, on one line and not too long."""
    return " ".join(clean(text[: MAX_NAME_CHARS * 10]).split())[:MAX_NAME_CHARS].rstrip()


def flat(text: str) -> str:
    """Text on one line."""
    return " ".join(text.split())


def shortened(text: str) -> str:
    """A name that is repeated in every row, bounded."""
    return text if len(text) <= MAX_NAME_CHARS else text[: MAX_NAME_CHARS - 1] + "…"


def decode_as(data: bytes, encoding: str) -> str | None:
    """Text in an encoding that a file names; None where that is no encoding of text, or not the one of this text."""
    try:
        name = codecs.lookup(encoding).name
        if name.replace("-", "_") in _UNFIT_ENCODINGS:  # slow on long text, or an escape syntax
            return None
        if name in ("ascii", "iso8859-1"):  # what calls itself so is often Windows-1252, as browsers know
            name = "cp1252"
        return data.decode(name)
    except (LookupError, ValueError):
        return None


def numbered(kind: str, numbers: Sequence[int], one: str, many: str) -> str:
    """What is said of pages or slides, by their numbers in order: "page 4 is …", "pages 2-6 and 9 are …"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:_MAX_RANGES]]
    if len(ranges) > _MAX_RANGES:
        shown.append(f"{sum(last - first + 1 for first, last in ranges[_MAX_RANGES:])} more")
    named = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
    return f"{kind} {named} {one}" if len(numbers) == 1 else f"{kind}s {named} {many}"
