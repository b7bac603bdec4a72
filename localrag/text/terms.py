"""The words of a text in any script, and the search terms of a query: its words without stop words."""

from __future__ import annotations

import re
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


CJK = re.compile(
    "[\u1100-\u11ff\u3040-\u30ff\u3100-\u318f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff]"
)
"""A Chinese, Japanese or Korean character. Part of the schema of a knowledge base: a change needs a migration (localrag/kb/database.py)."""


def spaced(text: str) -> str:
    """Put a space around each Chinese, Japanese or Korean character: these scripts have no spaces between words, and full-text
    search needs them.
    """
    return CJK.sub(r" \g<0> ", text)


def words(text: str) -> list[str]:
    """Return the runs of letters, marks and digits of any script, in order, as written."""
    signs = {ord(char): " " for char in set(text) if unicodedata.category(char)[0] not in "LMN"}
    return text.translate(signs).split()


def terms(query: str) -> list[str]:
    """Return the distinct words of a query in lower case, without stop words; at most MAX_TERMS."""
    query_words = words(unicodedata.normalize("NFC", query).lower())
    return [word for word in dict.fromkeys(query_words) if word not in STOP_WORDS][:MAX_TERMS]
