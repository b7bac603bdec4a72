"""Replies in a form, a JSON object, read whatever they hold: cut off, hostile, or no form at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from localrag.citation import without_cut_label

_MAX_DEPTH = 8
_PART = re.compile(r'"(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+(?P<end>"?)|[{}\[\],]', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class Form:
    """The values of a form by their names. One that was cut off has those that stood there, and `cut` names the text that broke off."""

    values: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    cut: str = ""

    def text(self, name: str) -> str:
        """A value that is a text, without white space around it; else an empty one."""
        text = _plain(self.values.get(name))
        return without_cut_label(text) if name == self.cut else text

    def texts(self, name: str) -> list[str]:
        """The texts of a list that are not empty."""
        return [text for text in map(_plain, self._list(name)) if text]

    def forms(self, name: str) -> list[Form]:
        """The forms of a list."""
        return [Form(each) for each in self._list(name) if isinstance(each, dict)]

    def _list(self, name: str) -> list[Any]:
        value = self.values.get(name)
        return value if isinstance(value, list) else []


def schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a form: these values, in this order, and no others."""
    return {"type": "object", "properties": dict(properties), "required": list(properties), "additionalProperties": False}


def read(reply: str) -> Form:
    """The form that a reply begins with. What is no form is an empty one."""
    reply = reply.strip()
    if (whole := _loaded(reply)) is not None:
        return Form(whole, is_whole=True)
    for text, is_open in _mended(reply):
        if (values := _loaded(text)) is not None:
            return Form(values, cut=list(values)[-1] if is_open and values else "")
    return Form()


def _loaded(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _mended(text: str) -> Iterator[tuple[str, bool]]:
    """What a cut-off form may have been, the longest first, and whether a text in it was cut.

    A list's last entry goes if it is cut: half a name is another one.
    """
    if not text.startswith("{"):
        return
    closers, end, is_open = "", 0, False
    whole, whole_closers = 1, "}"
    for match in _PART.finditer(text):
        start, end = match.span()
        is_open = text[start] == '"' and not match["end"]
        if closer := _CLOSERS.get(text[start]):
            closers = closer + closers
            whole, whole_closers = end, closers
        elif text[start] in "}]":
            closers = closers[1:]
        elif text[start] == ",":
            whole, whole_closers = start, closers
        if is_open or not closers or len(closers) > _MAX_DEPTH:
            break
    if not is_open:
        yield (text + closers if closers else text[:end]), False
    elif len(closers) == 1:
        yield f'{text[:end]}"{closers}', True
    yield text[:whole] + whole_closers, False


def _plain(value: object) -> str:
    """Without halves of surrogate pairs, which no file and no terminal takes."""
    return value.encode("utf-8", "ignore").decode().strip() if isinstance(value, str) else ""
