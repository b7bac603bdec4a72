"""Measure how fast a model runs on this machine, and predict how long prompts and answers take. Speeds are stored between runs.

To plan for a limit of S seconds that begins at `started`:

    engine.measure_speed()                     # about a second, once per model and machine
    speed = engine.speed
    left_s = started + S - time.perf_counter()
    # take the largest window whose prompt and answer satisfy speed.plan_s(num_prompt_tokens, num_answer_tokens) <= left_s
    engine.generate(prompt_ids, sampling, deadline=started + S)

The deadline covers both, so time saved on the prompt goes to the answer: set `sampling.max_tokens` to the tokens left in the window, not
to the planned number. Only a prompt that takes longer than S on its own can exceed the limit. `plan_s` therefore adds a margin to the
prompt, based on past prediction errors.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Self

from localrag.files import JsonCache

MAX_KEPT = 64
"""Maximum number of models and machines whose speed a home stores. The least recently used one is evicted."""
MIN_PIECE_TOKENS = 16
"""Minimum size in tokens of a prompt piece to learn from. In shorter ones, the fixed cost of a batch outweighs that of the tokens."""

_MAX_MARGIN, _FIRST_DEVIATION = 0.5, 0.1
_SLOW, _FAST = 1.5, 0.5
_PRIOR_TOKENS, _PRIOR_DEPTH, _MAX_SLOPE = 512.0, 512.0, 4.0
_MAX_DEPTH, _MAX_S = 1e6, 1e6


@dataclass(slots=True)
class _Sums:
    """Weighted sums of depth d and cost c (seconds per token), for fitting a straight line in constant memory."""

    w: float = 0.0
    wd: float = 0.0
    wdd: float = 0.0
    wc: float = 0.0
    wdc: float = 0.0

    def add(self, weight: float, depth: float, cost: float, half_life: float) -> None:
        """Add `weight` tokens. Every `half_life` tokens halve the weight of earlier data."""
        keep = 0.5 ** (weight / half_life)
        self.w = self.w * keep + weight
        self.wd = self.wd * keep + weight * depth
        self.wdd = self.wdd * keep + weight * depth * depth
        self.wc = self.wc * keep + weight * cost
        self.wdc = self.wdc * keep + weight * depth * cost


@dataclass(slots=True)
class Cost:
    """Seconds per token at depth d, the number of preceding tokens: level · (1 + slope · d).

    The slope depends on model and machine, so it is fitted by least squares over a long history. The level follows the machine's load
    within `half_life` tokens. `prior_slope` has the weight of one batch, so it decides while depths hardly differ.
    """

    prior_slope: float
    half_life: float
    recent: _Sums = field(default_factory=_Sums)
    long: _Sums = field(default_factory=_Sums)
    deviation: float = _FIRST_DEVIATION

    def observe(self, num_tokens: int, depth: float, seconds: float) -> None:
        """Learn from `num_tokens` tokens at a mean `depth`. A stall counts as at most 1.5 times the expected cost."""
        if num_tokens < 1 or not 0 <= depth <= _MAX_DEPTH or not 0.0 < seconds <= _MAX_S:
            return
        cost = seconds / num_tokens
        expected = self.at(depth)
        if expected > 0.0:
            if cost < _FAST * expected:  # slow can be an accident, fast cannot: discard the earlier data
                self.recent, self.long, self.deviation = _Sums(), _Sums(), _FIRST_DEVIATION
            else:
                cost = min(cost, _SLOW * expected)
                keep = 0.5 ** (num_tokens / self.half_life)
                self.deviation = keep * self.deviation + (1.0 - keep) * abs(cost / expected - 1.0)
        self.recent.add(num_tokens, depth, cost, self.half_life)
        self.long.add(num_tokens, depth, cost, 64 * self.half_life)

    @property
    def slope(self) -> float:
        """Relative slope of the fitted line, limited to 0 and a multiple of the prior."""
        sums, prior = self.long, self.prior_slope
        pull = _PRIOR_TOKENS * _PRIOR_DEPTH**2
        aa, ab, bb = sums.w + pull * prior * prior, sums.wd - pull * prior, sums.wdd + pull
        determinant = aa * bb - ab * ab
        if determinant <= 1e-9 * aa * bb:
            return prior
        a, b = (bb * sums.wc - ab * sums.wdc) / determinant, (aa * sums.wdc - ab * sums.wc) / determinant
        return min(max(0.0, b / a), _MAX_SLOPE * prior) if a > 0.0 else prior

    def at(self, depth: float) -> float:
        """Seconds per token at this depth; 0 without observations."""
        slope, sums = self.slope, self.recent
        scale = sums.w + slope * sums.wd
        return sums.wc / scale * (1.0 + slope * depth) if scale > 0.0 else 0.0

    def of(self, num_tokens: int, depth: int) -> float:
        """Seconds for `num_tokens` consecutive tokens, the first at this depth."""
        return num_tokens * self.at(depth + num_tokens / 2) if num_tokens > 0 else 0.0

    def to_list(self) -> list[float]:
        return [self.deviation, *astuple(self.recent), *astuple(self.long)]

    def restore(self, numbers: object) -> None:
        """Load the result of `to_list`. Raises ValueError for anything else."""
        if not isinstance(numbers, list) or len(numbers) != 11:
            raise ValueError("a list of 11 numbers is needed")
        if not all(type(each) in {int, float} and 0.0 <= each < 1e18 for each in numbers):
            raise ValueError("a number is out of bounds")
        self.deviation = min(float(numbers[0]), 1.0)
        self.recent, self.long = _Sums(*map(float, numbers[1:6])), _Sums(*map(float, numbers[6:]))


class Speed:
    """Predicted seconds for prompts and answers, updated by each engine step. Use it from one thread.

    A slope is the relative increase in a token's cost for each token before it. It starts from the model's shape and is replaced by data.
    Predictions are 0 without observations; see `is_known`.
    """

    def __init__(self, *, prefill_slope: float = 5e-4, decode_slope: float = 3e-4) -> None:
        self._prefill = Cost(prefill_slope, half_life=1024.0)
        self._decode = Cost(decode_slope, half_life=128.0)
        self._context = Cost(0.0, half_life=4096.0)
        self._learns = True

    @classmethod
    def fixed(cls, *, prefill_tokens_per_s: float, decode_tokens_per_s: float) -> Self:
        """A constant speed, the same at every depth, for a deterministic engine."""
        speed = cls(prefill_slope=0.0, decode_slope=0.0)
        speed._prefill.observe(1024, 0, 1024 / prefill_tokens_per_s)
        speed._decode.observe(128, 0, 128 / decode_tokens_per_s)
        speed._prefill.deviation = 0.0
        speed._learns = False
        return speed

    def observe_prefill(self, num_tokens: int, depth: int, seconds: float) -> None:
        """Record a prompt piece that had a batch to itself: its tokens, the number of cached tokens before it, and its seconds."""
        if self._learns and num_tokens >= MIN_PIECE_TOKENS:
            self._prefill.observe(num_tokens, depth + num_tokens / 2, seconds)

    def observe_decode(self, depth: int, seconds: float) -> None:
        """Record the evaluation of a single token and the sampling of the next."""
        if self._learns:
            self._decode.observe(1, depth, seconds)

    def observe_context(self, num_cells: int, seconds: float) -> None:
        """Record the creation of a context."""
        if self._learns:
            self._context.observe(num_cells, 0, seconds)

    @property
    def is_known(self) -> bool:
        """Whether there are enough observations for predictions."""
        return self._prefill.recent.w >= 64 and self._decode.recent.w >= 4

    def overhead_s(self, num_cells: int) -> float:
        """Expected seconds for creating a context, all of whose cells are written."""
        return self._context.of(num_cells, 0)

    def prefill_s(self, num_tokens: int, depth: int = 0) -> float:
        """Expected seconds to evaluate `num_tokens` of a prompt after `depth` cached tokens."""
        return self._prefill.of(num_tokens, depth)

    def decode_s(self, num_tokens: int, depth: int) -> float:
        """Expected seconds to write `num_tokens` after `depth` tokens of prompt and answer."""
        return self._decode.of(num_tokens, depth)

    def depth_of(self, factor: float) -> float:
        """Number of preceding tokens that slow down decoding by `factor`; infinity if depth has no effect."""
        slope = self._decode.slope
        return (factor - 1.0) / slope if slope > 0.0 else math.inf

    @property
    def margin(self) -> float:
        """Relative safety margin for prompts: twice the mean error of past predictions, at most 0.5."""
        return min(2.0 * self._prefill.deviation, _MAX_MARGIN)

    def plan_s(self, num_prompt_tokens: int, num_answer_tokens: int, *, depth: int = 0) -> float:
        """Seconds to plan for: overhead, prompt with its margin, and answer. `depth` is the number of cached tokens before them."""
        prompt_s = self.prefill_s(num_prompt_tokens, depth) * (1.0 + self.margin)
        answer_s = self.decode_s(num_answer_tokens, depth + num_prompt_tokens)
        return self.overhead_s(depth + num_prompt_tokens + num_answer_tokens) + prompt_s + answer_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefill speed at the beginning of a window, for display; 0 if unknown."""
        cost = self._prefill.at(0)
        return 1.0 / cost if cost > 0.0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode speed at the beginning of a window, for display; 0 if unknown."""
        cost = self._decode.at(0)
        return 1.0 / cost if cost > 0.0 else 0.0

    def to_dict(self) -> dict[str, list[float]]:
        return {name: cost.to_list() for name, cost in self._costs().items()}

    def restore(self, record: object) -> None:
        """Load the result of `to_dict`. Raises ValueError for anything else, without any change."""
        if not isinstance(record, dict):
            raise ValueError("an object is needed")  # noqa: TRY004  # damaged data, not a wrong call
        spare = Speed()
        for costs in (spare._costs(), self._costs()):
            for name, cost in costs.items():
                cost.restore(record.get(name))

    def _costs(self) -> dict[str, Cost]:
        return {"prefill": self._prefill, "decode": self._decode, "context": self._context}


class SpeedFile:
    """The file `speeds.json` in the home, with the speeds of all models by file, machine and build. Without a home, nothing is stored."""

    def __init__(self, home: Path | None, key: str) -> None:
        self._kept = JsonCache(None if home is None else home / "speeds.json", most=MAX_KEPT)
        self.key = key

    def load_into(self, speed: Speed) -> None:
        """Load the stored speed, if there is a valid one."""
        with suppress(ValueError):
            speed.restore(self._kept.read().get(self.key))

    def save(self, speed: Speed) -> None:
        self._kept.put(self.key, speed.to_dict())


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """How fast llama.cpp evaluates 4-bit weights on this machine, measured on a generated model.

    `prefill_weights_per_s` is the number of weights times tokens per second at the beginning of a prompt; each token before it adds
    `prefill_slope` to its cost, as a share. `decode_bytes_per_s` are the bytes of weights and KV cache read per second while an answer is
    written. A real model reaches about these numbers: other weight types and architectures differ.
    """

    prefill_weights_per_s: float
    prefill_slope: float
    decode_bytes_per_s: float

    def prefill_s(self, num_tokens: int, active_weights: int) -> float:
        """Expected seconds to read a prompt with a model that uses so many weights per token."""
        return num_tokens * (1.0 + self.prefill_slope * num_tokens / 2) * active_weights / self.prefill_weights_per_s

    def decode_tokens_per_s(self, bytes_per_token: float) -> float:
        """Expected tokens per second of an answer, if so many bytes are read for each."""
        return self.decode_bytes_per_s / bytes_per_token
