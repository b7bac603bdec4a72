"""What the structure of a file is read to be: known samples by hand, and hostile ones by what always holds."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.outline import LANGUAGES, imports, language_of, outline

ROOT = Path(__file__).parents[2]
CODE = [language for language in LANGUAGES if language != "markdown"]


def shown(text, language):
    """(kind, text on one line) of each piece."""
    return [(piece.kind, " ".join(piece.text.split())) for piece in outline(text, language)]


def check(text, pieces):
    """What holds for every outline: in order, no overlap, and each piece is the text that it points to."""
    end = 0
    for piece in pieces:
        assert end <= piece.start < piece.end <= len(text), piece
        assert piece.text.strip()
        assert piece.kind == "omitted" or piece.text == text[piece.start : piece.end]
        end = piece.end
    assert all(piece.kind != "omitted" for piece in pieces[:-1])


def test_a_language_is_known_by_the_ending():
    names = "a.py A.PYI x/y.js a.mjs a.ts a.d.ts a.tsx a.go a.rs A.java a.c a.h a.hpp a.cc README.md Makefile .py a.txt a"
    known = [language_of(name) for name in names.split()]
    assert known == (
        ["python"] * 2 + ["javascript"] * 2 + ["typescript"] * 2 + ["tsx", "go", "rust", "java", "c", "c", "cpp", "cpp", "markdown"]
        + [None] * 4
    )  # fmt: skip
    assert language_of(Path("dir.py/name")) is None


PYTHON = '''"""What it is for.

More of it."""
import os, a.b as c
LIMIT: int = 3
if LIMIT:
    from .x import (y, z as w)
print("no")

@wraps(
    os)
async def f(a: int,
            b=2) -> str:
    """Doc of f."""
    def inner(): ...
    import json
    return "def g(): pass"

# About A.
class A(B):
    """Doc of A."""
    field: int = 1  # remark
    def m(self): return 2
'''


def test_python():
    assert shown(PYTHON, "python") == [
        ("doc", '"""What it is for.'),
        ("detail", 'More of it."""'),
        ("import", "import os, a.b as c"),
        ("field", "LIMIT: int = 3"),
        ("import", "from .x import (y, z as w)"),
        ("function", "@wraps( os) async def f(a: int, b=2) -> str:"),
        ("doc", '"""Doc of f."""'),
        ("doc", "# About A."),
        ("class", "class A(B):"),
        ("doc", '"""Doc of A."""'),
        ("field", "field: int = 1"),
        ("function", "def m(self):"),
    ]
    assert outline(PYTHON, "python")[-1].text == "    def m(self):"  # with its indentation
    check(PYTHON, outline(PYTHON, "python"))


def test_typescript():
    text = """import x, {y} from "a";
export * from './b';
/** Doc. */
export default abstract class A<T> extends B implements C {
  n: number = 1;
  abstract m(a: T): void;
  go(): Promise<void> { return load(); }
}
export interface I { a: string; f(): void }
type T = {a: 1} | 'x';
export const f = async (a: number): Promise<void> => { await import("./lazy"); };
namespace N { export function g(): void {} }
exports.k = function (a) { return require("fs"); };
require(name);
"""
    assert shown(text, "typescript") == [
        ("import", 'import x, {y} from "a";'),
        ("doc", "/** Doc. */"),
        ("class", "export default abstract class A<T> extends B implements C"),
        ("field", "n: number = 1"),
        ("function", "abstract m(a: T): void"),
        ("function", "go(): Promise<void>"),
        ("type", "export interface I { a: string; f(): void }"),
        ("type", "type T = {a: 1} | 'x';"),
        ("function", "export const f = async (a: number): Promise<void> =>"),
        ("class", "namespace N"),
        ("function", "export function g(): void"),
        ("function", "exports.k = function (a)"),
    ]
    assert imports(text, "typescript") == ["a", "./b", "./lazy", "fs"]


def test_tsx_and_javascript():
    assert shown("export function App(p: {a: string}) { return <b>{p.a}</b>; }", "tsx") == [
        ("function", "export function App(p: {a: string})")
    ]
    assert shown("class A { m() {} }\nconst v = <b>x</b>;", "javascript") == [
        ("class", "class A"),
        ("function", "m()"),
        ("field", "const v = <b>x</b>;"),
    ]
    assert imports('const a = require("./a"), b = require(`b`);\nimport("c");import d = 1', "javascript") == ["./a", "c"]


def test_go():
    text = """package m
import (
	"fmt"
	x "a/b"
)
import `raw`

// M does.
func (r *T) M(a int) error { return nil }
type S struct { A int }
"""
    assert shown(text, "go") == [
        ("import", "package m"),
        ("import", 'import ( "fmt" x "a/b" )'),
        ("import", "import `raw`"),
        ("doc", "// M does."),
        ("function", "func (r *T) M(a int) error"),
        ("type", "type S struct { A int }"),
    ]
    assert imports(text, "go") == ["fmt", "a/b", "raw"]


def test_rust():
    text = """use a::b::{c, d as e, f::*, self};
use crate::x;
mod y;
extern crate z;
/// Doc.
#[derive(Debug)]
pub struct P { a: i32 }
impl P { /// Doc of n.
  pub fn n(&self) -> i32 { 1 } }
trait T { fn q(&self); }
"""
    assert shown(text, "rust") == [
        ("import", "use a::b::{c, d as e, f::*, self};"),
        ("import", "use crate::x;"),
        ("import", "mod y;"),
        ("import", "extern crate z;"),
        ("doc", "/// Doc."),
        ("type", "#[derive(Debug)] pub struct P { a: i32 }"),
        ("class", "impl P"),
        ("function", "pub fn n(&self) -> i32"),
        ("class", "trait T"),
        ("function", "fn q(&self);"),
    ]
    text_of_attributes = "#[a]\nm!{ x }\nfn f() {}\n#[b]\n// Doc.\nfn g() {}"
    assert shown(text_of_attributes, "rust")[0] == ("function", "fn f()")
    assert imports(text, "rust") == ["a::b::c", "a::b::d", "a::b::f", "a::b", "crate::x", "y", "z"]


def test_java():
    text = """package p;
import a.b.C;
import static x.Y.*;
/** Doc. */
@Z public class A extends B { int f = 1; void m(int a) throws E { } enum Q { X } }
"""
    assert shown(text, "java") == [
        ("import", "package p;"),
        ("import", "import a.b.C;"),
        ("import", "import static x.Y.*;"),
        ("doc", "/** Doc. */"),
        ("class", "@Z public class A extends B"),
        ("field", "int f = 1;"),
        ("function", "void m(int a) throws E"),
        ("class", "enum Q"),
        ("field", "X"),
    ]
    assert imports(text, "java") == ["a.b.C", "x.Y.*"]


def test_c_and_cpp():
    text = """#include "x.h"
#include <y/z.h>
#include MACRO
#ifdef Q
int *f(int a) { return 0; }
#endif
struct S { int a; };
int *g(void);
"""
    assert shown(text, "c")[3:] == [("function", "int *f(int a)"), ("type", "struct S { int a; }"), ("function", "int *g(void);")]
    assert imports(text, "c") == ["x.h", "y/z.h"]
    text = """#include <v>
namespace n { template <class T> class A : public B { public: A(); int m() const { return 1; } int x; }; }
A::A() : x(1) { }
"""
    assert shown(text, "cpp") == [
        ("import", "#include <v>"),
        ("class", "namespace n"),
        ("class", "template <class T> class A : public B"),
        ("function", "A();"),
        ("function", "int m() const"),
        ("field", "int x;"),
        ("function", "A::A() : x(1)"),
    ]


def test_python_imports():
    text = """import os.path, a as b
from . import x, y as z
from .. import *
from ..p.q import r
from . p import (s)
from t import *
def f():
    import lazy
"""
    expected = ["os.path", "a", ".x", ".y", "..", "..p.q", "..p.q.r", ".p", ".p.s", "t", "lazy"]
    assert imports(text, "python") == expected
    assert imports('"import no"  # import no\nx = """\nimport no\n"""', "python") == []
    assert imports(text, "markdown") == imports(text, None) == imports(text, "cobol") == []


def test_markdown():
    text = """---
title: no heading
---
Opening (v1.2) words! And more.

# First *one*
A sentence of 3.5 words. Another.

Second paragraph.

## Under it
- a
  - inner
- b
- c
- d

| x | y |
|---|---|
| 1 | 2 |

> # quoted

Set\u00adext
======
```
# code
```
これは文です。次の文。
"""
    for ends in ("\n", "\r\n"):
        written = text.replace("\n", ends)
        pieces = outline(written, "markdown")
        check(written, pieces)
        assert [(piece.kind, piece.text.replace("\r\n", "\n"), piece.path) for piece in pieces] == [
            ("text", "Opening (v1.2) words!", ""),
            ("heading", "# First *one*", ""),
            ("text", "A sentence of 3.5 words.", "First *one*"),
            ("heading", "## Under it", "First *one*"),
            ("list", "- a", "First *one* > Under it"),
            ("list", "- b", "First *one* > Under it"),
            ("list", "- c", "First *one* > Under it"),
            ("table", "| x | y |\n|---|---|", "First *one* > Under it"),
            ("heading", "Set\u00adext\n======", ""),
            ("text", "これは文です。", "Set\u00adext"),
        ]


def test_characters_are_counted_and_not_bytes():
    text = 'é = "🔥"\n"""ü"""\nclass Größe:\n    """日本語"""\n    def naïve(self): return "ß"\n'
    pieces = outline(text, "python")
    check(text, pieces)
    assert [piece.text for piece in pieces][1:] == ['"""ü"""', "class Größe:", '    """日本語"""', "    def naïve(self):"]


@pytest.mark.parametrize(
    ("language", "text", "pieces", "names"),
    [
        (
            "ruby",
            'require "json"\nrequire_relative "a"\n# Doc.\nclass A < B\n  def m(a)\n    1\n  end\nend\n',
            [("doc", "# Doc."), ("class", "class A < B"), ("function", "def m(a)")],
            ["json", "./a"],
        ),
        (
            "c_sharp",
            "using System.Text;\nnamespace N {\n[X] class A : B {\n int P { get; }\n void M(int a) { }\n}\nenum E { Y }\n}\n",
            [
                ("import", "using System.Text;"),
                ("class", "namespace N"),
                ("class", "[X] class A : B"),
                ("field", "int P { get; }"),
                ("function", "void M(int a)"),
                ("type", "enum E { Y }"),
            ],
            ["System.Text"],
        ),
        (
            "php",
            "<?php\nnamespace A;\nuse B\\C;\nrequire 'x.php';\nclass D { function m($a) { } }\nfunction f() { }\n",
            [
                ("import", "namespace A;"),
                ("import", "use B\\C;"),
                ("class", "class D"),
                ("function", "function m($a)"),
                ("function", "function f()"),
            ],
            ["B\\C", "x.php"],
        ),
        ("bash", "source ./x.sh\n. 'y.sh'\nX=1\nf() { echo; }\n", [("field", "X=1"), ("function", "f()")], ["./x.sh", "y.sh"]),
        (
            "kotlin",
            "package a\nimport c.D\nimport e.*\nclass A {\n  val f = 1\n  fun m(): Int = 1\n}\n",
            [
                ("import", "package a"),
                ("import", "import c.D"),
                ("import", "import e.*"),
                ("class", "class A"),
                ("field", "val f = 1"),
                ("function", "fun m(): Int"),
            ],
            ["c.D", "e.*"],
        ),
        (
            "scala",
            "package a\nimport c.{D, E}\nimport f.G\nobject O {\n  def m(a: Int) = 1\n}\n",
            [
                ("import", "package a"),
                ("import", "import c.{D, E}"),
                ("import", "import f.G"),
                ("class", "object O"),
                ("function", "def m(a: Int) ="),
            ],
            ["c.D", "c.E", "f.G"],
        ),
        (
            "lua",
            'local j = require("json")\n-- Doc.\nfunction M.f(a)\n  return 1\nend\nM.g = function(x)\n  return 2\nend\n',
            [
                ("field", 'local j = require("json")'),
                ("doc", "-- Doc."),
                ("function", "function M.f(a)"),
                ("function", "M.g = function(x)"),
            ],
            ["json"],
        ),
    ],
)
def test_more_languages(language, text, pieces, names):
    assert shown(text, language) == pieces
    assert imports(text, language) == names


def test_broken_source_still_shows_what_is_whole():
    text = "def good(a):\n    pass\n\nclass (((\n  x = = 3\n\ndef also_good():\n    return\n\0\ndef last(): pass\n"
    heads = [piece.text for piece in outline(text, "python") if piece.kind == "function"]
    assert heads[0] == "def good(a):"
    assert "def also_good():" in heads
    assert "def last():" in heads  # a NUL does not end a file
    assert shown("x = 1\ndef f():", "python")[0] == ("field", "x = 1")
    assert shown("def f():\n", "python") == [("function", "def f():")]
    assert imports("require();import();require(", "javascript") == imports("use ;use *;mod", "rust") == []


def test_long_pieces_are_shortened():
    text = f'def f({", ".join(f"argument_{n}" for n in range(1000))}):\n    """{"word " * 1000}"""\nx = "{"y" * 1000}"\n'
    pieces = outline(text, "python")
    check(text, pieces)
    assert [(piece.kind, len(piece.text)) for piece in pieces] == [("function", 1000), ("doc", 800), ("field", 200)]


def test_what_is_too_long_is_read_to_a_line_and_the_rest_is_said():
    text = "def f():\n    return 1\n\n\n" * 25_000
    pieces = outline(text, "python")
    check(text, pieces)
    assert pieces[-1].kind == "omitted"
    assert pieces[-1].end == len(text)
    assert pieces[-1].text == f"… {text.count(chr(10), pieces[-1].start):,} more lines were not read"
    assert len(pieces) > 10_000


HOSTILE = [
    "(",
    "[",
    "{",
    "{}",
    '"',
    "'''",
    "`",
    "/*",
    "f(",
    "class A{",
    "<a>",
    "# ",
    "> ",
    "- ",
    "*",
    "\0",
    "\ud800",
    "if x:\n ",
    "\r",
    "|a\n|-\n",
]


@pytest.mark.parametrize("language", LANGUAGES)
def test_deep_and_broken_texts_end(language):
    for piece in HOSTILE:
        text = piece * (3_000 // len(piece))
        check(text, outline(text, language))
        assert all(isinstance(name, str) and name for name in imports(text, language))


def test_a_hundred_thousand_levels_do_not_overflow_the_stack():
    text = "(" * 100_000 + ")" * 100_000 + "\n"
    assert outline(text + "def f(): pass\n", "python")[-1].kind in {"function", "omitted"}
    deep = "\n".join(" " * level + "if x:" for level in range(500)) + f"\n{' ' * 500}import deep\n"
    assert imports(deep, "python") == ["deep"]


def test_parsing_that_does_not_end_in_time_gives_a_beginning_or_nothing():
    text = '"\n' * 400_000  # quadratic for this grammar
    pieces = outline(text, "rust")
    check(text, pieces)
    assert pieces[-1].kind == "omitted"


FRAGMENTS = st.sampled_from(
    [
        *HOSTILE,
        "\n",
        " ",
        "def f():",
        "    ",
        "class A:",
        "import a",
        "require(",
        "use ",
        "*;",
        "use a::{b,",
        "é",
        "🔥",
        ")",
        "}",
        "]",
        "x",
        ";",
        "---\n",
        '"""',
    ]
)


@given(st.lists(FRAGMENTS | st.text(max_size=5), max_size=60).map("".join), st.sampled_from(LANGUAGES))
@settings(max_examples=150, deadline=None)
def test_no_text_raises(text, language):
    pieces = outline(text, language)
    check(text, pieces)
    assert pieces == outline(text, language)
    assert imports(text, language) == list(dict.fromkeys(imports(text, language)))


def test_this_project_reads_itself():
    sources = sorted((ROOT / "localrag").rglob("*.py"))
    for path in sources:
        text = path.read_text(encoding="utf-8")
        pieces = outline(text, language_of(path))
        check(text, pieces)
        for line in text.splitlines():
            if line.startswith(("def ", "class ")):
                assert any(line.split("(")[0] in piece.text for piece in pieces), (path, line)
    assert len(sources) > 20


def test_the_handbook():
    for path in sorted((ROOT / "examples/handbook").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        pieces = outline(text, "markdown")
        check(text, pieces)
        headings = [line for line in text.splitlines() if line.startswith("#")]
        assert [piece.text for piece in pieces if piece.kind == "heading"] == headings, path
