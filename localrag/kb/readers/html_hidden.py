"""What of a web page nobody sees, as far as it can be told without laying the page out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

_MAX_CSS_CHARS = 2_000_000
_STYLE = re.compile("<style\\b", re.IGNORECASE)
_SIMPLE = re.compile(r"[a-z][a-z0-9]*|[a-z]*[.#][\w-]+", re.IGNORECASE)
_ZERO_SIZE = re.compile(r"[0.]+[a-z%]*")
_ZERO = re.compile(r"[0.]+%?")


def is_hidden(tag: str, attributes: Mapping[str, str], rules: Collection[str]) -> bool:
    """Whether an element is hidden by its attributes, or by one of `rules`, the selectors that `style_rules` found."""
    if tag == "dialog" and "open" not in attributes:
        return True
    if attributes.get("hidden", "until-found").lower() != "until-found" or attributes.get("aria-hidden", "").lower() == "true":
        return True
    if "style" in attributes and hides(attributes["style"]):
        return True
    if not rules:
        return False
    names = [f".{name}" for name in attributes.get("class", "").split()] + ([f"#{attributes['id']}"] if "id" in attributes else [])
    return tag in rules or any(name in rules or tag + name in rules for name in names)


def hides(declarations: str) -> bool:
    """Whether CSS declarations, as in a style attribute, make an element invisible."""
    found = _declarations(declarations)
    return (
        found.get("display") == "none"
        or found.get("visibility") in ("hidden", "collapse")
        or bool(_ZERO_SIZE.fullmatch(found.get("font-size", "")))
        or bool(_ZERO.fullmatch(found.get("opacity", "")))
    )


def style_rules(html: str) -> frozenset[str]:
    """The plain selectors (`tag`, `.class`, `#id`, `tag.class`) that the style elements of a page hide, whatever the screen.

    Rules inside `@media` and selectors that look at an element's surroundings are passed over: what they hide may be seen.
    """
    hidden: set[str] = set()
    for css in _style_sheets(html):
        depth, selectors = 0, ""
        for piece in re.split(r"([{}])", _without_comments(css)):
            if piece == "{":
                depth += 1
            elif piece == "}":
                depth = max(0, depth - 1)
            elif depth == 0:
                selectors = piece.rpartition(";")[2].strip()
            elif depth == 1 and not selectors.startswith("@"):
                plain = {selector for part in selectors.split(",") if _SIMPLE.fullmatch(selector := part.strip())}
                if hides(piece):
                    hidden |= plain
                elif "display" in _declarations(piece):  # a later rule shows it again
                    hidden -= plain
    return frozenset(hidden - {"html", "body"})


def _style_sheets(html: str) -> Iterator[str]:
    at = 0
    while at < len(html) and (opened := _STYLE.search(html, at)):
        start = html.find(">", opened.end())
        end = html.find("</", start)
        if start < 0 or end < 0:
            return
        media = html[opened.end() : start].lower()
        if "media" not in media or "screen" in media or "all" in media:
            yield html[start + 1 : min(end, start + _MAX_CSS_CHARS)]
        at = end


def _declarations(css: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in _without_comments(css).split(";"):
        name, _, value = part.partition(":")
        found[name.strip().lower()] = value.partition("!")[0].strip().lower()
    return found


def _without_comments(css: str) -> str:
    first, *others = css.split("/*")
    return first + "".join(part.partition("*/")[2] for part in others)
