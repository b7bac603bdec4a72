"""A model's chat template, rendered without ever seeing what is said.

A template is a program from a stranger. It is given the roles of a conversation, and for each content a random placeholder;
what it renders is split at the placeholders into scaffold and contents. It runs in a child process that is limited in time,
memory and output, so that a template that loops, recurses or reaches out is an error and not a hang.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, zip_longest
from typing import Self

from localrag.engine.template_process import RenderProcess
from localrag.errors import TemplateError
from localrag.messages import Message, strip_reasoning
from localrag.tokens import Segment

MAX_SOURCE_BYTES = 128 << 10
MAX_KEPT_LAYOUTS = 32
PIPE_BYTES = 32 << 10  # what a pipe takes without a reader
HINT = "Give a template that works with --chat-template FILE."


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message as the template is shown it: its role, and which messages' contents it joins by an empty line."""

    role: str
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """A rendered conversation: scaffold as text, contents as indices of messages, and how the roles were adapted."""

    parts: tuple[str | int, ...]
    adaptation: str | None


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a template did not take the turns it was shown: what it said, or if `lost`, what it did to the contents."""

    reason: str
    lost: bool = False


# How the roles of a conversation are adapted to a template that refuses them, simplest first: what is done, and which
# roles become the user's. Wherever anything is adapted, neighbours of one role are joined.
ADAPTATIONS: tuple[tuple[str | None, frozenset[str]], ...] = (
    (None, frozenset()),
    ("neighbours of one role are joined", frozenset()),
    ("the system text heads the next user message", frozenset({"system"})),
    ("tool results are user messages", frozenset({"tool"})),
    ("system texts and tool results are part of the user's messages", frozenset({"system", "tool"})),
)


def _adapt(roles: Sequence[str], as_user: frozenset[str], *, join: bool) -> tuple[_Turn, ...]:
    turns: list[_Turn] = []
    for index, given in enumerate(roles):
        role = "user" if given in as_user else given
        if join and turns and turns[-1].role == role:
            turns[-1] = _Turn(role, (*turns[-1].messages, index))
        else:
            turns.append(_Turn(role, (index,)))
    return tuple(turns)


def _placeholder(nonce: str, index: object) -> str:
    # Letters of both cases, so that no change of case leaves it as it was; private-use characters, so that nothing trims it.
    return f"\ue000aZ{nonce}:{index}\ue001"


def _split(text: str, nonce: str, turns: Sequence[_Turn]) -> tuple[str | int, ...] | _Refusal:
    """The rendered text as scaffold and indices of messages, if each content came out once and whole."""
    pieces = re.split(_placeholder(nonce, "(0|[1-9][0-9]{0,8})"), text)
    scaffold, found = pieces[::2], [int(index) for index in pieces[1::2]]
    counts = Counter(found)
    marks = (nonce, "\ue000", "\ue001")
    altered = any(mark in piece.lower() for piece in scaffold for mark in marks)
    if altered or not counts.keys() <= {index for turn in turns for index in turn.messages}:
        return _Refusal("alters or splits the content of messages", lost=True)
    for turn in turns:
        least, most = min(counts[index] for index in turn.messages), max(counts[index] for index in turn.messages)
        if (least, most) != (1, 1):
            return _Refusal(f"{'drops' if least == 0 else 'repeats'} the content of the {turn.role} message", lost=True)
    parts = chain.from_iterable(zip_longest(scaffold, found, fillvalue=""))
    return tuple(part for part in parts if part != "")


class JinjaChatTemplate:
    """A `ChatTemplate` in Jinja, as GGUF files carry it.

    `bos_text` and `eos_text` are what the template knows as `bos_token` and `eos_token`; `origin` names the template in errors;
    `clock` gives the time to templates that print it. Compiling and rendering once may take `time_limit_s` of wall-clock time
    and `memory_limit_bytes` over what the bare process holds. A conversation whose roles were rendered before, on the same day,
    is not rendered again. Safe to share between threads; `close()` ends the child process, and so does dropping the object.

    All errors are TemplateError: a template that is too large, does not compile, refuses the roles however they are adapted, drops,
    repeats or alters contents, depends on them, goes over a limit, or reaches for attributes that the sandbox keeps from it.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_text: str = "",
        eos_text: str = "",
        origin: str = "the model file",
        time_limit_s: float = 2.0,
        memory_limit_bytes: int = 256 << 20,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self.bos_text = bos_text
        self.eos_text = eos_text
        self.origin = origin
        self.time_limit_s = time_limit_s
        self.memory_limit_bytes = memory_limit_bytes
        self.adaptation: str | None = None
        """How the roles of the conversation rendered last were adapted; None where the template took them as they are."""
        self._clock = clock
        self._worker: RenderProcess | None = None
        self._lock = threading.Lock()
        self._layouts: dict[tuple[object, ...], _Layout] = {}
        num_bytes = len(source.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_SOURCE_BYTES:
            raise self._error(f"has {num_bytes} bytes, but at most {MAX_SOURCE_BYTES} are accepted", num_bytes=num_bytes)

    def start(self) -> None:
        """Starts the child process and has the template compiled there, and returns without waiting for it."""
        with self._lock:
            self._running_worker()

    def close(self) -> None:
        """Ends the child process. A later `render` starts another."""
        with self._lock:
            if self._worker:
                self._worker.stop()
            self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def render(self, messages: Sequence[Message]) -> list[Segment]:
        """Scaffold and contents in the order of the prompt, up to where the answer begins.

        Each content comes once and as it was given, save that an assistant's loses its reasoning (`strip_reasoning`).
        """
        with self._lock:
            layout = self._layout(tuple(message.role for message in messages))
            self.adaptation = layout.adaptation
        contents = [strip_reasoning(message.content) if message.role == "assistant" else message.content for message in messages]
        return [Segment(part) if isinstance(part, str) else Segment(contents[part], part) for part in layout.parts]

    def _layout(self, roles: tuple[str, ...]) -> _Layout:
        """The layout for these roles, from the first adaptation that the template takes. Contents play no part in it."""
        now = self._clock()
        key = (now.date(), roles)
        if key in self._layouts:
            return self._layouts[key]
        refusals: dict[tuple[_Turn, ...], _Refusal] = {}
        for adaptation, as_user in ADAPTATIONS:
            turns = _adapt(roles, as_user, join=adaptation is not None)
            if turns in refusals:
                continue
            parts = self._attempt(turns, now)
            if not isinstance(parts, _Refusal):
                if len(self._layouts) >= MAX_KEPT_LAYOUTS:
                    self._layouts.clear()
                self._layouts[key] = _Layout(parts, adaptation)
                return self._layouts[key]
            refusals[turns] = parts
        # What the template does to contents says more than that it refuses roles; else the last refusal is what no adaptation cured.
        tried = list(refusals.values())
        refusal = next((refusal for refusal in tried if refusal.lost), tried[-1])
        shown = ", ".join((*roles[:8], "…") if len(roles) > 8 else roles) or "none"
        reason = refusal.reason if refusal.lost else f"cannot render messages of these roles ({shown}): {refusal.reason}"
        raise self._error(reason, roles=list(roles))

    def _attempt(self, turns: Sequence[_Turn], now: datetime) -> tuple[str | int, ...] | _Refusal:
        """Renders twice, with placeholders of two lengths: what differs then depends on the content, or on chance."""
        layouts = []
        for num_random_bytes in (16, 24):
            nonce = secrets.token_hex(num_random_bytes)
            text = self._render_text(turns, nonce, now)
            if isinstance(text, _Refusal):
                return text
            parts = _split(text, nonce, turns)
            if isinstance(parts, _Refusal):
                return parts
            layouts.append(parts)
        return layouts[0] if layouts[0] == layouts[1] else _Refusal("writes what depends on the content of messages", lost=True)

    def _render_text(self, turns: Sequence[_Turn], nonce: str, now: datetime) -> str | _Refusal:
        messages = [{"role": turn.role, "content": "\n\n".join(_placeholder(nonce, i) for i in turn.messages)} for turn in turns]
        reply = self._ask({"messages": messages, "bos_token": self.bos_text, "eos_token": self.eos_text, "now": now.isoformat()})
        if "text" in reply:
            if re.search("[\ud800-\udfff]", reply["text"]):
                raise self._error("writes what is not valid text")
            return reply["text"]
        said = _one_line(re.sub(_placeholder(nonce, "[0-9]+"), "…", reply["message"]))
        if reply["error"] == "refused":
            return _Refusal(said)
        if reply["error"] == "memory":
            limit = self.memory_limit_bytes
            raise self._error(f"needs more than {limit >> 20} MiB of memory", memory_limit_bytes=limit)
        reasons = {
            "syntax": f"is not valid Jinja: {said}",
            "security": f"reaches for what a template may not touch: {said}",
            "size": "writes more text than any prompt can hold",
        }
        raise self._error(reasons[reply["error"]])

    def _ask(self, request: Mapping[str, object]) -> dict[str, str]:
        """The worker's reply. Whatever goes wrong with the worker ends it, and the next request starts another."""
        line = json.dumps({"source": self.source, "time_limit_s": self.time_limit_s, **request}).encode() + b"\n"
        worker = self._running_worker()
        try:
            worker.wait_until_ready()
            reply: dict[str, str] = json.loads(worker.ask(line, self.time_limit_s))
        except TimeoutError:
            raise self._error(f"did not finish within {self.time_limit_s:g} s", time_limit_s=self.time_limit_s) from None
        except EOFError:
            raise self._error("ended the process that renders it") from None
        if reply.get("error") == "memory":
            worker.stop()
        return reply

    def _running_worker(self) -> RenderProcess:
        if self._worker is None or not self._worker.is_running:
            self._worker = RenderProcess(self.memory_limit_bytes)
            # Compiling takes up to 0.1 s: it begins now, unless the template is so long that to hand it over would mean to wait.
            line = json.dumps({"source": self.source, "time_limit_s": self.time_limit_s}).encode() + b"\n"
            if len(line) <= PIPE_BYTES:
                self._worker.tell(line)
        return self._worker

    def _error(self, reason: str, **numbers: object) -> TemplateError:
        end = "" if reason.endswith((".", "…")) else "."
        return TemplateError(f"The chat template of {self.origin} {reason}{end}", hint=HINT, **numbers)


def _one_line(text: str) -> str:
    """Fit to be shown: one line, without control characters, at most 200 characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= 200 else line[:199] + "…"
