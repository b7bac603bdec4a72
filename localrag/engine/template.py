"""A model's chat template, rendered without ever seeing what is said.

A template is a program from a stranger. It is given the roles of a conversation, and for each content a random placeholder;
what it renders is split at the placeholders into fixed text and contents. What tools say is hidden from it in the same way. It
runs in a child process that is limited in time, memory and output, so that a template that loops, recurses or reaches out is
an error and not a hang.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Self

from localrag.engine.template_layout import (
    ADAPTATIONS,
    Disguise,
    Layout,
    Part,
    Refusal,
    ToolForm,
    ToolText,
    Turn,
    adapt,
    hide_placeholders,
    mark_tools,
    placeholder,
    split,
    tool_form,
    with_listing,
)
from localrag.errors import TemplateError
from localrag.process import Child, ChildExitError, ChildStartError
from localrag.text.sanitize import one_line
from localrag.text.thinking import ThinkingForm, form_of
from localrag.text.tokens import Segment
from localrag.types import Message, ToolSpec

MAX_SOURCE_BYTES = 128 << 10
MAX_KEPT_LAYOUTS = 32
MAX_TOOL_CHARS = 1 << 20
"""How much a template may make of what tools say, by repeating it."""
WORKER = "localrag.engine.template_worker"
PIPE_BYTES = 32 << 10  # what a pipe takes without a reader
TOO_MUCH_TEXT = "writes more text than any prompt can hold"
HINT = "Give a template that works with --chat-template FILE."


class JinjaChatTemplate:
    """A `ChatTemplate` in Jinja, as GGUF files carry it.

    `bos_text` and `eos_text` are what the template knows as `bos_token` and `eos_token`; `origin` names the template in errors;
    `clock` gives the time to templates that print it. Compiling and rendering once may take `time_limit_s` of wall-clock time
    and `memory_limit_bytes` over what the bare process holds. A conversation whose roles, and structure of tools, were rendered
    before on the same day is not rendered again. Safe to share between threads; `close()` ends the child process, and so does
    dropping the object.

    Errors of the template are TemplateError: one that is too large, does not compile, refuses the roles however they are adapted,
    drops, repeats or alters contents, depends on them, goes over a limit, or reaches for attributes that the sandbox keeps from it.
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
        self.tools_adaptation: str | None = None
        """Likewise, where its tools went; None where the template put them where it wants them, or where there were none."""
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
        """Start the child process, have the template compiled there, and return without waiting for it."""
        with self._lock:
            self._running_worker()

    def close(self) -> None:
        """End the child process. A later `render` starts another."""
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
        """As the template shows it."""
        return self._thinking

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, thinks: bool = True) -> list[Segment]:
        """Fixed text and contents in the order of the prompt, up to where the answer begins.

        Each content comes once and as it was given. What tools say comes as the template has it, escaped as inside a JSON string; the
        name of each is there, and a description that the template has no place for is not. Without `thinks` the template is told so in
        the way that most know (`enable_thinking`), and where it opens thoughts all the same they are closed. UsageError as of `tool_form`.
        """
        form = tool_form(tools) if tools else None
        with self._lock:
            self._thinks = thinks or self._thinking is None
            layout = self._layout(tuple(message.role for message in messages), form, self._clock())
            self.adaptation, self.tools_adaptation = layout.adaptation, layout.tools_adaptation
        contents = [message.content for message in messages]
        texts: tuple[Segment, ...] = ()
        if form:
            texts = (form.listing,) if layout.tools_adaptation else form.texts
            if sum(len(texts[part.index].text) for part in layout.parts if isinstance(part, ToolText)) > MAX_TOOL_CHARS:
                raise self._error(TOO_MUCH_TEXT)
        segments = [_segment(part, contents, texts) for part in layout.parts]
        if thinks or self._thinking is None:
            return segments
        ends = self._thinking.without("" if segments[-1].is_content else segments[-1].text)
        return [*segments, Segment(ends)] if ends else segments

    def _layout(self, roles: tuple[str, ...], form: ToolForm | None, now: datetime) -> Layout:
        """The layout for these roles and tools. Contents and what tools say play no part in it."""
        key = (now.date(), roles, form and form.key, self._thinks)
        if key not in self._layouts:
            given = [Turn(role, (index,)) for index, role in enumerate(roles)]
            layout = self._lay_out_tools(roles, form, now) if form else self._lay_out(given, now)
            if len(self._layouts) >= MAX_KEPT_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return self._layouts[key]

    def _lay_out(self, given: Sequence[Turn], now: datetime) -> Layout:
        """The layout by the first adaptation that the template takes."""
        refusals: dict[tuple[Turn, ...], Refusal] = {}
        for adaptation, as_user in ADAPTATIONS:
            turns = adapt(given, as_user, join=adaptation is not None)
            if turns in refusals:
                continue
            parts = self._attempt(turns, now)
            if not isinstance(parts, Refusal):
                return Layout(parts, turns, adaptation)
            refusals[turns] = parts
        # What the template does to contents says more than that it refuses roles; else the last refusal is what no adaptation cured.
        tried = list(refusals.values())
        refusal = next((refusal for refusal in tried if refusal.lost), tried[-1])
        roles = [turn.role for turn in given]
        shown = ", ".join((*roles[:8], "…") if len(roles) > 8 else roles) or "none"
        reason = refusal.reason if refusal.lost else f"cannot render messages of these roles ({shown}): {refusal.reason}"
        raise self._error(reason, roles=roles)

    def _lay_out_tools(self, roles: tuple[str, ...], form: ToolForm, now: datetime) -> Layout:
        """As without tools, and the tools where the template puts them; or if it names not every one, as a list in the system text."""
        bare = self._layout(roles, None, now)
        parts = self._attempt(bare.turns, now, form)
        if isinstance(parts, Refusal):
            if parts.altered:
                raise self._error(parts.reason)
            why = f"the template does not render with them: {parts.reason}"
        elif form.names <= {part.index for part in parts if isinstance(part, ToolText)}:
            return replace(bare, parts=mark_tools(parts, bare.parts))
        else:
            why = "the template has no place for them"
        listed = self._lay_out(with_listing(roles), now)
        parts = tuple(ToolText(0) if part == len(roles) else part for part in listed.parts)
        adaptation = f"the tools are listed in the system text, for {why}"
        return replace(listed, parts=mark_tools(parts, bare.parts), tools_adaptation=adaptation)

    def _attempt(self, turns: Sequence[Turn], now: datetime, form: ToolForm | None = None) -> tuple[Part, ...] | Refusal:
        """Renders twice, with placeholders of two lengths: what differs then depends on the content, or on chance."""
        layouts: list[tuple[Part, ...]] = []
        for num_random_bytes in (16, 24):
            nonce, disguise = secrets.token_hex(num_random_bytes), form.disguise() if form else None
            text = self._render_text(turns, nonce, now, disguise)
            if isinstance(text, Refusal):
                return text
            contents = split(text, nonce, turns)
            parts = contents if isinstance(contents, Refusal) or not disguise else disguise.split(contents)
            if isinstance(parts, Refusal):
                return parts
            layouts.append(parts)
        if layouts[0] != layouts[1]:
            return Refusal(f"writes what depends on the content of messages{' or tools' if form else ''}", lost=True, altered=True)
        return layouts[0]

    def _render_text(self, turns: Sequence[Turn], nonce: str, now: datetime, disguise: Disguise | None) -> str | Refusal:
        messages = [{"role": turn.role, "content": "\n\n".join(placeholder(nonce, i) for i in turn.messages)} for turn in turns]
        given: dict[str, object] = {"tools": disguise.tools} if disguise else {}
        if not self._thinks:
            given["enable_thinking"] = False
        reply = self._ask({"messages": messages, "bos_token": self.bos_text, "eos_token": self.eos_text, "now": now.isoformat(), **given})
        if "text" in reply:
            if re.search("[\ud800-\udfff]", reply["text"]):
                raise self._error("writes what is not valid text")
            return reply["text"]
        said = one_line(re.sub(placeholder(nonce, "[0-9]+"), "…", hide_placeholders(reply["message"])), 200)
        if reply["error"] == "refused":
            return Refusal(said)
        if reply["error"] == "memory":
            limit = self.memory_limit_bytes
            raise self._error(f"needs more than {limit >> 20} MiB of memory", memory_limit_bytes=limit)
        reasons = {
            "syntax": f"is not valid Jinja: {said}",
            "security": f"reaches for what a template may not touch: {said}",
            "size": TOO_MUCH_TEXT,
        }
        raise self._error(reasons[reply["error"]])

    def _ask(self, request: Mapping[str, object]) -> dict[str, str]:
        """The worker's reply. Whatever goes wrong with the worker ends it, and the next request starts another."""
        worker = self._running_worker()
        try:
            reply, _ = worker.ask({"source": self.source, "time_limit_s": self.time_limit_s, **request}, limit_s=self.time_limit_s)
        except ChildStartError as error:
            raise _start_error(error) from None
        except ChildExitError as error:
            if error.expired:
                raise self._error(f"did not finish within {self.time_limit_s:g} s", time_limit_s=self.time_limit_s) from None
            raise self._error("ended the process that renders it") from None
        except ValueError:
            raise self._error("makes the process that renders it answer with what is not a message") from None
        if reply.get("error") == "memory":
            worker.stop()
        return {key: str(value) for key, value in reply.items()}

    def _running_worker(self) -> Child:
        if self._worker is None or not self._worker.is_running:
            try:
                self._worker = Child(WORKER, {"memory_limit_bytes": self.memory_limit_bytes})
            except ChildStartError as error:
                raise _start_error(error) from error
            # Compiling takes up to 0.1 s: it begins now, unless the template is too long to be handed over without waiting.
            if len(json.dumps(self.source)) <= PIPE_BYTES:
                self._worker.tell({"source": self.source, "time_limit_s": self.time_limit_s})
        return self._worker

    def _error(self, reason: str, **numbers: object) -> TemplateError:
        end = "" if reason.endswith((".", "…")) else "."
        return TemplateError(f"The chat template of {self.origin} {reason}{end}", hint=HINT, **numbers)


def _start_error(error: ChildStartError) -> TemplateError:
    return TemplateError(f"The process that renders chat templates did not start: {error.reason}.", hint=error.hint)


def _segment(part: Part, contents: Sequence[str], texts: Sequence[Segment]) -> Segment:
    if isinstance(part, str):
        return Segment(part)
    if isinstance(part, int):
        return Segment(contents[part], part)
    return texts[part.index] if isinstance(part, ToolText) else part
