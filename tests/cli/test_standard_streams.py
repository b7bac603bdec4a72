"""Standard input and output: when a pipe is evidence, and `-` wherever a file is taken."""

import json
import os
import socket
import subprocess
import sys

import pytest

from localrag.journal import Journal
from localrag.question import Question

LOCALRAG = [sys.executable, "-m", "localrag"]


@pytest.fixture
def run(home, tiny_catalogue, monkeypatch):
    """Runs localrag as a process of its own, with the tiny embedder."""
    monkeypatch.setenv("LOCALRAG_MODELS", str(tiny_catalogue))

    def _run(*args, code=0, text=True, **options):
        done = subprocess.run([*LOCALRAG, *map(str, args)], capture_output=True, text=text, timeout=120, check=False, **options)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in str(done.stderr)
        return done

    return _run


def test_a_loop_over_a_file_asks_every_question(home, tmp_path):
    (tmp_path / "questions").write_text("One?\nTwo?\nThree?\n")
    loop = f'while read q; do {sys.executable} -m localrag ask "$q" --model echo --no-keep; done < questions'
    done = subprocess.run(["bash", "-c", loop], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "You asked: One?\nYou asked: Two?\nYou asked: Three?\n"
    assert done.stderr.count("Standard input is a file and was not read") == 2  # the third ask is at its end


def test_a_pipe_is_evidence_and_the_answer_says_how_much_was_read(run):
    done = run("ask", "What failed?", "--model", "echo", input="disk full: é\n")
    assert "[KB#stdin/1]" in done.stdout
    assert "Read 14 bytes from standard input as evidence" in done.stderr
    said = json.loads(run("ask", "What failed?", "--model", "echo", "--json", input="disk full: é\n").stdout)
    assert (said["stdin_bytes"], said["evidence"][0]["source"]) == (14, "standard input")
    assert json.loads(run("ask", "What?", "--model", "echo", "--json", stdin=subprocess.DEVNULL).stdout)["stdin_bytes"] == 0
    assert "standard input" not in run("ask", "What?", "--model", "echo", input="").stderr


def test_a_file_is_evidence_only_where_a_dash_asks_for_it(run, tmp_path):
    (tmp_path / "log").write_text("disk full\n")
    for args, num_bytes in ((["What failed?"], 0), (["What failed?", "-"], 10)):
        with (tmp_path / "log").open() as log:
            done = run("ask", *args, "--model", "echo", "--json", stdin=log)
        assert json.loads(done.stdout)["stdin_bytes"] == num_bytes
        assert ("was not read" in done.stderr) == (num_bytes == 0)
    with (tmp_path / "log").open() as log:
        events = [json.loads(line) for line in run("council", "Why?", "-", "--model", "echo", "--json", stdin=log).stdout.splitlines()]
    assert any(hit["source"] == "standard input" for event in events for hit in event.get("evidence", ()))


def test_a_socket_is_left_alone(run):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"disk full\n")
        done = run("ask", "What failed?", "--model", "echo", "--json", stdin=theirs)  # it would wait for the other end to close
        assert json.loads(done.stdout)["stdin_bytes"] == 0


@pytest.mark.parametrize(
    "args",
    [
        ["ask", "-", "-"],
        ["ask", "-", "--system", "-"],
        ["ask", "Why?", "-", "--attach", "-"],
        ["ask", "--batch", "-", "--out", "-", "--system", "-"],
        ["score", "-", "--task", "-"],
    ],
)
def test_standard_input_is_read_by_one(run, args):
    assert (
        "standard input can be read only once" in run(*args, *(["--model", "echo"] if args[0] == "ask" else []), input="x", code=2).stderr
    )


def test_a_batch_reads_and_writes_standard_streams(run):
    lines = '{"id": 1, "question": "One?"}\nnot json\n{"id": "b", "question": "Two?"}\n'
    done = run("ask", "--batch", "-", "--out", "-", "--model", "echo", input=lines, code=2)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["id"]: row.get("answer") for row in rows} == {1: "You asked: One?", None: None, "b": "You asked: Two?"}
    assert "Answered 2 of 3 questions" in done.stderr
    assert "go on" not in done.stderr
    assert "--force" in run("ask", "--batch", "-", "--out", "-", "--force", "--model", "echo", input=lines, code=2).stderr


def test_other_keys_of_a_batch_are_copied_to_the_answers(run, tmp_path):
    rows = [
        {"id": 1, "question": "One?", "topic": {"deep": [1, None]}, "answer": "gold", "usage": 3, "id2": "x", "Ünïcode": "é"},
        {"id": 2, "question": 5, "topic": "kept beside the error", "error": "mine", "sytem": "slip"},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("ask", "--batch", source, "--out", out, "--model", "echo", code=2)
    found = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert (found[1]["answer"], found[1]["usage"]["completion_tokens"]) == ("You asked: One?", 16)
    assert {key: found[1][key] for key in ("topic", "id2", "Ünïcode")} == {"topic": {"deep": [1, None]}, "id2": "x", "Ünïcode": "é"}
    assert found[1]["input"] == {"answer": "gold", "usage": 3}
    assert (found[2]["topic"], found[2]["input"], found[2]["error"]["type"]) == ("kept beside the error", {"error": "mine"}, "UsageError")
    assert "'sytem' is not a known key, so it is only copied to the answer. Did you mean 'system'?" in done.stderr
    source.write_text(json.dumps(rows[0]) + "\n")
    assert "already has every answer" in run("ask", "--batch", source, "--out", out, "--force", "--model", "echo").stderr


def test_a_file_or_a_dash(run, home, tmp_path):
    """Every other place of the command line that takes a file."""
    assert json.loads(run("score", "-", "--task", "disk", "--method", "keyword", "--json", input="the disk").stdout)["files"]
    assert "standard input" in run("summarize", "-", "--no-model", "--model", "echo", "--json", input="The disk is full. Buy one.").stdout
    asked = json.loads(run("ask", "Why?", "--attach", "-", "--model", "echo", "--json", input="the disk").stdout)
    assert next(entry for entry in asked["ledger"]["entries"] if entry["name"] == "attachments")["used"]
    assert asked["stdin_bytes"] == 0  # an attachment is not evidence
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert run("ask", "Why?", "--chat-template", "-", "--model", "echo", input=template).stdout
    assert "<html" in run("report", "--html", "-").stdout
    refused = run("report", "--html", "-", "--json", code=2)
    assert "both write to standard output" in refused.stderr + refused.stdout
    run("chat", "--session", "garden", "--model", "echo", input="Why?\n")
    assert run("chat", "--session", "garden", "--export", "-").stdout.startswith("# garden\n")
    assert not (tmp_path / "-").exists()
    (tmp_path / "note.md").write_text("# Zebra\n\nA zebra has stripes.\n")
    run("index", tmp_path / "note.md", "--kb", "zoo")
    exported = run("kb", "export", "zoo", "-", text=False).stdout
    assert "zebras" in run("kb", "import", "-", "--name", "zebras", text=False, input=exported).stderr.decode()
    assert "stripes" in run("search", "zebra", "--kb", "zebras", "--mode", "keyword").stdout
    assert "a file" in run("eval", "--qa", tmp_path / "note.md", "--out", "-", code=2).stderr
    assert not os.path.lexists("-")


def test_a_chat_that_keeps_nothing_keeps_no_vote(run, tmp_path, home):
    (tmp_path / "note.md").write_text("# Zebra\n\nA zebra has stripes.\n")
    run("index", tmp_path / "note.md", "--kb", "zoo")
    said = run("chat", "--kb", "zoo", "--model", "echo", "--no-keep", input="What has a zebra?\n/good\n/remember I like zebras.\n", code=2)
    assert "Passages cannot be marked with --no-keep." in said.stderr
    assert "until this chat ends" in said.stderr
    assert json.loads(run("kb", "feedback", "zoo", "--json").stdout)["passages"] == []
    if (home / "journal.sqlite").exists():
        with Journal.open(home) as journal:
            assert journal.memories.all() == []
    run("chat", "--kb", "zoo", "--model", "echo", input="What has a zebra?\n/good\n")
    assert json.loads(run("kb", "feedback", "zoo", "--json").stdout)["passages"] != []


def test_half_a_character_that_is_piped_in_is_a_question_mark():
    from localrag.session import Session  # noqa: PLC0415  # the other tests need processes only

    with Session.open("echo", keep=False) as session:
        answer = session.ask(Question.of("What failed?", piped="disk \ud800 full \udcff"))
    assert answer.hits[0].chunk.text == "disk ? full ?"
