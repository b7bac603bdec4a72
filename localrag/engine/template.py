"""Render a model's chat template without showing it the contents of messages.

A template is an untrusted program. It receives the roles of a conversation, and a random placeholder for each message's content. The
rendered text is split at the placeholders into fixed text and contents. The texts of tools are hidden in the same way. The template runs in
a child process with limited time, memory and output, so that a loop, a deep recursion or an attempt to escape the sandbox is an error.

Calls of tools and their results are rendered in the template's own form. If it has none, calls are written as text.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self

from localrag.engine.template_layout import (
    ADAPTATIONS,
    ESCAPES,
    OFFERS,
    CallDisguise,
    CallForm,
    CallId,
    CallText,
    Disguise,
    Layout,
    Offer,
    Part,
    Refusal,
    ToolForm,
    ToolText,
    Turn,
    adapt,
    call_form,
    hide_placeholders,
    mark_tools,
    native_turns,
    placeholder,
    split,
    tool_form,
    with_listing,
)
from localrag.errors import TemplateError, UsageError
from localrag.process import Child, ChildExitError, ChildStartError
from localrag.text.sanitize import one_line
from localrag.text.thinking import ThinkingForm, form_of
from localrag.text.tokens import Segment
from localrag.text.tool_calls import KNOWN_MARKS, PLAIN, CallMarkup, learned, probe_tools, short_id
from localrag.types import Message, ToolCall, ToolSpec

MAX_SOURCE_BYTES = 128 << 10
MAX_KEPT_LAYOUTS = 32
MAX_TOOL_CHARS = 1 << 20
"""Longest total text of the tools in a rendered prompt, since a template can repeat them."""
WORKER = "localrag.engine.template_worker"
PIPE_BYTES = 32 << 10  # a pipe buffers this much without a reader
TOO_MUCH_TEXT = "writes more text than any prompt can hold"
HINT = "Give a template that works with --chat-template FILE."


class JinjaChatTemplate:
    """A `ChatTemplate` in Jinja, as stored in GGUF files.

    `bos_text` and `eos_text` are the template's `bos_token` and `eos_token`. `origin` names the template in errors. `clock` returns the
    time for templates that print it. Compiling and rendering once may take `time_limit_s` seconds of wall-clock time, and
    `memory_limit_bytes` more than the bare process. Layouts are cached by roles, structure of tools, and day. Thread-safe. `close()` ends
    the child process, and so does dropping the object.

    Raises TemplateError if the template is too large, does not compile, refuses the roles in every adaptation, drops, repeats or alters
    contents, depends on contents, exceeds a limit, or accesses attributes that the sandbox forbids.
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
        """How the roles of the last rendered conversation were adapted; None if the template accepted them unchanged."""
        self.tools_adaptation: str | None = None
        """Where its tools were placed; None if the template placed them itself, or if there were none."""
        self.calls_adaptation: str | None = None
        """How its tool calls were written; None if the template wrote them itself, or if there were none."""
        self._markup: tuple[CallMarkup, bool] | None = None
        self._has_tools = False
        self._thinking = form_of(source)
        self._thinks = True
        self._clock = clock
        self._worker: Child | None = None
        self._lock = threading.Lock()
        self._layouts: dict[tuple[object, ...], Layout] = {}
        num_bytes = len(source.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_SOURCE_BYTES:
            raise self._error(f"has {num_bytes} bytes, but at most {MAX_SOURCE_BYTES} are accepted", num_bytes=num_bytes)

    def start(self) -> None:
        """Start the child process, which compiles the template, and return without waiting for it."""
        with self._lock:
            self._running_worker()

    def close(self) -> None:
        """End the child process. A later `render` starts a new one."""
        with self._lock:
            if self._worker:
                self._worker.stop()
            self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def thinking(self) -> ThinkingForm | None:
        """The form of thoughts that the template uses; None if it has none."""
        return self._thinking

    @property
    def call_markup(self) -> CallMarkup:
        """How the template's models write tool calls: learned from what it writes for earlier calls, or else JSON."""
        return self._learned[0]

    @property
    def knows_calls(self) -> bool:
        """Whether `call_markup` is the template's own form, or that of its family."""
        return self._learned[1]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the last prompt with tools or calls does otherwise than the template, as sentences."""
        notes = [note for note in (self.tools_adaptation, self.calls_adaptation) if note]
        if self._has_tools and not self.knows_calls:
            notes.append("the chat template does not show how the model writes tool calls, so they are JSON")
        return tuple(f"{note[0].upper()}{note[1:]}." for note in notes)

    @property
    def _learned(self) -> tuple[CallMarkup, bool]:
        if self._markup is None:
            last = self.adaptation, self.tools_adaptation, self.calls_adaptation, self._has_tools
            self._markup = PLAIN, False  # for the prompts to learn from
            found = learned(self._rendered_calls, thoughts_end=self._thinking.closes if self._thinking else "", eos=self.eos_text)
            known = next((markup for mark, markup in KNOWN_MARKS if mark in self.source), PLAIN) if self._drops_calls() else PLAIN
            self.adaptation, self.tools_adaptation, self.calls_adaptation, self._has_tools = last
            self._markup = found or known, found is not None or known is not PLAIN
        return self._markup

    def _drops_calls(self) -> bool:
        call = ToolCall(probe_tools()[0].name, {}, "call00000")
        said = [Message("user", "?"), Message("assistant", "", tool_calls=(call,)), Message("tool", "!", tool_call_id=call.id)]
        return self._rendered_calls(said) is None

    def _rendered_calls(self, messages: Sequence[Message]) -> str | None:
        """Return a prompt for `learned`; None if its calls are not written as they are made."""
        try:
            text = "".join(segment.text for segment in self.render(messages, probe_tools()))
        except (TemplateError, UsageError):
            return None
        return None if self.calls_adaptation else text

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, thinks: bool = True) -> list[Segment]:
        """Return fixed text and contents in the order of the prompt, up to the start of the answer.

        Each content appears once, unchanged. Texts of tools appear where the template puts them, escaped as in a JSON string. Every tool's
        name appears; a description appears only if the template has a place for it. Without `thinks`, the template gets
        `enable_thinking=False`, and thoughts that it opens nevertheless are closed. Raises the same UsageErrors as `tool_form`.
        """
        form = tool_form(tools) if tools else None
        calls = call_form(messages) if any(message.tool_calls for message in messages) else None
        with self._lock:
            self._thinks = thinks or self._thinking is None
            layout = self._layout(tuple(message.role for message in messages), calls, form, self._clock())
            self.adaptation, self.tools_adaptation = layout.adaptation, layout.tools_adaptation
            self.calls_adaptation, self._has_tools = layout.calls_adaptation, form is not None
        texts: tuple[Segment, ...] = ()
        if form:
            texts = (form.listing,) if layout.tools_adaptation else form.texts
            if sum(len(texts[part.index].text) for part in layout.parts if isinstance(part, ToolText)) > MAX_TOOL_CHARS:
                raise self._error(TOO_MUCH_TEXT)
        markup = self.call_markup if layout.writes_calls else PLAIN
        segments = list(_Segments(messages, calls, texts, markup if layout.writes_calls else None).of(layout.parts))
        if thinks or self._thinking is None:
            return segments
        ends = self._thinking.without("" if segments[-1].is_content else segments[-1].text)
        if tools and ends and ends == self.call_markup.text:  # the model chooses between a call and text
            return segments
        return [*segments, Segment(ends)] if ends else segments

    def _layout(self, roles: tuple[str, ...], calls: CallForm | None, form: ToolForm | None, now: datetime) -> Layout:
        """Return the layout for these roles, calls and tools, from the cache if possible. It does not depend on their texts."""
        key = (now.date(), roles, calls and calls.key, form and form.key, self._thinks)
        if key not in self._layouts:
            turns = [Turn(role, (index,)) for index, role in enumerate(roles)]
            layout = self._lay_out_tools(roles, calls, form, now) if form else self._lay_out(turns, calls, now)
            if len(self._layouts) >= MAX_KEPT_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return self._layouts[key]

    def _lay_out(self, original: Sequence[Turn], calls: CallForm | None, now: datetime) -> Layout:
        """Return the layout of the first adaptation that the template accepts. Calls are written as text if it accepts no other form."""
        why = ""
        if calls:
            native = self._lay_out_calls(original, calls, now)
            if isinstance(native, Layout):
                return native
            why = f"the calls are written as text, for the template {native.reason}"
        refusals: dict[tuple[Turn, ...], Refusal] = {}
        for adaptation, as_user in ADAPTATIONS:
            turns = adapt(original, as_user, join=adaptation is not None)
            if turns in refusals:
                continue
            parts = self._attempt(turns, now)
            if not isinstance(parts, Refusal):
                return Layout(parts, turns, adaptation, calls_adaptation=why or None, writes_calls=calls is not None)
            refusals[turns] = parts
        # Report damage to contents first. Otherwise report the last refusal, which no adaptation resolved.
        attempts = list(refusals.values())
        refusal = next((refusal for refusal in attempts if refusal.lost), attempts[-1])
        roles = [turn.role for turn in original]
        role_list = ", ".join((*roles[:8], "…") if len(roles) > 8 else roles) or "none"
        reason = refusal.reason if refusal.lost else f"cannot render messages of these roles ({role_list}): {refusal.reason}"
        raise self._error(reason, roles=roles)

    def _lay_out_calls(self, original: Sequence[Turn], calls: CallForm, now: datetime, form: ToolForm | None = None) -> Layout | Refusal:
        """Return the layout of the first way to offer the calls that the template accepts, or its first refusal.

        With tools, it must show all of their names.
        """
        first: Refusal | None = None
        for turns, offer, adaptation, calls_adaptation in _native(original, calls):
            parts = self._attempt(turns, now, form, calls, offer)
            if isinstance(parts, Refusal):
                first = first or parts
            elif form is None or form.names <= {part.index for part in parts if isinstance(part, ToolText)}:
                return Layout(parts, turns, adaptation, calls_adaptation=calls_adaptation)
        return first or Refusal("has no place for the tools")

    def _lay_out_tools(self, roles: tuple[str, ...], calls: CallForm | None, form: ToolForm, now: datetime) -> Layout:
        """Lay out with tools where the template puts them. If it omits any tool's name, list the tools in the system text."""
        bare = self._layout(roles, calls, None, now)
        if calls:
            native = self._lay_out_calls([Turn(role, (index,)) for index, role in enumerate(roles)], calls, now, form)
            if isinstance(native, Layout):
                return replace(native, parts=mark_tools(native.parts, bare.parts))
        original = [Turn(role, (index,)) for index, role in enumerate(roles)]
        turns = bare.turns if bare.writes_calls or not calls else self._lay_out(original, None, now).turns
        parts = self._attempt(turns, now, form)
        if isinstance(parts, Refusal):
            if parts.altered:
                raise self._error(parts.reason)
            why = f"the template does not render with them: {parts.reason}"
        elif form.names <= {part.index for part in parts if isinstance(part, ToolText)}:
            calls_adaptation = bare.calls_adaptation or ("the calls are written as text" if calls else None)
            marked = mark_tools(parts, bare.parts)
            return replace(bare, turns=turns, parts=marked, calls_adaptation=calls_adaptation, writes_calls=calls is not None)
        else:
            why = "the template has no place for them"
        listed = self._lay_out(with_listing(roles), calls, now)
        parts = tuple(ToolText(0) if part == len(roles) else part for part in listed.parts)
        adaptation = f"the tools are listed in the system text, for {why}"
        return replace(listed, parts=mark_tools(parts, bare.parts), tools_adaptation=adaptation)

    def _attempt(
        self,
        turns: Sequence[Turn],
        now: datetime,
        form: ToolForm | None = None,
        calls: CallForm | None = None,
        offer: Offer | None = None,
    ) -> tuple[Part, ...] | Refusal:
        """Render twice, with placeholders of two lengths, to detect output that depends on content or chance."""
        layouts: list[tuple[Part, ...]] = []
        for num_random_bytes in (16, 24):
            nonce, disguise = secrets.token_hex(num_random_bytes), form.disguise() if form else None
            hidden = calls.disguise(num_random_bytes, offer) if calls and offer else None
            text = self._render_text(turns, nonce, now, disguise, hidden)
            if isinstance(text, Refusal):
                return text
            contents = split(text, nonce, turns)
            parts = contents if isinstance(contents, Refusal) or not disguise else disguise.split(contents)
            parts = parts if isinstance(parts, Refusal) or not hidden else hidden.split(parts)
            if isinstance(parts, Refusal):
                return parts
            layouts.append(parts)
        if layouts[0] != layouts[1]:
            return Refusal(f"writes text that depends on the content of messages{' or tools' if form else ''}", lost=True, altered=True)
        return layouts[0]

    def _render_text(
        self, turns: Sequence[Turn], nonce: str, now: datetime, disguise: Disguise | None, hidden: CallDisguise | None
    ) -> str | Refusal:
        messages: list[dict[str, object]] = []
        for turn in turns:
            content = "\n\n".join(placeholder(nonce, i) for i in turn.messages)
            fields = hidden.fields(turn) if hidden else {}
            is_none = "tool_calls" in fields and not content and hidden is not None and not hidden.offer.has_content
            messages.append({"role": turn.role, "content": None if is_none else content, **fields})
        extra: dict[str, object] = {"tools": disguise.tools} if disguise else {}
        if not self._thinks:
            extra["enable_thinking"] = False
        reply = self._ask({"messages": messages, "bos_token": self.bos_text, "eos_token": self.eos_text, "now": now.isoformat(), **extra})
        if "text" in reply:
            if re.search("[\ud800-\udfff]", reply["text"]):
                raise self._error("writes invalid Unicode")
            return reply["text"]
        message = one_line(re.sub(placeholder(nonce, "[0-9]+"), "…", hide_placeholders(reply["message"])), 200)
        if reply["error"] == "refused" or (reply["error"] == "security" and hidden):
            return Refusal(message)
        if reply["error"] == "memory":
            limit = self.memory_limit_bytes
            raise self._error(f"needs more than {limit >> 20} MiB of memory", memory_limit_bytes=limit)
        reasons = {
            "syntax": f"is not valid Jinja: {message}",
            "security": f"accesses what a template may not: {message}",
            "size": TOO_MUCH_TEXT,
        }
        raise self._error(reasons[reply["error"]])

    def _ask(self, request: Mapping[str, object]) -> dict[str, str]:
        """Send a request to the worker and return its reply. Any failure ends the worker; the next request starts a new one."""
        worker = self._running_worker()
        try:
            reply, _ = worker.ask({"source": self.source, "time_limit_s": self.time_limit_s, **request}, limit_s=self.time_limit_s)
        except ChildStartError as error:
            raise _start_error(error) from None
        except ChildExitError as error:
            if error.expired:
                raise self._error(f"did not finish within {self.time_limit_s:g} s", time_limit_s=self.time_limit_s) from None
            raise self._error("crashed the process that renders it") from None
        except ValueError:
            raise self._error("made the process that renders it send an invalid reply") from None
        if reply.get("error") == "memory":
            worker.stop()
        return {key: str(value) for key, value in reply.items()}

    def _running_worker(self) -> Child:
        if self._worker is None or not self._worker.is_running:
            try:
                self._worker = Child(WORKER, {"memory_limit_bytes": self.memory_limit_bytes})
            except ChildStartError as error:
                raise _start_error(error) from error
            # Compiling takes up to 0.1 s. Start it now, unless the template is too long to send without blocking.
            if len(json.dumps(self.source)) <= PIPE_BYTES:
                self._worker.tell({"source": self.source, "time_limit_s": self.time_limit_s})
        return self._worker

    def _error(self, reason: str, **numbers: object) -> TemplateError:
        end = "" if reason.endswith((".", "…")) else "."
        return TemplateError(f"The chat template of {self.origin} {reason}{end}", hint=HINT, **numbers)


def _start_error(error: ChildStartError) -> TemplateError:
    return TemplateError(f"The process that renders chat templates did not start: {error.reason}.", hint=error.hint)


APART = "each call is a message of its own, with its result"


def _native(original: Sequence[Turn], calls: CallForm) -> Iterator[tuple[tuple[Turn, ...], Offer, str | None, str | None]]:
    """Yield the ways to offer a conversation with calls to a template, most usual first.

    Each is the turns, the form of the calls, and how the roles and the calls were adapted.
    """
    offers = [offer for offer in OFFERS if not offer.has_short_ids or any(short_id(each) != each for each in calls.ids)]
    offers = [offer for offer in offers if offer.has_content or calls.empty]
    done: set[tuple[Turn, ...]] = set()
    for adaptation, as_user in ADAPTATIONS:
        if "tool" in as_user:
            continue
        for apart in (False, True):
            turns = adapt(native_turns(original, calls, apart=apart), as_user, join=adaptation is not None)
            if turns in done:
                continue
            done.add(turns)
            for offer in offers:
                yield turns, offer, adaptation, APART if apart else None


@dataclass(frozen=True, slots=True)
class _Segments:
    """Puts texts back into a layout. `texts` are those of tools. With `markup`, calls follow the content of their message, as text."""

    messages: Sequence[Message]
    calls: CallForm | None
    texts: Sequence[Segment]
    markup: CallMarkup | None

    def of(self, parts: Sequence[Part]) -> Iterator[Segment]:
        for part in parts:
            if isinstance(part, int):
                yield from self._message(part)
            elif isinstance(part, ToolText):
                text = self.texts[part.index]
                yield replace(text, text=json.dumps(json.loads(f'"{text.text}"'))[1:-1]) if part.is_ascii else text
            elif isinstance(part, (CallText, CallId)):
                yield self._call(part)
            else:
                yield Segment(part) if isinstance(part, str) else part

    def _message(self, index: int) -> Iterator[Segment]:
        message = self.messages[index]
        calls = message.tool_calls if self.markup is not None else ()
        if message.content or not calls:
            yield Segment(message.content, index)
        if self.markup is None or not calls:
            return
        if message.content:
            yield Segment("\n", call=index)
        if self.markup is PLAIN:
            for at, call in enumerate(calls):
                yield from [Segment("\n", call=index)] if at else []
                yield Segment(call.text, is_content=True, call=index)
            return
        for text, is_content in self.markup.pieces(calls):
            yield Segment(text, is_content=is_content, call=index)

    def _call(self, part: CallText | CallId) -> Segment:
        assert self.calls is not None, "only a layout with calls has such parts"
        if isinstance(part, CallId):
            text = self.calls.ids[part.index]
            return Segment(short_id(text) if part.is_short else text, is_content=True)
        hidden = self.calls.texts[part.index]
        text = ESCAPES[part.escape](hidden.text)
        return Segment(text, hidden.message) if hidden.is_result else Segment(text, is_content=True, call=hidden.message)
