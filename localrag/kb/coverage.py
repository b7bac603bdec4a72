"""Questions that the best passages cannot answer, for the answer depends on every one."""

from __future__ import annotations

import re
import unicodedata

MAX_QUESTION_CHARS = 4000

_MEASURES = {
    "en": "degrees|seconds?|minutes?|hours?|days?|weeks?|months?|years?|euros?|dollars?|grams?|kilograms?|"
    "lit(?:er|re)s?|met(?:er|re)s?|percent|watts?|volts?",
    "de": "grad|sekunden|minuten|stunden|tage|wochen|monate|jahre|euro|dollar|gramm|kilo|liter|meter|prozent|watt|volt|uhr",
    "fr": "degres|secondes|minutes|heures|jours|semaines|mois|annees|ans|euros|dollars|grammes|litres|metres|watts|volts|temps",
    "es": "grados|segundos|minutos|horas|dias|semanas|meses|anos|euros|dolares|gramos|litros|metros|vatios|voltios",
}
"""Who asks for so many of these asks for a quantity that stands somewhere, not for things to be counted."""

_FORMS = (
    rf"\bhow many\b(?! (?:{_MEASURES['en']})\b)",
    r"\bthe (?:total )?number of\b",
    r"\b(?:count|enumerate)\b (?:all|every|each|the)\b",
    r"\b(?:list|name|show|find|give|summari[sz]e|compare|mention|tell)\b(?: me| us)?(?: about)?(?: of)? (?:all|every|each)\b",
    r"\b(?:what|which|who) are all\b",
    r"\b(?:every single|(?:complete|full|entire) (?:list|overview))\b",
    rf"\bwie ?viele\b(?! (?:{_MEASURES['de']})\b)",
    r"\bdie (?:gesamt|an)zahl (?:der|von|aller)\b",
    r"\b(?:nenne?|liste|zahle?|zeige?|gib|finde?)\b(?: mir| uns)? (?:alle[nrs]?|jede[nrs]?|samtliche[nrs]?)\b",
    r"\b(?:liste|zahle?) .{1,80} auf\b",
    r"\b(?:samtliche[nrs]?|vollstandige liste)\b",
    rf"\bcombien (?:de |d'|y a|y en a|sont)(?!(?:{_MEASURES['fr']})\b)",
    r"\ble nombre (?:de |d'|total)",
    r"\b(?:liste|enumere|cite|nomme|donne|montre|compte)[rz]?\b(?:[- ](?:moi|nous))? (?:tous|toutes|chaque)\b",
    r"\b(?:quels|quelles) sont (?:tous|toutes)\b",
    r"\bliste complete\b",
    rf"\bcuant[oa]s\b(?! (?:{_MEASURES['es']})\b)",
    r"\bel numero (?:total )?de\b",
    r"\b(?:enumera|lista|nombra|menciona|muestra|da|cuenta|cita)(?:r|me|nos)? (?:todos|todas|cada)\b",
    r"\bcuales son (?:todos|todas)\b",
    r"\blista completa\b",
)
_ALL = re.compile("|".join(_FORMS))


def needs_all(question: str) -> bool:
    """Whether an answer needs every matching passage: it asks for things to be counted, or for a whole list.

    Told by simple forms of English, German, French and Spanish, without accents and case. One too many costs a warning; a question in
    other words goes unnoticed.
    """
    plain = unicodedata.normalize("NFKD", question[:MAX_QUESTION_CHARS].lower().replace("’", "'"))
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    return _ALL.search(" ".join(plain.split())) is not None
