"""The budget at the command line: what is attached, cut, limited, explained and kept."""

import json
import os
import subprocess
import sys
import time

import pytest

from localrag.cli import main
from localrag.journal import Journal
from tests import identities

LONG = "Parts cool on the glass plate. The oven heats slowly, at 60 degrees. " * 60


@pytest.fixture
def run(home, capsys):
    """Runs a command line in this process; returns (exit code, stdout, stderr)."""

    def _run(*args):
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return code, out, err

    return _run


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(LONG, encoding="utf-8")
    return path


def entry(answer, name):
    return next(each for each in answer["ledger"]["entries"] if each["name"] == name)


def test_a_file_that_is_attached_is_read_with_the_question(run, notes):
    code, out, _ = run("ask", "Why?", "--model", "echo", "--attach", notes, "--json")
    answer = json.loads(out)
    assert code == 0
    identities.check(answer, [])
    assert entry(answer, "attachments")["used"] > len(LONG)


def test_what_is_attached_and_does_not_fit_is_said(run, notes):
    code, _, err = run("ask", "Why?", "--model", "echo", "--attach", notes, "--ctx", 2000)
    assert code == 0
    assert f"{notes} was shortened (truncated): " in err  # what a person gives is rather cut than left out
    _, _, err = run("ask", "Why?", "--model", "echo", "--attach", notes, "--ctx", 2000, "--overflow", "prioritize")
    assert f"Left out of attachments because it does not fit: {notes}" in err


@pytest.mark.parametrize("strategy", ["truncate", "attachments=truncate", "summarize"])
def test_an_overflow_strategy_shortens_and_names_it(run, notes, strategy):
    _, out, _ = run("ask", "Why?", "--model", "echo", "--attach", notes, "--ctx", 2000, "--overflow", strategy, "--json")
    [shortened] = entry(json.loads(out), "attachments")["shortened"]
    assert shortened["id"] == str(notes)
    assert shortened["tokens"] < shortened["of"]


def test_the_strategy_error_is_exit_code_5_with_what_is_too_much(run, notes):
    code, out, _ = run("ask", "Why?", "--model", "echo", "--attach", notes, "--ctx", 2000, "--overflow", "error", "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (5, "BudgetExceededError")
    assert error["sections"]["attachments"] > 2000


def test_the_very_prompt_is_shown_with_its_control_tokens(run):
    code, out, _ = run("ask", "Is <|im_end|> text?", "--model", "echo", "--system", "Be brief.", "--dry-run", "--explain=full")
    assert code == 0
    assert "⟦<|im_start|>⟧system" in out
    assert "── system, 9 tokens" in out
    assert "Is <|im_end|> text?" in out
    assert out.count("⟦<|im_end|>⟧") == 2  # the template's own, and none of the question's


def test_explaining_in_full_goes_to_stderr_beside_an_answer(run):
    code, out, err = run("ask", "Why?", "--model", "echo", "--explain=full")
    assert (code, out) == (0, "You asked: Why?\n")
    assert "⟦<|im_start|>⟧user" in err
    assert "Section" in err


def test_time_bounds_an_ask_and_the_ledger_says_so(run):
    _, out, _ = run("ask", "Why?", "--model", "echo", "--max-seconds", 100, "--json")
    time = json.loads(out)["ledger"]["time"]
    assert time["max_seconds"] == 100
    assert not time["is_bound"]


STARTED_AT = """
import click
from localrag.cli.options import started_at
with click.Context(click.Command("ask")):
    print(started_at())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, the clocks of two processes cannot be compared")
def test_a_limit_of_time_counts_from_the_start_of_the_process_and_not_from_the_whole_second_before():
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", STARTED_AT], capture_output=True, text=True, check=True)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert before - 2 * tick_s <= float(done.stdout) <= time.perf_counter()


def test_too_few_seconds_are_refused_with_those_that_would_do(run):
    code, out, _ = run("ask", "why " * 5000, "--model", "echo", "--max-seconds", 0.001, "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (5, "TimeLimitError")
    assert error["needed_s"] > error["max_seconds"] == 0.001


def test_an_ask_leaves_its_ledger_and_no_keep_leaves_nothing(run, home):
    assert run("ask", "Why?", "--model", "echo", "--no-keep")[0] == 0
    assert not (home / "journal.sqlite").exists()
    assert run("ask", "Why?", "--model", "echo", "--session", "tests")[0] == 0
    with Journal.open(home) as journal:
        [kept] = journal.asks()
    assert (kept.session, kept.question, kept.finish_reason) == ("tests", "Why?", "stop")
    code, out, _ = run("report", "--json")
    assert code == 0
    assert json.loads(out)


def test_a_journal_that_is_damaged_costs_no_answer(run, home):
    home.mkdir()
    (home / "journal.sqlite").write_bytes(b"not a database at all " * 100)
    code, out, err = run("ask", "Why?", "--model", "echo")
    assert (code, out) == (0, "You asked: Why?\n")
    assert err.count("Warning: ") == 1
    assert "journal" in err


def test_a_budget_of_models_toml_is_used_by_its_name(run, tmp_path):
    models = tmp_path / "models.toml"
    models.write_text("[budgets.tight]\ngap = 100\n[budgets.tight.answer]\nbasis = 40\n")
    _, out, _ = run("ask", "Why?", "--model", "echo", "--models", models, "--budget", "tight", "--json")
    assert entry(json.loads(out), "gap")["allotted"] == 100
    code, _, err = run("ask", "Why?", "--model", "echo", "--models", models, "--budget", "tigth")
    assert code == 3
    assert "tight" in err


def test_an_allocation_is_read_at_a_glance(run, notes):
    code, out, _ = run("budget", "Why is it hot?", "--model", "echo", "--attach", notes, "--show-allocation")
    assert code == 0
    assert "Task    Why is it hot?" in out
    assert "ATTACHMENTS" in out
    assert "subtotal" in out
    assert "utilization" in out


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--attach", "nowhere.txt"], 2, "nowhere.txt"),
        (["--attach", "."], 2, "cannot be attached"),
        (["--overflow", "sometimes"], 2, "prioritize"),
        (["--overflow", "question=truncate"], 3, "question"),
        (["--overflow", "tools=summarize"], 3, "cannot summarize"),
        (["--max-seconds", "-1"], 2, "max-seconds"),
        (["--max-seconds", "nan"], 2, "not a number"),
        (["--budget", "nonsense"], 3, "nonsense"),
        (["--explain=some"], 2, "explain"),
    ],
)
def test_bad_input_is_one_line_with_a_way_out(run, args, code, says):
    got, out, err = run("ask", "Why?", "--model", "echo", *args)
    assert (got, out) == (code, "")
    assert err.startswith("Error: ")
    assert len(err.strip().splitlines()) <= 2
    assert says in err


def test_a_task_of_a_megabyte_is_refused_with_its_size_and_nothing_is_kept(run, home, tmp_path):
    task = tmp_path / "task.txt"
    task.write_text("why " * 262_144)
    code, out, _ = run("budget", f"@{task}", "--model", "echo", "--json")
    error = json.loads(out)["error"]
    assert (code, error["sections"]["question"]) == (5, 4 * 262_144 - 1)
    assert not (home / "journal.sqlite").exists()
