"""Rerank passages with the loaded model: compare how likely it is to answer "yes" or "no" when asked if a passage answers the question.

Only the logits of the first answer token are read; nothing is generated. The question precedes the passage, so that all prompts share a
prefix, which is evaluated once. The passages are evaluated in one batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from localrag.engine.jobs import SCORE, Job
from localrag.errors import EngineError, InterruptedRunError
from localrag.summary import truncate
from localrag.summary.writer import prompt_of
from localrag.text.markup import count_content
from localrag.text.tokens import common_length
from localrag.types import Message, SamplingParams

if TYPE_CHECKING:
    from localrag.engine.engine import Engine

MAX_QUESTION_TOKENS = 256
MAX_PASSAGE_TOKENS = 512

_BEFORE = "Is this question answered by the passage below?\n\nQuestion: "
_BETWEEN = "\n\nPassage: "
_BEHIND = "\n\nDoes the passage answer the question? Answer with yes or no."
_YES, _NO = ("Yes", "yes", " Yes", " yes", "YES"), ("No", "no", " No", " no", "NO")
_ONE_TOKEN = SamplingParams(max_tokens=1)


class Judge:
    """Implements `localrag.kb.protocols.Reranker` with an open engine, which the caller closes."""

    def __init__(self, engine: Engine) -> None:
        """Raises EngineError if the first tokens of "yes" and "no" are the same, TemplateError if the model has no chat template."""
        self._engine = engine
        yes, no = (_first_tokens(engine, texts) for texts in (_YES, _NO))
        self._yes, self._no = sorted(yes - no), sorted(no - yes)
        if not self._yes or not self._no:
            raise EngineError(f"The tokens of {engine.name} do not distinguish yes from no.", hint="Use another reranker, or none.")

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """log p(yes) − log p(no) for each text, over all spellings of both words. Raises InterruptedRunError if the user stops it."""
        scores = self.scores_until(query, texts, math.inf)
        assert scores is not None, "it has no deadline"
        return scores

    def scores_until(self, query: str, texts: Sequence[str], ends_at: float) -> list[float] | None:
        """Like `scores`, but None if it cannot finish by `ends_at` (time.perf_counter())."""
        prompts = [self._prompt(query, text) for text in texts]
        if not prompts:
            return []
        if time.perf_counter() + self._expected_s(prompts) > ends_at:
            return None
        watched, shared = (*self._yes, *self._no), _num_shared(prompts)
        breakpoints = (shared,) if shared else ()
        jobs = [Job(prompt_ids=prompt, sampling=_ONE_TOKEN, watched=watched, breakpoints=breakpoints) for prompt in prompts]
        try:
            with closing(self._engine.run(jobs, SCORE)) as events:
                for event in events:
                    if event.error is not None:
                        raise event.error
                    if time.perf_counter() >= ends_at and not all(job.is_finished for job in jobs):
                        return None
        except KeyboardInterrupt:
            raise InterruptedRunError("Interrupted.") from None
        return [self._score(job) for job in jobs]

    def _expected_s(self, prompts: Sequence[list[int]]) -> float:
        """Expected seconds to evaluate all prompts, their shared prefix once; 0 if the speed is unknown."""
        speed = self._engine.speed
        num_tokens = sum(map(len, prompts)) - _num_shared(prompts) * (len(prompts) - 1)
        return num_tokens / speed.prefill_tokens_per_s if speed.is_known else 0.0

    def _score(self, job: Job) -> float:
        sequence = job.sequence
        if sequence is None or not sequence.watched_logits:
            raise InterruptedRunError("Interrupted.")
        return _total(sequence.watched_logits[: len(self._yes)]) - _total(sequence.watched_logits[len(self._yes) :])

    def _prompt(self, query: str, text: str) -> list[int]:
        count = self._count
        question = truncate(" ".join(query.split()), MAX_QUESTION_TOKENS, count)
        passage = truncate(text.strip(), MAX_PASSAGE_TOKENS, count)
        content = f"{_BEFORE}{question}{_BETWEEN}{passage}{_BEHIND}"
        return prompt_of(self._engine, [Message("user", content)])

    def _count(self, text: str) -> int:
        """Number of tokens as sent."""
        return count_content(text, self._engine.counter)


def _num_shared(prompts: Sequence[list[int]]) -> int:
    """Number of tokens with which all prompts begin, less than any of them has."""
    return min((common_length(prompts[0][:-1], each[:-1]) for each in prompts[1:]), default=0)


def _first_tokens(engine: Engine, texts: Iterable[str]) -> set[int]:
    return {engine.tokenizer.encode(text)[0] for text in texts}


def _total(logits: Sequence[float]) -> float:
    """The log of the sum of the exponentials of these logits."""
    top = max(logits)
    return top + math.log(sum(math.exp(logit - top) for logit in logits))
