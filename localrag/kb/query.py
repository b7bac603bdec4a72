"""Parse a question for full-text search: words, quoted phrases, prefixes, and runs of Chinese, Japanese and Korean characters.

The text of a question never becomes query syntax, which rules out injection: terms consist of letters, marks and digits, and each store
writes them in its own query language (localrag/kb/store.py for SQLite, localrag/kb/postgres/search.py for PostgreSQL).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from localrag.text.languages import stem, unaccented
from localrag.text.terms import CJK, MAX_TERMS, STOP_WORDS, spaced, terms, words

MAX_PHRASE_WORDS = 12
"""A longer quotation is searched word by word, since a chunk hardly ever contains it verbatim."""

_QUOTED = re.compile(r'"([^"]+)"|“([^“”]+)”|„([^„“”]+)[“”]|«([^«»]+)»|「([^「」]+)」|『([^『』]+)』')
_PREFIX = re.compile(r"(?<![\w*])(\w{2,})\*(?![\w*])")
_RUN = re.compile(f"({CJK.pattern}+)")

_SUFFIXES = ("ing", "ed", "es", "ation", "ness", "ment", "ly")
_MIN_STEM = 3


@dataclass(frozen=True, slots=True)
class Term:
    """A search term: consecutive words in lower case, separated by single spaces.

    If `is_prefix`, the last word is a prefix, and each of `stems` matches too: a store that indexes stems may hold a stem shorter than the
    prefix.
    """

    text: str
    is_prefix: bool = False
    stems: tuple[str, ...] = ()

    @property
    def is_phrase(self) -> bool:
        return " " in self.text and not self.is_prefix


@dataclass(frozen=True, slots=True)
class Query:
    """Search terms for words, and for Chinese, Japanese and Korean characters, each of which counts as a word."""

    keyword: tuple[Term, ...] = ()
    characters: tuple[Term, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keyword or self.characters)


def parse(text: str) -> Query:
    """Parse a question into at most MAX_TERMS terms of each kind, without stop words outside of phrases.

    `"two words"` in quotation marks of any kind are a phrase, `word*` is a prefix. Chinese, Japanese and Korean have no spaces between
    words: a run of characters is searched by its pairs.
    """
    keyword: dict[Term, None] = {}
    characters: dict[Term, None] = {}
    rest = unicodedata.normalize("NFC", text).lower()
    for quoted, phrase in list(_phrases(rest)):
        rest = rest.replace(quoted, " ", 1)
        if CJK.search(phrase):
            characters[Term(_words_of(phrase))] = None
        else:
            keyword[Term(phrase)] = None
    keyword |= {_beginning(" ".join(words(match[1]))): None for match in _PREFIX.finditer(rest) if words(match[1])}
    has_cjk = CJK.search(rest) is not None
    for term in terms(_PREFIX.sub(" ", rest)):
        for part in filter(None, _RUN.split(term)):
            if CJK.match(part):
                characters |= {Term(" ".join(pair)): None for pair in _pairs(part)}
                continue
            keyword[Term(part)] = None
            if has_cjk:  # chunks may have the word inside a CJK run
                characters[Term(part)] = None
    return Query(tuple(keyword)[:MAX_TERMS], tuple(characters)[:MAX_TERMS])


@dataclass(frozen=True, slots=True)
class Variant:
    """A form of a term to look up: in words, in the stems of documents in other languages than English, or in all of both."""

    text: str
    scope: Literal["all", "words", "stems"] = "all"
    is_prefix: bool = False


def variants(term: Term, languages: Sequence[str]) -> list[Variant]:
    """Return the forms of a term in a knowledge base whose documents are in these languages, apart from English.

    A question has no reliable language, so it is stemmed in each. A chunk should match one form, or BM25 would count the term twice. So if
    a language leaves a term as it is, as most do with a name, all chunks are searched for it, and it weighs the same in all of them.
    Otherwise, words are searched for the term and stems for its stems.
    """
    own = [Variant(term.text, is_prefix=term.is_prefix), *map(Variant, term.stems)]
    if not languages:
        return own
    stems = list(dict.fromkeys(" ".join(stem(word, language) for word in term.text.split()) for language in languages))
    if term.is_prefix:  # the stem of a word can be shorter than the prefix
        return own + [Variant(one, "stems") for one in stems if not unaccented(one).startswith(unaccented(term.text))]
    same = unaccented(term.text)
    others = [Variant(one, "stems") for one in stems if unaccented(one) != same]
    return [*own, *others] if len(others) < len(stems) else [Variant(term.text, "words"), *others]


def has_phrase(phrase: str, heading: str, text: str) -> bool:
    """Whether a heading or a text has these words in a row, whatever their case and accents.

    Stems alone find a phrase in other forms of its words too.
    """
    return any(f" {_comparable(phrase)} " in f" {_comparable(whole)} " for whole in (heading, text))


def _comparable(text: str) -> str:
    return " ".join(words(unaccented(text.lower())))


def _phrases(text: str) -> Iterator[tuple[str, str]]:
    """Yield (with quotation marks, without) for each quotation of 2 to MAX_PHRASE_WORDS words or of one CJK word."""
    for match in _QUOTED.finditer(text):
        phrase = words(next(filter(None, match.groups())))
        if 1 < len(phrase) <= MAX_PHRASE_WORDS or (len(phrase) == 1 and CJK.search(phrase[0])):
            yield match[0], " ".join(phrase)


def _beginning(text: str) -> Term:
    stems = {
        text[: -len(tail)] for suffix in _SUFFIXES for end in range(1, len(suffix) + 1) if text.endswith(tail := suffix[:end])
    } - STOP_WORDS
    return Term(text, is_prefix=True, stems=tuple(sorted(stem for stem in stems if len(stem) >= _MIN_STEM and " " not in text)))


def _words_of(phrase: str) -> str:
    return " ".join(spaced(phrase).split())


def _pairs(run: str) -> list[str]:
    return [run[at : at + 2] for at in range(len(run) - 1)] or [run]


MAX_QUESTION_CHARS = 4000

_MEASURES = {
    "en": "degrees|seconds?|minutes?|hours?|days?|weeks?|months?|years?|euros?|dollars?|grams?|kilograms?|"
    "lit(?:er|re)s?|met(?:er|re)s?|percent|watts?|volts?",
    "de": "grad|sekunden|minuten|stunden|tage|wochen|monate|jahre|euro|dollar|gramm|kilo|liter|meter|prozent|watt|volt|uhr",
    "fr": "degres|secondes|minutes|heures|jours|semaines|mois|annees|ans|euros|dollars|grammes|litres|metres|watts|volts|temps",
    "es": "grados|segundos|minutos|horas|dias|semanas|meses|anos|euros|dolares|gramos|litros|metros|vatios|voltios",
}
"""Units of measure: "how many hours" asks for a quantity that a passage states, not for a count."""

_GAP = r"[^.?!;]{0,80}"
"""Text between two parts of a pattern, within one sentence."""
_NUMBER = r"(?:than )?[€$£]?(?:\d|(?:the )?average|(?:one|two|three|four|five|six|ten|a hundred|a thousand)\b)"
_NOT_TIMES = r"(?! (?:time|times|day|week|hour|minute|second|month|year|morning|evening|night|other|case|few|\d+)s?\b)"
"""After "each" or "every": excludes expressions of frequency, such as "every day"."""
_SEVERAL = r"\bwhich (?:of\b|people\b|(?!(?:is|was|has|does)\b)\w*[^\Ws]s\b)"
"""Asks for more than one: "which orders", not "which glass"."""

_GREATEST = r"(?:high|low|larg|bigg|small|great|long|short|old|new|lat|earli|cheap|few|lea)e?st"
"""After "which … has the": answering needs a comparison of all items."""

_FORMS = (
    # English
    rf"\bhow many\b(?! (?:{_MEASURES['en']})\b)",
    r"\bhow many (?:seconds|minutes|hours|days|weeks|months|years|euros|dollars|kilograms|lit(?:er|re)s) (?:were|have been|did we)\b",
    r"\bhow often (?:was|were|did|has|have|had)\b",
    r"\bthe (?:total )?number of\b",
    r"\b(?:count|enumerate)\b (?:all|every|each|the)\b",
    r"\b(?:list|name|show|find|give|summari[sz]e|compare|mention|tell)\b(?: me| us)?(?: about)?(?: of)? (?:all|every(?:thing|one)?|each)\b",
    r"\b(?:what|which|who) are all\b",
    r"\b(?:every single|(?:complete|full|entire) (?:list|overview))\b",
    rf"\b(?:for|of|in|by|per|from|do|does|did|is|are|was|were|has|have|had|can|what|which|who) (?:each|every)\b{_NOT_TIMES}",
    (
        rf"\b(?:what|which|calculate|compute|give|show|determine|how (?:much|large|old|long))\b{_GAP}"
        r"(?<!above )(?<!below )\b(?:average|median)\b(?! (?:user|person|reader|adult|human|day)\b)"
    ),
    r"^(?:the )?(?:average|median)\b(?! (?:user|person|reader|adult|human|day)\b)",
    rf"^(?:each|every)\b{_NOT_TIMES} \w+(?:'s\b|(?: \w+){{0,2}} ?\??$)",
    r"\bthe mean (?:of|value|price|cost|number)\b",
    r"\b(?:in total|all together|altogether|grand total|the sum of)\b",
    r"\b(?:the|my|our|your|his|her|its|their) (?:sum )?total(?: (?:of|for|across|over|from)\b| ?\?|$)",
    r"\btotal (?:number|amount|sum|costs?|price|revenue|sales|spend(?:ing)?|expenses?|income|profit|turnover|value|quantity)\b",
    (
        rf"\b(?:which|who|whose)\b{_GAP}\b(?<!at )(?:the )?most\b"
        r"(?! (?:of the time|of all|likely|important|suitable|appropriate|recommended|reliable|effective|efficient|useful|secure|safe)\b)"
    ),
    rf"\b(?:which|who|whose|what)\b{_GAP}\b(?:the fewest|most (?:common|frequent|often|expensive))",
    r"\b(?:what|which|who|where|when)\b(?: \w+){0,2} (?:do|did|have|had) most (?:of (?:the|our|my|your|their) )?(?:people|\w+s)\b",
    rf"\b(?:which|who|whose)\b(?: \w+){{0,3}} (?:has|have|had|is|are|was|were) the {_GREATEST}\b(?!-)",
    (
        rf"(?:{_SEVERAL}|\bwho\b|\bwhose\b|\b(?:list|show|find|name)\b){_GAP}"
        rf"\b(?:fewer|less|more|at least|at most|above|below|over|under|exceed(?:s|ing)?)\b {_NUMBER}"
    ),
    rf"\b(?:fewer|more) than (?:\d+|one|two|three|four|five|ten) (?!(?:{_MEASURES['en']})\b)\w+s\b",
    rf"{_SEVERAL}{_GAP}\b(?:not|never|without)\b",
    # German
    rf"\bwie ?viele\b(?! (?:{_MEASURES['de']})\b)",
    r"\bwie oft (?:wurden?|hat|haben|war|waren)\b",
    r"\bdie (?:gesamt|an)zahl (?:der|von|aller)\b",
    r"\b(?:nenne?|liste|zahle?|zeige?|gib|finde?)\b(?: mir| uns)? (?:alle[nrs]?|jede[nrs]?|samtliche[nrs]?)\b",
    r"\b(?:liste|zahle?) .{1,80} auf\b",
    r"\bfasse? (?:alles|alle[nrs]?|jede[nrs]?)\b",
    r"\b(?:samtliche[nrs]?|vollstandige liste)\b",
    r"\b(?:durchschnittswert|mittelwert|im (?:durch)?schnitt|der durchschnitt|durchschnittliche[nrs]?)\b",
    r"\b(?:insgesamt|gesamt(?:summe|betrag|kosten|umsatz|preis|wert|menge)|die summe (?:der|aller|von))\b",
    rf"\b(?:wer|welche[nrs]?|wessen)\b{_GAP}\b(?:am meisten|am haufigsten|am wenigsten|die meisten|die wenigsten)\b",
    (
        r"\b(?:wer|welche[nrs]?)\b(?: \w+){0,3} (?:hat|haben|hatte|hatten|ist|sind|war|waren) (?:der|die|das|den) "
        r"(?:hoch|niedrig|gro(?:ss|ß)|klein|alt|neue|lang|kurz|teuer|billig|gunstig)e?s?te[nrs]?\b"
    ),
    (
        rf"\bwelche (?:der\b|\w+ (?:sind|haben|waren|hatten|liegen|lagen|kosten|wurden))"
        rf"{_GAP}\b(?:weniger als|mehr als|uber|unter|mindestens|hochstens|nicht|nie|ohne)\b(?: \d| dem durchschnitt|)"
    ),
    r"\b(?:fur|von|bei|pro|hat|ist|wird|bekommt|kostet|was|zu) jede[nrsm]?\b(?! (?:tag|mal|woche|stunde|minute|jahr|monat|fall|zeit)\w*)",
    # French
    rf"\bcombien (?:de |d'|y a|y en a|sont)(?!(?:{_MEASURES['fr']})\b)",
    r"\ble nombre (?:de |d'|total)",
    r"\b(?:liste|enumere|cite|nomme|donne|montre|compte|resume)[rz]?\b(?:[- ](?:moi|nous))? (?:tous|toutes|tout|chaque)\b",
    r"\b(?:quels|quelles) sont (?:tous|toutes)\b",
    r"\bliste complete\b",
    r"\b(?:en moyenne|la moyenne|(?:prix|montant|cout|age|nombre|valeur|salaire|delai) moyen(?:ne)?)\b",
    r"\b(?:au total|en tout(?! cas)|le total (?:de\b|des\b|d')|la somme (?:de\b|des\b|d')|(?:montant|cout|prix|nombre|revenu) total)",
    rf"\b(?:qui|quel(?:le)?s?|lequel|laquelle)\b{_GAP}\ble (?:plus|moins) (?:de |d'|souvent|frequemment)",
    (
        rf"\b(?:qui|quel(?:le)?s?)\b(?: \w+){{0,3}} (?:a|ont|avait|avaient) (?:le|la|les)\b{_GAP}"
        r"\b(?:plus|moins) (?:eleve|haut|bas|grand|petit|cher|ancien|recent|long|court)e?s?\b"
    ),
    (
        rf"\b(?:quels|quelles|lesquels|lesquelles)\b{_GAP}\b(?:(?:moins de|plus de|au moins|au plus|au-dessus de|au-dessous de|depassent|"
        r"superieure?s? a|inferieure?s? a) (?:\d|la moyenne)|ne\b.{1,30}\b(?:pas|jamais)\b|n'.{1,30}\b(?:pas|jamais)\b)"
    ),
    r"\b(?:pour|de|dans|par|a) chaque\b(?! (?:jour|fois|semaine|heure|minute|mois|annee|an|matin|soir|cas)\b)",
    # Spanish
    rf"\bcuant[oa]s\b(?! (?:{_MEASURES['es']})\b)",
    r"\bel numero (?:total )?de\b",
    r"\b(?:enumera|lista|nombra|menciona|muestra|da|cuenta|cita|resume)(?:r|me|nos)? (?:todos|todas|todo|cada)\b",
    r"\bcuales son (?:todos|todas)\b",
    r"\blista completa\b",
    r"\b(?:en promedio|de media|el promedio|la media (?:de|del)|(?:precio|coste|costo|importe|valor|edad) (?:medio|media|promedio))\b",
    r"\b(?:en total|el total (?:de|del)|la suma (?:de|del)|(?:importe|coste|costo|precio|monto|gasto|ingreso|numero) total)\b",
    rf"\b(?:quien(?:es)?|que|cual(?:es)?)\b{_GAP}\b(?:mas a menudo|con mas frecuencia|la mayor cantidad|el mayor numero|mas veces)\b",
    (
        rf"\b(?:cuales|quienes|que \w+s)\b{_GAP}\b(?:(?:menos de|mas de|por encima de|por debajo de|superiores? a|inferiores? a|al menos) "
        r"(?:\d|el promedio|la media)|nunca\b|sin\b)"
    ),
    r"\b(?:cuales|quienes|que \w+s) no\b",
    (
        rf"\b(?:quien(?:es)?|que|cual(?:es)?)\b(?: \w+){{0,3}} (?:tiene|tienen|tenia|tenian) (?:el|la|los|las)\b{_GAP}"
        r"\b(?:mayor|menor|mas (?:alt|baj|car|barat|antigu|larg|cort|pequen)[oa]s?|mas grandes?)\b"
    ),
    r"\b(?:para|de|en|por|a) cada\b(?! (?:dia|vez|semana|hora|minuto|mes|ano|manana|noche|caso)\b)",
)


@cache
def _all_forms() -> re.Pattern[str]:
    """Compiled on first use: that takes as long as the rest of this module's import."""
    return re.compile("|".join(_FORMS))


def needs_all(question: str) -> bool:
    """Whether a question can only be answered from all passages: it counts, sums, averages, compares all items or asks for a full list.

    Recognises simple forms in English, German, French and Spanish, ignoring accents and case. A false positive costs a warning; other
    wordings go unnoticed.
    """
    plain = unicodedata.normalize("NFKD", question[:MAX_QUESTION_CHARS].lower().replace("’", "'"))
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    return _all_forms().search(" ".join(plain.split())) is not None
