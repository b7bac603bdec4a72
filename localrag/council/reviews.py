"""Members rank what the others propose, without their names."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from localrag.council import replies
from localrag.council.proposals import Checked
from localrag.messages import Proposal

MAX_TOKENS = 96


def anonymous(member: str, proposals: Sequence[Checked]) -> tuple[tuple[Proposal, ...], dict[str, str]]:
    """What the others propose under letters, in an order that does not depend on who asks, and whose each letter is."""
    others = [each for each in proposals if each.member != member and not each.is_silent]
    letters = dict(zip(string.ascii_uppercase, others, strict=False))
    shown = tuple(Proposal(label=f"Proposal {letter}", text=each.text) for letter, each in letters.items())
    return shown, {letter: each.member for letter, each in letters.items()}


def schema(letters: Sequence[str]) -> dict[str, Any]:
    """Of a reply that ranks these letters."""
    ranking = {"type": "array", "items": {"enum": list(letters)}, "minItems": len(letters), "maxItems": len(letters)}
    return replies.schema({"ranking": ranking})


def parse(reply: str, names: Mapping[str, str]) -> tuple[str, ...]:
    """The members that a reply ranks, best first, each once. Those it leaves out are not in it, and none are if it cannot be read."""
    return tuple(dict.fromkeys(names[letter] for letter in replies.read(reply).texts("ranking") if letter in names))


def points(rankings: Mapping[str, Sequence[str]], members: Sequence[str]) -> dict[str, float]:
    """Borda's count: a mean over the reviewers, highest first, equals by name. The first of n others gets 1, the last 0.

    Those whom a reviewer does not rank share the places that it left. Whom nobody but itself could rank has no points.
    """
    given: dict[str, list[float]] = {member: [] for member in members}
    for reviewer, ranking in rankings.items():
        others = [member for member in members if member != reviewer]
        last = len(others) - 1
        places = dict.fromkeys(others, (len(ranking) + last) / 2) | {member: float(place) for place, member in enumerate(ranking)}
        for member in others:
            given[member].append(1.0 - places[member] / last if last else 1.0)
    means = {member: sum(each) / len(each) for member, each in given.items() if each}
    return dict(sorted(means.items(), key=lambda entry: (-entry[1], entry[0])))
