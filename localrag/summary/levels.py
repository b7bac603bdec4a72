"""A text at one of four levels of detail, never longer than the level's limit."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Literal, Protocol, get_args

from localrag.errors import UsageError
from localrag.outline import language_of
from localrag.summary.detailed import outlined
from localrag.summary.extractive import extract
from localrag.summary.fitting import Count, truncate
from localrag.summary.hierarchy import Write, write_summary

Level = Literal["full", "detailed", "summary", "stub"]
Method = Literal["whole", "outline", "extractive", "model", "stub", "truncated"]

LEVELS: tuple[Level, ...] = get_args(Level)
"""From the most detail to the least."""
LIMITS: dict[Level, int | None] = {"full": None, "detailed": 2000, "summary": 500, "stub": 100}
"""The most tokens of each level."""

_KEPT: tuple[Method, ...] = ("outline", "extractive", "model")
"""What a cache holds: the others cost nothing to make."""
_VERSION = "1"
"""Of everything here that decides how a summary reads: a new one forgets the summaries that were kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A text to summarize. `label` is its path as a person knows it; its ending says the language. `modified` is in epoch seconds."""

    label: str
    text: str
    modified: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A source at a level: `num_tokens` of `text` is at most `limit`, which is None where there is none.

    `method` says how it came about: the source is taken `whole`, its `outline`, its own sentences (`extractive`), what a `model` wrote, a
    `stub` with the facts about it, or its `truncated` beginning. `cached` says that it was written before.
    """

    level: Level
    text: str
    num_tokens: int
    num_source_tokens: int
    method: Method
    limit: int | None
    cached: bool = False


class SummaryCache(Protocol):
    """Where summaries are kept. A key names content, level, limit and method, so that what changed is not found again."""

    def get(self, key: str, max_age_s: float | None) -> str | None:
        """What was put there at most `max_age_s` seconds ago (None for any time), or None."""
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
    """The source at a level, in at most `limit` tokens by `count` (None for the level's own, `LIMITS`).

    A text that is within the limit is taken whole at every level but "stub". "detailed" is the outline of code and Markdown, and
    sentences of other texts. "summary" is written by `write(text, max_tokens)`, in parts where the text has more than
    `write_tokens`; without `write`, or where that writes nothing usable, it is made of the text's own sentences.

    `cache_model` names the tokenizer that counts and the model that writes. UsageError for an unknown level or a limit below 1;
    what `write` raises is passed on, and nothing is kept then.
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
    kept = None if cache is None else _read(cache.get(key, max_age_s), limit, count)
    if kept is not None:
        return replace(result(*kept), cached=True)
    text, method = _make(source, level, limit, count, write, write_tokens)
    if cache is not None:
        cache.put(key, json.dumps({"method": method, "text": text}, ensure_ascii=False, separators=(",", ":")))
    return result(text, method)


def _make(source: Source, level: Level, limit: int, count: Count, write: Write | None, write_tokens: int) -> tuple[str, Method]:
    if level == "detailed":
        if text := outlined(source.text, language_of(source.label), limit, count):
            return text, "outline"
    elif write is not None and (written := write_summary(source.label, source.text, limit, count, write, write_tokens)):
        return written, "model"
    return extract(source.text, limit, count), "extractive"


def _key(source: Source, level: Level, limit: int, model: str, method: str) -> str:
    content = blake2b(source.text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    facts = [_VERSION, content, language_of(source.label), level, limit, model, method]
    return blake2b(json.dumps(facts, separators=(",", ":")).encode(), digest_size=32).hexdigest()


def _read(kept: str | None, limit: int, count: Count) -> tuple[str, Method] | None:
    """What a cache returned, if it is whole and fits: a cache is a file that others can write to."""
    try:
        fields = json.loads(kept or "null")
        text, method = fields["text"], fields["method"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(text, str) or method not in _KEPT or count(text) > limit:
        return None
    return text, method


def _stub(source: Source, num_tokens: int, limit: int, count: Count) -> str:
    """Path, type, lines, tokens and date of a source. A path that is too long loses its middle; what does not fit then is cut."""
    label = "".join(char if char.isprintable() else " " for char in source.label)
    kind = language_of(source.label) or source.label.rpartition("/")[2].rpartition(".")[2][:12]
    num_lines = source.text.count("\n") + (not source.text.endswith("\n") and source.text != "")
    facts = f"{kind or 'text'}, {num_lines:,} lines, {num_tokens:,} tokens"
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
    except (ValueError, OverflowError, OSError):  # a time that no calendar has
        return ""
