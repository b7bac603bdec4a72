"""Models that think, on the command line: thoughts are for the eyes of a person, and the answer is what stdout holds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from localrag.cli import council_render, main
from localrag.journal import Journal
from tests import identities
from tests.chat_templates import THINKING
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]
SAYS, ANSWER = "I shall say this. You asked: Why?", "You asked: Why?"
DIM = re.compile(r"\x1b\[2m(.*?)\x1b\[0m", re.DOTALL)


@pytest.fixture
def thinker(tmp_path):
    """The options of an echo that thinks."""
    (tmp_path / "thinking.jinja").write_text(THINKING)
    return ("--model", "echo", "--chat-template", str(tmp_path / "thinking.jinja"))


@pytest.fixture
def ask(home, capsys, thinker):
    """Runs `localrag ask` in this process with that echo; returns (exit code, stdout, stderr)."""

    def run(*args):
        code = main(["ask", *map(str, args), *thinker])
        return code, *capsys.readouterr()

    return run


def entries(answer):
    return {each["name"]: each for each in answer["ledger"]["entries"]}


def dimmed(terminal):
    """All that was shown dimmed."""
    return "".join(DIM.findall(terminal.raw.decode().replace("\r\n", "\n")))


def test_on_a_pipe_an_answer_is_all_there_is(ask):
    assert ask("Why?") == (0, f"{ANSWER}\n", "")
    code, out, err = ask("Why?", "--explain")
    assert (code, out) == (0, f"{ANSWER}\n")
    assert [line.split()[0] for line in err.strip().splitlines()[:6]] == ["Section", "template", "question", "thinking", "answer", "spare"]
    assert "I shall" not in err


def test_json_has_the_thoughts_beside_the_answer(ask):
    code, out, err = ask("Why?", "--json")
    answer = json.loads(out)
    identities.check(answer, [])
    assert (code, err, answer["answer"], answer["reasoning"]) == (0, "", ANSWER, SAYS)
    assert list(answer)[:3] == ["answer", "reasoning", "finish_reason"]
    assert answer["usage"]["reasoning_tokens"] == len("<think>\n") + len(SAYS) + len("\n</think>\n\n")
    assert (entries(answer)["thinking"]["wanted"], entries(answer)["thinking"]["allotted"]) == (1024, 1024)


def test_thoughts_can_be_limited_and_forbidden(ask):
    few = json.loads(ask("Why?", "--json", "--think-tokens", 40)[1])
    identities.check(few, [])
    assert few["usage"]["reasoning_tokens"] == entries(few)["thinking"]["used"] == entries(few)["thinking"]["allotted"] == 40
    assert (few["answer"], few["reasoning"]) == (ANSWER, SAYS[: 40 - len("<think>\n") - len("\n</think>\n\n")].strip())
    none = json.loads(ask("Why?", "--json", "--think-tokens", 0)[1])
    identities.check(none, [])
    assert none["answer"] == ANSWER
    assert "reasoning" not in none
    assert "thinking" not in entries(none)


@pytest.mark.parametrize("number", ["5", "31", "-1", "2147483648", "many", "1.5"])
def test_a_number_that_is_no_number_of_thoughts_is_refused(ask, number):
    code, out, err = ask("Why?", "--think-tokens", number)
    assert (code, out) == (2, "")
    assert "--think-tokens" in err
    assert "Traceback" not in err


def test_limited_time_is_for_the_answer(ask):
    code, out, _ = ask("Why?", "--max-seconds", 1000, "--json")
    answer = json.loads(out)
    identities.check(answer, [])
    assert (code, answer["answer"]) == (0, ANSWER)
    assert "reasoning" not in answer
    assert answer["ledger"]["time"]["max_seconds"] == 1000


def test_a_budget_can_say_how_much_is_thought(ask, tmp_path):
    models = tmp_path / "models.toml"
    models.write_text(
        '[budgets.few.thinking]\nbasis = 40\nmax = 50\n[budgets.share.thinking]\nmax = "20%"\n[budgets.large.thinking]\nbasis = "60%"\n'
    )

    def room(name, max_tokens):
        out = ask("Why?", "--json", "--models", models, "--budget", name, "--ctx", 1200, "--max-tokens", max_tokens)[1]
        answer = json.loads(out)
        identities.check(answer, [])
        return entries(answer)["thinking"]["allotted"], 1200 - answer["usage"]["prompt_tokens"]

    for max_tokens in (100, 5000):
        assert room("few", max_tokens)[0] == 50
        given, left = room("share", max_tokens)
        assert given == left // 5
    given, left = room("large", 100)
    assert given == min(1024, left - 100)
    models.write_text("[budgets.none.thinking]\nbasis = 0\nmin = 0\nmax = 0\n")
    assert room("none", 5000)[0] == 32  # --think-tokens 0 is what keeps it from thinking


def test_what_a_prompt_would_hold_shows_the_room_for_thoughts(ask, thinker, capsys):
    code, out, _ = ask("Why?", "--dry-run", "--json", "--think-tokens", 77)
    shown = json.loads(out)
    assert (code, entries(shown)["thinking"]["allotted"], entries(shown)["thinking"]["used"]) == (0, 77, 0)
    assert main(["budget", "Why?", "--show-allocation", "--think-tokens", "77", *thinker]) == 0
    assert re.search(r"thinking\s+77\b", capsys.readouterr().out)


def test_answers_of_a_batch_have_their_thoughts(ask, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": n, "question": f"What is {n}?"}) + "\n" for n in range(5)))
    code, out, _ = ask("--batch", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--think-tokens", 45)
    assert (code, out) == (0, "")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {row["id"]: row["answer"] for row in found} == {n: f"You asked: What is {n}?" for n in range(5)}
    for row in found:
        identities.check(row, [])
        assert (row["usage"]["reasoning_tokens"], row["reasoning"]) == (45, "I shall say this. You aske")


def test_the_budget_of_a_role_of_a_council_tells_the_room_for_thoughts(ask):
    ledger = json.loads(ask("Why?", "--json", "--ctx", 1000, "--think-tokens", 60, "--max-tokens", 5000)[1])["ledger"]
    [head, *_, thinking, answer, total] = council_render.budget_lines({"role": "chemist", "kind": "proposal", "ledger": ledger})
    used = sum(each["used"] for each in ledger["entries"][:-2])
    assert f"{used} of 1,000 tokens" in head
    assert (thinking, answer) == ("  ✓ thinking: room for 60", f"  – answer: room for {940 - used} of 5,000 wanted")
    assert total == f"  Total: {used} tokens in, 60 to think, {940 - used} for the answer, 0 spare"


def test_a_chat_on_a_pipe_tells_answers_and_in_json_thoughts(home, thinker):
    def chat(*args, text):
        command = [sys.executable, "-m", "localrag", "chat", *thinker, *args]
        env = {**os.environ, "LOCALRAG_HOME": str(home)}
        return subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT, env=env, check=False)

    done = chat("--session", "talk", text="Why?\nAnd how?\n")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\nYou asked: And how?\n")
    assert "I shall" not in done.stderr
    done = chat("--session", "talk", "--json", "--think-tokens", "64", text="Why?\n")
    answer = json.loads(done.stdout)
    identities.check(answer, [])
    assert (answer["answer"], answer["reasoning"]) == (ANSWER, SAYS)
    with Journal.open(home) as journal:
        turns = journal.conversations.turns(journal.conversations.named("talk").id)
    assert [turn.about["reasoning"] for turn in turns] == [SAYS, "I shall say this. You asked: And how?", SAYS]
    exported = subprocess.run(
        [sys.executable, "-m", "localrag", "chat", "--session", "talk", "--export", str(home / "talk.md")],
        env={**os.environ, "LOCALRAG_HOME": str(home)},
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    assert exported.returncode == 0
    assert "I shall" not in (home / "talk.md").read_text()


# --- on a terminal


def test_a_person_sees_thoughts_dimmed_above_the_answer(home, thinker):
    with Terminal("chat", *thinker, home=home) as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("Why?")
        terminal.wait_for(SAYS)
        terminal.wait_until(lambda text: text.count(ANSWER) == 2)  # in the thoughts, and as the answer
        lines = [line.strip() for line in terminal.text.splitlines()]
        assert lines.index(SAYS) < lines.index(ANSWER)
        assert lines[lines.index(SAYS) + 1] == ""
        assert dimmed(terminal).count(SAYS) == 1
        assert "<think>" not in terminal.text
        terminal.enter("And how?")
        terminal.wait_until(lambda text: text.count("You asked: And how?") == 2)
        terminal.enter("/explain full")
        terminal.wait_for("And how?", "assistant")
        assert terminal.text.count(SAYS) == 1  # the prompt holds none
        terminal.send("\x04")
        assert terminal.end() == 0


def test_a_dumb_terminal_is_told_the_answer_alone(home, thinker):
    with Terminal("chat", *thinker, home=home, term="dumb") as terminal:
        terminal.wait_for(">")
        terminal.enter("Why?")
        terminal.wait_for(ANSWER)
        terminal.send("\x04")
        assert terminal.end() == 0
        assert "I shall" not in terminal.text
        assert b"\x1b" not in terminal.raw


def test_ask_on_a_terminal_shows_thoughts_dimmed_and_on_a_pipe_none(home, thinker):
    with Terminal("ask", "Why?", *thinker, home=home) as terminal:
        assert terminal.end() == 0
    assert dimmed(terminal).strip() == SAYS
    assert [line for line in terminal.text.splitlines() if line.strip()] == [SAYS, ANSWER]
    command = [sys.executable, "-m", "localrag", "ask", "Why?", *thinker]
    with Terminal("ask", "Why?", *thinker, "--json", home=home, columns=2000) as terminal:
        assert terminal.end() == 0
    assert dimmed(terminal) == ""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LOCALRAG_HOME": str(home)}, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{ANSWER}\n", "")
