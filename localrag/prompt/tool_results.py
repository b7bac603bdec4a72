"""Tool results as they go into the prompt: what is serialised is what is counted, and a later call sees what earlier ones used.

A search gives one JSON object, with the fields that a citation needs and no others:

    {"results":[{"id":"KB#12","source":"guide/pets.md","heading":"Heat","text":"…"}],
     "above":["KB#3"],"omitted":["KB#9","KB#4"],"tokens_left":512}

`above` are passages that were found again and stand in an earlier result of this turn; they are not sent twice. `omitted` were
found and had no room. `also_in` of a result names other documents with the same text. Where more of either are left out than are
named, `num_above` and `num_omitted` say how many in all.
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
"""A result names so many passages that are not in it; naming them all could cost more than the passages."""
_SPREAD = 24
"""By so many tokens the rest of a result can change when a passage goes into it: its joins, and its label among those left out."""


def compact(value: object) -> str:
    """The JSON that is sent: no spaces, letters of all scripts as they are, fields in the order they have. UsageError if it is no JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"A tool's result cannot be sent as JSON: {error}.", hint="Use text, numbers, lists and objects only.") from None


_Article = dict[str, str]


def article_fields(hit: Hit) -> _Article:
    """What a citation needs of a passage. A tag that stands in its text is broken, so that it cannot pose as another passage."""
    chunk = hit.chunk
    elsewhere = dict.fromkeys(each.source for each in hit.copies if each.source != chunk.source)
    fields = {"source": chunk.source, "also_in": ", ".join(elsewhere), "heading": chunk.heading, "text": chunk.text.strip()}
    return {"id": hit.label} | {name: untagged(text) for name, text in fields.items() if text or name == "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The text of one tool message, and its account. Every hit that was offered is in `used`, `above` or `omitted`, by its label.

    `num_tokens` is the count of `text`. `exhausted` says that not even a list of what was left out had room; then `text` is a
    word about that, or empty. `truncated` says that a text was cut.
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
    """The room that the tool results of one turn share, in tokens.

    `count` is tokens of a tool message's content as it is sent. Where it adds what the chat template puts around a tool message,
    the room holds that too. One call gets at most `max_share` (0 to 1) of the room that is left, so that a greedy first call need
    not starve the next.
    """

    def __init__(self, room_tokens: int, count: Callable[[str], int], *, max_share: float = 1.0) -> None:
        if not 0 < max_share <= 1:
            raise UsageError(f"A call's share of the room is above 0 and at most 1, not {max_share}.", max_share=max_share)
        self.room_left = max(0, room_tokens)
        self.max_share = max_share
        self._count = count
        self._sent: set[str] = set()

    @property
    def room(self) -> int:
        """What the next call may use, in tokens."""
        return int(self.room_left * self.max_share)

    def charge_hits(self, tool: str, hits: Sequence[Hit]) -> ToolResult:
        """Whole passages, best first, into the room of this call; one that is too large is passed over for a smaller one behind it."""
        offered: dict[str, Hit] = {}
        for hit in hits:
            offered.setdefault(hit.label, hit)
        above = tuple(label for label in offered if label in self._sent)
        articles = {label: article_fields(hit) for label, hit in offered.items() if label not in self._sent}
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
        """The text that another tool gave, cut with a mark if it is longer than the room of this call."""
        whole = untagged(text)
        if self._count(whole) <= self.room:
            return self._charged(ToolResult(tool=tool, text=whole))
        cut = truncate(whole, self.room, self._count)
        result = ToolResult(tool=tool, text=cut, truncated=True)
        return self._charged(result) if cut.strip() else self._exhausted(result)

    def _pack(self, articles: Mapping[str, _Article], above: Sequence[str]) -> list[str]:
        """Which fit. Single counts bound the count of the whole; only where the bounds leave a doubt is the whole counted."""
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
        """The result with the room that is left after it. Where saying that number changes it back and forth, the lowest is said."""
        said: list[int] = []
        left = self.room_left
        while left not in said:
            said.append(left)
            left = max(0, self.room_left - self._count(_serialised(articles, used, above, left)))
        return _serialised(articles, used, above, min(said[said.index(left) :]))

    def _exhausted(self, result: ToolResult) -> ToolResult:
        said: dict[str, object] = {"note": "no room left"}
        text = compact(said | ({"num_omitted": len(result.omitted)} if result.omitted else {}))
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
