"""A prompt being run by the engine, with the answer written so far."""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass, field

from localrag.errors import LocalragError
from localrag.text.thinking import Splitter, Thinking
from localrag.types import Completion, FinishReason, SamplingParams, Timings, TokenLogprob


@dataclass(slots=True, eq=False)
class Sequence:
    """The ids of a prompt and its completion, and how many of them are in the KV cache. Everything else is derived.

    For a reasoning model, `text` is the answer and `reasoning` the text before it. If the reasoning reaches its token limit, or ends
    without an answer, its closing tokens are appended as if they had been sampled.

    `breakpoints` are ascending positions in the prompt at which a batch must end (see ExclusiveCells). The logits of the `watched` tokens
    after the prompt are stored.
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
    watched: tuple[int, ...] = ()
    watched_logits: tuple[float, ...] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    thinking: Thinking | None = None
    reasoning: str = ""
    num_thought: int = 0
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
        most = self.thinking.max_tokens - len(self.thinking.end_ids)
        self.num_thought += self.num_thought < most
        if self._splitter.is_thinking and self.num_thought >= most:
            self._end_thoughts()

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
            timings=Timings(
                prefill_s=first - started, first_token_s=first - self.added_at, decode_s=end - first, total_s=end - self.added_at
            ),
        )
