"""The engine core: contexts, and the steps that run in them: schedule, decode, collect."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Self

from localrag.engine.backend import Backend
from localrag.engine.context import BATCH_TOKENS, Context, Share, num_sequence_ids
from localrag.engine.jobs import CHAT, Job, Policy, Sequence
from localrag.engine.kv_cache import HostSwap, slot_of
from localrag.engine.speed import Speed
from localrag.errors import EngineError, LocalragError, TemplateError, UsageError
from localrag.text.thinking import Thinking
from localrag.text.tokens import ChatTemplate, TokenCounter
from localrag.types import FinishReason, Piece, SamplingParams, Slot

if TYPE_CHECKING:
    from localrag.engine.memory import MemoryPlan
    from localrag.engine.prefix_disk_cache import PrefixDiskCache

MAX_STALL_S = 0.25
"""Maximum seconds for evaluating a piece of a prompt while answers are being read. Readers do not notice a token this late."""
MAX_KEPT_SLOWDOWN = 1.2
"""Maximum factor by which retained KV cells may slow down each token of running sequences."""
_MIN_PIECE_TOKENS = 16
_ROUND_CELLS = 512
_FURTHER_CELLS = 2048
"""KV cells for each further request of a server after the first full window. Most requests are short."""
FIRST_COUNT_ERROR = 0.1
"""Assumed relative error of estimated token counts until a larger one is observed."""


class EngineCore:
    """A model with its tokenizer and template, and the contexts in which its prompts run step by step.

    A context is created for the first prompt and only as large as needed, because its KV cache occupies memory at once. Use an engine from
    one thread; only `cancel` and `cancel_all` may be called from another.
    """

    def __init__(self, backend: Backend, *, prefix_cache: PrefixDiskCache | None = None) -> None:
        self.name = backend.name
        self.info = backend.info
        self.sha256 = backend.sha256
        self.tokenizer = backend.tokenizer
        self.counter = TokenCounter(backend.tokenizer)
        self.load_s = backend.load_s
        """Seconds spent so far on loading the model and creating contexts."""
        self.count_error = 0.0 if backend.counts_are_exact else FIRST_COUNT_ERROR
        """Largest relative error of the token counts seen so far; 0 where counts are exact."""
        self.prefix_cache = prefix_cache
        """Stores prefixes that took long to evaluate on disk; None stores nothing."""
        self.context: Context | None = None
        """The context created by `reserve`."""
        self.repeatable: Context | None = None
        """The context for repeatable answers (SamplingParams.repeatable). It runs one at a time, and is created for the first one."""
        self._backend = backend
        self._told_load_s = 0.0
        self._has_learned = False
        self._min_sequences = 1
        self._waiting: deque[Sequence] = deque()
        """Sequences waiting for the `repeatable` context, which may have to grow first."""
        self._held: list[Sequence] = []
        """Finished sequences whose cells `keep_for` may evict."""
        self._max_stall_s = MAX_STALL_S
        self._host_swap = HostSwap()
        self._seq_ids = count()
        self._cancelled: set[int] = set()

    @property
    def template(self) -> ChatTemplate:
        if self._backend.template is None:
            raise TemplateError(
                f"{self.info.path.name} holds no chat template, and localrag does not guess one.",
                hint="Give the model's own template with --chat-template FILE, or chat_template in models.toml.",
            )
        return self._backend.template

    def make_slot(self, n_ctx: int | None) -> Slot:
        """The window for a requested size in tokens, limited by the training context and by memory."""
        return self._backend.make_slot(n_ctx)

    @property
    def speed(self) -> Speed:
        """Speed of this model on this machine, as far as known. It is stored between runs and updated by every step."""
        return self._backend.speed

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """Planned memory of the model with its context; None before a context exists, and for the echo."""
        return self._backend.memory_plan

    @property
    def num_swapped_bytes(self) -> int:
        """Size in bytes of the states in the host swap."""
        return self._host_swap.num_bytes

    @property
    def can_generate(self) -> bool:
        """Whether the model has weights, not only a vocabulary."""
        return self._backend.can_generate

    def reserve(self, num_cells: int, *, num_sequences: int = 1, repeatable: bool = False) -> None:
        """Ensure that the context has at least `num_cells` cells; a smaller one is replaced. `repeatable` selects the
        context for repeatable answers.

        A context for one sequence resumes at a breakpoint shared by two prompts, so the same seed gives the same text (ExclusiveCells). A
        context for several resumes at the end of the longest common prefix (SharedCells). A larger context of the same kind takes over the
        cached text of the smaller one.
        """
        if not self.can_generate:
            raise EngineError(
                f"{self.info.path.name} has a vocabulary and no weights, so it cannot generate.",
                hint="Use --dry-run, or a full model.",
            )
        if repeatable:
            self._reserve_repeatable(num_cells)
            return
        num_sequences = max(num_sequences, self._min_sequences)
        state = None
        if self.context is not None:
            if self.context.serves(num_cells, num_sequences):
                return
            if not self.context.is_idle:
                raise EngineError("The context cannot grow while answers are running.")
            state = self.context.leave_for(num_sequences)
            self.context = None
        started = time.perf_counter()
        self.context = Context.make(
            self._backend.make_runner,
            num_cells,
            num_sequences,
            host_swap=self._host_swap,
            bytes_per_token=self.info.kv_bytes_per_token,
            state_bytes=self.info.state_bytes,
            prompt_room=self._prompt_room,
            most_kept=lambda: self.speed.depth_of(MAX_KEPT_SLOWDOWN),
        )
        if state is not None:
            self.context.cells.restore(state)
        self.load_s += time.perf_counter() - started

    def _reserve_repeatable(self, num_cells: int) -> None:
        """Like `reserve`, for repeatable answers. Raises UsageError if memory has no room for it next to the other context."""
        state = None
        if self.repeatable is not None:
            if self.repeatable.serves(num_cells, 1):
                return
            if not self.repeatable.is_idle:
                raise EngineError("The context cannot grow while an answer is running.")
            state = self.repeatable.leave_for(1)
            self.repeatable = None
        started = time.perf_counter()
        try:
            self.repeatable = Context.make_repeatable(self._backend.make_runner, num_cells)
        except EngineError as error:
            if self.context is None:
                raise
            raise UsageError(
                f"An answer with a seed needs {num_cells} KV cells of its own, and there is not enough free memory for them.",
                hint="Leave the seed out, ask for a shorter answer (max_tokens), or use a smaller window (--ctx).",
                **error.numbers,
            ) from error
        if state is not None:
            self.repeatable.cells.restore(state)
        self.load_s += time.perf_counter() - started

    def reserve_for(self, num_cells: Iterable[int], policy: Policy) -> None:
        """Reserve a context for prompts that need these numbers of cells under a policy: for as many of the largest as may run together
        and fit in memory, and at least for the largest one. The prompts of a council share a prefix, so there the largest one decides.
        """
        from localrag.engine.memory import Situation, plan  # noqa: PLC0415  # weight: a single prompt needs none of it

        needs = sorted(num_cells, reverse=True)[: 1 if policy.keeps == "shared" else policy.num_sequences]
        has = 0 if self.context is None else self.context.runner.num_cells
        num_ids = num_sequence_ids(policy.num_sequences, self.info.state_bytes)
        while len(needs) > 1 and has < sum(needs) and not plan(self.info, sum(needs), num_ids, situation=Situation(is_loaded=True)).fits:
            needs.pop()
        self.reserve(max(has, sum(needs)), num_sequences=policy.num_sequences)

    def has_room_for(self, num_cells: int) -> bool:
        """Whether a context with this many cells exists, or memory has room for one."""
        from localrag.engine.memory import Situation, plan  # noqa: PLC0415  # weight

        if self.context is not None and self.context.serves(num_cells, self._min_sequences):
            return True
        num_ids = num_sequence_ids(self._min_sequences, self.info.state_bytes)
        return plan(self.info, num_cells, num_ids, situation=Situation(is_loaded=True)).fits

    def share_contexts(self) -> None:
        """From now on, create every context for at least two sequences, so that side prompts do not evict a conversation's prompt."""
        self._min_sequences = CHAT.num_sequences

    def reserve_window(self, n_ctx: int, policy: Policy) -> None:
        """Reserve a context for prompts that arrive later: one full window of `n_ctx` cells, plus some cells for each further concurrent
        prompt, as far as memory allows while a second window stays free for repeatable answers.
        """
        from localrag.engine.memory import Situation, plan  # noqa: PLC0415  # weight

        further = (policy.num_sequences - 1) * min(n_ctx, _FURTHER_CELLS)
        num_ids = num_sequence_ids(policy.num_sequences, self.info.state_bytes)
        while further and not plan(self.info, 2 * n_ctx + further, num_ids, situation=Situation(is_loaded=True)).fits:
            further //= 2
        self.reserve(n_ctx + further, num_sequences=policy.num_sequences)

    def take_load_s(self) -> float:
        """Loading seconds not yet charged to an answer. They are charged to the caller."""
        seconds, self._told_load_s = self.load_s - self._told_load_s, self.load_s
        return seconds

    @contextmanager
    def whole_prompts(self, *, whole: bool = True) -> Iterator[None]:
        """Within the block, evaluate prompts as fast as possible, while running answers wait.

        If not `whole`, prompts are split into pieces between the tokens of running answers. This takes longer, but readers see no pause.
        """
        before, self._max_stall_s = self._max_stall_s, math.inf if whole else MAX_STALL_S
        try:
            yield
        finally:
            self._max_stall_s = before

    @contextmanager
    def sharing(self, prefix: list[int]) -> Iterator[None]:
        """Run prompts that begin with `prefix` in the block. The prefix is read from the disk cache, and stored there if it took long.

        No sequence may be running at the start. If one is still running at the end, nothing is stored.
        """
        cells = None if self.context is None else self.context.shared
        if self.prefix_cache is None or cells is None:
            yield
            return
        self.prefix_cache.recall_shared(cells, prefix)
        num_held = cells.num_held(prefix)
        yield
        if self.is_idle:
            self.prefix_cache.remember_shared(cells, prefix, prefill_s=self.speed.prefill_s(len(prefix) - num_held, num_held))

    @contextmanager
    def resuming(self, job: Job) -> Iterator[None]:
        """Run one prompt in the block. Its prefix up to a breakpoint is read from the disk cache, and stored there if it took long.

        Does nothing in a context for several sequences.
        """
        context = self.repeatable if job.sampling.repeatable else self.context
        cells = context.single if context is not None and self.is_idle else None
        if self.prefix_cache is None or cells is None:
            yield
            return
        self.prefix_cache.recall(cells, job.prompt_ids, job.breakpoints)
        yield
        if job.sequence is not None and job.sequence.is_finished and job.sequence.error is None:
            self.prefix_cache.remember(cells, prefill_s=job.sequence.completion().timings.prefill_s)

    def recall(self, prompt_ids: list[int], num_cells: int) -> None:
        """Restore the part of this prompt that an earlier process stored on disk, in a shared context of `num_cells` cells."""
        if self.prefix_cache is None or not self.can_generate:
            return
        self.reserve(num_cells)
        if self.context is not None and self.context.shared is not None:
            self.prefix_cache.recall_shared(self.context.shared, prompt_ids)

    def remember(self, prompt_ids: list[int]) -> None:
        """Store the cached part of this prompt on disk, for `recall`. Does nothing while a sequence is running."""
        shared = None if self.context is None else self.context.shared
        if prompt_ids and self.prefix_cache is not None and shared is not None and self.is_idle:
            self.prefix_cache.remember_shared(shared, prompt_ids, prefill_s=self.speed.prefill_s(len(prompt_ids), 0))

    def prefer(self, prompt_ids: Iterable[int]) -> int:
        """Mark the cached part of a prompt as just used, so that it is evicted last. Returns its number of tokens."""
        ids = list(prompt_ids)
        cells = None if self.context is None else self.context.shared
        if cells is None:
            return 0
        cells.touch(ids)
        return cells.num_held(ids)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Drop from the shared context everything evaluated within the block."""
        before = self._latest()
        try:
            yield
        finally:
            latest = self._latest()
            if latest is not None and latest != before and self.context is not None and self.context.shared is not None:
                self.context.shared.forget(latest[1])

    def _latest(self) -> tuple[int, int] | None:
        """The LRU time and id of the most recently used cached sequence; None if nothing is cached."""
        cells = None if self.context is None else self.context.shared
        if cells is None:
            return None
        return max(((cells.cache.last_used(each), each) for each in cells.kept), default=None)

    def _prompt_room(self, depth: int) -> int:
        """Number of prompt tokens, after `depth` others, that may be evaluated while running answers wait."""
        room = BATCH_TOKENS
        while room > _MIN_PIECE_TOKENS and self.speed.prefill_s(room, depth) > self._max_stall_s:
            room //= 2
        return room

    def add(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        deadline: float | None = None,
        breakpoints: tuple[int, ...] = (),
        text_end: int = 0,
        watched: tuple[int, ...] = (),
        thinking: Thinking | None = None,
    ) -> Sequence:
        """Queue a prompt in the reserved context.

        `breakpoints` are ascending positions within the prompt. In a context for one sequence, two prompts with a common prefix share its
        evaluation up to their last common breakpoint. `text_end` is the position of the markup after the last text: in a context for
        several sequences, a model with recurrent layers can resume there too.

        A `repeatable` prompt needs no reserved context: such prompts run one at a time in a context of their own that grows as needed; if
        memory has no room for it, the sequence ends with an error.

        `deadline` is in seconds on the clock of time.perf_counter. An answer ends with `finish_reason` "time" when its next token is
        expected after it. A prompt is evaluated whole and gives at least one token, unless that would take twice the time available when it
        was added: then it ends without text. A prompt whose deadline has passed is not started.

        The sequence stores the logits of the `watched` tokens after the prompt. `thinking` describes the model's reasoning before the
        answer and its token limit, which is added to `max_tokens`; without it, all output is the answer.

        Raises EngineError if the prompt cannot fit the context, UsageError if a JSON schema is not supported.
        """
        if not sampling.repeatable:
            self._running().runner.check(sampling)
        if list(breakpoints) != sorted({position for position in breakpoints if 0 < position < len(prompt_ids)}):
            raise EngineError(f"The breakpoints of a prompt of {len(prompt_ids)} tokens must be ascending positions within it.")
        sequence = Sequence(
            next(self._seq_ids),
            prompt_ids,
            sampling,
            deadline=deadline,
            breakpoints=breakpoints,
            text_end=text_end,
            watched=watched,
            thinking=thinking,
        )
        if sampling.repeatable:
            for context in self._contexts:
                context.runner.check(sampling)
            self._waiting.append(sequence)
        else:
            self._running().add(sequence)
        return sequence

    @property
    def is_idle(self) -> bool:
        return not self._waiting and all(context.is_idle for context in self._contexts)

    @property
    def _contexts(self) -> list[Context]:
        return [context for context in (self.context, self.repeatable) if context is not None]

    def step(self) -> list[Piece]:
        """Evaluate one batch in each context, and sample a token for each sequence whose pending tokens are complete."""
        for context in self._contexts:
            context.runner.resume()  # before checking for cancelled sequences, so that a later cancel stops the batch
        pieces = self._drop_cancelled() + self._begin_repeatable()
        scheduled = [(context, context.scheduler.schedule()) for context in self._contexts]
        pieces += self._drop_late([share for _, shares in scheduled for share in shares])
        for context, shares in scheduled:
            pieces += self._evaluate(context, [share for share in shares if not share.sequence.is_finished])
        return pieces

    def _begin_repeatable(self) -> list[Piece]:
        """Start the next waiting sequence once the previous one has ended. Without enough memory, it ends with the error."""
        pieces = []
        while self._waiting and (self.repeatable is None or self.repeatable.is_idle):
            sequence = self._waiting[0]
            try:
                self.reserve(-(-sequence.num_reserved // _ROUND_CELLS) * _ROUND_CELLS, repeatable=True)
                assert self.repeatable is not None
                self.repeatable.runner.check(sequence.sampling)
                self.repeatable.add(sequence)
            except LocalragError as error:
                sequence.error = error
                pieces.append(self.end(sequence, "error"))
            else:
                self._waiting.popleft()
        return pieces

    def _evaluate(self, context: Context, shares: list[Share]) -> list[Piece]:
        if not shares:
            return []
        started = time.perf_counter()
        if not context.decode(shares):
            return self._drop_cancelled()
        pieces = self._collect(shares, context)
        self._learn(shares, time.perf_counter() - started)
        return pieces

    def _collect(self, shares: list[Share], context: Context) -> list[Piece]:
        """Sample a token for each share that completes its sequence's pending tokens."""
        pieces, index = [], -1
        for share in shares:
            index += len(share.token_ids)
            if not share.samples:
                continue
            try:
                piece = context.sample(share.sequence, index, self.tokenizer)
            except EngineError as error:  # the other sequences continue
                share.sequence.error = error
                piece = self.end(share.sequence, "error")
            else:
                if share.sequence.is_finished:
                    self._release(share.sequence)
            pieces.append(piece)
        return pieces

    def _learn(self, shares: list[Share], seconds: float) -> None:
        """Update the speed from the duration of a step, if it ran a single sequence."""
        if len(shares) == 1:
            sequence, num_tokens = shares[0].sequence, len(shares[0].token_ids)
            depth = sequence.num_evaluated - num_tokens
            if depth < len(sequence.prompt_ids):
                self.speed.observe_prefill(num_tokens, depth, seconds)
            elif num_tokens == 1:
                self.speed.observe_decode(depth, seconds)
            self._has_learned = True
        self._keep_learned()

    def _keep_learned(self) -> None:
        """Save the measured speed once the engine is idle."""
        if self._has_learned and self.is_idle:
            self._has_learned = False
            self._backend.save_speed()

    def cancel(self, running: Sequence | Job) -> None:
        """Cancel a sequence, or the sequence of a job, from any thread. It keeps its text so far."""
        sequence = running.sequence if isinstance(running, Job) else running
        if sequence is None or sequence.is_finished:
            return
        self._cancelled.add(sequence.seq_id)
        context = self.repeatable if sequence.sampling.repeatable else self.context
        if context is not None and sequence not in self._waiting:  # a waiting sequence has no batch to stop
            context.runner.cancel()

    def cancel_all(self) -> None:
        """Cancel every sequence. Safe to call from a signal handler."""
        for sequence in self._unfinished():
            self.cancel(sequence)

    def abandon(self, sequences: Iterable[Sequence]) -> None:
        """Cancel these sequences and release their cells. Errors of a broken engine are ignored."""
        active = [sequence for sequence in sequences if not sequence.is_finished]
        for sequence in active:
            self.cancel(sequence)
        if active:
            with suppress(EngineError):
                self.step()

    def forget(self) -> None:
        """Clear the KV cache and the host swap. No sequence may be running."""
        if not self.is_idle:
            raise EngineError("The cache cannot be cleared while answers are running.")
        for context in self._contexts:
            context.cells.clear()

    def hold(self, finished: Iterable[Sequence]) -> None:
        """Let `keep_for` decide which cells of these finished sequences to keep."""
        self._held += finished

    def keep_for(self, prompts: Collection[list[int]]) -> list[Sequence]:
        """Evict from the cells of held sequences everything except prefixes of these prompts.

        Other cells would slow down every step. Returns the sequences that still have cells. A context for one sequence is not changed.
        """
        cells = None if self.context is None else self.context.shared
        self._held = [] if cells is None else [sequence for sequence in self._held if cells.keep_for(prompts, sequence)]
        return self._held

    def _drop_cancelled(self) -> list[Piece]:
        pieces = [self.end(sequence, "cancelled") for sequence in self._unfinished() if sequence.seq_id in self._cancelled]
        self._cancelled.difference_update([piece.seq_id for piece in pieces])  # another thread may be adding ids
        return pieces

    def _drop_late(self, shares: list[Share]) -> list[Piece]:
        """End sequences that would miss their deadlines in a batch of these shares, and waiting ones whose deadlines have passed."""
        timed = [sequence for sequence in self._unfinished() if sequence.deadline is not None]
        if not timed:
            return []
        now = time.perf_counter()
        ends_at = now + sum(self._expected_s(share) for share in shares)
        return [self.end(sequence, "time") for sequence in timed if sequence.is_late(now, ends_at)]

    def _expected_s(self, share: Share) -> float:
        sequence, num_tokens = share.sequence, len(share.token_ids)
        expect = self.speed.decode_s if sequence.completion_ids and num_tokens == 1 else self.speed.prefill_s
        return expect(num_tokens, sequence.num_evaluated)

    def end(self, sequence: Sequence, reason: FinishReason) -> Piece:
        """End a sequence immediately, with the text that it has."""
        piece = Piece(sequence.seq_id, None, sequence.finish(reason), reason, sequence.take_thought())
        self._release(sequence)
        self._keep_learned()
        return piece

    def _release(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif (context := self.repeatable if sequence.sampling.repeatable else self.context) is not None:
            if not self._backend.counts_are_exact and sequence.num_evaluated:
                self.count_error = max(self.count_error, context.runner.num_tokens(slot_of(sequence)) / sequence.num_evaluated - 1.0)
            context.release(sequence)
        self._cancelled.discard(sequence.seq_id)

    def _unfinished(self) -> list[Sequence]:
        return [*(sequence for context in self._contexts for sequence in context.scheduler.unfinished), *self._waiting]

    def _running(self) -> Context:
        if self.context is None:
            raise EngineError("The context was not reserved before a prompt was added.")
        return self.context

    def close(self) -> None:
        for context in self._contexts:
            context.runner.close()
        self.context = self.repeatable = None
        self._host_swap.clear()
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
