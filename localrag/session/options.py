"""What a question may ask for besides its words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from localrag.budget import Overflow
    from localrag.kb.filters import Where
    from localrag.messages import Attachment, Memory, ToolSpec
    from localrag.passages import Hit
    from localrag.session.finding import TopK


class Options(TypedDict, total=False):
    """What shapes a prompt besides the question.

    `system` is a system text. `top_k` chunks are retrieved ("fit": as many as the window may hold), of documents that pass
    `where`; `hits` stand in for what would be found, and `cite` for what is said about citing (see prompt.Offer). `piped` text is
    evidence that comes with the question; `weigh` lets the relevance of the files themselves weigh the hits. `context_ratio` (0 to
    1) is the most that evidence takes of the window beside what cannot be cut, and `overflow` the strategies for what is too much,
    each for one section or (None) for all. `pinned`, `settled`, `earlier` and `again` are as in prompt.Offer, messages numbered as
    ledgers number them. `max_seconds` bounds the time that is spent, counted from `started_at` (time.perf_counter()) or from the call.
    """

    system: str | None
    top_k: TopK
    where: Where
    hits: Sequence[Hit]
    cite: str
    pinned: Collection[int]
    settled: int
    earlier: Mapping[int, Sequence[Hit]]
    again: Sequence[str]
    piped: str
    weigh: bool
    tools: Sequence[ToolSpec]
    memories: Sequence[Memory]
    attachments: Sequence[Attachment]
    context_ratio: float | None
    overflow: Sequence[tuple[Overflow, str | None]]
    max_seconds: float | None
    started_at: float | None
