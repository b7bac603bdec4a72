"""A question for which every matching passage is read, in as many prompts as the window needs.

Each pass shows the model as many passages as fit and has it note the facts in them, as JSON under a schema in which a fact can only come
from a passage of that pass. The answer is then written from the facts, each under the tag of its passage; where even they are too many,
they are read like passages again. Every prompt keeps within the same exact budget as any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from localrag.decoding import SamplingParams
from localrag.errors import BudgetExceededError
from localrag.passages import Hit
from localrag.prompt import Prompt
from localrag.prompt.offer import QUESTION_INTRO, SOURCES_INTRO
from localrag.session import finding
from localrag.session.answers import Answer, Pass

if TYPE_CHECKING:
    from localrag.session.options import Options
    from localrag.session.walk import Session

NOTES_SHARE = 0.3
"""Of the window, for the notes of one pass; passages have the rest. Where they come to no end in it, the pass is read again in halves."""
MIN_NOTES_TOKENS = 96
MAX_FACT_CHARS = 240
"""About 60 tokens of English, to 200 or more of the passage: all passages of a pass can have their fact."""
NOTE = (
    "\n\nDo not answer yet. Go through all sources above and note each fact that the answer needs, in a few words, with the tag of its "
    "source, like {label}. Leave out what does not help; if nothing does, note nothing."
)


@dataclass(frozen=True, slots=True)
class Step:
    """`num_read` of `num_matching` passages have been read in `num_passes` passes so far; `num_facts` were found."""

    num_read: int
    num_matching: int
    num_passes: int
    num_facts: int


def ask_all(
    session: Session,
    question: str,
    *,
    sampling: SamplingParams | None = None,
    on_text: Callable[[str], None] | None = None,
    on_thought: Callable[[str], None] | None = None,
    on_step: Callable[[Step], None] = lambda _: None,
    **options: Unpack[Options],
) -> Answer:
    """Answer from all passages that match, not only the best. `on_text` hears the answer, `on_step` each pass before it.

    The answer's `coverage` counts what was read, and its passes say what each took. BudgetExceededError where the window has no room
    for a single passage; where it lacks room for some, `warnings` name them. Ctrl-C ends it with the notes of the pass that ran, as
    `finish_reason` "cancelled".
    """
    sampling = sampling or SamplingParams()
    options["overflow"] = [*options.get("overflow", ()), ("prioritize", "evidence")]  # what a pass has no room for, the next one reads
    everything: Options = {**options, "top_k": max(1, session.num_chunks)}
    hits = finding.offered(session, question, everything)
    reading = _Reading(session, question, sampling, on_step, options)
    shown = hits
    while True:
        with_hits: Options = {**options, "hits": shown}
        prepared = session.prepare(question, max_tokens=sampling.max_tokens, think_tokens=sampling.room_to_think, write=True, **with_hits)
        if len(prepared.prompt.hits) == len(shown):
            break
        facts = reading.facts(shown)
        if reading.cancelled is not None:
            return replace(reading.cancelled, passes=tuple(reading.passes))
        if _size(facts) >= _size(shown):
            break  # what there is no room for is named in the ledger
        shown = facts
    answer = session.answer(prepared, question, sampling=sampling, on_text=on_text, on_thought=on_thought, **with_hits)
    num_read = len(hits) - len(reading.unread)
    warnings = list(answer.warnings)
    if reading.unread:
        warnings.append(f"Too long for the window, and not read: {', '.join(reading.unread)}.")
    if hits and not shown:
        warnings.append(f"Nothing about it was found in the {num_read} passages that were read; the answer is the model's own.")
    return replace(answer, passes=tuple(reading.passes), num_read=num_read, warnings=tuple(warnings))


def _size(hits: Sequence[Hit]) -> int:
    return sum(len(hit.chunk.text) for hit in hits)


class _Reading:
    """The passes of one question."""

    def __init__(
        self, session: Session, question: str, sampling: SamplingParams, on_step: Callable[[Step], None], options: Options
    ) -> None:
        self._session = session
        self._question = question
        self._sampling = sampling
        self._on_step = on_step
        self._options = options
        self.passes: list[Pass] = []
        self.unread: list[str] = []
        """Of passages that are too long for any pass."""
        self.cancelled: Answer | None = None

    def facts(self, hits: Sequence[Hit]) -> list[Hit]:
        """The hits in which something was found, each with the facts in place of its text."""
        waiting, most = list(hits), len(hits)
        noted: dict[str, list[str]] = {}
        while waiting and self.cancelled is None:
            num_facts = sum(map(len, noted.values()))
            self._on_step(Step(len(hits) - len(waiting), len(hits), len(self.passes), num_facts))
            read, found, is_whole = self._pass(waiting[:most])
            if not is_whole and len(read) > 1:
                most = len(read) // 2  # its notes had no room: fewer passages, and so fewer facts
                continue
            for label, fact in found:
                if fact not in noted.setdefault(label, []):
                    noted[label].append(fact)
            waiting = [hit for hit in waiting if hit.label not in read]
        return [replace(hit, chunk=replace(hit.chunk, text=" ".join(noted[hit.label]))) for hit in hits if noted.get(hit.label)]

    def _pass(self, hits: Sequence[Hit]) -> tuple[set[str], list[tuple[str, str]], bool]:
        """The labels of what was read, (label, fact) of what was found, and whether the notes came to their end."""
        notes_tokens = max(MIN_NOTES_TOKENS, int(NOTES_SHARE * self._session.slot.n_ctx))
        options: Options = {**self._options, "hits": hits, "cite": NOTE, "context_ratio": 1.0 - NOTES_SHARE}
        prepared = self._session.prepare(self._question, max_tokens=notes_tokens, write=True, **options)
        composed = prepared.prompt
        labels = [hit.label for hit in composed.hits]
        if not labels and self.passes:
            self.unread += [hit.label for hit in hits]
            return {hit.label for hit in hits}, [], True
        if not labels:
            raise self._no_room(composed, hits, notes_tokens)
        sampling = replace(self._sampling, max_tokens=notes_tokens, stop=(), json_schema=_schema(labels))
        answer = self._session.answer(prepared, self._question, sampling=sampling, **options)
        if answer.finish_reason in ("cancelled", "time", "error"):
            self.cancelled = answer
        found = _facts(answer.text, set(labels))
        self.passes.append(Pass(len(labels), len(found), answer.prompt_tokens, answer.completion_tokens))
        return set(labels), found, answer.finish_reason == "stop"

    def _no_room(self, composed: Prompt, hits: Sequence[Hit], notes_tokens: int) -> BudgetExceededError:
        """What one passage needs: itself with the wording around it, and as much for notes as a window has that holds both."""
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
    """What was noted, also where the notes were cut off: each whole object counts."""
    decoder, found = json.JSONDecoder(), []
    at = text.find("[")
    while (at := text.find("{", at + 1)) > 0:
        try:
            fact, end = decoder.raw_decode(text, at)
        except ValueError:
            break
        if isinstance(fact, dict) and fact.get("source") in labels and str(fact.get("fact", "")).strip():
            found.append((fact["source"], str(fact["fact"]).strip()))
        at = end
    return found
