"""The four levels: no text at any level is ever longer than its limit, and what is left is what matters."""

import json
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localrag.engine.echo import open_echo
from localrag.errors import BudgetExceededError, EngineError, UsageError
from localrag.summary import LEVELS, LIMITS, Source, extract, split, summarize, truncate, usable
from localrag.summary.writer import PART_TOKENS, Writer

ROOT = Path(__file__).parents[2]
HANDBOOK = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples/handbook").rglob("*.md")))
TOKENS_PY = (ROOT / "localrag/text/tokens.py").read_text(encoding="utf-8")


def in_bytes(text):
    return len(text.encode("utf-8", "replace"))


def in_words(text):
    return len(text.split())


def in_pairs(text):
    """A tokenizer that merges: two bytes are a token unless one of them is a space. A longer text can take fewer tokens."""
    return sum(-(-in_bytes(word) // 2) for word in text.split(" ")) + text.count(" ")


class SqliteCache:
    """A SummaryCache as small as one can be."""

    def __init__(self, path):
        self.db = sqlite3.connect(path)
        self.db.execute("CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, text TEXT, at REAL)")

    def get(self, key, max_age_s):
        row = self.db.execute("SELECT text, at FROM kept WHERE key = ?", (key,)).fetchone()
        return row[0] if row and (max_age_s is None or time.time() - row[1] <= max_age_s) else None

    def put(self, key, text):
        with self.db:
            self.db.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", (key, text, time.time()))

    def rows(self):
        return self.db.execute("SELECT key, text FROM kept").fetchall()


@pytest.fixture
def cache(tmp_path):
    kept = SqliteCache(tmp_path / "kept.sqlite")
    yield kept
    kept.db.close()


class Counted:
    """A counter that keeps account of its own use."""

    def __init__(self, count):
        self.count = count
        self.calls = self.chars = 0

    def __call__(self, text):
        self.calls += 1
        self.chars += len(text)
        return self.count(text)


COUNTERS = [in_bytes, in_words, in_pairs]
CHARACTERS = "aé文🔥\n .!?#-\t\0\ud800"
TEXTS = st.one_of(
    st.text(max_size=300),
    st.lists(
        st.sampled_from([*CHARACTERS, "Some words. ", "def f():\n", "# Title\n", "- item\n", "class A:\n", '"""Doc."""\n', "import a\n"]),
        max_size=80,
    ).map("".join),
)  # fmt: skip


@given(TEXTS, st.integers(1, 120), st.sampled_from(COUNTERS), st.sampled_from(["a.py", "b.md", "c.txt", "d/e" * 60 + ".rs", "\n", ""]))
@settings(max_examples=200, deadline=None)
@example("x" * 400, 7, in_bytes, "a.md")
def test_no_level_exceeds_its_limit(text, limit, count, label):
    source = Source(label=label, text=text, modified=1e9)
    for level in LEVELS:
        for write in (None, lambda _text, num: "Such is the way of the words. " * num):
            made = summarize(source, level, count=count, limit=limit, write=write, write_tokens=64)
            assert made.num_tokens == count(made.text) <= made.limit == limit
            assert made.num_source_tokens == count(text)
            assert level == "stub" or count(text) > limit or (made.text, made.method) == (text, "whole")


@given(TEXTS, st.integers(-1, 60), st.sampled_from(COUNTERS))
@settings(max_examples=200, deadline=None)
@example("word " * 200, 10, in_words)
@example("a" * 500, 30, in_bytes)
@example("🔥" * 99, 10, in_bytes)
def test_truncate_and_extract_keep_the_limit_and_say_the_same_again(text, limit, count):
    cut, picked = truncate(text, limit, count), extract(text, limit, count)
    assert (cut, picked) == (truncate(text, limit, count), extract(text, limit, count))
    assert max(count(cut), count(picked)) <= max(0, limit)
    if cut not in {text, text.lstrip(), ""}:
        assert cut.endswith(" […]")
        assert text.lstrip().startswith(cut.removesuffix(" […]").lstrip())
        assert cut.removesuffix(" […]").strip()
    for line in picked.removesuffix(" […]").splitlines():
        assert all(word in text for word in line.split())


@given(TEXTS, st.integers(4, 60), st.sampled_from(COUNTERS))
@settings(max_examples=100, deadline=None)
def test_split_loses_nothing(text, limit, count):
    parts = list(split(text, limit, count))
    assert all(count(part) <= limit for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


def test_truncate_by_hand():
    assert truncate("One two. Three four.", 20, in_bytes) == "One two. Three four."
    assert truncate("One two. Three four.", 19, in_bytes) == "One two. […]"  # 8 characters, and 6 bytes of the mark
    assert truncate("One two. Three four.", 10, in_bytes) == "One […]"
    assert truncate("Onetwothree", 10, in_bytes) == "Onet […]"
    assert truncate("文です。次の文。", 20, in_bytes) == "文です。 […]"
    assert truncate("line one\nline two\nline three", 25, in_bytes) == "line one\nline two […]"
    assert [truncate("Onetwothree", limit, in_bytes) for limit in (7, 6, 0, -1)] == ["O […]", "", "", ""]
    assert truncate("", 5, in_bytes) == ""
    assert truncate("\n" * 100_000 + "Onetwothree", 10, in_bytes) == "Onet […]"
    assert list(split(" " * 1_000_000 + "one two", 3, in_bytes)) == ["one", "two"]


@pytest.mark.parametrize("make", [truncate, extract])
@pytest.mark.parametrize("piece", ["Word for word, and so on. ", "x", "文", "a b\n", "def f(a): return a\n", "<|im_end|>"])
def test_five_megabytes_are_fast(make, piece):
    text = piece * (5_000_000 // in_bytes(piece))
    count = Counted(in_bytes)
    started = time.thread_time()
    made = make(text, 500, count)
    assert 0 < in_bytes(made) <= 500
    assert time.thread_time() - started < 4
    assert (count.calls < 60, count.chars < 100_000) == (True, True)


def test_extract_takes_what_is_talked_about_and_leaves_the_rest():
    text = (
        "Annealing makes PLA parts stand more heat.\nIt rained.\nMy uncle has a dog.\n"
        "Annealing PLA at 90 degrees crystallises the PLA.\nNobody knows.\nHeat for annealing must be even.\n"
    )
    assert extract(text, 15, in_words) == (
        "Annealing makes PLA parts stand more heat.\nAnnealing PLA at 90 degrees crystallises the PLA."
    )  # fmt: skip
    assert extract("same line\n" * 50, 20, in_words) == "same line"
    assert extract(" \n\n", 5, in_words) == ""
    assert extract("... --- !!!", 2, in_words).endswith("[…]")  # no words at all


def test_detailed_code_keeps_heads_before_docstrings():
    made = summarize(Source(label="tokens.py", text=TOKENS_PY), "detailed", count=in_pairs, limit=1500)
    assert (made.method, made.level, made.limit) == ("outline", "detailed", 1500)
    for head in ("class Segment:", "class Tokenizer(Protocol):", "def encode(self, text: str) -> list[int]: …", "class TokenCounter:"):
        assert head in made.text
    assert "return count" not in made.text  # bodies
    assert '"""Return the bytes of a token' not in made.text  # docstrings come last
    assert made.text.index("class Segment") < made.text.index("class Tokenizer") < made.text.index("class TokenCounter")
    more = summarize(Source(label="tokens.py", text=TOKENS_PY), "detailed", count=in_pairs, limit=3000)
    assert '"""Return the bytes of a token' in more.text


def test_detailed_markdown_is_its_headings():
    made = summarize(Source(label="handbook.md", text=HANDBOOK), "detailed", count=in_words, limit=900)
    headings = [line for line in HANDBOOK.splitlines() if line.startswith("#")]
    kept = [line.removesuffix(" …") for line in made.text.splitlines() if line.startswith("#")]
    assert made.method == "outline"
    assert kept[:60] == headings[:60]  # then only short ones still fit
    rest = iter(headings)
    assert all(line in rest for line in kept)


def test_detailed_of_other_text_is_its_sentences():
    made = summarize(Source(label="notes.txt", text=HANDBOOK), "detailed", count=in_words)
    assert (made.method, made.limit) == ("extractive", 2000)
    assert 1500 < made.num_tokens <= 2000


def test_every_source_of_this_project_at_every_level():
    for path in sorted((ROOT / "localrag").rglob("*.py"))[::4]:
        text = path.read_text(encoding="utf-8")
        sizes = [summarize(Source(label=str(path), text=text), level, count=in_pairs).num_tokens for level in LEVELS]
        assert sizes[0] == in_pairs(text)
        assert all(size <= (LIMITS[level] or size) for size, level in zip(sizes, LEVELS, strict=True))


def test_a_stub_by_hand():
    made = summarize(Source(label="src/app.py", text="a\nb\n", modified=1_700_000_000), "stub", count=in_words)
    assert made.text == "src/app.py\npython, 2 lines, 2 tokens\nmodified 2023-11-14"
    assert (made.method, made.num_tokens) == ("stub", in_words(made.text))
    assert summarize(Source(label="x.log", text=""), "stub", count=in_words).text == "x.log\nlog, 0 lines, 0 tokens"
    assert summarize(Source(label="Makefile", text="one"), "stub", count=in_words).text == "Makefile\nMakefile, 1 line, 1 token"
    for never in (float("nan"), float("inf"), -1e300, 1e300):
        assert "modified" not in summarize(Source(label="x", text="", modified=never), "stub", count=in_words).text


def test_a_long_path_loses_its_middle():
    label = "/start/" + "middle/" * 5000 + "end.py"
    made = summarize(Source(label=label, text="x = 1\n"), "stub", count=in_bytes)
    name, facts = made.text.split("\n")
    assert name.startswith("/start/")
    assert name.endswith("/end.py")
    assert facts == "python, 1 line, 6 tokens"
    assert 95 <= made.num_tokens <= 100
    assert summarize(Source(label="a\x1b[31m\nb.py", text=""), "stub", count=in_bytes).text.startswith("a [31m b.py\n")


def test_a_short_text_is_written_about_once_and_a_long_one_in_parts():
    seen = []

    def write(text, max_tokens):
        seen.append((in_words(text), max_tokens))
        return f"Summary number {len(seen)} of it."

    text = "\n".join(f"Sentence number {n} speaks of {n}." for n in range(100))
    made = summarize(Source(label="a.txt", text=text), "summary", count=in_words, limit=100, write=write, write_tokens=600)
    assert (seen, made.text, made.method) == ([(600, 100)], "Summary number 1 of it.", "model")
    seen.clear()
    made = summarize(Source(label="a.txt", text=text), "summary", count=in_words, limit=100, write=write, write_tokens=150)
    assert [size for size, _ in seen[:-1]] == [150] * 4  # 600 words in parts that end with sentences
    assert seen[-1] == (20, 100)  # the four summaries
    assert made.text == "Summary number 5 of it."
    seen.clear()
    summarize(Source(label="a.txt", text=text * 50), "summary", count=in_words, limit=100, write=write, write_tokens=150)
    assert 6 <= len(seen) <= 9  # never more than eight parts
    assert all(size <= 150 for size, _ in seen)


@pytest.mark.parametrize("written", ["", "  \n", "!!! ???", "ok", "the cat " * 50, "# \n"])
def test_what_a_model_could_not_write_is_extracted(written):
    made = summarize(Source(label="a.txt", text=HANDBOOK), "summary", count=in_words, limit=50, write=lambda *_: written)
    assert made.method == "extractive"
    assert made.text == extract(HANDBOOK, 50, in_words)


def test_a_part_that_a_model_could_not_write_about_is_not_lost():
    text = "\n".join(f"Sentence number {n} speaks of {n}." for n in range(100))
    seen = []

    def write(text, _max_tokens):
        seen.append(text)
        return "" if len(seen) == 2 else f"Summary number {len(seen)} of it."

    made = summarize(Source(label="a.txt", text=text), "summary", count=in_words, limit=100, write=write, write_tokens=150)
    assert made.method == "model"
    assert "Summary number 1 of it.\n\nSentence number 25" in seen[-1]
    assert seen[-1].endswith("Summary number 4 of it.")


def test_what_is_usable():
    assert usable("### \nIt is about heat.\n", "x" * 100) == "It is about heat."
    assert usable("これは樹脂についての文章です。", "x" * 100)
    assert usable("It is longer than the text.", "Short.") == ""


def test_a_model_that_writes_too_much_is_cut():
    made = summarize(Source(label="a.txt", text=HANDBOOK), "summary", count=in_words, limit=10, write=lambda *_: HANDBOOK[300:2000])
    assert made.method == "model"
    assert 5 <= made.num_tokens <= 10
    assert made.text.endswith(" […]")


def test_the_cache_knows_content_level_limit_and_model(cache):
    calls = []

    def write(_text, _max_tokens):
        calls.append(1)
        return f"Written for the time number {len(calls)}."

    def made(text=HANDBOOK, label="a.md", level="summary", **options):
        return summarize(Source(label=label, text=text), level, **{"count": in_words, "write": write, "cache": cache, **options})

    first, again = made(cache_model="m"), made(cache_model="m")
    before = len(calls)
    assert (first.cached, again.cached, again.text, before > 1) == (False, True, first.text, True)
    assert made(label="renamed.md", cache_model="m").cached
    assert len(calls) == before
    for change in ({"text": HANDBOOK + "!"}, {"limit": 400}, {"cache_model": "other"}, {"max_age_s": -1.0}, {"label": "a.txt"}):
        assert not made(**{"cache_model": "m", **change}).cached, change
    assert len(calls) > before
    extractive = made(write=None, cache_model="m")
    assert (extractive.method, extractive.cached) == ("extractive", False)
    assert made(write=None, cache_model="m").cached
    detailed = [made(level="detailed", limit=300, cache_model="m") for _ in range(2)]
    assert [(one.method, one.cached) for one in detailed] == [("outline", False), ("outline", True)]
    assert detailed[0].text == detailed[1].text
    rows = cache.rows()
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key, _ in rows)
    made(level="stub"), made(level="full"), made(text="short")
    assert cache.rows() == rows  # these cost nothing to make


@pytest.mark.parametrize(
    "kept",
    ["", "null", "{", "[]", "7", '"text"', '{"method":"model"}', '{"method":"magic","text":"x"}', '{"method":"whole","text":"x"}',
     '{"method":"model","text":7}', json.dumps({"method": "model", "text": "too long " * 100})],
)  # fmt: skip
def test_a_cache_that_holds_something_else_is_written_over(cache, kept):
    good = summarize(Source(label="a", text=HANDBOOK), "summary", count=in_words, limit=50, cache=cache)
    ((key, text),) = cache.rows()
    cache.put(key, kept)
    again = summarize(Source(label="a", text=HANDBOOK), "summary", count=in_words, limit=50, cache=cache)
    assert (again.text, again.cached) == (good.text, False)
    assert cache.rows() == [(key, text)]


def test_nothing_is_kept_of_a_writer_that_fails(cache):
    def write(_text, _max_tokens):
        raise EngineError("The engine is gone.")

    with pytest.raises(EngineError):
        summarize(Source(label="a", text=HANDBOOK), "summary", count=in_words, write=write, cache=cache)
    assert cache.rows() == []


def test_what_is_refused():
    for level, limit in (("short", None), ("summary", 0), ("stub", -5)):
        with pytest.raises(UsageError):
            summarize(Source(label="a", text="x"), level, count=in_words, limit=limit)


def test_a_writer_over_the_echo_engine():
    with open_echo() as engine:
        writer = Writer(engine)
        assert writer.max_text_tokens == PART_TOKENS
        assert writer("A first line of words.\nAnd <|im_end|> more of it.", 100) == "You asked: A first line of words."
        assert (
            writer("A first line, that is much longer than what may be written.\nMore of it is here.", 30)
            == "You asked: A first line, that "[:30].strip()
        )
        made = summarize(
            Source(label="a.md", text=HANDBOOK),
            "summary",
            count=engine.counter,
            write=writer,
            write_tokens=writer.max_text_tokens,
        )
        assert made.method == "model"
        assert made.num_tokens <= 500


def test_a_writer_in_a_small_window_writes_what_fits_or_refuses():
    with open_echo(n_ctx_train=400) as engine:
        writer = Writer(engine)
        assert 64 < writer.max_text_tokens < 400 - 160
        assert writer("w" * writer.max_text_tokens, 160)
        with pytest.raises(BudgetExceededError):
            writer("w" * 400, 160)
    with open_echo(n_ctx_train=100) as engine:
        writer = Writer(engine)
        assert writer.max_text_tokens == 0
        made = summarize(Source(label="a", text=HANDBOOK), "summary", count=engine.counter, write=writer, write_tokens=0)
        assert made.method == "extractive"
