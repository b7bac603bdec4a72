"""Text of others as Markdown: it cannot make a link, an image, HTML or a heading, nor swallow what stands below it."""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"[\\`*|~&]|(?<![^\W_])_|_(?![^\W_])")
_HTML = re.compile(r"<(?=[A-Za-z/!?])")
_LINK = re.compile(r"(?<=\])(?=[(:\[])|(?<=\[)(?=\[)|(?<=:)(?=//)|(?<=\bwww)(?=\.)", re.IGNORECASE)
_FENCE = re.compile(r"`{3,}|~{3,}")
_PREFIX = r"^((?:[ \t]|>|[*+-](?=[ \t])|\d{1,9}[.)](?=[ \t]))*)"
_HEADING = re.compile(rf"{_PREFIX}(?=#{{1,6}}(?:[ \t]|$)|(?:=+|-+)[ \t]*$)", re.MULTILINE)


def prose(text: str) -> str:
    """A text of several paragraphs: its lists, code and emphasis stay."""
    text = _LINK.sub(lambda _: "\\", _HTML.sub("&lt;", text))
    text = _FENCE.sub(lambda match: "".join(f"\\{char}" for char in match[0]), text)
    return _HEADING.sub(r"\1\\", text)


def inline(text: str) -> str:
    """A line that stands inside another: nothing of it is markup."""
    return _LINK.sub(lambda _: "\\", _HTML.sub("&lt;", _SPECIAL.sub(r"\\\g<0>", text)))
