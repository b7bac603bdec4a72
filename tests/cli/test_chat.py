"""chat on a real terminal (its screen emulated by pyte), and with lines piped in; the echo engine answers."""

import base64
import json
import os
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from localrag.cli import main
from localrag.cli.chat import chat_command
from localrag.cli.chat.commands import COMMANDS
from localrag.cli.chat.editor import LineEditor
from localrag.cli.chat.render import MarkdownView, markdown
from localrag.cli.chat.state import ConversationChoice, Room
from localrag.cli.options import Asking
from localrag.cli.terminal import console
from localrag.errors import InterruptedRunError, ModelNotFoundError
from localrag.journal import Journal
from localrag.session.history_window import Turn
from localrag.types import Chunk, Hit, SamplingParams
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]
ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"


def paste(text):
    """As a terminal sends what is pasted."""
    return f"\x1b[200~{text}\x1b[201~"


def chat(home, *args, **more):
    return Terminal("chat", "--model", "echo", *args, home=home, **more)


def run(home, *args, text=""):
    """chat without a terminal: what it wrote."""
    env = {**os.environ, "LOCALRAG_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "localrag", *args], input=text, capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )


@pytest.fixture
def manage(home, capsys):
    """Runs a command that asks nothing, in this process; returns (exit code, stdout, stderr)."""

    def _manage(*args):
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return _manage


def said(home, name=None):
    with Journal.open(home) as journal:
        row = journal.conversations.named(name) if name else journal.conversations.latest()
        return journal.conversations.turns(row.id)


def test_keys(home):
    """Enter sends, Alt-Enter and an open block do not, a paste does not; history is there in the next run; Ctrl-D leaves."""
    with chat(home) as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("hello")
        terminal.wait_for("You asked: hello")
        terminal.send("first" + ALT_ENTER + "second" + ENTER)
        terminal.wait_for("You asked: first")
        terminal.send("```" + ENTER + "code" + ENTER + "```" + ENTER)
        terminal.wait_for("You asked: ```")
        terminal.send(paste("pasted\nlines"))
        terminal.wait_for("… lines")
        assert "You asked: pasted" not in terminal.text
        terminal.send(ENTER)
        terminal.wait_for("You asked: pasted")
        terminal.send("half a line")
        terminal.wait_for("> half a line")
        terminal.send(CTRL_C)
        terminal.wait_for("To leave, press Ctrl-D or type exit.")
        terminal.send(CTRL_D)
        assert terminal.end() == 0
    assert [turn.question for turn in said(home)] == ["hello", "first\nsecond", "```\ncode\n```", "pasted\nlines"]
    with chat(home) as terminal:
        terminal.wait_for("echo · ")
        terminal.send(UP * 12)
        terminal.wait_for("> hello")
    assert (home / "chat-history").stat().st_mode & 0o777 == 0o600


def test_what_is_typed_is_not_kept_either_if_nothing_is_to_be(home):
    with chat(home, "--no-keep") as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("a secret")
        terminal.wait_for("You asked: a secret")
        terminal.send(CTRL_D)
        assert terminal.end() == 0
    assert not [path for path in home.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


def test_completion(home, tmp_path):
    (tmp_path / "a-file-of-mine.txt").write_text("text")
    with chat(home, columns=200) as terminal:
        terminal.wait_for("echo · ")
        terminal.send("/conte\t")
        terminal.wait_for("> /context-ratio")
        terminal.send("\x15/model ech\t")
        terminal.wait_for("> /model echo")
        terminal.send(f"\x15/attach {tmp_path}/a-fi\t")
        terminal.wait_for("a-file-of-mine.txt")
        terminal.enter("")
        terminal.wait_for("to the next question.")


def test_every_command_says_what_it_does(home, tmp_path):
    """Each command of /help once, on one conversation."""
    attached = tmp_path / "notes.txt"
    attached.write_text("The nozzle is blue.")
    steps = (
        ("/help", "search all conversations"),
        ("/copy", "There is no turn"),
        ("/retry nowhere", "There is no turn"),
        ("/open KB#1", "There is no turn"),
        ("/model", "echo: window 131,072 tokens, limited by training."),
        ("/model", "To switch: /model NAME. On this machine: "),
        ("/model nowhere", "nowhere"),
        ("/model echo", "echo: window"),
        ("/kb", "Knowledge bases: none"),
        ("/kb add nowhere", "nowhere"),
        ("/kb nowhere", "There is no knowledge base 'nowhere'"),
        ("/kb add", "/kb add needs the NAME"),
        ("/system You are terse.", "System prompt: You are terse."),
        ("/context-ratio 0.3", "New sources may use at most 0.3"),
        ("/seed 7", "Seed 7, temperature 0."),
        ("/temperature 0.5", "Seed 7, temperature 0.5."),
        ("/rewrite", "Short follow-up questions are not rewritten"),
        ("/rewrite on", "Short follow-up questions are rewritten by the model"),
        ("/rewrite perhaps", "/rewrite takes on or off"),
        ("/budget", "There are no answers yet."),
        (f"/attach {attached}", "to the next question."),
        ("What colour?", "You asked: What colour?"),
        ("/sources", "This answer has no sources."),
        ("/sources 1", "There is no source 1; the answer has 0."),
        ("/sources KB#1", "No passage in this conversation has the tag KB#1."),
        ("/sources open", "Name one source to open."),
        ("/explain", " cached, "),
        ("/explain full", "The nozzle is blue."),
        ("/budget", "attachments"),
        ("/tokens", " evaluated)"),
        ("/tokens abc", "3"),
        ("/remember I have a blue nozzle", "Remembered as 1"),
        ("/memory", "I have a blue nozzle  (importance 0.8)"),
        ("/forget 1", "Deleted."),
        ("/memory", "No facts are remembered."),
        ("/remember #1", "No facts have been proposed."),
        ("/remember", "#1  You asked: User: What colour?"),
        ("/memory", "No facts are remembered."),
        ("/remember #9", "takes a whole number from 1 to 1"),
        ("/remember #1", "Remembered as"),
        ("/good", "There is nothing to mark."),
        ("/bad", "There is nothing to mark."),
        ("/pin", "Pinned: What colour?"),
        ("/history", "1 pinned  What colour?"),
        ("/unpin 1", "Unpinned"),
        ("/retry", "Seed 8, temperature 0.5."),
        ("/retry nowhere", "No model is named 'nowhere'"),
        ("/retry echo", "You asked: What colour?"),
        ("/copy 2", "There is no turn 2"),
        ("/edit 1 What size?", "You asked: What size?"),
        ("/fork 1 side", "Switched to 'side', a copy up to turn 1."),
        ("Anything else?", "You asked: Anything else?"),
        ("/undo", "Removed: Anything else?"),
        ("/rename aside", "Renamed to 'aside'."),
        ("/new other", "Started a new conversation: 'other'."),
        ("/resume aside", "1> What size?"),
        ("/list", "aside  1 turn  What size?"),
        ("/search size", "aside, turn 1: "),
        (f"/save {tmp_path}/kept.md", "Wrote"),
        ("/nonsense", "There is no command /nonsense."),
        ("/pin 99", "There is no turn 99"),
        ("//slash", "You asked: /slash"),
    )
    done = {step[0].split()[0][1:] for step in steps if step[0][0] == "/"}
    assert done >= set(COMMANDS) - {"exit"}
    with chat(home, rows=60, columns=200) as terminal:
        terminal.wait_for("echo · ")
        for line, answer in steps:
            before = terminal.text.count(answer)
            terminal.enter(line)
            terminal.wait_until(lambda text, before=before, answer=answer: text.count(answer) > before)
        terminal.enter("/exit")
        assert terminal.end() == 0
    assert "What size?" in (tmp_path / "kept.md").read_text()


@pytest.fixture
def pets(home, tiny_catalogue, monkeypatch, tmp_path):
    """A knowledge base of that name, and where its file is."""
    monkeypatch.setenv("LOCALRAG_MODELS", str(tiny_catalogue))
    page = tmp_path / "documents" / "-pets $(touch gone).md"
    page.parent.mkdir()
    page.write_text("# Pets\n\nPets are many.\n\n## Hamsters\n\nHamsters sleep by day and run by night.\n\n## Cats\n\nCats sleep.\n")
    assert run(home, "index", str(page.parent), "--kb", "pets").returncode == 0
    return page


def test_sources_are_shown_one_by_one_and_opened_at_their_place(home, pets, monkeypatch, tmp_path):
    """The editor is a script that writes what it was given; the name of the file is one that a shell or an option would take amiss."""
    for name in ("vim", "other"):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\nprintf "%s|" "$0" "$@" > "{tmp_path}/opened"\n')
        script.chmod(0o700)
    monkeypatch.setenv("VISUAL", f"{tmp_path}/vim -n")
    with chat(home, "--kb", "pets", rows=60, columns=250) as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("When do hamsters sleep?")
        terminal.wait_for("Sources")
        terminal.enter("/sources")
        terminal.wait_for("  1 * [KB#", "Hamsters sleep by day and run by night.", "* cited in the answer")
        tag, lines = re.search(r"  1 \* \[(KB#\d+)\].*\((line.*?)\)", terminal.text).groups()
        terminal.enter("/sources 1")
        terminal.wait_for(
            f"[{tag}], cited in the answer", "  Heading  Pets", f"  Place    {lines}, characters", "  From     knowledge base pets"
        )
        assert f"({pets})" in terminal.text
        terminal.enter(f"/sources {tag.lower()} open")
        terminal.wait_for(f"Opened {pets}, {lines}.")
        number = re.search(r"\d+", lines)[0]
        assert (tmp_path / "opened").read_text() == f"{tmp_path}/vim|-n|+{number}|{pets}|"
        terminal.enter("/sources 99")
        terminal.wait_for("There is no source 99")
        terminal.enter("/kb drop pets")
        terminal.wait_for("Knowledge bases: none")
        terminal.enter("/sources turn 1 1 open")
        terminal.wait_for("The file of")
        terminal.enter("/exit")
        assert terminal.end() == 0
    assert not list(tmp_path.rglob("gone"))
    monkeypatch.setenv("VISUAL", "")
    monkeypatch.setenv("EDITOR", f"{tmp_path}/other")
    with chat(home, "--kb", "pets", "--continue") as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("/sources 1 open")
        terminal.wait_for("Opened ")
        assert (tmp_path / "opened").read_text() == f"{tmp_path}/other|{pets}|"
        pets.unlink()
        terminal.enter("/sources 1 open")
        terminal.wait_for("is missing or not a file")


def test_open_is_the_short_form_of_sources_open(home, pets, monkeypatch, tmp_path):
    editor = tmp_path / "vim"
    editor.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > "{tmp_path}/opened"\n')
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))
    with chat(home, "--kb", "pets", rows=60, columns=250) as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("When do hamsters sleep?")
        terminal.wait_for("Sources")
        tag = re.search(r"\[(KB#\d+)\]", terminal.text)[1]
        terminal.enter("/open 99")
        terminal.wait_for("There is no source 99")
        terminal.enter(f"/open {tag}")
        terminal.wait_for(f"Opened {pets}, line")
        assert re.fullmatch(rf"\+\d+\|{re.escape(str(pets))}\|", (tmp_path / "opened").read_text())
        (tmp_path / "opened").unlink()
        terminal.enter("/open turn 1 1")
        terminal.wait_until(lambda text: text.count(f"Opened {pets}") == 2)
        assert (tmp_path / "opened").exists()


def test_knowledge_bases_are_switched_within_a_conversation(home, pets):
    assert run(home, "index", str(pets.parent), "--kb", "zoo").returncode == 0
    done = run(home, "chat", "--model", "echo", "--kb", "pets", "--session", "zoo", text="/kb\n/kb zoo\n/kb pets zoo\n/kb\n/kb drop pets\n")
    assert [line for line in done.stderr.splitlines() if "nowledge bases: " in line or "Others here" in line] == [
        "Knowledge bases: pets.",
        "To switch: /kb NAME. Others here: zoo.",
        "Knowledge bases: zoo.",
        "Knowledge bases: pets, zoo.",
        "Knowledge bases: pets, zoo.",
        "Knowledge bases: zoo.",
    ]
    done = run(home, "chat", "--model", "echo", "--session", "zoo", text="/kb\n")
    assert "Knowledge bases: zoo." in done.stderr


@pytest.mark.parametrize("word", ["exit", "quit", " Quit "])
def test_a_bare_word_leaves_a_terminal_but_is_a_question_in_a_pipe(home, word):
    with chat(home, columns=120) as terminal:
        terminal.wait_for("Type a question and press Enter. /help lists the commands, and exit leaves.", "echo · ")
        terminal.enter(word)
        assert terminal.end() == 0
    done = run(home, "chat", "--model", "echo", text=f"{word}\n")
    assert (done.stdout, "/help" in done.stderr) == (f"You asked: {word.strip()}\n", False)


def test_an_answer_is_copied_by_a_program_or_else_by_the_terminal(home, tmp_path, monkeypatch):
    """The program is a script that keeps what it is given. One that fails is passed over."""
    for name in ("TMUX", "WAYLAND_DISPLAY", "DISPLAY", "SSH_CONNECTION", "SSH_TTY"):
        monkeypatch.delenv(name, raising=False)
    for name, code in (("wl-copy", 1), ("xclip", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\n/bin/cat > "{tmp_path}/{name}.given"\nexit {code}\n')
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = ("You asked: hello", "You asked: again")
    with chat(home, columns=160) as terminal:
        terminal.wait_for("echo · ")
        for line, answer in zip(("hello", "again"), shown, strict=True):
            terminal.enter(line)
            terminal.wait_for(answer)
        terminal.enter("/copy")
        terminal.wait_for("Asked the terminal to copy the answer (OSC 52).")
        assert f"\x1b]52;c;{base64.b64encode(shown[1].encode()).decode()}\x07".encode() in terminal.raw
        terminal.enter("/copy 1")
        terminal.wait_until(lambda text: text.count("(OSC 52)") == 2)
        assert f"\x1b]52;c;{base64.b64encode(shown[0].encode()).decode()}\x07".encode() in terminal.raw
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.setenv("DISPLAY", ":0")
    with chat(home, "--continue") as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("/copy")
        terminal.wait_for("Copied the answer with xclip.")
        assert (tmp_path / "xclip.given").read_text() == (tmp_path / "wl-copy.given").read_text() == shown[1]
        assert b"\x1b]52;" not in terminal.raw


def test_it_is_told_that_nothing_can_be_copied(home, monkeypatch):
    for name in ("TMUX", "WAYLAND_DISPLAY", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    done = run(home, "chat", "--model", "echo", text="hello\n/copy\n")
    assert (done.returncode, done.stdout, "This terminal has no clipboard." in done.stderr) == (2, "You asked: hello\n", True)
    with chat(home, term="linux") as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("hello")
        terminal.wait_for("You asked: hello")
        terminal.enter("/copy")
        terminal.wait_for("This terminal has no clipboard.")


def test_what_was_searched_for_is_shown_and_so_is_that_nothing_was_found(home, pets):
    with chat(home, "--kb", "pets", "--rewrite", columns=150) as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("When do hamsters sleep?")
        terminal.wait_for("Sources")
        terminal.enter("And cats?")
        terminal.wait_for("Searched for: You asked: User: When do hamsters sleep?", "You asked: And cats?")
        terminal.enter("/tokens")
        terminal.wait_for("Query rewrite: ")
        terminal.enter("/rewrite off")
        terminal.wait_for("are not rewritten")
        terminal.enter("And hamsters?")
        terminal.wait_for("You asked: And hamsters?")
    assert ["rewriting" in turn.about for turn in said(home)] == [False, True, False]
    answers = run(home, "chat", "--model", "echo", "--kb", "pets", "--rewrite", "--json", text="When do hamsters sleep?\nxyzzy?\n").stdout
    first, second = map(json.loads, answers.splitlines())
    assert ("rewriting" in first, second["rewriting"]["text"]) == (False, "You asked: User: When do hamsters sleep?")
    with chat(home, "--kb", "pets", "--where", "source=nowhere/*") as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("When do hamsters sleep?")
        terminal.wait_for("Nothing relevant was found in pets: answered without sources.")
        assert "Sources\n" not in terminal.text


def test_passages_of_a_knowledge_base_that_is_dropped_are_not_marked(home, pets):
    done = run(home, "chat", "--model", "echo", "--kb", "pets", text="When do hamsters sleep?\n/good\n/kb drop pets\n/good\n")
    assert (done.returncode, done.stderr.count("Marked as useful"), "There is nothing to mark." in done.stderr) == (2, 1, True)


def test_explain_shows_what_supports_each_sentence(home, pets):
    done = run(home, "chat", "--model", "echo", "--kb", "pets", text="When do hamsters sleep?\n/explain\n")
    assert (done.returncode, "Support of each sentence by the passages that it cites" in done.stderr) == (0, True)
    assert re.search(r"\n  [01]\.\d\d  You asked: When do hamsters sleep\?", done.stderr)


def test_edit_without_a_text_puts_the_question_into_the_line(home):
    with chat(home) as terminal:
        terminal.wait_for("echo · ")
        terminal.enter("What size?")
        terminal.wait_for("You asked: What size?")
        terminal.enter("/edit")
        terminal.wait_until(lambda text: text.count("> What size?") == 2)
        terminal.send(" Of which" + ENTER)
        terminal.wait_for("You asked: What size? Of which")
    assert [turn.question for turn in said(home)] == ["What size? Of which"]


def test_a_person_is_told_what_the_model_will_not_see_and_how_to_keep_it(home):
    with chat(home, "--ctx", "700", "--max-tokens", "60") as terminal:
        terminal.wait_for("echo · ")
        for number in range(12):
            terminal.enter(f"Question {number}, which is not short at all, and says so")
            terminal.wait_for(f"You asked: Question {number},")
        terminal.wait_for("From the next question on, the model sees turn", "/pin N")
        terminal.wait_for("not in full")


def test_a_dumb_terminal_has_plain_lines(home):
    with chat(home, term="dumb") as terminal:
        terminal.wait_for(">")
        terminal.enter("hello")
        terminal.wait_for("You asked: hello")
        assert b"\x1b" not in terminal.raw
        terminal.send(CTRL_D)
        assert terminal.end() == 0


def test_a_model_that_cannot_be_opened_ends_it_before_anything_is_typed(home):
    with Terminal("chat", "--model", "nowhere.gguf", home=home) as terminal:
        assert terminal.end() == 4
        assert "nowhere.gguf" in terminal.text
        assert "Traceback" not in terminal.text


def test_nothing_is_typed_either_where_that_was_so_before_the_editor_was_there():
    opening = Future()
    opening.set_exception(ModelNotFoundError("It is not here."))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        editor = LineEditor(None, words=lambda _: [], toolbar=lambda: "", opening=opening)
        keys.send_text("typed\r")
        with pytest.raises(ModelNotFoundError, match=r"It is not here\."):
            editor.read()


# --- without a terminal ---


def test_lines_that_are_piped_in_are_asked_one_by_one(home):
    done = run(home, "chat", "--model", "echo", "--session", "piped", text="one\n```\ntwo\n```\n/tokens abc\n")
    assert (done.returncode, done.stdout) == (0, "You asked: one\nYou asked: ```\n3\n")
    more = run(home, "chat", "--model", "echo", "--session", "piped", "--json", text="three\n")
    answer = json.loads(more.stdout)
    assert answer["answer"] == "You asked: three"
    assert sum(each["used"] for each in answer["ledger"]["entries"] if each["name"] != "answer") == answer["usage"]["prompt_tokens"]
    assert [turn.question for turn in said(home, "piped")] == ["one", "```\ntwo\n```", "three"]


def test_a_window_that_is_capped_is_told_once_and_in_every_answer_object(home):
    done = run(home, "chat", "--model", "echo", "--ctx", "1000000", "--session", "capped", text="one\ntwo\n")
    assert done.stderr.count("Warning: The window has 131,072 of the 1,000,000 tokens asked for (--ctx)") == 1
    done = run(home, "chat", "--model", "echo", "--ctx", "1000000", "--session", "capped", "--json", text="three\nfour\n")
    assert [len(json.loads(line)["warnings"]) for line in done.stdout.splitlines()] == [1, 1]


def test_a_conversation_that_is_resumed_has_its_own_system_text(home):
    for name in ("terse", "polite"):
        run(home, "chat", "--model", "echo", "--session", name, "--system", f"Be {name}.", text="hello\n")
    shown = "System prompt: Be "
    done = run(
        home, "chat", "--model", "echo", "--session", "terse", text="/resume polite\n/system\n/system Be brief.\n/resume terse\n/system\n"
    )
    assert [line.split()[3] for line in done.stderr.splitlines() if line.startswith(shown)] == ["polite.", "brief.", "terse."]
    done = run(home, "chat", "--model", "echo", "--session", "terse", "--system", "Be loud.", text="/resume polite\n/system\n")
    assert f"{shown}loud." in done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/nope", "no command /nope"),
        ("/attach ~nobody-here/x", "cannot be attached"),
        ("/save ~nobody-here/x", "cannot be written"),
        (f"/edit {'9' * 5000}", "/edit takes a whole number"),
        (f"/fork {'9' * 5000}", "/fork takes a whole number"),
    ],
)
def test_an_error_does_not_end_a_pipe_and_is_its_exit_code(home, line, says):
    done = run(home, "chat", "--model", "echo", text=f"{line}\nhello\n")
    assert (done.returncode, done.stdout) == (2, "You asked: hello\n")
    assert says in done.stderr


def test_an_error_under_json_is_an_object_too(home):
    done = run(home, "chat", "--model", "echo", "--json", text="/nope\nhello\n")
    error, answer = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, error["error"]["type"], answer["answer"]) == (2, "UsageError", "You asked: hello")


def test_conversations_are_listed_found_renamed_exported_and_deleted(home, manage, tmp_path):
    run(home, "chat", "--model", "echo", "--session", "garden", text="Which soil?\n")
    run(home, "chat", "--model", "echo", "--session", "kitchen", text="Which oven?\n")
    listed = json.loads(manage("chat", "--list", "--json")[1])["conversations"]
    assert [(each["name"], each["num_turns"]) for each in listed] == [("garden", 1), ("kitchen", 1)]
    assert json.loads(manage("chat", "--search", "ovens", "--json")[1])["found"][0]["conversation"] == "kitchen"
    assert json.loads(manage("chat", "--session", "garden", "--rename", "allotment", "--json")[1]) == {"name": "allotment"}
    for name in ("kept.md", "kept.json"):
        assert manage("chat", "--session", "allotment", "--export", tmp_path / name)[0] == 0
    assert json.loads((tmp_path / "kept.json").read_text())["turns"][0]["answer"] == "You asked: Which soil?"
    assert "# allotment" in (tmp_path / "kept.md").read_text()
    code, _, err = manage("chat", "--session", "allotment", "--export", tmp_path / "kept.md")
    assert (code, "already exists" in err) == (2, True)
    code, out, _ = manage("chat", "--session", "allotment", "--delete", "--yes", "--json")
    assert (code, json.loads(out)) == (0, {"name": "allotment", "deleted": True})
    assert manage("chat", "--session", "allotment", "--export", tmp_path / "x.md")[0] == 2
    assert "allotment" not in manage("chat", "--list")[1]


def test_ctrl_c_ends_a_question_that_is_still_searched_for(home):
    given = chat_command.make_context("chat", ["--model", "echo"]).params
    room = Room({name: given[name] for name in Asking.__annotations__}, SamplingParams(), ConversationChoice(name="stopped"))
    room.open()
    with pytest.raises(InterruptedRunError):
        room.say("hello", on_prepared=lambda _: room.cancel())
    assert room.say("hello").text == "You asked: hello"
    room.close()
    assert [turn.question for turn in said(home, "stopped")] == ["hello", "hello"]


def test_a_passage_that_came_with_an_earlier_turn_has_its_place_where_it_is_cited():
    hit = Hit(Chunk(7, 1, 0, "By day.", 10, 17, "pets.md", kb="pets"), 1.0)
    about = {"citations": ["KB#7"]}
    turns = [
        Turn(id=1, question="When?", answer="By day [KB#7].", about=about, hits=(hit,)),
        Turn(id=2, question="Sure?", answer="Yes [KB#7].", about=about),
    ]
    assert markdown("pets", turns).count("pets.md") == 2


def test_nothing_is_kept_if_that_is_wanted(home):
    assert run(home, "chat", "--model", "echo", "--no-keep", text="secret\n").stdout == "You asked: secret\n"
    assert "secret" not in run(home, "chat", "--list").stdout
    assert not [path for path in home.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


@pytest.mark.parametrize(
    "args", [["--session", "a", "--continue"], ["--delete"], ["--session", "nowhere", "--delete", "--yes"], ["--max-seconds", "3"]]
)
def test_what_does_not_go_together(manage, args):
    code, _, err = manage("chat", "--model", "echo", *args)
    assert code == 2
    assert err.startswith("Error: ")


def test_memories_are_told(home, manage):
    manage("memory", "add", "The printer of this house is called Bertha.", "--importance", "0.9")
    done = run(home, "chat", "--model", "echo", "--json", text="hello\n")
    entries = {each["name"]: each for each in json.loads(done.stdout)["ledger"]["entries"]}
    assert entries["memories"]["used"] > 20
    assert manage("memory", "edit", "1", "--importance", "0.1")[0] == 0
    done = run(home, "chat", "--model", "echo", "--json", text="hello\nWho is Bertha?\n")
    first, second = (json.loads(line)["ledger"]["entries"] for line in done.stdout.splitlines())
    assert "memories" not in {each["name"] for each in first}
    assert "memories" in {each["name"] for each in second}
    assert manage("memory", "forget", "1")[0] == 0
    assert json.loads(manage("memory", "list", "--json")[1]) == {"memories": []}


def test_markdown_is_drawn_once_and_controls_nothing(capsys):
    """The blocks of a text come out whole and in order, whatever pieces it came in."""
    text = "# Title\n\nSome *words*.\n\n- a\n- b\n\n```python\nprint('x')\n```\n\n[link](http://example.com) \x1b[31mred\x07\n"
    for size in (1, 3, 1000):
        view = MarkdownView(console())
        for start in range(0, len(text), size):
            view(text[start : start + size])
        view.close()
        shown = capsys.readouterr().out
        assert "\x1b]8" not in shown
        assert "\x07" not in shown
        words = re.sub(r"\s+", " ", shown)
        assert [words.count(each) for each in ("Title", "Some words.", "print('x')", "red")] == [1, 1, 1, 1]


def test_help_and_first_key_do_not_wait_for_heavy_parts(home):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "localrag", "chat", "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    heavy = [name for name in ("numpy", "prompt_toolkit", "llama_cpp", "rich", "pydantic") if f" {name}\n" in done.stderr]
    assert heavy == []
