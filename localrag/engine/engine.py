"""The engine loop: schedule, decode, collect."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Protocol, Self

from localrag.decoding import Completion, Piece, SamplingParams
from localrag.engine.scheduler import Scheduler, Share
from localrag.engine.sequence import Sequence
from localrag.errors import EngineError, TemplateError
from localrag.model import ModelInfo, Slot
from localrag.tokens import ChatTemplate, TokenCounter, Tokenizer

BATCH_TOKENS = 512
"""Tokens of one batch: larger ones are no faster (measured), and a cancelled one is lost."""


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
        close: Callable[[], None] = lambda: None,
        load_s: float = 0.0,
    ) -> None:
        self.name = name
        self.info = info
        self.tokenizer = tokenizer
        self.counter = TokenCounter(tokenizer)
        self.make_slot = make_slot
        self.load_s = load_s
        self._template = template
        self._make_runner = make_runner
        self._close = close
        self._runner: Runner | None = None
        self._scheduler = Scheduler(num_cells=0, num_slots=0, batch_tokens=BATCH_TOKENS)
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

    def reserve(self, num_cells: int, *, num_sequences: int = 1) -> None:
        """Have a context of at least so many cells and sequences; a smaller one is replaced, and what it held is gone."""
        if self._runner is not None:
            if num_cells <= self._runner.num_cells and num_sequences <= self._scheduler.num_slots:
                return
            if not self.is_idle:
                raise EngineError("The context cannot grow while answers are running.")
            self._runner.close()
            self._runner = None
        if self._make_runner is None:
            raise EngineError(
                f"{self.info.path.name} holds a vocabulary and no weights; it cannot generate.", hint="Use --dry-run, or a whole model."
            )
        started = time.perf_counter()
        self._runner = self._make_runner(num_cells, num_sequences)
        self._scheduler = Scheduler(num_cells=self._runner.num_cells, num_slots=num_sequences, batch_tokens=BATCH_TOKENS)
        self.load_s += time.perf_counter() - started

    def add(self, prompt_ids: list[int], sampling: SamplingParams) -> Sequence:
        """Queue a prompt. The context must have been reserved; EngineError if the prompt could never fit it."""
        sequence = Sequence(next(self._seq_ids), prompt_ids, sampling)
        self._scheduler.add(sequence)
        return sequence

    @property
    def is_idle(self) -> bool:
        return not self._scheduler.unfinished

    def step(self) -> list[Piece]:
        """Evaluate one batch of all running sequences and sample where a prompt or a token is complete."""
        pieces = self._drop_cancelled()
        shares = self._scheduler.schedule()
        if not shares:
            return pieces
        if not self._decode(shares):
            return pieces + self._drop_cancelled()
        return pieces + self._collect(shares)

    def _decode(self, shares: list[Share]) -> bool:
        runner = self._running()
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
            return True
        for share in shares:  # a cancelled batch may be half evaluated: go back to where every sequence stood
            runner.truncate(_slot(share.sequence), share.sequence.num_evaluated)
            share.sequence.num_evaluated = runner.num_tokens(_slot(share.sequence))
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
        pieces = []
        for sequence in self._scheduler.unfinished:
            if sequence.seq_id in self._cancelled:
                pieces.append(Piece(sequence.seq_id, None, sequence.finish("cancelled"), "cancelled"))
                self._release(sequence)
        self._cancelled.clear()
        return pieces

    def _release(self, sequence: Sequence) -> None:
        if sequence.started_at is not None:
            self._running().end(_slot(sequence))
        self._scheduler.release(sequence)

    def generate(self, prompt_ids: list[int], sampling: SamplingParams, on_text: Callable[[str], None] | None = None) -> Completion:
        """One prompt to its end: a batch of one. Ctrl-C ends it with what was written, as `finish_reason` "cancelled"."""
        sequence = self.add(prompt_ids, sampling)
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
