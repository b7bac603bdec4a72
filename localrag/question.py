"""A question with all its options, as one frozen value. Every command, script and server request becomes one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from localrag.errors import UsageError
from localrag.types import Attachment, Hit, Memory, Message, SamplingParams, ToolSpec

if TYPE_CHECKING:
    from localrag.budget import Overflow
    from localrag.kb.filters import Where

Cite = Literal["enforced", "free"]
DEFAULT_CITE: Cite = "enforced"

Unanswerable = Literal["say", "answer", "error"]
"""What to do if the sources probably do not answer a question: say so, let the model answer, or raise an error."""
DEFAULT_UNANSWERABLE: Unanswerable = "say"

TopK = int | Literal["fit"]
"""A number of passages, or "fit" for as many as fit in the window."""

EvidenceKind = Literal["sentences", "passages"]
"""What is sent of the passages that were retrieved: their best sentences, or all of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The search for evidence.

    `kbs` names the knowledge bases to open for this question; None uses the session's. Only documents that match `where` are searched. With
    `weigh`, passages are weighted by the relevance of their files.

    `top_k` is the number of passages, `evidence` says what to send of them, and `evidence_tokens` limits their tokens in the prompt, 1 or
    more. None leaves it to the rule for the model (see session/retrieval.py). Raises UsageError for another value.
    """

    kbs: tuple[str, ...] | None = None
    top_k: TopK | None = None
    evidence: EvidenceKind | None = None
    evidence_tokens: int | None = None
    where: Where | None = None
    weigh: bool = False

    def __post_init__(self) -> None:
        if self.evidence not in (None, *get_args(EvidenceKind)):
            raise UsageError(f"evidence is {self.evidence!r}, but must be {' or '.join(get_args(EvidenceKind))}.")
        if self.evidence_tokens is not None and not (isinstance(self.evidence_tokens, int) and self.evidence_tokens > 0):
            raise UsageError(f"evidence_tokens is {self.evidence_tokens!r}, but must be a whole number, 1 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Content that the caller supplies with a question.

    `hits` replace the search; None searches. `left_out` maps the label of each retrieved passage missing from `hits` to the reason to show
    in the ledger. With `left_out`, `hits` are used unchanged; without, identical texts are merged. `piped` is text to use as evidence. If
    `must_call` names tools, the answer must call one of them.
    """

    hits: tuple[Hit, ...] | None = None
    left_out: Mapping[str, str] | None = None
    piped: str = ""
    attachments: tuple[Attachment, ...] = ()
    memories: tuple[Memory, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    must_call: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions:
    """How to divide the window and the time.

    `context_ratio` (0 to 1) limits the share of evidence in the window, after the sections that cannot be cut. `overflow` holds pairs of a
    strategy and the section that it applies to, None for all. `max_seconds` plans prompt and answer to finish in time, retrieval and
    reranking included. It counts from `started_at` on the clock of time.perf_counter(), or from the call. `ends_after_s` only ends the
    answer that many seconds after the question arrived; the budget is not planned for it.
    """

    context_ratio: float | None = None
    overflow: tuple[tuple[Overflow, str | None], ...] = ()
    max_seconds: float | None = None
    started_at: float | None = None
    ends_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """The state of a conversation whose earlier prompts are reused. Messages are numbered from 1, as in ledgers.

    Exchanges with a `pinned` message are always sent in full. History up to message `settled` is sent as a summary. `earlier` holds the
    passages sent with earlier messages, which can still be cited; `again` names those that this question refers to.
    """

    pinned: frozenset[int] = frozenset()
    settled: int = 0
    earlier: Mapping[int, Sequence[Hit]] = field(default_factory=dict)
    again: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    """The tool calls that an answer may contain: tools in `choices`, with parameters enforced by a schema for those in `strict`."""

    choices: tuple[str, ...]
    strict: tuple[str, ...] = ()
    or_text: bool = True
    """Whether the answer may also be plain text."""
    parallel: bool = True
    """Whether the answer may make several calls, if the model's form has a place for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and its options. `messages` is a conversation that ends with the question.

    Without `needs_question`, a conversation may end with an answer, and is sent without evidence. A question that `is_plain` has a single
    message, which is sent unchanged, without the model's template. `calls` restricts the tool calls in the answer; by default, it may call
    any of the tools given. `id` identifies the question.

    With `cite` "enforced", an answer with evidence begins with the tag of a source, or `[none]`, and can name no other; with "free", the
    model may cite or not (None: DEFAULT_CITE). `cite_instruction` replaces the instruction to begin with a tag; an answer then cites
    anywhere. Answers with a JSON schema and those of the echo are always free, and so are calls of tools and a reasoning model's thoughts.

    With `quote`, citations are enforced, and the model may also choose a sentence of the evidence, `[KB#12.3]`: the engine copies it into
    the answer. Answers that are always free, and those with tools or logprobs, do not quote, except those of the echo.

    `unanswerable` says what to do if the knowledge bases probably do not answer the question (None: DEFAULT_UNANSWERABLE). It applies where
    they are all that the question gives to answer from: not with attachments, memories, tools, piped text, hits or a JSON schema, nor to
    small talk such as "Hello!".

    Use `Question.of` for the common case:

        Question.of("Which plastic lasts outdoors?", top_k=3, max_tokens=64)
    """

    messages: tuple[Message, ...]
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009  # frozen
    search: Search = Search()
    given: Given = Given()
    budget: BudgetOptions = BudgetOptions()
    thread: Thread = Thread()
    cite: Cite | None = None
    unanswerable: Unanswerable | None = None
    quote: bool = False
    cite_instruction: str | None = None
    calls: ToolCalls | None = None
    needs_question: bool = True
    is_plain: bool = False
    id: str | int = ""

    def __post_init__(self) -> None:
        if self.cite not in (None, *get_args(Cite)):
            raise UsageError(f"cite is {self.cite!r}, but must be {' or '.join(get_args(Cite))}.")
        if self.unanswerable not in (None, *get_args(Unanswerable)):
            raise UsageError(f"unanswerable is {self.unanswerable!r}, but must be {', '.join(get_args(Unanswerable))}.")
        if self.quote and self.cite == "free":
            raise UsageError("Quotes need enforced citations, but cite is 'free'.", hint="Leave cite out, or do not ask for quotes.")

    @classmethod
    def of(cls, asked: str | Sequence[Message], *, system: str | None = None, **options: Any) -> Self:  # noqa: ANN401  # fields of several types
        """Create a question from a text, or from a conversation that ends with one.

        `system` is a system text. Every other option is a field of Question, SamplingParams, Search, Given, BudgetOptions or Thread.
        `kbs` is one name or several. Lists are accepted for tuples. Raises UsageError for an unknown option, and for a single value where
        a list is expected.
        """
        return cls(messages=tuple(_conversation(asked, system))).but(**options)

    def but(self, **options: Any) -> Self:  # noqa: ANN401  # fields of several types
        """Return the same question with some options changed, named as in `of`."""
        fields: dict[str, Any] = {name: value for name, value in options.items() if name in _OWN}
        parts: dict[str, dict[str, object]] = {}
        for name, value in options.items():
            if name not in _OWN:
                part = "search" if name == "top_k" else _part_of(name)
                parts.setdefault(part, {})[name] = _checked(name, value)
        changed = {part: replace(fields.pop(part, getattr(self, part)), **each) for part, each in parts.items()}
        return replace(self, **fields, **changed)


_PARTS: dict[str, Any] = {"sampling": SamplingParams, "search": Search, "given": Given, "budget": BudgetOptions, "thread": Thread}
_OWN = {each.name for each in dataclasses.fields(Question)} - {"messages"}
_FIELDS = {each.name: part for part, cls in _PARTS.items() for each in dataclasses.fields(cls) if each.name != "top_k"}
"""The part that holds each option. `top_k` is left out, since two parts have it; here it means that of Search."""
_SEVERAL = {"attachments", "memories", "tools", "hits", "overflow"}


def _part_of(name: str) -> str:
    if name not in _FIELDS:
        names = ["system", "top_k", *_FIELDS]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(names)}."
        raise UsageError(f"There is no option {name!r}.", hint=hint)
    return _FIELDS[name]


def _checked(name: str, value: object) -> object:
    """The value of an option, with lists converted to tuples. Raises UsageError for a value of the wrong type."""
    if name in _SEVERAL and value is not None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UsageError(f"{name} is a list, not {type(value).__name__}.", hint=f"Give {name}=[…], even for one.")
        return tuple(value)
    if name == "where" and isinstance(value, str):
        raise UsageError("where is a Where, not a text.", hint=f"Give Where.parse([{value!r}]).")
    if name == "kbs" and value is not None:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Collection) else value
    if name in ("must_call", "again"):
        return tuple(value) if isinstance(value, Collection) else value
    return frozenset(value) if name == "pinned" and isinstance(value, Collection) else value


def _conversation(question: str | Sequence[Message], system: str | None) -> list[Message]:
    if isinstance(question, str):
        messages = [Message("user", question)]
    elif isinstance(question, list | tuple) and question and all(isinstance(each, Message) for each in question):
        messages = list(question)
    else:
        raise UsageError(
            f"A question is a text, or a list of Message that ends with one, not {type(question).__name__}.",
            hint='Ask "How are you?", or [Message("user", "How are you?")].',
        )
    return [Message("system", system), *messages] if system and system.strip() else messages
