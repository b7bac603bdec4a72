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
        (["pots", "--out", "-"], "--out needs a file"),
        (["pots", "--compare", "pots/qrels.tsv", "pots/qrels.tsv"], "DIR does not work with --compare"),
        (["--compare", "pots/qrels.tsv", "pots/qrels.tsv"], "was not written by an evaluation"),
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


def test_a_corpus_that_was_a_link_to_that_of_the_folder_above(localrag, refused, pots):
    (pots / "last").mkdir()
    for name in ("queries.jsonl", "qrels.tsv"):
        (pots / "last" / name).write_bytes((pots / name).read_bytes())
    (pots / "last" / "corpus.jsonl").write_text("../corpus.jsonl\n")
    found = json.loads(localrag("eval", "pots/last", "--mode", "keyword", "--json")[1])
    assert (found["num_documents"], found["results"][0]["RR"]) == (3, 1.0)
    (pots / "last" / "corpus.jsonl").write_text("../../secret.jsonl")
    assert "Line 1 of corpus.jsonl cannot be used: it is not JSON" in refused(2, "eval", "pots/last")
    (pots / "corpus.jsonl").write_text("../corpus.jsonl")
    assert "only names ../corpus.jsonl, which does not exist" in refused(2, "eval", "pots")


@pytest.fixture
def talks(pots):
    """The same documents with three conversations, one of which has no answer."""
    (pots / "queries.jsonl").unlink()
    (pots / "qrels.tsv").unlink()
    kiln = [{"role": "user", "content": "What does a kiln fire?"}, {"role": "assistant", "content": "Clay."}]
    rows = [
        {"id": "first", "messages": kiln[:1], "relevant": ["d1"], "collection": "fire"},
        {
            "id": "then",
            "messages": [*kiln, {"role": "user", "content": "What is glaze on a pot?"}],
            "relevant": ["d3"],
            "collection": "glass",
        },
        {"id": "none", "messages": [*kiln, {"role": "user", "content": "Who invented it?"}], "answerability": "unanswerable"},
        {"id": "unclear", "messages": [{"role": "user", "content": "What?"}], "answerability": "underspecified"},
    ]
    write_rows(pots / "conversations.jsonl", rows)
    return pots


def test_conversations_are_searched_after_the_turns_before(localrag, talks, tmp_path):
    code, out, err = localrag("eval", "pots", "--json", "--out", "runs.jsonl")
    found = json.loads(out)
    assert code == 0, err
    assert (found["num_queries"], [each["mode"] for each in found["results"]]) == (2, ["conversation", *MODES])
    ours = found["results"][0]
    assert (ours["nDCG@10"], ours["first"]["num_queries"], ours["follow_ups"]["R@5"], list(ours["subcollections"])) == (
        1.0, 1, 1.0, ["fire", "glass"],
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(line["id"], line["way"]) for line in lines[:2]] == [("first", "conversation"), ("then", "conversation")]
    compared = json.loads(localrag("eval", "--compare", "runs.jsonl", "runs.jsonl", "--json")[1])["compared"]
    assert [(each["way_a"], each["tests"][0]["p_value"]) for each in compared][:1] == [("conversation", 1.0)]
    code, out, _ = localrag("eval", "--compare", "runs.jsonl", "runs.jsonl")
    assert (code, out.splitlines()[1].split()[:2]) == (0, ["Measure", "Pairs"])
    assert "holds the measures of another run" in localrag("eval", "pots", "--out", "runs.jsonl")[2]
    code, out, err = localrag("eval", "pots", "--mode", "keyword")
    assert out.split()[:5] == ["Search", "nDCG@10", "first", "questions", "follow-ups"]
    assert "1 first question, 1 follow-up. " in err


def test_answers_in_conversations_are_from_the_corpus_beside_them(localrag, refused, talks, tmp_path):
    asked = ("eval", "--qa", "pots/conversations.jsonl", "--model", "echo")
    code, out, err = localrag(*asked, "--json", "--out", "answers.jsonl")
    found = json.loads(out)
    assert code == 0, err
    [way] = found["ways"]
    assert (found["kbs"], found["num_sources_not_found"], way["num_questions"]) == (["pots"], 0, 3)
    assert (way["in_evidence"]["of"], way["is_right"]["of"], way["is_refused"]["of"]) == (2, 0, 1)
    assert way["in_evidence"]["num"] == 2
    assert way["mean_prompt_tokens"] > way["mean_evidence_tokens"] > 0
    assert "1 conversation not asked: neither answerable nor unanswerable." in err
    assert "A council cannot be asked in a conversation." in refused(2, *asked, "--council", "default")
    (talks / "corpus.jsonl").unlink()
    assert "--qa needs a knowledge base." in refused(2, *asked)
