"""How to sample, and what came out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from localrag.errors import UsageError
from localrag.thinking import DEFAULT_TOKENS, MIN_TOKENS

FinishReason = Literal["stop", "length", "time", "cancelled", "error"]
"""The model ended it; its `max_tokens` did; its deadline did; somebody stopped it; it could not go on."""

MAX_LOGPROBS = 20
"""Of the likeliest tokens in the place of each, as OpenAI's API has it."""
_MAX_SCHEMA_CHARS = 128 * 1024


def schema_text(schema: Mapping[str, Any] | str) -> str:
    """A JSON schema as compact JSON, properties in their order; a text is read and written again. UsageError if it is not JSON."""
    try:
        if isinstance(schema, str) and len(schema) > _MAX_SCHEMA_CHARS:
            raise UsageError(f"The JSON schema has {len(schema)} characters; the limit is {_MAX_SCHEMA_CHARS}.")
        value = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:  # a circle, a lone surrogate, a number of 5,000 digits, not JSON at all
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:200]
        raise UsageError(f"The JSON schema cannot be used: {reason}.") from error
    if not isinstance(value, dict):
        raise UsageError("A JSON schema must be a JSON object.")
    if len(text) > _MAX_SCHEMA_CHARS:
        raise UsageError(f"The JSON schema has {len(text)} characters; the limit is {_MAX_SCHEMA_CHARS}.")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What llama.cpp's sampler chain is built from. `temperature` 0 is greedy; then nothing else but penalties matters.

    `seed` is where sampling starts. With `repeatable`, the same prompt and seed give the same text, bit by bit, whatever else the machine
    and the engine do: such answers are computed one after another, in a context of their own. `max_tokens` bounds the answer; None is
    what the prompt leaves of the window, which a session knows. `think_tokens` bounds what a reasoning model thinks before it (0: it is
    kept from thinking); `stop` are strings at which it ends (and which are left out).
    `json_schema` makes the answer JSON that is valid under a schema (what of JSON Schema engine/grammar.py enforces); it is
    given as a mapping or its JSON text, and held as text. An answer that reaches `max_tokens` before it is closed is not valid JSON.
    With `or_text` it may also be any text that does not begin as such JSON does (see engine/grammar.py). `logprobs` asks for how likely
    each token of the answer was, and so many of the likeliest in its place; then nothing is thought before.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    repeatable: bool = field(default=False, repr=False)  # not in the digests of councils, which are older
    max_tokens: int | None = 512
    think_tokens: int = DEFAULT_TOKENS
    stop: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | str | None = None
    or_text: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        checks = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_k", 0 <= self.top_k <= 1_000_000, "0 to 1000000"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, up to 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("repeat_penalty", 0.0 < self.repeat_penalty <= 100.0, "above 0, up to 100"),
            ("repeat_last_n", 0 <= self.repeat_last_n <= 1_000_000, "0 to 1000000"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2"),
            ("seed", 0 <= self.seed < 2**32, "0 to 4294967295"),
            ("max_tokens", self.max_tokens is None or 1 <= self.max_tokens < 2**31, "1 to 2147483647"),
            (
                "think_tokens",
                self.think_tokens == 0 or MIN_TOKENS <= self.think_tokens < 2**31,
                f"0, or {MIN_TOKENS} to 2147483647",
            ),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
            ("stop", len(self.stop) <= 64 and all(0 < len(s) <= 1024 for s in self.stop), "up to 64 strings of 1 to 1024 characters"),
        )
        for name, ok, allowed in checks:
            if not ok:  # also for NaN, which compares false to everything
                raise UsageError(f"{name} is {getattr(self, name)!r}, but must be {allowed}.")

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        return replace(self, max_tokens=max_tokens)

    @property
    def num_answer_tokens(self) -> int:
        """`max_tokens` as a number. UsageError where it is None and no session has put the room that is left in its place."""
        if self.max_tokens is None:
            raise UsageError("max_tokens is None, and here nobody knows what is left for an answer.", hint="Give a number of tokens.")
        return self.max_tokens

    @property
    def room_to_think(self) -> int:
        """Tokens for thoughts: none before an answer that must keep to a schema from its first token on, or whose tokens are wanted."""
        return 0 if self.json_schema is not None or self.logprobs is not None else self.think_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer: its bytes, the logarithm of how likely the model held it, and the same of the likeliest in its place.

    It is the model's own distribution, before temperature, penalties, grammar and what else chooses.
    """

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step of the engine added to one sequence: `text` holds whole characters only and can be empty, as can `thought`, which
    comes before it and is no part of the answer."""

    seq_id: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None
    thought: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Wall-clock seconds. `first_token_s` counts from the call to the first sampled token.

    `load_s` is what loading the model and making its context took, in the answer that waited for it.
    """

    load_s: float = 0.0
    retrieve_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0

    def tokens_per_s(self, num_tokens: int) -> float | None:
        """The speed of decoding that many tokens; None for fewer than two, for the first one ends the prefill."""
        return (num_tokens - 1) / self.decode_s if num_tokens > 1 and self.decode_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished sequence. `prompt_tokens` is what the model was given, of which `cached_tokens` were not evaluated again;
    `completion_ids` are the tokens behind it, the one that ended the answer included; of them, `reasoning_tokens` are thoughts:
    `reasoning`.
    """

    text: str
    completion_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    timings: Timings = Timings()
    reasoning: str = ""
    reasoning_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def completion_tokens(self) -> int:
        return len(self.completion_ids)
