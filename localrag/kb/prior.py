"""What was learned of a chunk weighs a little: whether it was cited where it was supplied, and what people said of it."""

from __future__ import annotations

from localrag.kb.store import Feedback
from localrag.settings import Learning

MAX_SHARE = 0.10
"""The most that it adds to a score, or takes from it, as a share of that score: some ranks, never the first place for anything."""

_VOTES = 4.0
_SUPPLIED = 20.0
"""So many neutral votes, and so many prompts of which the usual share led to a citation, are counted with what was seen."""
_USUAL_SHARE = 0.25
"""Of the chunks of a prompt, about this share is cited: few answers name more than one source of four."""


def prior(feedback: Feedback, learning: Learning = "votes") -> float:
    """The share of its score that a chunk gains, −MAX_SHARE to MAX_SHARE; 0 if nothing is known of it.

    Words of people count in full, citations half, and only where `learning` is "all". That a chunk was retrieved says what the ranking
    thought of it, not whether it helped: it does not count, else what is found often would be found more often for that alone.
    """
    useful, useless = max(0, feedback.useful), max(0, feedback.useless)
    supplied = max(0, feedback.supplied)
    cited = min(max(0, feedback.cited), supplied)
    if learning == "off":
        return 0.0
    votes = (useful - useless) / (useful + useless + _VOTES)
    citing = (cited - _USUAL_SHARE * supplied) / (supplied + _SUPPLIED) if learning == "all" else 0.0
    return MAX_SHARE * max(-1.0, min(1.0, votes + citing / 2))
