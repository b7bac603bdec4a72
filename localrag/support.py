"""Check an answer against the passages that it cites: a score for each sentence, and the claims that no cited passage makes.

No model judges. A sentence is compared with the sentences and lines of its sources by words, and by cosine similarity if an
embedder is loaded. Numbers with their units, names and negations are compared one by one. All this is deterministic, and takes time in
proportion to the lengths of the answer and of the passages.

What it cannot see: whether the sentence answers the question, a claim that is put in other words than the source, arithmetic, and
numbers written as words. German nouns are no names, because all are capitalised; a script without capitals has no names but codes.
"""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from localrag.errors import LocalragError
from localrag.text.languages import language_of
from localrag.text.quantities import NUMBER_WORDS, Quantity, find_quantities, unit_of
from localrag.text.sentences import Unit, sentences, units
from localrag.text.terms import CJK, STOP_WORDS, words
from localrag.types import Chunk, Citation, Hit

if TYPE_CHECKING:
    import numpy as np

    from localrag.text.tokens import Embedder

ClaimKind = Literal["number", "unit", "name", "negation"]

MAX_STRETCH_CHARS = 400
"""Longest stretch of a passage that counts as one sentence. A longer one, as in text without stops, is divided between words."""
MAX_SPAN_STRETCHES = 3
"""Most sentences and lines, next to each other, in one supporting span."""
MIN_GAIN = 0.1
"""How much of a sentence's words a neighbouring sentence must add to become part of the span."""
MAX_PASSAGES = 4
"""Most passages of one sentence that are searched for its span: those with most of its words."""
MAX_EMBEDDED = 18
"""Most texts to embed for one answer."""
NUM_CANDIDATES = 2
"""Stretches of a passage, best by words, whose cosine similarity is computed."""


@dataclass(frozen=True, slots=True)
class SupportingSpan:
    """The stretch of a source that supports a sentence best: characters `start` to `end` of the document (code points, end exclusive).

    If the passage is not a literal part of its document, such as a fact noted from it, `start` and `end` are those of the passage.
    """

    label: str
    source: str
    start: int
    end: int
    text: str
    place: str = ""

    def to_dict(self) -> dict[str, object]:
        place = {"place": self.place} if self.place else {}
        return {"id": self.label, "source": self.source, "start": self.start, "end": self.end, **place, "text": self.text}


@dataclass(frozen=True, slots=True)
class SentenceSupport:
    """A sentence of an answer: its characters `start` to `end`, the labels that it cites, and the best supporting span in them.

    `contributions` add up to the score, 0 to 1: "words" is the share of the sentence's words in the span, "cosine" the similarity of both;
    each counts half, or words alone count if no embedder was loaded. An uncited sentence has none and no score.
    """

    start: int
    end: int
    labels: tuple[str, ...] = ()
    span: SupportingSpan | None = None
    contributions: Mapping[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        return sum(self.contributions.values()) if self.labels else None

    def to_dict(self) -> dict[str, object]:
        return {
            "start": self.start,
            "end": self.end,
            "citations": list(self.labels),
            "span": None if self.span is None else self.span.to_dict(),
            "score": None if self.score is None else round(self.score, 4),
            "contributions": {name: round(value, 4) for name, value in self.contributions.items()},
        }


@dataclass(frozen=True, slots=True)
class UnsupportedClaim:
    """Characters `start` to `end` of an answer that no source of their sentence has: a number, a number with another unit, a name, or a
    statement that is negated on one side only.
    """

    kind: ClaimKind
    text: str
    start: int
    end: int

    def to_dict(self) -> dict[str, object]:
        return {"kind": self.kind, "text": self.text, "start": self.start, "end": self.end}


@dataclass(frozen=True, slots=True)
class Support:
    """What the sources of an answer support: each sentence in order, and the claims in cited sentences that they do not."""

    sentences: tuple[SentenceSupport, ...] = ()
    unsupported_claims: tuple[UnsupportedClaim, ...] = ()

    @property
    def mean_score(self) -> float | None:
        """The mean score of the cited sentences; None if there are none."""
        scores = [each.score for each in self.sentences if each.score is not None]
        return sum(scores) / len(scores) if scores else None


def assess(
    text: str, hits: Iterable[Hit], citations: Iterable[Citation], *, is_cut: bool = False, embedder: Embedder | None = None
) -> Support:
    """Compare each sentence of an answer with the passages that it cites. `citations` are those of `citation.cite`, with their spans.

    An answer without any hits has nothing to compare with, and an empty Support. With `is_cut`, a limit or a user ended the text: what
    touches the end makes no claim, because 8 might have become 80. An embedder that fails, because it was closed, counts as none.
    """
    hits, citations = list(hits), list(citations)
    if not hits:
        return Support()
    passages = {hit.label: _Passage(hit.chunk) for hit in hits}
    plain, cited = _cited_sentences(text, citations)
    weigh = _weights(passages.values())
    language = _language(plain)
    similarity = _Similarity(embedder)
    results: list[SentenceSupport] = []
    claims: list[UnsupportedClaim] = []
    for start, end, labels in cited:
        if not labels:
            results.append(SentenceSupport(start, end))
            continue
        sentence = _Sentence(plain, start, end, language)
        sources = [passages[label] for label in labels if label in passages]
        match = _best_match(sentence, sources, weigh, similarity)
        contributions = {"words": 0.0} if match is None else match.contributions
        span = None if match is None else match.passage.span(match.first, match.last)
        results.append(SentenceSupport(start, end, labels, span, contributions))
        if not _ASKS.search(sentence.text):
            claims += _unsupported(sentence, sources, match, weigh)
    if is_cut:
        claims = [claim for claim in claims if any(map(str.isalnum, text[claim.end :]))]
    distinct = {(claim.kind, claim.text.casefold()): claim for claim in reversed(claims)}
    return Support(tuple(results), tuple(sorted(distinct.values(), key=lambda claim: (claim.start, claim.end))))


# --- the sentences of an answer, and what each cites ---

_ASKS = re.compile(r"[?？][\"'”’)\]»*_\s]*\Z")
"""The end of a question, which claims nothing."""
_NO_TAG = re.compile(r"\[none\]", re.IGNORECASE)
_BRACKETS = re.compile(r"[\[［【〔(（{<][\s,;、，；&\0]*+[\]］】〕)）}>]")
_BULLET = re.compile(r"\s*+(?:[-*+•>#|]++[ \t]++)*+(?:\(?\d{1,3}[.)](?=\s))?+")
_BEFORE_TEXT = " \t-*+•>#|[［【〔(（0123456789."
"""What can stand between the beginning of a line and a citation that begins it."""
_NUMBERED = re.compile(r"\s*+\(?\d{1,3}[.)]\s++")


def _cited_sentences(text: str, citations: Sequence[Citation]) -> tuple[str, list[tuple[int, int, tuple[str, ...]]]]:
    """Return the text with its citations blanked out, and (start, end, labels) of each sentence.

    A citation within a sentence belongs to it. One between two sentences belongs to the first, as in "It is stiff. [KB#1]"; in a paragraph
    that begins with a citation it belongs to the second.
    """
    tags = sorted((start, end, each.label) for each in citations for start, end in each.spans)
    chars = list(text)
    for start, end in {(start, end) for start, end, _ in tags} | {match.span() for match in _NO_TAG.finditer(text)}:
        chars[start:end] = "\0" * (end - start)
    marked = "".join(chars)
    marked = _BRACKETS.sub(lambda match: "\0" * len(match[0]) if "\0" in match[0] else match[0], marked)
    plain = marked.replace("\0", " ")
    spans = list(_sentence_spans(plain))
    labels: list[dict[str, None]] = [{} for _ in spans]
    starts = [start for start, _ in spans]
    leads: dict[int, bool] = {}  # whether the paragraph that begins here begins with a citation of what follows
    breaks = [0, *(match.end() for match in re.finditer(r"\n\s*+", text))]
    for start, _, label in tags:
        at = bisect_right(starts, start) - 1  # the sentence that begins before the tag
        paragraph = breaks[bisect_right(breaks, start) - 1]
        if paragraph not in leads:
            is_first = not plain[paragraph:start].strip(_BEFORE_TEXT)
            leads[paragraph] = is_first and at + 1 < len(spans) and "\n" not in text[start : starts[at + 1]]
        is_between = at < 0 or start >= spans[at][1]
        if at < 0 or (is_between and leads[paragraph] and at + 1 < len(spans)):
            at += 1
        if at < len(spans):
            labels[at][label] = None
    return plain, [(start, end, tuple(names)) for (start, end), names in zip(spans, labels, strict=True)]


def _sentence_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each sentence or line with a word begins and ends, without list marks and white space around it."""
    at = 0
    for piece in sentences(text):
        start, at = at, at + len(piece)
        if _NUMBERED.fullmatch(piece) and "\n" not in piece.lstrip() and at < len(text):
            continue  # the number of a list
        bullet = _BULLET.match(text, start, at)
        start = bullet.end() if bullet else start
        stretch = text[start:at]
        start += len(stretch) - len(stretch.lstrip())
        end = start + len(stretch.strip())
        if any(char.isalnum() for char in text[start:end]):
            yield start, end


# --- languages ---

_SCRIPTS = (
    ("ja", re.compile("[\u3040-\u30ff]")),
    ("ko", re.compile("[\uac00-\ud7af]")),
    ("zh", re.compile("[\u4e00-\u9fff]")),
)
_MAX_SCRIPT_CHARS = 2000


def _language(text: str) -> str:
    """Return a language of _NEGATIONS, told by the script or the most frequent words; "en" if nothing tells."""
    beginning = text[:_MAX_SCRIPT_CHARS]
    num_letters = sum(map(str.isalpha, beginning))
    for name, script in _SCRIPTS:
        if 4 * len(script.findall(beginning)) > num_letters:
            return name
    return language_of([text]) or "en"


# --- words, compared without their endings ---

_SUFFIX = re.compile(r"(?<=...)(?:ing|ed|es|er|en|em|e|s|n)\Z")
_MAX_KEY_CHARS = 6


def _keys(text: str) -> list[str]:
    """Return what is compared of the words of a text: their beginnings, in lower case. Chinese, Japanese and Korean give pairs of
    characters. Stop words are left out, unless there is nothing else.
    """
    found = words(unicodedata.normalize("NFKC", text).casefold())
    return [key for word in found if word not in STOP_WORDS for key in _keys_of(word)] or [key for word in found for key in _keys_of(word)]


def _keys_of(word: str) -> Iterator[str]:
    if word.isascii() or not CJK.search(word):
        yield word if word[0].isdigit() else _SUFFIX.sub("", word.replace("y", "i"))[:_MAX_KEY_CHARS]
        return
    for run in re.split(rf"((?:{CJK.pattern})+)", word):
        if CJK.match(run):
            yield from (map("".join, pairwise(run)) if len(run) > 1 else (run,))
        elif run:
            yield from _keys_of(run)


def _weights(passages: Collection[_Passage]) -> Callable[[str], float]:
    """Return the weight of a word: high if few sentences of the passages have it, as in BM25."""
    counts = Counter(key for passage in passages for stretch in passage.stretches for key in stretch.keys)
    total = sum(len(passage.stretches) for passage in passages)

    def weigh(key: str) -> float:
        count = counts[key]
        return math.log1p((total - count + 0.5) / (count + 0.5))

    return weigh


# --- passages ---


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A sentence or line of a passage: characters `start` to `end` of its text. `known` also has the keys of what explains it: the
    passage's heading, and the first row of its table.
    """

    start: int
    end: int
    keys: frozenset[str]
    known: frozenset[str]


class _Passage:
    """A passage, taken apart only as far as it is needed."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.text = chunk.text

    @cached_property
    def stretches(self) -> tuple[_Stretch, ...]:
        return tuple(_stretches(self.text, self.context))

    @cached_property
    def context(self) -> frozenset[str]:
        """The keys of what a prompt shows beside the text: its heading, or its file."""
        return frozenset(_keys(self.chunk.heading or self.chunk.source))

    @cached_property
    def keys(self) -> frozenset[str]:
        return self.context.union(*(stretch.known for stretch in self.stretches))

    @cached_property
    def facts(self) -> _Facts:
        return _Facts(f"{self.text}\n{self.chunk.heading}\n{self.chunk.source}")

    @cached_property
    def language(self) -> str:
        return _language(self.text)

    @cached_property
    def denying(self) -> frozenset[_Stretch]:
        """The stretches that deny something."""
        return frozenset(each for each in self.stretches if _denied(self.text[each.start : each.end], self.language))

    def span(self, first: int, last: int) -> SupportingSpan:
        """Return the span of some stretches in the document."""
        chunk, start, end = self.chunk, self.stretches[first].start, self.stretches[last].end
        text = self.text[start:end]
        if len(self.text) != chunk.end - chunk.start:  # not a literal part of its document
            return SupportingSpan(chunk.label, chunk.source, chunk.start, chunk.end, text, chunk.place)
        place = _lines(chunk.place, self.text, start, end)
        return SupportingSpan(chunk.label, chunk.source, chunk.start + start, chunk.start + end, text, place)


_LINES = re.compile(r"lines? (\d{1,9})(?:-\d{1,9})?")


def _lines(place: str, text: str, start: int, end: int) -> str:
    """Narrow a place in lines to that of a part of the text. Other places, such as pages, stay."""
    match = _LINES.fullmatch(place)
    if match is None:
        return place
    first = int(match[1]) + text.count("\n", 0, start)
    last = first + text.count("\n", start, end)
    return f"line {first}" if first == last else f"lines {first}-{last}"


def _stretches(text: str, context: frozenset[str]) -> Iterator[_Stretch]:
    """Yield what a span can be made of: sentences, list items, rows, and code, divided if it is long."""
    headers: dict[tuple[int, int], frozenset[str]] = {}
    for unit in units(text) or [Unit((0, len(text)))]:
        known = context
        if unit.header is not None:
            if unit.header not in headers:
                headers[unit.header] = context.union(_keys(text[slice(*unit.header)]))
            known = headers[unit.header]
        for start, end in _divided(text, *unit.span):
            keys = frozenset(_keys(text[start:end]))
            if keys:
                yield _Stretch(start, end, keys, keys | known)


def _divided(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    while end - start > MAX_STRETCH_CHARS:
        space = text.rfind(" ", start + MAX_STRETCH_CHARS // 2, start + MAX_STRETCH_CHARS)
        middle = space if space > 0 else start + MAX_STRETCH_CHARS
        yield start, middle
        start = middle
    yield start, end


# --- the best span ---


@dataclass(frozen=True, slots=True)
class _Match:
    """Stretches `first` to `last` of a passage, and their score against a sentence."""

    passage: _Passage
    first: int
    last: int
    contributions: Mapping[str, float]

    @property
    def score(self) -> float:
        return sum(self.contributions.values())


class _Sentence:
    """A cited sentence of the answer, without its tags."""

    def __init__(self, text: str, start: int, end: int, language: str) -> None:
        self.start = start
        self.end = end
        self.text = text[start:end]
        self.language = language

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(_keys(self.text))

    @cached_property
    def facts(self) -> _Facts:
        return _Facts(self.text)


class _Similarity:
    """Cosine similarities, until MAX_EMBEDDED different texts were embedded."""

    def __init__(self, embedder: Embedder | None) -> None:
        self._embedder = embedder
        self._vectors: dict[str, np.ndarray] = {}

    def of(self, sentence: str, texts: Sequence[str]) -> list[float] | None:
        """Return the similarity of a sentence to each text, 0 to 1; None without an embedder, or if that were too many texts."""
        new = [text for text in dict.fromkeys((sentence, *texts)) if text not in self._vectors]
        if self._embedder is None or len(self._vectors) + len(new) > MAX_EMBEDDED:
            return None
        try:
            vectors = self._embedder.embed([_fitted(text, self._embedder) for text in new]) if new else ()
        except LocalragError:
            self._embedder = None
            return None
        self._vectors |= zip(new, vectors, strict=True)
        return [min(1.0, max(0.0, float(each))) for each in (self._vectors[text] @ self._vectors[sentence] for text in texts)]


def _fitted(text: str, embedder: Embedder) -> str:
    """Return as much of the beginning of a text as the embedder takes."""
    text = text[: 4 * MAX_SPAN_STRETCHES * MAX_STRETCH_CHARS]
    while embedder.count(text) > embedder.max_tokens:
        text = text[: len(text) * 3 // 4]
    return text


def _best_match(sentence: _Sentence, sources: Sequence[_Passage], weigh: Callable[[str], float], similarity: _Similarity) -> _Match | None:
    """Return the best span for a sentence in its sources, by words and cosine similarity."""
    weights = {key: weigh(key) for key in sentence.keys}
    total = math.fsum(weights.values())
    sources = [source for source in sources if source.stretches]
    if not total or not sources:
        return None

    def covered(keys: Iterable[str]) -> float:
        return math.fsum(weights[key] for key in keys) / total

    nearest = sorted(sources, key=lambda source: -covered(sentence.keys & source.keys))[:MAX_PASSAGES]
    spans = [span for source in nearest for span in _spans(sentence.keys, source, covered)]
    spans = sorted(spans, key=lambda span: (-span[3], span[2] - span[1]))[:NUM_CANDIDATES]
    texts = [source.text[source.stretches[first].start : source.stretches[last].end] for source, first, last, _ in spans]
    cosines = similarity.of(sentence.text, texts)
    if cosines is None:
        matches = [_Match(source, first, last, {"words": share}) for source, first, last, share in spans]
    else:
        matches = [
            _Match(source, first, last, {"words": share / 2, "cosine": cosine / 2})
            for (source, first, last, share), cosine in zip(spans, cosines, strict=True)
        ]
    return max(matches, key=lambda match: match.score)


def _spans(keys: frozenset[str], source: _Passage, covered: Callable[[Iterable[str]], float]) -> list[tuple[_Passage, int, int, float]]:
    """Return the best candidates in one passage, as (passage, first stretch, last stretch, share of the words)."""
    own = [keys & stretch.known for stretch in source.stretches]
    shares = [covered(each) for each in own]
    best = sorted(range(len(own)), key=lambda at: -shares[at])[:NUM_CANDIDATES]
    return [(source, *_grown(at, own, covered)) for at in best]


def _grown(at: int, own: Sequence[frozenset[str]], covered: Callable[[Iterable[str]], float]) -> tuple[int, int, float]:
    """Add neighbours to a stretch while each adds enough of the words."""
    first = last = at
    keys = own[at]
    while last - first + 1 < MAX_SPAN_STRETCHES:
        gains = [(covered(own[next_] - keys), -abs(next_ - at), next_) for next_ in (first - 1, last + 1) if 0 <= next_ < len(own)]
        gain, _, chosen = max(gains, default=(0.0, 0, at))
        if gain < MIN_GAIN:
            break
        first, last, keys = min(first, chosen), max(last, chosen), keys | own[chosen]
    return first, last, covered(keys)


# --- claims: numbers with units, names ---

_WORD = re.compile(rf"(?!{CJK.pattern})[^\W_](?:(?!{CJK.pattern})\w|[-./+'’](?=\w)(?!.{CJK.pattern}))*+|`[^`\s]{{1,80}}`")
_LEADING = re.compile(r"\d{1,15}(?=[^\W\d])")
"""A number that begins a code, as in 3D."""
_SIGN = re.compile("°[CF]|[%€$£¥°]")


class _Facts:
    """The numbers, units and names in a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _parsed(self) -> tuple[list[Quantity], str]:
        """The quantities, and the text with spaces in their place."""
        return find_quantities(self.text)

    @property
    def quantities(self) -> list[Quantity]:
        return self._parsed[0]

    @cached_property
    def words(self) -> list[re.Match[str]]:
        return list(_WORD.finditer(self._parsed[1]))

    @cached_property
    def values(self) -> frozenset[float]:
        return self.bare_values.union(*(each.values for each in self.quantities))

    @cached_property
    def bare_values(self) -> frozenset[float]:
        """Numbers without a unit, which may stand elsewhere, as in the head of a table; number words; and numbers that begin codes."""
        named = (NUMBER_WORDS.get(each[0].casefold()) for each in self.words)
        begun = (_LEADING.match(each[0]) for each in self.words)
        values = [value for each in self.quantities if not each.dimension for value in each.values]
        return frozenset((*values, *filter(None, named), *(float(match[0]) for match in begun if match)))

    @cached_property
    def amounts(self) -> frozenset[tuple[str, float]]:
        return frozenset((each.dimension, amount) for each in self.quantities if each.dimension for amount in each.amounts)

    @cached_property
    def dimensions(self) -> frozenset[str]:
        """The dimensions of all units in the text."""
        alone = (unit_of(each[0]) for each in self.words)
        signs = map(unit_of, _SIGN.findall(self.text))
        return frozenset(unit[0] for unit in (*alone, *signs) if unit) | {each.dimension for each in self.quantities if each.dimension}

    @cached_property
    def names(self) -> frozenset[str]:
        """Everything that a name of an answer may be compared with: each word, its parts, and its beginning."""
        names: set[str] = set()
        for word in {each[0].casefold() for each in _WORD.finditer(self.text)}:
            names |= {_squeezed(word), *map(_squeezed, re.split(r"\W|_", word))}
        return frozenset(names | {_stem(name) for name in names})

    def has(self, quantity: Quantity) -> Literal["", "number", "unit"]:
        """Return what of a quantity is missing here: "" if nothing."""
        if not quantity.dimension:
            return "" if quantity.values & self.values else "number"
        dimensions = quantity.comparable
        if any((dimension, amount) in self.amounts for dimension in dimensions for amount in quantity.amounts):
            return ""
        if not quantity.values & self.values:
            return "number"
        return "" if quantity.values & self.bare_values and dimensions & self.dimensions else "unit"


def _squeezed(name: str) -> str:
    return re.sub(r"['’]s\Z|[\W_]+", "", name.casefold())


def _stem(name: str) -> str:
    return next(iter(_keys_of(name)), "") if name else ""


_CODE = re.compile(r"[^\W\d_]\d|\d[^\W\d_]|\A\d++(?:\.\d++){2}|[a-z]_[a-z]|[a-z][A-Z]|\A[A-Z]{2}")
_STARTS = re.compile(r"(?:\A|[.!?…:;\"“„«»(\[\n*_#>|–—]|\s-)[\s\"“„«»(\[*_#>|–—-]*\Z")
_MAX_START = 40
_CAPITALISING = frozenset({"de"})
"""Languages that capitalise all nouns."""


def _names(facts: _Facts, language: str) -> Iterator[re.Match[str]]:
    """Yield the names in a text: codes, words with inner capitals, code in backticks, and capitalised words within a sentence."""
    text = facts.text
    for match in facts.words:
        word = match[0]
        if word.casefold() in STOP_WORDS or len(word) == 1:
            continue
        is_capitalised = word[0].isupper() and language not in _CAPITALISING
        if _CODE.search(word) or word[0] == "`" or (is_capitalised and not _begins(text, match.start())):
            yield match


def _begins(text: str, at: int) -> bool:
    """Tell whether the word at `at` begins a sentence, a line or a quotation, where every word has a capital."""
    return _STARTS.search(text, max(0, at - _MAX_START), at) is not None


# --- claims: negations ---

_NEGATIONS = {  # of each language that `_language` can tell
    "en": r"\b(?:no|not)\b(?!\s+(?:only|more|less|fewer|\w+er)\b)|\b(?:never|none|neither|nor|nothing|nobody|cannot|without)\b|n['’]t\b",
    "de": r"\bnicht\b(?!\s+(?:nur|mehr|weniger|\w+er)\b)|\b(?:nichts|nie|niemals|kein\w{0,2}|weder|ohne)\b",
    "cs": r"\b(?:ne|není|nejsou|nelze|nesmí|nikdy|žádn\w+|bez|ani)\b",
    "da": r"\b(?:ikke|aldrig|ingen|intet|uden|hverken)\b",
    "el": r"\b(?:δεν|δε|μη|μην|όχι|ποτέ|χωρίς|ούτε)\b",
    "es": r"\b(?:no|nunca|jamás|ningún|ninguna?|nada|sin|ni|tampoco)\b",
    "fi": r"\b(?:ei|eivät|en|et|emme|ette|älä|älkää|ilman)\b",
    "fr": r"\b(?:ne|pas|jamais|aucune?|rien|sans|ni|non)\b",
    "hu": r"\b(?:nem|ne|nincs|nincsenek|sem|se|soha|nélkül)\b",
    "it": r"\b(?:non|mai|nessun\w?|niente|senza|né)\b",
    "nl": r"\b(?:niet|nooit|geen|niets|zonder|noch)\b",
    "no": r"\b(?:ikke|aldri|ingen|intet|uten|verken)\b",
    "pl": r"\b(?:nie|nigdy|żaden|żadna|bez|ani)\b",
    "pt": r"\b(?:não|nunca|jamais|nenhuma?|nada|sem|nem)\b",
    "ro": r"\b(?:nu|niciodată|niciun|nicio|nimic|fără|nici)\b",
    "ru": r"\b(?:не|нет|никогда|нельзя|без|ни)\b",
    "sv": r"\b(?:inte|ej|aldrig|ingen|inget|inga|utan|varken)\b",
    "tr": r"\b(?:değil|yok|asla|hiçbir)\b",
    "ja": r"ない|なく|ません|なし|ずに|いけない",
    "ko": r"않|없|못하|아니|금지",
    "zh": r"不|没|無|无|未|勿|别|非",
}
_NEGATED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _NEGATIONS.items()}
_SOFT = re.compile(
    r"\b(?:avoid\w*|unlike|fail\w*|lack\w*|hardly|rarely|seldom|except|instead|rather|prevent\w*"
    r"|unable|(?:no|not|nicht)\s+(?:more|less|fewer|mehr|weniger|\w+er)|un\w{4,}|in\w{4,}able|non\w*"
    r"|vermeid\w*|kaum|selten|außer|un\w{5,}|statt|évit\w*|sauf|evit\w*|salvo|избега\w*|кроме)\b|避|禁",
    re.IGNORECASE,
)
"""Words that deny without a negation. They never make a claim, but where one side has them, both sides may mean the same."""
_CLAUSE = re.compile(r"[,;:.!?—–()，。；：、]|\b(?:but|while|whereas|although|because|aber|sondern|während|mais|pero|ma|mas|maar|ale|но)\b")
MIN_CLAUSE_SHARE = 0.8
"""How much of a negated clause's words the other side must have for both to speak of the same thing."""


def _denied(text: str, language: str) -> bool:
    return bool(_NEGATED[language].search(text) or _SOFT.search(text))


def _negated_clauses(text: str, language: str) -> Iterator[tuple[int, int, str]]:
    """Yield where each negated clause begins and ends, and its text without the negation."""
    pattern, at = _NEGATED[language], 0
    for end in (*(match.start() for match in _CLAUSE.finditer(text)), len(text)):
        if pattern.search(text, at, end):
            yield at, end, pattern.sub(" ", text[at:end])
        at = end


def _about(clause: str, weigh: Callable[[str], float]) -> Callable[[Collection[str]], bool]:
    """Return a function that tells whether a text with some keys has most words of a clause: two at least, unless the clause has one."""
    weights = {key: weigh(key) for key in _keys(clause)}
    least, most = min(2, len(weights)), MIN_CLAUSE_SHARE * math.fsum(weights.values())

    def is_shared(keys: Collection[str]) -> bool:
        shared = [weights[key] for key in weights if key in keys]
        return len(shared) >= least > 0 and math.fsum(shared) >= most

    return is_shared


def _contradicted(
    sentence: _Sentence, sources: Sequence[_Passage], match: _Match, weigh: Callable[[str], float]
) -> Iterator[tuple[int, int]]:
    """Yield the parts of a sentence that are negated there and not in their span, and the sentence if it is the other way round.

    Nothing is yielded if another place in the sources that speaks of the same agrees with the sentence.
    """
    source, stretches = match.passage, match.passage.stretches[match.first : match.last + 1]
    span = source.text[stretches[0].start : stretches[-1].end]
    if not _denied(span, source.language):
        keys = frozenset[str]().union(*(stretch.known for stretch in stretches))
        for start, end, clause in _negated_clauses(sentence.text, sentence.language):
            is_shared = _about(clause, weigh)
            if is_shared(keys) and not any(is_shared(stretch.known) for each in sources for stretch in each.denying):
                yield start, end
    elif not _denied(sentence.text, sentence.language):
        clauses = _negated_clauses(span, source.language)
        if any(_about(clause, weigh)(sentence.keys) for _, _, clause in clauses):
            is_shared = _about(sentence.text, weigh)
            if not any(is_shared(stretch.known) for each in sources for stretch in each.stretches if stretch not in each.denying):
                yield 0, len(sentence.text)


def _unsupported(
    sentence: _Sentence, sources: Sequence[_Passage], match: _Match | None, weigh: Callable[[str], float]
) -> Iterator[UnsupportedClaim]:
    """Yield the claims of a sentence that none of its sources has."""

    def claim(kind: ClaimKind, start: int, end: int) -> UnsupportedClaim:
        text = sentence.text[start:end]
        start += len(text) - len(text.lstrip(" ,;:"))
        text = text.strip(" ,;:")
        return UnsupportedClaim(kind, text, sentence.start + start, sentence.start + start + len(text))

    for quantity in sentence.facts.quantities:
        missing = [source.facts.has(quantity) for source in sources] or ["number"]
        if all(missing):
            yield claim("unit" if "unit" in missing else "number", quantity.start, quantity.end)
    names = [source.facts.names for source in sources]
    for name in _names(sentence.facts, sentence.language):
        squeezed = _squeezed(name[0])
        parts = [part for part in map(_squeezed, re.split(r"\W|_", name[0])) if part]
        if squeezed and not any({squeezed, _stem(squeezed)} & each or all(part in each for part in parts) for each in names):
            yield claim("name", name.start(), name.end())
    if match is not None:
        for start, end in _contradicted(sentence, sources, match, weigh):
            yield claim("negation", start, end)
