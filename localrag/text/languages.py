"""The language of a document, told from its most frequent words, and the stems of words in it (the Snowball algorithms).

English and unknown languages are "": full-text search itself stems those by Porter's algorithm. Stems are part of the schema of a knowledge
base, so another version of snowballstemmer needs a migration (localrag/kb/database.py).
"""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

MAX_SAMPLE_CHARS = 20_000
"""Length of the beginning of a document that tells its language."""

MIN_SHARE = 0.1
"""Least share of a language's frequent words among all words. In prose they are 0.2 to 0.5."""
SENTENCE_WORDS = 20
"""Number of words from which two different frequent words are needed: a single one, however often it is repeated, may belong to a name or
a title ("Hon."). One is enough in a sentence or two."""
MIN_LEAD = 1.5
"""Least ratio to the next language. A document in two languages has less, and its language stays unknown."""

_SNOWBALL = {
    "cs": "czech",
    "da": "danish",
    "de": "german",
    "el": "greek",
    "es": "spanish",
    "fi": "finnish",
    "fr": "french",
    "hu": "hungarian",
    "it": "italian",
    "nl": "dutch",
    "no": "norwegian",
    "pl": "polish",
    "pt": "portuguese",
    "ro": "romanian",
    "ru": "russian",
    "sv": "swedish",
    "tr": "turkish",
}
"""ISO 639-1 code → Snowball's name of the algorithm."""

LANGUAGES = frozenset(_SNOWBALL)
"""The languages whose words are stemmed here."""

_FREQUENT = {
    "cs": "a se na je že v s z do o to jsou by ale jako za pro jeho nebo k po jen jsem který která které při podle už také aby však bylo "
    "byl není být má od ve co když jejich této pokud až",
    "da": "og i at det en den til er som på de med han af for ikke der var mig sig men et har om vi havde hun nu over da fra du ud dem op "
    "hvor eller hvad skal kan efter ved blev meget nogle når være også mellem skulle kun",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er hat dass sie nach "
    "wird bei einer um am sind noch wie einem über einen so zum war haben nur oder aber vor zur bis mehr durch man sein wenn ich wir kann "
    "muss wer ihr jede jeden",
    "en": "the of and to in is that for it as was with be by on not he i this are or his from at which but have an had they you were their "
    "one all we can her has there been if more when will would who so no what up its about than into them only other some could these may "
    "then do your does my must how where s t such out any most after over",
    "es": "de la que el en y a los del se las por un para con no una su al lo como más pero sus le ya o este sí porque esta entre cuando "
    "muy sin sobre también me hasta hay donde quien desde todo nos durante todos uno les ni contra otros ese eso ante ellos es son ser "
    "está debe puede fue",
    "fi": "ja on ei että se hän oli mutta ovat kun niin myös sen joka hänen jos mitä siitä tai kuin olla vain voi sitä ole kanssa sekä "
    "jotka mukaan tämä tämän ennen jälkeen joita voidaan sitten jo nyt hyvin kaikki olivat hänet mikä siinä pitää saa",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont avec son aux ou qu on "
    "mais cette comme nous leur sa ses été fait elle même aussi deux sans peut doit être ces vous tout ils entre dès quand après très où "
    "chaque je",
    "hu": "a az és hogy nem is egy ez de van csak ha meg már mint azt vagy még el volt ki kell minden azonban lehet majd mert olyan amely "
    "ezt fel itt ami után között szerint pedig akkor amikor aki nagyon lesz nincs be le át illetve",
    "it": "di e il la che in un a per è una del non sono le con si da i della al come anche più dei nel alla ha ma gli o delle questo lo "
    "ed su se dal dalla nella essere stato due ai loro tra degli cui quando fino ogni deve può dopo solo",
    "nl": "de van het een en in is dat op te voor met zijn niet aan er die om ook als dan maar bij of uit nog naar worden door over werd "
    "hij kan heeft had hebben deze wordt geen moet tot wel meer zich tegen al ze zij waar je mag wie onder elke",
    "no": "og i det er på til som en for av å at med de har den ikke om et fra men vi var seg jeg sier kan skal hadde han ble mot eller så "
    "også ut etter nå blir over ved noen mye være når hvor bare mellom må dette hun opp",
    "pl": "i w na z się nie do to że jest o za od po jak co przez a dla oraz ale był być tylko może są lub jego przy które który która już "
    "tym czy ze ich jako tego pod jeśli można było bez też podczas należy",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais as dos como mas foi ao ele das tem à seu sua ou ser quando "
    "muito há nos já está eu também só pelo pela até isso ela entre era depois sem mesmo aos deve pode são cada",
    "ro": "de și în a la cu pe nu care din o că este un să mai pentru sunt ce se au fi sau dar după prin lor fost cei le această acest "
    "era până fără între când poate trebuie dacă sa ale al cele doar fie",
    "sv": "och i att det som en på är av för med till den har de inte om ett han men var jag sig från vi så kan när år under skulle hade "
    "också efter eller nu sin hon vid mot där ut bara blev alla mycket måste ska får mellan utan här över upp",
    "tr": "ve bir bu da de için ile olarak çok daha olan gibi en kadar sonra her ne ise o ya ki ancak veya olduğu tarafından göre değil "
    "var ama iki bunu önce kendi olur içinde mi diye hem üzerinde edilir arasında yok",
}
"""Language → its most frequent words, roughly in order of frequency. They hold a third to a half of a text."""

_ALIKE = ("da", "no")
"""Languages that share most of their frequent words, so that neither has a lead on the other."""

_GREEK, _CYRILLIC = re.compile("[\u0370-\u03ff\u1f00-\u1fff]"), re.compile("[\u0400-\u052f]")
_RUSSIAN = re.compile("[ыэё]")
_NOT_RUSSIAN = re.compile(r"[іїєґўѓђјљњћќџѕәғқңөұүһ]|\b(?:е|са|се|си|ще|във|със|който)\b")  # letters of others; words of Bulgarian
_MIN_RUSSIAN = 0.005  # of Cyrillic letters; Russian has 0.02

_MIN_DIFFERENT, _MIN_CERTAINTY = 2.0, 0.7
_ROUGHLY = 5  # the ranks are rough, those of the first few words above all

_MAX_WORD_CHARS = 64  # as in FTS5's Porter stemmer; longer ones are no words

_WORD = re.compile(r"[^\W_]+")
_ACCENT = re.compile("(?<=[a-z])[\u0300-\u036f]+")


def language_of(texts: Iterable[str]) -> str:
    """Return the ISO 639-1 code of the language of a document, of which `texts` are the parts; "" if it is English, mixed or unknown."""
    sample: list[str] = []
    num_chars = 0
    for text in texts:
        sample.append(text[: MAX_SAMPLE_CHARS - num_chars])
        num_chars += len(sample[-1])
        if num_chars >= MAX_SAMPLE_CHARS:
            break
    return _language(unicodedata.normalize("NFC", "\n".join(sample)).lower())


def _language(text: str) -> str:
    words = _WORD.findall(text)
    num_letters = sum(map(len, words))
    if 2 * len(_GREEK.findall(text)) > num_letters:
        return "el"
    if 2 * (num_cyrillic := len(_CYRILLIC.findall(text))) > num_letters:
        num_russian = len(_RUSSIAN.findall(text))
        return "ru" if num_russian >= max(int(_MIN_RUSSIAN * num_cyrillic), len(_NOT_RUSSIAN.findall(text))) else ""
    num_words: dict[str, float] = dict.fromkeys(_FREQUENT, 0.0)
    num_different = num_words.copy()
    shares = _shares_by_word()
    for word, count in Counter(words).items():
        for language, share in shares.get(word, {}).items():
            num_words[language] += share * count
            num_different[language] += share
    best = max(num_words, key=lambda language: num_words[language])
    num, others = num_words[best], num_words.keys() - {best, *(_ALIKE if best in _ALIKE else ())}
    next_num = max(num_words[language] for language in others)
    least = _MIN_DIFFERENT if len(words) > SENTENCE_WORDS else _MIN_CERTAINTY
    is_clear = num >= max(MIN_SHARE * len(words), MIN_LEAD * next_num)
    is_varied = num_different[best] >= max(least, *num_different.values())
    return best if best in _SNOWBALL and is_clear and is_varied else ""


@cache
def _shares_by_word() -> dict[str, dict[str, float]]:
    """Return word → language → the probability that the word is in that language, as Zipf's law has it by the word's ranks."""
    frequencies: dict[str, dict[str, float]] = {}
    for language, words in _FREQUENT.items():
        for rank, word in enumerate(words.split()):
            frequencies.setdefault(word, {})[language] = 1 / (rank + _ROUGHLY)
    return {
        word: {language: frequency / sum(languages.values()) for language, frequency in languages.items()}
        for word, languages in frequencies.items()
    }


def stemmed(text: str, language: str) -> str:
    """Replace each word of a text by its stem, in lower case. An unknown language leaves the text as it is."""
    if language not in _SNOWBALL:
        return text
    return _WORD.sub(lambda word: stem(word[0], language), unicodedata.normalize("NFC", text).lower())


def stem(word: str, language: str) -> str:
    """Return the stem of a word in lower case; the word itself if it is very long or the language unknown. Here, "en" is English."""
    return _stem(word, language) if len(word) <= _MAX_WORD_CHARS and (language in _SNOWBALL or language == "en") else word


@lru_cache(maxsize=20_000)
def _stem(word: str, language: str) -> str:
    return str(_algorithm(language)().stemWord(word))  # a stemmer of its own, since one holds the word at hand and threads would share it


@cache
def _algorithm(language: str) -> type[Any]:
    """Return Snowball's class for a language. `snowballstemmer.stemmer` would prefer PyStemmer, of whichever version is installed."""
    name = _SNOWBALL.get(language, "english")
    return getattr(importlib.import_module(f"snowballstemmer.{name}_stemmer"), f"{name.title()}Stemmer")  # type: ignore[no-any-return]


def unaccented(text: str) -> str:
    """Remove accents of Latin letters, as full-text search does."""
    return unicodedata.normalize("NFC", _ACCENT.sub("", unicodedata.normalize("NFD", text)))
