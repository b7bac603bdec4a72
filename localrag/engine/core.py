"""One step of an engine: schedule, decode, collect; and the contexts in which it happens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Self

from localrag.engine.backend import Backend
from localrag.engine.context import BATCH_TOKENS, Context, Share, slot_of
from localrag.engine.kv_cache import HostSwap
from localrag.engine.policy import CHAT, Job, Policy
from localrag.engine.sequence import Sequence
from localrag.engine.speed import Speed
from localrag.errors import EngineError, LocalragError, TemplateError, UsageError
from localrag.text.thinking import Thinking
from localrag.text.tokens import ChatTemplate, TokenCounter
from localrag.types import FinishReason, Piece, SamplingParams, Slot

if TYPE_CHECKING:
    from localrag.engine.memory import MemoryPlan
    from localrag.engine.prefix_disk_cache import PrefixDiskCache

MAX_STALL_S = 0.25
"""How long a piece of a prompt may take beside running answers: readers do not notice that one token comes later."""
MAX_KEPT_SLOWDOWN = 1.2
"""How many times as slow what is kept in the cells for later may make a token of those that run."""
_MIN_PIECE_TOKENS = 16
_ROUND_CELLS = 512
_FURTHER_CELLS = 2048
"""Cells for each further request of a server after the first whole window: most requests are short."""
FIRST_COUNT_ERROR = 0.1
"""What is taken to be the error of counts that are estimates, before more was seen."""


class EngineCore:
    """A model with its tokenizer and template, and the contexts in which its prompts run, step by step.

    A context is made when the first prompt is there, and just as large as needed, because a KV cache is memory that is written at once.
    Used by one thread; only `cancel` and `cancel_all` may come from another.
    """

    def __init__(self, backend: Backend, *, prefix_cache: PrefixDiskCache | None = None) -> None:
        self.name = backend.name
        self.info = backend.info
        self.sha256 = backend.sha256
        self.tokenizer = backend.tokenizer
        self.counter = TokenCounter(backend.tokenizer)
        self.load_s = backend.load_s
        """Seconds spent so far on loading the model and making its contexts."""
        self.count_error = 0.0 if backend.counts_are_exact else FIRST_COUNT_ERROR
        """Largest relative error of the token counts seen so far; 0 where counts are exact."""
        self.prefix_cache = prefix_cache
        """Keeps on disk what took long to evaluate; None keeps nothing."""
        self.context: Context | None = None
        """The context of `reserve`."""
        self.repeatable: Context | None = None
        """The context for answers that must repeat (SamplingParams.repeatable), one at a time; made when the first one is asked for."""
        self._backend = backend
        self._told_load_s = 0.0
        self._has_learned = False
        self._min_sequences = 1
        self._waiting: deque[Sequence] = deque()
        """Sequences for `repeatable`, which may have to grow before it can take one."""
        self._held: list[Sequence] = []
        """Finished sequences that `keep_for` decides about."""
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
        """The window for a requested size in tokens: capped by the training context and by memory."""
        return self._backend.make_slot(n_ctx)

    @property
    def speed(self) -> Speed:
        """The speed of this model on this machine, as far as it is known: kept from earlier runs, refreshed by every step."""
        return self._backend.speed

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """What the model with its context takes of the machine, as it was planned; None before there is one, and for the echo."""
        return self._backend.memory_plan

    @property
    def num_swapped_bytes(self) -> int:
        """Memory of the states that were swapped out of the KV cache."""
        return self._host_swap.num_bytes

    @property
    def can_generate(self) -> bool:
        """Whether there are weights, and not a vocabulary alone."""
        return self._backend.can_generate

    def reserve(self, num_cells: int, *, num_sequences: int = 1, repeatable: bool = False) -> None:
        """Have a context of at least so many cells; a smaller one is replaced. With `repeatable`, that is the one for repeatable answers.

        One for a single sequence resumes at a breakpoint that two prompts share, so the same seed gives the same text again
        (ExclusiveCells); one for several resumes at the longest common prefix (SharedCells). A larger context of the same kind goes
        on with what the smaller one held.
        """
        if not self.can_generate:
            raise EngineError(
                f"{self.info.path.name} holds a vocabulary and no weights; it cannot generate.", hint="Use --dry-run, or a whole model."
            )
        if repeatable:
            self._reserve_repeatable(num_cells)
            return
        num_sequences = max(num_sequences, self._min_sequences)
        held = None
        if self.context is not None:
            if self.context.serves(num_cells, num_sequences):
                return
            if not self.context.is_idle:
                raise EngineError("The context cannot grow while answers are running.")
            held = self.context.leave_for(num_sequences)
            self.context = None
        started = time.perf_counter()
        self.context = Context.make(
            self._backend.make_runner,
            num_cells,
            num_sequences,
            shelf=self._host_swap,
            bytes_per_token=self.info.kv_bytes_per_token,
            prompt_room=self._prompt_room,
            most_kept=lambda: self.speed.depth_of(MAX_KEPT_SLOWDOWN),
        )
        if held is not None:
            self.context.cells.restore(held)
        self.load_s += time.perf_counter() - started

    def _reserve_repeatable(self, num_cells: int) -> None:
        """UsageError where memory has no room for it beside the other context."""
        held = None
        if self.repeatable is not None:
            if self.repeatable.serves(num_cells, 1):
                return
            if not self.repeatable.is_idle:
                raise EngineError("The context cannot grow while an answer is running.")
            held = self.repeatable.leave_for(1)
            self.repeatable = None
        started = time.perf_counter()
        try:
            self.repeatable = Context.make_repeatable(self._backend.make_runner, num_cells)
        except EngineError as error:
            if self.context is None:
                raise
            raise UsageError(
                f"An answer with a seed is computed in {num_cells} KV cells of its own, and the free memory does not hold them.",
                hint="Leave the seed out, ask for a shorter answer (max_tokens), or use a smaller window (--ctx).",
                **error.numbers,
            ) from error
        if held is not None:
            self.repeatable.cells.restore(held)
        self.load_s += time.perf_counter() - started

    def reserve_for(self, num_cells: Iterable[int], policy: Policy) -> None:
        """Have a context for prompts that need this many cells each, under a policy: for as many of the largest as run together and fit
        into memory, and in any case for the largest one. Prompts of a council share what they begin with, so there the largest decides.
        """
        from localrag.engine.memory import Situation, plan  # noqa: PLC0415  # weight: a single prompt needs none of it

        needs = sorted(num_cells, reverse=True)[: 1 if policy.keeps == "shared" else policy.num_sequences]
        has = 0 if self.context is None else self.context.runner.num_cells
        while len(needs) > 1 and has < sum(needs) and not plan(self.info, sum(needs), len(needs), situation=Situation(is_loaded=True)).fits:
            needs.pop()
        self.reserve(max(has, sum(needs)), num_sequences=policy.num_sequences)

    def has_room_for(self, num_cells: int) -> bool:
        """Whether a context of this many cells is there, or memory has room for one."""
        from localrag.engine.memory import Situation, plan  # noqa: PLC0415  # weight

        if self.context is not None and self.context.serves(num_cells, self._min_sequences):
            return True
        return plan(self.info, num_cells, self._min_sequences, situation=Situation(is_loaded=True)).fits

    def share_contexts(self) -> None:
        """From now on, make every context for at least two sequences: a conversation's prompt then stays while side prompts run."""
        self._min_sequences = CHAT.num_sequences

    def reserve_window(self, n_ctx: int, policy: Policy) -> None:
        """Have a context for prompts that arrive later: a whole window of `n_ctx` cells, and some for each further prompt at once, as far
        as memory holds them if another window stays free for repeatable answers.
        """
        from localrag.engine.memory import Situation, plan  # noqa: PLC0415  # weight

        further = (policy.num_sequences - 1) * min(n_ctx, _FURTHER_CELLS)
        while further and not plan(self.info, 2 * n_ctx + further, policy.num_sequences, situation=Situation(is_loaded=True)).fits:
            further //= 2
        self.reserve(n_ctx + further, num_sequences=policy.num_sequences)

    def take_load_s(self) -> float:
        """Seconds of loading that no answer was charged with yet; the one that asks is."""
        seconds, self._told_load_s = self.load_s - self._told_load_s, self.load_s
        return seconds

    @contextmanager
    def whole_prompts(self, *, whole: bool = True) -> Iterator[None]:
        """Within the block, evaluate prompts as fast as possible while running answers wait.

        Otherwise (not `whole`) a prompt is split next to running answers. That takes longer in all, but a reader does not notice it.
        """
        before, self._max_stall_s = self._max_stall_s, math.inf if whole else MAX_STALL_S
        try:
            yield
        finally:
            self._max_stall_s = before

    @contextmanager
    def sharing(self, prefix: list[int]) -> Iterator[None]:
        """Within the block, prompts that begin with `prefix` run: it is read from disk if it is there, and kept if it took long.

        Nothing may run before, and nothing is kept if something still runs after.
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
        """Within the block, one prompt runs: what it begins with is read from disk up to a breakpoint, and kept if it took long.

        Contexts for several sequences are left alone.
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
        """Have a shared context of `num_cells` hold what an earlier process kept on disk of this prompt."""
        if self.prefix_cache is None or not self.can_generate:
            return
        self.reserve(num_cells)
        if self.context is not None and self.context.shared is not None:
            self.prefix_cache.recall_shared(self.context.shared, prompt_ids)

    def remember(self, prompt_ids: list[int]) -> None:
        """Keep on disk what the shared context holds of this prompt, for `recall`. Nothing is kept while something runs."""
        shared = None if self.context is None else self.context.shared
        if prompt_ids and self.prefix_cache is not None and shared is not None and self.is_idle:
            self.prefix_cache.remember_shared(shared, prompt_ids, prefill_s=self.speed.prefill_s(len(prompt_ids), 0))

    def prefer(self, prompt_ids: Iterable[int]) -> int:
        """Mark what the shared context holds of a prompt as just used, so that it is evicted last. Returns the number of its tokens."""
        ids = list(prompt_ids)
        cells = None if self.context is None else self.context.shared
        if cells is None:
            return 0
        cells.touch(ids)
        return cells.num_held(ids)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Drop from the shared context what is evaluated within the block."""
        before = self._latest()
        try:
            yield
        finally:
            latest = self._latest()
            if latest is not None and latest != before and self.context is not None and self.context.shared is not None:
                self.context.shared.forget(latest[1])

    def _latest(self) -> tuple[int, int] | None:
        """When the sequence that was used last was used, on the clock of the cache, and its id; None where nothing is shared."""
        cells = None if self.context is None else self.context.shared
        if cells is None:
            return None
        return max(((cells.cache.last_used(each), each) for each in cells.kept), default=None)

    def _prompt_room(self, depth: int) -> int:
        """Tokens of a prompt, behind `depth` others, for which running answers may wait."""
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
        watched: tuple[int, ...] = (),
        thinking: Thinking | None = None,
    ) -> Sequence:
        """Queue a prompt. The context must have been reserved; EngineError if the prompt could never fit it.

        In a context for one sequence, prompts that share a beginning share its evaluation up to their last common one of `breakpoints`:
        positions within the prompt, in order. What is `repeatable` needs no context reserved: it is answered in one of its own, which is
        as large as it has to be, one after another. It ends with an error where memory has no room for that.
        `deadline` is on the clock of time.perf_counter, in seconds. An answer ends with `finish_reason` "time" when its next token
        is expected after it. A prompt is evaluated whole and gives at least one token, unless it would take twice the time that
        there was when it was added: then the sequence ends with no text. One whose deadline has passed is not begun.
        `watched` are tokens whose logits behind the prompt the sequence keeps. `thinking` says how the model thinks before it answers,
        and for how many tokens, which come on top of `max_tokens`; without it, all that it writes is the answer.
        UsageError for a JSON schema that is not supported, or an engine that cannot keep to one.
        """
        if not sampling.repeatable:
            self._running().runner.check(sampling)
        if list(breakpoints) != sorted({border for border in breakpoints if 0 < border < len(prompt_ids)}):
            raise EngineError(f"The borders of a prompt of {len(prompt_ids)} tokens are not positions within it, in order.")
        sequence = Sequence(
            next(self._seq_ids), prompt_ids, sampling, deadline=deadline, breakpoints=breakpoints, watched=watched, thinking=thinking
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
        """Evaluate one batch of all running sequences, and one of the repeatable one; sample where a prompt or a token is complete."""
        for context in self._contexts:
            context.runner.resume()  # before it is seen who was cancelled: who is cancelled after that stops the batch
        pieces = self._drop_cancelled() + self._begin_repeatable()
        scheduled = [(context, context.scheduler.schedule()) for context in self._contexts]
        pieces += self._drop_late([share for _, shares in scheduled for share in shares])
        for context, shares in scheduled:
            pieces += self._evaluate(context, [share for share in shares if not share.sequence.is_finished])
        return pieces

    def _begin_repeatable(self) -> list[Piece]:
        """Have the next one that waits begin, once the one before has ended. One for which there is no memory ends with the error."""
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
        """Sample for each share that ends its sequence's pending tokens."""
        pieces, index = [], -1
        for share in shares:
            index += len(share.token_ids)
            if not share.samples:
                continue
            try:
                piece = context.sample(share.sequence, index, self.tokenizer)
            except EngineError as error:  # the others go on
                share.sequence.error = error
                piece = self.end(share.sequence, "error")
            else:
                if share.sequence.is_finished:
                    self._release(share.sequence)
            pieces.append(piece)
        return pieces

    def _learn(self, shares: list[Share], seconds: float) -> None:
        """What the step took refreshes the speed, if a single sequence had it to itself."""
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
        """Once nothing runs any more, what was learned is kept."""
        if self._has_learned and self.is_idle:
            self._has_learned = False
            self._backend.save_speed()

    def cancel(self, running: Sequence | Job) -> None:
        """End a sequence, or the job that it belongs to, from any thread; what it had written stays in it."""
        sequence = running.sequence if isinstance(running, Job) else running
        if sequence is None or sequence.is_finished:
            return
        self._cancelled.add(sequence.seq_id)
        context = self.repeatable if sequence.sampling.repeatable else self.context
        if context is not None and sequence not in self._waiting:  # nothing is evaluated for one that waits
            context.runner.cancel()

    def cancel_all(self) -> None:
        """End every sequence at once; fit for a signal handler."""
        for sequence in self._unfinished():
            self.cancel(sequence)

    def abandon(self, sequences: Iterable[Sequence]) -> None:
        """End these at once, so that nothing of them goes on; an engine that broke was what ended them, and is not asked again."""
        left = [sequence for sequence in sequences if not sequence.is_finished]
        for sequence in left:
            self.cancel(sequence)
        if left:
            with suppress(EngineError):
                self.step()

    def forget(self) -> None:
        """Hold nothing of what was evaluated before. Nothing may run."""
        if not self.is_idle:
            raise EngineError("What answers are made from cannot be forgotten while they run.")
        for context in self._contexts:
            context.cells.clear()

    def hold(self, finished: Iterable[Sequence]) -> None:
        """Leave it to `keep_for` what stays of these finished sequences."""
        self._held += finished

    def keep_for(self, prompts: Collection[list[int]]) -> list[Sequence]:
        """Of what the sequences of `hold` left in the KV cache, keep only what one of these prompts begins with.

        The rest would slow every step of the others. Returns the sequences that still hold something; a context for one sequence is left
        alone.
        """
        cells = None if self.context is None else self.context.shared
        self._held = [] if cells is None else [sequence for sequence in self._held if cells.keep_for(prompts, sequence)]
        return self._held

    def _drop_cancelled(self) -> list[Piece]:
        pieces = [self.end(sequence, "cancelled") for sequence in self._unfinished() if sequence.seq_id in self._cancelled]
        self._cancelled.difference_update([piece.seq_id for piece in pieces])  # another thread may be adding to it
        return pieces

    def _drop_late(self, shares: list[Share]) -> list[Piece]:
        """End the sequences that would be late after a batch of these shares, and those that have waited past their deadlines."""
        timed = [sequence for sequence in self._unfinished() if sequence.deadline is not None]
        if not timed:
            return []
        now = time.perf_counter()
        ends_at = now + sum(self._expected_s(share) for share in shares)
        return [self.end(sequence, "time") for sequence in timed if sequence.is_late(now, ends_at)]

    def _expected_s(self, share: Share) -> float:
        sequence, num_tokens = share.sequence, len(share.token_ids)
        expect = self.speed.decode_s if sequence.completion_ids else self.speed.prefill_s
        return expect(num_tokens, sequence.num_evaluated)

    def end(self, sequence: Sequence, reason: FinishReason) -> Piece:
        """End a sequence here and now, with what it has written."""
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
