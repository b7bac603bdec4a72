"""Turn a time limit into a budget of tokens, using the measured speed of the model on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from localrag.budget import Budget, TimeLimit
from localrag.errors import BudgetExceededError, TimeLimitError, UsageError
from localrag.prompt import Demand

if TYPE_CHECKING:
    from localrag.kb.protocols import Reranker

RERANK_SHARE = 0.5
"""Share of the time left after the first search that reranking may take. The rest is for the answer."""

ANSWER_HEADROOM = 1.5
"""Factor by which an answer may exceed its planned length. The clock ends it, and the machine may be faster than measured."""


def check_seconds(max_seconds: float | None) -> None:
    """Raise UsageError for an invalid time limit."""
    if max_seconds is not None and not 0 < max_seconds < math.inf:
        raise UsageError(f"max_seconds is a number of seconds above 0, not {max_seconds!r}.", hint="Give a positive number.")


class TimedReranker:
    """A reranker with a deadline. Once it cannot finish within its share of the time limit, it returns None and is skipped from then on.

    A reranker without TimedScores (see kb.protocols) cannot be stopped, so it is always skipped. `ends_at` is on the clock of
    time.perf_counter().
    """

    def __init__(self, reranker: Reranker, ends_at: float) -> None:
        self._reranker = reranker
        self._answer_ends_at = ends_at
        self._ends_at: float | None = None
        self.is_skipped = False

    def scores(self, query: str, texts: Sequence[str], /) -> list[float] | None:
        from localrag.kb.protocols import TimedScores  # noqa: PLC0415  # weight

        if self._ends_at is None:
            now = time.perf_counter()
            self._ends_at = now + RERANK_SHARE * max(0.0, self._answer_ends_at - now)
        scores = None
        if not self.is_skipped and isinstance(self._reranker, TimedScores):
            scores = self._reranker.scores_until(query, texts, self._ends_at)
        self.is_skipped = scores is None
        return scores


class Speed(Protocol):
    """The engine's expected speed."""

    @property
    def prefill_tokens_per_s(self) -> float: ...
    @property
    def decode_tokens_per_s(self) -> float: ...
    def plan_s(self, num_prompt_tokens: int, num_answer_tokens: int) -> float:
        """Seconds to allow for prompt and answer together, with a safety margin."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A budget that fits the window and the time limit, the ledger's entry for it, and the answer limit for a given prompt length."""

    budget: Budget
    time: TimeLimit
    answer_limit: Callable[[int], int]


def plan(wants: Demand, window: int, speed: Speed, *, max_seconds: float, left_s: float) -> Plan:
    """The largest budget, up to `window`, whose prompt and answer take at most `left_s` seconds.

    Both shrink as they do in a smaller window, so the same priorities apply. Raises TimeLimitError, with the seconds needed, if even the
    question alone with the shortest answer takes longer.
    """

    def seconds(budget: Budget) -> float:
        answer = budget.allocations["answer"]
        prompt = sum(budget.allocations.values()) - answer - budget.allocations.get("gap", 0)
        return speed.plan_s(prompt, answer)

    budget = wants.share(window)
    is_bound = seconds(budget) > left_s
    if is_bound:
        budget = _largest(wants, window, lambda tried: seconds(tried) <= left_s, seconds, max_seconds=max_seconds, left_s=left_s)

    def answer_limit(num_prompt_tokens: int) -> int:
        prompt_s = speed.plan_s(num_prompt_tokens, 0)
        token_s = (speed.plan_s(num_prompt_tokens, 64) - prompt_s) / 64
        return int(ANSWER_HEADROOM * max(0.0, left_s - prompt_s) / token_s)

    time = TimeLimit(
        max_seconds=max_seconds,
        is_bound=is_bound,
        planned_s=round(max_seconds - left_s + seconds(budget), 2),
        prefill_tokens_per_s=round(speed.prefill_tokens_per_s, 1),
        decode_tokens_per_s=round(speed.decode_tokens_per_s, 1),
    )
    return Plan(budget, time, answer_limit)


def _largest(
    wants: Demand, window: int, fits: Callable[[Budget], bool], seconds: Callable[[Budget], float], *, max_seconds: float, left_s: float
) -> Budget:
    """The budget of the largest window that is fast enough, found by bisection, since time grows with the window."""
    least = _smallest(wants, window)
    if not fits(least):
        needed = max_seconds - left_s + seconds(least)
        raise TimeLimitError(max_seconds, needed)
    low, high, best = least.window, window, least
    while high - low > 1:
        middle = (low + high) // 2
        tried = wants.share(middle)
        if fits(tried):
            low, best = middle, tried
        else:
            high = middle
    return best


def _smallest(wants: Demand, window: int) -> Budget:
    """The budget of the smallest window that holds all uncuttable sections, found by bisection, since minimums can depend on the window."""
    low, high, best = -1, window, wants.share(window)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            high, best = middle, wants.share(middle)
        except BudgetExceededError:
            low = middle
    return best
