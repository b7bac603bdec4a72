"""The engine loop: schedule, decode, collect."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Self

from localrag.engine.backend import MakeRunner
from localrag.engine.context import BATCH_TOKENS, Context, slot_of
from localrag.engine.kv_cache import HostSwap
from localrag.engine.scheduler import Share
from localrag.engine.sequence import Sequence
from localrag.engine.speed import Speed
from localrag.errors import EngineError, LocalragError, TemplateError, UsageError
from localrag.text.thinking import Thinking
from localrag.text.tokens import ChatTemplate, TokenCounter, Tokenizer
from localrag.types import Completion, FinishReason, ModelInfo, Piece, SamplingParams, Slot

if TYPE_CHECKING:
    from localrag.engine.memory import MemoryPlan
    from localrag.engine.prefix_disk_cache import PrefixDiskCache

MAX_STALL_S = 0.25
"""How long a piece of a prompt may take beside running answers: readers do not notice that one token comes later."""
MAX_KEPT_SLOWDOWN = 1.2
"""How many times as slow what is kept in the cells for later may make a token of those that run."""
_MIN_PIECE_TOKENS = 16
_ROUND_CELLS = 512
FIRST_COUNT_ERROR = 0.1
"""What is taken to be the error of counts that are estimates, before more was seen."""
_MEASURED_PROMPTS, _MEASURED_ANSWER = (32, 96, 96, 96), 9
_MEASURED_TEXT = "The quick brown fox jumps over the lazy dog, and the dog goes on sleeping in the warm sun. " * 8


class Engine:
    """A model with its tokenizer and template, and the loop that runs many sequences in one context.

    `make_runner(num_cells, num_sequences)` makes the context when the first prompt is there, and just as large as it needs:
    the KV cache is memory that is written at once. Used by one thread; only `cancel` may come from another.
    """

    def __init__(
        self,
        *,
        name: str,
        info: ModelInfo,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        make_slot: Callable[[int | None], Slot],
        make_runner: MakeRunner | None,
        make_speed: Callable[[], Speed] = Speed,
        keep_speed: Callable[[Speed], None] = lambda _: None,
        memory_plan: Callable[[], MemoryPlan | None] = lambda: None,
        close: Callable[[], None] = lambda: None,
        load_s: float = 0.0,
        counts_are_exact: bool = True,
    ) -> None:
        self.name = name
        self.info = info
        self.tokenizer = tokenizer
        self.counter = TokenCounter(tokenizer)
        self.make_slot = make_slot
        self.load_s = load_s
        """Seconds that the model and its contexts took to load so far."""
        self._told_load_s = 0.0
        self.sha256: str | None = None
        """Of the model's file, where the catalogue knows it."""
        self.count_error = 0.0 if counts_are_exact else FIRST_COUNT_ERROR
        """The greatest share by which this engine evaluated more tokens than its tokenizer counted; 0 where counts are exact."""
        self._counts_are_exact = counts_are_exact
        self._template = template
        self._make_runner = make_runner
        self._make_speed = make_speed
        self._keep_speed = keep_speed
        self._memory_plan = memory_plan
        self._has_learned = False
        self._close = close
        self.context: Context | None = None
        """What `reserve` made."""
        self.repeatable: Context | None = None
        """For one sequence at a time whose text must repeat (SamplingParams.repeatable): beside `context`, as soon as one needs it."""
        self._waiting: deque[Sequence] = deque()
        """Sequences for `repeatable`, which may have to grow before it can take one."""
        self.min_sequences = 1
        """Every context is made for so many sequences at least. From 2 on a prompt goes on from the very token at which it parts from
        what was evaluated before, answers included: faster in a conversation, and numerically near ties can fall otherwise."""
        self._max_stall_s = MAX_STALL_S
        self.keeper: PrefixDiskCache | None = None
        """Keeps on disk what took long to evaluate; None for nothing."""
        self._shelf = HostSwap()
        self._seq_ids = count()
        self._cancelled: set[int] = set()

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            raise TemplateError(
                f"{self.info.path.name} holds no chat template, and localrag does not guess one.",
                hint="Give the model's own template with --chat-template FILE, or chat_template in models.toml.",
            )
        return self._template

    @cached_property
    def speed(self) -> Speed:
        """How fast it is here, as far as that is known: kept from earlier runs, refreshed by every step (see engine/speed.py)."""
        return self._make_speed()

    def measure_speed(self) -> None:
        """Have a speed to plan with: a short prompt and answer are timed, in about a second, if it is not known yet.

        Nothing is done while answers run: they tell it. EngineError for a file without weights.
        """
        ids = self.tokenizer.encode(_MEASURED_TEXT)
        for num_tokens in _MEASURED_PROMPTS:  # the first one warms it up
            if self.speed.is_known or not self.is_idle:
                return
            self.reserve(max(_MEASURED_PROMPTS) + _MEASURED_ANSWER)
            if self.generate(ids[:num_tokens], SamplingParams(max_tokens=_MEASURED_ANSWER)).finish_reason == "cancelled":
                raise KeyboardInterrupt

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """What the model with its context takes of the machine, as it was planned; None before there is one, and for the echo."""
        return self._memory_plan()

    @property
    def num_shelved_bytes(self) -> int:
        """Memory that states take outside of the context (see engine/kv_cache.py)."""
        return self._shelf.num_bytes

    @property
    def can_generate(self) -> bool:
        """Whether there are weights, and not a vocabulary alone."""
        return self._make_runner is not None

    def reserve(self, num_cells: int, *, num_sequences: int = 1, repeatable: bool = False) -> None:
        """Have a context of at least so many cells; a smaller one is replaced. With `repeatable`, that is the one for repeatable answers.

        One for a single sequence resumes at a breakpoint that two prompts share, so the same seed gives the same text again
        (ExclusiveCells); one for several resumes at the longest common prefix (SharedCells). A larger context of the same kind goes
        on with what the smaller one held.
        """
        make_runner = self._runner_maker()
        if repeatable:
            self._reserve_repeatable(make_runner, num_cells)
            return
        num_sequences = max(num_sequences, self.min_sequences)
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
            make_runner,
            num_cells,
            num_sequences,
            shelf=self._shelf,
            bytes_per_token=self.info.kv_bytes_per_token,
            prompt_room=self._prompt_room,
            most_kept=lambda: self.speed.depth_of(MAX_KEPT_SLOWDOWN),
        )
        if held is not None:
            self.context.cells.restore(held)
        self.load_s += time.perf_counter() - started

    def _runner_maker(self) -> MakeRunner:
        if self._make_runner is None:
            raise EngineError(
                f"{self.info.path.name} holds a vocabulary and no weights; it cannot generate.", hint="Use --dry-run, or a whole model."
            )
        return self._make_runner

    def _reserve_repeatable(self, make_runner: MakeRunner, num_cells: int) -> None:
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
            self.repeatable = Context.make_repeatable(make_runner, num_cells)
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

    def take_load_s(self) -> float:
        """Seconds of loading that no answer was charged with yet; the one that asks is."""
        seconds, self._told_load_s = self.load_s - self._told_load_s, self.load_s
        return seconds

    @contextmanager
    def whole_prompts(self) -> Iterator[None]:
        """Within it, prompts are evaluated as fast as it goes, and answers that are being written wait for them.

        Else a prompt comes in pieces beside answers, which take longer in all, so that who reads along does not notice.
        """
        before, self._max_stall_s = self._max_stall_s, math.inf
        try:
            yield
        finally:
            self._max_stall_s = before

    @contextmanager
    def sharing(self, prefix: list[int]) -> Iterator[None]:
        """Within it, several prompts that begin with `prefix` are answered: it is read from disk if it is there, and kept if it took long.

        Nothing may run before, and nothing is kept if something still does after.
        """
        cells = None if self.context is None else self.context.shared
        if self.keeper is None or cells is None:
            yield
            return
        self.keeper.recall_shared(cells, prefix)
        num_held = cells.num_held(prefix)
        yield
        if self.is_idle:
            self.keeper.remember_shared(cells, prefix, prefill_s=self.speed.prefill_s(len(prefix) - num_held, num_held))

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
                pieces.append(self._end(sequence, "error"))
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
                piece = self._end(share.sequence, "error")
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
            self._keep_speed(self.speed)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence at once, from any thread; what it had written stays in it."""
        if sequence.is_finished:
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

    def keep_for(self, prompts: Collection[list[int]], finished: Iterable[Sequence]) -> list[Sequence]:
        """Of what these finished sequences hold, keep what some of the prompts begins with: the rest would slow every step of others.

        Gives those that still hold something: none in a context for one sequence, where nothing is done.
        """
        cells = None if self.context is None else self.context.shared
        return [] if cells is None else [sequence for sequence in finished if cells.keep_for(prompts, sequence)]

    def _drop_cancelled(self) -> list[Piece]:
        pieces = [self._end(sequence, "cancelled") for sequence in self._unfinished() if sequence.seq_id in self._cancelled]
        self._cancelled.difference_update([piece.seq_id for piece in pieces])  # another thread may be adding to it
        return pieces

    def _drop_late(self, shares: list[Share]) -> list[Piece]:
        """End the sequences that would be late after a batch of these shares, and those that have waited past their deadlines."""
        timed = [sequence for sequence in self._unfinished() if sequence.deadline is not None]
        if not timed:
            return []
        now = time.perf_counter()
        ends_at = now + sum(self._expected_s(share) for share in shares)
        return [self._end(sequence, "time") for sequence in timed if sequence.is_late(now, ends_at)]

    def _expected_s(self, share: Share) -> float:
        sequence, num_tokens = share.sequence, len(share.token_ids)
        expect = self.speed.decode_s if sequence.completion_ids else self.speed.prefill_s
        return expect(num_tokens, sequence.num_evaluated)

    def _end(self, sequence: Sequence, reason: FinishReason) -> Piece:
        piece = Piece(sequence.seq_id, None, sequence.finish(reason), reason, sequence.take_thought())
        self._release(sequence)
        self._keep_learned()
        return piece

    def _release(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif (context := self.repeatable if sequence.sampling.repeatable else self.context) is not None:
            if not self._counts_are_exact and sequence.num_evaluated:
                self.count_error = max(self.count_error, context.runner.num_tokens(slot_of(sequence)) / sequence.num_evaluated - 1.0)
            context.release(sequence)
        self._cancelled.discard(sequence.seq_id)

    def _unfinished(self) -> list[Sequence]:
        return [*(sequence for context in self._contexts for sequence in context.scheduler.unfinished), *self._waiting]

    def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        on_text: Callable[[str], None] | None = None,
        *,
        deadline: float | None = None,
        breakpoints: tuple[int, ...] = (),
        thinking: Thinking | None = None,
        on_thought: Callable[[str], None] | None = None,
    ) -> Completion:
        """One prompt to its end: a batch of one. Ctrl-C ends it with what was written, as `finish_reason` "cancelled".

        `on_text` is called with each piece of the answer and `on_thought` with what was thought before it; `deadline`, `breakpoints` and
        `thinking` are as in `add`.
        """
        begun = time.perf_counter()
        context = self.repeatable if sampling.repeatable else self.context
        cells = context.single if context is not None and self.is_idle else None
        if self.keeper is not None and cells is not None:
            self.keeper.recall(cells, prompt_ids, breakpoints)
        sequence = self.add(prompt_ids, sampling, deadline=deadline, breakpoints=breakpoints, thinking=thinking)
        sequence.added_at = begun  # reading from disk is part of what it took
        try:
            while not sequence.is_finished:
                for piece in self.step():
                    if piece.seq_id == sequence.seq_id:
                        _tell(on_thought, piece.thought)
                        _tell(on_text, piece.text)
        except KeyboardInterrupt:
            pass
        finally:
            if not sequence.is_finished:
                self._end(sequence, "cancelled")
        completion = sequence.completion()
        if sequence.error is not None:
            raise sequence.error
        if self.keeper is not None and cells is not None:
            self.keeper.remember(cells, prefill_s=completion.timings.prefill_s)
        return completion

    def _running(self) -> Context:
        if self.context is None:
            raise EngineError("The context was not reserved before a prompt was added.")
        return self.context

    def close(self) -> None:
        for context in self._contexts:
            context.runner.close()
        self.context = self.repeatable = None
        self._shelf.clear()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tell(hear: Callable[[str], None] | None, text: str) -> None:
    if hear is not None and text:
        hear(text)
