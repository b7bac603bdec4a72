"""What a council's flow asks of whoever drives it, and what it gets back. The flow itself touches no model, no file and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from localrag.types import Hit, Message, Proposal, SamplingParams, ToolSpec

Kind = Literal["plan", "proposal", "review", "call", "verdict"]


class MakeSchema(Protocol):
    """The JSON schema of a reply, by the `labels` of the passages in its prompt and the `max_tokens` that are left for it."""

    def __call__(self, labels: Sequence[str], max_tokens: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One thing that a role is asked for, besides what all are given: the system text, the conversation and the task.

    `role` is a member's name, JUDGE or PLANNER, which says whose model, window and budget it is. `instructions` stand last.
    `cited` are labels of `hits` that proposals cite. `rounds` are the calls and results of tools so far, as messages.
    """

    role: str
    kind: Kind
    instructions: str
    sampling: SamplingParams
    cite: str = ""
    """What is said last about citing, where there are sources; `{label}` becomes the tag of one of them."""
    hits: tuple[Hit, ...] = ()
    cited: frozenset[str] = frozenset()
    proposals: tuple[Proposal, ...] = ()
    plan: str = ""
    tools: tuple[ToolSpec, ...] = ()
    rounds: tuple[Message, ...] = ()
    make_schema: MakeSchema | None = None
    """Makes the schema of the reply once the prompt is composed. Without it that of `sampling` holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back of a turn: the text, why it ended ("error" with no text where the model broke), and the hits in its prompt."""

    text: str
    finish_reason: str
    hits: tuple[Hit, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """Turns that may be answered at once. Answered by a tuple of Reply, in their order."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Search:
    """One search for several questions. Answered by a mapping of each role to its hits, best first: a member's are those its tags allow."""

    queries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """A call of a tool, and the `reply` that it was read from. Answered by Used."""

    tool: str
    arguments: Mapping[str, str]
    reply: str = ""

    def messages(self, result: str) -> tuple[Message, Message]:
        """The call and its result, as later prompts have them."""
        return Message("assistant", self.reply), Message("tool", result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What a tool gave: the text that is sent, as it was counted; the hits whose passages are in it; whether room for more is left."""

    text: str
    hits: tuple[Hit, ...] = ()
    is_exhausted: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    """Something to be shown and kept: `event` names it, `data` is fit for JSON. Answered by None."""

    event: str
    data: Mapping[str, Any]


Step = Ask | Search | Use | Tell
