"""`localrag eval` on collections small enough to check by hand."""

import json
import subprocess
import sys

import pytest

from localrag.kb import MODES

CORPUS = {"d1": "A kiln fires clay at high heat.", "d2": "A wheel turns and throws pots.", "d3": "Glaze is glass on a pot."}
QUERIES = {"q1": "kiln heat", "q2": "what is glaze", "q3": "never judged"}


@pytest.fixture
def pots(tmp_path, monkeypatch):
    """A collection of three documents, each of two questions with one of them judged relevant."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pots"
    folder.mkdir()
    write_rows(folder / "corpus.jsonl", [{"_id": one, "title": "", "text": text} for one, text in CORPUS.items()])
    write_rows(folder / "queries.jsonl", [{"_id": one, "text": text} for one, text in QUERIES.items()])
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td3\t1\n")
    return folder


def write_rows(file, rows):
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_help_says_what_is_read_and_what_is_kept(localrag):
    code, out, _ = localrag("eval", "--help")
    assert code == 0
    text = " ".join(out.split())
    assert all(word in text for word in ("corpus.jsonl", "queries.jsonl", "qrels.tsv", "kept in localrag's home", "--plot"))


def test_every_mode_is_a_row_with_its_measures(localrag, pots, home):
    code, out, err = localrag("eval", "pots")
    header, *rows = [line.split() for line in out.splitlines()]
    assert (code, header[:5]) == (0, ["Mode", "nDCG@10", "Recall@10", "Recall@100", "MRR"])
    assert [row[0] for row in rows] == list(MODES)
    assert rows[-1][:5] == ["keyword", "1.0000", "1.0000", "1.0000", "1.0000"]
    assert "Hybrid reaches" in err
    assert len(list((home / "eval").iterdir())) == 1


def test_json_is_one_object_with_the_sizes(localrag, pots):
    code, out, _ = localrag("eval", "pots/.", "--json", "--mode", "keyword")
    found = json.loads(out)
    assert code == 0
    assert [found[name] for name in ("collection", "num_documents", "num_chunks", "num_queries", "num_missing", "hybrid_gain")] == [
        "pots", 3, 3, 2, 0, None,
    ]  # fmt: skip
    [result] = found["results"]
    assert (result["mode"], result["nDCG@10"], result["R@10"], result["RR"]) == ("keyword", 1.0, 1.0, 1.0)
    assert json.loads(localrag("eval", "pots", "--json", "--mode", "keyword", "--queries", "1")[1])["num_queries"] == 1


def test_the_best_are_read_again_by_a_model(localrag, pots):
    results = json.loads(localrag("eval", "pots", "--mode", "keyword", "--rerank", "llm", "--model", "echo", "--json")[1])["results"]
    assert [result["mode"] for result in results] == ["keyword", "hybrid + rerank"]


def test_judged_documents_that_are_missing_are_counted(localrag, pots):
    (pots / "qrels.tsv").write_text("q1\td1\t1\nq1\tgone\t1\nq2\talso-gone\t1\nq2\td2\t0\n")
    code, out, err = localrag("eval", "pots", "--mode", "keyword")
    assert code == 0
    assert out.splitlines()[1].split()[2] == "0.2500"  # one of two, and none of one
    assert "2 relevant documents missing from corpus.jsonl" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["none"], "'none' does not exist"),
        (["pots/corpus.jsonl"], "is a file"),
        (["."], "There is no queries.jsonl"),
        (["pots", "--queries", "0"], "--queries"),
        (["pots", "--mode", "fuzzy"], "--mode"),
        (["pots", "--plot", "pots.svg"], "FILE.png"),
        (["pots", "--plot", "none/pots.png"], "There is no folder none."),
        (["pots", "--model", "echo"], "--rerank llm"),
    ],
)
def test_bad_input_is_refused_before_any_work(refused, pots, home, args, says):
    assert says in refused(2, "eval", *args)
    assert not (home / "eval").exists()


@pytest.mark.parametrize(("package", "args"), [("ir_measures", []), ("matplotlib", ["--plot", "pots.png"])])
def test_without_the_extra_the_way_out_is_said_before_any_work(pots, home, package, args):
    code = f"import sys; sys.modules[{package!r}] = None; from localrag.cli import main; sys.exit(main({['eval', 'pots', *args]!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=pots.parent, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"Error: The evaluation needs the package {package}.\n  pip install 'localrag[eval]'\n"
    assert not (home / "eval").exists()


def test_a_reranker_that_is_not_there_is_named(refused, pots, home):
    assert "No reranker is named 'none'" in refused(4, "eval", "pots", "--rerank", "none")
    assert not (home / "eval").exists()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("corpus.jsonl", "", "has no document with text"),
        ("corpus.jsonl", '{"_id": 3}\n', 'Line 1 of corpus.jsonl cannot be used: it is not an object with a string as "_id"'),
        ("corpus.jsonl", '{"_id": "d1", "text": "a"}\n{"_id": "d1", "text": "b"}\n', "Line 2 of corpus.jsonl cannot be used: its _id 'd1'"),
        ("corpus.jsonl", "{junk\n", "Line 1 of corpus.jsonl cannot be used: it is not JSON"),
        ("queries.jsonl", "", "names no relevant document for any question"),
        ("qrels.tsv", "q1\td1\t1\njunk\n", "Line 2 of qrels.tsv"),
    ],
)
def test_a_broken_collection_is_refused_by_file_and_line(localrag, refused, pots, file, content, says):
    (pots / file).write_text(content)
    assert says in refused(2, "eval", "pots", "--mode", "keyword")
    code, out, _ = localrag("eval", "pots", "--mode", "keyword", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (2, "UsageError")
