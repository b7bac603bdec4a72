"""Summarize a text at one of four levels of detail, within a token limit, with or without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Literal, Protocol, get_args

from localrag.errors import UsageError, counted
from localrag.outline import language_of
from localrag.summary.shorten import Count, extract, outlined, split, truncate
from localrag.text.terms import words

Level = Literal["full", "detailed", "summary", "stub"]
Method = Literal["whole", "outline", "extractive", "model", "stub", "truncated"]

LEVELS: tuple[Level, ...] = get_args(Level)
"""From the most detail to the least."""
LIMITS: dict[Level, int | None] = {"full": None, "detailed": 2000, "summary": 500, "stub": 100}
"""The most tokens of each level."""

_KEPT: tuple[Method, ...] = ("outline", "extractive", "model")
"""Methods worth caching; the others are cheap."""
_VERSION = "2"
"""Version of everything that shapes a summary; changing it invalidates cached summaries."""

Write = Callable[[str, int], str]
"""(text, maximum tokens) → summary by a model; "" if it could not write one."""

MAX_PARTS = 8
"""Most parts to summarize one by one; a longer text is shortened first."""
ANSWER_TOKENS = 160
"""Maximum tokens of a summary by a model: a short paragraph, since small models with more room repeat themselves."""
MIN_WRITE_TOKENS = 64
"""Minimum input of `write`, in tokens: smaller parts say too little."""
_MAX_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A text to summarize. `label` is its path as a person knows it; its suffix determines the language. `modified` is in seconds
    since the epoch.
    """

    label: str
    text: str
    modified: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A source at a level. `num_tokens` of `text` is at most `limit` (None: no limit).

    `method` says how it was made: the `whole` source, its `outline`, its own sentences (`extractive`), the words of a `model`,
    a `stub` with facts about it, or its `truncated` beginning. `cached` tells whether it came from the cache.
    """

    level: Level
    text: str
    num_tokens: int
    num_source_tokens: int
    method: Method
    limit: int | None
    cached: bool = False


class SummaryCache(Protocol):
    """A cache of summaries. A key covers content, level, limit and method, so a changed text has a different key."""

    def get(self, key: str, max_age_s: float | None) -> str | None:
        """Return the text stored under a key at most `max_age_s` seconds ago (None: any age), or None."""
        ...

    def put(self, key: str, text: str) -> None: ...


def summarize(
    source: Source,
    level: Level,
    *,
    count: Count,
    limit: int | None = None,
    write: Write | None = None,
    write_tokens: int = 1024,
    cache: SummaryCache | None = None,
    cache_model: str = "",
    max_age_s: float | None = None,
) -> Summary:
    """Summarize a source at a level, in at most `limit` tokens by `count` (None for the level's own, `LIMITS`).

    A text within the limit is taken whole at every level but "stub". "detailed" is the outline of code and Markdown, and sentences of other
    texts. "summary" is written by `write(text, max_tokens)`, in parts if the text has more than `write_tokens`; without `write`, or if it
    writes nothing usable, it consists of the text's own sentences.

    `cache_model` names the tokenizer that counts and the model that writes. Raises UsageError for an unknown level or a limit below 1;
    errors of `write` are passed on, and nothing is cached then.
    """
    if level not in LEVELS:
        raise UsageError(f"There is no level {level!r}.", hint=f"Use one of {', '.join(LEVELS)}.")
    if limit is not None and limit < 1:
        raise UsageError(f"The limit is {limit} tokens, but must be 1 or more.", limit=limit)
    limit = LIMITS[level] if limit is None else limit
    num_source_tokens = count(source.text)

    def result(text: str, method: Method) -> Summary:
        num_tokens = num_source_tokens if method == "whole" else count(text)
        assert limit is None or num_tokens <= limit, (level, method, num_tokens, limit)
        return Summary(level=level, text=text, num_tokens=num_tokens, num_source_tokens=num_source_tokens, method=method, limit=limit)

    if level == "stub":
        assert limit is not None
        return result(_stub(source, num_source_tokens, limit, count), "stub")
    if limit is None or num_source_tokens <= limit:
        return result(source.text, "whole")
    if level == "full":
        return result(truncate(source.text, limit, count), "truncated")
    key = _key(source, level, limit, cache_model, "" if write is None or level != "summary" else f"model {write_tokens}")
    cached_summary = None if cache is None else _read(cache.get(key, max_age_s), limit, count)
    if cached_summary is not None:
        return replace(result(*cached_summary), cached=True)
    text, method = _make(source, level, limit, count, write, write_tokens)
    if cache is not None:
        cache.put(key, json.dumps({"method": method, "text": text}, ensure_ascii=False, separators=(",", ":")))
    return result(text, method)


def usable(summary: str, text: str) -> str:
    """Remove heading marks from a model's summary. Return "" if it says nothing, repeats itself, or is as long as the text."""
    summary = summary.strip().lstrip("#").strip()
    summary_words = [word for word in words(summary.casefold()) if any(map(str.isalpha, word))]
    is_too_short = len(summary_words) < 3 and len(summary) < 12  # in scripts without spaces, twelve characters are several words
    repeats = len(summary_words) > 20 and len(set(summary_words)) < 0.3 * len(summary_words)
    return "" if not summary_words or is_too_short or repeats or len(summary) >= len(text) else summary


def _make(source: Source, level: Level, limit: int, count: Count, write: Write | None, write_tokens: int) -> tuple[str, Method]:
    if level == "detailed":
        if text := outlined(source.text, language_of(source.label), limit, count):
            return text, "outline"
    elif write is not None and (summary := _write_summary(source.label, source.text, limit, count, write, write_tokens)):
        return summary, "model"
    return extract(source.text, limit, count), "extractive"


def _write_summary(label: str, text: str, limit: int, count: Count, write: Write, write_tokens: int) -> str:
    """Have `write` summarize a text in at most `limit` tokens by `count`; return "" if it wrote nothing usable.

    A text of more than `write_tokens` is summarized in parts, and the summaries are summarized together. A part without a
    usable summary is replaced by its own sentences, unless that is the case for most parts. A text of more than MAX_PARTS parts
    is shortened first: code and Markdown to an outline, other texts to their best sentences.
    """
    if write_tokens < MIN_WRITE_TOKENS:
        return ""
    answer = min(limit, ANSWER_TOKENS)
    if count(text) > MAX_PARTS * write_tokens:
        most = MAX_PARTS * write_tokens * 3 // 4  # parts end at good places, so they are not quite full
        text = outlined(text, language_of(label), most, count) or extract(text, most, count)
    for _ in range(_MAX_ROUNDS):
        if count(text) <= write_tokens:
            return truncate(usable(write(text, answer), text), limit, count)
        whole = list(split(text, write_tokens, count))
        summaries = [truncate(usable(write(part, answer), part), write_tokens // 3, count) for part in whole]
        if sum(map(bool, summaries)) * 2 < len(whole):
            return ""
        text = "\n\n".join(short or extract(part, write_tokens // 3, count) for short, part in zip(summaries, whole, strict=True))
    return ""


def _key(source: Source, level: Level, limit: int, model: str, method: str) -> str:
    content = blake2b(source.text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    facts = [_VERSION, content, language_of(source.label), level, limit, model, method]
    return blake2b(json.dumps(facts, separators=(",", ":")).encode(), digest_size=32).hexdigest()


def _read(entry: str | None, limit: int, count: Count) -> tuple[str, Method] | None:
    """Read a cached summary; return None unless it is intact and fits. Other programs can write to a cache."""
    try:
        fields = json.loads(entry or "null")
        text, method = fields["text"], fields["method"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(text, str) or method not in _KEPT or count(text) > limit:
        return None
    return text, method


def _stub(source: Source, num_tokens: int, limit: int, count: Count) -> str:
    """Return path, type, lines, tokens and date of a source. A long path loses its middle; then the stub is truncated."""
    label = "".join(char if char.isprintable() else " " for char in source.label)
    kind = language_of(source.label) or source.label.rpartition("/")[2].rpartition(".")[2][:12]
    num_lines = source.text.count("\n") + (not source.text.endswith("\n") and source.text != "")
    facts = f"{kind or 'text'}, {counted(num_lines, 'line')}, {counted(num_tokens, 'token')}"
    date = _date(source.modified)

    def stub(num_chars: int) -> str:
        name = label if num_chars >= len(label) else f"{label[: num_chars // 2]}…{label[len(label) - num_chars + num_chars // 2 :]}"
        return f"{name}\n{facts}" + (f"\nmodified {date}" if date else "")

    low, high = 0, len(label)
    if count(stub(min(high, 4096))) <= limit and high <= 4096:
        return stub(high)
    high = min(high, 4096)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(stub(middle)) <= limit else (low, middle)
    return truncate(stub(low), limit, count)


def _date(modified: float | None) -> str:
    try:
        return "" if modified is None else datetime.fromtimestamp(modified, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):  # a time outside the calendar
        return ""
