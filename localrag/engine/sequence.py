"""One prompt on its way through the engine."""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass, field

from localrag.decoding import Completion, FinishReason, SamplingParams, Timings
from localrag.errors import EngineError


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt ids, what was sampled so far, and how much of both the KV cache holds. Everything else is derived.

    `borders` are positions in the prompt, in order, at which a batch ends in any case (see single.py). Of the `watched` tokens, the
    logits behind the prompt are kept.
    """

    seq_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    completion_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_evaluated: int = 0
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    text: str = ""
    deadline: float | None = None
    borders: tuple[int, ...] = ()
    watched: tuple[int, ...] = ()
    watched_logits: tuple[float, ...] = ()
    slot: int | None = None
    added_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _held: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_reserved(self) -> int:
        """Cells of the KV cache that it can come to need. The last sampled token is never evaluated."""
        return len(self.prompt_ids) + self.sampling.max_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def latest_end(self) -> float | None:
        """When, on the clock of time.perf_counter, it must have ended; None for any time.

        An answer ends at its deadline. A prompt is worth nothing in parts, so it may take as long again.
        """
        if self.deadline is None or self.completion_ids:
            return self.deadline
        return self.deadline + max(0.0, self.deadline - self.added_at)

    @property
    def is_answering(self) -> bool:
        """Whether its prompt is evaluated."""
        return self.num_evaluated >= len(self.prompt_ids)

    def pending(self, most: int) -> list[int]:
        """The next tokens to evaluate, at most so many: of the prompt up to its next border, or what was sampled since."""
        num_prompt = len(self.prompt_ids)
        if self.is_answering:
            return self.completion_ids[self.num_evaluated - num_prompt :][:most]
        end = next((border for border in self.borders if border > self.num_evaluated), num_prompt)
        return self.prompt_ids[self.num_evaluated : min(end, self.num_evaluated + most)]

    def append(self, token_id: int, piece: bytes, *, is_end: bool) -> str:
        """Take in a sampled token; returns the text that is now certain: whole characters, and nothing that may begin a stop string."""
        now = time.perf_counter()
        self.first_token_at = self.first_token_at or now
        self.completion_ids.append(token_id)
        if not is_end:
            self._held += self._decoder.decode(piece)
        if is_end:
            return self.finish("stop")
        stop = self._stop_at()
        if stop is not None:
            self._held = self._held[:stop]
            self._decoder.reset()
            return self.finish("stop")
        if len(self.completion_ids) >= self.sampling.max_tokens:
            return self.finish("length")
        return self._release(len(self._held) - self._may_begin_stop())

    def finish(self, reason: FinishReason) -> str:
        """End here; returns the text that was held back. Of a character that was cut off, nothing is shown."""
        self.finish_reason = reason
        self.finished_at = time.perf_counter()
        if reason == "stop":
            self._held += self._decoder.decode(b"", final=True)
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self.text += text
        return text

    def _stop_at(self) -> int | None:
        found = [at for stop in self.sampling.stop if (at := self._held.find(stop)) >= 0]
        return min(found, default=None)

    def _may_begin_stop(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        longest = 0
        for stop in self.sampling.stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def completion(self) -> Completion:
        """The finished sequence as a Completion; its times count from when it was added."""
        started = self.started_at or self.added_at
        first = self.first_token_at or self.finished_at or started
        end = self.finished_at or first
        return Completion(
            text=self.text,
            completion_ids=tuple(self.completion_ids),
            finish_reason=self.finish_reason or "cancelled",
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.num_cached_tokens,
            timings=Timings(
                prefill_s=first - started, first_token_s=first - self.added_at, decode_s=end - first, total_s=end - self.added_at
            ),
        )
