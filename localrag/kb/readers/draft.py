"""Text that a reader puts together piece by piece, with its headings and places: bounded, and fit to be stored."""

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
        )


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
