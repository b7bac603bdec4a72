"""`localrag kb …`, `search` and what `ask` takes from them, as a new user tries them."""

import io
import json
import os
import re
import shutil
import time

import pytest

from localrag.cli import indexing
from localrag.kb import IndexProgress, KnowledgeBase, Tagging
from localrag.session import folder_rules, open_embedder
from localrag.settings import Settings
from tests import identities


def write_guide(folder):
    """Three documents, one with what it says of itself."""
    (folder / "prices").mkdir(parents=True)
    (folder / "glass.md").write_text("---\ntags: [hot]\nauthor: Ann\n---\n# Glass\n\nGlass melts in the kiln.\n")
    (folder / "prices" / "sand.md").write_text("# Sand\n\nSand costs three coins, and the kiln burns gas.\n")
    (folder / "plain.txt").write_text("A plain note on wheels.\n")
    return folder


@pytest.fixture(scope="module")
def indexed(tmp_path_factory, tiny_catalogue):
    """A home with a knowledge base `guide` of them."""
    folder = tmp_path_factory.mktemp("indexed")
    settings = Settings(home=folder / "home", models_file=tiny_catalogue)
    with KnowledgeBase.open(settings.kb_dir, "guide", create=True) as kb:
        kb.ingest([write_guide(folder / "guide")], open_embedder(settings), tagging=Tagging(rules=folder_rules(settings)))
    return settings.home


@pytest.fixture
def guide(indexed, home, tmp_path, monkeypatch):
    """A home with that knowledge base, to do with as one likes, and a copy of its documents in the current folder."""
    shutil.copytree(indexed, home)
    monkeypatch.chdir(tmp_path)
    return write_guide(tmp_path / "guide")


def data(result, code=0):
    got, out, _ = result
    assert got == code
    return json.loads(out)


@pytest.mark.parametrize("command", ["list", "show", "verify", "export", "import", "feedback", "rename", "remove"])
def test_every_command_explains_itself_in_a_line_and_in_full(localrag, command):
    [line] = [line for line in localrag("kb", "--help")[1].splitlines() if line.startswith(f"  {command} ")]
    assert line.endswith(".")
    assert not line.endswith("...")
    code, out, _ = localrag("kb", command, "--help")
    assert code == 0
    assert "--json" in out


@pytest.mark.parametrize(
    "args", [["show"], ["verify"], ["feedback"], ["remove", "--yes"], ["remove", "x.md"], ["rename", "new"], ["export", "out.kb"]]
)
def test_one_that_does_not_exist_names_the_nearest(refused, guide, args):
    command, *rest = args
    said = refused(6, "kb", command, "guid", *rest)
    assert "There is no knowledge base 'guid'. Did you mean guide?" in said
    assert "localrag index PATH --kb guid" in said


def test_documents_are_shown_with_tags_and_fields(localrag, guide):
    code, out, err = localrag("kb", "show", "guide")
    assert (code, err) == (0, "guide: 3 documents, 3 chunks\n")
    assert [line.split() for line in out.splitlines()] == [
        ["Document", "Chunks", "Tags", "Fields"],
        ["guide/glass.md", "1", "hot", "author=Ann"],
        ["guide/plain.txt", "1"],
        ["guide/prices/sand.md", "1", "price"],
    ]
    assert data(localrag("kb", "show", "guide", "--json", "--where", "author=ann"))["documents"] == [
        {"source": "guide/glass.md", "num_chunks": 1, "fields": {"author": ["Ann"], "tag": ["hot"]}}
    ]
    assert localrag("kb", "show", "guide", "--where", "source=*.txt")[1].splitlines()[0].split() == ["Document", "Chunks"]


def test_a_where_that_matches_nothing_says_so(localrag, refused, guide):
    way_out = "No document of guide matches tag=none. To list its documents and tags: localrag kb show guide\n"
    assert localrag("kb", "show", "guide", "--where", "tag=none") == (0, "", way_out)
    assert localrag("search", "kiln", "--kb", "guide", "--mode", "keyword", "--where", "tag=none") == (0, "", way_out)
    assert data(localrag("search", "kiln", "--kb", "guide", "--mode", "keyword", "--where", "tag=none", "--json")) == {"hits": []}
    assert data(localrag("kb", "show", "guide", "--where", "tag=none", "--json"))["documents"] == []
    assert localrag("search", "zebra", "--kb", "guide", "--mode", "keyword", "--where", "tag=hot")[2] == "Nothing relevant was found.\n"
    assert "'junk' is not a condition" in refused(2, "search", "x", "--kb", "guide", "--where", "junk")
    assert "wildcards" in refused(2, "kb", "show", "guide", "--where", "tag=*a*b*c*d*e*f*g")


def test_search_finds_where_it_may_look(localrag, refused, guide):
    both = data(localrag("search", "kiln", "--kb", "guide", "--mode", "keyword", "--json"))["hits"]
    assert {hit["source"] for hit in both} == {"guide/glass.md", "guide/prices/sand.md"}
    [one] = data(localrag("search", "kiln", "--kb", "guide", "--where", "tag=price", "--json"))["hits"]
    assert one["source"] == "guide/prices/sand.md"
    assert abs(sum(one["contributions"].values()) - one["score"]) < 1e-6
    assert len(data(localrag("search", "kiln", "--kb", "guide", "-k", "1", "--json"))["hits"]) == 1
    assert "The query is empty" in refused(2, "search", "  ", "--kb", "guide")
    assert "'-k'" in refused(2, "search", "x", "--kb", "guide", "-k", "0")
    assert "'--mode'" in refused(2, "search", "x", "--kb", "guide", "--mode", "fuzzy")


@pytest.fixture
def two(localrag, guide, tmp_path):
    """A second knowledge base, `more`, with a copy of a document of the first and one of its own."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "sand.md").write_text("# Sand\n\nSand costs three coins, and the kiln burns gas.\n")
    (folder / "clay.md").write_text("# Clay\n\nClay is fired in the kiln.\n")
    assert localrag("index", folder, "--kb", "more")[0] == 0


@pytest.mark.parametrize("mode", ["keyword", "hybrid"])
def test_search_uses_every_knowledge_base_that_is_named(localrag, refused, two, mode):
    args = ("search", "kiln", "--kb", "guide", "--kb", "more", "--mode", mode)
    hits = data(localrag(*args, "--json"))["hits"]
    assert {hit["source"].rpartition("/")[2] for hit in hits} >= {"clay.md", "sand.md", "glass.md"}
    [sand] = [hit for hit in hits if hit["source"].endswith("sand.md")]
    [copy] = sand["identical"]
    assert {sand["id"].partition("/")[0], copy["id"].partition("/")[0]} == {"KB#guide", "KB#more"}
    _, out, _ = localrag(*args)
    assert f"    identical: [{copy['id']}] {copy['source']} > Sand" in out
    assert "There is no knowledge base 'none'" in refused(6, "search", "kiln", "--kb", "guide", "--kb", "none")
    nothing = localrag("search", "kiln", "--kb", "guide", "--kb", "more", "--where", "tag=none")[2]
    assert "No document of guide matches tag=none." in nothing
    assert "No document of more matches tag=none." in nothing


def test_search_and_ask_find_the_same_in_the_same_order_also_after_votes(localrag, two):
    kbs = ("--kb", "guide", "--kb", "more")

    def both():
        searched = data(localrag("search", "Where is the kiln?", *kbs, "-k", "4", "--json"))["hits"]
        asked = data(localrag("ask", "Where is the kiln?", *kbs, "--top-k", "4", "--model", "echo", "--json"))["evidence"]
        assert [(hit["id"], hit["score"], hit["contributions"]) for hit in sorted(searched, key=lambda hit: hit["id"])] == [
            (hit["id"], hit["score"], hit["contributions"]) for hit in sorted(asked, key=lambda hit: hit["id"])
        ]
        return {hit["id"]: hit["contributions"] for hit in searched}

    before = both()
    label = next(label for label in before if label.startswith("KB#guide/"))
    assert localrag("kb", "feedback", "guide", label.rpartition("/")[2], "--useful")[0] == 0
    after = both()
    assert "feedback" in after[label]
    assert "feedback" not in before[label]


def test_a_text_that_stands_in_two_knowledge_bases_takes_one_place_in_an_answer(localrag, two):
    args = ("ask", "What does sand cost?", "--kb", "guide", "--kb", "more", "--model", "echo", "--top-k", "2")
    answer = data(localrag(*args, "--json"))
    [entry] = [each for each in answer["ledger"]["entries"] if each["name"] == "evidence"]
    assert len(answer["evidence"]) == 2
    [(copy, reason)] = entry["omitted_reasons"].items()
    assert copy in entry["omitted"]
    assert reason in [f"identical to {each['id']}" for each in answer["evidence"]]
    _, _, err = localrag(*args, "--explain")
    assert reason in " ".join(err.split())
    shown = " ".join(localrag("budget", *args[1:], "--show-allocation")[1].split())
    assert f"left out: {reason}" in shown
    kept = data(localrag("report", "--json"))["asks"][-1]
    [told] = [each for each in kept["ledger"]["entries"] if each["name"] == "evidence"]
    assert told["omitted_reasons"] == {copy: reason}
    assert {each["label"]: each["state"] for each in kept["evidence"]}[copy] == "omitted"


def test_verify_says_what_is_out_of_date_and_what_to_do(localrag, guide):
    localrag("kb", "remove", "guide", "--yes")
    localrag("index", "guide", "--kb", "guide")
    assert localrag("kb", "verify", "guide") == (0, "guide is sound: 3 documents, 3 chunks\n", "")
    (guide / "plain.txt").unlink()
    (guide / "glass.md").write_text("# Glass\n\nIt breaks.\n")
    code, out, err = localrag("kb", "verify", "guide")
    assert (code, out) == (0, "guide is sound: 3 documents, 3 chunks\n")
    assert err.splitlines() == [
        "guide/glass.md: changed since it was indexed",
        "guide/plain.txt: no longer on disk",
        "To update it: localrag index PATH --kb guide",
    ]
    found = data(localrag("kb", "verify", "guide", "--json"))
    assert (found["sound"], found["changed"], found["missing"]) == (True, ["guide/glass.md"], ["guide/plain.txt"])


def test_a_damaged_one_hides_no_other_and_can_be_removed(localrag, refused, guide, home):
    shutil.copytree(home / "kb" / "guide", home / "kb" / "bad")
    (home / "kb" / "bad" / "kb.sqlite").write_bytes(b"no database" * 1000)
    code, out, err = localrag("kb", "list")
    assert code == 0
    head, bad, sound = (line.split() for line in out.splitlines())
    assert (head[:3], bad[0], bad[1:3], sound[:3]) == (["Name", "Documents", "Chunks"], "bad", ["11.0", "kB"], ["guide", "3", "3"])
    assert "localrag kb remove" in err
    bad, guide_row = data(localrag("kb", "list", "--json"))["knowledge_bases"]
    assert (bad["num_documents"], bad["error"]["type"]) == (None, "KnowledgeBaseError")
    assert guide_row.items() >= {"name": "guide", "num_documents": 3, "num_chunks": 3}.items()
    assert "not a knowledge base, or it is damaged" in refused(6, "kb", "verify", "bad")
    assert localrag("kb", "remove", "bad", "--yes") == (0, "", "Removed bad.\n")
    assert [row["name"] for row in data(localrag("kb", "list", "--json"))["knowledge_bases"]] == ["guide"]


def test_nothing_is_removed_without_a_yes(localrag, guide, monkeypatch, tmp_path):
    for answer in ("", "n\n"):
        (tmp_path / "answer").write_text(answer)
        with (tmp_path / "answer").open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            code, out, err = localrag("kb", "remove", "guide")
            assert (code, out) == (130, "")
            assert "Remove guide with 3 documents? [y/N]:" in err
            assert err.endswith("Error: Nothing was removed.\n  Use --yes to remove without confirmation.\n")
    (tmp_path / "answer").write_text("y\n")
    with (tmp_path / "answer").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert localrag("kb", "remove", "guide")[2].endswith("Removed guide.\n")
    assert localrag("kb", "list")[2].startswith("There are no knowledge bases yet.")
    assert guide.is_dir()


def test_one_is_exported_and_imported_under_another_name(localrag, refused, guide):
    assert data(localrag("kb", "export", "guide", "guide.kb", "--json"))["num_documents"] == 3
    assert localrag("kb", "export", "guide", "guide.kb")[2].startswith("Wrote guide to guide.kb: 3 documents, ")
    assert "There is a knowledge base 'guide' already" in refused(6, "kb", "import", "guide.kb")
    assert localrag("kb", "import", "guide.kb", "--name", "copy") == (0, "", "Imported copy: 3 documents, 3 chunks.\n")
    assert data(localrag("kb", "show", "copy", "--json"))["documents"] == data(localrag("kb", "show", "guide", "--json"))["documents"]
    localrag("kb", "remove", "guide", "--yes")
    assert data(localrag("kb", "import", "guide.kb", "--json")) == {"kb": "guide", "num_documents": 3, "num_chunks": 3}


def test_what_is_no_export_is_refused(refused, localrag, guide, tmp_path):
    localrag("kb", "export", "guide", "guide.kb")
    whole = (tmp_path / "guide.kb").read_bytes()
    (tmp_path / "cut.kb").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.kb").write_bytes(b"")
    for file in ("cut.kb", "empty.kb", "guide/plain.txt"):
        said = refused(6, "kb", "import", file, "--name", "new")
        assert f"{file} cannot be imported" in said
        assert "localrag kb export" in said
    assert "does not exist" in refused(2, "kb", "import", "none.kb")
    assert "is a directory" in refused(2, "kb", "import", "guide")
    assert "is not a valid name" in refused(6, "kb", "import", "guide.kb", "--name", "No!")
    assert "There is no folder none." in refused(2, "kb", "export", "guide", "none/guide.kb")
    assert "is a directory" in refused(2, "kb", "export", "guide", "guide")
    assert [row["name"] for row in data(localrag("kb", "list", "--json"))["knowledge_bases"]] == ["guide"]


def test_passages_are_marked_shown_and_forgotten(localrag, guide, monkeypatch):
    assert localrag("kb", "feedback", "guide")[2].startswith("There is no feedback yet")
    passages = data(localrag("kb", "feedback", "guide", "1", "[KB#2]", "--useful", "--json"))["passages"]
    assert [(each["id"], each["useful"], each["useless"]) for each in passages] == [("KB#1", 1, 0), ("KB#2", 1, 0)]
    _, out, _ = localrag("kb", "feedback", "guide", "KB#guide/2", "--useless")
    assert [line.split()[-3:] for line in out.splitlines()[1:]] == [["1", "0", "+2.0%"], ["1", "1", "+0.0%"]]
    monkeypatch.setenv("LOCALRAG_LEARN", "off")
    assert {each["weight"] for each in data(localrag("kb", "feedback", "guide", "--json"))["passages"]} == {0.0}
    assert localrag("kb", "feedback", "guide", "--reset") == (0, "", "Deleted all feedback on guide.\n")
    assert data(localrag("kb", "feedback", "guide", "--json")) == {"passages": []}


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["1"], 2, "--useful or --useless"),
        (["--useful"], 2, "The ID of a passage is missing"),
        (["1", "--reset"], 2, "--reset does not work with"),
        (["--reset", "--useful"], 2, "--reset does not work with"),
        (["x", "--useful"], 2, "KB#12 or 12"),
        (["١", "--useful"], 2, "KB#12 or 12"),
        (["KB#other/1", "--useful"], 2, "not a passage of guide"),
        (["KB#stdin/1", "--useful"], 2, "not a passage of guide"),
        (["1", "99", "--useful"], 6, "no passage 99"),
    ],
)
def test_feedback_on_what_is_no_passage_is_refused_and_marks_nothing(localrag, refused, guide, args, code, says):
    assert says in refused(code, "kb", "feedback", "guide", *args)
    assert data(localrag("kb", "feedback", "guide", "--json")) == {"passages": []}


# --- ask


@pytest.mark.parametrize("extra", [["--top-k", "fit"], ["--exhaustive"]])
def test_ask_keeps_to_where_and_takes_as_many_as_fit(localrag, guide, extra):
    args = ("ask", "Where is the kiln?", "--model", "echo", "--kb", "guide", "--json", *extra)
    answer = data(localrag(*args, "--where", "tag=price"))
    assert {each["source"] for each in answer["evidence"]} == {"guide/prices/sand.md"}
    assert answer["coverage"]["chunks_read"] == 1
    identities.check(answer, [each["id"] for each in answer["evidence"]])
    nothing = data(localrag(*args, "--where", "tag=none"))
    assert (nothing["evidence"], nothing["citations"]) == ([], [])


def test_passages_that_were_asked_for_take_what_is_spare(localrag, guide, tmp_path):
    """37 passages: too many for half of the window, not for the whole."""
    for number in range(37):
        text = f"Kiln {number} burns {number} kg of gas. " + f"Part {number} is hot. " * 3
        (tmp_path / "kilns").mkdir(exist_ok=True)
        (tmp_path / "kilns" / f"{number}.md").write_text(f"# Kiln {number}\n\n{text}\n")
    assert localrag("index", tmp_path / "kilns", "--kb", "kilns")[0] == 0
    args = ("budget", "Which kiln burns gas?", "--model", "echo", "--ctx", 5_500, "--kb", "kilns", "--json")
    for given in (["--top-k", "fit"], ["--top-k", "37"]):
        full = data(localrag(*args, *given))
        assert (len(full["evidence"]), full["coverage"]["chunks_in_kb"]) == (37, 37)
        assert full["usage"]["prompt_tokens"] > 5_500 / 2
        bounded = data(localrag(*args, *given, "--context-ratio", "0.5"))
        entry = next(each for each in bounded["ledger"]["entries"] if each["name"] == "evidence")
        assert len(bounded["evidence"]) < 37
        assert entry["used"] <= 5_500 / 2
    assert len(data(localrag(*args))["evidence"]) == 4


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--where", "junk"], "KEY=PATTERN"),
        (["--top-k", "0"], "--top-k"),
        (["--top-k", "fat"], "--top-k"),
        (["--exhaustive", "--dry-run"], "exclude each other"),
        (["--exhaustive", "--max-seconds", "0"], "--max-seconds"),
    ],
)
def test_ask_refuses_what_it_cannot_do(refused, guide, args, says):
    assert says in refused(2, "ask", "Where?", "--model", "echo", "--kb", "guide", *args)


def test_to_read_all_there_must_be_something_to_read(refused):
    assert "Name one with --kb" in refused(2, "ask", "Where?", "--model", "echo", "--exhaustive")


def listed(localrag, name="guide"):
    return [each["source"] for each in data(localrag("kb", "show", name, "--json"))["documents"]]


@pytest.mark.parametrize(
    ("documents", "gone"),
    [
        (["guide/glass.md"], ["guide/glass.md"]),
        (["guide/*.md"], ["guide/glass.md", "guide/prices/sand.md"]),
        (["GUIDE/prices"], ["guide/prices/sand.md"]),
        (["guide/prices/", "guide/plain.txt"], ["guide/plain.txt", "guide/prices/sand.md"]),
        (["./guide/../guide/plain.txt"], ["guide/plain.txt"]),
        (["."], ["guide/glass.md", "guide/plain.txt", "guide/prices/sand.md"]),
    ],
)
def test_documents_are_removed_by_path_folder_name_or_pattern(localrag, guide, documents, gone):
    """The copies in the current folder are indexed, so that they have paths there."""
    assert localrag("kb", "remove", "guide", "--yes")[0] == 0
    assert localrag("index", guide, "--kb", "guide")[0] == 0
    before = listed(localrag)
    found = data(localrag("kb", "remove", "guide", *documents, "--yes", "--json"))
    assert (found["kb"], found["removed"], found["num_documents"]) == ("guide", gone, len(before) - len(gone))
    assert listed(localrag) == [each for each in before if each not in gone]
    hits = data(localrag("search", "kiln", "--kb", "guide", "--mode", "keyword", "--json"))["hits"]
    assert not {hit["source"] for hit in hits} & set(gone)
    assert localrag("kb", "verify", "guide")[0] == 0
    assert localrag("index", guide, "--kb", "guide")[0] == 0  # as is said: they come back
    assert listed(localrag) == before


def test_if_one_of_the_documents_is_not_there_none_is_removed(localrag, refused, guide):
    before = listed(localrag)
    for document in ("guide/nothing.md", "glass.md", "", "guide/*.pdf"):
        said = refused(6 if document else 2, "kb", "remove", "guide", "guide/plain.txt", document, "--yes") if document else ""
        assert ("no document" in said) == bool(document)
        assert listed(localrag) == before


def test_documents_are_named_before_they_are_removed(localrag, guide, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"n\n")))
    code, out, err = localrag("kb", "remove", "guide", "guide/*.md")
    assert (code, out) == (130, "")
    assert err.startswith("  guide/glass.md\n  guide/prices/sand.md\nRemove 2 documents from guide? [y/N]: ")
    assert len(listed(localrag)) == 3
    _, _, err = localrag("kb", "remove", "guide", "guide/*.md", "--yes")
    assert err.startswith("Removed 2 documents from guide. It now has 1 document, 1 chunk.\n")


def test_a_knowledge_base_is_renamed_whole(localrag, refused, guide, home):
    before = data(localrag("kb", "show", "guide", "--json"))
    assert localrag("config", "set", "kb", "other", "guide")[0] == 0
    assert localrag("search", "kiln", "--kb", "guide")[0] == 0  # an index of vectors is there, and moves along
    assert data(localrag("kb", "rename", "guide", "manual", "--json")) == {"kb": "manual", "old": "guide"}
    assert data(localrag("kb", "show", "manual", "--json"))["documents"] == before["documents"]
    assert data(localrag("search", "kiln", "--kb", "manual", "--json"))["hits"]
    assert localrag("kb", "verify", "manual")[0] == 0
    assert localrag("config", "get", "kb")[1] == "other\nmanual\n"
    assert [path.name for path in (home / "kb").iterdir()] == ["manual"]
    assert "nearest" in json.loads(localrag("kb", "show", "guide", "--json")[1])["error"]
    assert localrag("index", guide / "plain.txt", "--kb", "second")[0] == 0
    assert "already" in refused(6, "kb", "rename", "second", "manual")
    assert "not a valid name" in refused(6, "kb", "rename", "second", "../second")
    assert listed(localrag, "second") == ["plain.txt"]
    (home / "kb" / "third").mkdir()
    (home / "kb" / "third" / "index.lock").touch()  # as an indexer leaves it that was stopped
    assert localrag("kb", "rename", "second", "third") == (0, "", "Renamed second to third.\n")
    assert listed(localrag, "third") == ["plain.txt"]


def test_sizes_and_ages_are_listed(localrag, guide, home):
    localrag("kb", "remove", "guide", "guide/plain.txt", "--yes")
    [row] = data(localrag("kb", "list", "--json"))["knowledge_bases"]
    assert row["size_bytes"] == sum(path.stat().st_size for path in (home / "kb" / "guide").iterdir())
    assert 0 <= time.time() - row["indexed_at"] < 60
    os.utime(home / "kb" / "guide" / "indexed", (0, time.time() - 3 * 86_400 - 60))
    assert re.search(r"guide +2 +2 +[\d.]+ kB +3 days ago", localrag("kb", "list")[1])
    (home / "kb" / "guide" / "indexed").unlink()  # of an earlier version
    assert (
        data(localrag("kb", "list", "--json"))["knowledge_bases"][0]["indexed_at"] == (home / "kb" / "guide" / "kb.sqlite").stat().st_mtime
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "just now"), (-5, "just now"), (61, "1 minute ago"), (7300, "2 hours ago"), (86_400, "1 day ago"), (4e7, "1 year ago")],
)
def test_ages(seconds, said):
    assert indexing.age(1e9 - seconds, 1e9) == said
    assert indexing.age(None, 1e9) == ""


@pytest.mark.parametrize(("seconds", "said"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (9000, "2.5 h")])
def test_times_left(seconds, said):
    assert indexing.duration(seconds) == said


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys):
    at = IndexProgress("b.md", 12, 60, 340)
    with indexing.IndexingBar("notes") as bar:
        bar(at)
    assert capsys.readouterr().err == "Indexing notes: reading and embedding\n"
    with indexing.IndexingBar("notes", again=True, every_s=0) as bar:
        bar(at)
    assert re.fullmatch(r"Indexing notes: 12 of 60 documents, 340 chunks, \d+/s, about \d+ s left\n", capsys.readouterr().err)
