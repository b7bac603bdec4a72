"""Where a stretch of a file's text is found in the file, in words that a person can follow."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right

from localrag.kb.readers.base import Reading

_LINE_END = re.compile(r"\r\n|\r|\n")


class Places:
    """The places of one reading. A call gives that of its characters `start` to `end`: "page 3", "lines 12-40", or nothing."""

    def __init__(self, reading: Reading) -> None:
        self._places = reading.places
        if not self._places and not reading.own_lines:
            self._starts: list[int] | None = None
        elif self._places:
            self._starts = [place.start for place in self._places]
        else:
            self._starts = [0, *(match.end() for match in _LINE_END.finditer(reading.text))]

    def __call__(self, start: int, end: int) -> str:
        if self._starts is None:
            return ""
        first = max(0, bisect_right(self._starts, start) - 1)
        last = max(first, bisect_left(self._starts, end) - 1)
        if not self._places:
            return _shown("line", first + 1, last + 1)
        one, other = self._places[first], self._places[last]
        if one.kind != other.kind:
            return _shown(one.kind, one.number, one.number)
        return _shown(one.kind, one.number, other.number)


def _shown(kind: str, first: int, last: int) -> str:
    return f"{kind}s {first}-{last}" if last > first else f"{kind} {first}"
