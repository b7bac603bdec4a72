"""How fast this model runs on this machine: learned from every step, kept between runs, and used to turn seconds into tokens.

A session that may take S seconds, from `started` on, uses it so:

    engine.measure_speed()                     # about a second, once for a model on a machine; later runs find it kept
    speed = engine.speed
    left_s = started + S - time.perf_counter()
    # take the largest window whose prompt and answer keep to: speed.plan_s(num_prompt_tokens, num_answer_tokens) <= left_s
    engine.generate(prompt_ids, sampling, deadline=started + S)

The deadline is for the whole, so time that the prompt did not need goes to the answer: give `sampling.max_tokens` as many tokens as the
window has left, not the number that was planned. Only a prompt that takes longer than S by itself can overshoot, which is why
`plan_s` counts the prompt with a margin for what past predictions missed.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Self

from localrag.files import JsonCache

MAX_KEPT = 64
"""Models and machines whose speed a home keeps; the one that was not used for longest goes first."""
MIN_PIECE_TOKENS = 16
"""A shorter piece of a prompt says little: what a batch costs by itself outweighs its tokens."""

_MAX_MARGIN, _FIRST_DEVIATION = 0.5, 0.1
_SLOW, _FAST = 1.5, 0.5
_PRIOR_TOKENS, _PRIOR_DEPTH, _MAX_SLOPE = 512.0, 512.0, 4.0
_MAX_DEPTH, _MAX_S = 1e6, 1e6


@dataclass(slots=True)
class _Sums:
    """Weighted sums of depth d and cost c (seconds a token): what a straight line is fitted from, in constant memory."""

    w: float = 0.0
    wd: float = 0.0
    wdd: float = 0.0
    wc: float = 0.0
    wdc: float = 0.0

    def add(self, weight: float, depth: float, cost: float, half_life: float) -> None:
        """Take in `weight` tokens; `half_life` is how many tokens halve the weight of what came before."""
        keep = 0.5 ** (weight / half_life)
        self.w = self.w * keep + weight
        self.wd = self.wd * keep + weight * depth
        self.wdd = self.wdd * keep + weight * depth * depth
        self.wc = self.wc * keep + weight * cost
        self.wdc = self.wdc * keep + weight * depth * cost


@dataclass(slots=True)
class Cost:
    """Seconds a token at depth d: level · (1 + slope · d); d is how many tokens stand before it.

    The slope is a property of model and machine, so it is fitted by least squares over a long memory; the level follows the load
    of the machine within `half_life` tokens. `prior_slope` counts as one batch of data: where depths hardly differ, it decides.
    """

    prior_slope: float
    half_life: float
    recent: _Sums = field(default_factory=_Sums)
    long: _Sums = field(default_factory=_Sums)
    deviation: float = _FIRST_DEVIATION

    def observe(self, num_tokens: int, depth: float, seconds: float) -> None:
        """Take in what `num_tokens` at a mean `depth` cost. A stall counts at most half as much again as was expected."""
        if num_tokens < 1 or not 0 <= depth <= _MAX_DEPTH or not 0.0 < seconds <= _MAX_S:
            return
        cost = seconds / num_tokens
        expected = self.at(depth)
        if expected > 0.0:
            if cost < _FAST * expected:  # slow can be an accident, fast cannot: what was known before was one
                self.recent, self.long, self.deviation = _Sums(), _Sums(), _FIRST_DEVIATION
            else:
                cost = min(cost, _SLOW * expected)
                keep = 0.5 ** (num_tokens / self.half_life)
                self.deviation = keep * self.deviation + (1.0 - keep) * abs(cost / expected - 1.0)
        self.recent.add(num_tokens, depth, cost, self.half_life)
        self.long.add(num_tokens, depth, cost, 64 * self.half_life)

    @property
    def slope(self) -> float:
        """The fitted line's rise over its beginning, never below zero nor far from what such a model can have."""
        sums, prior = self.long, self.prior_slope
        pull = _PRIOR_TOKENS * _PRIOR_DEPTH**2
        aa, ab, bb = sums.w + pull * prior * prior, sums.wd - pull * prior, sums.wdd + pull
        determinant = aa * bb - ab * ab
        if determinant <= 1e-9 * aa * bb:
            return prior
        a, b = (bb * sums.wc - ab * sums.wdc) / determinant, (aa * sums.wdc - ab * sums.wc) / determinant
        return min(max(0.0, b / a), _MAX_SLOPE * prior) if a > 0.0 else prior

    def at(self, depth: float) -> float:
        """Seconds of one token at this depth; 0 if nothing was observed."""
        slope, sums = self.slope, self.recent
        scale = sums.w + slope * sums.wd
        return sums.wc / scale * (1.0 + slope * depth) if scale > 0.0 else 0.0

    def of(self, num_tokens: int, depth: int) -> float:
        """Seconds of `num_tokens` tokens in a row, the first of them at this depth."""
        return num_tokens * self.at(depth + num_tokens / 2) if num_tokens > 0 else 0.0

    def to_list(self) -> list[float]:
        return [self.deviation, *astuple(self.recent), *astuple(self.long)]

    def restore(self, numbers: object) -> None:
        """Take over what `to_list` gave. ValueError if it is anything else."""
        if not isinstance(numbers, list) or len(numbers) != 11:
            raise ValueError("a list of 11 numbers is needed")
        if not all(type(each) in {int, float} and 0.0 <= each < 1e18 for each in numbers):
            raise ValueError("a number is out of bounds")
        self.deviation = min(float(numbers[0]), 1.0)
        self.recent, self.long = _Sums(*map(float, numbers[1:6])), _Sums(*map(float, numbers[6:]))


class Speed:
    """Seconds that prompts and answers take. Refreshed by each step of the engine; used by one thread.

    Slopes are the share by which a token's cost grows with every token before it, as far as the model's shape tells;
    data replaces them. Predictions are 0 until something was observed: ask `is_known`.
    """

    def __init__(self, *, prefill_slope: float = 5e-4, decode_slope: float = 3e-4) -> None:
        self._prefill = Cost(prefill_slope, half_life=1024.0)
        self._decode = Cost(decode_slope, half_life=128.0)
        self._context = Cost(0.0, half_life=4096.0)
        self._learns = True

    @classmethod
    def fixed(cls, *, prefill_tokens_per_s: float, decode_tokens_per_s: float) -> Self:
        """A speed that never changes, the same at every depth: for an engine that must be deterministic."""
        speed = cls(prefill_slope=0.0, decode_slope=0.0)
        speed._prefill.observe(1024, 0, 1024 / prefill_tokens_per_s)
        speed._decode.observe(128, 0, 128 / decode_tokens_per_s)
        speed._prefill.deviation = 0.0
        speed._learns = False
        return speed

    def observe_prefill(self, num_tokens: int, depth: int, seconds: float) -> None:
        """A piece of one prompt took so long alone in its batch, with `depth` tokens in the cache before it."""
        if self._learns and num_tokens >= MIN_PIECE_TOKENS:
            self._prefill.observe(num_tokens, depth + num_tokens / 2, seconds)

    def observe_decode(self, depth: int, seconds: float) -> None:
        """One token was evaluated alone and the next one sampled."""
        if self._learns:
            self._decode.observe(1, depth, seconds)

    def observe_context(self, num_cells: int, seconds: float) -> None:
        """A context of so many cells was made."""
        if self._learns:
            self._context.observe(num_cells, 0, seconds)

    @property
    def is_known(self) -> bool:
        """Whether enough was observed to predict from."""
        return self._prefill.recent.w >= 64 and self._decode.recent.w >= 4

    def overhead_s(self, num_cells: int) -> float:
        """Expected seconds between a prompt that is ready and its first batch: the making of a context, whose cells are all written."""
        return self._context.of(num_cells, 0)

    def prefill_s(self, num_tokens: int, depth: int = 0) -> float:
        """Expected seconds to evaluate `num_tokens` of a prompt behind `depth` cached ones."""
        return self._prefill.of(num_tokens, depth)

    def decode_s(self, num_tokens: int, depth: int) -> float:
        """Expected seconds to write `num_tokens` behind `depth` tokens of prompt and answer."""
        return self._decode.of(num_tokens, depth)

    def depth_of(self, factor: float) -> float:
        """How many tokens before it make a token of an answer `factor` times as slow as the first: infinity where depth costs nothing."""
        slope = self._decode.slope
        return (factor - 1.0) / slope if slope > 0.0 else math.inf

    @property
    def margin(self) -> float:
        """The share by which a prompt can take longer than expected: twice the mean miss of past predictions, at most a half."""
        return min(2.0 * self._prefill.deviation, _MAX_MARGIN)

    def plan_s(self, num_prompt_tokens: int, num_answer_tokens: int, *, depth: int = 0) -> float:
        """Seconds to plan with: overhead, prompt with its margin, answer. `depth` of the window are cached tokens."""
        prompt_s = self.prefill_s(num_prompt_tokens, depth) * (1.0 + self.margin)
        answer_s = self.decode_s(num_answer_tokens, depth + num_prompt_tokens)
        return self.overhead_s(depth + num_prompt_tokens + num_answer_tokens) + prompt_s + answer_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """At the beginning of a window, to be shown; 0 if unknown."""
        cost = self._prefill.at(0)
        return 1.0 / cost if cost > 0.0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """At the beginning of a window, to be shown; 0 if unknown."""
        cost = self._decode.at(0)
        return 1.0 / cost if cost > 0.0 else 0.0

    def to_dict(self) -> dict[str, list[float]]:
        return {name: cost.to_list() for name, cost in self._costs().items()}

    def restore(self, kept: object) -> None:
        """Take over what `to_dict` gave. ValueError if it is anything else; then nothing was taken over."""
        if not isinstance(kept, dict):
            raise ValueError("an object is needed")  # noqa: TRY004  # damaged data, not a wrong call
        spare = Speed()
        for costs in (spare._costs(), self._costs()):
            for name, cost in costs.items():
                cost.restore(kept.get(name))

    def _costs(self) -> dict[str, Cost]:
        return {"prefill": self._prefill, "decode": self._decode, "context": self._context}


class SpeedFile:
    """`speeds.json` in the home: the speeds of all models, each under a key that names file, machine and build. Without a home
    nothing is kept.
    """

    def __init__(self, home: Path | None, key: str) -> None:
        self._kept = JsonCache(None if home is None else home / "speeds.json", most=MAX_KEPT)
        self.key = key

    def load_into(self, speed: Speed) -> None:
        """Take over what was kept under the key, if anything sound was."""
        with suppress(ValueError):
            speed.restore(self._kept.read().get(self.key))

    def save(self, speed: Speed) -> None:
        self._kept.put(self.key, speed.to_dict())
