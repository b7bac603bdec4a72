"""budget --council: the table of every role, added up against its window."""

import json

import pytest

from localrag.cli import main

TABLE = """
[councils.x]
budget = "table"
max_tokens = 300
system = "Be exact."
[[councils.x.specialists]]
name = "one"
persona = "You are exact."
model = "echo"
n_ctx = 2000
[[councils.x.specialists]]
name = "two"
persona = "You are brief, and you look for what is missing."
model = "echo"
n_ctx = 2000
[councils.x.judge]
model = "echo"
n_ctx = 2000
budget = "table"
max_tokens = 200
[budgets.table]
gap = "5%"
limits = { system = 100, question = 100, instructions = 400 }
evidence = { basis = "content", max = 600 }
history = { basis = "content", max = 200 }
answer = { min = 150, basis = 150, max = 400 }
"""


@pytest.fixture
def run(home, tmp_path, monkeypatch, capsys):
    """Runs a command line with the catalogue that ships, or with the one of the test; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def _run(*args, models=None):
        if models is not None:
            (tmp_path / "mine.toml").write_text(models, encoding="utf-8")
            args = (*args, "--models", tmp_path / "mine.toml")
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return _run


def lines(table):
    return {line["name"]: line["tokens"] for line in table["lines"]}


def test_the_tables_of_the_reference_document_to_the_number(run):
    code, out, _ = run("budget", "--council", "athene-judge", "--json")
    specialists, judge = json.loads(out)["tables"]
    assert code == 0
    assert len(specialists["roles"]) == 3
    assert specialists["window"] == 32_768
    assert lines(specialists) == {
        "system": 4_000,
        "tools": 4_000,
        "conversation": 2_000,
        "evidence": 10_000,
        "task": 2_000,
        "margin": 2_000,
    }
    assert (specialists["prompt_tokens"], specialists["answer"]) == (24_000, {"min": 6_000, "max": 8_000})
    assert (specialists["total_tokens"], specialists["spare"], specialists["fits"]) == (32_000, 768, True)
    assert (judge["roles"], judge["window"]) == (["judge"], 131_072)
    assert lines(judge) == {
        "system": 4_000,
        "tools": 10_000,
        "conversation": 2_000,
        "cited": 15_000,
        "evidence": 35_000,
        "proposals": 25_000,
        "task": 2_000,
        "margin": 7_000,
    }
    assert (judge["prompt_tokens"], judge["answer"]) == (100_000, {"min": 6_000, "max": 8_000})
    assert (judge["total_tokens"], judge["fits"]) == (108_000, True)


def test_a_table_is_read_at_a_glance(run):
    code, out, err = run("budget", "--council", "athene-judge")
    rows = {" ".join(line.split()) for line in out.splitlines()}
    assert (code, err) == (0, "")
    assert {
        "athene-v2-agent, window 32,768, budget athene-specialist",
        "evidence 10,000 30.5%",
        "task 2,000 6.1% question 1,300, plan 300, instructions 400",
        "prompt 24,000 73.2%",
        "answer 8,000 24.4% at least 6,000",
        "Total 32,000 of 32,768 ✓",
        "Total 108,000 of 131,072 ✓",
    } <= rows


def test_a_window_that_is_too_small_is_exit_code_5_with_the_role_and_the_numbers(run):
    code, out, err = run("budget", "--council", "athene-judge", "--ctx", 31_999)
    assert code == 5
    assert "Total 32,000 of 31,999 ✗" in out
    assert err.startswith("Error: The prompt of evidence analyst needs at least 32000 tokens (answer 8000, evidence 10000, gap 2000")
    assert "[budgets.athene-specialist]" in err
    code, out, _ = run("budget", "--council", "athene-judge", "--ctx", 32_000, "--json")
    said = json.loads(out)
    assert code == 5  # the judge's, now
    assert [table["fits"] for table in said["tables"]] == [True, False]
    assert (said["error"]["role"], said["error"]["needed"], said["error"]["window"]) == ("judge", 108_000, 32_000)


@pytest.mark.parametrize("n_ctx", [600, 2048, 8192, 32_768])
def test_a_budget_without_maximums_in_tokens_fits_every_window(run, n_ctx):
    code, out, _ = run("budget", "--council", "default", "--model", "echo", "--ctx", n_ctx, "--json")
    tables = json.loads(out)["tables"]
    assert code == 0
    for table in tables:
        assert table["window"] == n_ctx
        assert table["total_tokens"] <= n_ctx
        assert table["unbounded"] == ["system", "question", "instructions"]
    assert [table["answer"] for table in tables] == [{"min": 160, "max": 160}, {"min": 320, "max": 320}]  # all else gives way
    assert "proposals" in lines(tables[1])
    assert "proposals" not in lines(tables[0])


def test_a_task_is_counted_by_the_models_own_tokens(run):
    _, out, _ = run("budget", "Which one?", "--council", "x", "--json", models=TABLE)
    specialists, judge = json.loads(out)["tables"]
    assert specialists["counted"]["question"] == judge["counted"]["question"] == len("Which one?")  # echo: a byte is a token
    assert specialists["counted"]["system"] == len("Be exact.")
    assert 0 < specialists["counted"]["instructions"] < 400
    bending = 2000 - 600 - specialists["counted"]["template"]
    assert lines(specialists) == {
        "template": specialists["counted"]["template"],
        "system": 100,
        "conversation": 200 + bending * 10 // 100,  # the history, and its summary by the budget that is built in
        "evidence": 600,
        "task": 500,
        "margin": bending * 5 // 100,
    }
    assert specialists["answer"] == {"min": 150, "max": 300}


def test_a_task_over_its_limit_is_exit_code_5(run):
    code, out, err = run("budget", "w" * 101, "--council", "x", models=TABLE)
    assert code == 5
    assert "✗" in out
    assert "The prompt of one needs at least 101 tokens (question 101), but the window holds 100." in err


def test_max_tokens_is_the_answer_of_all_roles(run):
    _, out, _ = run("budget", "--council", "x", "--max-tokens", 100, "--json", models=TABLE)
    assert [table["answer"]["max"] for table in json.loads(out)["tables"]] == [100, 100]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--council", "defualt"], 3, "Did you mean default?"),
        (["--council", "default", "--kb", "x"], 2, "--kb does not work with --council"),
        (["--council", "default", "--show-allocation"], 2, "--show-allocation does not work with --council"),
        ([], 2, "TASK is missing"),
    ],
)
def test_bad_input_is_one_line_with_a_way_out(run, args, code, says):
    got, out, err = run("budget", *args)
    assert (got, out) == (code, "")
    assert err.startswith("Error: ")
    assert says in err
    assert len(err.strip().splitlines()) == 2


def test_a_model_that_is_not_here_and_names_no_window_says_how_to_fetch_it(run):
    models = '[models.m]\nrepo = "a/b"\nfile = "m.gguf"\n[[councils.x.specialists]]\nname = "one"\npersona = "p"\nmodel = "m"\n'
    code, _, err = run("budget", "--council", "x", models=f"{models}[councils.x.judge]\nmodel = 'echo'\n")
    assert code == 4
    assert "localrag models pull m" in err
    code, out, _ = run(
        "budget", "--council", "x", models=models.replace("persona", "n_ctx = 512\npersona") + "[councils.x.judge]\nmodel='echo'"
    )
    assert code == 0
    assert "m, window 512, budget default" in out
