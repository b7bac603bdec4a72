"""Record answers in the journal, and count in the knowledge bases which chunks were used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.budget import Profile
from localrag.errors import LocalragError
from localrag.journal import AskRecord, EvidenceRecord, Journal, allotments
from localrag.session.answer import Answer
from localrag.types import Hit, Timings

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.kb import KnowledgeBase


def open_journal(home: Path) -> tuple[Journal | None, list[str]]:
    """Open the journal of a home. If it cannot be used, return None and a warning."""
    try:
        return Journal.open(home), []
    except (LocalragError, OSError) as error:
        return None, [f"This was not recorded in the journal: {error}"]


def keep(
    answer: Answer,
    *,
    question: str,
    session: str,
    journal: Journal | None,
    knowledge_bases: Sequence[KnowledgeBase],
    profile: Profile,
    engine: Engine,
) -> list[str]:
    """Record an answer in the journal and the knowledge bases. Failures are returned as warnings, not raised."""
    warnings = []
    cache = engine.prefix_cache
    if cache is not None and cache.warning is not None:
        warnings.append(cache.warning)
    if journal is None:
        return warnings
    try:
        remember(answer, knowledge_bases)
    except LocalragError as error:
        warnings.append(f"The cited passages were not recorded: {error}")
    strategy = ", ".join(f"{name} {flex.cut}" for name, flex in profile.sections.items() if name in ("history", "evidence"))
    try:
        journal.record(record_of(answer, question=question, session=session, command="ask", strategy=strategy, model_sha256=engine.sha256))
    except (LocalragError, OSError) as error:
        warnings.append(f"This was not recorded in the journal: {error}")
    return warnings


def record_of(answer: Answer, *, question: str, session: str, command: str, strategy: str, model_sha256: str | None = None) -> AskRecord:
    """Build the journal record of an answer: its numbers, and the outcome of each piece of evidence."""
    slot, limit = answer.slot, answer.ledger.time
    return AskRecord(
        session=session,
        command=command,
        model=answer.model,
        model_sha256=model_sha256,
        question=question,
        started_at=time.time() - answer.timings.total_s,
        window=answer.ledger.window,
        finish_reason=answer.finish_reason,
        strategy=strategy,
        bound="time" if limit is not None and limit.is_bound else slot.bound,
        ledger=answer.ledger,
        sections=allotments(answer.prompt.settled),
        evidence=_evidence(answer),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
        timings={name: round(getattr(answer.timings, name), 4) for name in Timings.__slots__},
    )


def _evidence(answer: Answer) -> list[EvidenceRecord]:
    tokens, levels = answer.prompt.item_tokens, answer.prompt.levels
    cited = {each.label for each in answer.citations if each.supplied}

    def row(hit: Hit) -> EvidenceRecord:
        level = levels.get(hit.label, "")
        return EvidenceRecord(
            label=hit.label,
            source=hit.chunk.source,
            kb=hit.chunk.kb,
            chunk_id=hit.chunk.id,
            tokens=tokens[hit.label] if level else answer.prompt.omitted_costs.get(hit.label, 0),  # a copy of a better hit takes none
            relevance=hit.relevance,
            tier=answer.prompt.tiers.get(hit.label) or "",
            level=level,
            state="omitted" if not level else "used" if level == "full" else "shortened",
            cited=hit.label in cited,
        )

    return [row(hit) for hit in answer.offered]


def remember(answer: Answer, knowledge_bases: Sequence[KnowledgeBase]) -> None:
    """Count in each knowledge base which of its chunks were retrieved, supplied and cited."""
    if not knowledge_bases:
        return
    from localrag.kb.protocols import Feedback  # noqa: PLC0415  # weight

    prompt_labels = set() if answer.abstained else {hit.label for hit in answer.hits}
    cited = {each.label for each in answer.citations if each.supplied}
    for kb in knowledge_bases:
        own = [hit for hit in answer.offered if hit.chunk.kb == kb.name]
        kb.add_feedback({hit.chunk.id: Feedback(1, int(hit.label in prompt_labels), int(hit.label in cited)) for hit in own})
