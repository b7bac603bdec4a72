"""A context with its KV cache, and the scheduler that fills its batches."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from localrag.engine.backend import MAX_SEQUENCES, MakeRunner, Runner, State
from localrag.engine.jobs import Sequence
from localrag.engine.kv_cache import SHARE_OF_FREE, Checkpoints, ExclusiveCells, HostSwap, SharedCells, slot_of
from localrag.errors import EngineError
from localrag.text.thinking import Part
from localrag.text.tokens import Tokenizer
from localrag.types import Piece, TokenLogprob


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence's part of a batch. With `samples`, a new token is sampled after its last token."""

    sequence: Sequence
    token_ids: list[int]
    samples: bool


class Scheduler:
    """Schedules sequences within one KV cache, first come, first served.

    `place` admits a sequence, or returns False if it has to wait. A batch begins with the next tokens of running answers, followed by
    pieces of prompts in order of arrival. While answers run, these pieces have at most `prompt_room(depth)` tokens in all, where `depth`
    is that of the first prompt, so that a long prompt does not stall an answer.
    """

    def __init__(
        self, *, num_cells: int, num_slots: int, batch_tokens: int, place: Callable[[Sequence], bool], prompt_room: Callable[[int], int]
    ) -> None:
        self.num_cells = num_cells
        self.num_slots = num_slots
        self.batch_tokens = batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._place = place
        self._is_refused = False
        self._prompt_room = prompt_room

    @property
    def unfinished(self) -> list[Sequence]:
        """All running and waiting sequences."""
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises EngineError if it can never run."""
        if not sequence.prompt_ids:
            raise EngineError("An empty prompt cannot be evaluated.")
        if sequence.num_reserved > self.num_cells:
            raise EngineError(
                f"A prompt of {len(sequence.prompt_ids)} tokens with an answer of up to {sequence.sampling.num_answer_tokens} "
                f"needs {sequence.num_reserved} cells; the context has {self.num_cells}.",
                hint="Use a larger window (--ctx) or a shorter answer (--max-tokens).",
                needed=sequence.num_reserved,
                num_cells=self.num_cells,
            )
        self.waiting.append(sequence)

    def schedule(self) -> list[Share]:
        """The next batch: at most `batch_tokens` tokens, one share for each sequence."""
        while self.waiting and len(self.running) < self.num_slots and self._admits():
            self.running.append(self.waiting.popleft())
        answers = [sequence for sequence in self.running if sequence.is_answering]
        prompts = [sequence for sequence in self.running if not sequence.is_answering]
        shares = self._shares(answers, self.batch_tokens)
        room = self.batch_tokens - sum(len(share.token_ids) for share in shares)
        if answers and prompts:
            room = min(room, self._prompt_room(prompts[0].num_evaluated))
        return shares + self._shares(prompts, room)

    def _admits(self) -> bool:
        """Admit the first waiting sequence if possible. After a refusal, `place` is called again only once something has changed."""
        only_answers = all(sequence.is_answering for sequence in self.running)
        if only_answers and self._is_refused:
            return False
        is_placed = self._place(self.waiting[0])
        self._is_refused = only_answers and not is_placed
        return is_placed

    @staticmethod
    def _shares(sequences: list[Sequence], room: int) -> list[Share]:
        """The pending tokens of each sequence, in order, up to `room` tokens. A new token is sampled only after the last pending one."""
        shares = []
        for sequence in sequences:
            token_ids = sequence.pending(room)
            if token_ids:
                shares.append(Share(sequence, token_ids, samples=sequence.num_evaluated + len(token_ids) == sequence.num_tokens))
                room -= len(token_ids)
        return shares

    def release(self, sequence: Sequence) -> None:
        """Remove a sequence that has finished or will never run."""
        self._is_refused = False
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)


BATCH_TOKENS = 512
"""Tokens per batch. Larger batches are not faster (measured), and more work is lost when one is cancelled."""
KEPT_SEQUENCES = 8
"""Maximum number of finished sequences that a shared context keeps next to running ones, if there are enough cells."""
KEPT_STATE_BYTES = 256 << 20
"""Maximum size of their recurrent states. llama.cpp allocates one for each sequence id."""
CHECKPOINT_BYTES = 1 << 30
"""Maximum size of the checkpoints of a context, within a share of the free memory."""


class Context:
    """Evaluates sequences in one KV cache: a single one that resumes at breakpoints (ExclusiveCells), or several (SharedCells)."""

    def __init__(self, runner: Runner, cells: ExclusiveCells | SharedCells, *, num_slots: int, prompt_room: Callable[[int], int]) -> None:
        self.runner = runner
        self.cells = cells
        self.scheduler = Scheduler(
            num_cells=runner.num_cells, num_slots=num_slots, batch_tokens=BATCH_TOKENS, place=cells.place, prompt_room=prompt_room
        )

    @classmethod
    def make(
        cls,
        make_runner: MakeRunner,
        num_cells: int,
        num_slots: int,
        *,
        host_swap: HostSwap,
        bytes_per_token: int,
        state_bytes: int = 0,
        prompt_room: Callable[[int], int],
        most_kept: Callable[[], float],
    ) -> Self:
        """Create a context for up to `num_slots` concurrent sequences. See Scheduler for `prompt_room`, SharedCells for the swap options.

        A token needs `bytes_per_token` in the KV cache, a sequence `state_bytes` for recurrent layers. If memory has no room for a host
        swap as large as the cells, nothing is swapped out only for speed.
        """
        num_ids = num_sequence_ids(num_slots, state_bytes)
        runner = make_runner(num_cells, num_ids)
        checkpoints = _make_checkpoints(runner)
        if num_slots == 1:
            return cls(runner, ExclusiveCells(runner, checkpoints=checkpoints), num_slots=1, prompt_room=prompt_room)
        from localrag.engine.memory import available_memory  # noqa: PLC0415  # weight: one sequence alone needs none of it

        is_large = host_swap.fit(runner.num_cells * bytes_per_token, available_memory())
        cells = SharedCells(
            runner,
            num_sequences=num_ids,
            host_swap=host_swap,
            most_kept=most_kept if is_large else lambda: math.inf,
            checkpoints=checkpoints,
        )
        return cls(runner, cells, num_slots=num_slots, prompt_room=prompt_room)

    @classmethod
    def make_repeatable(cls, make_runner: MakeRunner, num_cells: int) -> Self:
        """Create a context for one sequence at a time, whose results depend only on its tokens and breakpoints."""
        runner = make_runner(num_cells, 1, repeatable=True)
        cells = ExclusiveCells(runner, repeatable=True, checkpoints=_make_checkpoints(runner))
        return cls(runner, cells, num_slots=1, prompt_room=lambda _: BATCH_TOKENS)

    @property
    def single(self) -> ExclusiveCells | None:
        """The cells of a context for one sequence; None for several."""
        return self.cells if isinstance(self.cells, ExclusiveCells) else None

    @property
    def shared(self) -> SharedCells | None:
        """The cells of a context for several sequences; None for one."""
        return self.cells if isinstance(self.cells, SharedCells) else None

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.unfinished

    def serves(self, num_cells: int, num_slots: int) -> bool:
        """Whether the context is large enough and of the required kind."""
        is_large_enough = num_cells <= self.runner.num_cells and num_slots <= self.scheduler.num_slots
        return is_large_enough and (num_slots == 1) == (self.single is not None)

    def leave_for(self, num_slots: int) -> State | None:
        """Close this context to make way for another. Returns the state to restore there, if both are for one sequence. It must be idle."""
        state = None
        if num_slots == 1 and self.single is not None:
            state = self.single.latest()
        elif num_slots > 1 and self.shared is not None:
            self.shared.swap_out_all()
        self.runner.close()
        return state

    def add(self, sequence: Sequence) -> None:
        if self.is_idle:
            self.runner.prepare()
        if self.single is None:
            ends = (sequence.text_end,) if 0 < sequence.text_end < len(sequence.prompt_ids) else ()
            sequence.marks = (*reversed(sequence.breakpoints), *ends)
            # other memories resume anywhere, and full batches are faster
            sequence.breakpoints = tuple(sorted({*sequence.marks})) if self.runner.is_recurrent else ()
        self.scheduler.add(sequence)

    def decode(self, shares: list[Share]) -> bool:
        """Evaluate a batch. Returns False if it was cancelled: each sequence is then where it was, at a checkpoint, or at its beginning."""
        runner, entries = self.runner, []
        for share in shares:
            sequence, slot = share.sequence, slot_of(share.sequence)
            if sequence.started_at is None:
                runner.begin(slot, sequence.prompt_ids, sequence.sampling)
                sequence.started_at = time.perf_counter()
            last = len(share.token_ids) - 1
            entries += [(token, sequence.num_evaluated + i, slot, share.samples and i == last) for i, token in enumerate(share.token_ids)]
        if runner.decode(entries):
            for share in shares:
                share.sequence.num_evaluated += len(share.token_ids)
                self.cells.evaluated(share.sequence, share.token_ids)
            return True
        for share in shares:  # a cancelled batch may be half evaluated
            share.sequence.num_evaluated = self.cells.recover(share.sequence)
            share.sequence.num_cached_tokens = min(share.sequence.num_cached_tokens, share.sequence.num_evaluated)
        return False

    def sample(self, sequence: Sequence, index: int, tokenizer: Tokenizer) -> Piece:
        """Sample a sequence's next token, after entry `index` of the last batch, and collect its logprobs if requested."""
        runner = self.runner
        if sequence.watched and not sequence.completion_ids:
            sequence.watched_logits = runner.logits(index, sequence.watched)
        num_top = sequence.sampling.logprobs
        logprobs = None if num_top is None else runner.logprobs(index, num_top)
        rules, thinking = sequence.sampling.call_rules, sequence.thinking
        mark_ids = (frozenset() if rules is None else rules.shown_ids) | (frozenset() if thinking is None else thinking.mark_ids)

        def piece_of(token: int) -> bytes:
            return tokenizer.piece(token, special=token in mark_ids)

        def part_of(token: int) -> Part:
            return sequence.part_of(piece_of(token), is_end=tokenizer.is_end(token))

        token = runner.sample(slot_of(sequence), index, part_of if thinking is not None else None)
        is_end, piece = tokenizer.is_end(token), piece_of(token)
        if logprobs is not None and not is_end:
            top = tuple((tokenizer.piece(each), logprobs.of(each)) for each in logprobs.likeliest)
            sequence.logprobs.append(TokenLogprob(piece, logprobs.of(token), top))
        text = sequence.append(token, piece, is_end=is_end)
        if copied := () if sequence.is_finished else runner.take_copied(slot_of(sequence)):
            text += sequence.copy(copied, b"".join(tokenizer.piece(each, special=False) for each in copied))
        return Piece(sequence.seq_id, token, text, sequence.finish_reason, sequence.take_thought())

    def release(self, sequence: Sequence) -> None:
        """Release a sequence that has finished or will never run."""
        if sequence.started_at is not None:
            self.runner.end(slot_of(sequence))
        self.cells.end(sequence)
        self.scheduler.release(sequence)


def num_sequence_ids(num_slots: int, state_bytes: int) -> int:
    """Number of sequence ids in a context for `num_slots` concurrent sequences, cached ones included.

    The recurrent layers of a sequence need `state_bytes`.
    """
    kept = min(KEPT_SEQUENCES, max(1, KEPT_STATE_BYTES // state_bytes)) if state_bytes else KEPT_SEQUENCES
    return 1 if num_slots == 1 else min(MAX_SEQUENCES, num_slots + kept)


def _make_checkpoints(runner: Runner) -> Checkpoints:
    if not runner.is_recurrent:
        return Checkpoints(runner)
    from localrag.engine.memory import available_memory  # noqa: PLC0415  # weight: other models need none of it

    return Checkpoints(runner, max_bytes=min(CHECKPOINT_BYTES, available_memory() // SHARE_OF_FREE))
