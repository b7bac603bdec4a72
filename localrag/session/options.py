"""What a question may ask for besides its words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from localrag.errors import UsageError

if TYPE_CHECKING:
    from localrag.budget import Overflow
    from localrag.kb.filters import Where
    from localrag.types import Attachment, Hit, Memory, ToolSpec


TopK = int | Literal["fit"]
"""How many passages are offered; "fit" is as many as the window may hold, of which the prompt takes those that fit."""


class Options(TypedDict, total=False):
    """What shapes a prompt besides the question.

    `system` is a system text. `top_k` texts are retrieved ("fit": as many as the window may hold), of documents that pass `where`;
    `hits` stand in for what would be found, and `cite` for what is said about citing (see PromptInputs). Hits with identical text are
    merged; with `left_out` they are taken as they are: it maps each passage that was found and is not among them to the reason that
    the ledger gives. `piped` text is evidence that comes with the question; `weigh` lets the relevance of the files themselves weigh
    the hits. `context_ratio` (0 to 1) is the most that evidence takes of the window beside what cannot be cut; without it, a `top_k`
    that is given lets evidence take what would stay spare, too. `overflow` are the strategies for what is too much, each for one
    section or (None) for all. `pinned`, `settled`, `earlier`, `again`, `must_call` and `needs_question` are as in PromptInputs, messages
    numbered as ledgers number them. `max_seconds` bounds the time that is spent, retrieval and reranking included, counted from
    `started_at` (time.perf_counter()) or from the call.
    """

    system: str | None
    top_k: TopK
    where: Where
    hits: Sequence[Hit]
    left_out: Mapping[str, str]
    cite: str
    needs_question: bool
    pinned: Collection[int]
    settled: int
    earlier: Mapping[int, Sequence[Hit]]
    again: Sequence[str]
    piped: str
    weigh: bool
    tools: Sequence[ToolSpec]
    must_call: Collection[str]
    memories: Sequence[Memory]
    attachments: Sequence[Attachment]
    context_ratio: float | None
    overflow: Sequence[tuple[Overflow, str | None]]
    max_seconds: float | None
    started_at: float | None


_LISTS = ("attachments", "memories", "tools", "hits", "overflow")


def check_options(options: Mapping[str, object]) -> None:
    """UsageError for an option that does not exist, which a type checker would find, and for one thing where a list of them belongs."""
    known = Options.__annotations__
    for name, value in options.items():
        if name not in known:
            import difflib  # noqa: PLC0415  # only for a typing error

            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
            raise UsageError(f"There is no option {name!r}.", hint=hint)
        if name in _LISTS and (isinstance(value, str) or not isinstance(value, Sequence)):
            raise UsageError(f"{name} is a list, not {type(value).__name__}.", hint=f"Give {name}=[…], even for one.")
    where = options.get("where")
    if isinstance(where, str):
        raise UsageError("where is a Where, not a text.", hint=f"Give Where.parse([{where!r}]).")
