"""How a model writes tool calls, and reading them while it writes.

A `CallMarkup` is the text around the names and the arguments of calls. Models of different families write

    <tool_call>\\n{"name": "clock", "arguments": {"zone": "UTC"}}\\n</tool_call>
    [TOOL_CALLS]clock[ARGS]{"zone": "UTC"}
    <tool_call>\\n<function=clock>\\n<parameter=zone>\\nUTC\\n</parameter>\\n</function>\\n</tool_call>

so arguments are a JSON object, or fields with a value each. A model's own form is what its chat template writes for earlier calls, and is
learned from it. In the texts of a markup, `NUMBER` and `ID` stand for any number and any id.
"""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal

from localrag.types import Message, ToolCall, ToolSpec

NUMBER, ID = "\ue000", "\ue001"
_VARIABLES = {NUMBER: re.compile(r"[0-9]{1,9}"), ID: re.compile(r"[A-Za-z0-9_.:-]{1,64}")}
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ID_LETTERS = string.ascii_letters + string.digits
_TAG = re.compile(r"<[^<>\s]|\[[A-Z]|[<>|]{2}")
"""What tells an opening text from plain text, in which it may then stand anywhere."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Arguments as fields: `key` stands before each key, and `between` between two fields.

    A text's value stands between `opens_text` and `closes_text`, as it is. Any other value is JSON between `opens_json` and `closes_json`.
    """

    key: str
    opens_text: str
    closes_text: str
    opens_json: str
    closes_json: str
    between: str = ""


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """The texts around calls: `opens` before the first, `start` before each name, `named` between name and arguments, `end` after the
    arguments, `between` two calls, `closes` after the last.

    Without `between`, an answer has one call. `fields` is None if arguments are JSON. `text` stands before an answer that makes no call.
    `or_else` is another form, which a model may choose.
    """

    start: str
    named: str
    end: str = ""
    opens: str = ""
    closes: str = ""
    between: str | None = None
    fields: Fields | None = None
    text: str = ""
    or_else: CallMarkup | None = None

    @property
    def literals(self) -> tuple[str, ...]:
        """All fixed texts."""
        own = [self.opens, self.start, self.named, self.end, self.between or "", self.closes, self.text]
        if self.fields is not None:
            own += [getattr(self.fields, name) for name in Fields.__slots__]
        others = self.or_else.literals if self.or_else is not None else ()
        return (*(piece for text in own for piece in re.split(f"[{NUMBER}{ID}]", text) if piece), *others)

    @property
    def is_anywhere(self) -> bool:
        """Whether calls may follow text. Otherwise an answer is calls or text, because text may look like a call's beginning."""
        return not self.text and bool(_TAG.match((self.opens + self.start).lstrip()))

    @property
    def opener(self) -> str:
        """The text with which calls begin, up to what differs from call to call."""
        return re.split(f"[{NUMBER}{ID}]", self.opens + self.start)[0].lstrip()

    def opener_ids(self, special_texts: Sequence[tuple[str, int]]) -> frozenset[int]:
        """Return the tokens of a vocabulary with which calls begin, if these are tokens of their own."""
        return frozenset(token for text, token in special_texts if text.strip() and self.opener.startswith(text))

    def mark_ids(self, special_texts: Sequence[tuple[str, int]]) -> frozenset[int]:
        """Return the control tokens of a vocabulary that are part of these texts."""
        whole = "\0".join(self.literals)
        return frozenset(token for text, token in special_texts if text and text in whole)

    def written(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of an answer that makes these calls. Several are written only if the markup allows them."""
        return "".join(text for text, _ in self.pieces(calls if self.between is not None else calls[:1]))

    def pieces(self, calls: Sequence[ToolCall]) -> Iterator[tuple[str, bool]]:
        """Yield the same as stretches of text, each with whether it is content: part of a call, and not of the markup."""
        yield self.opens, False
        for number, call in enumerate(calls):
            if number:
                yield "\n" if self.between is None else self.between, False
            for text, is_content in self._call(call):
                fixed = text.replace(NUMBER, str(number)).replace(ID, short_id(call.id or str(number)))
                yield (text, True) if is_content else (fixed, False)
        yield self.closes, False

    def _call(self, call: ToolCall) -> Iterator[tuple[str, bool]]:
        yield from ((self.start, False), (call.name, True), (self.named, False))
        if self.fields is None or call.parsed is None:
            yield str(call.arguments) if call.parsed is None else json.dumps(call.parsed, ensure_ascii=False), True
        else:
            for at, (key, value) in enumerate(call.parsed.items()):
                yield from self._field(key, value, self.fields.between if at else "", self.fields)
        yield self.end, False

    def _field(self, key: str, value: object, before: str, form: Fields) -> Iterator[tuple[str, bool]]:
        is_text = isinstance(value, str)
        opens, closes = (form.opens_text, form.closes_text) if is_text else (form.opens_json, form.closes_json)
        content = str(value) if is_text else json.dumps(value, ensure_ascii=False)
        yield from ((before + form.key, False), (key, True), (opens, False), (content, True), (closes, False))


HERMES = CallMarkup(start='<tool_call>\n{"name": "', named='", "arguments": ', end="}\n</tool_call>", between="\n")
PLAIN = CallMarkup(start='{"name": "', named='", "arguments": ', end="}", or_else=HERMES)
"""For models without a form of their own: a JSON object and nothing else. Many are trained on the form of Hermes, though."""
_LFM2 = CallMarkup(
    start="",
    named="(",
    end=")",
    opens="<|tool_call_start|>[",
    closes="]<|tool_call_end|>",
    between=", ",
    fields=Fields("", "='", "'", "=", "", ", "),
)
_GRANITE = CallMarkup(start='{"name": "', named='", "arguments": ', end="}", opens="<|tool_call|>[", closes="]", between=", ")
KNOWN_MARKS = (
    ("List of tools: <|tool_list_start|>", _LFM2),
    ("List of tools: [", _LFM2),
    ("<|tool_call|> followed by a JSON list", _GRANITE),
    ("<tool_call>", HERMES),
)
"""Text of templates that leave out calls, and the form of their models."""


def short_id(text: str) -> str:
    """Return an id of nine letters and digits, which Mistral's models demand; the same for the same text."""
    if _SHORT_ID.fullmatch(text):
        return text
    number = int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    return "".join(_ID_LETTERS[number // 62**at % 62] for at in range(9))


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of the call with this index: its name and id, in its first piece, or more of the JSON text of its arguments."""

    index: int
    name: str = ""
    arguments: str = ""
    id: str = ""


@dataclass(slots=True)
class CallReader:
    """Reads an answer piece by piece, and separates text from calls.

    `is_text` tells whether the parameter of a tool is a text, for markup that does not say it. `make_id` returns an id for a call. What
    does not follow the markup is text.
    """

    markup: CallMarkup
    names: Sequence[str]
    is_text: Callable[[str, str], bool] = lambda _name, _key: True
    make_id: Callable[[], str] = str
    text: str = ""
    """The text of the answer so far, without calls."""
    _calls: list[tuple[str, list[str], str]] = field(default_factory=list)
    _held: str = ""
    _state: Literal["before", "text", "name", "json", "fields", "after", "done", "rest"] = "before"
    _scan: _JsonEnd = field(default_factory=lambda: _JsonEnd())  # noqa: PLW0108  # defined below
    _num_fields: int = 0
    _deltas: list[CallDelta] = field(default_factory=list)
    _new_text: str = ""
    _begun: str = ""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far. The arguments of the last one may be cut off."""
        return tuple(ToolCall(name, "".join(arguments), id_) for name, arguments, id_ in self._calls)

    def feed(self, text: str) -> tuple[str, list[CallDelta]]:
        """Read a piece. Return the text and the pieces of calls that are now certain."""
        self._held += text
        return self._read(is_last=False)

    def finish(self) -> tuple[str, list[CallDelta]]:
        """Read the end of the answer."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> tuple[str, list[CallDelta]]:
        steps = {
            "before": self._before,
            "text": self._in_text,
            "name": self._name,
            "json": self._json,
            "fields": self._fields,
            "after": self._after,
            "done": self._done,
            "rest": self._rest,
        }
        while steps[self._state](is_last=is_last):
            pass
        text, deltas, self._new_text, self._deltas = self._new_text, self._deltas, "", []
        return text, deltas

    def _say(self, text: str) -> None:
        self.text += text
        self._new_text += text

    def _before(self, *, is_last: bool) -> bool:
        """At the start of an answer: the text before a plain answer, a call, or text."""
        markup = self.markup
        held = self._held.lstrip() if markup.start or markup.opens else self._held
        if markup.text:
            end = _match(markup.text, held, is_last=is_last)
            if end == _MORE and not is_last:
                return False
            if end is not None and end != _MORE:
                self._held, self._state = held[end:], "rest"
                return True
        end = _match(markup.opens + markup.start, held, is_last=is_last, is_lenient=markup.fields is None)
        if end == _MORE and not is_last:
            return False
        if end is None and markup.or_else is not None:
            self.markup = markup.or_else
            return True
        if end is None or end == _MORE:
            self._state = "text" if markup.is_anywhere else "rest"
            return True
        self._begin(held, end)
        return True

    def _rest(self, *, is_last: bool) -> bool:  # noqa: ARG002  # as the others
        """Release everything: it is text."""
        self._say(self._held)
        self._held = ""
        return False

    def _done(self, *, is_last: bool) -> bool:
        """After the calls: white space is dropped."""
        self._held = self._held.lstrip()
        return bool(self._held) and self._rest(is_last=is_last)

    def _begin(self, held: str, end: int) -> None:
        self._begun, self._held, self._state = held[:end], held[end:], "name"

    def _in_text(self, *, is_last: bool) -> bool:
        """Release text up to a place where calls begin, or may begin."""
        opener = self.markup.opens + self.markup.start
        for at in range(len(self._held)):
            if self._held[at] != opener.lstrip()[0]:
                continue
            end = _match(opener.lstrip(), self._held[at:], is_last=is_last, is_lenient=self.markup.fields is None)
            if end == _MORE and not is_last:
                kept = len(self._held[:at].rstrip())
                self._say(self._held[:kept])
                self._held = self._held[kept:]
                return False
            if end is not None and end != _MORE:
                self._say(self._held[:at].rstrip())
                self._begin(self._held[at:], end)
                return True
        kept = len(self._held) if is_last else len(self._held.rstrip())
        self._say(self._held[:kept])
        self._held = self._held[kept:]
        return False

    def _name(self, *, is_last: bool) -> bool:
        """Read a name of a tool, and what separates it from the arguments."""
        for name in sorted(self.names, key=len, reverse=True):
            if not self._held.startswith(name):
                if not is_last and name.startswith(self._held):
                    return False
                continue
            fields = self.markup.fields
            end = _match(self.markup.named, self._held[len(name) :], is_last=is_last, is_lenient=fields is None)
            if end == _MORE and not is_last:
                return False
            if end is not None and end != _MORE:
                self._held, self._begun = self._held[len(name) + end :], ""
                self._calls.append((name, [], self.make_id()))
                self._deltas.append(CallDelta(len(self._calls) - 1, name=name, id=self._calls[-1][2]))
                self._state, self._scan, self._num_fields = "json" if fields is None else "fields", _JsonEnd(), 0
                return True
        if is_last and self._calls:  # the answer was cut off within another call
            self._held, self._begun, self._state = "", "", "done"
        else:
            self._held, self._begun, self._state = self._begun + self._held, "", "rest"
        return True

    def _add(self, text: str) -> None:
        if text:
            self._calls[-1][1].append(text)
            self._deltas.append(CallDelta(len(self._calls) - 1, arguments=text))

    def _json(self, *, is_last: bool) -> bool:  # noqa: ARG002  # as the others
        self._held = self._held if self._scan.has_begun else self._held.lstrip()
        end = self._scan.feed(self._held)
        self._add(self._held if end is None else self._held[:end])
        self._held = "" if end is None else self._held[end:]
        self._state = "json" if end is None else "after"
        return end is not None

    def _fields(self, *, is_last: bool) -> bool:
        """Read the next field, or the end of the call."""
        form = self.markup.fields
        assert form is not None, "only then there are fields"
        before = form.between + form.key if self._num_fields else form.key
        end = _match(before, self._held, is_last=is_last)
        if end is None or (end == _MORE and is_last):
            if _match(self.markup.end, self._held, is_last=is_last) == _MORE and not is_last:
                return False
            self._add("}" if self._num_fields else "{}")
            self._state = "after"
            return True
        if end == _MORE:
            return False
        found = self._field(self._held[end:])
        if found is None:
            if is_last:
                self._held = ""
            return False
        key, value, rest = found
        self._add(("{" if not self._num_fields else ", ") + f"{json.dumps(key, ensure_ascii=False)}: {value}")
        self._num_fields += 1
        self._held = rest
        return True

    def _field(self, held: str) -> tuple[str, str, str] | None:
        """Return the key, the value as JSON, and the text after a field; None if it is not complete."""
        form = self.markup.fields
        assert form is not None, "only then there are fields"
        places = [(held.find(text), text) for text in {form.opens_text, form.opens_json}]
        at = min((at for at, _ in places if at >= 0), default=-1)
        if at < 0:
            return None
        key = held[:at]
        if held.startswith(form.opens_text, at) and held.startswith(form.opens_json, at):
            longer = max(form.opens_text, form.opens_json, key=len)
            is_text = longer == form.opens_text if form.opens_text != form.opens_json else self.is_text(self._calls[-1][0], key)
        else:
            is_text = held.startswith(form.opens_text, at)
            other = form.opens_text if not is_text else form.opens_json
            if other.startswith(held[at:]):
                return None  # it may still become the other one
        opens, closes = (form.opens_text, form.closes_text) if is_text else (form.opens_json, form.closes_json)
        start = at + len(opens)
        if is_text or closes:
            end = held.find(closes, start)
            if end < 0:
                return None
            value = held[start:end]
            return key, json.dumps(value, ensure_ascii=False) if is_text else _value(value), held[end + len(closes) :]
        scan = _JsonEnd()
        end_or_none = scan.feed(held[start:])
        if end_or_none is None:
            return None
        return key, _value(held[start : start + end_or_none]), held[start + end_or_none :]

    def _after(self, *, is_last: bool) -> bool:
        """Read what follows the arguments: another call, or the end."""
        markup = self.markup
        is_lenient = markup.fields is None
        again = (
            None
            if markup.between is None
            else _match(markup.end + markup.between + markup.start, self._held, is_last=is_last, is_lenient=is_lenient)
        )
        if again == _MORE and not is_last:
            return False
        if again == _MORE:  # the answer was cut off before another call
            self._held, self._state = "", "done"
            return True
        if again is not None:
            self._begin(self._held, again)
            return True
        end = _match(markup.end + markup.closes, self._held, is_last=is_last, is_lenient=is_lenient)
        if end == _MORE and not is_last:
            return False
        # The end of an answer can come before the end of the markup, where a token that ends answers stands for the rest.
        self._held, self._state = self._held[max(0, end or 0) :] if end != _MORE else "", "done"
        return True


_MORE = -1


def _match(pattern: str, text: str, *, is_last: bool, is_lenient: bool = False) -> int | None:
    """Return where the pattern ends in a text that begins with it; `_MORE` if more text may complete it; None if it does not match.

    With `is_lenient`, white space makes no difference.
    """
    at = 0
    for char in pattern:
        if is_lenient and char.isspace():
            continue
        while is_lenient and at < len(text) and text[at].isspace() and text[at] != char:
            at += 1
        if char in _VARIABLES:
            found = _VARIABLES[char].match(text, at)
            if found is None:
                return _MORE if at == len(text) else None
            if found.end() == len(text) and not is_last:
                return _MORE
            at = found.end()
        elif at == len(text):
            return _MORE
        elif text[at] != char:
            return None
        else:
            at += 1
    return at


@dataclass(slots=True)
class _JsonEnd:
    """Finds the end of a JSON value in text that arrives in pieces."""

    depth: int = 0
    in_string: bool = False
    is_escaped: bool = False
    has_begun: bool = False

    def feed(self, text: str) -> int | None:
        """Return where the value ends in this piece; None if it does not."""
        for at, char in enumerate(text):
            if self.in_string:
                ends = char == '"' and not self.is_escaped
                self.is_escaped = char == "\\" and not self.is_escaped
                self.in_string = not ends
                if ends and not self.depth:
                    return at + 1
            elif char == '"':
                self.in_string = self.has_begun = True
            elif char in "{[":
                self.depth, self.has_begun = self.depth + 1, True
            elif char in "}]" and self.depth:
                self.depth -= 1
                if not self.depth:
                    return at + 1
            elif not self.depth and self.has_begun and not (char.isalnum() or char in "+-."):
                return at
            elif not char.isspace():
                self.has_begun = True
        return None


def _value(text: str) -> str:
    """Return the JSON text of a value that a model wrote as JSON or in Python's spelling; anything else is a text."""
    text = text.strip()
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


# --- learning a model's own form ---

_QUESTION, _ANSWER, _NEXT, _RESULT = "quillquestion", "quillanswer", "quillnext", "quillresult"
_NAMES, _TEXTS = ("quillone", "quilltwo"), ("textone", "texttwo")
_KEYS, _LAST_KEY = ("keya", "keyb", "keyc", "keyd"), "keye"  # sorted, since some templates sort them
_NUMBERS, _IDS = (7070707, 8080808), ("quillida1", "quillidb2")
_UNIT = re.compile(r"<[^<>\n]+>|\[/?[A-Z_]+\]|[0-9]+|.", re.DOTALL)
"""Texts are compared by tags, numbers and characters."""
_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_GPT_OSS = CallMarkup(
    start="<|channel|>commentary to=functions.", named=" <|constrain|>json<|message|>", text="<|channel|>final<|message|>"
)  # fmt: skip
"""Its template writes calls in another order than its models do."""


def probe_tools() -> tuple[ToolSpec, ...]:
    """Return the tools that the prompts for `learned` need."""
    properties = {key: {"type": "integer" if key in _KEYS[2:] else "string", "description": "x"} for key in (*_KEYS, _LAST_KEY)}
    return tuple(ToolSpec(name, "x", {"type": "object", "properties": properties}) for name in _NAMES)


def learned(render: Callable[[Sequence[Message]], str | None], *, thoughts_end: str = "", eos: str = "") -> CallMarkup | None:
    """Learn how a model writes calls from prompts with earlier calls. None if no form is found that reads what it is learned from.

    `render` returns a prompt with the tools of `probe_tools`, up to the start of the next answer, or None if the template writes the calls
    otherwise than they are made. `thoughts_end` closes thoughts before calls. `eos` ends answers.
    """
    try:
        return _Learner(render, thoughts_end, eos).markup()
    except _UnknownFormError:
        return None


class _UnknownFormError(Exception):
    """The prompts do not have the expected parts."""


@dataclass(slots=True)
class _Learner:
    """See `learned`. `_header` is what the template writes before any answer, `_turn_end` after one."""

    render: Callable[[Sequence[Message]], str | None]
    thoughts_end: str
    eos: str
    _header: str = ""
    _turn_end: str = ""

    def markup(self) -> CallMarkup:
        self._header = self._after_question(Message("user", _QUESTION))
        plain = self._after_question(Message("user", _QUESTION), Message("assistant", _ANSWER), Message("user", _NEXT))
        before, self._turn_end = _parted(plain.partition(_NEXT)[0], _ANSWER)
        text = self._body(before)
        mixed = ToolCall(_NAMES[0], dict(zip(_KEYS, (*_TEXTS, *_NUMBERS), strict=True)), _IDS[0])
        last_text = ToolCall(_NAMES[0], {_KEYS[2]: _NUMBERS[0], _LAST_KEY: _TEXTS[0]}, _IDS[0])
        one = self._called(mixed)
        if "<|channel|>" in one and "functions." in one:
            return _GPT_OSS
        before, after = _parted(one, _NAMES[0])
        named, rest, fields = _arguments(after, mixed) or _with_fields(after, _parted(self._called(last_text), _NAMES[0])[1])
        opener = self._body(before)
        markup = CallMarkup(start=opener, named=named, end=self._end(rest).rstrip(), fields=fields, text=text)
        markup = self._with_several(markup, opener)
        self._check(markup, opener, after, mixed)
        return markup

    def _after_question(self, *messages: Message) -> str:
        prompt = self.render(messages)
        if prompt is None:
            raise _UnknownFormError
        return _parted(prompt, _QUESTION)[1]

    def _called(self, *calls: ToolCall) -> str:
        """Return the text from the question to the first result of these calls."""
        results = [Message("tool", _RESULT, tool_call_id=call.id) for call in calls]
        text = self._after_question(Message("user", _QUESTION), Message("assistant", "", tool_calls=calls), *results)
        text = _parted(text, _RESULT)[0]
        for id_ in _IDS:
            text = text.replace(id_, ID)
        return text

    def _body(self, text: str) -> str:
        """Return what an answer begins with: the text without the start of its turn and without empty thoughts."""
        body = _joined(_units(text)[len(_common_start(_units(text), _units(self._header))) :])
        if self.thoughts_end and self.thoughts_end in body:
            body = body.rpartition(self.thoughts_end)[2]
        return body.lstrip()

    def _until_turn_end(self, text: str) -> str | None:
        """Return the text up to the end of the turn; None if that is not found."""
        first = _TOKEN.search(self._turn_end) or re.search(r"\S+", self._turn_end)
        places = [text.find(mark) for mark in (self.eos, first[0] if first else "") if mark]
        at = min((at for at in places if at >= 0), default=None)
        return None if at is None else text[:at]

    def _end(self, text: str) -> str:
        """Return the part of what follows calls that belongs to them: up to the end of the turn or, if that is not found, up to a tag."""
        whole, tag = self._until_turn_end(text), _TOKEN.search(text)
        return whole if whole is not None else text[: tag.end()] if tag and tag.start() else ""

    def _with_several(self, markup: CallMarkup, opener: str) -> CallMarkup:
        """Add what stands between calls and around all of them, if the template writes several calls in one answer."""
        first, second = (ToolCall(name, {key: text}, id_) for name, key, text, id_ in zip(_NAMES, _KEYS, _TEXTS, _IDS, strict=False))
        try:
            both = self._called(first, second)
        except _UnknownFormError:
            return markup
        _, after = _parted(both, first.name)
        middle, tail = _parted(after, second.name)
        (named, middle, _), (other, tail, _) = (
            _arguments(text, call) or _field_of(text, call, markup.fields) for text, call in ((middle, first), (tail, second))
        )
        units, between = _units(opener), _units(middle)
        start = _common_end(units, between)
        between = between[: len(between) - len(start)]
        end = _common_start(between, _units(tail))
        closes = self._end(_joined(_units(tail)[len(end) :])).rstrip()
        return replace(
            markup,
            opens=_joined(units[: len(units) - len(start)]),
            start=_joined(start),
            named=_joined(_common_start(_units(named), _units(other))),
            end=_joined(end) if closes or between[len(end) :] else _joined(end).rstrip(),
            between=_joined(between[len(end) :]),
            closes=closes,
        )

    def _check(self, markup: CallMarkup, opener: str, after: str, call: ToolCall) -> None:
        """Raise an error unless the markup reads what the template wrote and what it writes itself."""
        if not (markup.opens + markup.start + markup.text):
            raise _UnknownFormError
        whole = self._until_turn_end(after)
        rendered = opener + call.name + (after if whole is None else whole)
        for text, is_whole in ((markup.written([call]), True), (rendered.replace(ID, call.id), whole is not None)):
            reader = CallReader(markup, _NAMES, lambda _name, key: key not in _KEYS[2:])
            said = reader.feed(text)[0] + reader.finish()[0]
            calls = reader.calls
            if (said.strip() and is_whole) or len(calls) != 1 or (calls[0].name, calls[0].parsed) != (call.name, call.parsed):
                raise _UnknownFormError


def _arguments(text: str, call: ToolCall) -> tuple[str, str, None] | None:
    """Return the texts before and after the arguments, if they are JSON."""
    decoder = json.JSONDecoder()
    for match in re.finditer("{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if value == call.parsed:
            return text[: match.start()], text[end:], None
    return None


def _with_fields(mixed: str, last_text: str) -> tuple[str, str, Fields]:
    """Return the texts before and after arguments that are fields, and the form of the fields. The second call ends with a text."""
    keys, texts, numbers = _KEYS, _TEXTS, [str(number) for number in _NUMBERS]
    first, text_1, text_end, text_2, text_end_2, json_1, json_end, json_2, rest = _cut(
        mixed, keys[0], texts[0], keys[1], texts[1], keys[2], numbers[0], keys[3], numbers[1]
    )
    *_, rest_of_text = _cut(last_text, keys[2], numbers[0], _LAST_KEY, texts[0])
    if text_1 != text_2 or json_1 != json_2 or text_end != text_end_2:
        raise _UnknownFormError
    key = _joined(_common_end(_common_end(_units(first), _units(text_end)), _units(json_end)))
    text_end, json_end = text_end.removesuffix(key), json_end.removesuffix(key)
    closes_text = _joined(_common_start(_units(text_end), _units(rest_of_text)))
    between = text_end[len(closes_text) :]
    closes_json = json_end.removesuffix(between)
    if not json_end.endswith(between) or not rest.startswith(closes_json) or not key + text_1:
        raise _UnknownFormError
    return first.removesuffix(key), rest[len(closes_json) :], Fields(key, text_1, closes_text, json_1, closes_json, between)


def _field_of(text: str, call: ToolCall, form: Fields | None) -> tuple[str, str, Fields | None]:
    """Return the texts before and after the only argument of a call, which is a text."""
    if form is None:
        raise _UnknownFormError
    ((key, value),) = (call.parsed or {}).items()
    before, _, after = _cut(text, key, str(value))
    if not before.endswith(form.key) or not after.startswith(form.closes_text):
        raise _UnknownFormError
    return before.removesuffix(form.key), after.removeprefix(form.closes_text), form


def _cut(text: str, *marks: str) -> list[str]:
    """Return the texts around marks that follow each other."""
    pieces = []
    for mark in marks:
        before, text = _parted(text, mark)
        pieces.append(before)
    return [*pieces, text]


def _parted(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found:
        raise _UnknownFormError
    return before, after


def _units(text: str) -> list[str]:
    return _UNIT.findall(text)


def _joined(units: Sequence[str]) -> str:
    return "".join(units)


def _common_start(units: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return what both begin with. Different numbers at the same place are any number."""
    common = []
    for unit, other in zip(units, others, strict=False):
        if unit != other and not (unit.isdecimal() and other.isdecimal()):
            break
        common.append(unit if unit == other else NUMBER)
    return common


def _common_end(units: Sequence[str], others: Sequence[str]) -> list[str]:
    return _common_start(units[::-1], others[::-1])[::-1]
