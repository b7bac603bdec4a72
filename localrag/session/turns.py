"""A turn of a conversation: a question, its answer, and the sources that came with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from localrag.passages import Chunk, Hit
from localrag.prompt.inputs import AGAIN

if TYPE_CHECKING:
    from localrag.journal import StoredTurn, TurnState
    from localrag.session.answer import Answer, Prepared

_POINTER = AGAIN.partition("{")[0]
_SOURCES = ("attachments", "cited", "evidence", "pointers")


@dataclass(slots=True, kw_only=True)
class Turn:
    """A question with its answer. `sent` is the whole message that the model was sent for it, if sources came with it: `hits`.

    Without an answer it is empty: such a question is asked again with the next one, and then as it stands, without its sources.
    """

    id: int
    question: str
    answer: str = ""
    state: TurnState = "running"
    about: Mapping[str, Any] = field(default_factory=dict)
    is_pinned: bool = False
    began_at: float = 0.0
    sent: str = ""
    hits: tuple[Hit, ...] = ()

    @property
    def points(self) -> bool:
        """Whether the message names passages that stand above it."""
        return _POINTER in self.sent

    @property
    def is_told(self) -> bool:
        """Whether there is an answer, if only its beginning."""
        return bool(self.answer.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What the model will see less of: turns, by their numbers from 1, of which it is sent a summary, and those of which it is sent
    nothing. `coming` are those that are summarised next, as soon as there is no more room for them."""

    summarised: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.summarised or self.left_out)

    def beyond(self, before: Forgotten) -> Forgotten:
        """What was not so before."""
        return Forgotten(
            summarised=tuple(each for each in self.summarised if each not in before.summarised),
            left_out=tuple(each for each in self.left_out if each not in before.left_out),
        )


def sent_message(prepared: Prepared) -> str:
    """The last message as it was sent, if sources came with it."""
    contents = [list(parts) for is_markup, parts in groupby(prepared.prompt.parts, key=lambda each: each.part.is_markup) if not is_markup]
    asked = next((parts for parts in reversed(contents) if any(each.part.section == "question" for each in parts)), [])
    has_sources = any(each.part.section in _SOURCES for each in asked)
    return "".join(each.part.text for each in asked) if has_sources else ""


def let_go_of_strangers(turns: Sequence[Turn], hits: Iterable[Hit], kb_names: Collection[str]) -> None:
    """Sources whose tags mean something else now leave the prompt: of knowledge bases that are not asked any more, or made anew.

    `hits` is what was found now, `kb_names` are the knowledge bases that are asked.
    """
    texts = {hit.label: hit.chunk.text for hit in hits}
    for turn in turns:
        for hit in turn.hits:
            chunk = hit.chunk
            scope = chunk.kb if len(kb_names) > 1 else ""
            is_asked = not chunk.kb or not kb_names or (chunk.kb in kb_names and chunk.scope == scope)
            if not is_asked or texts.get(hit.label, chunk.text) != chunk.text:
                turn.sent = ""


def to_keep(turn: Turn, answer: Answer) -> dict[str, Any]:
    cited = {each.label for each in answer.citations if each.supplied}
    return {
        "finish_reason": answer.finish_reason,
        "sent": turn.sent,
        "hits": [asdict(hit.chunk) | {"score": hit.score} for hit in turn.hits],
        "citations": sorted(cited),
        "unsupported_citations": answer.unsupported_citations,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
        **({"reasoning": answer.reasoning} if answer.reasoning else {}),
    }


def restored(stored: StoredTurn) -> Turn:
    """A turn as it was kept. What cannot be read of its sources is left out: its question and answer stand."""
    try:
        hits = tuple(_hit(each) for each in stored.about.get("hits", ()))
        sent = str(stored.about.get("sent", "")) if stored.answer.strip() else ""
    except (TypeError, ValueError, KeyError):
        hits, sent = (), ""
    return Turn(
        id=stored.id,
        question=stored.question,
        answer=stored.answer,
        state=stored.state,
        about=stored.about,
        is_pinned=stored.is_pinned,
        began_at=stored.began_at,
        sent=sent,
        hits=hits,
    )


def _hit(kept: Mapping[str, Any]) -> Hit:
    fields = dict(kept)
    score = float(fields.pop("score"))
    return Hit(Chunk(**fields), score)
