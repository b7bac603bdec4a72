"""Citations: read the source labels that models write, in any spelling, and check them against the sources they were given.

A prompt shows each source as `[KB#12]`, or as `[KB#pets/12]` if there are several knowledge bases. Models write that back as
`kb#12`, `KB #12`, `【KB#12】`, `[KB:12]`, `[KB#1, 12]`, `[KB#1-12]`, `[12]`, `[^12]` and more, and they invent labels such as
`[KB#mem_123]`. This module alone reads them. There are three forms:

- a tag, `KB` with a number sign or a colon, counts anywhere;
- a tag without its number sign, such as `[KB-12]` or `[KB 12]`, counts only in square brackets;
- a bare number, `[12]` or `[^12]`, counts only in a text without the other forms, and never where it is more likely code, a link, a
  date, a list number, or a note of the source itself.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from localrag.types import Citation, Hit

MAX_RANGE = 64
"""Most sources that a range such as `KB#3-7` can name. A longer one is a single label, which no source has."""
_MAX_LABEL_CHARS = 80
_MAX_DIGITS = 40
_MAX_NUMBER = 10**18
_YEARS = range(1900, 2100)
_BREAK = "\u200b"
"""A tag that contains this character is not a tag."""

# Every repetition below is bounded, possessive, or separated by text that it cannot match itself, so a search takes linear time.
_KB = r"[KkＫｋ][BbＢｂ]"
_GAP = r"[^\S\n]{0,3}"
_SIGN = rf"(?:{_GAP}(?:\\?[#＃﹟♯№]){{1,3}}[:：]?{_GAP}|[:：](?=\d))"
_OPEN, _CLOSE = r"[\[［【〔]", r"[\]］】〕]"  # square brackets, and those of Chinese and Japanese
_ANY_OPEN, _ANY_CLOSE = r"[\[［【〔(（{<]", r"[\]］】〕)）}>]"
_COMMA = rf"{_GAP}(?:[,;、，；/&]|\b(?:and|or|und)\b)\s{{0,3}}"
_DASH = r"(?:[-‐‑‒–—−~〜～]|\.{2,3}|…)"
_WORD = r"[A-Za-z0-9_]"
_SCOPE = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}/"
_LEAD = rf"(?:(?:sources?|refs?|references?|passages?|chunks?|docs?|documents?|see|cf)\b[.:：]?{_GAP})?"

_NUMBER = rf"(?P<scope>{_SCOPE}(?=\d))?(?P<first>\d++)(?:_++)?(?!(?!{_KB}{_SIGN}){_WORD}|\.\d)"  # underscores: emphasis, as in _KB#1_
_LAST = rf"(?:{_KB}{_SIGN})?(?P<again>{_SCOPE}(?=\d))?(?P<last>\d++)(?!{_WORD}|[-.]\d)"
_ITEM = re.compile(rf"{_NUMBER}(?:{_DASH}{_LAST})?")
_SPACED_ITEM = re.compile(rf"{_NUMBER}(?:{_GAP}{_DASH}{_GAP}{_LAST})?")
_ODD_NUMBER = re.compile(rf"(?:{_SCOPE}(?=\d))?\d++(?:\.\d++)*+(?:(?!{_KB}{_SIGN}){_WORD})*+")
_NAME = re.compile(rf"(?!{_KB}{_SIGN}){_WORD}(?:(?!{_KB}{_SIGN}){_WORD}|[-/](?!{_KB}{_SIGN})(?={_WORD})|\.(?=[a-z0-9]))*+")
_PLACEHOLDER = re.compile(r"[A-Za-z]|ids?|num|number", re.IGNORECASE)
"""A placeholder for a label, in a text that explains how to cite."""

_NO_SIGN = rf"(?:{_GAP}[:：=._/‐‑–—-]{_GAP}(?=\w)|[^\S\n]{{1,3}}(?=\d)|(?=\d{{1,5}}(?!\d)))"  # more digits: perhaps Microsoft's KB5005565
_FORM = re.compile(
    rf"(?P<tag>(?<![A-Za-z0-9]){_KB}{_SIGN}(?={_WORD}|\d))"
    rf"|(?<={_OPEN})\s{{0,3}}{_LEAD}(?P<signless>{_KB}{_NO_SIGN})"
    rf"|(?<={_OPEN}){_GAP}(?P<number>(?=(?:\d{{1,18}}(?:{_DASH}\d{{1,18}})?{_COMMA}){{1,20}}{_KB}{_SIGN}))",
    re.IGNORECASE,
)
_NEXT = re.compile(rf"(?P<tag>{_KB}{_SIGN}(?={_WORD}|\d))(?:(?P<signless>(?!))|(?P<number>(?!)))?")
"""A tag directly after another one, which small models write when they repeat themselves."""
_SEPARATOR = re.compile(rf"{_COMMA}(?:{_KB}{_NO_SIGN}|[#＃])?", re.IGNORECASE)
_ITEM_ENDS = re.compile(rf"{_GAP}\\?{_ANY_CLOSE}|{_COMMA}", re.IGNORECASE)
_SQUARE_ENDS = re.compile(rf"{_GAP}\\?{_CLOSE}|{_COMMA}", re.IGNORECASE)
_OPENED = re.compile(rf"{_ANY_OPEN}{_GAP}\Z")
_CLOSED = re.compile(rf"{_GAP}\\?{_ANY_CLOSE}")
_NEXT_TAG = re.compile(rf"{_COMMA}{_KB}{_SIGN}", re.IGNORECASE)

_BARE = re.compile(
    rf"\\?{_OPEN}(?P<note>\^)?{_GAP}{_LEAD}[#＃]?(?P<items>\d{{1,18}}(?:(?:{_GAP}{_DASH}{_GAP}|{_COMMA})[#＃]?\d{{1,18}}){{0,19}})"
    rf"(?P<place>(?::\d{{1,9}})?†[^\]］】〕\n]{{0,80}})?{_GAP}\\?{_CLOSE}",
    re.IGNORECASE,
)
_BARE_ITEM = re.compile(rf"(?P<first>\d++)(?:{_GAP}{_DASH}{_GAP}(?P<last>\d++))?")
_DEFINED = re.compile(rf"^ {{0,3}}{_OPEN}\^?(\d{{1,18}}){_CLOSE}:", re.MULTILINE)
_ENUMERATED = re.compile(rf"^[ \t]*{_OPEN}(\d{{1,4}}){_CLOSE}[ \t]", re.MULTILINE)
_VALUE = re.compile(r"(?:=|\"\s{0,8}:)\s{0,8}\Z")
_FENCE = re.compile(r"[ \t]*(```|~~~)")
_TICKS = re.compile(r"`++")

_FORGED = re.compile(rf"{_KB}(?={_SIGN}\S)|(?<={_OPEN})\s{{0,3}}{_LEAD}{_KB}(?={_NO_SIGN}[A-Za-z_/-]*+\d)", re.IGNORECASE)
_CUT = re.compile(
    rf"{_GAP}(?:(?:{_ANY_OPEN}{_GAP})++{_LEAD})?+(?<![A-Za-z0-9]){_KB}{_SIGN}(?:{_WORD}|[/–-])*+\Z"
    rf"|{_GAP}{_OPEN}{_GAP}{_LEAD}{_KB}(?:{_NO_SIGN}(?:{_WORD}|[/–-])*+)?\Z"
    rf"|{_ANY_OPEN}[^\[\]()\n]*{_KB}{_SIGN}[^\[\]()\n]*(?:{_COMMA}|{_DASH}{_GAP})(?P<listed>\d++)\Z"
    rf"|{_GAP}(?<!\w){_OPEN}\^?\d*+\Z",
    re.IGNORECASE,
)
_MAX_CUT_CHARS = 200
_LABEL = re.compile(
    rf"{_OPEN}?{_GAP}(?:{_KB}(?:{_SIGN}|{_NO_SIGN}))?(?:([a-z0-9][a-z0-9_-]{{0,63}})/)?([0-9]{{1,18}}){_GAP}{_CLOSE}?", re.IGNORECASE
)

WHOLE = re.compile(rf"{_OPEN}[^\[\]［］【】〔〕\n]{{1,120}}{_CLOSE}|{_KB}{_SIGN}(?:{_WORD}|[-–/])++", re.IGNORECASE)
"""Matches that must not be cut: half a label is a different label."""
TAG = re.compile(r"\bKB#(?:[a-z0-9][a-z0-9_-]{0,63}/)?\d{1,18}\b")
"""A label exactly as prompts show it."""

_STRUCK = "\0"
"""Marks where a label was removed, until the text around it is closed up."""
_EMPTY_BRACKET = re.compile(rf"\\?{_ANY_OPEN}\s*(?:sources?[:：]?\s*)?{_STRUCK}[\s,;、，；{_STRUCK}]*\\?{_ANY_CLOSE}", re.IGNORECASE)
_JOINT = rf"{_GAP}(?:[&/、]|\b(?:and|or|und)\b){_GAP}"
_JOINED = re.compile(rf"(?<={_ANY_OPEN}){_GAP}{_STRUCK}{_JOINT}|{_JOINT}{_STRUCK}(?={_GAP}{_ANY_CLOSE})", re.IGNORECASE)
"""A removed label at an end of a list, with its conjunction."""
_AROUND = re.compile(rf"(?<![ \t,;{_STRUCK}])([ \t,;]*){_STRUCK}([ \t,;{_STRUCK}]*)")
_MAX_BRACKETS = 3
"""Most brackets removed around one label; further ones stay."""
_MAX_PASSES = 4


@dataclass(frozen=True, slots=True)
class Mention:
    """The characters `start` to `end` of a text (code points, end exclusive) name the sources `labels`: several for a range.

    Labels are as prompts show them: `KB#1` for `kb #0001`. The span of a bare number includes its brackets.
    """

    labels: tuple[str, ...]
    start: int
    end: int
    is_bare: bool = False


def cite(text: str, hits: Iterable[Hit], *, is_cut: bool = False, notes: Iterable[str] = ()) -> list[Citation]:
    """Return the distinct labels that `text` cites, in order of first mention; `supplied` is False for an invented one.

    With `is_cut`, a limit or a user ended the text: a label that touches the end is ignored, because `KB#1` might have become
    `KB#12`. `notes` are other texts in the prompt, such as attached files; numbers in brackets that occur in them or in a hit
    are taken for their notes.
    """
    hits = tuple(hits)
    supplied_labels = {hit.label for hit in hits}
    spans: dict[str, list[tuple[int, int]]] = {}
    for mention in _counted(text, hits, is_cut=is_cut, notes=notes):
        for label in mention.labels:
            spans.setdefault(label, []).append((mention.start, mention.end))
    return [Citation(label, label in supplied_labels, tuple(places)) for label, places in spans.items()]


def parse(text: str, supplied_labels: Collection[str] = (), *, is_cut: bool = False) -> list[Mention]:
    """Return all mentions of sources in a text, in order.

    `supplied_labels` only decide doubtful cases: a bare year, a bare list of numbers, and numbers that number a list (`[1]
    Dry it.`) are mentions if they name one of them.
    """
    return _tags(text, is_cut=is_cut) or list(_bare_numbers(text, supplied_labels))


def parse_label(text: str) -> tuple[str, int] | None:
    """Return the scope and the id in a label such as `KB#pets/12`, `[kb#12]` or `12`. None for any other text."""
    match = _LABEL.fullmatch(text.strip())
    return None if match is None else ((match[1] or "").lower(), int(match[2]))


def untagged(text: str) -> str:
    """Break up each tag in a foreign text with a zero-width space, so that it cannot pose as a source.

    Bare numbers in brackets stay: they are notes of the text itself, and `cite` does not count them.
    """
    return _FORGED.sub(rf"\g<0>{_BREAK}", text)


def struck(text: str, hits: Iterable[Hit], *, bare: bool = True) -> str:
    """Remove citations of unknown sources from a text and close the gaps. Without `bare`, bare numbers stay."""
    hits = tuple(hits)
    supplied_labels = {hit.label for hit in hits}

    def broken(mention: Mention) -> str:
        original, at = text[mention.start : mention.end], 1 if mention.is_bare else 2
        return original if supplied_labels.issuperset(mention.labels) else f"{original[:at]}{_BREAK}{original[at:]}"

    for number in range(_MAX_PASSES + 2):  # removing a mention can create another: first tags, then bare numbers
        mentions = [each for each in _counted(text, hits) if bare or not each.is_bare]
        if all(label in supplied_labels for each in mentions for label in each.labels):
            break
        text = _without(text, mentions, supplied_labels) if number < _MAX_PASSES else _replaced(text, mentions, broken)
    return text


def without_tags(text: str, by: str = " ") -> str:
    """Replace each mention of a source, except bare numbers, by `by`."""
    return _replaced(text, _tags(text), lambda _: by)


def without_cut_label(text: str) -> str:
    """Remove an incomplete label from the end of a cut-off text: `KB#1` might have become `KB#12`."""
    tail = text[-_MAX_CUT_CHARS:]
    match = _CUT.search(tail)
    if match is None:
        return text
    at = len(text) - len(tail) + (match.start("listed") if match["listed"] else match.start())
    return text[:at].rstrip()


def _counted(text: str, hits: Collection[Hit], *, is_cut: bool = False, notes: Iterable[str] = ()) -> Iterator[Mention]:
    """Yield the mentions that count, given the text of hits and notes."""
    notes = (*(hit.chunk.text for hit in hits), *notes)
    for mention in parse(text, {hit.label for hit in hits}, is_cut=is_cut):
        if not mention.is_bare or not any(text[mention.start : mention.end] in note for note in notes):
            yield mention


def _tags(text: str, *, is_cut: bool = False) -> list[Mention]:
    """Return the mentions that are more than a bare number, in order."""
    mentions: list[Mention] = []
    listed: list[Mention] = []  # numbers next to a tag: part of its list if a bracket closes it
    at = 0
    while match := _NEXT.match(text, at) or _FORM.search(text, at):
        at, scope = match.end(), ""
        if match["number"] is None:
            mention = _tag(text, match, is_cut=is_cut)
            if mention is None:
                listed = []
                continue
            mentions.append(mention)
            at, scope = mention.end, mention.labels[0].rpartition("/")[0]
        elif item := _SPACED_ITEM.match(text, at):
            at = _end(item)
            listed.append(Mention(_labels(item), item.start(), at))
        while (comma := _SEPARATOR.match(text, at)) and (item := _SPACED_ITEM.match(text, comma.end())):
            if not _ITEM_ENDS.match(text, _end(item)):
                break
            at = _end(item)
            listed.append(Mention(_labels(item, scope.removeprefix("KB#")), item.start(), at))
        if _CLOSED.match(text, at):
            mentions += listed
        if not _NEXT_TAG.match(text, at):
            listed = []
    return sorted(mentions, key=lambda mention: mention.start)


def _tag(text: str, match: re.Match[str], *, is_cut: bool) -> Mention | None:
    """Read the mention after `KB#`, or after `[KB:`; None if it names nothing."""
    has_sign = match["tag"] is not None
    start, at = match.span("tag" if has_sign else "signless")
    item = _SPACED_ITEM.match(text, at)
    if item is not None and not _ITEM_ENDS.match(text, _end(item)):
        item = _ITEM.match(text, at)
    if item is not None:
        end = _end(item)
        if not has_sign and not _SQUARE_ENDS.match(text, end):
            return None
        if not (is_cut and _touches_end(text, end, "_/")):
            return Mention(_labels(item), start, end)
        return Mention(_labels(item, is_cut=True), start, item.end("first")) if item["last"] else None
    name = _ODD_NUMBER.match(text, at) or _NAME.match(text, at)
    if name is None or not (label := name[0].rstrip("_")):
        return None
    end = at + len(label)
    has_digit = any(map(str.isdigit, label))
    if not has_sign:
        is_meant = has_digit and (label[0].isdigit() or match["signless"].endswith(":")) and bool(_SQUARE_ENDS.match(text, end))
    elif _OPENED.search(text, max(0, start - 4), start) or _CLOSED.match(text, end):
        is_meant = not _PLACEHOLDER.fullmatch(label)
    else:
        is_meant = label[0].isdigit() or (has_digit and not any(map(str.isspace, match["tag"])))
    if not is_meant or (is_cut and _touches_end(text, end, "_/.-")):
        return None
    return Mention((f"KB#{label[:_MAX_LABEL_CHARS]}",), start, end)


def _touches_end(text: str, at: int, joints: str) -> bool:
    """Tell whether a label that ends at `at` might be incomplete because the text ends there."""
    return len(text) - at <= 2 and not text[at:].strip(joints)


def _end(item: re.Match[str]) -> int:
    return item.end("first" if item["last"] is None else "last")


def _labels(item: re.Match[str], scope: str = "", *, is_cut: bool = False) -> tuple[str, ...]:
    """Return one label, or those of a range. `scope` is that of the list, for an item without one; `is_cut` leaves out the end of
    a range.
    """
    prefix = "KB#" + (item["scope"].lower() if item["scope"] else f"{scope}/" if scope else "")
    low = _number(item["first"])
    if item["last"] is None or is_cut:
        return (f"{prefix}{low}",)
    high = _number(item["last"])
    if item["again"] and f"KB#{item['again'].lower()}" != prefix:
        return f"{prefix}{low}", f"KB#{item['again'].lower()}{high}"
    if isinstance(low, str) or isinstance(high, str) or high - low >= MAX_RANGE:
        return (f"{prefix}{low}-{high}",)
    return tuple(f"{prefix}{number}" for number in (range(low, high + 1) if low <= high else (low, high)))


def _number(digits: str) -> int | str:
    """Return the number without leading zeros; if it is too large for any source, return its digits, shortened."""
    number = int(digits) if len(digits) <= _MAX_DIGITS else _MAX_NUMBER
    return number if number < _MAX_NUMBER else digits[:_MAX_LABEL_CHARS]


def _bare_numbers(text: str, supplied_labels: Collection[str]) -> Iterator[Mention]:
    """Yield numbers in brackets, except those that are more likely code, a link, a date, a definition, or a list number."""
    code: _Code | None = None
    defined: frozenset[str] = frozenset()
    listed: dict[int, int] = {}
    end = -1
    for match in _BARE.finditer(text):
        if code is None:
            code, defined = _Code(text), frozenset(_DEFINED.findall(text))
            listed = {each.start(1): int(each[1]) for each in _ENUMERATED.finditer(text)}
            listed = listed if {1, 2} <= set(listed.values()) else {}
        if _is_code(text, match, end) or match.start() in code:
            continue
        numbers = [int(each) for item in _BARE_ITEM.finditer(match["items"]) for each in _span(item)]
        labels = tuple(dict.fromkeys(f"KB#{number}" for number in numbers))
        if 0 in numbers or not defined.isdisjoint(map(str, numbers)):
            continue
        is_doubtful = len(labels) > 1 or match.start("items") in listed or (numbers[0] in _YEARS and match["note"] is None)
        if is_doubtful and not any(label in supplied_labels for label in labels):
            continue
        end = match.end()
        yield Mention(labels, match.start(), end, is_bare=True)


def _span(item: re.Match[str]) -> Iterable[int]:
    first, last = int(item["first"]), int(item["last"] or item["first"])
    return range(first, last + 1) if 0 <= last - first < MAX_RANGE else (first, last)


def _is_code(text: str, match: re.Match[str], end: int) -> bool:
    """Tell whether a number in brackets is a subscript (`a[1]`), a value (`x = [1]`), a nested list or a link. `end` is the end of
    the last mention.
    """
    start, after = match.start(), text[match.end() : match.end() + 2]
    before = text[max(0, start - 1) : start]
    if after[:1] == "(" or (after[:1] in ("[", "［") and not after[1:].isdigit() and after[1:] != "^"):
        return True
    if (before == "[") != (after[:1] == "]"):
        return True
    if match["note"] is not None or not before or start == end:
        return False
    return (before.isascii() and before.isalnum()) or before in "_)]}`$" or bool(_VALUE.search(text, max(0, start - 20), start))


class _Code:
    """The code in a Markdown text: `start in code` tells whether a position is inside code."""

    def __init__(self, text: str) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        fence, at = "", 0
        for line in text.split("\n"):
            match = _FENCE.match(line)
            if match is not None and fence in ("", match[1]):
                fence = "" if fence else match[1]
            elif fence:
                self._add(at, at + len(line))
            else:
                self._add_spans(line, at)
            at += len(line) + 1

    def __contains__(self, at: int) -> bool:
        index = bisect_right(self._starts, at)
        return index > 0 and at < self._ends[index - 1]

    def _add(self, start: int, end: int) -> None:
        self._starts.append(start)
        self._ends.append(end)

    def _add_spans(self, line: str, at: int) -> None:
        """Add the code spans of a line: text between two runs of equally many backticks."""
        runs = list(_TICKS.finditer(line))
        closers: dict[int, list[int]] = {}
        for index, run in enumerate(runs):
            closers.setdefault(len(run[0]), []).append(index)
        index = 0
        while index < len(runs):
            same = closers[len(runs[index][0])]
            behind = bisect_right(same, index)
            if behind < len(same):
                self._add(at + runs[index].start(), at + runs[same[behind]].end())
                index = same[behind]
            index += 1


def _replaced(text: str, mentions: Iterable[Mention], by: Callable[[Mention], str]) -> str:
    pieces: list[str] = []
    at = 0
    for mention in mentions:
        pieces += (text[at : mention.start], by(mention))
        at = mention.end
    return "".join((*pieces, text[at:]))


def _without(text: str, mentions: Sequence[Mention], supplied_labels: Collection[str]) -> str:
    """Remove unsupplied sources from these mentions and close the gaps. The rest of a list is written as labels."""

    def left(mention: Mention) -> str:
        original = text[mention.start : mention.end]
        valid_labels = [label for label in mention.labels if label in supplied_labels]
        if len(valid_labels) == len(mention.labels) and not original[0].isdigit():
            return original
        labels = ", ".join(valid_labels)
        return f"[{labels}]" if labels and mention.is_bare else labels or _STRUCK

    text = text.replace(_STRUCK, " ")
    text = _replaced(text, mentions, left)
    text = _JOINED.sub("", text)
    for _ in range(_MAX_BRACKETS):
        text = _EMPTY_BRACKET.sub(_STRUCK, text)
    return _AROUND.sub(_closed_up, text).strip()


def _closed_up(match: re.Match[str]) -> str:
    """Return the spaces and separators that remain around removed labels, as if they had never been there."""
    text, before, after = match.string, match[1], match[2].rpartition(_STRUCK)[2]
    left, right = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
    if left in ("", "\n"):
        return before[: len(before) - len(before.lstrip(" \t"))]
    if right in ("", "\n") or right in ".!?:)]" or left in "[(":
        return ""
    if mark := next((char for char in after + before if char in ",;"), ""):
        return f"{mark} " if left != ":" else " "
    return " "
