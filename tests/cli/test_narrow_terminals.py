"""Chat on terminals of 40, 80 and 120 columns: nothing breaks inside a word, and a key that is pressed leaves nothing behind."""

import re

import pytest

from localrag.cli.terminal import wrapped
from tests.terminal import Terminal

COLUMNS = pytest.mark.parametrize("columns", [40, 80, 120])
STREAM = """
import signal, sys
from localrag.cli.chat.render import make_view

signal.signal(signal.SIGINT, lambda *_: None)
view = make_view(draws=True)
view.wait("reading")
for number in range(60):
    view(f"word{number:02} ")
print("\\x1b]0;ready\\x07", end="", flush=True)
signal.pause()
signal.setitimer(signal.ITIMER_REAL, 0.5)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.pause()
view.close()
print("Interrupted.")
input()
"""


@COLUMNS
@pytest.mark.parametrize("pressed", ["\x03", "hello\x03"])
def test_what_is_pressed_while_an_answer_is_drawn_leaves_no_line_behind(home, columns, pressed):
    with Terminal(home=home, columns=columns, program=("-c", STREAM)) as terminal:
        terminal.wait_until(lambda _: terminal.screen.title == "ready")
        terminal.wait_for("word59")
        terminal.send(pressed)
        terminal.wait_for("Interrupted.")
        assert [len(re.findall(f"word{number:02}", terminal.text)) for number in range(60)] == [1] * 60
        assert "reading" not in terminal.text
        assert "^C" not in terminal.text
        terminal.enter("typed afterwards")  # the terminal shows again what is typed
        terminal.wait_for("typed afterwards")


@COLUMNS
def test_help_ledgers_and_passages_break_between_words(home, columns, tmp_path, monkeypatch, tiny_catalogue, capsys):
    from localrag.cli import main  # noqa: PLC0415  # only here

    text = "The annealing temperature of polylactide filaments is about ninety degrees, held for half an hour. " * 3
    (tmp_path / "pla.md").write_text(f"# Annealing\n\n{text}\n")
    monkeypatch.setenv("LOCALRAG_MODELS", str(tiny_catalogue))
    assert main(["index", str(tmp_path / "pla.md"), "--kb", "plastics"]) == 0
    (tmp_path / "notes.txt").write_text(text * 40)
    options = ("--model", "echo", "--kb", "plastics", "--ctx", "1500", "--max-tokens", "100", "--attach", str(tmp_path / "notes.txt"))
    with Terminal("chat", *options, home=home, columns=columns, rows=40) as terminal:
        terminal.wait_for("echo · " if columns > 40 else "echo")
        terminal.enter("How hot?")
        terminal.wait_for("Sources")
        for command, shown in (("/sources", "half an hour"), ("/budget", "window"), ("/help", "Ctrl-D leaves")):
            terminal.enter(command)
            terminal.wait_until(lambda said, shown=shown: shown in " ".join(said.split()))
        terminal.read(0.5)
        said = terminal.text
    words = {
        "annealing",
        "temperature",
        "polylactide",
        "filaments",
        "ninety",
        "degrees,",
        "conversations",
        "shortened",
        "Allotted",
        "question",
    }
    joined = " ".join(said.split())
    for word in words:
        broken = [f"{word[:at]} {word[at:]}" for at in range(2, len(word) - 1)]
        assert [each for each in broken if each in joined] == [], word
    assert words <= set(re.findall(r"[\w,]+", said)), sorted(words - set(re.findall(r"[\w,]+", said)))
    assert "left out or shortened" in joined.lower()


def test_a_line_is_wrapped_between_words_and_keeps_its_indent(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert wrapped("  one two three four five", hang=2) == "  one two three four\n    five"
    assert wrapped("short") == "short"
    path = "/a/path/that/is/longer/than/twenty"
    assert wrapped(f"in {path} it is") == f"in\n{path}\nit is"
    assert wrapped("火火火火火 火火火火火 火") == "火火火火火\n火火火火火 火"
    assert wrapped("a  table   of words\n\n  and a line that is long") == "a  table   of words\n\n  and a line that is\n  long"
