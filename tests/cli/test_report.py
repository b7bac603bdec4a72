"""localrag report: figures for a person, JSON for a script, a page for a browser."""

import json
import os

import click
import pytest

from localrag.cli.report import report_command
from localrag.errors import ConfigError, UsageError
from localrag.journal import FILE_NAME, Journal
from localrag.report.page import MARK
from tests.journal.asks import made_up, passage
from tests.journal.real_asks import real_asks


@pytest.fixture
def run(home, capsys):
    """Runs the command in this process; returns (stdout, stderr)."""

    def _run(*args):
        report_command.main([str(arg) for arg in args], standalone_mode=False)
        return capsys.readouterr()

    return _run


@pytest.fixture
def filled(home):
    """A home with two sessions of three asks each."""
    with Journal.open(home) as journal:
        for number in range(6):
            journal.record(made_up(number=number, session=("work", "garden")[number % 2], evidence=[passage(1), passage(2, cited=True)]))
    return home


def test_an_empty_journal_is_one_line_and_makes_nothing(run, home, tmp_path):
    out, err = run()
    assert (out, err) == ("", "The journal is empty. Each question that you ask is recorded there.\n")
    assert not home.exists()
    run("--html", tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    assert json.loads(run("--json").out)["num_asks"] == 0


def test_real_asks_as_tables(run, home, tmp_path):
    with Journal.open(home) as journal:
        for each in real_asks(tmp_path, 8, sessions=("work", "garden")):
            journal.record(each)
    out, err = run()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split() == ["Session", "Asks", "In", "Out", "Utilization", "Lowest", "Highest", "Efficiency", "Trend"]
    assert [line.split()[:2] for line in lines[1:3]] == [["work", "4"], ["garden", "4"]]
    titles = ["Cut most often", "Left out most often", "Retrieved often, never cited"]
    assert [line for line in lines if line in titles] == titles
    assert any(line.startswith("evidence") for line in lines)


def test_figures_by_hand(run, filled):
    out, _ = run()
    lines = [line.split() for line in out.splitlines()]
    assert ["work", "3", "300", "150", "15%", "15%", "15%", "50%", "▂▂▂", "15%", "to", "15%"] in lines
    assert ["answer", "6", "72", "0", "0"] in lines
    assert ["KB#1", "6", "6", "600", "notes/a.md", "notes"] in lines
    assert "Left out most often\n  nothing\n" in out


def test_one_session_and_the_newest(run, filled):
    data = json.loads(run("--session", "garden", "--last", 2, "--json").out)
    assert [ask["question"] for ask in data["asks"]] == ["Question 3?", "Question 5?"]
    assert [each["name"] for each in data["sessions"]] == ["garden"]
    assert data["asks"][0]["ledger"] == made_up().ledger.to_dict()
    assert json.loads(run("--last", 1, "--json").out)["asks"][0]["question"] == "Question 5?"


def test_an_unknown_session_is_refused_with_what_is_near(run, filled, home):
    with pytest.raises(UsageError, match="no session 'gardne'") as caught:
        run("--session", "gardne")
    assert "garden" in caught.value.hint
    assert caught.value.exit_code == 2
    (home / FILE_NAME).unlink()
    with pytest.raises(UsageError, match="no session 'work'"):
        run("--session", "work")


def test_a_page_is_written_whole_and_again(run, filled, tmp_path):
    path = tmp_path / "out" / "report.html"
    path.parent.mkdir()
    out, err = run("--html", path)
    assert (out, err) == ("", f"Wrote {path}\n")
    first = path.read_text(encoding="utf-8")
    assert MARK in first
    assert first.endswith("</html>\n")
    run("--html", path, "--last", 1)
    assert 0 < path.stat().st_size < len(first)
    assert list(path.parent.iterdir()) == [path]


def test_a_page_and_json_at_once(run, filled, tmp_path):
    out, err = run("--html", tmp_path / "r.html", "--json")
    assert json.loads(out)["num_asks"] == 6
    assert err == f"Wrote {tmp_path / 'r.html'}\n"


@pytest.mark.parametrize("content", [b"", b"my notes", b"<html><body>" + b" " * 600 + MARK.encode(), b"\xff\x00"])
def test_a_file_that_is_no_report_is_left_alone_unless_forced(run, filled, tmp_path, content):
    path = tmp_path / "notes.html"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is not a localrag report") as caught:
        run("--html", path)
    assert "--force" in caught.value.hint
    assert path.read_bytes() == content
    run("--html", path, "--force")
    assert MARK in path.read_text(encoding="utf-8")


def test_places_where_no_page_can_be_written(run, filled, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place, message in ((tmp_path, "is not a file"), (tmp_path / "pipe", "is not a file"),
                           (tmp_path / "loop", "is a broken link"), (tmp_path / "none" / "r.html", "There is no folder")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            run("--html", place, "--force")


def test_a_link_is_followed(run, filled, tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "real" / "r.html")
    run("--html", link)
    assert link.is_symlink()
    assert MARK in (tmp_path / "real" / "r.html").read_text(encoding="utf-8")


def test_hostile_text_does_not_reach_the_terminal(run, home):
    with Journal.open(home) as journal:
        for _ in range(2):
            journal.record(made_up(session="\x1b[31m[bold]a\u202e", evidence=[passage(source="\x1b]0;x\x07[link]", label="\x9b")]))
    out, err = run()
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out + err)
    assert "[bold]a" in out
    assert "[link]" in out


def test_a_damaged_journal_and_bad_numbers(run, home):
    home.mkdir()
    (home / FILE_NAME).write_bytes(b"garbage" * 1000)
    with pytest.raises(ConfigError, match="file is not a database"):
        run()
    for bad in ("0", "-1", "x", "9" * 30):
        with pytest.raises(click.BadParameter):
            run("--last", bad)
