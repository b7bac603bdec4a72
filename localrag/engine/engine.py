"""The engine loop: schedule, decode, collect."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from itertools import count
from typing import Protocol, Self

from localrag.decoding import Completion, FinishReason, Piece, SamplingParams
from localrag.engine.cells import Cells
from localrag.engine.grammar import grammar_of
from localrag.engine.llama import MAX_SEQUENCES
from localrag.engine.scheduler import Scheduler, Share
from localrag.engine.sequence import Sequence
from localrag.engine.speed import Speed
from localrag.errors import EngineError, TemplateError
from localrag.model import ModelInfo, Slot
from localrag.tokens import ChatTemplate, TokenCounter, Tokenizer

BATCH_TOKENS = 512
"""Tokens of one batch: larger ones are no faster (measured), and a cancelled one is lost."""


KEPT_SEQUENCES = 8
"""Finished sequences that a context keeps beside those that run, as far as there are cells."""
FIRST_COUNT_ERROR = 0.1
"""What is taken to be the error of counts that are estimates, before more was seen."""
_MEASURED_PROMPTS, _MEASURED_ANSWER = (32, 96), 9
_MEASURED_TEXT = "The quick brown fox jumps over the lazy dog, and the dog goes on sleeping in the warm sun. " * 8


class Runner(Protocol):
    """What evaluates tokens: llama.cpp's context, or the echo. Sequence ids count from 0 to the number of sequences."""

    num_cells: int

    def begin(self, seq_id: int, prompt_ids: list[int], sampling: SamplingParams, /) -> None: ...
    def decode(self, entries: list[tuple[int, int, int, bool]], /) -> bool:
        """Evaluate (token id, position, sequence id, logits wanted); False if `cancel` stopped it."""
        ...

    def sample(self, seq_id: int, index: int, /) -> int: ...
    def num_tokens(self, seq_id: int, /) -> int: ...
    def truncate(self, seq_id: int, num_tokens: int, /) -> None: ...
    def end(self, seq_id: int, /) -> None: ...
    def copy(self, source: int, seq_id: int, num_tokens: int, /) -> bool: ...
    def cut(self, seq_id: int, num_tokens: int, /) -> bool: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


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
        make_runner: Callable[[int, int], Runner] | None,
        make_speed: Callable[[], Speed] = Speed,
        keep_speed: Callable[[Speed], None] = lambda _: None,
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
        self.sha256: str | None = None
        """Of the model's file, where the catalogue knows it."""
        self.count_error = 0.0 if counts_are_exact else FIRST_COUNT_ERROR
        """The greatest share by which this engine evaluated more tokens than its tokenizer counted; 0 where counts are exact."""
        self._counts_are_exact = counts_are_exact
        self._template = template
        self._make_runner = make_runner
        self._make_speed = make_speed
        self._keep_speed = keep_speed
        self._has_learned = False
        self._close = close
        self._runner: Runner | None = None
        self._cells: Cells | None = None
        self.shares_prefixes = False
        """Whether a prompt takes over what others that begin alike have evaluated. Then the same seed need not give the same text
        again: the order of summation depends on what was there, which can decide a near tie."""
        self._scheduler = Scheduler(num_cells=0, num_slots=0, batch_tokens=BATCH_TOKENS, place=self._place)
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
        if self.speed.is_known or not self.is_idle:
            return
        ids = self.tokenizer.encode(_MEASURED_TEXT)
        self.reserve(max(_MEASURED_PROMPTS) + _MEASURED_ANSWER)
        for num_tokens in _MEASURED_PROMPTS:  # the first one warms it up
            if self.generate(ids[:num_tokens], SamplingParams(max_tokens=_MEASURED_ANSWER)).finish_reason == "cancelled":
                raise KeyboardInterrupt

    @property
    def can_generate(self) -> bool:
        """Whether there are weights, and not a vocabulary alone."""
        return self._make_runner is not None

    def reserve(self, num_cells: int, *, num_sequences: int = 1) -> None:
        """Have a context of at least so many cells and sequences; a smaller one is replaced, and what it held is gone."""
        if self._runner is not None:
            is_large_enough = num_cells <= self._runner.num_cells and num_sequences <= self._scheduler.num_slots
            if is_large_enough and self._cells is not None and self._cells.shares == self.shares_prefixes:
                return
            if not self.is_idle:
                raise EngineError("The context cannot grow while answers are running.")
            self._runner.close()
            self._runner = self._cells = None
        if self._make_runner is None:
            raise EngineError(
                f"{self.info.path.name} holds a vocabulary and no weights; it cannot generate.", hint="Use --dry-run, or a whole model."
            )
        started = time.perf_counter()
        num_ids = min(MAX_SEQUENCES, num_sequences + (KEPT_SEQUENCES if self.shares_prefixes else 0))
        self._runner = self._make_runner(num_cells, num_ids)
        self._cells = Cells(self._runner, num_sequences=num_ids, shares=self.shares_prefixes)
        self._scheduler = Scheduler(num_cells=self._runner.num_cells, num_slots=num_sequences, batch_tokens=BATCH_TOKENS, place=self._place)
        self.load_s += time.perf_counter() - started

    def _place(self, sequence: Sequence) -> bool:
        return self._cells is not None and self._cells.place(sequence)

    def add(self, prompt_ids: list[int], sampling: SamplingParams, *, deadline: float | None = None) -> Sequence:
        """Queue a prompt. The context must have been reserved; EngineError if the prompt could never fit it.

        `deadline` is on the clock of time.perf_counter, in seconds. An answer ends with `finish_reason` "time" when its next token
        is expected after it. A prompt is evaluated whole and gives at least one token, unless it would take twice the time that
        there was when it was added: then the sequence ends with no text. One whose deadline has passed is not begun.
        UsageError for a JSON schema that is not supported.
        """
        if sampling.json_schema is not None:
            grammar_of(sampling.json_schema)  # a schema that cannot be had is refused here, and not within a step that others share
        sequence = Sequence(next(self._seq_ids), prompt_ids, sampling, deadline=deadline)
        self._scheduler.add(sequence)
        return sequence

    @property
    def is_idle(self) -> bool:
        return not self._scheduler.unfinished

    def step(self) -> list[Piece]:
        """Evaluate one batch of all running sequences and sample where a prompt or a token is complete."""
        pieces = self._drop_cancelled()
        shares = self._scheduler.schedule()
        pieces += self._drop_late(shares)
        shares = [share for share in shares if not share.sequence.is_finished]
        if not shares:
            return pieces
        started = time.perf_counter()
        if not self._decode(shares):
            return pieces + self._drop_cancelled()
        pieces += self._collect(shares)
        self._learn(shares, time.perf_counter() - started)
        return pieces

    def _decode(self, shares: list[Share]) -> bool:
        runner, cells = self._running(), self._cells
        assert cells is not None  # it comes and goes with the runner
        entries = []
        for share in shares:
            sequence, slot = share.sequence, _slot(share.sequence)
            if sequence.started_at is None:
                runner.begin(slot, sequence.prompt_ids, sequence.sampling)
                sequence.started_at = time.perf_counter()
            last = len(share.token_ids) - 1
            entries += [(token, sequence.num_evaluated + i, slot, share.samples and i == last) for i, token in enumerate(share.token_ids)]
        if runner.decode(entries):
            for share in shares:
                share.sequence.num_evaluated += len(share.token_ids)
                cells.evaluated(share.sequence, share.token_ids)
            return True
        for share in shares:  # a cancelled batch may be half evaluated: go back to where every sequence stood
            runner.truncate(_slot(share.sequence), share.sequence.num_evaluated)
            share.sequence.num_evaluated = runner.num_tokens(_slot(share.sequence))
            cells.cut(share.sequence, share.sequence.num_evaluated)
        return False

    def _collect(self, shares: list[Share]) -> list[Piece]:
        runner, tokenizer = self._running(), self.tokenizer
        pieces, index = [], -1
        for share in shares:
            index += len(share.token_ids)
            if not share.samples:
                continue
            sequence = share.sequence
            token = runner.sample(_slot(sequence), index)
            text = sequence.append(token, tokenizer.piece(token, special=False), is_end=tokenizer.is_end(token))
            pieces.append(Piece(sequence.seq_id, token, text, sequence.finish_reason))
            if sequence.is_finished:
                self._release(sequence)
        return pieces

    def _learn(self, shares: list[Share], seconds: float) -> None:
        """What the step took refreshes the speed, if a single sequence had it to itself; kept once nothing runs any more."""
        if len(shares) == 1:
            sequence, num_tokens = shares[0].sequence, len(shares[0].token_ids)
            depth = sequence.num_evaluated - num_tokens
            if depth < len(sequence.prompt_ids):
                self.speed.observe_prefill(num_tokens, depth, seconds)
            else:
                self.speed.observe_decode(depth, seconds)
            self._has_learned = True
        if self._has_learned and self.is_idle:
            self._has_learned = False
            self._keep_speed(self.speed)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence at once, from any thread; what it had written stays in it."""
        self._cancelled.add(sequence.seq_id)
        if self._runner is not None:
            self._runner.cancel()

    def cancel_all(self) -> None:
        """End every sequence at once; fit for a signal handler."""
        for sequence in self._scheduler.unfinished:
            self.cancel(sequence)

    def _drop_cancelled(self) -> list[Piece]:
        pieces = [self._end(sequence, "cancelled") for sequence in self._scheduler.unfinished if sequence.seq_id in self._cancelled]
        self._cancelled.clear()
        return pieces

    def _drop_late(self, shares: list[Share]) -> list[Piece]:
        """End the sequences that would be late after a batch of these shares."""
        timed = [sequence for sequence in self._scheduler.unfinished if sequence.deadline is not None]
        if not timed:
            return []
        ends_at = time.perf_counter() + sum(self._expected_s(share) for share in shares)
        return [self._end(sequence, "time") for sequence in timed if (latest := sequence.latest_end) is not None and latest < ends_at]

    def _expected_s(self, share: Share) -> float:
        sequence, num_tokens = share.sequence, len(share.token_ids)
        expect = self.speed.decode_s if sequence.completion_ids else self.speed.prefill_s
        return expect(num_tokens, sequence.num_evaluated)

    def _end(self, sequence: Sequence, reason: FinishReason) -> Piece:
        piece = Piece(sequence.seq_id, None, sequence.finish(reason), reason)
        self._release(sequence)
        return piece

    def _release(self, sequence: Sequence) -> None:
        if sequence.started_at is not None:
            if not self._counts_are_exact and sequence.num_evaluated:
                self.count_error = max(self.count_error, self._running().num_tokens(_slot(sequence)) / sequence.num_evaluated - 1.0)
            self._running().end(_slot(sequence))
        if self._cells is not None:
            self._cells.end(sequence)
        self._scheduler.release(sequence)

    def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        on_text: Callable[[str], None] | None = None,
        *,
        deadline: float | None = None,
    ) -> Completion:
        """One prompt to its end: a batch of one. Ctrl-C ends it with what was written, as `finish_reason` "cancelled".

        `deadline` is as in `add`.
        """
        sequence = self.add(prompt_ids, sampling, deadline=deadline)
        try:
            while not sequence.is_finished:
                for piece in self.step():
                    if piece.seq_id == sequence.seq_id and piece.text and on_text is not None:
                        on_text(piece.text)
        except KeyboardInterrupt:
            pass
        finally:
            if not sequence.is_finished:
                sequence.finish("cancelled")
                self._release(sequence)
        return sequence.completion()

    def _running(self) -> Runner:
        if self._runner is None:
            raise EngineError("The context was not reserved before a prompt was added.")
        return self._runner

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _slot(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise EngineError("A sequence runs without a slot.")
    return sequence.slot
