"""Real small Office files and books, made part by part with zipfile."""

import io
import zipfile
from xml.sax.saxutils import escape

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
A = "http://schemas.openxmlformats.org/drawingml/2006/main"
P = "http://schemas.openxmlformats.org/presentationml/2006/main"
X = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
R = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
MC = "http://schemas.openxmlformats.org/markup-compatibility/2006"
RELS = "http://schemas.openxmlformats.org/package/2006/relationships"
CORE = "http://schemas.openxmlformats.org/package/2006/relationships/metadata/core-properties"
HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'


def zipped(parts):
    """A container of name → text or bytes. Times are fixed, so that the same parts give the same bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, part in parts.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED
            file.writestr(info, part)
    return out.getvalue()


def rels(*relations):
    """(id, type, target) as a part of relationships."""
    inner = "".join(
        f'<Relationship Id="{id_}" Type="{kind if "/" in kind else f"{R}/{kind}"}" Target="{target}"/>' for id_, kind, target in relations
    )
    return f'{HEAD}<Relationships xmlns="{RELS}">{inner}</Relationships>'


def core(title="", author="", created="", modified="", keywords=""):
    return (
        f'{HEAD}<cp:coreProperties xmlns:cp="http://schemas.openxmlformats.org/package/2006/metadata/core-properties" '
        'xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:dcterms="http://purl.org/dc/terms/">'
        f"<dc:title>{escape(title)}</dc:title><dc:creator>{escape(author)}</dc:creator><cp:keywords>{keywords}</cp:keywords>"
        f"<dcterms:created>{created}</dcterms:created><dcterms:modified>{modified}</dcterms:modified></cp:coreProperties>"
    )


def run(text, properties=""):
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{escape(text)}</w:t></w:r>'


def p(content, style="", properties=""):
    """A paragraph of Word; plain text becomes a run."""
    inner = content if content.startswith("<") else run(content)
    style = f'<w:pStyle w:val="{style}"/>' if style else ""
    return f"<w:p><w:pPr>{style}{properties}</w:pPr>{inner}</w:p>"


def tbl(*rows, header=False):
    """A table of Word; the cells are texts or XML."""
    lines = []
    for index, row in enumerate(rows):
        mark = "<w:trPr><w:tblHeader/></w:trPr>" if header and not index else ""
        cells = "".join(f"<w:tc>{text if text.startswith('<') else p(text)}</w:tc>" for text in row)
        lines.append(f"<w:tr>{mark}{cells}</w:tr>")
    return f"<w:tbl>{''.join(lines)}</w:tbl>"


def style(style_id, name, inner=""):
    return f'<w:style w:type="paragraph" w:styleId="{style_id}"><w:name w:val="{name}"/>{inner}</w:style>'


STYLES = (
    style("Titel", "Title")
    + style("berschrift1", "heading 1", '<w:pPr><w:outlineLvl w:val="0"/></w:pPr>')
    + style("berschrift2", "heading 2", '<w:basedOn w:val="berschrift1"/><w:pPr><w:outlineLvl w:val="1"/></w:pPr>')
    + style("Kapitel", "Mein Kapitel", '<w:basedOn w:val="berschrift2"/>')
    + style("Liste", "List Bullet", '<w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr>')
    + style("Verzeichnis1", "toc 1")
    + style("Geheim", "Geheim", "<w:rPr><w:vanish/></w:rPr>")
    + style("A", "Loop A", '<w:basedOn w:val="B"/>')
    + style("B", "Loop B", '<w:basedOn w:val="A"/>')
)


def docx(body, *, styles=STYLES, footnotes="", properties="", namespace=W):
    parts = {
        "[Content_Types].xml": f'{HEAD}<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>',
        "_rels/.rels": rels(("rId1", "officeDocument", "word/document.xml"), ("rId2", CORE, "docProps/core.xml")),
        "word/_rels/document.xml.rels": rels(("rId1", "styles", "styles.xml"), ("rId2", "footnotes", "/word/footnotes.xml")),
        "word/document.xml": f'{HEAD}<w:document xmlns:w="{namespace}" xmlns:mc="{MC}"><w:body>{body}</w:body></w:document>',
        "word/styles.xml": f'{HEAD}<w:styles xmlns:w="{namespace}">{styles}</w:styles>',
    }
    if footnotes:
        parts["word/footnotes.xml"] = f'{HEAD}<w:footnotes xmlns:w="{namespace}">{footnotes}</w:footnotes>'
    if properties:
        parts["docProps/core.xml"] = properties
    return zipped(parts)


def sp(*lines, kind="body", hidden=False):
    """A shape of a slide."""
    paragraphs = "".join(f"<a:p><a:r><a:t>{escape(line)}</a:t></a:r></a:p>" for line in lines)
    mark = f'<p:nvPr><p:ph type="{kind}"/></p:nvPr>' if kind else "<p:nvPr/>"
    return f'<p:sp><p:nvSpPr><p:cNvPr id="1" name="x" hidden="{int(hidden)}"/>{mark}</p:nvSpPr><p:txBody>{paragraphs}</p:txBody></p:sp>'


def slide_table(*rows):
    inner = "".join(
        f"<a:tr>{''.join(f'<a:tc><a:txBody><a:p><a:r><a:t>{cell}</a:t></a:r></a:p></a:txBody></a:tc>' for cell in row)}</a:tr>"
        for row in rows
    )
    return f'<p:graphicFrame><p:nvGraphicFramePr><p:cNvPr id="2" name="t"/></p:nvGraphicFramePr><a:tbl>{inner}</a:tbl></p:graphicFrame>'


def pptx(*slides, properties="", notes=None, hidden=()):
    """Slides by their shapes. Their parts are numbered backwards, so that only the presentation tells their order."""
    names = [f"slide{len(slides) - index}" for index in range(len(slides))]
    ids = "".join(f'<p:sldId id="{256 + index}" r:id="rId{index}"/>' for index in range(len(slides)))
    parts = {
        "_rels/.rels": rels(("rId1", "officeDocument", "ppt/presentation.xml"), ("rId2", CORE, "docProps/core.xml")),
        "ppt/presentation.xml": f'{HEAD}<p:presentation xmlns:p="{P}" xmlns:r="{R}"><p:sldIdLst>{ids}</p:sldIdLst></p:presentation>',
        "ppt/_rels/presentation.xml.rels": rels(*((f"rId{index}", "slide", f"slides/{name}.xml") for index, name in enumerate(names))),
    }
    for index, (name, shapes) in enumerate(zip(names, slides, strict=True)):
        show = ' show="0"' if index in hidden else ""
        parts[f"ppt/slides/{name}.xml"] = (
            f'{HEAD}<p:sld xmlns:p="{P}" xmlns:a="{A}"{show}><p:cSld><p:spTree>{shapes}</p:spTree></p:cSld></p:sld>'
        )
        if notes and index in notes:
            parts[f"ppt/slides/_rels/{name}.xml.rels"] = rels(("rId1", "notesSlide", f"../notesSlides/{name}.xml"))
            page = f"{sp('1', kind='sldNum')}{sp(*notes[index])}"
            parts[f"ppt/notesSlides/{name}.xml"] = f'{HEAD}<p:notes xmlns:p="{P}" xmlns:a="{A}"><p:cSld>{page}</p:cSld></p:notes>'
    if properties:
        parts["docProps/core.xml"] = properties
    return zipped(parts)


def cell(reference, value, kind="n", style=0):
    if kind == "inlineStr":
        return f'<c r="{reference}" t="inlineStr"><is><r><t>{escape(value)}</t></r><rPh><t>no</t></rPh></is></c>'
    return f'<c r="{reference}" t="{kind}" s="{style}"><f>1+1</f><v>{escape(value)}</v></c>'


def row(number, *cells):
    return f'<row r="{number}">{"".join(cells)}</row>'


def xlsx(sheets, *, strings=(), formats=(), own=(), states=None, date1904=False, properties=""):
    """Sheets by name → rows; `formats` are the numFmtId of each cell style, `own` the (id, code) of formats that are not built in."""
    marks = "".join(
        f'<sheet name="{escape(name)}" sheetId="{index}" r:id="rId{index}" state="{(states or {}).get(name, "visible")}"/>'
        for index, name in enumerate(sheets)
    )
    xfs = "".join(f'<xf numFmtId="{number}"/>' for number in formats)
    codes = "".join(f'<numFmt numFmtId="{number}" formatCode="{escape(code, {chr(34): "&quot;"})}"/>' for number, code in own)
    table = "".join(f"<si><t>{escape(text)}</t></si>" for text in strings)
    parts = {
        "_rels/.rels": rels(("rId1", "officeDocument", "xl/workbook.xml"), ("rId2", CORE, "docProps/core.xml")),
        "xl/workbook.xml": f'{HEAD}<workbook xmlns="{X}" xmlns:r="{R}"><workbookPr date1904="{int(date1904)}"/>'
        f"<sheets>{marks}</sheets></workbook>",
        "xl/_rels/workbook.xml.rels": rels(
            *((f"rId{index}", "worksheet", f"worksheets/sheet{index}.xml") for index in range(len(sheets))),
            ("s", "styles", "styles.xml"),
            ("t", "sharedStrings", "sharedStrings.xml"),
        ),
        "xl/styles.xml": f'{HEAD}<styleSheet xmlns="{X}"><numFmts>{codes}</numFmts><cellXfs>{xfs}</cellXfs></styleSheet>',
        "xl/sharedStrings.xml": f'{HEAD}<sst xmlns="{X}">{table}</sst>',
        **{
            f"xl/worksheets/sheet{index}.xml": f'{HEAD}<worksheet xmlns="{X}"><sheetData>{rows}</sheetData></worksheet>'
            for index, rows in enumerate(sheets.values())
        },
    }
    if properties:
        parts["docProps/core.xml"] = properties
    return zipped(parts)


def page(body, title="page"):
    return f'{HEAD}<html xmlns="http://www.w3.org/1999/xhtml"><head><title>{title}</title></head><body>{body}</body></html>'


def epub(chapters, *, contents=(), ncx=False, title="A Book", encrypted=(), order=None):
    """Chapters by file name → body; `contents` are (file name, title) of the table of contents, in its newer form or as an NCX."""
    items = "".join(f'<item id="{name}" href="text/{name}" media-type="application/xhtml+xml"/>' for name in chapters)
    spine = "".join(f'<itemref idref="{name}"/>' for name in order or chapters)
    if ncx:
        items += '<item id="toc" href="toc.ncx" media-type="application/x-dtbncx+xml"/>'
        points = "".join(
            f'<navPoint><navLabel><text>{label}</text></navLabel><content src="text/{name}#top"/></navPoint>' for name, label in contents
        )
        toc = f'<!DOCTYPE ncx PUBLIC "-//NISO//DTD ncx 2005-1//EN" "x.dtd"><ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><navMap>{points}</navMap></ncx>'
    else:
        items += '<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>'
        spine = '<itemref idref="nav"/>' + spine
        links = "".join(f'<li><a href="text/{name}">{label}</a></li>' for name, label in contents)
        toc = page(f"<nav><h1>Contents</h1><ol>{links}</ol></nav>")
    parts = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>',
        "OPS/book.opf": '<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata>'
        f"<dc:title>{title}</dc:title><dc:creator>Ann</dc:creator><dc:creator>Bob</dc:creator><dc:date>2020-02-01</dc:date></metadata>"
        f'<manifest>{items}</manifest><spine toc="toc">{spine}</spine></package>',
        f"OPS/{'toc.ncx' if ncx else 'nav.xhtml'}": toc,
        **{f"OPS/text/{name}": page(body) for name, body in chapters.items()},
    }
    if encrypted:
        data = "".join(f'<CipherReference xmlns="http://www.w3.org/2001/04/xmlenc#" URI="OPS/text/{name}"/>' for name in encrypted)
        parts["META-INF/encryption.xml"] = f'<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container">{data}</encryption>'
    return zipped(parts)
