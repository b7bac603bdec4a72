"""`localrag eval --qa` with the echo, which says the question again and cites the first passage: what is right is known beforehand."""

import json
import os
import random
import subprocess
import sys

import pytest

from localrag.files import lock_open_file
from tests.cli.interruptions import kill_again_and_again, press_ctrl_c

PAGES = {
    "pla": "PLA is annealed at 90 degrees in an oven. It keeps its shape better afterwards, and shrinks a little in width.",
    "abs": "ABS is smoothed with the vapour of acetone. It smells of styrene while it prints, so vent the room well.",
    "nylon": "Nylon takes up water from the air within hours. Dry nylon in an oven at 80 degrees for 12 hours.",
}
QUESTIONS = [
    {"id": "right", "question": "Is PLA annealed at 90 degrees in an oven?", "answers": [["90"]], "sources": ["pla.md"]},
    {"id": "wrong", "question": "With which vapour is ABS smoothed?", "answers": [["acetone"]], "sources": ["abs.md"]},
    {"id": "refused", "question": "At what do sources do not say that nylon dries?", "answers": [["80"]], "sources": ["nylon.md"]},
    {"id": "two", "question": "PLA and ABS: 90, acetone?", "answers": [["90"], ["acetone"]], "sources": [["pla.md", "abs.md"]]},
    {"id": "nobody", "question": "Who invented it, if it is not mentioned?", "answers": []},
    {"id": "invented", "question": "Who annealed the first PLA?", "answers": []},
]  # fmt: skip
KILLS = 4
NUM_MANY = 600
"""Questions, so many that Ctrl-C comes before the last."""


@pytest.fixture
def asked(localrag, tmp_path, monkeypatch):
    """Runs `eval --qa` on three pages and six questions, or on other lines; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for name, text in PAGES.items():
        (tmp_path / "notes" / f"{name}.md").write_text(f"# {name}\n\n{text}\n")
    assert localrag("index", "notes", "--kb", "notes")[0] == 0
    write_rows(tmp_path / "qa.jsonl", QUESTIONS)

    def run(*args):
        return localrag("eval", "--qa", "qa.jsonl", "--kb", "notes", "--model", "echo", *args)

    return run


def write_rows(file, rows):
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def many(count):
    return [{"id": f"q{n}", "question": f"Is PLA annealed, {n} times?", "answers": [[str(n)]], "sources": ["pla.md"]} for n in range(count)]


def test_each_number_is_the_one_that_the_answers_come_to(asked):
    code, out, err = asked("--json")
    found = json.loads(out)
    assert code == 0, err
    [way] = found["ways"]
    assert (found["file"], found["model"], found["kbs"], found["compared"], found["same_prompts"]) == (
        "qa.jsonl",
        "echo",
        ["notes"],
        [],
        [],
    )
    assert (way["way"], way["num_questions"], way["errors"], way["num_invented"]) == ("ask", 6, {}, 0)
    shares = {name: (value["num"], value["of"]) for name, value in way.items() if isinstance(value, dict) and "of" in value}
    assert shares["is_right"] == (2, 4)  # "right" and "two", whose questions hold their answers
    assert shares["is_refused"] == (1, 2)
    assert shares["is_refused_wrongly"] == (1, 4)
    assert shares["in_evidence"][1] == shares["cites_holder"][1] == 4
    assert shares["in_evidence"][0] >= 3
    assert way["is_right"]["low"] < 0.5 < way["is_right"]["high"]
    assert way["mean_evaluated_tokens"] > 100  # nothing is taken over from the question before


def test_a_row_for_each_ratio_and_one_for_the_council(asked):
    ways = ("--context-ratio", "0.1", "--context-ratio", "0.6", "--context-ratio", "0.1", "--council", "default")
    code, out, err = asked(*ways, "--ctx", "3000", "--max-tokens", "200")
    assert code == 0, err
    shares, means = (table.splitlines() for table in out.split("\n\n"))
    assert shares[0].split()[:4] == ["Way", "Questions", "In", "evidence"]
    assert means[0].split()[:4] == ["Means", "Evidence", "Prompt", "Evaluated"]
    for lines in (shares, means):
        assert [line.split("  ")[0] for line in lines[1:]] == ["ask at 0.1", "ask at 0.6", "council default"]
    assert "Right only with ask at 0.6: " in err
    assert "Right only with council default: " in err
    assert "the very same prompts" not in err


def test_ratios_that_bind_nothing_are_told(asked):
    _, _, err = asked("--context-ratio", "0.5", "--context-ratio", "0.8")
    assert "Warning: ask at 0.5 and ask at 0.8 sent identical prompts" in err
    assert "Try --top-k fit" in err


def test_what_does_not_fit_is_counted_by_its_name(asked):
    code, out, _ = asked("--ctx", "60", "--json")
    [way] = json.loads(out)["ways"]
    assert (code, way["errors"]) == (0, {"BudgetExceededError": 6})
    assert way["is_right"]["num"] == way["is_refused"]["num"] == 0
    assert "6 failed. First error: The prompt needs" in asked("--ctx", "60")[2]


def test_sources_that_are_not_there_are_told(asked, tmp_path):
    write_rows(tmp_path / "qa.jsonl", [QUESTIONS[0] | {"sources": ["petg.md"]}, QUESTIONS[1]])
    assert "Warning: 1 question with sources missing from the knowledge base" in asked()[2]
    assert json.loads(asked("--json")[1])["num_sources_not_found"] == 1


def test_some_of_the_questions_at_even_distances(asked, tmp_path):
    assert json.loads(asked("--json", "--queries", "3", "--out", "out.jsonl")[1])["ways"][0]["num_questions"] == 3
    assert [row["id"] for row in rows(tmp_path / "out.jsonl")] == ["right", "refused", "nobody"]


def test_a_file_says_what_its_refusals_are(asked, tmp_path):
    write_rows(tmp_path / "qa.jsonl", [{"refusals": ["the first pla"]}, *QUESTIONS])
    [way] = json.loads(asked("--json")[1])["ways"]
    assert (way["is_refused"]["num"], way["is_refused_wrongly"]["num"]) == (1, 0)


def test_a_line_of_out_says_all_that_a_person_needs_to_judge(asked, tmp_path):
    asked("--out", "out.jsonl", "--seed", "3", "--top-k", "2")
    found = rows(tmp_path / "out.jsonl")
    assert [(row["id"], row["way"]) for row in found] == [(row["id"], "ask") for row in QUESTIONS]
    first = found[0]
    assert first["question"] == QUESTIONS[0]["question"]
    assert first["text"].startswith("You asked: Is PLA annealed at 90 degrees in an oven? [KB#")
    assert first["grade"]["is_right"] is True
    assert 1 <= len(first["passages"]) <= 2
    assert set(first["passages"][0]) == {"label", "source", "text"}
    assert first["passages"][0]["label"] in first["passages"][0]["text"]


def test_what_is_answered_is_not_asked_again_and_the_known_answers_may_be_mended(asked, tmp_path):
    _, once, _ = asked("--out", "out.jsonl", "--json")
    held = (tmp_path / "out.jsonl").read_bytes()
    _, twice, err = asked("--out", "out.jsonl", "--json")
    assert (twice, (tmp_path / "out.jsonl").read_bytes()) == (once, held)
    assert "6 of 6 answers exist already." in err
    write_rows(tmp_path / "qa.jsonl", [*QUESTIONS[:1], QUESTIONS[1] | {"answers": [["acetone", "vapour"]]}, *QUESTIONS[2:]])
    mended = json.loads(asked("--out", "out.jsonl", "--json")[1])["ways"][0]
    assert mended["is_right"]["num"] == json.loads(once)["ways"][0]["is_right"]["num"] + 1
    assert (tmp_path / "out.jsonl").read_bytes() == held


@pytest.mark.parametrize("args", [["--seed", "1"], ["--ctx", "4000"], ["--top-k", "1"], ["--max-tokens", "9"], ["--system", "Be brief."]])
def test_answers_by_other_means_are_not_taken_for_these(asked, refused, tmp_path, args):
    asked("--out", "out.jsonl")
    held = (tmp_path / "out.jsonl").read_bytes()
    said = refused(2, "eval", "--qa", "qa.jsonl", "--kb", "notes", "--model", "echo", "--out", "out.jsonl", *args)
    assert "Line 1 of " in said
    assert "is asked with other options" in said
    assert (tmp_path / "out.jsonl").read_bytes() == held


def test_a_way_that_is_not_asked_now_is_not_taken_in(asked, refused, tmp_path):
    asked("--out", "out.jsonl")
    said = refused(2, "eval", "--qa", "qa.jsonl", "--kb", "notes", "--model", "echo", "--out", "out.jsonl", "--context-ratio", "0.2")
    assert 'by "ask", which this run does not ask' in said


@pytest.mark.parametrize(
    "held",
    [
        b"# My notes\n",
        b'{"id":"right","question":"the questions themselves"}\n',
        b'{"id":"right","way":"ask","request":"x","text":"y","seconds":"z"}\n',
        b'{"id":1,"way":"ask","request":"x","text":"y"}\n',
        b'{"id":"right","way":"ask","request":"x","text":"y","passages":[7]}\n',
    ],
)
def test_a_file_of_something_else_is_left_alone(asked, refused, tmp_path, held):
    (tmp_path / "out.jsonl").write_bytes(held)
    said = refused(2, "eval", "--qa", "qa.jsonl", "--kb", "notes", "--model", "echo", "--out", "out.jsonl")
    assert "was not written by an evaluation" in said
    assert (tmp_path / "out.jsonl").read_bytes() == held


def test_a_second_evaluation_on_the_same_file_is_refused(asked, tmp_path):
    child = [sys.executable, "-m", "localrag", "eval", "--qa", "qa.jsonl", "--kb", "notes", "--model", "echo", "--out", "out.jsonl"]
    with (tmp_path / "out.jsonl").open("ab") as other:
        assert lock_open_file(other.fileno())
        done = subprocess.run(child, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Another evaluation is writing" in done.stderr


def test_wherever_the_last_line_was_cut_the_evaluation_goes_on(asked, tmp_path):
    out, rng = tmp_path / "out.jsonl", random.Random(5)
    ratios = ("--context-ratio", "0.2", "--context-ratio", "0.9")
    shares = without_seconds(asked(*ratios, "--out", "out.jsonl", "--json")[1])
    for _ in range(4):
        data = out.read_bytes()
        out.write_bytes(data[: rng.randrange(len(data))])
        code, found, err = asked(*ratios, "--out", "out.jsonl", "--json")
        assert code == 0, err
        assert without_seconds(found) == shares
        assert len({(row["id"], row["way"]) for row in rows(out)}) == len(rows(out)) == 12


def without_seconds(out):
    found = json.loads(out)
    for way in found["ways"]:
        del way["mean_s"], way["mean_first_token_s"]
    return found


def test_an_evaluation_that_is_killed_again_and_again_loses_and_repeats_nothing(asked, tmp_path):
    write_rows(tmp_path / "qa.jsonl", many(40))
    out = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "localrag",
        "eval",
        "--qa",
        "qa.jsonl",
        "--kb",
        "notes",
        "--model",
        "echo",
        "--out",
        "out.jsonl",
        "--json",
    ]
    num_kills, said = kill_again_and_again(command, out, num_kills=KILLS, done_with=0, num_tries=50)
    assert num_kills > KILLS // 2
    assert [row["id"] for row in rows(out)] == [row["id"] for row in many(40)]
    assert json.loads(said)["ways"][0]["is_right"]["num"] == 40


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(asked, tmp_path):
    write_rows(tmp_path / "qa.jsonl", many(NUM_MANY))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "localrag", "eval", "--qa", "qa.jsonl", "--kb", "notes", "--model", "echo", "--out", "out.jsonl"]
    code, stdout, err = press_ctrl_c(command, out)
    assert (code, stdout) == (130, ""), err
    *_, said, hint = err.splitlines()
    assert said.startswith("Error: Interrupted: ")
    assert hint == "  Run the same command to continue."
    num_left = int(said.split()[2])
    whole = [line for line in out.read_text().split("\n")[:-1] if line]
    assert len(whole) in {NUM_MANY - num_left, NUM_MANY - num_left + 1}  # stopped between writing one and counting it
    assert 0 < len(whole) < NUM_MANY


def test_the_picture_is_a_png(asked, tmp_path):
    code, _, err = asked("--context-ratio", "0.2", "--context-ratio", "0.9", "--plot", "shares.png")
    assert code == 0, err
    assert (tmp_path / "shares.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "Plotted the measures to shares.png." in err


@pytest.mark.parametrize(
    ("code", "args", "says"),
    [
        (2, [], "DIR or --qa is missing."),
        (2, ["notes", "--qa", "qa.jsonl"], "DIR and --qa exclude each other."),
        (2, ["--qa", "qa.jsonl"], "--qa needs a knowledge base."),
        (2, ["--qa", "qa.jsonl", "--kb", "notes", "--mode", "keyword"], "--mode does not work with --qa."),
        (2, ["--qa", "qa.jsonl", "--kb", "notes", "--rerank", "llm"], "--rerank does not work with --qa."),
        (2, ["notes", "--kb", "notes"], "--kb does not work with DIR."),
        (2, ["notes", "--seed", "0"], "--seed does not work with DIR."),
        (2, ["--qa", "none.jsonl", "--kb", "notes"], "none.jsonl cannot be read"),
        (2, ["--qa", "notes", "--kb", "notes"], "is not a file"),
        (2, ["--qa", "qa.jsonl", "--kb", "notes", "--out", "qa.jsonl"], "the same file"),
        (2, ["--qa", "qa.jsonl", "--kb", "notes", "--out", "none/out.jsonl"], "cannot be written"),
        (2, ["--qa", "qa.jsonl", "--kb", "notes", "--plot", "a.svg"], "is not a .png file"),
        (2, ["--qa", "qa.jsonl", "--kb", "notes", "--context-ratio", "1.5"], "--context-ratio"),
        (2, ["--qa", "qa.jsonl", "--kb", "notes", "--council", "default", "--system", "x"], "--system does not apply to councils"),
        (3, ["--qa", "qa.jsonl", "--kb", "notes", "--council", "none"], "No council is named 'none'"),
        (4, ["--qa", "qa.jsonl", "--kb", "notes", "--model", "none"], "No model is named 'none'"),
        (6, ["--qa", "qa.jsonl", "--kb", "notse"], "notse"),
    ],
)
def test_what_cannot_be_is_one_line_before_any_work(asked, refused, tmp_path, code, args, says):
    assert says in refused(code, "eval", *args, *(["--model", "echo"] if "--qa" in args and "--model" not in args else []))
    assert rows(tmp_path / "qa.jsonl") == QUESTIONS
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()


def test_a_broken_line_is_named_in_json_too(asked, tmp_path):
    (tmp_path / "qa.jsonl").write_text(f"{json.dumps(QUESTIONS[0])}\n{{junk\n")
    code, out, _ = asked("--json")
    error = json.loads(out)["error"]
    assert (code, error["type"], error["line"]) == (2, "UsageError", 2)
    assert error["message"].startswith("Line 2 of qa.jsonl cannot be used: it is not JSON")


def test_out_may_not_be_a_device(asked, refused):
    assert "is not a regular file" in refused(2, "eval", "--qa", "qa.jsonl", "--kb", "notes", "--model", "echo", "--out", os.devnull)


def test_a_calibration_is_learned_shown_and_stored(asked, tmp_path, localrag):
    facts = [
        "PLA annealed at 90 degrees",
        "PLA in an oven",
        "ABS smoothed with acetone vapour",
        "nylon dried at 80 degrees",
        "styrene of ABS",
    ]
    known = [{"id": f"a{n}", "question": f"{facts[n % 5]}, case {n}?", "answers": [["x"]], "sources": ["pla.md"]} for n in range(10)]
    others = ["volcanoes", "sonnets", "taxes", "penguins", "violins", "treaties", "comets", "chess", "opera", "glaciers"]
    unknown = [{"id": f"u{n}", "question": f"Who writes about {each}?", "answers": []} for n, each in enumerate(others)]
    write_rows(tmp_path / "qa.jsonl", [*known, *unknown])
    arguments = ("eval", "--qa", "qa.jsonl", "--kb", "notes", "--calibrate")
    code, out, err = localrag(*arguments, "--json")
    assert code == 0, err
    fitted = json.loads(out)
    assert (fitted["num_answerable"], fitted["num_unanswerable"]) == (10, 10)
    assert 0.5 < fitted["auc"] <= 1.0
    code, out, err = localrag(*arguments)
    assert (code, out.split()[:3]) == (0, ["Threshold", "Refused", "wrongly"])
    assert "AUC" in err
    ask = ("ask", "--kb", "notes", "--model", "echo", "--json")
    for row in unknown:
        ready = json.loads(localrag(*ask, row["question"], "--dry-run")[1])
        assert ready["answerability"]["threshold"] == round(fitted["calibration"]["threshold"], 4)
        if ready["abstained"]:
            break
    code, out, err = localrag(*ask, row["question"], "--unanswerable", "error")
    assert (code, json.loads(out)["error"]["answerable"]) == (6, ready["answerable"])
    assert json.loads(localrag(*ask, row["question"])[1])["abstained"]
    assert localrag(*ask, row["question"], "--unanswerable", "perhaps")[0] == 2
    assert localrag(*arguments, "--seed", "1")[0] == 2
