"""Choose what to send of the passages that were retrieved: whole passages, or their best sentences.

Small models use context badly: they copy from its beginning and repeat it. They answer best from the few sentences that are nearest to the
question. Larger models get whole passages, as long as these come near the best one (docs/measured.md has the numbers).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from localrag.prompt.layout import source_text
from localrag.question import EvidenceKind, Search, TopK
from localrag.text.sentences import Span, Unit, excerpt, units
from localrag.text.terms import terms
from localrag.types import Hit, ModelInfo

SMALL_WEIGHTS = 1_000_000_000
"""Models with fewer weights in their layers get sentences."""
NUM_PASSAGES = 4
NUM_READ_FOR_SENTENCES = 8
"""Number of passages from which sentences are chosen."""
MIN_PASSAGE_SHARE = {"passages": 0.7, "sentences": 0.6}
"""Least share of the best passage's score. On the handbook, the first passage holds 86 of 100 answers, the first four 94, and those of the
first four with at least 0.7 of its score 93, in 30 % less text."""
MIN_SENTENCE_SHARE = 0.9
"""Least share of the best sentence's score. Both halves of the handbook's questions keep most answers with 0.85 to 0.95."""
SENTENCE_TOKENS = 120

LESS_RELEVANT = "less relevant"
"""The reason in the ledger for a passage that was retrieved and not chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRule:
    """How much of the evidence to send. `top_k` passages are retrieved; those below `min_share` of the best score are left out.

    `max_tokens` limits the passages in the prompt, with their tags; None sets no limit. Unless it `is_strict`, the best one is always sent.
    """

    kind: EvidenceKind
    top_k: TopK
    min_share: float = 0.0
    max_tokens: int | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen hits, best first, and the reason for each passage left out, by label."""

    hits: list[Hit] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def rule_for(search: Search, model: ModelInfo) -> EvidenceRule:
    """Return the rule for a question. Options that it gives override what its model's size suggests."""
    kind = search.evidence or ("sentences" if search.top_k is None and _is_small(model) else "passages")
    limit = SENTENCE_TOKENS if search.evidence_tokens is None and kind == "sentences" else search.evidence_tokens
    return EvidenceRule(
        kind=kind,
        top_k=search.top_k or (NUM_READ_FOR_SENTENCES if kind == "sentences" else NUM_PASSAGES),
        min_share=MIN_PASSAGE_SHARE[kind] if search.top_k is None else 0.0,
        max_tokens=limit,
        is_strict=search.evidence_tokens is not None,
    )


def _is_small(model: ModelInfo) -> bool:
    """A layer of a transformer has about 12 times the square of its width in weights. The echo has no layers, and is not small."""
    return 0 < 12 * model.num_layers * model.embedding_length**2 < SMALL_WEIGHTS


def select(hits: Sequence[Hit], question: str, rule: EvidenceRule, count: Callable[[str], int]) -> Selection:
    """Choose from ranked hits by a rule. `count` counts tokens of the model."""
    near = [hit for hit in hits if hit.score >= rule.min_share * hits[0].score]
    chosen = _best_sentences(near, question, rule, count) if rule.kind == "sentences" else _within(near, rule, count)
    labels = {hit.label for hit in chosen}
    others = [chunk for hit in hits if hit.label not in labels for chunk in (hit.chunk, *hit.copies)]
    return Selection(chosen, {chunk.label: LESS_RELEVANT for chunk in others})


def _within(hits: Sequence[Hit], rule: EvidenceRule, count: Callable[[str], int]) -> list[Hit]:
    """Return the hits up to the first that does not fit."""
    if rule.max_tokens is None:
        return list(hits)
    chosen: list[Hit] = []
    num_tokens = 0
    for hit in hits:
        num_tokens += _tokens(hit, count)
        if num_tokens > rule.max_tokens and (chosen or rule.is_strict):
            break
        chosen.append(hit)
    return chosen


def _best_sentences(hits: Sequence[Hit], question: str, rule: EvidenceRule, count: Callable[[str], int]) -> list[Hit]:
    """Return the hits that hold the best sentences, in the order of the hits, each with the spans of its own."""
    chosen: dict[int, list[Unit]] = {}
    costs: Counter[int] = Counter()
    for index, unit in _ranked(hits, question):
        more = [*chosen.get(index, ()), unit]
        cost = _tokens(_excerpted(hits[index], more), count)
        is_over = rule.max_tokens is not None and costs.total() - costs[index] + cost > rule.max_tokens
        if is_over and (chosen or rule.is_strict):
            continue
        chosen[index], costs[index] = more, cost
    return [_excerpted(hits[index], chosen[index]) for index in sorted(chosen)]


def _ranked(hits: Sequence[Hit], question: str) -> list[tuple[int, Unit]]:
    """Rank the sentences of all hits, best first, down to MIN_SENTENCE_SHARE of the best score. Returns (index of the hit, sentence).

    The score is the share of the question's words, weighted by rarity among the sentences, that a sentence, its table's head and its
    headings hold, plus its passage's score as a share of the best one's.
    """
    question_words = set(terms(question))
    matches: list[tuple[int, Unit, set[str]]] = []
    for index, hit in enumerate(hits):
        text = hit.chunk.text
        for unit in units(text) or [Unit((0, len(text)))]:
            parts = (hit.chunk.heading, text[slice(*unit.header)] if unit.header else "", text[slice(*unit.span)])
            matches.append((index, unit, question_words.intersection(terms("\n".join(parts)))))
    holders = Counter(word for _, _, words in matches for word in words)
    weights = {word: math.log1p((len(matches) - holders[word] + 0.5) / (holders[word] + 0.5)) for word in question_words}
    total = sum(weights.values()) or 1.0
    best_passage = max((hit.score for hit in hits), default=0.0) or 1.0
    scored = [
        (sum(weights[word] for word in words) / total + hits[index].score / best_passage, index, unit) for index, unit, words in matches
    ]
    scored.sort(key=lambda each: -each[0])  # stable: equals keep the order of the hits and of their text
    return [(index, unit) for score, index, unit in scored if score >= MIN_SENTENCE_SHARE * scored[0][0]]


def _excerpted(hit: Hit, chosen: Sequence[Unit]) -> Hit:
    """Return a hit with the spans of these sentences and of the heads of their tables; without spans if they are all of its text."""
    spans: set[Span] = {unit.span for unit in chosen} | {unit.header for unit in chosen if unit.header is not None}
    return replace(hit, spans=tuple(sorted(spans))) if len(chosen) < len(units(hit.chunk.text)) else hit


def _tokens(hit: Hit, count: Callable[[str], int]) -> int:
    return count(source_text(hit, excerpt(hit.chunk.text, hit.spans) if hit.spans else None))
