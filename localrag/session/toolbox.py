"""The judge's tools, and the token limit that all of their results share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localrag.budget import Ledger
from localrag.citation import parse_label
from localrag.deliberation import Used
from localrag.deliberation.calculate import calculate
from localrag.errors import InterruptedRunError, LocalragError, UsageError
from localrag.prompt.tool_results import ToolAccount, ToolResult, compact
from localrag.text.markup import count_content
from localrag.types import Chunk, Hit

if TYPE_CHECKING:
    from localrag.kb import KnowledgeBase
    from localrag.session.session import Session

TOP_K = 8
"""Number of passages that one search offers."""
CALL_SHARE = 0.5
"""Maximum share of the remaining room for one call, unless it is the last."""
NUM_NAMES = 3
"""Maximum number of omitted items that `read_ledger` names for each section."""
_MAX_ERROR_CHARS = 240
_NO_ROOM = compact({"note": "no room left"})
_UNKNOWN = "There is no passage with that id. Use the tag of a source."

_Given = tuple[ToolResult, Sequence[Hit]]


class Toolbox:
    """Runs the tools that a model calls by name, with untrusted arguments.

    `room_tokens` limits the contents of all tool messages together, as sent to the session's model. `ledgers` returns the last ledger of
    each role; `hits` are the known hits by label. The last of `num_calls` calls may use all remaining room; with None, no call counts
    as the last.
    """

    def __init__(
        self,
        session: Session,
        room_tokens: int,
        *,
        ledgers: Callable[[], Mapping[str, Ledger]],
        hits: Mapping[str, Hit],
        num_calls: int | None = None,
    ) -> None:
        self._session = session
        self._count = partial(count_content, counter=session.engine.counter)
        self._account = ToolAccount(room_tokens, self._count, max_share=1.0 if num_calls == 1 else CALL_SHARE)
        self._ledgers = ledgers
        self._hits = hits
        self._calls_left = num_calls
        self._tools: dict[str, tuple[str, Callable[[str], _Given]]] = {
            "kb_search": ("query", self._search),
            "kb_read": ("id", self._read),
            "calculate": ("expression", self._calculate),
            "read_ledger": ("role", self._read_ledger),
        }

    def use(self, tool: str, arguments: Mapping[str, str]) -> tuple[Used, dict[str, Any]]:
        """Run a tool. Returns its result and the data of the event that reports it.

        If the tool fails, the result is an error message. Only KeyboardInterrupt and InterruptedRunError are raised.
        """
        is_error = False
        try:
            result, hits = self._given(tool, arguments)
        except InterruptedRunError:
            raise
        except Exception as error:  # noqa: BLE001  # a failing tool must not end the run
            is_error, hits, result = True, (), self._first_that_fits(tool, [compact({"error": _told(error)})])
        self._end_call()
        is_exhausted = result.exhausted or not self._has_room()
        data = {
            "tool": tool,
            "arguments": dict(arguments),
            "text": result.text,
            "num_tokens": result.num_tokens,
            "room_left": result.room_left,
            "is_error": is_error,
            "is_exhausted": is_exhausted,
            **({"omitted": list(result.omitted)} if result.omitted else {}),
            **({"truncated": True} if result.truncated else {}),
        }
        return Used(text=result.text, hits=tuple(hits), is_exhausted=is_exhausted), data

    def _given(self, tool: str, arguments: Mapping[str, str]) -> _Given:
        if tool not in self._tools:
            raise UsageError("There is no tool with that name.")
        name, use = self._tools[tool]
        text = arguments.get(name, "").strip()
        if not text and tool != "read_ledger":
            raise UsageError(f"{tool} needs {name}, a non-empty text.")
        return use(text)

    # --- the room ---

    def _end_call(self) -> None:
        if self._calls_left is not None:
            self._calls_left -= 1
            self._account.max_share = 1.0 if self._calls_left <= 1 else CALL_SHARE

    def _has_room(self) -> bool:
        """Whether there is at least room for the message that no room is left."""
        return self._account.room >= self._count(_NO_ROOM)

    def _first_that_fits(self, tool: str, texts: Sequence[str]) -> ToolResult:
        """Charge the longest of several forms of a result that fits whole; a partial result would be useless."""
        for number, text in enumerate(texts):
            tried = ToolAccount(self._account.room, self._count).charge_text(tool, text)
            if not tried.truncated:
                return replace(self._account.charge_text(tool, text), truncated=number > 0)
        note = _NO_ROOM if self._has_room() else ""
        return replace(self._account.charge_text(tool, note), exhausted=True)

    def _charged_hits(self, tool: str, hits: Sequence[Hit]) -> _Given:
        result = self._account.charge_hits(tool, hits)
        return result, [hit for hit in hits if hit.label in result.used]

    # --- the tools ---

    def _search(self, query: str) -> _Given:
        return self._charged_hits("kb_search", self._session.retrieve(query, top_k=TOP_K))

    def _read(self, text: str) -> _Given:
        """A passage with its neighbours, in document order; if not all fit, the requested one comes first."""
        label, chunks = self._around(text)
        hits = [self._hits.get(chunk.label) or Hit(chunk, 0.0) for chunk in chunks]
        if ToolAccount(self._account.room, self._count).charge_hits("kb_read", hits).omitted:
            hits.sort(key=lambda hit: hit.label != label)
        return self._charged_hits("kb_read", hits)

    def _around(self, text: str) -> tuple[str, list[Chunk]]:
        """Return the label of a passage, with the chunks from the one before it to the one after it."""
        label = parse_label(text.replace("\u200b", ""))  # ledgers show tags with zero-width spaces
        if label is None:
            raise UsageError(_UNKNOWN)
        scope, number = label
        hit = self._hits.get(f"KB#{scope}/{number}" if scope else f"KB#{number}")
        if hit is not None and not hit.chunk.kb:  # piped text is not in a knowledge base
            return hit.label, _beside(hit.chunk, self._hits.values())
        kb = self._kb(scope)
        kb_scope = kb.name if len(self._session.knowledge_bases) > 1 else ""
        chunks = [replace(chunk, scope=kb_scope) for chunk in kb.around(number)]
        if not chunks:
            raise UsageError(_UNKNOWN)
        return next(chunk.label for chunk in chunks if chunk.id == number), chunks

    def _kb(self, name: str) -> KnowledgeBase:
        kbs = self._session.knowledge_bases
        if not name and len(kbs) > 1:
            raise UsageError("There are several knowledge bases. Use the whole tag of a source, with the name in it.")
        for kb in kbs:
            if name in ("", kb.name):
                return kb
        raise UsageError(_UNKNOWN)

    def _calculate(self, expression: str) -> _Given:
        return self._first_that_fits("calculate", [compact({"result": calculate(expression)})]), ()

    def _read_ledger(self, role: str) -> _Given:
        ledgers = self._ledgers()
        of = next((name for name in ledgers if name.lower() == role.lower()), None)
        brief = compact({"roles": {name: _briefly(ledger) for name, ledger in ledgers.items()}})
        if of is None:
            return self._first_that_fits("read_ledger", [brief]), ()
        forms = [compact({"role": of, **_ledger(ledgers[of], num)}) for num in (NUM_NAMES, 0)]
        return self._first_that_fits("read_ledger", [*forms, compact({"role": of, **_briefly(ledgers[of])})]), ()


def _told(error: Exception) -> str:
    """The error message for the judge. Messages of other libraries are not written for models, so only their type is named."""
    text = error.message if isinstance(error, LocalragError) else f"The tool failed ({type(error).__name__})."
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"


def _beside(chunk: Chunk, hits: Iterable[Hit]) -> list[Chunk]:
    """A chunk of piped text, with its neighbours before and after."""
    same = [each.chunk for each in hits if (each.chunk.kb, each.chunk.scope) == (chunk.kb, chunk.scope)]
    return sorted((each for each in same if abs(each.ordinal - chunk.ordinal) <= 1), key=lambda each: each.ordinal)


def _briefly(ledger: Ledger) -> dict[str, int]:
    return {
        "window": ledger.window,
        "used": sum(entry.used for entry in ledger.entries),
        "num_omitted": sum(len(entry.omitted) for entry in ledger.entries),
    }


def _ledger(ledger: Ledger, num_names: int) -> dict[str, Any]:
    """Each section in use, with the first names of its omitted items."""
    sections = {}
    for entry in ledger.entries:
        if entry.wanted or entry.allotted or entry.omitted:
            omitted = {"num_omitted": len(entry.omitted)} if entry.omitted else {}
            names = {"omitted": list(entry.omitted[:num_names])} if entry.omitted and num_names else {}
            sections[entry.name] = {"used": entry.used, "allotted": entry.allotted, **omitted, **names}
    return {"window": ledger.window, "sections": sections}
