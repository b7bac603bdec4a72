"""Where another prompt is likely to part from this one: there its evaluation is cut, so that the other can go on from it."""

from __future__ import annotations

from collections.abc import Sequence

from localrag.markup import EncodedPart

MIN_APART_TOKENS = 256
"""Smaller batches than this are slower (measured), so breakpoints are no nearer to each other, but for the last."""
MIN_SHARED_TOKENS = 64
"""A shorter beginning is evaluated again as fast."""


def breakpoints(parts: Sequence[EncodedPart]) -> tuple[int, ...]:
    """Positions, in tokens: before messages and passages, far enough apart, before the question that is asked last, and before the
    instructions behind it.

    Each but these two depends only on what stands before it, so a conversation that goes on, or another choice of passages behind the
    same first ones, has the same breakpoints as far as it is the same. They lie a token before the text that may differ: that token can
    reach over into it, as " What" does behind "Question:".
    """
    found: list[int] = []
    position = last = 0
    ends = {"question": 0, "instructions": 0}
    for index, part in enumerate(parts):
        owner = part.part
        is_start = not owner.is_markup and (index == 0 or parts[index - 1].part.is_markup or owner.item is not None)
        if owner.section in ends:
            ends[owner.section] = position
        elif is_start and position - last >= MIN_APART_TOKENS:
            found.append(position)
            last = position
        position += len(part.token_ids)
    asked = max(ends.values())
    if asked:
        shared = {end for end in ends.values() if end > MIN_SHARED_TOKENS}
        found = sorted(shared.union(point for point in found if point < asked))
    return tuple(point - 1 for point in found)
