"""Policies, which say how prompts run; jobs, which are prompts to run; and their events."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from localrag.engine.sequence import Sequence
from localrag.errors import LocalragError, UsageError
from localrag.text.thinking import Thinking
from localrag.types import Completion, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How an engine runs prompts: how many share the KV cache, in what order, and what stays cached.

    With one sequence, a prompt resumes at a breakpoint shared with the previous prompt, so the same seed gives the same text. With several,
    a prompt resumes at the exact token where it diverges from cached text, so near-ties may be decided differently.
    """

    num_sequences: int = 1
    is_interactive: bool = True
    """Whether someone reads the answers as they are written. Long prompts are then split so that running answers do not stall, and Ctrl-C
    ends an answer early instead of raising."""
    is_stream: bool = False
    """Whether jobs arrive over time. Otherwise all are known at the start."""
    sorts: bool = False
    """Whether to sort prompts by tokens, so that neighbours share prefixes, and to run them concurrently only if that saves time."""
    keeps: Literal["everything", "next", "shared"] = "everything"
    """What stays in the KV cache: everything that fits (LRU), only the next prompt's prefix, or only those of the next run's prompts."""
    on_disk: Literal["breakpoint", "prefix", "nothing"] = "nothing"
    """Which prefix the disk cache holds: that of a single prompt up to a breakpoint, or the prefix shared by all prompts."""

    def __post_init__(self) -> None:
        if self.num_sequences < 1:
            raise UsageError(f"{self.num_sequences} concurrent answers are too few.", hint="Allow 1 or more.")


SINGLE = Policy(on_disk="breakpoint")
CHAT = Policy(num_sequences=2, on_disk="breakpoint")
BATCH = Policy(num_sequences=8, is_interactive=False, sorts=True, keeps="next")
SERVE = Policy(num_sequences=8, is_stream=True)
COUNCIL = Policy(num_sequences=8, is_interactive=False, keeps="shared", on_disk="prefix")
SCORE = Policy(num_sequences=8, is_interactive=False)


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A prompt to run. `tag` is for the caller. See Engine.add for the other fields."""

    prompt_ids: list[int]
    sampling: SamplingParams
    deadline: float | None = None
    breakpoints: tuple[int, ...] = ()
    watched: tuple[int, ...] = ()
    thinking: Thinking | None = None
    tag: Any = None
    sequence: Sequence | None = None
    """The running sequence; None before the job starts."""
    num_cells: int = 0
    """Maximum number of KV cells that prompt and answer need."""
    num_logprobs_told: int = 0

    def __post_init__(self) -> None:
        thoughts = self.thinking.max_tokens if self.thinking is not None else 0
        self.num_cells = self.num_cells or len(self.prompt_ids) + thoughts + self.sampling.num_answer_tokens

    @property
    def is_finished(self) -> bool:
        return self.sequence is not None and self.sequence.is_finished

    def new_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Logprobs not sent in an event yet, for tokens whose text is final. Tokens of a removed stop string have none."""
        if self.sequence is None or not self.sequence.logprobs:
            return ()
        logprobs, end = self.sequence.logprobs, len(self.sequence.text.encode())
        starts = accumulate((len(each.piece) for each in logprobs[:-1]), initial=0)
        new = zip(logprobs, starts, strict=True)
        return tuple(each for at, (each, start) in enumerate(new) if at >= self.num_logprobs_told and start < end)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """An event of a job: a piece was written, or it ended. In a stream, an event with neither means that the job was queued.

    `job` is None after a step that wrote nothing and while a stream has no job waiting, so that the caller gets control.
    """

    job: Job | None
    text: str = ""
    thought: str = ""
    token_id: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    completion: Completion | None = None
    error: LocalragError | None = None
