"""Source code by its syntax: known samples, and what holds for any text."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.kb.readers import code, read
from localrag.outline import LANGUAGES, language_of

ROOT = Path(__file__).parents[3]
CODE = [language for language in LANGUAGES if language != "markdown"]


def parts(text, language):
    """(heading, text) of each section, once it is checked that they hold all of the text, in order."""
    reading = code.read(text.encode(), language)
    assert reading.own_lines
    assert reading.language == language
    found = [(section.heading, text[section.start : section.end]) for section in reading.sections]
    assert "".join(piece for _, piece in found) == text == reading.text
    assert all(section.body == 0 for section in reading.sections)
    return found


PYTHON_HEAD = '"""What it is for."""\nimport os\nLIMIT = 3\n\n'
PYTHON_FUNCTION = '# About f.\n# More.\n@wraps(os)\nasync def f(a):\n    """Doc of f."""\n' + "    a = a + 1\n" * 30
PYTHON_CLASS = '\n\nclass A(B):\n    """Doc of A."""\n\n    field: int = 1\n\n'
PYTHON_METHOD = "    # About m.\n    @property\n    def m(self):\n" + "        call()  # ü\n" * 120
PYTHON_LAST = "\n    def last(self): ...  # yes\n\n\n"
PYTHON_LOOSE = 'if __name__ == "__main__":\n    f(1)\n'


def test_python():
    text = PYTHON_HEAD + PYTHON_FUNCTION + PYTHON_CLASS + PYTHON_METHOD + PYTHON_LAST + PYTHON_LOOSE
    found = parts(text, "python")
    assert [heading for heading, _ in found] == ["", "f", "A", "A > m", "A > last", ""]
    bodies = [piece.strip("\n") for _, piece in found]
    expected = (PYTHON_HEAD, PYTHON_FUNCTION, PYTHON_CLASS, PYTHON_METHOD, PYTHON_LAST, PYTHON_LOOSE)
    assert bodies == [piece.strip("\n") for piece in expected]


def test_a_short_class_is_whole():
    assert parts("class A:\n    def f(self): pass\n    def g(self): pass\n", "python")[0][0] == "A"


def test_neighbouring_short_definitions_stand_together():
    text = "".join(f"def f{number}():\n    return {number}\n\n\n" for number in range(10))
    assert [heading for heading, _ in parts(text, "python")] == ["f0, f1, f2, f3, f4, f5, …"]
    overloads = "int f(int a) { return a; }\nint f(char b) { return b; }\n"
    assert [heading for heading, _ in parts(overloads, "cpp")] == ["f"]


LONG = "x = x + 1;\n" * 160
SAMPLES = {
    "javascript": (
        "import a from 'b';\n/** Doc. */\nexport class A {\n  m() {%s}\n}\nconst f = (x) => {%s};\nmodule.exports.k = function () {%s};\n",
        ["", "A", "A > m", "f", "module.exports.k"],
    ),
    "typescript": (
        "namespace N {\n export function g(): void {%s}\n export abstract class B { h(): void {} }\n}\ninterface I { a: string }\n",
        ["N", "N > g", "N > B", "I"],
    ),
    "go": (
        'package heat\nimport "fmt"\n\n// Bed.\ntype Bed struct { t int }\n\n// Heats.\nfunc (b *Bed) Heat() {%s}\n\nfunc main() {%s}\n',
        ["", "heat > Bed", "heat > Bed > Heat", "heat > main"],
    ),
    "rust": (
        "use a::b;\n\n/// Doc.\n#[d]\npub struct S { a: u8 }\n\nimpl T for S {\n    fn f() {%s}\n    fn g() {%s}\n}\nmod m { }\n",
        ["", "S", "T for S", "T for S > f", "T for S > g", "m"],
    ),
    "java": (
        "package a.b;\nimport c.D;\n/** Doc. */\n@B\nclass A {\n  int x;\n  /** M. */\n  @O void m() {%s}\n  A() {%s}\n}\n",
        ["", "a.b > A", "a.b > A > m", "a.b > A > A"],
    ),
    "c": (
        "#include <a.h>\n#ifdef X\n/* About f. */\nstatic int *f(int a) {%s}\n#endif\ntypedef struct { int a; } point;\n",
        ["", "f", "", "point"],
    ),
    "cpp": (
        "namespace n {\ntemplate <class T> class A {\n public:\n  void m() {%s}\n};\nvoid A::k() {%s}\n}\n",
        ["n", "n > A", "n > A > m", "n > A::k"],
    ),
    "c_sharp": (
        "using S;\nnamespace N.M {\n  /// <summary>x</summary>\n  [B]\n  class A {\n    void F() {%s}\n    int P;\n  }\n}\n",
        ["", "N.M", "N.M > A", "N.M > A > F", "N.M > A"],
    ),
    "ruby": (
        'require "a"\nmodule M\n  # Doc.\n  class A\n    def f\n%s    end\n    def self.g\n%s    end\n  end\nend\n',
        ["", "M", "M > A", "M > A > f", "M > A > g"],
    ),
    "php": (
        "<?php\nnamespace A\\B;\nuse C;\n/** Doc. */\n#[Attr]\nclass D {\n  function f() {%s}\n}\nfunction g() {%s}\n",
        ["", "A\\B > D", "A\\B > D > f", "A\\B > g"],
    ),
    "bash": ("#!/bin/sh\nX=1\n\n# Doc.\nf() {\n%s}\nf\n", ["", "f", ""]),
    "kotlin": (
        "package a.b\nimport c.D\n\n/** Doc. */\nclass A {\n  fun f() {%s}\n  companion object {\n    fun g() {%s}\n  }\n}\n",
        ["", "a.b > A", "a.b > A > f", "a.b > A > companion object", "a.b > A > companion object > g"],
    ),
    "scala": (
        "package a\nimport b.C\n/** Doc. */\nobject O {\n  def f() = {%s}\n  def g() = {%s}\n}\n",
        ["", "a > O", "a > O > f", "a > O > g"],
    ),
    "lua": ('local j = require("j")\n\n-- Doc.\nfunction M.f(a)\n%send\nlocal function g()\n%send\n', ["", "M.f", "g"]),
}


@pytest.mark.parametrize("language", SAMPLES)
def test_headings_of_each_language(language):
    text, headings = SAMPLES[language]
    body = LONG if language not in {"ruby", "bash", "lua"} else LONG.replace(" = x + 1;", "=2") * 3
    text = text.replace("%s", "\n" + body)
    found = parts(text, language)
    assert [heading for heading, _ in found] == headings
    for at, (_, piece) in enumerate(found):
        if "Doc." in piece and piece.count("\n") > 1:  # a comment stands with what it is about, never at the end of a section
            assert piece.rstrip().endswith(("Doc.", "Doc. */")) is False, (at, piece[-80:])


def test_every_language_has_a_reader():
    assert set(SAMPLES) | {"python", "tsx"} == set(CODE)
    assert read("a.tsx", b"export function App() { return <b>x</b>; }").sections[0].heading == "App"
    assert read("b.py", b"def f(): pass").fields == (("language", "python"),)


def test_broken_syntax_keeps_what_is_whole():
    text = "def good(a):\n    pass\n\nclass (((\n  x = = 3\n\ndef also_good():\n    return\n\ndef last(): pass\n"
    assert {name for heading, _ in parts(text, "python") for name in heading.split(", ")} >= {"good", "also_good", "last"}


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("javascript", "function a(){}/* x */" * 10_000),
        ("python", "(" * 200_000),
        ("python", "\n".join(" " * level + "if x:" for level in range(700))),
        ("java", "class A{" * 50_000),
        ("java", "class A{\n" + "  void f() { int x = 3; }\n" * 8_000 + "}"),
        ("c_sharp", "namespace a { class B { void F() {} }\n" * 5_000),
        ("c", "/* x */\n" * 50_000 + "int f(){}"),
        ("javascript", "var x = [1,2,3];\n" * 500_000),
    ],
)
def test_hostile_files_take_linear_time(language, text):
    started = time.process_time()
    parts(text, language)
    assert time.process_time() - started < 5


def test_latin1_source_is_read():
    assert code.read(b"# caf\xe9 \xe0 la carte, tr\xe8s bon\ndef f():\n    pass\n", "python").text.startswith("# café à la carte")


FRAGMENTS = st.sampled_from(
    [
        "class A",
        "def f()",
        "{",
        "}",
        "(",
        ")",
        ":",
        ";",
        "\n",
        "    ",
        "\t",
        "// x",
        "# y",
        "/* z */",
        "fn g()",
        "void h()",
        "é",
        "🔥",
        "\r\n",
        "namespace N",
        "package p",
        "end",
        "module M",
        "@x",
        "#[y]",
        "=",
        "function",
        "export ",
        '"',
        "'",
        "`",
        "<?php ",
        "x",
    ]
)


@given(st.lists(FRAGMENTS, max_size=80).map("".join), st.sampled_from(CODE))
@settings(max_examples=150, deadline=None)
def test_sections_hold_every_character(text, language):
    parts(text, language)


def test_this_project_reads_itself():
    sources = sorted((ROOT / "localrag/kb").rglob("*.py"))
    for path in sources:
        text = path.read_text(encoding="utf-8")
        found = parts(text, language_of(path))
        named = " ".join(heading for heading, _ in found if "…" not in heading)
        for line in text.splitlines():
            if line.startswith("class "):
                assert line[6:].partition("(")[0].rstrip(":") in named or "…" in str(found), (path, line)
    assert len(sources) > 10
