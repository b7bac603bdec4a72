"""What was answered and found, as the tools give it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from localrag.budget import Ledger
from localrag.mcp.schemas import (
    AskResult,
    BudgetResult,
    Cited,
    Found,
    LedgerInBrief,
    Read,
    ReadResult,
    SearchResult,
    SectionTokens,
    Source,
    Supplied,
)
from localrag.passages import Chunk, Hit
from localrag.prompt import Prompt
from localrag.session import Answer, Prepared


def asked(answer: Answer, hush: Callable[[str], str]) -> AskResult:
    """`hush` takes paths of this machine out of warnings."""
    cited = {each.label for each in answer.citations}
    return AskResult(
        answer=answer.text,
        finish_reason=answer.finish_reason,
        model=_shown(answer.model),
        citations=[Cited(id=each.label, supplied=each.supplied) for each in answer.citations],
        sources=[Source(**each, is_cited=each["id"] in cited) for each in _supplied(answer.prompt)],
        ledger=_brief(answer.ledger),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        bypass=None if answer.bypass is None else answer.bypass.value,
        warnings=[hush(warning) for warning in answer.warnings],
    )


def budgeted(prepared: Prepared, model: str) -> BudgetResult:
    composed = prepared.prompt
    return BudgetResult(
        model=_shown(model),
        prompt_tokens=len(composed.token_ids),
        answer_tokens=composed.max_tokens,
        n_ctx=prepared.slot.n_ctx,
        bound=prepared.slot.bound,
        sources=[Supplied(**each) for each in _supplied(composed)],
        ledger=composed.ledger.to_dict(),
        bypass=None if prepared.bypass is None else prepared.bypass.value,
    )


def found(kb: str, hits: Sequence[Hit]) -> SearchResult:
    return SearchResult(kb=kb, hits=[Found(**_place(hit.chunk), score=hit.score, text=hit.chunk.text) for hit in hits])


def read(chunks: Sequence[Chunk], wanted: int) -> ReadResult:
    return ReadResult(chunks=[Read(**_place(chunk), is_wanted=chunk.id == wanted, text=chunk.text) for chunk in chunks])


def _place(chunk: Chunk) -> dict[str, str]:
    place = chunk.place or f"characters {chunk.start} to {chunk.end}"
    return {"id": chunk.label, "kb": chunk.kb, "source": chunk.source, "heading": chunk.heading, "place": place}


def _supplied(prompt: Prompt) -> list[dict[str, Any]]:
    tokens, levels = prompt.item_tokens, prompt.levels
    return [
        {**_place(hit.chunk), "score": hit.score, "tokens": tokens[hit.label], "level": levels.get(hit.label, "full")}
        for hit in prompt.hits
    ]


def _brief(ledger: Ledger) -> LedgerInBrief:
    sections = [
        SectionTokens(name=entry.name, allotted=entry.allotted, used=entry.used, num_omitted=len(entry.omitted)) for entry in ledger.entries
    ]
    return LedgerInBrief(window=ledger.window, spare=ledger.spare, sections=sections)


def _shown(model: str) -> str:
    """A model that is named by its path is shown by the name of its file."""
    return Path(model).name
