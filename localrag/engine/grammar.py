"""JSON schema → a grammar in llama.cpp's notation (GBNF), and how long a text under it can be.

The JSON that the grammar allows is on one line, with at most one space after a colon or comma. Strings hold no raw control
characters and no \\u escapes, so a string of n characters is n characters or two-character escapes. What llama.cpp does with a
grammar is bounded here too: the repetitions that it unrolls, and the alternatives that can be open at once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from localrag.decoding import schema_text
from localrag.engine.json_schema import parse, refused
from localrag.engine.json_tree import Array, Integer, Literals, Map, Node, Number, Object, Text, Union

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_REPEATS = 65_536
"""llama.cpp unrolls a repetition into as many rules."""
MAX_NAME_LENGTH = 64
"""Of a property that no schema names."""
MAX_ALTERNATIVES = 512
"""Open at once: each costs a pass over the candidates at every token."""

_BLOCK = 1000  # llama.cpp refuses repetitions of 2,000 and more
_CHAR = r'[\x20-\x21\x23-\x5B\x5D-\uD7FF\uE000-\U0010FFFF] | "\\" ["\\/bfnrt]'
_NUMBER = '"-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,15})? ([eE] [+-]? [0-9]{1,2})?'
CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
_ANY = r"[\x09-\uD7FF\uE000-\U0010FFFF]"
_OTHER_TEXT = " | ".join((
    rf"[\x09-\x3B\x3D-\x7A\x7C-\uD7FF\uE000-\U0010FFFF] {_ANY}*",  # neither < nor {
    *(f'"{CALL_OPENS[:at]}" ([^{CALL_OPENS[at]}] {_ANY}*)?' for at in range(1, len(CALL_OPENS))),
))  # fmt: skip
_NUMBER_CHARS = 1 + 15 + 16 + 4


def grammar_of(schema: Mapping[str, Any] | str, *, or_text: bool = False) -> str:
    """The grammar of a JSON schema (or its text), ASCII, its start symbol `root`. UsageError if the schema is not supported.

    With `or_text` what it allows may also be any other text: one that does not begin as JSON does, nor with CALL_OPENS. Between that
    and CALL_CLOSES the JSON may stand too: many models are trained to call tools so.
    """
    return _grammar(schema_text(schema), or_text)


def longest_chars(schema: Mapping[str, Any] | str) -> int:
    """The length in characters of the longest text that the schema's grammar allows.

    A token is at least one byte and a character at most four, so 4 × this is a bound in tokens; plain text takes far fewer.
    """
    return _longest(parse(json.loads(schema_text(schema))))


@functools.lru_cache(maxsize=64)
def _grammar(text: str, or_text: bool) -> str:  # noqa: FBT001  # private
    tree = parse(json.loads(text))
    if _num_alternatives(tree) > MAX_ALTERNATIVES:
        raise refused(f"more than {MAX_ALTERNATIVES} alternatives can be open at once", "#")
    writer = _Writer()
    root = writer.node(tree)
    if or_text:
        root = f'{root} | "{CALL_OPENS}" "\\n"? {root} "\\n"? "{CALL_CLOSES}" | {writer.rule(_OTHER_TEXT)}?'
    lines = [f"root ::= {root}", *(f"{name} ::= {body}" for body, name in writer.rules.items())]
    return "\n".join(lines) + "\n"


class _Writer:
    """Rules by their bodies: what is the same is written once."""

    def __init__(self) -> None:
        self.rules: dict[str, str] = {}
        self._names: dict[Node, str] = {}
        self._num_bytes = self._num_repeats = 0

    def rule(self, body: str, *, repeats: int = 0) -> str:
        if _is_name(body):
            return body
        if body not in self.rules:
            self.rules[body] = f"r{len(self.rules)}"
            self._num_bytes += len(body) + 12
            self._num_repeats += repeats
            if self._num_bytes > MAX_GRAMMAR_BYTES:
                raise refused(f"its grammar takes more than {MAX_GRAMMAR_BYTES} bytes", "#")
            if self._num_repeats > MAX_REPEATS:
                raise refused(f"its lengths and counts add up to more than {MAX_REPEATS}", "#")
        return self.rules[body]

    def node(self, node: Node) -> str:
        name = self._names.get(node)
        if name is None:
            name = self._names[node] = self._node(node)
        return name

    def _node(self, node: Node) -> str:  # noqa: PLR0911  # one for each kind
        match node:
            case Literals():
                return self.rule(" | ".join(map(_quoted, node.texts)))
            case Text():
                return self._text(node)
            case Integer():
                return self.rule(_signed(node.low, node.high))
            case Number(None, None):
                return self.rule(_NUMBER)
            case Number():
                return self.rule(_decimal(node.low or 0, node.high or 0))
            case Array():
                return self._array(node)
            case Object():
                return self._object(node)
            case Map():
                return self._map(node)
            case Union():
                return self.rule(" | ".join(map(self.node, node.options)))

    def _text(self, node: Text) -> str:
        char = self.rule(_CHAR)
        blocks, rest = divmod(node.shortest, _BLOCK)
        needed = [f"{char}{{{count}}}" for count in [_BLOCK] * blocks + [rest] if count]
        body = " ".join(['"\\""', *needed, *self._up_to(char, node.longest - node.shortest), '"\\""'])
        return self.rule(body, repeats=node.shortest + min(node.longest - node.shortest, _BLOCK))

    def _up_to(self, char: str, count: int) -> list[str]:
        """None to `count` characters. Over a block: a full block and what follows it, or less than a block."""
        if count <= _BLOCK:
            return [f"{char}{{0,{count}}}"] if count else []
        rest = " ".join(self._up_to(char, count - _BLOCK))
        return [self.rule(f"{char}{{{_BLOCK}}} {rest} | {char}{{0,{_BLOCK - 1}}}", repeats=3 * _BLOCK)]

    def _array(self, node: Array) -> str:
        if node.most == 0:
            return self.rule('"[]"')
        items = self._listed(self.node(node.item), node.fewest, node.most)
        return self.rule(f'"[" {items}{"" if node.fewest else "?"} "]"')

    def _map(self, node: Map) -> str:
        pair = self.rule(f'{self._text(Text(1, MAX_NAME_LENGTH))} ":" " "? {self.node(node.value)}')
        return self.rule(f'"{{" {self._listed(pair, 0, node.most)}? "}}"')

    def _listed(self, item: str, fewest: int, most: int) -> str:
        """At least one of these, commas between them."""
        more = self.rule(f'"," " "? {item}')
        return self.rule(f"{item} {more}{{{max(0, fewest - 1)},{most - 1}}}" if most > 1 else item, repeats=most)

    def _object(self, node: Object) -> str:
        """What may follow is built from the last property back; the first one present has no comma before it."""
        rest = ""
        firsts: list[str] = []
        for each in reversed(node.properties):
            pair = self.rule(f'{_quoted(json.dumps(each.name, ensure_ascii=False) + ":")} " "? {self.node(each.value)}')
            first = self.rule(f"{pair} {rest}".strip())
            firsts = [first] if each.is_required else [first, *firsts]
            if each is node.properties[0]:
                break
            more = self.rule(f'"," " "? {pair}')
            rest = self.rule(f"{more}{'' if each.is_required else '?'} {rest}".strip())
        if not firsts:
            return self.rule('"{}"')
        optional = not any(each.is_required for each in node.properties)
        return self.rule(f'"{{" {self.rule(" | ".join(firsts))}{"?" if optional else ""} "}}"')


def _is_name(body: str) -> bool:
    return body[:1] == "r" and body[1:].isdigit()


def _quoted(text: str) -> str:
    """A literal, in ASCII. JSON texts hold no raw control characters, and so no NUL, at which C would stop reading."""
    escapes = {'"': '\\"', "\\": "\\\\"}
    chars = (escapes.get(c) or (c if " " <= c <= "~" else f"\\u{ord(c):04X}" if ord(c) < 0x10000 else f"\\U{ord(c):08X}") for c in text)
    return f'"{"".join(chars)}"'


def _signed(low: int, high: int) -> str:
    parts = []
    if high >= 0:
        parts.append(_natural(max(low, 0), high))
    if low < 0:
        parts.append(f'"-" ({_natural(max(1, -high), -low)})')
    return " | ".join(parts)


def _decimal(low: int, high: int) -> str:
    """Numbers from `low` to `high`, both whole: any fraction after what lies between, and none but zeros after the end."""
    parts = []
    for sign, least, most in (("", max(low, 0), high), ('"-" ', max(0, -high), -low)):
        if most < (1 if sign else 0):
            continue
        if most > least:
            parts.append(f'{sign}({_natural(least, most - 1)}) ("." [0-9]{{1,15}})?')
        if most >= least:
            parts.append(f'{sign}"{most}" ("." "0"{{1,15}})?')
    return " | ".join(parts)


def _natural(low: int, high: int) -> str:
    """Decimal digits, without leading zeros, of the whole numbers 0 ≤ low … high."""
    parts = []
    start = low
    while start <= high:
        length = len(str(start))
        end = min(high, 10**length - 1)
        if start == 10 ** (length - 1) and length > 1:  # whole lengths in one go
            while 10 ** (len(str(end)) + 1) - 1 <= high and end == 10 ** len(str(end)) - 1:
                end = 10 ** (len(str(end)) + 1) - 1
            if end == 10 ** len(str(end)) - 1:
                parts.append(f"[1-9] [0-9]{{{length - 1},{len(str(end)) - 1}}}")
                start = end + 1
                continue
        parts.append(_same_length(str(start), str(end)))
        start = end + 1
    return " | ".join(parts)


def _same_length(low: str, high: str) -> str:
    """Digits from `low` to `high`, both of one length, leading zeros allowed."""
    if not low:
        return ""
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    if first == last:
        return f'"{first}" {_group(_same_length(low[1:], high[1:]))}'.strip()
    parts = []
    if low[1:] != "0" * rest:
        parts.append(f'"{first}" {_group(_same_length(low[1:], "9" * rest))}')
        first += 1
    tail = []
    if high[1:] != "9" * rest:
        tail.append(f'"{last}" {_group(_same_length("0" * rest, high[1:]))}')
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f" [0-9]{{{rest}}}" if rest else ""))
    return " | ".join(parts + tail)


def _group(body: str) -> str:
    return f"({body})" if "|" in body else body


def _longest(node: Node) -> int:  # noqa: PLR0911  # one for each kind
    match node:
        case Literals():
            return max(map(len, node.texts))
        case Text():
            return 2 + 2 * node.longest  # a character may be written as an escape of two
        case Integer():
            return max(len(str(node.low)), len(str(node.high)))
        case Number(None, None):
            return _NUMBER_CHARS
        case Number():
            return max(len(str(node.low)), len(str(node.high)), 2 if (node.low or 0) < 0 else 1) + 16
        case Array():
            return 2 + node.most * _longest(node.item) + 2 * max(0, node.most - 1)
        case Object():
            pairs = [len(json.dumps(each.name, ensure_ascii=False)) + 2 + _longest(each.value) for each in node.properties]
            return 2 + sum(pairs) + 2 * max(0, len(pairs) - 1)
        case Map():
            return 2 + node.most * (2 + 2 * MAX_NAME_LENGTH + 2 + _longest(node.value)) + 2 * max(0, node.most - 1)
        case Union():
            return max(map(_longest, node.options))


def _num_alternatives(node: Node) -> int:
    """A bound on how many ways to go on llama.cpp follows at once."""
    match node:
        case Literals():
            return len(node.texts)
        case Array():
            return 2 + _num_alternatives(node.item)
        case Object():
            return max([1 + len(node.properties), *(_num_alternatives(each.value) for each in node.properties)])
        case Map():
            return 6 + _num_alternatives(node.value)
        case Union():
            return sum(map(_num_alternatives, node.options))
        case _:
            return 6
