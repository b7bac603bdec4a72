"""What a session returns: a prompt ready to be sent, and an answer with its evidence, its ledger, or the reason why it has no sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from localrag.budget import Ledger
from localrag.errors import counted
from localrag.prompt import Prompt
from localrag.question import Question
from localrag.session.query_rewrite import QueryRewrite
from localrag.types import Citation, Hit, Slot, Timings, TokenLogprob

if TYPE_CHECKING:
    from localrag.engine.memory import MemoryPlan


ROLES = ("system", "developer", "user", "assistant")
"""Whose messages make a conversation that can be searched for."""


class Said(Protocol):
    """A message of a conversation, ours or as an API gets it."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> object: ...


class Bypass(Enum):
    """Why an answer has no sources. The value is its name in JSON."""

    NO_KNOWLEDGE_BASE = "no_knowledge_base"
    TOOLS = "tools"
    ROLE = "role"
    CONTENT = "content"
    NOTHING_FOUND = "nothing_found"
    NO_ROOM = "no_room"

    def told(self, kbs: Sequence[str]) -> str:
        """What a person is told of it, in one line; empty where nobody named a knowledge base and so nobody expects sources."""
        return f"{_TOLD[self].format(kbs=', '.join(kbs))}: answered without sources." if kbs else ""


_TOLD = {
    Bypass.NO_KNOWLEDGE_BASE: "{kbs} cannot be searched here",
    Bypass.TOOLS: "{kbs} is not searched where the model has tools",
    Bypass.ROLE: "{kbs} is not searched for a conversation with other roles than " + ", ".join(ROLES),
    Bypass.CONTENT: "{kbs} is not searched for a question that is not all text",
    Bypass.NOTHING_FOUND: "Nothing relevant was found in {kbs}",
    Bypass.NO_ROOM: "What was found in {kbs} has no room in the window",
}


def bypass(messages: Sequence[Said], *, has_kb: bool, has_tools: bool = False) -> Bypass | None:
    """Why nothing is searched for; None if it is. `has_tools` is for tools and functions that the model may call.

    A question that is a list of parts, as in OpenAI's API, can be searched for if all of them are text. That there is a question
    since the last answer is for `conversation.split` to tell.
    """
    if not has_kb:
        return Bypass.NO_KNOWLEDGE_BASE
    if has_tools:
        return Bypass.TOOLS
    if any(message.role not in ROLES for message in messages):
        return Bypass.ROLE
    if not all(_is_text(message.content) for message in messages if message.role == "user"):
        return Bypass.CONTENT
    return None


def outcome(reason: Bypass | None, offered: Sequence[Hit], supplied: Sequence[object]) -> Bypass | None:
    """Why an answer has no sources, after the search if there was one; None if it has some: `supplied`, of those `offered`."""
    if supplied:
        return None
    return Bypass.NO_ROOM if offered else reason or Bypass.NOTHING_FOUND


def _is_text(content: object) -> bool:
    if isinstance(content, list | tuple):
        return bool(content) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
    return isinstance(content, str)


RERANK_SKIPPED = "The passages were not reranked: that could not finish within its share of the time limit."


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The prompt of a question: counted, fitted, and nothing evaluated yet."""

    question: Question
    prompt: Prompt
    slot: Slot
    offered: tuple[Hit, ...]
    """All that was found or handed in, identical texts too."""
    num_chunks: int
    retrieve_s: float
    deadline: float | None = None
    """By time.perf_counter(); None where time is not limited."""
    bypass: Bypass | None = None
    """Why there are no sources; None where there are some."""
    rewriting: QueryRewrite | None = None
    """What was searched for in place of a follow-up; None where none was to be rewritten."""

    @property
    def warnings(self) -> list[str]:
        """Where the window or the answer has less than was asked for, and where passages were not reranked."""
        return [*window_warnings(self.slot), *ledger_warnings(self.prompt.ledger)]


@dataclass(frozen=True, slots=True)
class Pass:
    """One of the prompts in which passages were read before the answer (exhaustive.py), and how many facts were noted in it."""

    chunks_read: int
    num_facts: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back, with what was sent and what was left out. `to_dict` is the answer object of the command line."""

    text: str
    finish_reason: str
    model: str
    slot: Slot
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ledger: Ledger
    prompt: Prompt
    offered: tuple[Hit, ...]
    citations: tuple[Citation, ...]
    chunks_in_kb: int
    timings: Timings
    warnings: tuple[str, ...] = ()
    passes: tuple[Pass, ...] = ()
    num_read: int | None = None
    """Passages that were read before the answer was written; None where that is those in its prompt."""
    memory: MemoryPlan | None = None
    """Of the context in which it was written; None where nothing was planned, as for the echo."""
    reasoning: str = ""
    """What was thought before the answer; it is no part of the text."""
    reasoning_tokens: int = 0
    """Of the completion's tokens, those that were thoughts."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the answer's tokens, if they were asked for."""
    bypass: Bypass | None = None
    rewriting: QueryRewrite | None = None
    """Both as in Prepared; what the rewriting took is not in the numbers of the answer."""

    @property
    def hits(self) -> tuple[Hit, ...]:
        """The hits that are in the prompt, in its order."""
        return self.prompt.hits

    @property
    def coverage(self) -> dict[str, object]:
        """How much of what there is was read, and in which passes if in several."""
        passes = {"passes": [asdict(each) for each in self.passes]} if self.passes else {}
        return {"chunks_read": len(self.hits) if self.num_read is None else self.num_read, "chunks_in_kb": self.chunks_in_kb, **passes}

    @property
    def ending(self) -> str:
        """Why the answer ended before the model ended it, in one line; empty where the model did."""
        entry, time = self.ledger.entry("answer"), self.ledger.time
        tokens = counted(entry.allotted, "token")
        match self.finish_reason:
            case "cancelled":
                return "Interrupted."
            case "time":
                return "Stopped at the limit of time (--max-seconds)."
            case "length" if entry.allotted < entry.wanted and time is not None and time.is_bound:
                return f"Stopped at {tokens}, the most that the limit of time allows (--max-seconds)."
            case "length" if self.ledger.spare == 0:
                return f"Stopped at {tokens}: the window of {self.ledger.window:,} tokens is full."
            case "length":
                return f"Stopped at the limit of {tokens} (--max-tokens)."
        return ""

    @property
    def unsupported_citations(self) -> list[str]:
        return [each.label for each in self.citations if not each.supplied]

    def to_dict(self) -> dict[str, object]:
        bypass = None if self.bypass is Bypass.NO_KNOWLEDGE_BASE else self.bypass  # nobody wanted sources
        thoughts = {"reasoning_tokens": self.reasoning_tokens} if self.reasoning_tokens else {}
        return {
            "answer": self.text,
            **({"reasoning": self.reasoning} if self.reasoning else {}),
            "finish_reason": self.finish_reason,
            "model": self.model,
            "slot": self.slot.to_dict(),
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
                "cached_tokens": self.cached_tokens,
                **thoughts,
            },
            "ledger": self.ledger.to_dict(),
            "evidence": supplied(self.prompt),
            "citations": [{"id": each.label, "supplied": each.supplied, "spans": list(map(list, each.spans))} for each in self.citations],
            "unsupported_citations": self.unsupported_citations,
            "coverage": self.coverage,
            "timings": {name: round(getattr(self.timings, name), 4) for name in Timings.__slots__},
            **({"memory": self.memory.to_summary()} if self.memory is not None else {}),
            **({"bypass": bypass.value} if bypass is not None else {}),
            **({"rewriting": self.rewriting.to_dict()} if self.rewriting is not None else {}),
            **({"warnings": list(self.warnings)} if self.warnings else {}),
        }


def window_warnings(slot: Slot) -> list[str]:
    """A warning where the window is smaller than was asked for."""
    if slot.requested is None or slot.n_ctx >= slot.requested:
        return []
    reason = "the model was trained for no more" if slot.bound == "training" else "there is no memory for more"
    return [f"The window has {slot.n_ctx:,} of the {slot.requested:,} tokens asked for (--ctx): {reason}."]


def ledger_warnings(ledger: Ledger) -> list[str]:
    """A warning where the answer has less room than was asked for, and where there was no time to rerank."""
    skipped = [RERANK_SKIPPED] if ledger.time is not None and "rerank" in ledger.time.skipped else []
    entry = ledger.entry("answer")
    if entry.allotted >= entry.wanted:
        return skipped
    is_late = ledger.time is not None and ledger.time.is_bound
    reason = "there is no time for more (--max-seconds)" if is_late else f"the window of {ledger.window:,} tokens has no room for more"
    return [f"The answer can have {entry.allotted:,} of the {entry.wanted:,} tokens asked for (max_tokens): {reason}.", *skipped]


def evidence(hit: Hit, tokens: int | None = None) -> dict[str, object]:
    """A hit as the answer object shows it; `tokens` is what it takes in the prompt, its tag line included, if it is in one."""
    chunk = hit.chunk
    counted = {} if tokens is None else {"tokens": tokens}
    known = {} if hit.relevance is None else {"relevance": round(hit.relevance, 4)}
    return {
        "id": hit.label,
        "source": chunk.source,
        "heading": chunk.heading,
        **({"place": chunk.place} if chunk.place else {}),
        "start": chunk.start,
        "end": chunk.end,
        "score": hit.score,
        "contributions": dict(hit.contributions),
        **known,
        **counted,
    }


def supplied(prompt: Prompt) -> list[dict[str, object]]:
    """The evidence that is in a prompt, each piece with its tokens and, where it is not there in full, its level."""
    tokens = prompt.item_tokens
    levels = {label: {} if level == "full" else {"level": level} for label, level in prompt.levels.items()}
    return [evidence(hit, tokens[hit.label]) | levels[hit.label] for hit in prompt.hits]
