"""A folder of files that break readers: bombs, broken documents, wrong encodings, binary data, loops. Seeded, about 200 of them."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import socket
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

_LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
_XML_BOMB = f'<?xml version="1.0"?><!DOCTYPE r [<!ENTITY l0 "ha">{_LAUGHS}]><r>&l9;</r>'.encode()
_XML_OUTSIDE = b'<?xml version="1.0"?><!DOCTYPE r [<!ENTITY x SYSTEM "file:///etc/passwd">]><r>&x;</r>'
_XML_DEEP = b"<a>" * 5000 + b"</a>" * 5000
_MEMBERS = {
    "docx": ("word/document.xml", "[Content_Types].xml"),
    "pptx": ("ppt/presentation.xml", "ppt/slides/slide1.xml"),
    "xlsx": ("xl/workbook.xml", "xl/worksheets/sheet1.xml"),
    "epub": ("META-INF/container.xml", "mimetype"),
    "odt": ("content.xml", "styles.xml"),
}


def write_hostile(folder: Path, *, seed: int = 0) -> list[Path]:
    """Fills `folder`; gives every path that was made below it, links, pipes and sockets among them."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    made = [path for name, data in _contents(rng) for path in [folder / name] if path.write_bytes(data) >= 0]
    return made + list(_things(folder))


def _contents(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    many = _zip({f"word/{n}.xml": b"" for n in range(12_000)})
    for kind, members in _MEMBERS.items():
        yield from ((f"{name}.{kind}", data) for name, data in _packages(rng, members))
        yield f"many.{kind}", many
    yield from ((f"{name}.pdf", data) for name, data in _pdfs(rng))
    yield from _texts(rng)
    yield from _structured()
    suffixes = (
        "txt",
        "md",
        "pdf",
        "docx",
        "xlsx",
        "html",
        "csv",
        "json",
        "eml",
        "py",
        "epub",
        "pptx",
        "ipynb",
        "rst",
        "dat",
        "mbox",
        "rtf",
        "fb2",
    )
    for number in range(64):
        yield f"noise-{number}.{suffixes[number % len(suffixes)]}", rng.randbytes(rng.randint(1, 4000))


def _packages(rng: random.Random, members: tuple[str, str]) -> Iterator[tuple[str, bytes]]:
    for name, text in (("laughs", _XML_BOMB), ("outside", _XML_OUTSIDE), ("deep", _XML_DEEP), ("empty", b""), ("text", b"no markup")):
        yield name, _zip(dict.fromkeys(members, text))
    whole = _zip(dict.fromkeys(members, b"<r>" + b"text " * 200 + b"</r>"))
    yield "zeros", _zip({members[0]: b"<r>" + bytes(40 << 20) + b"</r>"})
    yield "truncated", whole[: len(whole) // 2]
    yield "no-members", _zip({"readme": b"nothing"})
    yield "climbs", _zip({f"../../{members[0]}": b"<r>out</r>", "/etc/passwd": b"x"})
    yield "ole", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + rng.randbytes(2000)
    for number in range(3):
        broken = bytearray(whole)
        for _ in range(5):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        yield f"flipped-{number}", bytes(broken)


def _pdfs(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    once = zlib.compress(bytes(64 << 20), 9)
    flate, twice = b"/Filter /FlateDecode", b"/Filter [/FlateDecode /FlateDecode]"
    yield "bomb", _pdf(b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(once), flate, once))
    again = zlib.compress(once, 9)
    yield "double-bomb", _pdf(b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(again), twice, again))
    pages = b"2 0 obj<</Type/Pages/Kids[2 0 R]/Count 1000000000>>endobj"
    yield "loop", b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n" + pages + b"\ntrailer<</Root 1 0 R>>"
    yield "no-pages", b"%PDF-1.7\ntrailer<<>>\n%%EOF"
    yield "deep-array", _pdf(b"[" * 20_000 + b"]" * 20_000)
    whole = _pdf(b"<< /Length 44 >>\nstream\nBT /F1 12 Tf 72 700 Td (Whole text here) Tj ET\nendstream")
    yield "cut", whole[: len(whole) * 2 // 3]
    for number in range(8):
        broken = bytearray(whole)
        for _ in range(8):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        yield f"broken-{number}", bytes(broken)


def _texts(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    yield "half-utf16.txt", b"\xff\xfe" + "text".encode("utf-16-le") + b"\x00\xd8"
    yield "utf32.txt", b"\xff\xfe\x00\x00" + b"\xff" * 8
    yield "utf8-cut.md", "Ünïcode, cut within a charäctér é".encode()[:-1]
    yield "latin.txt", "Größe und Maße der Öfen, früher wie später".encode("latin-1")
    yield "nul.txt", b"a\0b" * 100
    yield "controls.txt", bytes(range(1, 32)) * 50
    yield "surrogates.json", b'{"text": "\\ud800 alone \\udfff"}'
    yield "long-line.txt", b"word " * 200_000
    yield "no-spaces.md", b"a" * 300_000
    yield "base64.txt", (b"QUJDRA" * 10 + b"\n") * 3000
    yield "chinese.txt", ("汉字没有空格" * 8000).encode()
    yield "emoji.md", "👩‍👩‍👧‍👦🏳️‍🌈".encode() * 3000
    yield "headings.md", b"".join(b"#" * (n % 6 + 1) + b" h\n" for n in range(20_000))
    yield "quotes.md", b"> " * 20_000 + b"x"
    yield "links.md", b"[" * 50_000
    yield "fence.md", b"```" * 30_000
    yield "front.md", b"---\n" + b"a: &x [*x]\n" * 5000 + b"---\ntext"
    yield "empty.txt", b""
    yield "blank.md", b" \n\t\n" * 1000
    yield "brackets.py", b"(" * 100_000
    yield "indent.py", b"".join(b" " * n + b"if x:\n" for n in range(1500))
    yield "one-line.js", b"function f(){" * 20_000
    yield "archive.txt", gzip.compress(rng.randbytes(1000))
    yield "program.txt", b"\x7fELF" + rng.randbytes(500)
    yield "underlines.rst", b"a\n=\n" * 30_000
    yield "directives.rst", b".. include:: /etc/passwd\n.. raw:: html\n\n   <script>x</script>\n" * 500


def _structured() -> Iterator[tuple[str, bytes]]:
    yield "nested.html", b"<div>" * 50_000 + b"text"
    yield "attributes.html", b"<p " + b" ".join(b"a%d=1" % n for n in range(50_000)) + b">text"
    yield "comment.html", b"<!-- " * 30_000
    yield "hidden.html", b"<body style='display:none'><script>alert(1)</script></body>"
    yield "tags.html", b"<" * 100_000
    yield "deep.json", b"[" * 100_000 + b"]" * 100_000
    yield "numbers.json", b"[" + b"9" * 100_000 + b"]"
    yield "broken.json", b'{"a": '
    yield "lines.jsonl", b'{"a": 1}\n{broken\n' * 500
    yield "nan.json", b"[NaN, Infinity, -0]"
    yield "cells.ipynb", json.dumps({"cells": [{"cell_type": "code", "source": 5}, 7, None], "nbformat": 4}).encode()
    yield "no-cells.ipynb", b'{"nbformat": "x"}'
    yield "open-quote.csv", b'a,b\n"' + b"1,2\n" * 20_000
    yield "wide.csv", b",".join(b"h" for _ in range(20_000)) + b"\n" + b",".join(b"1" for _ in range(20_000))
    yield "field.csv", b"a,b\n" + b"x" * 2_000_000 + b",1"
    yield "headers.eml", b"".join(b"X-%d: %s\n" % (n, b"=?utf-8?b?" * 50) for n in range(500)) + b"\nbody"
    nested = b"".join(b'Content-Type: multipart/mixed; boundary="b%d"\n\n--b%d\n' % (n, n) for n in range(300))
    yield "nested.eml", b"Subject: deep\nMIME-Version: 1.0\n" + nested + b"\nend"
    yield "charset.eml", b"Subject: x\nContent-Type: text/plain; charset=no-such\n\n\xff\xfe body"
    yield "many.mbox", b"From a@b Thu Jan  1 00:00:00 1970\nSubject: s\n\nbody\n\n" * 3000
    yield "broken.epub", b"PK\x03\x04" + bytes(100)
    yield "open.rtf", b"{\\rtf1 " + b"{" * 500_000
    yield "binary.rtf", b"{\\rtf1 \\bin4000000000 x}"
    yield "laughs.fb2", _XML_BOMB
    yield "outside.fb2", _XML_OUTSIDE


def _things(folder: Path) -> Iterator[Path]:
    """What is no plain file, and names and rules that are traps."""
    link: Callable[[str, str], Path] = lambda name, to: _linked(folder / name, to)  # noqa: E731  # four of a kind
    yield link("to-itself", "to-itself")
    yield link("to-above", "..")
    yield link("to-nothing", "gone")
    yield link("to-password", "/etc/passwd")
    os.mkfifo(folder / "pipe.txt")
    yield folder / "pipe.txt"
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(folder)  # a socket's path has 108 characters at most
        try:
            server.bind("socket.txt")
        finally:
            os.chdir(here)
    yield folder / "socket.txt"
    large = folder / "large.txt"
    with large.open("wb") as file:
        file.truncate(3 << 30)
    yield large
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt"))
    odd.write_bytes(b"text")
    yield odd
    (folder / "line\nbreak.txt").write_bytes(b"A file whose name has two lines.")
    yield folder / "line\nbreak.txt"
    deep = folder
    for _ in range(70):
        deep /= "d"
    deep.mkdir(parents=True)
    (deep / "far.txt").write_bytes(b"far down")
    yield deep / "far.txt"
    rules = folder / "rules"
    rules.mkdir()
    (rules / ".gitignore").write_bytes(b"*a" * 20 + b"b\n[\n!\n" + b"x" * 1000 + b"\n")
    (rules / ("a" * 60 + ".txt")).write_bytes(b"A name that a bad pattern takes minutes to compare with.")
    yield rules / ("a" * 60 + ".txt")


def _linked(path: Path, to: str) -> Path:
    path.symlink_to(to)
    return path


def _zip(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def _pdf(content: bytes) -> bytes:
    """One page with these contents."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 5 0 R >> >> /Contents 4 0 R >>",
        content,
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return out + b"xref\n0 6\n0000000000 65535 f \n" + table + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(out)
