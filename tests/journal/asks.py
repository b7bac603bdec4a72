"""Small records for the tests of journal and report, made without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from localrag.budget import Entry, Ledger, Percent, Section, negotiate
from localrag.journal import Allotment, AskRecord, EvidenceRecord, allotments

START = 1_750_000_000.0


def negotiated(ledger: Ledger) -> tuple[Allotment, ...]:
    """A negotiation that such a ledger can come from: what cannot be cut is fixed, evidence may have half, the answer the rest."""
    sections = []
    for entry in ledger.entries:
        if entry.name == "evidence":
            sections.append(Section(name="evidence", basis=entry.wanted, max=Percent(50), cut="drop"))
        elif entry.name == "answer":
            sections.append(Section(name="answer", basis=min(512, entry.wanted), min=min(32, entry.wanted), max=entry.wanted, grow=1.0))
        else:
            sections.append(Section.fixed(entry.name, entry.used))
    return allotments(negotiate(ledger.window, sections))


def made_up(*, window: int = 1000, number: int = 0, evidence: Sequence[EvidenceRecord] = (), entries=None, sections=None, **changes):
    """A small record whose numbers can be reckoned by hand; `changes` are fields of AskRecord."""
    entries = entries or (Entry("question", 100, 100, 100), Entry("answer", 512, 500, 50))
    ledger = Ledger(window, tuple(entries))
    fields = {
        "session": "default", "command": "ask", "model": "echo", "model_sha256": None, "question": f"Question {number}?",
        "started_at": START + number, "window": window, "finish_reason": "stop", "strategy": "prioritize", "bound": "requested",
        "ledger": ledger, "sections": negotiated(ledger) if sections is None else sections, "evidence": tuple(evidence),
        "prompt_tokens": ledger.prompt_tokens, "completion_tokens": ledger.entry("answer").used, "timings": {"total_s": 1.5},
    }  # fmt: skip
    return AskRecord(**fields | changes)


def passage(chunk_id: int = 1, **changes) -> EvidenceRecord:
    fields = {"label": f"KB#{chunk_id}", "source": "notes/a.md", "kb": "notes", "chunk_id": chunk_id, "tokens": 100}
    return EvidenceRecord(**fields | changes)


def fields(entry: AskRecord) -> dict[str, object]:
    """All that a record says, to compare one that was stored with what it was made from."""
    return {
        **{name: getattr(entry, name) for name in AskRecord.__dataclass_fields__},
        "ledger": entry.ledger.to_dict(),
        "sections": [asdict(each) for each in entry.sections],
        "evidence": [asdict(each) for each in entry.evidence],
        "timings": dict(entry.timings),
    }
