"""ask --batch as people and scripts meet it: bad lines, interruptions at any moment, files that are something else."""

import json
import os
import random
import subprocess
import sys

import pytest

from localrag.cli import main
from localrag.files import lock_open_file
from localrag.journal import Journal
from localrag.settings import MAX_TEXT_BYTES
from tests import identities
from tests.cli.interruptions import kill_again_and_again, press_ctrl_c

KILLS = 5


@pytest.fixture
def source(tmp_path):
    """Writes IN: rows as JSON, texts and bytes as they are."""

    def _write(*rows):
        lines = [row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode() for row in rows]
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return _write


@pytest.fixture
def run(home, tmp_path, capsys):
    """Runs a batch in this process; returns (exit code, rows of OUT, stderr). Nothing goes to stdout."""

    def _run(*args):
        code = main(["ask", "--model", "echo", "--batch", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"), *args])
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        path = tmp_path / "out.jsonl"
        return code, rows(path) if path.exists() else None, err

    return _run


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def questions(count):
    return [{"id": n, "question": f"What is {n}?"} for n in range(count)]


def test_every_question_is_answered_with_a_whole_answer_object(run, source, home):
    source({"id": "a", "question": "Why?", "max_tokens": 5, "system": "Be brief."}, "", "  \r", {"id": 7, "question": "How?", "seed": 3})
    code, found, err = run("--session", "night")
    assert code == 0
    assert {row["id"]: row["answer"] for row in found} == {"a": "You a", 7: "You asked: How?"}
    assert "Answered 2 of 2 questions" in err
    for row in found:
        identities.check(row, [])
    assert [entry["name"] for entry in found[0]["ledger"]["entries"]][:2] in (["template", "system"], ["template", "question"])
    with Journal.open(home) as journal:
        assert sorted(ask.question for ask in journal.asks("night")) == ["How?", "Why?"]


@pytest.mark.parametrize(
    ("line", "known", "says"),
    [
        (b"not json", None, "not JSON"),
        (b'{"id": 1, "question": "x"', None, "not JSON"),
        (b"[1]", None, "not a JSON object"),
        (b'"text"', None, "not a JSON object"),
        (b'{"id": 1, "question": "\xff"}', None, "not UTF-8"),
        (b"[" * 100_000, None, "not JSON"),
        (b'{"id": 1, "id": 2, "question": "x"}', None, "a key is repeated"),
        (b'{"id": ' + b"9" * 5000 + b', "question": "x"}', None, "not JSON"),
        ({"question": "x"}, None, "id is missing"),
        ({"id": None, "question": "x"}, None, "id must be a string or an integer"),
        ({"id": True, "question": "x"}, None, "id must be a string or an integer"),
        ({"id": 1.5, "question": "x"}, None, "id must be a string or an integer"),
        ({"id": "", "question": "x"}, None, "1 to 1000"),
        ({"id": "x" * 1001, "question": "x"}, None, "1 to 1000"),
        ({"id": 2**63, "question": "x"}, None, "63 bits"),
        ({"id": 5}, 5, "question is missing"),
        ({"id": 5, "question": ["x"]}, 5, "question must be a string"),
        ({"id": 5, "question": "x", "system": 1}, 5, "system must be a string"),
        ({"id": 5, "question": "x", "max_tokens": "9"}, 5, "max_tokens must be an integer"),
        ({"id": 5, "question": "x", "max_tokens": True}, 5, "max_tokens must be an integer"),
        ({"id": 5, "question": "x", "max_tokens": 0}, 5, "max_tokens is 0"),
        ({"id": 5, "question": "x", "seed": -1}, 5, "seed is -1"),
        ({"id": 5, "question": "x", "temperature": 101}, 5, "temperature is 101"),
        (b'{"id": 5, "question": "x", "temperature": NaN}', None, "not JSON"),
        (b'{"id": 5, "question": "x", "temperature": 1e999}', 5, "temperature is inf"),
        ({"id": 5, "question": "x", "top_k": 0}, 5, "top_k is 0"),
        ({"id": 5, "question": "x", "context_ratio": 1.1}, 5, "context_ratio is 1.1"),
        ({"id": 5, "question": "  "}, 5, "empty"),
        ({"id": "good", "question": "x"}, "good", "an earlier line has the same id"),
        (b'{"id": 5, "question": "' + b"x" * MAX_TEXT_BYTES + b'"}', None, "16 MiB"),
    ],
)
def test_a_bad_line_is_one_error_and_the_others_are_answered(run, source, line, known, says):
    source({"id": "good", "question": "Why?"}, line, {"id": "last", "question": "How?"})
    code, found, err = run()
    assert code == 2
    assert sorted(row["id"] for row in found if "answer" in row) == ["good", "last"]
    [bad] = [row for row in found if "error" in row]
    assert (bad["id"], bad["line"], says in bad["error"]["message"]) == (known, 2, True), bad
    assert says in err
    again, unchanged, _ = run()  # errors are asked again, and are not there twice
    assert again == 2
    assert sorted(map(json.dumps, unchanged)) == sorted(map(json.dumps, found))


def test_what_does_not_fit_is_an_error_of_its_line_and_the_first_one_is_the_exit_code(run, source):
    source({"id": 1, "question": "x" * 400}, {"id": 2, "question": "Why?"})
    code, found, _ = run("--ctx", "256")
    assert code == 5
    by_id = {row["id"]: row for row in found}
    assert by_id[1]["error"]["sections"]["question"] == 400
    assert by_id[2]["answer"] == "You asked: Why?"
    code, found, err = run()  # with a larger window it does
    assert (code, [row["id"] for row in found]) == (0, [2, 1])
    assert "1 of 2 questions are already answered" in err


def test_a_window_that_is_capped_and_an_answer_that_is_lowered_are_told_in_each_line(run, source):
    source({"id": 1, "question": "Why?", "max_tokens": 500_000})
    code, [row], _ = run("--ctx", "1000000")
    assert code == 0
    window, answer = row["warnings"]
    assert "131,072 of the 1,000,000 tokens asked for" in window
    assert "of the 500,000 tokens asked for" in answer


def test_half_characters_and_a_byte_order_mark_pass(run, source):
    source(b'\xef\xbb\xbf{"id": "\\ud800", "question": "Why \\ud800?"}', {"id": "1", "question": "é"}, {"id": 1, "question": "a\u2028b"})
    code, found, _ = run()
    assert code == 0
    assert {row["id"] for row in found} == {"\ud800", "1", 1}
    assert run()[1] == found


def test_wherever_the_last_line_was_cut_the_batch_goes_on(run, source, tmp_path):
    source(*questions(4))
    out, rng = tmp_path / "out.jsonl", random.Random(3)
    whole = {row["id"]: row["answer"] for row in run()[1]}
    for _ in range(25):
        data = out.read_bytes()
        out.write_bytes(data[: rng.choice([rng.randrange(len(data)), len(data) - 1, data.find(b"\n") + rng.randint(0, 12)])])
        before = out.read_bytes()
        code, found, _ = run("--no-keep")
        assert code == 0
        assert sorted(row["id"] for row in found) == [0, 1, 2, 3]
        assert {row["id"]: row["answer"] for row in found} == whole
        assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1])  # what was whole stays as it was


def test_a_batch_that_is_killed_again_and_again_loses_and_repeats_nothing(home, source, tmp_path):
    out = tmp_path / "out.jsonl"
    wanted = [{"id": n, "question": f"What is {n}?"} for n in range(60)]
    wanted.insert(20, {"id": "bad"})  # makes every run write OUT anew
    path = source(*wanted)
    command = [sys.executable, "-m", "localrag", "ask", "--model", "echo", "--no-keep", "--batch", str(path), "--out", str(out)]
    num_kills, _ = kill_again_and_again(command, out, num_kills=KILLS, done_with=2, num_tries=100)
    assert num_kills > KILLS // 2
    found = rows(out)
    assert sorted(row["id"] for row in found if "answer" in row) == list(range(60))
    assert [row["id"] for row in found if "error" in row] == ["bad"]
    assert all(row["answer"] == f"You asked: What is {row['id']}?" for row in found if "answer" in row)


def test_a_second_batch_on_the_same_file_is_refused(run, source, tmp_path):
    source(*questions(2))
    out = tmp_path / "out.jsonl"
    with out.open("ab") as held:
        assert lock_open_file(held.fileno())
        child = [sys.executable, "-m", "localrag", "ask", "--model", "echo", "--batch", str(tmp_path / "in.jsonl"), "--out", str(out)]
        done = subprocess.run(child, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Another batch is writing" in done.stderr
    assert run()[0] == 0


def test_answers_to_other_questions_are_not_taken_for_these(run, source):
    source(*questions(5))
    first = run()[1]
    source(*questions(3), {"id": 3, "question": "Something else?"}, {"id": "new", "question": "What?"})
    code, found, err = run()
    assert (code, found) == (2, first)
    assert "--force" in err
    assert run("--force")[0] == 0
    code, found, _ = run("--force")
    assert code == 0
    assert {row["id"]: row["answer"] for row in found} == {
        **{n: f"You asked: What is {n}?" for n in (0, 1, 2, 4)},
        3: "You asked: Something else?",
        "new": "You asked: What?",
    }
    assert len(found) == 6


@pytest.mark.parametrize(
    "held",
    [
        b"# My notes\n\nkeep them\n",
        b"no end of line",
        b'{"id":1,"question":"the questions themselves"}',
        b'{"id":1,"question":"the questions themselves"}\n',
        b'{"id":true,"request":"x","answer":"y"}\n',
        b"\x00" * 100,
        b'{"id":0,"line":1,"error":{}}\n[]\n',
    ],
)
def test_a_file_of_something_else_is_left_alone(run, source, tmp_path, held):
    source(*questions(1))
    (tmp_path / "out.jsonl").write_bytes(held)
    for force in ((), ("--force",)):
        assert main(["ask", "--batch", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"), "--model", "echo", *force]) == 2
        assert (tmp_path / "out.jsonl").read_bytes() == held


def test_a_line_longer_than_any_of_ours_is_left_alone(home, source, tmp_path):
    out, num_bytes = tmp_path / "out.jsonl", 65 * 1024 * 1024
    with out.open("wb") as file:
        file.write(b'{"id":1,"note":"')
        file.truncate(num_bytes)
    assert main(["ask", "--batch", str(source(*questions(1))), "--out", str(out), "--model", "echo"]) == 2
    assert out.stat().st_size == num_bytes


def test_out_keeps_its_permissions_and_may_be_a_link(run, source, tmp_path):
    source({"id": "bad"}, *questions(2))
    (tmp_path / "real.jsonl").touch(0o600)
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "real.jsonl")
    run()
    (tmp_path / "real.jsonl.new").write_text("what a killed run left behind")
    assert run()[0] == 2
    assert (tmp_path / "out.jsonl").is_symlink()
    assert (tmp_path / "real.jsonl").stat().st_mode & 0o777 == 0o600
    assert len(rows(tmp_path / "real.jsonl")) == 3
    assert not (tmp_path / "real.jsonl.new").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["Why?", "--batch", "IN", "--out", "OUT"], "exclude each other"),
        (["--batch", "IN"], "--out"),
        (["Why?", "--out", "OUT"], "--batch"),
        (["Why?", "--force"], "--batch"),
        (["--batch", "IN", "--out", "OUT", "--dry-run"], "--dry-run"),
        (["--batch", "IN", "--out", "OUT", "--explain=full"], "--explain"),
        (["--batch", "IN", "--out", "OUT", "--max-seconds", "0"], "--max-seconds"),
        (["--batch", "IN", "--out", "IN"], "same file"),
        (["--batch", "IN", "--out", "none/OUT"], "cannot be written"),
        (["--batch", "IN", "--out", "."], "cannot be written"),
        (["--batch", "IN", "--out", os.devnull], "not a regular file"),
        (["--batch", "none", "--out", "OUT"], "No such file"),
        (["--batch", ".", "--out", "OUT"], "not a file"),
    ],
)
def test_what_does_not_go_together_is_one_line(home, source, tmp_path, monkeypatch, capsys, args, says):
    source(*questions(1)).rename(tmp_path / "IN")
    monkeypatch.chdir(tmp_path)
    code = main(["ask", "--model", "echo", *args])
    out, err = capsys.readouterr()
    assert (code, out, says in err, len(err.splitlines()) <= 2) == (2, "", True, True), err
    assert not (tmp_path / "OUT").exists() or "--out" not in args
    assert json.loads((tmp_path / "IN").read_text()) == questions(1)[0]


def test_json_has_no_meaning_with_a_batch(home, source, tmp_path, capsys):
    assert main(["ask", "--batch", str(source(*questions(1))), "--out", str(tmp_path / "out.jsonl"), "--model", "echo", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UsageError"


def test_progress_is_a_line_for_each_tenth(run, source):
    source(*questions(50))
    _, _, err = run("--no-keep")
    told = [line for line in err.splitlines() if " done, " in line]
    assert [int(line.split()[0]) for line in told] == list(range(5, 51, 5))
    assert all("tokens/s, about" in line for line in told)
    assert "\x1b" not in err
    source(*questions(50))
    code, _, err = run()
    assert (code, err.count("\n")) == (0, 1)
    assert "Nothing to do" in err


@pytest.mark.skipif(sys.platform == "win32", reason="terminals are opened otherwise there")
def test_progress_is_a_bar_on_a_terminal(home, source, tmp_path):
    import pty  # noqa: PLC0415  # not everywhere

    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "localrag",
        "ask",
        "--batch",
        source(*questions(20)),
        "--out",
        tmp_path / "out.jsonl",
        "--model",
        "echo",
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        drawn = b""
        try:
            while piece := os.read(ours, 65536):
                drawn += piece
        except OSError:  # the other end was closed
            pass
        assert (process.wait(), process.stdout.read()) == (0, b"")
    os.close(ours)
    assert b"20/20" in drawn
    assert b"tokens/s" in drawn


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(home, source, tmp_path):
    path, out = source(*questions(2000)), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "localrag", "ask", "--model", "echo", "--batch", path, "--out", out, "--no-keep"]
    code, stdout, err = press_ctrl_c(command, out)
    assert (code, stdout) == (130, ""), err
    found = rows(out)
    assert err.splitlines()[-1] == f"Interrupted: {2000 - len(found)} of 2000 questions are left. Run the same command to continue."
    assert 0 < len(found) < 2000
    assert all(row["answer"] == f"You asked: What is {row['id']}?" for row in found)
