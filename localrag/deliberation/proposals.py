"""Check the proposals of members, and rank them: invented citations and repeated sentences are removed."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrag import citation
from localrag.deliberation.replies import form_schema, read
from localrag.text.sentences import sentences
from localrag.text.thinking import without_thoughts
from localrag.types import Hit, Proposal

_ABBREVIATED = re.compile(r"\b(?:\w|Dr|Mr|Mrs|Ms|Prof|St|Nr|No|Fig|Sec|Vol|vs|cf|al|etc|approx|ca|bzw|Abb|Art)\.[ \t]+$")
_STOP = re.compile(r"\.[ \t]+$")
_MIN_REPEATED_BYTES = 12
"""Shorter sentences ("Yes.") may be repeated, but not twice in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A member's proposal after the check. `text` is without invented citations and repeated sentences."""

    member: str
    text: str
    finish_reason: str
    cited: tuple[str, ...] = ()
    """Cited labels that the member was given, in order of first mention."""
    invented: tuple[str, ...] = ()
    """Cited labels that the member was not given."""
    num_repeated: int = 0

    @property
    def is_silent(self) -> bool:
        """Whether the text has no letters and no digits."""
        return not any(map(str.isalnum, self.text))

    @property
    def proposal(self) -> Proposal:
        return Proposal(label=self.member, text=self.text)

    def to_dict(self) -> dict[str, object]:
        return {"text": self.text, "cited": list(self.cited), "invented": list(self.invented), "num_repeated": self.num_repeated}


def check(member: str, text: str, finish_reason: str, hits: Iterable[Hit]) -> Checked:
    """Check a member's text against the `hits` in its prompt."""
    answer = without_thoughts(text).strip()
    is_cut = finish_reason != "stop"
    answer, num_repeated = without_repeats(citation.without_cut_label(answer) if is_cut else answer, is_cut=is_cut)
    hits = tuple(hits)
    cited = citation.cite(answer, hits)
    return Checked(
        member=member,
        text=citation.struck(answer, hits),
        finish_reason=finish_reason,
        cited=tuple(each.label for each in cited if each.supplied),
        invented=tuple(each.label for each in cited if not each.supplied),
        num_repeated=num_repeated,
    )


def without_repeats(text: str, *, is_cut: bool = False) -> tuple[str, int]:
    """Remove sentences that occur earlier in the text, word for word; return the text and their number.

    Code between ``` stays unchanged. If the text `is_cut`, an incomplete last sentence goes too if it begins like an earlier
    one.
    """
    pieces = list(sentences(text))
    num_said = len(pieces)
    plain = [" ".join(piece.split()).casefold() for piece in pieces]
    if is_cut and any(each != plain[-1] and each.startswith(plain[-1]) for each in plain):
        pieces.pop()
    earlier_pieces: set[str] = set()
    remaining_pieces: list[str] = []
    is_code = False
    for number, each in enumerate(plain[: len(pieces)]):
        is_code ^= each.startswith("```")
        is_again = each in earlier_pieces and (len(each.encode()) >= _MIN_REPEATED_BYTES or each == plain[number - 1])
        earlier_pieces.add(each)
        if is_code or not is_again or not any(map(str.isalpha, each)) or _goes_on(pieces, plain, number, earlier_pieces):
            remaining_pieces.append(pieces[number])
    num_repeated = num_said - len(remaining_pieces)
    return ("".join(remaining_pieces).strip(), num_repeated) if num_repeated else (text, 0)


def _goes_on(pieces: Sequence[str], plain: Sequence[str], number: int, earlier_pieces: Collection[str]) -> bool:
    """Tell whether the stop of that piece may belong to an abbreviation, with something new after it."""
    if number + 1 == len(pieces) or plain[number + 1] in earlier_pieces:
        return False
    end = pieces[number][-16:]
    return bool(_ABBREVIATED.search(end) or (_STOP.search(end) and pieces[number + 1][0].islower()))


def union(proposals: Sequence[Checked]) -> frozenset[str]:
    """Return all labels that the proposals cite."""
    return frozenset(label for each in proposals for label in each.cited)


MAX_TOKENS = 96


def anonymous(member: str, proposals: Sequence[Checked]) -> tuple[tuple[Proposal, ...], dict[str, str]]:
    """Return the other members' proposals under letters, in the same order for every member, and the author of each letter."""
    others = [each for each in proposals if each.member != member and not each.is_silent]
    letters = dict(zip(string.ascii_uppercase, others, strict=False))
    anonymous_proposals = tuple(Proposal(label=f"Proposal {letter}", text=each.text) for letter, each in letters.items())
    return anonymous_proposals, {letter: each.member for letter, each in letters.items()}


def schema(letters: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schema of a reply that ranks these letters."""
    ranking = {"type": "array", "items": {"enum": list(letters)}, "minItems": len(letters), "maxItems": len(letters)}
    return form_schema({"ranking": ranking})


def parse(reply: str, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the members that a reply ranks, best first, each once. Unranked members are missing; the result is empty if the reply
    is invalid.
    """
    return tuple(dict.fromkeys(names[letter] for letter in read(reply).texts("ranking") if letter in names))


def points(rankings: Mapping[str, Sequence[str]], members: Sequence[str]) -> dict[str, float]:
    """Return the mean Borda points over the reviewers, highest first, ties by name. The first of a ranking gets 1, the last 0.

    Members that a reviewer does not rank share the remaining places. A member that no one else could rank has no points.
    """
    points_by_member: dict[str, list[float]] = {member: [] for member in members}
    for reviewer, ranking in rankings.items():
        others = [member for member in members if member != reviewer]
        last = len(others) - 1
        places = dict.fromkeys(others, (len(ranking) + last) / 2) | {member: float(place) for place, member in enumerate(ranking)}
        for member in others:
            points_by_member[member].append(1.0 - places[member] / last if last else 1.0)
    means = {member: sum(each) / len(each) for member, each in points_by_member.items() if each}
    return dict(sorted(means.items(), key=lambda entry: (-entry[1], entry[0])))
