"""Which words of a text are looked for: stop words set aside, letters and digits of any script."""

from __future__ import annotations

import unicodedata

MAX_TERMS = 100

STOP_WORDS = frozenset(
    """a about above after again all also am an and any are as at be because been before being below between both but by can cannot
    could did do does doing done down during each few for from further get give had has have having he her here hers him his how i if
    in into is it its just let like make may me might more most much must my need no nor not now of off on once one only or other our
    out over own please s same say she should show so some such t tell than that the their them then there these they this those through
    to too under until up us use used using very want was we were what when where which while who whom why will with would you
    your""".split()  # noqa: SIM905  # a word list reads better as words
)


def words(text: str) -> list[str]:
    """The runs of letters, marks and digits of any script, in order and as they are written."""
    signs = {ord(char): " " for char in set(text) if unicodedata.category(char)[0] not in "LMN"}
    return text.translate(signs).split()


def terms(query: str) -> list[str]:
    """The different words of a query that are looked for, in lower case, without stop words; the first MAX_TERMS of them."""
    found = words(unicodedata.normalize("NFC", query).lower())
    return [word for word in dict.fromkeys(found) if word not in STOP_WORDS][:MAX_TERMS]
