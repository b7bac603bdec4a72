"""The styles of a Word document: what its paragraphs take over from them."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from localrag.kb.readers.package import XmlHandler

SKIPPED = frozenset(
    # what was deleted, or moved elsewhere; what others show instead; how something looked before
    """w:del w:moveFrom mc:Fallback w:rPrChange w:pPrChange w:tblPrChange w:trPrChange w:tcPrChange w:sectPrChange w:numberingChange
    w:rt""".split()  # noqa: SIM905  # a word list reads better as words
)
NO_HEADING = 9  # the outline level of body text

_HEADING = re.compile(r"heading ([1-9])")


def is_on(attributes: dict[str, str]) -> bool:
    """The value of a property that is on or off; the mere element says on."""
    return attributes.get("w:val", "true").lower() not in ("0", "false", "off", "none")


def whole(text: str | None, otherwise: int, most: int = 9) -> int:
    """A number from 0 to `most`; `otherwise` where there is none."""
    with suppress(ValueError):
        return min(max(int((text or "")[:9]), 0), most)
    return otherwise


@dataclass(slots=True)
class Style:
    """What one style says; None or empty where it says nothing."""

    name: str = ""
    based_on: str = ""
    level: int | None = None  # of its outline; 0 is that of heading 1
    hidden: bool | None = None
    in_list: bool | None = None


class Styles(XmlHandler):
    """What paragraphs take over from their styles. The names of built-in styles are English in files of any language, their ids are not."""

    skipped = SKIPPED

    def __init__(self) -> None:
        self._styles: dict[str, Style] = {}
        self._resolved: dict[str, Style] = {}
        self._style = Style()

    def start(self, name: str, attributes: dict[str, str]) -> None:
        value = attributes.get("w:val", "")
        if name == "w:style":
            self._style = self._styles[attributes.get("w:styleId", "")] = Style()
        elif name == "w:name":
            self._style.name = value.casefold()
            if found := _HEADING.fullmatch(self._style.name):
                self._style.level = int(found[1]) - 1
        elif name == "w:basedOn":
            self._style.based_on = value
        elif name == "w:outlineLvl":
            self._style.level = whole(value, NO_HEADING)
        elif name == "w:vanish":
            self._style.hidden = is_on(attributes)
        elif name == "w:numId":
            self._style.in_list = value != "0"

    def __getitem__(self, style_id: str) -> Style:
        """A style with what it takes over from those it is based on."""
        if style_id not in self._resolved:
            result, seen, at = Style(), set[str](), style_id
            while at in self._styles and at not in seen and len(seen) < 16:
                seen.add(at)
                style = self._styles[at]
                result.name = result.name or style.name
                result.level = style.level if result.level is None else result.level
                result.hidden = style.hidden if result.hidden is None else result.hidden
                result.in_list = style.in_list if result.in_list is None else result.in_list
                at = style.based_on
            self._resolved[style_id] = result
        return self._resolved[style_id]
