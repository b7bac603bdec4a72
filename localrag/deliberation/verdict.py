"""The verdict of a judge: the form in which it is requested, and how a reply is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from localrag import citation
from localrag.deliberation.proposals import without_repeats
from localrag.deliberation.replies import form_schema, read
from localrag.text.thinking import without_thoughts
from localrag.types import Citation, Hit

CONFIDENCES = ("low", "medium", "high")
_MAX_LABELS = 64
_CHARS_PER_TOKEN = 4
_FRAME_CHARS = 96
"""Characters of the form without its texts, with a space after each colon and comma."""
_DISSENT_CHARS = 28
"""Characters of one dissent without its texts, including the separator."""
_MIN_VIEW_CHARS = 60


@dataclass(frozen=True, slots=True)
class Dissent:
    """A member's disagreement."""

    member: str
    view: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judge's verdict. `citations` come from the text, the decision, the dissent and the list, and are checked against the hits
    of the judge.

    If not `is_whole`, the judge ran out of tokens before the form was complete, or the form lacks the text or the decision.
    """

    text: str
    decision: str
    confidence: str | None
    citations: tuple[Citation, ...] = ()
    dissent: tuple[Dissent, ...] = ()
    is_whole: bool = True

    def to_dict(self) -> dict[str, object]:
        return {
            "text": self.text,
            "decision": self.decision,
            "confidence": self.confidence,
            "citations": [{"id": each.label, "supplied": each.supplied} for each in self.citations],
            "dissent": [asdict(each) for each in self.dissent],
            "is_whole": self.is_whole,
        }


def schema(labels: Sequence[str], members: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """Return the JSON schema of a verdict that fits `max_tokens` (at least 200), at four characters per token; with fewer tokens,
    the smallest form.

    `labels` are of the passages that it may cite, most important first; `members` are those who may dissent. Half of the room
    is for the text, an eighth for the decision, an eighth for the citations and a quarter for the dissent.
    """
    room = _CHARS_PER_TOKEN * max_tokens - _FRAME_CHARS
    properties: dict[str, Any] = {}
    if labels:  # they come first, so that the text is based on them
        top_labels = list(dict.fromkeys(labels))[:_MAX_LABELS]
        dear = 2 * (max(map(len, top_labels)) + 3)  # a label has half as many characters per token as a text
        properties["citations"] = _list({"enum": top_labels}, _within(room // 8 // dear, 1, len(top_labels)))
    properties["text"] = _text(_within(room // 2, 120, 6000))
    properties["decision"] = _text(_within(room // 8, 60, 600))
    properties["confidence"] = {"enum": list(CONFIDENCES)}
    if members:
        frame = _DISSENT_CHARS + max(map(len, members))
        most = _within(room // 4 // (frame + _MIN_VIEW_CHARS), 1, len(members))
        view = _text(_within(room // 4 // most - frame, _MIN_VIEW_CHARS, 400))
        properties["dissent"] = _list(form_schema({"member": {"enum": list(members)}, "view": view}), most)
    return form_schema(properties)


def parse(reply: str, hits: Sequence[Hit], members: Sequence[str], *, is_cut: bool = False) -> Verdict:
    """Read a judge's reply. `hits` are all hits in its prompt or in tool results, `members` those who may dissent; `is_cut`: a
    limit ended the reply.

    A reply that is not JSON is a plain text. As in a proposal, invented citations and repetitions are removed; the `citations`
    list invented ones as not supplied.
    """
    form = read(reply)
    text, decision = form.text("text"), form.text("decision")
    if not reply.lstrip().startswith("{"):
        text = without_thoughts(reply).strip()
        text = citation.without_cut_label(text) if is_cut else text
    confidence = form.text("confidence")
    views: dict[str, str] = {}
    for each in form.forms("dissent"):
        views.setdefault(each.text("member"), each.text("view"))
    cited = {
        each.label: each.supplied
        for statement in (text, decision, *views.values(), *form.texts("citations"))
        for each in citation.cite(statement, hits)
    }
    text, decision = (citation.struck(without_repeats(each)[0], hits) for each in (text, decision))
    return Verdict(
        text=text,
        decision=decision,
        confidence=confidence if confidence in CONFIDENCES else None,
        citations=tuple(Citation(label, is_supplied) for label, is_supplied in cited.items()),
        dissent=tuple(Dissent(member, citation.struck(view, hits)) for member, view in views.items() if member in members),
        is_whole=form.is_whole and bool(text and decision),
    )


def _within(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": most}


def _list(item: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "maxItems": most}
