"""What members propose, checked: no citation of what a member was not given, and nothing said twice."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from localrag import citation
from localrag.messages import Proposal, strip_reasoning
from localrag.passages import Hit
from localrag.sentences import sentences

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
    is_cut = finish_reason != "stop"
    said, num_repeated = without_repeats(citation.without_cut_label(said) if is_cut else said, is_cut=is_cut)
    hits = tuple(hits)
    cited = citation.cite(said, hits)
    return Checked(
        member=member,
        text=citation.struck(said, hits),
        finish_reason=finish_reason,
        cited=tuple(each.label for each in cited if each.supplied),
        invented=tuple(each.label for each in cited if not each.supplied),
        num_repeated=num_repeated,
    )


def without_repeats(text: str, *, is_cut: bool = False) -> tuple[str, int]:
    """The text without sentences that stand in it before, word for word, and how many those were.

    Code between ``` stays as it is. Of a text that `is_cut` off the end goes too, where it begins a sentence that was said before.
    """
    pieces = list(sentences(text))
    num_said = len(pieces)
    plain = [" ".join(piece.split()).casefold() for piece in pieces]
    if is_cut and any(each != plain[-1] and each.startswith(plain[-1]) for each in plain):
        pieces.pop()
    seen: set[str] = set()
    kept: list[str] = []
    is_code = False
    for number, each in enumerate(plain[: len(pieces)]):
        is_code ^= each.startswith("```")
        is_again = each in seen and (len(each.encode()) >= _MIN_REPEATED_BYTES or each == plain[number - 1])
        seen.add(each)
        if is_code or not is_again or not any(map(str.isalpha, each)) or _goes_on(pieces, plain, number, seen):
            kept.append(pieces[number])
    num_repeated = num_said - len(kept)
    return ("".join(kept).strip(), num_repeated) if num_repeated else (text, 0)


def _goes_on(pieces: Sequence[str], plain: Sequence[str], number: int, seen: Collection[str]) -> bool:
    """Whether the stop of that piece may be one of an abbreviation, with something new behind it."""
    if number + 1 == len(pieces) or plain[number + 1] in seen:
        return False
    end = pieces[number][-16:]
    return bool(_ABBREVIATED.search(end) or (_STOP.search(end) and pieces[number + 1][0].islower()))


def union(proposals: Sequence[Checked]) -> frozenset[str]:
    """The labels that any of them cites."""
    return frozenset(label for each in proposals for label in each.cited)
