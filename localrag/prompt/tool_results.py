"""Tool results in the prompt: the JSON that is counted is the JSON that is sent, and later calls know what earlier ones used.

A search returns one JSON object with just the fields that a citation needs:

    {"results":[{"id":"KB#12","source":"guide/pets.md","heading":"Heat","text":"…"}],
     "above":["KB#3"],"omitted":["KB#9","KB#4"],"tokens_left":512}

`above` are passages that an earlier result of this turn already contains; they are not sent twice. `omitted` were found but did
not fit. `also_in` of a result names other documents with the same text. If `above` or `omitted` is too long to list,
`num_above` or `num_omitted` gives the total.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from localrag.citation import untagged
from localrag.errors import UsageError
from localrag.summary import truncate
from localrag.types import Hit

MAX_NAMED = 10
"""Most labels in `above` and in `omitted`: listing all could cost more than the passages."""
_SPREAD = 24
"""How many tokens the rest of a result can change when a passage is added: its joins, and its label in `omitted`."""


def compact(value: object) -> str:
    """Return compact JSON: no spaces, no escapes for non-ASCII letters, fields in order. Raises UsageError if `value` cannot be JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"A tool's result cannot be sent as JSON: {error}.", hint="Use text, numbers, lists and objects only.") from None


_Article = dict[str, str]


def article_fields(hit: Hit) -> _Article:
    """Return the fields of a passage that a citation needs. Tags inside its text are broken up, so that they cannot pose as
    another passage.
    """
    chunk = hit.chunk
    elsewhere = dict.fromkeys(each.source for each in hit.copies if each.source != chunk.source)
    fields = {"source": chunk.source, "also_in": ", ".join(elsewhere), "heading": chunk.heading, "text": chunk.text.strip()}
    return {"id": hit.label} | {name: untagged(text) for name, text in fields.items() if text or name == "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The text of one tool message, with its account. The label of every hit is in `used`, `above` or `omitted`.

    `num_tokens` counts `text`. `exhausted`: not even a list of omitted passages fits, and `text` is a short note or empty.
    `truncated`: a text was cut.
    """

    tool: str
    text: str = ""
    num_tokens: int = 0
    room_left: int = 0
    used: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    exhausted: bool = False
    truncated: bool = False


class ToolAccount:
    """The tokens that the tool results of one turn share.

    `count` counts the content of a tool message as it is sent. If it includes the chat template's text around the message,
    `room_tokens` must include it too. One call gets at most `max_share` (0 to 1) of the remaining room, so that a greedy first
    call does not starve the next.
    """

    def __init__(self, room_tokens: int, count: Callable[[str], int], *, max_share: float = 1.0) -> None:
        if not 0 < max_share <= 1:
            raise UsageError(f"A call's share of the room must be above 0 and at most 1, not {max_share}.", max_share=max_share)
        self.room_left = max(0, room_tokens)
        self.max_share = max_share
        self._count = count
        self._sent: set[str] = set()

    @property
    def room(self) -> int:
        """Maximum tokens of the next call."""
        return int(self.room_left * self.max_share)

    def charge_hits(self, tool: str, hits: Sequence[Hit]) -> ToolResult:
        """Pack whole passages, best first, into the room of this call. A passage that is too large is skipped in favour of a
        smaller one.
        """
        hits_by_label: dict[str, Hit] = {}
        for hit in hits:
            hits_by_label.setdefault(hit.label, hit)
        above = tuple(label for label in hits_by_label if label in self._sent)
        articles = {label: article_fields(hit) for label, hit in hits_by_label.items() if label not in self._sent}
        used = self._pack(articles, above)
        text = self._told(articles, used, above)
        while used and self._count(text) > self.room:
            used = used[:-1]
            text = self._told(articles, used, above)
        omitted = tuple(label for label in articles if label not in used)
        if self._count(text) > self.room:
            return self._exhausted(ToolResult(tool=tool, above=above, omitted=omitted))
        self._sent.update(used)
        return self._charged(ToolResult(tool=tool, text=text, used=tuple(used), above=above, omitted=omitted))

    def charge_text(self, tool: str, text: str) -> ToolResult:
        """Return the text of another tool, truncated with a mark if it is longer than the room of this call."""
        whole = untagged(text)
        if self._count(whole) <= self.room:
            return self._charged(ToolResult(tool=tool, text=whole))
        cut = truncate(whole, self.room, self._count)
        result = ToolResult(tool=tool, text=cut, truncated=True)
        return self._charged(result) if cut.strip() else self._exhausted(result)

    def _pack(self, articles: Mapping[str, _Article], above: Sequence[str]) -> list[str]:
        """Return the labels that fit. Counts of single passages bound the total; the total is counted only if the bounds leave a doubt."""
        used: list[str] = []
        least = most = self._count(_serialised(articles, used, above, self.room_left))
        for label, article in articles.items():
            cost = self._count(compact(article))
            if most + cost + _SPREAD <= self.room:
                used.append(label)
                least, most = least + cost - _SPREAD, most + cost + _SPREAD
            elif least + cost - _SPREAD <= self.room:
                size = self._count(_serialised(articles, [*used, label], above, self.room_left))
                if size <= self.room:
                    used.append(label)
                    least = most = size
                else:
                    least, most = max(least, size - cost - _SPREAD), min(most, size - cost + _SPREAD)
        return used

    def _told(self, articles: Mapping[str, _Article], used: Sequence[str], above: Sequence[str]) -> str:
        """Return the result with the tokens left after it. If stating that number makes it oscillate, the lowest value is stated."""
        candidates: list[int] = []
        tokens_left = self.room_left
        while tokens_left not in candidates:
            candidates.append(tokens_left)
            tokens_left = max(0, self.room_left - self._count(_serialised(articles, used, above, tokens_left)))
        return _serialised(articles, used, above, min(candidates[candidates.index(tokens_left) :]))

    def _exhausted(self, result: ToolResult) -> ToolResult:
        fields: dict[str, object] = {"note": "no room left"}
        text = compact(fields | ({"num_omitted": len(result.omitted)} if result.omitted else {}))
        return self._charged(replace(result, text=text if self._count(text) <= self.room else "", exhausted=True))

    def _charged(self, result: ToolResult) -> ToolResult:
        num_tokens = self._count(result.text) if result.text else 0
        self.room_left -= num_tokens
        return replace(result, num_tokens=num_tokens, room_left=self.room_left)


def _serialised(articles: Mapping[str, _Article], used: Sequence[str], above: Sequence[str], tokens_left: int) -> str:
    omitted = [label for label in articles if label not in used]
    result: dict[str, object] = {"results": [articles[label] for label in used]}
    for name, labels in (("above", above), ("omitted", omitted)):
        if labels:
            result[name] = labels[:MAX_NAMED]
        if len(labels) > MAX_NAMED:
            result[f"num_{name}"] = len(labels)
    return compact(result | {"tokens_left": tokens_left})
