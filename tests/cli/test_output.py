"""Standard streams that cannot be written, and texts that would control the terminal they are shown on."""

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localrag.cli.terminal import terminal_json
from localrag.text.sanitize import safe

LOCALRAG = [sys.executable, "-m", "localrag"]
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")

COMMANDS = [
    ("ask", "hello", "--model", "echo"),
    ("ask", "hello", "--model", "echo", "--json"),
    ("budget", "hello", "--model", "echo", "--json"),
    ("tokens", "four", "--model", "echo"),
    ("tokens", "four", "--model", "echo", "--json"),
    ("models", "list"),
    ("models", "list", "--json"),
    ("kb", "list", "--json"),
    ("memory", "list", "--json"),
    ("report",),
    ("report", "--json"),
    ("completion", "bash"),
    ("council", "--list", "--json"),
    ("--help",),
    ("ask", "--help"),
    ("--version",),
]


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """Of a home with something in it."""
    found = {**os.environ, "LOCALRAG_HOME": str(tmp_path_factory.mktemp("output") / "home")}
    for args in (("ask", "hello", "--model", "echo"), ("memory", "add", "Mia is a cat.")):
        subprocess.run([*LOCALRAG, *args], env=found, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return found


def run_in_shell(redirected, args, env):
    """A command line whose streams are as a shell makes them: (exit code, what it said on standard error)."""
    command = ["bash", "-c", f'"$@" {redirected}', "bash", *LOCALRAG, *args]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    done = subprocess.run(command, env=env, text=True, check=False, **streams)
    return done.returncode, done.stderr


def check_said(code, err, reason):
    """One line and its way out, and nothing that Python says in the end."""
    lines = err.splitlines()
    assert [lines[0], len(lines), code] == [f"Error: Standard output cannot be written: {reason}.", 2, 3], err
    assert lines[1].startswith("  ")


@needs_full
@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_a_full_standard_output_is_one_line(args, env):
    check_said(*run_in_shell(">/dev/full", args, env), "the disk is full")


@pytest.mark.parametrize("args", [COMMANDS[1], COMMANDS[3], COMMANDS[-1]], ids=" ".join)
def test_a_closed_standard_output_is_one_line(args, env):
    check_said(*run_in_shell(">&-", args, env), "it is closed")


@needs_full
def test_it_is_one_line_without_a_buffer_too(env):
    check_said(*run_in_shell(">/dev/full", COMMANDS[1], {**env, "PYTHONUNBUFFERED": "1"}), "the disk is full")


@needs_full
@pytest.mark.parametrize("redirected", [">/dev/full", ">&-"])
def test_an_error_that_json_cannot_tell_is_a_line_with_its_own_code(redirected, env):
    code, err = run_in_shell(redirected, ("kb", "show", "none", "--json"), env)
    assert (code, err) == (6, "Error: There is no knowledge base 'none'.\n  Create it with: localrag index PATH --kb none\n")


@needs_full
@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-", "<&-", "<&- 2>&-"])
@pytest.mark.parametrize("args", [COMMANDS[0], COMMANDS[5]], ids=" ".join)
def test_where_nobody_can_be_told_the_answer_comes_all_the_same(redirected, args, env, tmp_path):
    whole, plain = tmp_path / "whole", tmp_path / "plain"
    assert run_in_shell(f"{redirected} >{whole}", args, env)[0] == 0
    assert run_in_shell(f">{plain}", args, env)[0] == 0
    assert whole.read_text() == plain.read_text() != ""


@needs_full
def test_both_at_once_are_a_code(env):
    assert run_in_shell(">/dev/full 2>/dev/full", COMMANDS[1], env) == (3, "")


@pytest.mark.parametrize("args", [("--help",), ("ask", "--help"), ("--version",)], ids=" ".join)
def test_a_reader_of_the_help_that_is_gone_is_no_error(args, env):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*LOCALRAG, *args], env=env, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def controls(text):
    """The characters in it that control a terminal or the direction of writing, as Unicode lists them."""
    turns = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return {
        char
        for char in text
        if (unicodedata.category(char) in {"Cc", "Cs"} and char not in "\n\t")
        or unicodedata.bidirectional(char) in turns
        or char in "\u061c\u200e\u200f"
    }


@given(st.text(st.characters(exclude_categories=())))
@example("\x9b31m\x7f\u202ecod.exe\u2066\u061c\U000e0041\ud800")
def test_json_holds_the_same_text_and_controls_nothing(text):
    written = terminal_json({"text": text, text: [text]})
    assert controls(written) == set()
    assert "\n" not in written
    assert json.loads(written) == {"text": text, text: [text]}
    assert controls(safe(text)) == set()


EVIL = "\x9b31mred\u202etxt.exe\u2066\x1b]0;title\x07"


def test_no_command_lets_a_document_control_the_terminal(localrag, tmp_path):
    """Of its name, its headings or its text; what goes into a pipe as the answer itself stays as it is."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / f"a{EVIL.replace('/', '')}.md").write_text(f"# Cats {EVIL}\n\nCats {EVIL} hunt at dusk.\n")
    runs = [
        ("index", folder, "--kb", "pets", "--dry-run"),
        ("index", folder, "--kb", "pets"),
        ("index", folder, "--kb", "pets", "--json"),
        ("search", "cats hunt", "--kb", "pets"),
        ("search", f"cats {EVIL}", "--kb", "pets", "--json"),
        ("kb", "show", "pets"),
        ("kb", "show", "pets", "--json"),
        ("kb", "verify", "pets", "--json"),
        ("ask", f"cats {EVIL}", "--kb", "pets", "--model", "echo", "--json", "--explain"),
        ("budget", f"cats {EVIL}", "--model", "echo", "--show-allocation"),
        ("memory", "add", f"Mia {EVIL}"),
        ("memory", "list"),
        ("memory", "list", "--json"),
        ("report", "--json"),
        ("report",),
        ("tokens", EVIL, "--model", "echo", "--show"),
        ("tokens", EVIL, "--model", "echo", "--show", "--json"),
        ("score", folder / next(folder.iterdir()).name, "--task", f"cats {EVIL}", "--json"),
        ("score", folder / next(folder.iterdir()).name, "--task", f"cats {EVIL}"),
        ("summarize", folder / next(folder.iterdir()).name, "--level", "stub", "--json"),
        ("ask", EVIL, "--kb", EVIL, "--model", EVIL),
        ("ask", EVIL, f"--{EVIL}"),
        (EVIL,),
        ("ask", f"cats {EVIL}", "--kb", "pets", "--model", "echo", "--dry-run", "--explain"),
        ("eval", EVIL),
        ("models", "show", EVIL),
        ("kb", "import", folder / next(folder.iterdir()).name),
        ("chat", "--session", EVIL, "--model", "echo"),
        ("bundle", EVIL),
        ("unbundle", EVIL),
    ]
    for args in runs:
        _, out, err = localrag(*args)
        assert controls(out) == set(), (args, out)
        assert controls(err) == set(), (args, err)
        assert out + err != "", args
    for args in (
        ("ask", f"cats {EVIL}", "--kb", "pets", "--model", "echo", "--explain"),
        ("ask", f"cats {EVIL}", "--kb", "pets", "--model", "echo", "--explain=full"),
        ("council", f"cats {EVIL}", "--kb", "pets", "--model", "echo"),
    ):
        _, _, err = localrag(*args)
        assert controls(err) == set(), (args, err)
        assert err != "", args
