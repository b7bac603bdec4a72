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
import operator
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

DRAFT_SIZES = (3, 8)
"""Numbers of tokens to guess at a time. A choice between all numbers from 1 to 8 was hardly faster (measured)."""
MIN_DRAFT_GAIN = 1.05
"""Minimum expected speed of decoding with a draft, compared with decoding without one."""
_MIN_DRAFTS = 3
"""Number of drafts of each size that are tried to learn what they cost."""
_TRY_AGAIN = 128
"""Number of drafts that were not worth it after which one is tried again, since the load of the machine changes what they cost."""
_MIN_LATEST = 1.9
"""Number of single tokens just decoded that suffice to compare a draft with."""
_MIN_OBSERVED = 4
"""Number of decoded tokens from which on the cost of one is known."""
_GUESS_CLASSES, _GUESS_HALF_LIFE = 6, 256.0
_PRIOR_SEEN, _PRIOR_RIGHT = 4.0, 3.0
_ALWAYS_STORED = ("prefill", "decode", "context")


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


class Guesses:
    """The share of right guesses (see Lookup), learned apart for each class of how many in a row were right before."""

    def __init__(self) -> None:
        self._seen = [0.0] * _GUESS_CLASSES
        self._right = [0.0] * _GUESS_CLASSES

    def observe(self, num_right: int, *, is_right: bool) -> None:
        """Record a guess that came after `num_right` right ones in a row."""
        at, keep = _guess_class(num_right), 0.5 ** (1.0 / _GUESS_HALF_LIFE)
        self._seen[at] = keep * self._seen[at] + 1.0
        self._right[at] = keep * self._right[at] + is_right

    def expected(self, num_right: int, num_tokens: int) -> float:
        """Expected number of right tokens in a draft of `num_tokens`, up to its first wrong one."""
        total, share = 0.0, 1.0
        for further in range(num_tokens):
            at = _guess_class(num_right + further)
            share *= (self._right[at] + _PRIOR_RIGHT) / (self._seen[at] + _PRIOR_SEEN)
            total += share
        return total

    def to_list(self) -> list[float]:
        return [*self._seen, *self._right]

    def restore(self, numbers: object) -> None:
        """Load the result of `to_list`. Raises ValueError for anything else."""
        if not isinstance(numbers, list) or len(numbers) != 2 * _GUESS_CLASSES:
            raise ValueError(f"a list of {2 * _GUESS_CLASSES} numbers is needed")
        seen, right = numbers[:_GUESS_CLASSES], numbers[_GUESS_CLASSES:]
        if not all(type(each) in {int, float} and 0.0 <= each < 1e6 for each in numbers) or any(map(operator.lt, seen, right)):
            raise ValueError("a number is out of bounds")
        self._seen, self._right = list(map(float, seen)), list(map(float, right))


def _guess_class(num_right: int) -> int:
    """0, 1, 2-3, 4-7, 8-15, and 16 or more right guesses in a row."""
    return min(num_right.bit_length(), _GUESS_CLASSES - 1)


class Speed:
    """Predicted seconds for prompts and answers, updated by each engine step. Use it from one thread.

    A slope is the relative increase in a token's cost for each token before it. It starts from the model's shape and is replaced by data.
    Predictions are 0 without observations; see `is_known`.
    """

    def __init__(self, *, prefill_slope: float = 5e-4, decode_slope: float = 3e-4) -> None:
        self._prefill = Cost(prefill_slope, half_life=1024.0)
        self._decode = Cost(decode_slope, half_life=128.0)
        self._context = Cost(0.0, half_life=4096.0)
        self._latest = Cost(decode_slope, half_life=16.0)
        self._drafts = {size: Cost(0.0, half_life=32.0) for size in DRAFT_SIZES}
        self._guesses = Guesses()
        self._num_declined = 0
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
            self._latest.observe(1, depth, seconds)

    def observe_draft(self, num_tokens: int, depth: int, seconds: float) -> None:
        """Record the evaluation of a single token with a draft of `num_tokens`, and the sampling of the next ones.

        Its cost is kept as a multiple of the latest single tokens, so that it stays right when other programs come and go.
        """
        token_s = self._latest.at(depth) if self._latest.recent.w >= _MIN_LATEST else self._decode.at(depth)
        if self._learns and num_tokens in self._drafts and token_s > 0.0:
            self._drafts[num_tokens].observe(1, depth, seconds / token_s)

    def observe_guess(self, num_right: int, *, is_right: bool) -> None:
        """Record whether a token was guessed, after `num_right` right guesses in a row."""
        self._guesses.observe(num_right, is_right=is_right)

    def observe_context(self, num_cells: int, seconds: float) -> None:
        """Record the creation of a context."""
        if self._learns:
            self._context.observe(num_cells, 0, seconds)

    @property
    def is_known(self) -> bool:
        """Whether there are enough observations for predictions."""
        return self._prefill.recent.w >= 64 and self._decode.recent.w >= _MIN_OBSERVED

    def overhead_s(self, num_cells: int) -> float:
        """Expected seconds for creating a context, all of whose cells are written."""
        return self._context.of(num_cells, 0)

    def prefill_s(self, num_tokens: int, depth: int = 0) -> float:
        """Expected seconds to evaluate `num_tokens` of a prompt after `depth` cached tokens."""
        return self._prefill.of(num_tokens, depth)

    def decode_s(self, num_tokens: int, depth: int) -> float:
        """Expected seconds to write `num_tokens` after `depth` tokens of prompt and answer."""
        return self._decode.of(num_tokens, depth)

    @property
    def learns(self) -> bool:
        """Whether observations have an effect. They have none on a constant speed."""
        return self._learns

    def draft_s(self, num_tokens: int, depth: int) -> float:
        """Expected seconds for a token with a draft of `num_tokens`, after `depth` tokens of prompt and answer. Unknown costs count
        as those of the same number of single tokens.
        """
        return self._draft_cost(num_tokens) * self.decode_s(1, depth)

    def _draft_cost(self, num_tokens: int) -> float:
        """How many single tokens a token with a draft takes as long as."""
        return self._drafts[num_tokens].at(0) or 1.0 + num_tokens

    def draft_size(self, num_right: int, most: int) -> int:
        """The number of tokens to draft, at most `most`, after `num_right` right guesses in a row: the one expected to be fastest.

        0 if the gain is expected to be below MIN_DRAFT_GAIN. The first drafts of each size are tried to learn their cost.
        """
        sizes = [size for size in self._drafts if size <= most]
        if not (self._learns and sizes and self._decode.recent.w >= _MIN_OBSERVED):
            return 0
        for size in sizes:
            if self._drafts[size].recent.w < _MIN_DRAFTS - 0.5:  # earlier ones count slightly less
                return size
        gains = {size: (1.0 + self._guesses.expected(num_right, size)) / self._draft_cost(size) for size in sizes}
        best = max(gains, key=gains.__getitem__)
        self._num_declined = 0 if gains[best] >= MIN_DRAFT_GAIN else (self._num_declined + 1) % _TRY_AGAIN
        return 0 if self._num_declined else best

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
        return {name: part.to_list() for name, part in self._parts().items()}

    def restore(self, record: object) -> None:
        """Load the result of `to_dict`, of an earlier version too. Raises ValueError for anything else, without any change."""
        if not isinstance(record, dict):
            raise ValueError("an object is needed")  # noqa: TRY004  # damaged data, not a wrong call
        spare = Speed()
        for parts in (spare._parts(), self._parts()):
            for name, part in parts.items():
                if name in record or name in _ALWAYS_STORED:
                    part.restore(record.get(name))

    def _parts(self) -> dict[str, Cost | Guesses]:
        drafts = {f"draft{size}": cost for size, cost in self._drafts.items()}
        return {"prefill": self._prefill, "decode": self._decode, "context": self._context, **drafts, "guesses": self._guesses}


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
        """Expected seconds to read a prompt with a model that multiplies each token with `active_weights`."""
        return num_tokens * (1.0 + self.prefill_slope * num_tokens / 2) * active_weights / self.prefill_weights_per_s

    def decode_tokens_per_s(self, bytes_per_token: float) -> float:
        """Expected tokens per second of an answer, if each token reads `bytes_per_token`."""
        return self.decode_bytes_per_s / bytes_per_token
