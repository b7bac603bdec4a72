"""A prompt to run: its job, the sequence that the engine makes of it, its events, and the policies under which jobs run."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, Protocol, TypeVar

from localrag.errors import EngineError, LocalragError, UsageError
from localrag.text.thinking import Part, Splitter, Thinking
from localrag.types import Completion, FinishReason, SamplingParams, Timings, TokenLogprob

NGRAM = 3
"""Number of last tokens to look up. With 2, there are more drafts, but fewer of them are right, and decoding is no faster (measured)."""


class Lookup:
    """Guesses the next tokens of an answer from an earlier occurrence of its last ones, in the prompt or in the answer (prompt lookup).

    Answers from documents copy names, numbers and whole sentences. A model can check several guessed tokens (a draft) in one batch, which
    may take less time than a batch for each; `Speed.draft_size` says how many. The next token is guessed to be the one after the last
    occurrence of the last n-gram. While the guesses are right, they go on from there. Adding a token takes constant time.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._guess_at: int | None = None
        self.num_right = 0
        """Number of right guesses in a row."""
        self.add(token_ids)
        self.num_right = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def has_guess(self) -> bool:
        """Whether the last tokens occurred before."""
        return self._guess_at is not None

    def add(self, token_ids: Iterable[int]) -> list[tuple[int, bool]]:
        """Add the next tokens. Return, for each for which there was a guess, how many in a row were right before, and whether it was."""
        outcomes = []
        for token in token_ids:
            guess_at, num_right = self._guess_at, self.num_right
            is_right = guess_at is not None and self._ids[guess_at] == token
            if guess_at is not None:
                outcomes.append((num_right, is_right))
            self._ids.append(token)
            ngram = tuple(self._ids[-NGRAM:])
            last_end = self._ends.get(ngram)
            self._ends[ngram] = len(self._ids)
            if guess_at is not None and is_right:
                self._guess_at, self.num_right = guess_at + 1, num_right + 1
            else:
                self._guess_at, self.num_right = last_end, 0
        return outcomes

    def draft(self, num_tokens: int) -> list[int]:
        """Guess the next tokens; none if the last n-gram is new. Past the last token, the guess repeats itself, as such a text does."""
        if self._guess_at is None:
            return []
        period = len(self._ids) - self._guess_at
        return [self._ids[self._guess_at + at % period] for at in range(num_tokens)]


@dataclass(slots=True, eq=False)
class Sequence:
    """The ids of a prompt and its completion, and how many of them are in the KV cache. Everything else is derived.

    For a reasoning model, `text` is the answer and `reasoning` the text before it. If the reasoning reaches its token limit, or ends
    without an answer, its closing tokens are appended as if they had been sampled.

    `breakpoints` are ascending positions in the prompt at which a batch must end (see ExclusiveCells). `text_end` is the position of the
    markup after its last text, 0 if unknown. The logits of the `watched` tokens after the prompt are stored.
    """

    seq_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    completion_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_evaluated: int = 0
    finish_reason: FinishReason | None = None
    error: LocalragError | None = None
    text: str = ""
    deadline: float | None = None
    breakpoints: tuple[int, ...] = ()
    text_end: int = 0
    marks: tuple[int, ...] = ()
    """Positions at which later prompts are likely to diverge, the likeliest first. No batch need end there."""
    watched: tuple[int, ...] = ()
    watched_logits: tuple[float, ...] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    thinking: Thinking | None = None
    reasoning: str = ""
    num_thought: int = 0
    copied: list[tuple[int, int]] = field(default_factory=list)
    """Spans of `text` that were copied from sources, not written."""
    num_copied: int = 0
    lookup: Lookup | None = None
    """The tokens so far, once they were searched for a draft; `look_up` adds new ones."""
    num_drafted: int = 0
    num_accepted: int = 0
    slot: int | None = None
    added_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _held: str = ""
    _thought: str = ""
    _splitter: Splitter | None = None

    def __post_init__(self) -> None:
        if self.thinking is not None:
            self._splitter = self.thinking.form.splitter(is_open=self.thinking.is_open)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_reserved(self) -> int:
        """Maximum number of KV cells needed. The last sampled token is never evaluated."""
        thoughts = self.thinking.max_tokens if self.thinking is not None else 0
        return len(self.prompt_ids) + thoughts + self.sampling.num_answer_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def latest_end(self) -> float | None:
        """Latest end on the clock of time.perf_counter(); None without a deadline.

        An answer ends at its deadline. A partial prompt is useless, so a prompt may take as long again.
        """
        if self.deadline is None or self.completion_ids:
            return self.deadline
        return self.deadline + max(0.0, self.deadline - self.added_at)

    def is_late(self, now: float, ends_at: float) -> bool:
        """Whether a batch that ends at `ends_at` would be too late; for a waiting sequence, whether its deadline has passed."""
        if self.slot is None and self.deadline is not None and self.deadline < now:
            return True
        latest = self.latest_end
        return latest is not None and latest < ends_at

    @property
    def is_answering(self) -> bool:
        """Whether the whole prompt has been evaluated."""
        return self.num_evaluated >= len(self.prompt_ids)

    def pending(self, most: int) -> list[int]:
        """The next tokens to evaluate, at most `most`: those of the prompt up to its next breakpoint, or the newly sampled ones."""
        num_prompt = len(self.prompt_ids)
        if self.is_answering:
            return self.completion_ids[self.num_evaluated - num_prompt :][:most]
        end = next((position for position in self.breakpoints if position > self.num_evaluated), num_prompt)
        return self.prompt_ids[self.num_evaluated : min(end, self.num_evaluated + most)]

    def look_up(self) -> tuple[Lookup, list[tuple[int, bool]]]:
        """The tokens so far, to guess the next ones, and the outcomes of the guesses for new tokens (see Lookup.add)."""
        if self.lookup is None:
            self.lookup = Lookup(self.prompt_ids)
        return self.lookup, self.lookup.add(self.completion_ids[len(self.lookup) - len(self.prompt_ids) :])

    @property
    def num_left(self) -> int:
        """Maximum number of tokens still to be sampled."""
        return self.num_reserved + 1 - self.num_tokens

    def append(self, token_id: int, piece: bytes, *, is_end: bool) -> str:
        """Add a sampled token. Returns the text that has become final: whole characters that cannot begin a stop string.

        `take_thought` returns the final text of the reasoning.
        """
        now = time.perf_counter()
        self.first_token_at = self.first_token_at or now
        self.completion_ids.append(token_id)
        if is_end and self._splitter is not None and self._splitter.is_thinking:
            self.completion_ids.pop()  # an answer must follow the reasoning
            self._end_thoughts()
            return ""
        if is_end:
            return self.finish("stop")
        self._read(self._decoder.decode(piece))
        self._count_thought()
        stop = self._stop_at()
        if stop is not None:
            self._held = self._held[:stop]
            self._decoder.reset()
            self._splitter = None  # drop the text that it holds back
            return self.finish("stop")
        if self._splitter is not None and self._splitter.is_over:
            return self.finish("stop")
        if len(self.completion_ids) - self.num_thought >= self.sampling.num_answer_tokens:
            return self.finish("length")
        return self._release(len(self._held) - self._may_begin_stop())

    def copy(self, token_ids: tuple[int, ...], text: bytes) -> str:
        """Append the tokens of a quote as if they had been sampled. Returns the text that has become final: all of it, at once.

        Stop strings are not looked for in it, so a quote is never cut.
        """
        start = len(self.text) + len(self._held)
        self.completion_ids += token_ids
        self._held += text.decode()
        self.copied.append((start, len(self.text) + len(self._held)))
        self.num_copied += len(token_ids)
        if len(self.completion_ids) - self.num_thought >= self.sampling.num_answer_tokens:
            return self.finish("length")
        return self._release(len(self._held))

    def part_of(self, piece: bytes, *, is_end: bool) -> Part:
        """Tell what a token would belong to if it were sampled next. White space after thoughts that used up their tokens is answer."""
        splitter = self._splitter
        if splitter is None or splitter.is_answering:
            return "answer"
        if splitter.is_thinking:
            return "thoughts" if is_end else splitter.part_of(piece.decode("utf-8", "replace"))
        return "answer" if is_end or self.num_thought >= self._most_thoughts else splitter.part_of(piece.decode("utf-8", "replace"))

    def _read(self, text: str) -> None:
        """Add text. For a reasoning model, separate the reasoning from the answer."""
        if self._splitter is None:
            self._held += text
        else:
            self._hear(*self._splitter.feed(text))

    def _count_thought(self) -> None:
        """Count the last token as reasoning until the answer begins, and close the reasoning at its token limit."""
        if self.thinking is None or self._splitter is None or self._splitter.is_answering:
            return
        self.num_thought += self.num_thought < self._most_thoughts
        if self._splitter.is_thinking and self.num_thought >= self._most_thoughts:
            self._end_thoughts()

    @property
    def _most_thoughts(self) -> int:
        """Tokens of reasoning after which it is closed."""
        return self.thinking.max_tokens - len(self.thinking.end_ids) if self.thinking is not None else 0

    def _end_thoughts(self) -> None:
        """Append the tokens that close the reasoning. The answer follows."""
        if self.thinking is not None and self._splitter is not None:
            self.completion_ids += self.thinking.end_ids
            self.num_thought += len(self.thinking.end_ids)
            self._decoder.reset()
            self._splitter.end()

    def _hear(self, thought: str, answer: str) -> None:
        self._thought += thought
        self.reasoning += thought
        self._held += answer

    def take_thought(self) -> str:
        """The reasoning text added since the last call."""
        thought, self._thought = self._thought, ""
        return thought

    def finish(self, reason: FinishReason) -> str:
        """End the sequence. Returns the text held back so far, without an incomplete last character."""
        self.finish_reason = reason
        self.finished_at = time.perf_counter()
        if reason == "stop":
            self._read(self._decoder.decode(b"", final=True))
        if self._splitter is not None:
            self._hear(*self._splitter.finish())
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self.text += text
        return text

    def _stop_at(self) -> int | None:
        positions = [at for stop in self.sampling.stop if (at := self._held.find(stop)) >= 0]
        return min(positions, default=None)

    def _may_begin_stop(self) -> int:
        """Length of the longest suffix of the held text that may begin a stop string."""
        longest = 0
        for stop in self.sampling.stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def completion(self) -> Completion:
        """The finished sequence as a Completion. Its times count from when it was added."""
        started = self.started_at or self.added_at
        first = self.first_token_at or self.finished_at or started
        end = self.finished_at or first
        return Completion(
            text=self.text,
            completion_ids=tuple(self.completion_ids),
            finish_reason=self.finish_reason or "cancelled",
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.num_cached_tokens,
            reasoning=self.reasoning,
            reasoning_tokens=self.num_thought,
            logprobs=tuple(self.logprobs),
            copied=tuple(self.copied),
            copied_tokens=self.num_copied,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
            timings=Timings(
                prefill_s=first - started, first_token_s=first - self.added_at, decode_s=end - first, total_s=end - self.added_at
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How an engine runs prompts: how many share the KV cache, in what order, and what stays cached.

    With one sequence, a prompt resumes at a breakpoint shared with the previous prompt, so it is evaluated in the same batches each time.
    With several, a prompt resumes at the exact token where it diverges from cached text, so near-ties may be decided differently.
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
    text_end: int = 0
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

    @property
    def is_last(self) -> bool:
        return self.completion is not None


class StreamEvent(Protocol):
    """An event of one prompt: a piece of text or thought, an error, or the end."""

    @property
    def text(self) -> str: ...
    @property
    def thought(self) -> str: ...
    @property
    def error(self) -> LocalragError | None: ...
    @property
    def is_last(self) -> bool: ...


E = TypeVar("E", bound=StreamEvent)


def last_event(
    events: Iterator[E],
    cancel: Callable[[], None],
    *,
    on_text: Callable[[str], None] | None = None,
    on_thought: Callable[[str], None] | None = None,
) -> E:
    """Run one prompt to its end and return its last event. Ctrl-C, even during a callback, calls `cancel`, which ends the answer early.

    Raises the prompt's error, or KeyboardInterrupt if Ctrl-C ended the run before it had an answer.
    """
    last, is_interrupted = None, False
    while True:
        try:
            for event in events:  # to their end: what was evaluated is kept on disk after the last one
                if event.error is not None:
                    raise event.error
                if event.is_last:
                    last = event  # before the callbacks: an interrupt there must not lose it
                if on_thought is not None and event.thought:
                    on_thought(event.thought)
                if on_text is not None and event.text:
                    on_text(event.text)
            break
        except KeyboardInterrupt:
            is_interrupted = True
            cancel()
    if last is not None:
        return last
    if is_interrupted:
        raise KeyboardInterrupt
    raise EngineError("A prompt ended without an answer.")
