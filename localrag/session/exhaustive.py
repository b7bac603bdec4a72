"""Answer a question from every passage that matches its filters, in as many prompts as the window needs.

Similarity only decides the reading order. Each pass shows the model as many passages as fit and asks it to note the facts in them, as
JSON under a schema that allows only passages of that pass as sources. The answer is then written from these facts, each under the tag of
its passage. If the facts do not fit either, they are read in passes again. Every prompt keeps to the same exact budget as any other.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrag.conversation import search_query
from localrag.errors import BudgetExceededError, TimeLimitError, counted
from localrag.prompt import Prompt
from localrag.prompt.layout import QUESTION_INTRO, SOURCES_INTRO
from localrag.question import Question
from localrag.session import retrieval
from localrag.session.answer import Answer, Pass, Prepared
from localrag.session.timing import TimedReranker
from localrag.types import Hit

if TYPE_CHECKING:
    from localrag.session.session import Session

NOTES_SHARE = 0.3
"""Share of the window reserved for the notes of one pass. If the notes are cut off, the pass is repeated with half the passages."""
MIN_NOTES_TOKENS = 96
_LEAST_S = 0.001
"""Minimum time limit in seconds for a pass, used once the time has run out. A limit must be above 0."""
MAX_FACT_CHARS = 240
"""Maximum length of a fact: about 60 tokens of English, against 200 or more for a passage. This leaves room for one fact per passage."""
PASSES_SHARE = 0.7
"""Share of the time limit for the passes. The rest is for the answer."""
NOTHING_NOTED, TOO_LONG, NO_TIME = "read, and nothing was noted", "too long for the window", "not read for lack of time"
"""Reasons why a passage is not in the answer's prompt."""
NOTE = (
    "\n\nDo not answer yet. Go through all sources above and note each fact that the answer needs, in a few words, with the tag of its "
    "source, like {label}. Leave out what does not help; if nothing does, note nothing."
)


@dataclass(frozen=True, slots=True)
class Step:
    """Progress: `num_read` of `num_matching` texts have been read in `num_passes` passes, and `num_facts` facts noted."""

    num_read: int
    num_matching: int
    num_passes: int
    num_facts: int


def ask_all(
    session: Session,
    question: Question | str,
    *,
    on_text: Callable[[str], None] | None = None,
    on_thought: Callable[[str], None] | None = None,
    on_step: Callable[[Step], None] = lambda _: None,
) -> Answer:
    """Answer from every passage that matches the filters, not only from the best. `on_text` receives the answer, `on_step` each pass.

    The answer's `coverage` counts the passages read, and its `passes` give the tokens of each pass. Its ledger names each passage missing
    from the last prompt, with the reason. A text that occurs in several places is read once. Raises BudgetExceededError if the window
    cannot hold a single passage; passages that are too long are named in `warnings`, and so are those left unread by `max_seconds`.
    Ctrl-C ends it with the notes of the current pass and the `finish_reason` "cancelled".
    """
    question = question if isinstance(question, Question) else Question.of(question)
    limit, started = question.budget.max_seconds, question.budget.started_at or time.perf_counter()
    overflow = (*question.budget.overflow, ("prioritize", "evidence"))  # passages that do not fit are left to the next pass
    question = question.but(overflow=overflow, started_at=started, quote=False)  # facts noted from a passage are not its sentences
    retriever = session.retriever_until(limit, started)
    hits = retrieval.distinct(retriever.offered(question, search_query(question.messages), reads_all=True))
    ends_at = None if limit is None else started + PASSES_SHARE * limit
    reading = _Reading(session, question, on_step, hits, ends_at)
    evidence = reading.evidence()
    if reading.cancelled is not None:
        return replace(reading.cancelled, passes=tuple(reading.passes))
    ready = reading.prepared(evidence, limit)
    if isinstance(retriever.reranker, TimedReranker) and retriever.reranker.is_skipped:
        ready = _without_rerank(ready)
    answer = session.answer(ready, on_text=on_text, on_thought=on_thought)
    unread = reading.unread_by(answer)
    num_read = sum(1 + len(hit.copies) for hit in hits if hit.label not in unread)
    warnings = list(answer.warnings)
    if reading.too_long:
        warnings.append(f"Too long for the window, and not read: {', '.join(reading.too_long)}.")
    if late := len(unread) - len(reading.too_long):
        warnings.append(f"{late} of {len(hits)} passages were not read: the time limit was reached.")
    if hits and not evidence:
        warnings.append(f"The {counted(num_read, 'passage')} read contain nothing relevant; the model answered from its own knowledge.")
    return replace(answer, passes=tuple(reading.passes), num_read=num_read, warnings=tuple(warnings))


def _without_rerank(ready: Prepared) -> Prepared:
    """The same prompt, with a ledger that records that reranking was skipped for lack of time."""
    ledger = ready.prompt.ledger
    assert ledger.time is not None, "only a limit of time skips a reranker"
    return replace(ready, prompt=replace(ready.prompt, ledger=replace(ledger, time=replace(ledger.time, skipped=("rerank",)))))


def _size(hits: Sequence[Hit]) -> int:
    return sum(len(hit.chunk.text) for hit in hits)


class _Reading:
    """The reading passes of one question."""

    def __init__(
        self,
        session: Session,
        question: Question,
        on_step: Callable[[Step], None],
        hits: Sequence[Hit],
        ends_at: float | None,
    ) -> None:
        self._session = session
        self._question = question
        self._on_step = on_step
        self._hits = hits
        self._ends_at = ends_at
        """When the passes must end, on the clock of time.perf_counter(); None without a time limit."""
        self.passes: list[Pass] = []
        self.too_long: list[str] = []
        """Labels of passages that do not fit in any pass."""
        self.late: list[str] = []
        """Labels of passages left unread because time ran out."""
        self.cancelled: Answer | None = None

    def evidence(self) -> Sequence[Hit]:
        """The hits to answer from: all passages if they fit, else the facts noted from them."""
        hits = self._hits
        while True:
            if len(self.prepared(hits, None).prompt.hits) == len(hits):
                return hits
            facts = self.facts(hits)
            if self.late and not self.passes:
                self.late.clear()
                return hits  # no time for a single pass: answer from the best passages
            if self.cancelled is not None or _size(facts) >= _size(hits):
                return hits  # the ledger names those that do not fit
            hits = facts

    def prepared(self, hits: Sequence[Hit], max_seconds: float | None) -> Prepared:
        """Prepare the answer's prompt."""
        question = self._question.but(hits=hits, left_out=self._left_out(hits), max_seconds=max_seconds)
        return self._session.prepare(question, write=self._ends_at is None)

    def _left_out(self, hits: Sequence[Hit]) -> dict[str, str]:
        """Map the label of each passage that is not shown, and of each of its copies, to the reason."""
        labels = {hit.label for hit in hits}
        reasons = dict.fromkeys((hit.label for hit in self._hits), NOTHING_NOTED)
        reasons |= dict.fromkeys(self.too_long, TOO_LONG) | dict.fromkeys(self.late, NO_TIME)
        left_out = {label: reason for label, reason in reasons.items() if label not in labels}
        copies = {chunk.label: f"identical to {hit.label}" for hit in self._hits if hit.label in left_out for chunk in hit.copies}
        return left_out | copies

    def unread_by(self, answer: Answer) -> set[str]:
        """Labels of the passages read neither in a pass nor in the answer's prompt."""
        if self.passes:
            return {*self.too_long, *self.late}
        return {hit.label for hit in self._hits} - {hit.label for hit in answer.hits}

    def facts(self, hits: Sequence[Hit]) -> list[Hit]:
        """Hits that contain relevant facts, each with those facts as its text."""
        waiting, most = list(hits), len(hits)
        noted_facts: dict[str, list[str]] = {}
        while waiting and self.cancelled is None and not self.late:
            num_facts = sum(map(len, noted_facts.values()))
            self._on_step(Step(len(hits) - len(waiting), len(hits), len(self.passes), num_facts))
            labels, new_facts, is_whole = self._pass(waiting[:most])
            if not is_whole and len(labels) > 1:
                most = len(labels) // 2  # the notes did not fit: read fewer passages at once
                continue
            for label, fact in new_facts:
                if fact not in noted_facts.setdefault(label, []):
                    noted_facts[label].append(fact)
            waiting = [hit for hit in waiting if hit.label not in labels]
        if self.late:
            self.late = list(dict.fromkeys([*self.late, *(hit.label for hit in waiting)]))
        return [replace(hit, chunk=replace(hit.chunk, text=" ".join(noted_facts[hit.label]))) for hit in hits if noted_facts.get(hit.label)]

    def _pass(self, hits: Sequence[Hit]) -> tuple[set[str], list[tuple[str, str]], bool]:
        """Read one batch. Returns the labels read, the facts as (label, fact) pairs, and whether the notes are complete."""
        notes_tokens = max(MIN_NOTES_TOKENS, int(NOTES_SHARE * self._session.slot.n_ctx))
        question = self._question.but(
            hits=hits,
            left_out={},
            cite_instruction=NOTE,
            context_ratio=1.0 - NOTES_SHARE,
            sampling=replace(self._question.sampling, max_tokens=notes_tokens, think_tokens=0, stop=()),
        )
        if self._ends_at is not None:
            now = time.perf_counter()
            question = question.but(started_at=now, max_seconds=max(_LEAST_S, self._ends_at - now))
        try:
            prepared = self._session.prepare(question, write=True)
        except TimeLimitError:
            return self._out_of_time(hits, ())
        composed = prepared.prompt
        labels = [hit.label for hit in composed.hits]
        if not labels and composed.ledger.time is not None and composed.ledger.time.is_bound:
            return self._out_of_time(hits, ())
        if not labels and self.passes:
            self.too_long += [hit.label for hit in hits]
            return {hit.label for hit in hits}, [], True
        if not labels:
            raise self._no_room(composed, hits, notes_tokens)
        answer = self._session.answer(replace(prepared, question=question.but(json_schema=_schema(labels))))
        if answer.finish_reason in ("cancelled", "error"):
            self.cancelled = answer
        facts = _facts(answer.text, set(labels))
        self.passes.append(Pass(len(labels), len(facts), answer.prompt_tokens, answer.completion_tokens))
        if answer.finish_reason == "time":
            return self._out_of_time([hit for hit in hits if hit.label in labels], facts)
        return set(labels), facts, answer.finish_reason == "stop"

    def _out_of_time(self, hits: Sequence[Hit], facts: Sequence[tuple[str, str]]) -> tuple[set[str], list[tuple[str, str]], bool]:
        """The result of a pass that ran out of time. Passages without a noted fact count as unread."""
        labels = {label for label, _ in facts}
        self.late += [hit.label for hit in hits if hit.label not in labels]
        return {hit.label for hit in hits}, list(facts), True

    def _no_room(self, composed: Prompt, hits: Sequence[Hit], notes_tokens: int) -> BudgetExceededError:
        """The error for a window too small for one passage. It counts the passage, the wording around it and the share for notes."""
        wording = (SOURCES_INTRO, QUESTION_INTRO, NOTE.replace("{label}", hits[0].label))
        passage = sum(map(self._session.engine.counter, wording)) + min(composed.omitted_costs[hit.label] for hit in hits)
        beside = len(composed.token_ids), composed.budget.allocations.get("gap", 0)
        notes = math.ceil((sum(beside) + passage) * NOTES_SHARE / (1.0 - NOTES_SHARE))
        return BudgetExceededError(
            self._session.slot.n_ctx,
            {"prompt": beside[0], "gap": beside[1], "notes": max(notes_tokens, notes), "one passage": passage},
        )


def _schema(labels: Sequence[str]) -> dict[str, object]:
    fact = {
        "type": "object",
        "properties": {"source": {"enum": list(labels)}, "fact": {"type": "string", "minLength": 1, "maxLength": MAX_FACT_CHARS}},
        "required": ["source", "fact"],
        "additionalProperties": False,
    }
    facts = {"type": "array", "items": fact, "maxItems": len(labels)}
    return {"type": "object", "properties": {"facts": facts}, "required": ["facts"], "additionalProperties": False}


def _facts(text: str, labels: set[str]) -> list[tuple[str, str]]:
    """Parse the noted facts. If the notes were cut off, every complete object still counts."""
    decoder, facts = json.JSONDecoder(), []
    at = text.find("[")
    while (at := text.find("{", at + 1)) > 0:
        try:
            fact, end = decoder.raw_decode(text, at)
        except ValueError:
            break
        if isinstance(fact, dict) and fact.get("source") in labels and str(fact.get("fact", "")).strip():
            facts.append((fact["source"], str(fact["fact"]).strip()))
        at = end
    return facts
