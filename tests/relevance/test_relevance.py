"""The relevance of files for a task: every factor by hand, and what holds for any files whatever."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.errors import ConfigError, UsageError
from localrag.relevance import DEFAULT_FILE_TYPES, FACTORS, METHODS, File, Weights, kind_of, score, weigh
from localrag.relevance.profile import idf, stem
from localrag.relevance.references import HALF_DENSITY, Resolver
from localrag.relevance.scoring import MAX_WINDOWS, MAX_WINDOWS_IN_ALL, windows
from localrag.types import Chunk, Hit
from tests.kb.hash_embedder import HashEmbedder

NOW = 1_700_000_000.0
DAY = 86_400.0
KEYWORD = Weights(method="keyword")


def scored(files, task="budget", weights=KEYWORD, **options):
    """path → Score; `files` maps paths to texts, or is a sequence of files."""
    files = [File(path, text) for path, text in files.items()] if isinstance(files, dict) else files
    return {one.path: one for one in score(files, task, weights=weights, now=NOW, **options)}


def detail(one, factor):
    return one.details[factor]


# --- the whole ---------------------------------------------------------------------------------------------------------------------


def test_a_score_by_hand():
    files = [
        File("app/budget.py", "from app import limits\n\ndef negotiate(): ...\n", NOW - 7 * DAY),
        File("app/limits.py", "LIMIT = 1\n", NOW - 14 * DAY),
    ]
    best, second = score(files, "negotiate the ceiling", weights=KEYWORD, now=NOW)
    assert (best.path, second.path) == ("app/budget.py", "app/limits.py")
    # "negotiate" stands once in the text and is the name of a definition, which counts three more; no file holds "ceiling"
    weight, unfound = idf(2, 1), idf(2, 1) / 2
    assert best.contributions == pytest.approx(
        {
            "task_alignment": 0.4 * (weight * 4 / 5) / (weight + unfound),
            "recency": 0.2 * 0.5,
            "mention_density": 0.0,
            "dependency_depth": 0.1,
            "file_type": 0.1,
        }
    )
    assert second.contributions == pytest.approx(
        {
            "task_alignment": 0.0,
            "recency": 0.2 * 0.25,
            "mention_density": 0.2 * (1 / (1 + HALF_DENSITY)),  # one import, in far fewer than 1,000 words
            "dependency_depth": 0.1 * 0.75,
            "file_type": 0.1,
        }
    )
    assert detail(best, "task_alignment")["found"] == {"negotiate": 4}
    assert detail(best, "task_alignment")["missing"] == ["ceiling"]
    assert detail(second, "dependency_depth")["distance"] == 1


hostile = st.text(st.characters(), max_size=60) | st.sampled_from(
    ["", "\0", "budget\0.py", "\ud800", "a" * 5000, "../" * 40, "https://x/y.py:1"]
)
paths = hostile | st.sampled_from(
    ["budget.py", "a/budget.py", "./b.ts", "b\\c.go", "x.md", "index.js", "tests/test_a.py", "lib.rs", "C.java"]
)
texts = hostile | st.sampled_from(
    [
        "from . import budget",
        "import './b'",
        "# Budget\n\nsee a/budget.py",
        "use crate::x::y;",
        '#include "x.h"',
        "`b`",
        "getBudget_size " * 99,
    ]
)
times = st.none() | st.floats()
file_lists = st.lists(st.builds(File, paths, texts, times), max_size=5, unique_by=lambda file: file.path.replace("\\", "/").strip("./"))
weightings = st.builds(
    Weights,
    **dict.fromkeys(FACTORS, st.floats(0, 1e308, exclude_min=True)),
    half_life_days=st.floats(0, 1e308, exclude_min=True),
    max_depth=st.integers(0, 5),
    method=st.sampled_from(("keyword", "hybrid")),
)


@settings(max_examples=150, deadline=None)
@given(file_lists, hostile | st.just("budget of b.ts"), weightings, st.booleans(), st.randoms())
def test_any_files_have_scores_that_are_their_parts_in_any_order(files, task, weights, with_embedder, random):
    others = [File("other.py", "import budget")]
    embedder = HashEmbedder() if with_embedder else None
    try:
        scores = score(files, task, weights=weights, embedder=embedder, now=NOW, others=others)
    except UsageError as error:  # two names that are one path, such as "a/./b" and "a/b"
        assert "twice" in error.message
        return
    assert sorted(one.path for one in scores) == sorted(file.path for file in files)
    shares = weights.shares
    for one in scores:
        assert one.score == sum(one.contributions.values())
        assert 0 <= one.score <= 1
        assert list(one.contributions) == list(FACTORS) == list(one.details)
        for name, contribution in one.contributions.items():
            value = one.details[name]["value"]
            assert 0 <= value <= 1
            assert contribution == shares[name] * value
        json.dumps(dict(one.details), allow_nan=False)
    random.shuffle(files)
    assert score(files, task, weights=weights, embedder=embedder, now=NOW, others=others) == scores


def test_a_megabyte_without_a_line_end_is_scored_in_seconds():
    big = {
        "letters.py": "a" * 1_000_000,
        "dotted.txt": "a.b" * 330_000,
        "slashes.md": "a/" * 500_000,
        "camel.js": "fooBar" * 160_000,
        "quotes.py": '"' * 100_000,
        "nul.rs": "\0" * 1_000_000,
        "words.txt": "budget " * 150_000,
    }
    started = time.process_time()
    found = scored(big, "budget of a.b", Weights(), embedder=HashEmbedder())
    assert time.process_time() - started < 15
    assert max(found, key=lambda path: detail(found[path], "task_alignment")["keyword"]) == "words.txt"


def test_a_path_is_given_once_and_meaning_needs_an_embedder():
    with pytest.raises(UsageError, match=r"a/b\.py is given twice"):
        score([File("a/b.py", ""), File("./a//b.py", "")], "x", now=NOW)
    with pytest.raises(UsageError, match="needs an embedder"):
        score([File("a.py", "")], "x", weights=Weights(method="semantic"), now=NOW)
    assert score([], "x", now=NOW) == []


def test_others_are_read_and_not_scored():
    files = {"app/flex.py": "x = 1"}
    alone = scored(files)["app/flex.py"]
    beside = scored(files, others=[File("app/main.py", "from app import flex")])
    assert list(beside) == ["app/flex.py"]
    assert detail(alone, "mention_density")["references"] == 0
    assert detail(beside["app/flex.py"], "mention_density")["references"] == 1
    assert scored(files, others=[File("./app/flex.py", "app/flex.py")])["app/flex.py"] == alone  # the same file is no other


# --- weights -----------------------------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_reference():
    assert Weights().shares == {"task_alignment": 0.4, "recency": 0.2, "mention_density": 0.2, "dependency_depth": 0.1, "file_type": 0.1}
    assert Weights(file_types={"config": 0.1}).file_types == {**DEFAULT_FILE_TYPES, "config": 0.1}


@given(st.lists(st.floats(0, 1.7e308), min_size=5, max_size=5).filter(any))
def test_shares_are_proportions_that_never_pass_one(values):
    shares = list(Weights(**dict(zip(FACTORS, values, strict=True))).shares.values())
    assert 1 - 1e-12 < sum(shares) <= 1
    assert math.fsum(shares) <= 1
    top = max(values)
    assert shares == pytest.approx([value / top / math.fsum(each / top for each in values) for value in values])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"recency": -0.1}, "recency is -0.1"),
        ({"recency": math.nan}, "recency is nan"),
        ({"file_type": math.inf}, "file_type is inf"),
        ({"file_type": 10**400}, "file_type is 1000"),
        ({"mention_density": "much"}, "mention_density is 'much'"),
        ({"dependency_depth": True}, "dependency_depth is True"),
        (dict.fromkeys(FACTORS, 0), "All weights of relevance are 0"),
        ({"half_life_days": 0}, "half_life_days is 0"),
        ({"max_depth": -1}, "max_depth is -1"),
        ({"max_depth": 1.5}, "max_depth is 1.5"),
        ({"max_depth": 101}, "max_depth is 101"),
        ({"method": "magic"}, "method is 'magic'"),
        ({"method": ["hybrid"]}, "method is"),
        ({"file_types": [1]}, "file_types is"),
        ({"file_types": {"pictures": 1}}, "file_types is 'pictures'"),
        ({"file_types": {"config": 1.1}}, "file_types.config is 1.1"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(wrong, named):
    with pytest.raises(ConfigError) as caught:
        Weights(**wrong)
    assert named in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 250


# --- task alignment ----------------------------------------------------------------------------------------------------------------


def alignment(files, task, **options):
    return {path: detail(one, "task_alignment")["value"] for path, one in scored(files, task, **options).items()}


@pytest.mark.parametrize(
    "text",
    ["size of a chunk", "chunk_size", "chunkSize", "getChunkSize()", "CHUNK_SIZE = 3", "ChunkedHTTPSizes", "the sizes of all chunks"],
)
def test_words_are_found_inside_identifiers_and_with_other_endings(text):
    assert alignment({"a.txt": text, "b.txt": "nothing"}, "chunk size") == {"a.txt": pytest.approx(0.5), "b.txt": 0}


@pytest.mark.parametrize(
    "words",
    [
        "negotiate negotiates negotiated negotiating negotiation negotiations negotiator",
        "tokenize tokenizer tokenizers tokenization tokenizing tokenise",
        "cache caching caches",
        "query queries",
        "run",
        "running",
        "budget budgets budgeted",
        "call calls called calling",
        "update updated updating",
    ],
)
def test_words_of_one_kind_have_one_stem(words):
    assert len({stem(word) for word in words.split()}) == 1


@given(st.text(max_size=30))
def test_short_and_foreign_words_stay_and_no_stem_is_empty(word):
    found = stem(word)
    assert found == word or (len(found) >= 3 and word.isascii() and word.startswith(found))


def test_a_rare_word_weighs_more_and_stop_words_nothing():
    files = {"a.txt": "the model", "b.txt": "the model", "c.txt": "the gasket", "d.txt": "and nothing"}
    found = alignment(files, "What is the gasket of the model?")
    assert found["c.txt"] > found["a.txt"] == found["b.txt"] > found["d.txt"] == 0
    assert found["c.txt"] == pytest.approx(idf(4, 1) / 2 / (idf(4, 1) + idf(4, 2)))


def test_a_word_in_a_name_counts_as_three_more():
    files = {"budget/a.txt": "", "b.md": "# Budget\n", "c.py": "def budget(window): ...\n", "d.py": "x = budget(1)\n", "e.py": "y = 1\n"}
    found = alignment(files, "budget")
    assert found == pytest.approx({"budget/a.txt": 3 / 4, "b.md": 4 / 5, "c.py": 4 / 5, "d.py": 1 / 2, "e.py": 0})
    assert alignment(files, "window")["c.py"] == pytest.approx(1 / 2)  # a parameter is no name of a definition


vocabulary = st.sampled_from(["budget", "window", "token", "negotiate", "faster", "green"])


@settings(deadline=None)
@given(st.lists(st.lists(vocabulary, max_size=8), min_size=1, max_size=4), st.lists(vocabulary, min_size=1, max_size=4), st.data())
def test_one_more_word_of_the_task_never_lowers_alignment(files, task, data):
    texts = {f"{at}.txt": " ".join(words) for at, words in enumerate(files)}
    before = alignment(texts, " ".join(task))
    path, word = data.draw(st.sampled_from(sorted(texts))), data.draw(st.sampled_from(task))
    after = alignment({**texts, path: f"{texts[path]} {word}"}, " ".join(task))
    assert after[path] >= before[path] - 1e-12


@pytest.mark.parametrize("task", ["", "   ", "???", "what is it", "\ud800"])
def test_a_task_without_words_aligns_with_nothing(task):
    assert alignment({"a.py": "what is it", "b.py": ""}, task) == {"a.py": 0, "b.py": 0}


def test_hybrid_is_the_mean_and_without_an_embedder_the_words():
    files = {"a.txt": "dry nylon in an oven", "b.txt": "faster budgets"}
    by = {method: scored(files, "dry nylon", Weights(method=method), embedder=HashEmbedder()) for method in METHODS}
    for path in files:
        word, near = (detail(by[method][path], "task_alignment")["value"] for method in ("keyword", "semantic"))
        mixed = detail(by["hybrid"][path], "task_alignment")
        assert (mixed["keyword"], mixed["semantic"], mixed["value"]) == (word, near, (word + near) / 2)
    assert detail(by["semantic"]["a.txt"], "task_alignment")["value"] > 0.3
    alone = detail(scored(files, "dry nylon", Weights())["a.txt"], "task_alignment")
    assert (alone["method"], alone["asked"], alone["reason"]) == ("keyword", "hybrid", "no embedder")
    assert alone["value"] == detail(by["keyword"]["a.txt"], "task_alignment")["value"]


class Compass:
    """An embedder that points north for texts that hold "north", south for "south", else east."""

    fingerprint, dim, max_tokens = "compass", 2, 1000

    def __init__(self):
        self.embedded = []

    def count(self, text):
        return len(text)

    def embed(self, texts):
        assert all(0 < len(text) <= self.max_tokens for text in texts)
        self.embedded += texts
        return np.array([[0, 1] if "north" in text else [0, -1] if "south" in text else [1, 0] for text in texts], dtype=np.float32)


def test_the_best_windows_decide_and_the_opposite_is_zero():
    semantic = Weights(method="semantic")
    line = "x" * 99 + "\n"
    files = {"one.txt": "north", "some.txt": line * 70 + "north\n" + line * 70, "none.txt": line, "opposite.txt": "south"}
    found = alignment(files, "north", weights=semantic, embedder=Compass())
    assert found == {"one.txt": 1, "some.txt": pytest.approx(1 / 3), "none.txt": 0, "opposite.txt": 0}


@pytest.mark.parametrize("num_files", [1, 4, 300])
def test_the_windows_that_are_embedded_are_bounded_and_those_with_the_words_are_among_them(num_files):
    compass = Compass()
    num_lines = 600 if num_files < 10 else 20
    text = "\n".join(["x" * 80] * num_lines + ["the north side"] + ["x" * 80] * num_lines)
    found = scored({f"{at}.txt": text for at in range(num_files)}, "north", Weights(), embedder=compass)
    each = {(d["windows_embedded"], d["windows"]) for d in (detail(one, "task_alignment") for one in found.values())}
    limit = max(1, min(MAX_WINDOWS, MAX_WINDOWS_IN_ALL // num_files))
    assert each == {(limit, len(windows(text)))}
    assert len(compass.embedded) == num_files * limit + 1
    assert num_files > MAX_WINDOWS_IN_ALL // 2 or any("north" in piece for piece in compass.embedded[1:])


@given(st.text("ab\n", max_size=5000))
def test_windows_make_up_the_text(text):
    spans = windows(text)
    assert "".join(text[start:end] for start, end in spans) == text
    assert all(start < end for start, end in spans)


# --- recency -----------------------------------------------------------------------------------------------------------------------


def recency(modified, **settings):
    [one] = score([File("a.py", "", modified)], "x", weights=Weights(method="keyword", **settings), now=NOW)
    return one.details["recency"]


@pytest.mark.parametrize(("age_days", "value"), [(0, 1), (7, 0.5), (14, 0.25), (3.5, 0.5**0.5), (-3, 1), (1e6, 0)])
def test_recency_halves_every_half_life(age_days, value):
    assert recency(NOW - age_days * DAY)["value"] == pytest.approx(value)


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf])
def test_no_date_is_the_middle_and_says_so(unknown):
    assert recency(unknown) == {"value": 0.5, "age_days": None, "reason": "no date"}


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12), st.floats(1e-300, 1e300))
def test_older_is_never_more_recent(modified, by, half_life):
    older, newer = (recency(at, half_life_days=half_life)["value"] for at in (modified - by, modified))
    assert 0 <= older <= newer <= 1


# --- mention density ---------------------------------------------------------------------------------------------------------------

TARGET = "localrag/kb/retrieve.py"


def references(text, *, target=TARGET, source="notes.md", beside=()):
    files = {target: "", source: text, **dict.fromkeys(beside, "")}
    return detail(scored(files)[target], "mention_density")["references"]


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("see localrag/kb/retrieve.py for this", 1),
        ("see kb/retrieve.py, and retrieve.py.", 2),
        ("see @localrag/kb/retrieve.py:12", 1),
        ("see LocalRAG\\kb\\Retrieve.py", 1),
        ("[code](../localrag/kb/retrieve.py)", 1),
        ("https://example.com/x/blob/main/localrag/kb/retrieve.py#L3", 1),
        ("localrag.kb.retrieve and localrag.kb.retrieve.terms", 2),
        ("kb.retrieve is a module", 1),
        ("hits = kb.retrieve(question)", 0),  # a method
        ("`retrieve` finds", 1),
        ("retrieve finds what to retrieve", 0),  # a word
        ("other/retrieve.py", 0),
        ("myretrieve.py retrieve.pyc retrieve_.py", 0),
        ("", 0),
    ],
)
def test_what_is_a_reference(text, num):
    assert references(text) == num


def test_an_import_counts_where_the_name_is_not_spelled_out_and_only_once_where_it_is():
    assert references("from localrag.kb import retrieve", source="localrag/ask.py") == 1
    assert references("from . import retrieve", source="localrag/kb/base.py") == 1
    assert references("import localrag.kb.retrieve", source="localrag/ask.py") == 1
    assert references("import './retrieve'", target="src/retrieve.ts", source="src/a.ts") == 1


def test_a_name_that_several_files_share_or_that_is_common_needs_its_path():
    assert references("retrieve.py", beside=["other/retrieve.py"]) == 0
    assert references("kb/retrieve.py", beside=["other/retrieve.py"]) == 1
    for common in ("index.js", "__init__.py", "main.go"):
        assert references(f"{common} `{common.split('.')[0]}`", target=f"web/{common}") == 0
        assert references(f"web/{common}", target=f"web/{common}") == 1


def test_a_hidden_file_is_named_with_its_dot():
    for target in (".github/workflows/ci.yml", ".env"):
        for text in (target, f"see `./{target}`.", f"../{target}"):
            assert references(text, target=target) == 1, text
    assert references("env", target=".env") == 0


def test_a_distinctive_stem_is_a_reference_anywhere():
    assert references("the knowledge_base closes", target="kb/knowledge_base.py") == 1
    assert references("the knowledge_base", target="kb/knowledge_base.py", beside=["x/knowledge_base.ts"]) == 0


def test_a_plain_word_of_the_task_names_a_file_unless_it_is_everywhere():
    files = {"model.py": "class Model: ...", "flex.py": "def negotiate(): ...", "a.txt": "models", "b.txt": "a model", "c.txt": "see flex"}
    found = {path: detail(one, "mention_density")["references_in_task"] for path, one in scored(files, "flex for the model").items()}
    assert found == {"model.py": 0, "flex.py": 1, "a.txt": 0, "b.txt": 0, "c.txt": 0}
    for named in ("model.py", "`model`"):
        assert detail(scored(files, f"change {named}")["model.py"], "mention_density")["references_in_task"] == 1


def test_a_file_does_not_refer_to_itself():
    one = scored({TARGET: "localrag/kb/retrieve.py " * 9, "b.py": ""})[TARGET]
    assert detail(one, "mention_density")["references"] == 0


def test_the_density_by_hand():
    files = {"flex.py": "x", "long.txt": "word " * 3997 + "flex.py"}  # 3,999 words, for the name is two
    found = detail(scored(files, "read this text")["flex.py"], "mention_density")
    density = 1000 / 3999
    assert found == {"value": pytest.approx(density / (density + HALF_DENSITY)), "references": 1, "words": 3999, "references_in_task": 0}
    density += 1000 / 4  # one reference in four words
    named = detail(scored(files, "speed up flex again")["flex.py"], "mention_density")
    assert (named["references_in_task"], named["value"]) == (1, pytest.approx(density / (density + HALF_DENSITY)))


# --- dependency depth --------------------------------------------------------------------------------------------------------------


def distances(files, task, **settings):
    found = scored(files, task, Weights(method="keyword", **settings))
    return {path: detail(one, "dependency_depth")["distance"] for path, one in found.items()}


CHAIN = {
    "app/a.py": "from app import b",
    "app/b.py": "from .c import x",
    "app/c.py": "import app.d, json, os.path",
    "app/d.py": "from . import e, a",  # a cycle
    "app/e.py": "",
    "app/alone.py": "from app.a import x",
}


def test_depth_follows_imports_from_the_file_that_the_task_names():
    assert distances(CHAIN, "change app/a.py") == dict(zip(CHAIN, [0, 1, 2, 3, None, None], strict=True))
    assert distances(CHAIN, "change app/a.py", max_depth=1) == dict(zip(CHAIN, [0, 1, None, None, None, None], strict=True))
    assert distances(CHAIN, "change app/a.py", max_depth=0) == dict(zip(CHAIN, [0, None, None, None, None, None], strict=True))
    values = [detail(scored(CHAIN, "change app/a.py")[path], "dependency_depth")["value"] for path in CHAIN]
    assert values == [1, 0.75, 0.5, 0.25, 0, 0]


def test_the_best_aligned_files_are_the_roots_where_none_is_named():
    files = {"x.py": "import y  # gasket gasket", "y.py": "", "z.py": "gasket"}
    assert distances(files, "Which gasket?") == {"x.py": 0, "y.py": 1, "z.py": None}
    assert distances(files, "Something else") == {"x.py": None, "y.py": None, "z.py": None}


@pytest.mark.parametrize(
    ("language", "importer", "name", "found"),
    [
        ("python", "app/a.py", "app.b", ["app/b.py"]),
        ("python", "app/a.py", ".b", ["app/b.py"]),
        ("python", "app/sub/s.py", "..b", ["app/b.py"]),
        ("python", "app/sub/s.py", ".", ["app/sub/__init__.py"]),
        ("python", "app/sub/s.py", "....b", []),
        ("python", "app/a.py", "app.sub", ["app/sub/__init__.py"]),
        ("python", "tests/t.py", "app.sub.s", ["app/sub/s.py"]),
        ("python", "tests/t.py", "pack.mod", ["src/pack/mod.py"]),
        ("python", "elsewhere/t.py", "deep.unique", ["very/deep/unique.py"]),
        ("python", "app/sub/s.py", "json", []),  # the standard library's, though app/sub/json.py lies beside it
        ("javascript", "web/a.js", "./b", ["web/b.ts"]),
        ("typescript", "web/a.ts", "./b.js", ["web/b.ts"]),
        ("tsx", "web/ui/c.tsx", "../b", ["web/b.ts"]),
        ("javascript", "web/a.js", "./ui", ["web/ui/index.tsx"]),
        ("javascript", "web/a.js", "./data.json", ["web/data.json"]),
        ("javascript", "web/a.js", "react", []),
        ("c", "src/x.c", "x.h", ["src/x.h"]),
        ("c", "src/x.c", "lib/y.h", ["include/lib/y.h"]),
        ("cpp", "src/x.cpp", "../src/x.h", ["src/x.h"]),
        ("c", "src/x.c", "stdio.h", []),
        ("go", "cmd/main.go", "example.com/tool/internal/store", ["internal/store/a.go", "internal/store/b.go"]),
        ("go", "cmd/main.go", "fmt", []),
        ("rust", "rs/src/main.rs", "engine", ["rs/src/engine/mod.rs"]),
        ("rust", "rs/src/main.rs", "crate::engine::gear::Gear", ["rs/src/engine/gear.rs"]),
        ("rust", "rs/src/engine/gear.rs", "super::Engine", ["rs/src/engine/mod.rs"]),
        ("rust", "rs/src/engine/mod.rs", "self::gear", ["rs/src/engine/gear.rs"]),
        ("rust", "rs/src/engine/gear.rs", "crate::run", ["rs/src/main.rs"]),
        ("rust", "rs/src/main.rs", "std::io", []),
        ("rust", "rs/src/main.rs", "other_crate::part::x", ["other-crate/src/part.rs"]),
        ("java", "j/src/main/java/com/x/A.java", "com.x.B", ["j/src/main/java/com/x/B.java"]),
        ("java", "j/src/test/java/com/x/ATest.java", "com.x.B.CONST", ["j/src/main/java/com/x/B.java"]),
        ("java", "j/src/test/java/com/x/ATest.java", "com.y.*", ["j/src/main/java/com/y/C.java"]),
        ("java", "j/src/main/java/com/x/A.java", "java.util.List", []),
        ("cobol", "a.cob", "x", []),
    ],
)
def test_imports_lead_to_the_files_at_hand(language, importer, name, found):
    files = """app/__init__.py app/a.py app/b.py app/sub/__init__.py app/sub/s.py app/sub/json.py tests/t.py src/pack/mod.py
    very/deep/unique.py web/a.js web/b.ts web/ui/index.tsx web/ui/c.tsx web/data.json src/x.c src/x.h include/lib/y.h
    cmd/main.go internal/store/a.go internal/store/b.go internal/store/a_test.go fmt/f.go
    rs/src/main.rs rs/src/engine/mod.rs rs/src/engine/gear.rs other-crate/src/lib.rs other-crate/src/part.rs
    j/src/main/java/com/x/A.java j/src/main/java/com/x/B.java j/src/main/java/com/y/C.java""".split()  # noqa: SIM905  # a list of files
    for root in ("", "/home/me/project/"):
        resolver = Resolver(root + path for path in files)
        assert resolver.resolve(root + importer, name, language) == [root + path for path in found]


# --- file type ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("source_code", "localrag/kb/walk.py src/latest.ts docs/conf.py contest.go a/Main.java web/page.html src/testament.rs"),
        (
            "test_code",
            "tests/helper.py test_walk.py pkg/store_test.go web/a.spec.ts a/b.test.jsx conftest.py src/ParserTest.java __tests__/a.js",
        ),
        (
            "requirements",
            "UC-015-oauth.md docs/requirements/login.md REQ-7.txt spec.md api-spec.md user-stories.md a.feature specs/api.yaml",
        ),
        ("documentation", "README.md docs/guide.rst notes.txt LICENSE CHANGELOG inspector.md respect.md tests/README.md usage.md"),
        ("config", "pyproject.toml ci.yml package.json .gitignore Dockerfile requirements.txt requirements-dev.in go.mod setup.cfg .env"),
        ("other", "picture.bin data.csv strange ..."),
    ],
)
def test_kinds(kind, paths):
    for path in paths.split():
        assert kind_of(path) == kind, path
        assert kind_of(f"C:\\work\\{path}") == kind, path


def test_a_script_without_an_ending_is_code():
    assert (kind_of("scripts/demo", "#!/bin/sh\n"), kind_of("scripts/demo", "text")) == ("source_code", "other")


# --- hits --------------------------------------------------------------------------------------------------------------------------


def hit(number, score, source, **contributions):
    return Hit(Chunk(number, 1, 0, "text", 0, 4, source), score, contributions)


HITS = st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 0.05), st.floats(0, 0.05)), max_size=8)


@given(HITS, st.dictionaries(st.sampled_from("abcd"), st.floats(0, 1)))
def test_weighed_hits_are_the_sum_of_their_parts_best_first(found, scores):
    hits = [hit(at, sum([one, two]), source, semantic=one, keyword=two) for at, (source, one, two) in enumerate(found)]
    weighed = weigh(hits, scores)
    assert {one.chunk.id for one in weighed} == {one.chunk.id for one in hits}
    assert [one.score for one in weighed] == sorted((one.score for one in weighed), reverse=True)
    for one in weighed:
        assert one.score == sum(one.contributions.values())
        assert ("relevance" in one.contributions) == (one.chunk.source in scores)
        assert hits[one.chunk.id].contributions.items() <= one.contributions.items()
    assert weigh(hits[::-1], scores) == weighed


def test_relevance_moves_a_hit_by_half_the_spread_at_most():
    hits = [hit(1, 0.03, "a", keyword=0.03), hit(2, 0.018, "b", keyword=0.018), hit(3, 0.01, "c", keyword=0.01)]
    best, *rest = weigh(hits, {"c": 1.0, "a": 0.0})
    assert best.chunk.source == "a"
    assert [one.chunk.source for one in rest] == ["c", "b"]
    assert rest[0].contributions == {"keyword": 0.01, "relevance": pytest.approx(0.5 * 0.02)}
    assert rest[1] == hits[1]  # a source without a score is left as it is
    assert weigh(hits, {"c": 1.0}, strength=1.1)[0].chunk.source == "c"


def test_equal_hits_are_ordered_by_relevance_alone():
    hits = [hit(1, 0.02, "a"), hit(2, 0.02, "b")]
    first, second = weigh(hits, {"a": 0.2, "b": 0.8})
    assert (first.chunk.source, second.chunk.source) == ("b", "a")
    assert first.contributions == {"retrieval": 0.02, "relevance": pytest.approx(0.5 * 0.02 * 0.8)}
    assert weigh([], {}) == []


# --- on this project ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("make the budget negotiation faster", {"localrag/budget/flex.py", "localrag/budget/__init__.py"}),
        ("The FAISS index must be rebuilt when its generation differs", {"localrag/kb/vectors.py"}),
        ("Skip hidden folders in walk.py", {"localrag/kb/walk.py"}),
    ],
)
def test_what_a_developer_would_open_first_comes_first(task, expected):
    root = Path(__file__).parents[2]
    files = [
        File(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in sorted((root / "localrag").rglob("*.py"))
    ]
    found = list(scored(files, task))
    assert expected <= set(found[: len(expected) + 3]), found[:8]
