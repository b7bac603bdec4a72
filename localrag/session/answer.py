"""What a session returns: a prompt ready to run, and an answer with its evidence, its ledger and the reason for missing sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from localrag.budget import Ledger
from localrag.errors import counted
from localrag.prompt import Prompt
from localrag.question import DEFAULT_UNANSWERABLE, Question
from localrag.session.answerability import Answerability, is_small_talk
from localrag.session.query_rewrite import QueryRewrite
from localrag.text.sentences import units
from localrag.types import Citation, Hit, Message, Quote, Slot, Timings, TokenLogprob, ToolCall

if TYPE_CHECKING:
    from localrag.engine.memory import MemoryPlan
    from localrag.support import Support
    from localrag.text.tokens import Embedder


ROLES = ("system", "developer", "user", "assistant")
"""Message roles of a conversation that the retriever can search for."""


class MessageLike(Protocol):
    """A message of a conversation, either ours or as received by an API."""

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
        """Return a one-line notice for the user; empty if no knowledge base was named, since then no sources were expected."""
        return f"{_NOTICES[self].format(kbs=', '.join(kbs))}: answered without sources." if kbs else ""


_NOTICES = {
    Bypass.NO_KNOWLEDGE_BASE: "{kbs} cannot be searched here",
    Bypass.TOOLS: "{kbs} is not searched where the model has tools",
    Bypass.ROLE: "{kbs} is not searched for a conversation with other roles than " + ", ".join(ROLES),
    Bypass.CONTENT: "{kbs} is not searched for a question that is not all text",
    Bypass.NOTHING_FOUND: "Nothing relevant was found in {kbs}",
    Bypass.NO_ROOM: "The passages found in {kbs} do not fit in the window",
}


def bypass(messages: Sequence[MessageLike], *, has_kb: bool, has_tools: bool = False) -> Bypass | None:
    """Return why the search is skipped, or None if it runs. Set `has_tools` if the model may call tools or functions.

    A question given as a list of parts, as in OpenAI's API, can be searched for if every part is text. This function does not check
    that the conversation ends with a question; `conversation.split` does.
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


def outcome(reason: Bypass | None, hits: Sequence[Hit], sources: Sequence[object]) -> Bypass | None:
    """Return why an answer has no sources after the search, or None if it has some. `sources` are the hits used from `hits`."""
    if sources:
        return None
    return Bypass.NO_ROOM if hits else reason or Bypass.NOTHING_FOUND


def _is_text(content: object) -> bool:
    if isinstance(content, list | tuple):
        return bool(content) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
    return isinstance(content, str)


RERANK_SKIPPED = "The passages were not reranked: reranking could not finish within its share of the time limit."


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A question's prompt, counted and fitted to the window. Nothing has been evaluated yet."""

    question: Question
    prompt: Prompt
    slot: Slot
    offered: tuple[Hit, ...]
    """Every hit that was retrieved or passed in, including identical texts."""
    num_chunks: int
    retrieve_s: float
    deadline: float | None = None
    """When the answer must end, on the clock of time.perf_counter(); None without a time limit."""
    bypass: Bypass | None = None
    """Why there are no sources; None if there are some."""
    rewriting: QueryRewrite | None = None
    """The query that replaced a follow-up question; None if none was rewritten."""
    answerability: Answerability | None = None
    """How likely the knowledge bases answer the question; None if that is unknown."""
    notes: tuple[str, ...] = ()
    """What the prompt does otherwise than the model's chat template would, for tools and their calls."""

    @property
    def abstains(self) -> bool:
        """Whether the model is not asked, because the knowledge bases are all that it has and probably do not answer the question."""
        question = self.question
        given, mode = question.given, question.unanswerable or DEFAULT_UNANSWERABLE
        has_others = given.attachments or given.memories or given.tools or given.piped.strip() or question.sampling.json_schema is not None
        if self.answerability is None or self.answerability.is_likely or mode == "answer" or has_others or question.is_plain:
            return False
        return not is_small_talk(question.messages[-1].content)

    @property
    def warnings(self) -> list[str]:
        """Warnings for a smaller window or a shorter answer than requested, for skipped reranking, and for tools."""
        return [*window_warnings(self.slot), *ledger_warnings(self.prompt.ledger), *self.notes]


@dataclass(frozen=True, slots=True)
class Pass:
    """One prompt that read passages before the answer (see exhaustive.py), with the number of facts noted."""

    chunks_read: int
    num_facts: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, the prompt that produced it, and what was left out. `to_dict` gives the answer object of the command line."""

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
    """Number of passages read before the answer was written; None if only those in its prompt were."""
    memory: MemoryPlan | None = None
    """Memory plan of the context that wrote the answer; None for the echo, which has none."""
    reasoning: str = ""
    """The model's reasoning before the answer. It is not included in `text`."""
    reasoning_tokens: int = 0
    """How many of the completion tokens are reasoning."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log probabilities of the answer's tokens, if requested."""
    bypass: Bypass | None = None
    rewriting: QueryRewrite | None = None
    """`bypass` and `rewriting` are as in Prepared. The cost of rewriting is not included in the answer's counts."""
    answerability: Answerability | None = None
    """As in Prepared."""
    abstained: bool = False
    """Whether the text says that the sources do not answer the question. The model was not asked: `hits` are the nearest passages."""
    embedder: Embedder | None = field(default=None, repr=False, compare=False)
    """The embedder that found the hits, which is therefore loaded; None if they were found without one. `support` uses it."""
    quotes: tuple[Quote, ...] | None = None
    """Sentences copied from the evidence; None if the answer could not quote."""
    copied_tokens: int = 0
    """How many of the completion tokens were copied from sources, not written."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of tools, which are not included in `text`. If `finish_reason` is not "stop", the last one may be cut off."""

    @property
    def message(self) -> Message:
        """The answer as a message, to go on with. Results follow as tool messages."""
        return Message("assistant", self.text, tool_calls=self.tool_calls)

    @property
    def hits(self) -> tuple[Hit, ...]:
        """Hits in the prompt, in prompt order."""
        return self.prompt.hits

    def _repr_html_(self) -> str:
        """Show the answer in a notebook, with its sources and its ledger."""
        from localrag.report.notebook import answer_html  # noqa: PLC0415  # weight

        no_sources = "" if self.hits else "This answer has no sources."
        remark = " ".join(filter(None, (self.ending, no_sources)))
        return answer_html(self.text, remark, citations=self.citations, hits=self.hits, ledger=self.ledger)

    @property
    def coverage(self) -> dict[str, object]:
        """How many passages were read of those in the knowledge bases, with one entry per pass if there were several."""
        passes = {"passes": [asdict(each) for each in self.passes]} if self.passes else {}
        num_read = 0 if self.abstained else len(self.hits) if self.num_read is None else self.num_read
        return {"chunks_read": num_read, "chunks_in_kb": self.chunks_in_kb, **passes}

    @property
    def ending(self) -> str:
        """One line saying what cut the answer short; empty if the model ended it."""
        match self.finish_reason:
            case "cancelled":
                return "Interrupted."
            case "time":
                return "Stopped at the time limit (--max-seconds)."
            case "length":
                return self._length_ending()
        return ""

    def _length_ending(self) -> str:
        entry, time = self.ledger.entry("answer"), self.ledger.time
        tokens = counted(entry.allotted, "token")
        if entry.allotted < entry.wanted and time is not None and time.is_bound:
            return f"Stopped at {tokens}, the most that the time limit allows (--max-seconds)."
        if self.ledger.spare == 0:
            return f"Stopped at {tokens}: the window of {self.ledger.window:,} tokens is full."
        return f"Stopped at the limit of {tokens} (--max-tokens)."

    @property
    def unsupported_citations(self) -> list[str]:
        return [each.label for each in self.citations if not each.supplied]

    @property
    def support(self) -> Support:
        """How well the cited passages support each sentence, and the claims that they lack. Computed at each access."""
        from localrag.support import Support, assess  # noqa: PLC0415  # weight: an answer that is only read does not need it

        if self.abstained:
            return Support()
        hits = (*self.prompt.hits, *self.prompt.earlier)
        return assess(self.text, hits, self.citations, is_cut=self.finish_reason != "stop", embedder=self.embedder)

    def to_dict(self) -> dict[str, object]:
        support = self.support
        bypass = None if self.bypass is Bypass.NO_KNOWLEDGE_BASE else self.bypass  # no sources were requested
        thoughts = {"reasoning_tokens": self.reasoning_tokens} if self.reasoning_tokens else {}
        copied = {} if self.quotes is None else {"copied_tokens": self.copied_tokens}
        return {
            "answer": self.text,
            **({"tool_calls": [asdict(call) for call in self.tool_calls]} if self.tool_calls else {}),
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
                **copied,
            },
            "ledger": self.ledger.to_dict(),
            "evidence": supplied(self.prompt),
            "citations": [{"id": each.label, "supplied": each.supplied, "spans": list(map(list, each.spans))} for each in self.citations],
            "unsupported_citations": self.unsupported_citations,
            "answerable": None if self.answerability is None else round(self.answerability.probability, 4),
            "abstained": self.abstained,
            "support": [each.to_dict() for each in support.sentences],
            "unsupported_claims": [each.to_dict() for each in support.unsupported_claims],
            **({} if self.quotes is None else {"quotes": [each.to_dict() for each in self.quotes]}),
            "coverage": self.coverage,
            "timings": {name: round(getattr(self.timings, name), 4) for name in Timings.__slots__},
            **({"memory": self.memory.to_summary()} if self.memory is not None else {}),
            **({"bypass": bypass.value} if bypass is not None else {}),
            **({"rewriting": self.rewriting.to_dict()} if self.rewriting is not None else {}),
            **({"warnings": list(self.warnings)} if self.warnings else {}),
        }


def window_warnings(slot: Slot) -> list[str]:
    """Warn if the window is smaller than requested."""
    if slot.requested is None or slot.n_ctx >= slot.requested:
        return []
    reason = "the model was trained for no more" if slot.bound == "training" else "there is no memory for more"
    return [f"The window has {slot.n_ctx:,} of the {slot.requested:,} tokens asked for (--ctx): {reason}."]


def ledger_warnings(ledger: Ledger) -> list[str]:
    """Warn if the answer has fewer tokens than requested, or if there was no time to rerank."""
    skipped = [RERANK_SKIPPED] if ledger.time is not None and "rerank" in ledger.time.skipped else []
    entry = ledger.entry("answer")
    if entry.allotted >= entry.wanted:
        return skipped
    is_late = ledger.time is not None and ledger.time.is_bound
    reason = "there is no time for more (--max-seconds)" if is_late else f"the window of {ledger.window:,} tokens has no room for more"
    return [f"The answer can have {entry.allotted:,} of the {entry.wanted:,} tokens asked for (max_tokens): {reason}.", *skipped]


def evidence(hit: Hit, tokens: int | None = None) -> dict[str, object]:
    """Return a hit as the answer object shows it. `tokens` is its size in the prompt, tag line included; None if it is not in one.

    If only some of its sentences were sent, `spans` are their places in the document, and `omitted_sentences` counts the others.
    """
    chunk = hit.chunk
    spans = [[chunk.start + start, chunk.start + end] for start, end in hit.spans]
    num_omitted = sum(unit.span not in hit.spans for unit in units(chunk.text)) if spans else 0
    counted = {} if tokens is None else {"tokens": tokens}
    relevance = {} if hit.relevance is None else {"relevance": round(hit.relevance, 4)}
    return {
        "id": hit.label,
        "source": chunk.source,
        "heading": chunk.heading,
        **({"place": chunk.place} if chunk.place else {}),
        "start": chunk.start,
        "end": chunk.end,
        "score": hit.score,
        "contributions": dict(hit.contributions),
        **relevance,
        **({"spans": spans, "omitted_sentences": num_omitted} if spans else {}),
        **counted,
    }


def supplied(prompt: Prompt) -> list[dict[str, object]]:
    """Return the evidence in a prompt. Each entry has its size in tokens and, if it was shortened, its level."""
    tokens = prompt.item_tokens
    levels = {label: {} if level == "full" else {"level": level} for label, level in prompt.levels.items()}
    return [evidence(hit, tokens[hit.label]) | levels[hit.label] for hit in prompt.hits]
