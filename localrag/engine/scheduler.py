"""Who goes into the next batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from localrag.engine.sequence import Sequence
from localrag.errors import EngineError


@dataclass(frozen=True, slots=True)
class Share:
    """The next `token_ids` of one sequence; `samples` says whether the last of them gives a new token."""

    sequence: Sequence
    token_ids: list[int]
    samples: bool


class Scheduler:
    """First come, first served, within the cells of one KV cache.

    `place` lets a sequence in, or says that it has to wait. In a batch the next tokens of running answers come first, then pieces
    of prompts in order of arrival. Beside answers, all of these have at most as many tokens as `prompt_room` allows from the depth of
    the first: a long prompt does not stall an answer.
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
        """Every sequence that runs or waits."""
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. EngineError if it could never run."""
        if not sequence.prompt_ids:
            raise EngineError("An empty prompt cannot be evaluated.")
        if sequence.num_reserved > self.num_cells:
            raise EngineError(
                f"A prompt of {len(sequence.prompt_ids)} tokens with an answer of up to {sequence.sampling.num_answer_tokens} "
                f"needs {sequence.num_reserved} cells; the context has {self.num_cells}.",
                hint="Use a larger window (--ctx) or a smaller answer (--max-tokens).",
                needed=sequence.num_reserved,
                num_cells=self.num_cells,
            )
        self.waiting.append(sequence)

    def schedule(self) -> list[Share]:
        """The next batch: at most `batch_tokens` tokens, a share a sequence."""
        while self.waiting and len(self.running) < self.num_slots and self._lets_in():
            self.running.append(self.waiting.popleft())
        answers = [sequence for sequence in self.running if sequence.is_answering]
        prompts = [sequence for sequence in self.running if not sequence.is_answering]
        shares = self._shares(answers, self.batch_tokens)
        room = self.batch_tokens - sum(len(share.token_ids) for share in shares)
        if answers and prompts:
            room = min(room, self._prompt_room(prompts[0].num_evaluated))
        return shares + self._shares(prompts, room)

    def _lets_in(self) -> bool:
        """Whether the first that waits gets in. To ask takes as long as its prompt, and while answers alone run nothing changes."""
        only_answers = all(sequence.is_answering for sequence in self.running)
        if only_answers and self._is_refused:
            return False
        is_placed = self._place(self.waiting[0])
        self._is_refused = only_answers and not is_placed
        return is_placed

    @staticmethod
    def _shares(sequences: list[Sequence], room: int) -> list[Share]:
        """What comes next of each, in order, until so many tokens are taken. Only the last token of all gives a new one."""
        shares = []
        for sequence in sequences:
            taken = sequence.pending(room)
            if taken:
                shares.append(Share(sequence, taken, samples=sequence.num_evaluated + len(taken) == sequence.num_tokens))
                room -= len(taken)
        return shares

    def release(self, sequence: Sequence) -> None:
        """A sequence is finished, or will never run."""
        self._is_refused = False
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
