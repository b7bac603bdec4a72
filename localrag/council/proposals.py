"""What members propose, checked: no citation of what a member was not given, and nothing said twice."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from localrag.council.replies import without_cut_tag
from localrag.messages import Proposal, strip_reasoning
from localrag.passages import CITATION, Hit

_STRUCK = "\0"
"""Stands where a label was struck out, until the text around it is closed up."""
_EMPTY_BRACKET = re.compile(rf"[\[(]\s*{_STRUCK}[\s,;{_STRUCK}]*[\])]")
_GAP = re.compile(rf"(?<![ \t,;{_STRUCK}])([ \t,;]*){_STRUCK}([ \t,;{_STRUCK}]*)")
_MAX_BRACKETS = 3
"""Of them around one label; what is left of more stays."""
_BORDER = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+\s++|[。！？]++[”’」』）]*+\s*+|\n\s*+")
_ABBREVIATED = re.compile(r"\b(?:\w|Dr|Mr|Mrs|Ms|Prof|St|Nr|No|Fig|Sec|Vol|vs|cf|al|etc|approx|ca|bzw|Abb|Art)\.[ \t]+$")
_STOP = re.compile(r"\.[ \t]+$")
_MIN_REPEATED_BYTES = 12
"""Shorter sentences ("Yes.") may be said again, though not in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A member's proposal. `text` is without what was struck out: citations of what it was not given, and sentences said before."""

    member: str
    text: str
    finish_reason: str
    cited: tuple[str, ...] = ()
    """Labels, in order of first mention, of what it was given."""
    invented: tuple[str, ...] = ()
    """Labels of what it was not given."""
    num_repeated: int = 0

    @property
    def is_silent(self) -> bool:
        """Whether no letter and no digit is left."""
        return not any(map(str.isalnum, self.text))

    @property
    def proposal(self) -> Proposal:
        return Proposal(label=self.member, text=self.text)

    def to_dict(self) -> dict[str, object]:
        return {"text": self.text, "cited": list(self.cited), "invented": list(self.invented), "num_repeated": self.num_repeated}


def check(member: str, text: str, finish_reason: str, hits: Iterable[Hit]) -> Checked:
    """What a member said, held against the `hits` that stood in its prompt."""
    said = strip_reasoning(text).strip()
    is_cut = finish_reason == "length"
    said, num_repeated = without_repeats(without_cut_tag(said) if is_cut else said, is_cut=is_cut)
    given = {hit.label for hit in hits}
    labels = list(dict.fromkeys(match[0] for match in CITATION.finditer(said)))
    return Checked(
        member=member,
        text=struck(said, given),
        finish_reason=finish_reason,
        cited=tuple(label for label in labels if label in given),
        invented=tuple(label for label in labels if label not in given),
        num_repeated=num_repeated,
    )


def struck(text: str, given: Collection[str]) -> str:
    """A text without citations of what is not among the labels `given`, closed up where they stood."""
    if all(match[0] in given for match in CITATION.finditer(text)):
        return text
    text = CITATION.sub(lambda match: match[0] if match[0] in given else _STRUCK, text.replace(_STRUCK, " "))
    for _ in range(_MAX_BRACKETS):
        text = _EMPTY_BRACKET.sub(_STRUCK, text)
    return _GAP.sub(_closed_up, text).strip()


def _closed_up(match: re.Match[str]) -> str:
    """What stays of the spaces and separators around struck labels: what the text would have without them."""
    text, before, after = match.string, match[1], match[2].rpartition(_STRUCK)[2]
    left, right = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
    if left in ("", "\n"):
        return before[: len(before) - len(before.lstrip(" \t"))]
    if right in ("", "\n") or right in ".!?:)]" or left in "[(":
        return ""
    if mark := next((char for char in after + before if char in ",;"), ""):
        return f"{mark} " if left != ":" else " "
    return " "


def without_repeats(text: str, *, is_cut: bool = False) -> tuple[str, int]:
    """The text without sentences that stand in it before, word for word, and how many those were.

    Code between ``` stays as it is. Of a text that `is_cut` off the end goes too, where it begins a sentence that was said before.
    """
    sentences = list(_sentences(text))
    num_said = len(sentences)
    plain = [" ".join(sentence.split()).casefold() for sentence in sentences]
    if is_cut and any(each != plain[-1] and each.startswith(plain[-1]) for each in plain):
        sentences.pop()
    seen: set[str] = set()
    kept: list[str] = []
    is_code = False
    for number, each in enumerate(plain[: len(sentences)]):
        is_code ^= each.startswith("```")
        is_again = each in seen and (len(each.encode()) >= _MIN_REPEATED_BYTES or each == plain[number - 1])
        seen.add(each)
        if is_code or not is_again or not any(map(str.isalpha, each)) or _goes_on(sentences, plain, number, seen):
            kept.append(sentences[number])
    num_repeated = num_said - len(kept)
    return ("".join(kept).strip(), num_repeated) if num_repeated else (text, 0)


def _goes_on(sentences: Sequence[str], plain: Sequence[str], number: int, seen: Collection[str]) -> bool:
    """Whether the stop of that piece may be one of an abbreviation, with something new behind it."""
    if number + 1 == len(sentences) or plain[number + 1] in seen:
        return False
    end = sentences[number][-16:]
    return bool(_ABBREVIATED.search(end) or (_STOP.search(end) and sentences[number + 1][0].islower()))


def _sentences(text: str) -> Iterator[str]:
    """The text in pieces, each with the white space behind it; a line is one at least."""
    start = 0
    for match in _BORDER.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


def union(proposals: Sequence[Checked]) -> frozenset[str]:
    """The labels that any of them cites."""
    return frozenset(label for each in proposals for label in each.cited)
