"""Read HTML: the visible text of a page, with its headings. Uses only the standard library's tokenizer, which runs in linear time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import zip_longest
from typing import NamedTuple

from localrag.kb.readers.base import Draft, Reading, decode_as
from localrag.kb.readers.text import decode

MAIN, ARTICLE, FRAME = 1, 2, 4
"""Zones of a page. FRAME is the boilerplate around the content: navigation, page header, footer."""

_BOMS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_CHARSET = re.compile(rb"""<(?:meta|\?xml)\b[^>]{0,200}?(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]{2,40})""", re.IGNORECASE)
_SNIFFED_BYTES = 4096

_UNSEEN = frozenset(
    """script style template noscript noframes noembed iframe object embed applet svg canvas audio video select datalist button textarea
    annotation annotation-xml head""".split()  # noqa: SIM905  # a word list reads better as words
)
_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())  # noqa: SIM905
_BLOCKS = frozenset(
    """address article aside blockquote body center dd details dialog div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6
    header hgroup hr html legend li main menu nav ol p pre section summary table tbody td tfoot th thead title tr ul caption""".split()  # noqa: SIM905
)
_FRAMES = frozenset({"nav", "aside"})
_FRAME_ROLES = frozenset({"navigation", "banner", "contentinfo", "complementary", "search", "menu", "menubar", "toolbar"})
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_CLOSED_BY = {  # start tag → elements whose end tag it implies
    "li": {"li"}, "dt": {"dt", "dd"}, "dd": {"dt", "dd"}, "tr": {"tr", "td", "th"}, "td": {"td", "th"}, "th": {"td", "th"},
    "option": {"option"}, "tbody": {"td", "th", "tr", "thead", "tbody"}, "tfoot": {"td", "th", "tr", "thead", "tbody"},
    **{f"h{level}": {f"h{level}" for level in range(1, 7)} for level in range(1, 7)},
}  # fmt: skip
_MAIN_SHARE, _ARTICLE_SHARE = 0.2, 0.5  # least share of the text outside frames for an element to count as the page's content
_MAX_LIST_DEPTH = 8
_BREAK = "\0"

# These match a tag piece by piece with possessive quantifiers, so they keep no backtracking state. The standard library's pattern for a
# whole tag keeps some for each attribute, space and slash: 250 bytes for two characters.
_TAG_NAME = re.compile(r"<[a-zA-Z][^\t\n\r\f />]*+[\s/]*+")
_ATTRIBUTE = re.compile(r"""([^\s/>][^\s/=>]*+(?:\s*+=[\s=]*+(?:"[^"]*+"|'[^']*+'|(?!["'])[^>\s]*+))?+)[\s/]*+""")
_LONG_TAG_CHARS = 10_000
_MAX_ATTRIBUTES = 200  # attributes of a long tag to keep


_MAX_NESTED = 8
"""Nesting limit of tables; deeper tables become plain text of the enclosing cell."""

_MAX_COLUMNS = 1000
_MAX_SPAN = 100
_MAX_HEADER_CHARS = 100
_MAX_REPEATED_CHARS = 200  # longest cell that is repeated in each row it spans
_MAX_GROWTH = 20  # a table that headers would make this many times longer than its cells is written without them
_LONG_CELL_CHARS = 500  # a table without headers but with such a cell is page layout

# Detecting hidden content without laying out the page.
_MAX_CSS_CHARS = 2_000_000
_STYLE = re.compile("<style\\b", re.IGNORECASE)
_SIMPLE = re.compile(r"[a-z][a-z0-9]*|[a-z]*[.#][\w-]+", re.IGNORECASE)
_ZERO_SIZE = re.compile(r"[0.]+[a-z%]*")
_ZERO = re.compile(r"[0.]+%?")


def read(data: bytes) -> Reading:
    """Read a page. The encoding comes from the byte order mark, the meta element, or `text.decode`, in that order."""
    return extract(_decoded(data))


def extract(html: str) -> Reading:
    """Extract the visible text of a page: paragraphs, lists, `pre` verbatim, table rows as "Header: value; …".

    Scripts, comments, embedded objects and hidden elements are left out. So are `nav`, `aside`, the page's header and footer, and
    everything outside a `main` or `article` that holds the content, unless nothing else remains. The text is empty if the page shows none.
    `title`, `fields` (author, description, date) and `tags` (keywords) come from the page's head. Raises UnreadableError if the text is
    too large.
    """
    page = _Page(html)
    blocks = _content(page.blocks)
    draft = Draft()
    for block, following in zip_longest(blocks, blocks[1:]):
        if block.level:
            draft.heading(block.level, block.text.replace("\n", " "))
        else:
            draft.write(block.text + ("\n" if block.tight and following and following.tight else "\n\n"))
    first = next((block.text for block in blocks if block.level == 1), "")
    title = page.title or page.fields.get("og:title", "") or first
    fields = [(key, page.fields[key]) for key in ("author", "description", "date") if key in page.fields]
    tags = page.fields.get("keywords", "").split(",")
    return draft.reading(title=title, prefix="" if first else None, tags=tags, fields=fields)


def _decoded(data: bytes) -> str:
    if not data.startswith(_BOMS) and (match := _CHARSET.search(data[:_SNIFFED_BYTES])):
        encoding = match[1].decode("ascii")
        # A page whose meta element is readable as ASCII is not in UTF-16, whatever it declares.
        if not encoding.lower().startswith(("utf-16", "utf-32")) and (text := decode_as(data, encoding)) is not None:
            return text
    return decode(data, known=True)


def _content(blocks: list[_Block]) -> list[_Block]:
    """Select the blocks of the page's content: outside frames, and within `main` or `article` if one holds enough of the text."""
    own = [block for block in blocks if not block.zone & FRAME]
    total = sum(len(block.text) for block in own)
    if not total:
        return blocks
    for zone, share in ((MAIN, _MAIN_SHARE), (ARTICLE, _ARTICLE_SHARE)):
        inner = [block for block in own if block.zone & zone]
        if sum(len(block.text) for block in inner) > share * total:
            return inner
    return own


class _Block(NamedTuple):
    """A paragraph, heading (`level` from 1), list item or table row. Consecutive `tight` blocks have no empty line between them."""

    text: str
    zone: int = 0
    level: int = 0
    tight: bool = False


@dataclass(slots=True)
class _Cell:
    """A table cell: blocks `start` to `end` (exclusive) of the page."""

    start: int
    is_header: bool
    colspan: int
    rowspan: int
    end: int = -1


class _Text(NamedTuple):
    text: str
    is_header: bool = False
    colspan: int = 1
    rowspan: int = 1


@dataclass(slots=True)
class _Table:
    """A table whose first block is number `start` of the page. A `layout` table arranges the page, so its cells are not values."""

    start: int
    layout: bool = False
    rows: list[list[_Cell]] = field(default_factory=list)

    def begin_row(self) -> None:
        self.rows.append([])

    def begin_cell(self, at: int, attributes: Mapping[str, str], *, is_header: bool) -> None:
        self.end_cell(at)
        if not self.rows:
            self.begin_row()
        spans = (_span(attributes.get(name, "")) for name in ("colspan", "rowspan"))
        self.rows[-1].append(_Cell(at, is_header, *spans))

    def end_cell(self, at: int) -> None:
        if self.rows and self.rows[-1] and self.rows[-1][-1].end < 0:
            self.rows[-1][-1].end = at

    def laid_out(self, blocks: list[_Block]) -> list[_Block]:
        """Return the table as blocks: first those outside its cells, then one line per row. `blocks` are those from `start` on."""
        cells = [cell for row in self.rows for cell in row]
        if self.layout or not cells or not blocks:
            return blocks
        outside: list[_Block] = []
        at = self.start
        for cell in cells:
            cell.end = max(cell.end, cell.start)
            outside += blocks[at - self.start : cell.start - self.start]
            at = cell.end
        outside += blocks[at - self.start :]
        texts = [[self._text(cell, blocks) for cell in row] for row in self.rows]
        if max(map(len, texts)) < 2 or (
            not any(cell.is_header for cell in cells) and any(len(cell.text) > _LONG_CELL_CHARS for row in texts for cell in row)
        ):
            return blocks
        room = _MAX_GROWTH * sum(len(block.text) for block in blocks) + 10_000
        lines: list[_Block] = []
        for line in _lines(texts):
            room -= len(line)
            if room < 0:
                return blocks
            lines.append(_Block(line, blocks[0].zone, tight=True))
        return outside + lines

    def _text(self, cell: _Cell, blocks: list[_Block]) -> _Text:
        inside = blocks[cell.start - self.start : cell.end - self.start]
        return _Text(" ".join(" ".join(block.text.split()) for block in inside), cell.is_header, cell.colspan, cell.rowspan)


def _span(value: str) -> int:
    return min(int(value), _MAX_SPAN) if value.isdecimal() and 0 < len(value) < 5 and int(value) else 1


def _lines(rows: list[list[_Text]]) -> Iterator[str]:
    """Yield the rows as lines. Leading rows of header cells form the header; a header row with a single text is a line of its own."""
    header: list[str] = []
    num_rows = 0
    for row in _grid(rows):
        if not num_rows and row and all(cell.is_header for cell in row):
            texts = [cell.text[:_MAX_HEADER_CHARS] for cell in row]
            if len(set(texts)) == 1:
                yield row[0].text
            else:
                above = header + [""] * (len(texts) - len(header))
                header = [name if name == text else f"{name} {text}".strip() for name, text in zip(above, texts, strict=False)]
        elif line := _line(row, header):
            num_rows += 1
            yield line
    if header and not num_rows:
        yield "; ".join(name for name in header if name)


def _grid(rows: list[list[_Text]]) -> Iterator[list[_Text]]:
    """Yield each row as one cell per column. A cell that spans rows is repeated in each row, a header that spans columns in each column."""
    carried: dict[int, _Text] = {}
    for row in rows:
        columns: list[_Text] = []
        for cell in [*row, None]:
            while (above := carried.pop(len(columns), None)) is not None:
                if above.rowspan > 1:
                    carried[len(columns)] = above._replace(rowspan=above.rowspan - 1)
                columns.append(above)
            if cell is None:
                break
            for nth in range(min(cell.colspan, _MAX_COLUMNS - len(columns))):
                column = cell if nth == 0 or cell.is_header else _Text("")
                if cell.rowspan > 1 and len(cell.text) <= _MAX_REPEATED_CHARS:
                    carried[len(columns)] = column._replace(rowspan=cell.rowspan - 1)
                columns.append(column)
        yield columns


def _line(row: list[_Text], header: list[str]) -> str:
    parts = []
    for column, cell in enumerate(row):
        name = header[column] if column < len(header) else ""
        if cell.text:
            parts.append(f"{name}: {cell.text}" if name and name != cell.text else cell.text)
    if not header and len(parts) > 1 and row[0].is_header and row[0].text:
        return f"{parts[0]}: {'; '.join(parts[1:])}"
    return "; ".join(parts)


class _Open(NamedTuple):
    """An open element and the state that its contents inherit."""

    tag: str
    unseen: bool
    zone: int
    pre: bool


@dataclass(slots=True)
class _List:
    ordered: bool
    number: int = 0


class _Page(HTMLParser):
    """Parses a page in one pass. Each step takes constant time on average, however deeply the page is nested."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[_Block] = []
        self.title = ""
        self.fields: dict[str, str] = {}
        self._stack = [_Open("", False, 0, False)]
        self._num_open: Counter[str] = Counter()
        self._rules = style_rules(html)
        self._words: list[str] = []
        self._level = 0
        self._marker = ""
        self._lists: list[_List] = []
        self._tables: list[_Table] = []
        # An empty comment at the end closes anything left open, so that the tokenizer does not search for the end twice.
        self.feed(html.replace("\0", "") + "<!---->")
        self.close()
        self._flush()
        while len(self._stack) > 1:
            self._pop()

    def parse_html_declaration(self, i: int) -> int:
        """Treat `<![if …]>` as a comment, as browsers do. The base class gives up on it."""
        if self.rawdata.startswith("<![", i):
            end = self.rawdata.find(">", i)
            return end + 1 if end >= 0 else -1
        return super().parse_html_declaration(i)

    def parse_starttag(self, i: int) -> int:
        """Pass only the first attributes of a long tag to the base class, which takes a gigabyte for 4 MB of attributes."""
        html = self.rawdata
        tag = _TAG_NAME.match(html, i)
        at = tag.end() if tag else i
        attributes: list[str] = []
        while attribute := _ATTRIBUTE.match(html, at):
            if len(attributes) < _MAX_ATTRIBUTES:
                attributes.append(attribute[1])
            at = attribute.end()
        if not tag or not html.startswith(">", at):
            return -1  # the page ends inside the tag
        is_long = at - i > _LONG_TAG_CHARS
        closing = "/>" if html[at - 1] == "/" else ">"
        self.rawdata = " ".join([tag[0].rstrip(" \t\n\r\f/"), *attributes, closing]) if is_long else html[i : at + 1]
        try:
            end = super().parse_starttag(0)
        finally:
            self.rawdata = html
        return end if end < 0 else at + 1 if is_long else i + end

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            self._void(tag, attrs)
            return
        self._close_implied(tag)
        above = self._stack[-1]
        attributes = {name: value or "" for name, value in attrs}
        if tag in _BLOCKS:
            self._flush()
        unseen = above.unseen or tag in _UNSEEN or (tag not in ("html", "body") and _is_hidden(tag, attributes, self._rules))
        self._stack.append(_Open(tag, unseen, above.zone | self._zone(tag, attributes, above.zone), above.pre or tag == "pre"))
        self._num_open[tag] += 1
        if not unseen:
            self._begin(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        if tag == "p" and not self._num_open["p"]:
            self._flush()
        if not self._num_open[tag]:
            return
        if tag in _BLOCKS:
            self._flush()
        while self._pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        top = self._stack[-1]
        if top.tag == "title" and not self.title and not any(self._num_open[tag] for tag in ("svg", "body")):
            self.title = data
        elif not top.unseen and top.tag != "title":
            self._words.append(data)

    def _void(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "br":
            self._words.append("\n" if self._stack[-1].pre else _BREAK)
        elif tag == "hr":
            self._flush()
        elif tag == "meta":
            attributes = {name: value or "" for name, value in attrs}
            name = (attributes.get("name") or attributes.get("property") or "").lower()
            name = "date" if name in ("article:published_time", "dcterms.date", "dc.date", "dcterms.created") else name
            name = "author" if name in ("article:author", "dc.creator", "dcterms.creator") else name
            if name in ("author", "description", "keywords", "date", "og:title"):
                self.fields.setdefault(name, attributes.get("content", ""))

    def _zone(self, tag: str, attributes: dict[str, str], above: int) -> int:
        role = attributes.get("role", "").lower()
        if tag == "main" or role == "main":
            return MAIN
        if tag == "article":
            return ARTICLE
        own_header = tag in ("header", "footer") and not above & (MAIN | ARTICLE)  # an article's header holds its heading
        return FRAME if tag in _FRAMES or own_header or role in _FRAME_ROLES else 0

    def _close_implied(self, tag: str) -> None:
        if self._num_open["p"] and self._stack[-1].tag == "p" and tag in _BLOCKS:
            self.handle_endtag("p")
        if self._stack[-1].tag == "head" and tag not in ("title", "style", "script", "noscript", "template", "object"):
            self._pop()
        while tag in _CLOSED_BY and self._stack[-1].tag in _CLOSED_BY[tag]:
            self._flush()
            self._pop()

    def _begin(self, tag: str, attributes: dict[str, str]) -> None:
        if tag in _HEADINGS:
            self._level = _HEADINGS[tag]
            for table in self._tables:
                table.layout = True
        elif tag in ("ul", "ol", "menu"):
            start = attributes.get("start", "")
            self._lists.append(_List(tag == "ol", int(start) - 1 if re.fullmatch(r"\d{1,6}", start) else 0))
        elif tag == "li":
            self._marker = self._list_marker()
        elif tag == "table" and len(self._tables) < _MAX_NESTED:
            for table in self._tables:
                table.layout = True
            self._tables.append(_Table(len(self.blocks), attributes.get("role") in ("presentation", "none")))
        elif self._tables and self._num_open["table"] <= _MAX_NESTED:
            table = self._tables[-1]
            if tag == "tr":
                table.begin_row()
            elif tag in ("td", "th"):
                table.begin_cell(len(self.blocks), attributes, is_header=tag == "th" or bool(self._num_open["thead"]))

    def _pop(self) -> str:
        """Close the innermost element. If it is a block, its text must have been flushed."""
        tag, unseen, _, pre = self._stack.pop()
        self._num_open[tag] -= 1
        if pre and not self._stack[-1].pre:
            self._flush(pre=True)
        if unseen:
            return tag
        if tag in _BLOCKS:
            self._flush()
        if tag in ("ul", "ol", "menu") and self._lists:
            self._lists.pop()
        elif tag in ("td", "th") and self._tables:
            self._tables[-1].end_cell(len(self.blocks))
        elif tag == "table" and self._num_open["table"] < len(self._tables):
            self._end_table()
        elif tag in _HEADINGS:
            self._level = 0
        elif tag == "li":
            self._marker = ""
        return tag

    def _end_table(self) -> None:
        table = self._tables.pop()
        table.end_cell(len(self.blocks))
        if not table.layout:
            self.blocks[table.start :] = table.laid_out(self.blocks[table.start :])

    def _list_marker(self) -> str:
        if not self._lists:
            return "- "
        innermost = self._lists[-1]
        innermost.number += 1
        return f"{innermost.number}. " if innermost.ordered else "- "

    def _flush(self, *, pre: bool = False) -> None:
        """End the current block."""
        if not self._words:
            return
        top = self._stack[-1]
        if top.pre and not pre:  # a block inside `pre` is a line
            if not self._words[-1].endswith("\n"):
                self._words.append("\n")
            return
        text = "".join(self._words)
        self._words.clear()
        if pre:
            text = "\n".join(line.rstrip() for line in text.replace(_BREAK, "\n").split("\n")).strip("\n")
        else:
            text = "\n".join(" ".join(line.split()) for line in text.split(_BREAK)).strip("\n")
        if not text:
            return
        if self._level:
            text = text.rstrip(" ¶")  # the permalink mark of a heading
        elif self._lists and not pre:
            indent = "  " * min(len(self._lists) - 1, _MAX_LIST_DEPTH)
            text = indent + (self._marker or "  ") + text
            self._marker = ""
        self.blocks.append(_Block(text, top.zone, self._level, tight=bool(self._lists)))


def _is_hidden(tag: str, attributes: Mapping[str, str], rules: Collection[str]) -> bool:
    """Whether an element is hidden by its attributes or by one of the selectors from `style_rules`."""
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
    style = _declarations(declarations)
    return (
        style.get("display") == "none"
        or style.get("visibility") in ("hidden", "collapse")
        or bool(_ZERO_SIZE.fullmatch(style.get("font-size", "")))
        or bool(_ZERO.fullmatch(style.get("opacity", "")))
    )


def style_rules(html: str) -> frozenset[str]:
    """Return the simple selectors (`tag`, `.class`, `#id`, `tag.class`) that a page's style elements hide on every screen.

    Rules inside `@media` and selectors with combinators are skipped, since an element they match may still be visible.
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
    while at < len(html) and (tag := _STYLE.search(html, at)):
        start = html.find(">", tag.end())
        end = html.find("</", start)
        if start < 0 or end < 0:
            return
        media = html[tag.end() : start].lower()
        if "media" not in media or "screen" in media or "all" in media:
            yield html[start + 1 : min(end, start + _MAX_CSS_CHARS)]
        at = end


def _declarations(css: str) -> dict[str, str]:
    declarations: dict[str, str] = {}
    for part in _without_comments(css).split(";"):
        name, _, value = part.partition(":")
        declarations[name.strip().lower()] = value.partition("!")[0].strip().lower()
    return declarations


def _without_comments(css: str) -> str:
    first, *others = css.split("/*")
    return first + "".join(part.partition("*/")[2] for part in others)
