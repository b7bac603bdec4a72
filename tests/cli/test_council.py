"""localrag council as people and scripts meet it: on a pipe, on a terminal, interrupted, again, and from Python."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

import localrag as package
from localrag.catalog import Catalog
from localrag.cli import council_render, main
from localrag.cli.council import council_command
from localrag.cli.terminal import REFRESHES_PER_S
from localrag.errors import BudgetExceededError
from localrag.session import council_run
from localrag.settings import Settings
from tests.gguf_files import write_model
from tests.homes import know_attention

PERSONAS = {"chemist": "You know heat.", "buyer": "You know prices.", "clerk": "You know rules."}
SPECIALISTS = "".join(
    f'[[councils.NAME.specialists]]\nname = "{name}"\npersona = "{persona}"\nmodel = "echo"\n' for name, persona in PERSONAS.items()
)
SHARED = f'system = ""\nmax_tokens = 80\n{SPECIALISTS}[councils.NAME.judge]\nmodel = "echo"\n'
DEFAULT = f"[councils.NAME]\n{SHARED}"
FULL = f'[councils.NAME]\nplan = true\nreview = true\n{SHARED}tools = ["calculate"]\nrounds = 1\n'
COUNCILS = DEFAULT.replace("NAME", "default") + FULL.replace("NAME", "full")


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_catalogue):
    """A models.toml with two councils of the echo, and a model of random weights that never ends by itself."""
    folder = tmp_path_factory.mktemp("council")
    write_model(folder / "tiny.gguf", changes={"llama.context_length": 100_000})
    file = folder / "models.toml"
    head, _, embedders = tiny_catalogue.read_text().partition("[embedders")
    table = f'default_model = "random"\n{head}[models.random]\npath = "{folder}/tiny.gguf"\nn_ctx = 8192\n[embedders{embedders}'
    file.write_text(table + COUNCILS)
    return file


@pytest.fixture(scope="module")
def notes(tmp_path_factory, models):
    """A home with a knowledge base of three notes, where attention is known, so that it is not measured."""
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("docs") / "notes"
    folder.mkdir()
    know_attention(home)
    for name, text in {"pla": "PLA is annealed at 90 degrees.", "abs": "ABS is smoothed with acetone.", "nylon": "Nylon is dried."}.items():
        (folder / f"{name}.md").write_text(f"# {name}\n\n{text}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALRAG_HOME", str(home))
        assert main(["index", str(folder), "--kb", "notes", "--models", str(models)]) == 0
    return home


@pytest.fixture
def council(notes, models, monkeypatch, capsys):
    """Runs `localrag council` in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("LOCALRAG_HOME", str(notes))
    monkeypatch.setenv("LOCALRAG_MODELS", str(models))

    def run(*args):
        code = main(["council", *map(str, args)])
        return code, *capsys.readouterr()

    return run


def events(out):
    return [json.loads(line) for line in out.splitlines()]


def told(found, name):
    return [event for event in found if event.get("event") == name]


def said(found):
    return [(event["role"], event["kind"], event["answer"]) for event in told(found, "said")]


# --- on a pipe


def test_every_event_is_a_line_of_json_in_the_order_in_which_it_came(council):
    code, out, err = council("How is PLA annealed?", "--council", "full", "--kb", "notes", "--json")
    found = events(out)
    assert (code, err) == (0, "")
    names = [event["event"] for event in found]
    assert names[:5] == ["start", "budget", "said", "planned", "search"]
    assert names[-2:] == ["verdict", "end"]
    assert [each["role"] for each in found[0]["roles"]] == [*PERSONAS, "planner", "judge"]
    assert [(each["role"], each["kind"]) for each in told(found, "budget")] == [
        ("planner", "plan"),
        *((name, "proposal") for name in PERSONAS),
        *((name, "review") for name in PERSONAS),
        ("judge", "call"),
        ("judge", "verdict"),
    ]
    assert [event["member"] for event in told(found, "checked")] == list(PERSONAS)
    assert sorted(told(found, "ranking")[0]["points"]) == sorted(PERSONAS)
    for event in told(found, "said"):
        assert event["usage"]["prompt_tokens"] == sum(each["used"] for each in event["ledger"]["entries"] if each["name"] != "answer")
    buyer = next(event for event in told(found, "said") if event["role"] == "buyer" and event["kind"] == "proposal")
    assert buyer["usage"]["cached_tokens"] > 100
    usage = found[-1]["usage"]
    assert usage["evaluated_tokens"] + usage["cached_tokens"] == usage["prompt_tokens"]
    assert found[-1]["state"] == "decided"


def test_the_verdict_goes_to_stdout_and_talk_does_not(council):
    code, out, err = council("How is PLA annealed?", "--council", "full", "--kb", "notes")
    assert code == 0
    assert out.startswith("**You asked: ")
    assert "## Sources" in out
    assert "===" not in out
    assert "\x1b" not in out + err
    lines = err.splitlines()
    assert lines[0] == "Council full"
    marks = [
        "=== plan ===",
        "=== search: ",
        "=== chemist: proposal, ",
        "=== chemist proposes ===",
        "=== clerk: review, ",
        "=== ranking ===",
    ]
    marks += ["=== judge: verdict, ", "=== decided after "]
    places = [next(number for number, line in enumerate(lines) if line.startswith(mark)) for mark in marks]
    assert places == sorted(places)
    assert " shared (" in err


def test_what_is_piped_in_is_evidence_and_is_there_again_in_a_replay(notes, models):
    environment = {**os.environ, "LOCALRAG_HOME": str(notes), "LOCALRAG_MODELS": str(models)}

    def run(*args, piped=""):
        command = [sys.executable, "-m", "localrag", "council", "--json", *args]
        done = subprocess.run(command, input=piped, capture_output=True, text=True, timeout=60, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return events(done.stdout)

    first = run("What failed?", "--seed", "3", "--max-tokens", "60", piped="step 1 ok\n\nstep 2 failed: disk full\n")
    judged = told(first, "said")[-1]
    assert [each["source"] for each in judged["evidence"]] == ["standard input"]
    again = run("--replay", str(first[0]["id"]), piped="something else")
    assert again[0]["id"] == first[0]["id"] + 1
    assert again[0]["task"] == "What failed?"
    assert said(again)[:3] == said(first)[:3]
    assert [each["ledger"] for each in told(again, "budget")][:3] == [each["ledger"] for each in told(first, "budget")][:3]


def test_a_council_that_was_changed_since_is_warned_of(council, models, tmp_path):
    _, out, _ = council("How is PLA annealed?", "--max-tokens", "30", "--json")
    number = events(out)[0]["id"]
    assert "changed since" not in council("--replay", number)[2]
    other = tmp_path / "models.toml"
    other.write_text(models.read_text().replace("You know heat.", "You know cold."))
    code, out, err = council("--replay", number, "--json", "--models", other)
    assert code == 0
    assert err == "Warning: the council default has changed since that run, so the verdict may differ.\n"
    assert events(out)[-1]["state"] == "decided"


def test_the_page_about_councils_holds_what_is_so(council, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "council.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "models.toml"
    file.write_text(written, encoding="utf-8")
    materials = Catalog.load(Settings(home=tmp_path, models_file=file)).council("materials")
    assert (materials.plan, materials.review, len(materials.members), len(materials.judge.tools)) == (True, True, 2, 4)
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    found = events(council("How is PLA annealed?", "--council", "full", "--json")[1])
    found += events(council("x", "--ctx", "64", "--json")[1])[:-1]
    assert {event["event"] for event in found} | {"tool"} == set(rows)
    only = {"said": {"role", "kind"}, "error": {"type", "message", "hint"}}  # the others are those of an answer, and numbers
    for event in found:
        name = event["event"]
        assert all(f"`{field}`" in rows[name] for field in only.get(name, event.keys() - {"event"})), event
    options = set(re.findall(r"`(--[a-z-]+)", page)) - {"--councils"}
    assert options == {option for each in council_command.params for option in each.opts if option.startswith("--")} - {"--models"}


def test_a_limit_of_time_that_ends_members_leaves_the_verdict_its_time(council, monkeypatch):
    code, out, _ = council("How is PLA annealed?", "--max-seconds", "600", "--json")
    assert (code, events(out)[-1]["state"]) == (0, "decided")
    assert "warnings" not in events(out)[-1]
    monkeypatch.setitem(council_run.TIME_SHARES, "proposal", 0.0)
    code, out, _ = council("How is PLA annealed?", "--max-seconds", "600", "--json")
    found = events(out)
    reasons = {event["role"]: event["finish_reason"] for event in told(found, "said")}
    assert (code, reasons) == (0, dict.fromkeys(PERSONAS, "time") | {"judge": "stop"})
    assert told(found, "verdict")
    assert (found[-1]["state"], found[-1]["warnings"]) == ("decided", ["Ended by the time limit: chemist, buyer, clerk."])


def test_a_council_that_has_no_time_for_a_verdict_says_how_much_would_do(council):
    code, out, _ = council("How is PLA annealed?", "--max-seconds", "0.000001", "--json")
    [error], [end] = told(events(out), "error"), told(events(out), "end")
    assert (code, error["type"], end["state"]) == (5, "TimeLimitError", "failed")
    assert error["needed_s"] > error["max_seconds"]


def test_nothing_is_kept_if_nothing_is_to_be(council):
    _, out, _ = council("How is PLA annealed?", "--max-tokens", "20", "--no-keep", "--json")
    assert events(out)[0]["id"] is None


def test_councils_are_listed_with_their_members(council):
    code, out, _ = council("--list")
    assert code == 0
    row = next(line for line in out.splitlines() if line.startswith("default"))
    assert "chemist, buyer, clerk" in row
    listed = json.loads(council("--list", "--json")[1])["councils"]
    default = next(each for each in listed if each["name"] == "default")
    assert [each["name"] for each in default["members"]] == list(PERSONAS)
    assert (default["plan"], default["review"], default["judge"]["tools"]) == (False, False, [])


# --- bad input


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ((), 2, "TASK is missing"),
        (("x", "--council", "defalt"), 3, "default"),
        (("x", "--kb", "none"), 6, "none"),
        (("x", "--model", "none.gguf"), 4, "none.gguf"),
        (("x", "--ctx", "64"), 5, "The prompt of chemist needs"),
        (("--replay", "100000"), 2, "There is no council run 100000"),
        (("x", "--replay", "1"), 2, "--replay and TASK exclude each other"),
        (("--replay", "1", "--ctx", "64"), 2, "--replay and --ctx exclude each other"),
        (("--list", "--replay", "1"), 2, "--list and --replay exclude each other"),
        (("  ",), 2, "empty"),
    ],
)
def test_bad_input_is_one_line_with_a_way_out(council, args, code, says):
    got, out, err = council(*args)
    assert (got, out) == (code, "")
    first = next(line for line in err.splitlines() if line.startswith("Error: "))
    assert says in first + err.splitlines()[-1]


def test_an_error_under_json_ends_the_events_with_its_numbers(council):
    code, out, err = council("x", "--ctx", "64", "--json")
    *before, last = events(out)
    assert (code, err) == (5, "")
    assert [event["event"] for event in before] == ["error", "end"]
    assert before[-1]["state"] == "failed"
    assert last["error"]["role"] == "chemist"
    assert last["error"]["window"] == 64


# --- interrupted


def start(notes, models, *args, **options):
    environment = {
        **os.environ,
        "LOCALRAG_HOME": str(notes),
        "LOCALRAG_MODELS": str(models),
        "TERM": "xterm",
        "COLUMNS": "100",
        "LINES": "30",
    }
    command = [sys.executable, "-m", "localrag", "council", "How is PLA annealed?", *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment | options.pop("env", {}), **options)


ENDLESS = ("--model", "random", "--kb", "notes", "--ctx", "60000", "--max-tokens", "50000")
"""Proposals that take minutes."""


def test_ctrl_c_keeps_what_was_said(notes, models, council):
    with start(notes, models, *ENDLESS, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        begun = ""
        for line in process.stdout:
            begun += line
            if json.loads(line).get("kind") == "proposal" and json.loads(line)["role"] == "clerk":
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=120)
    *found, last = events(begun + rest)
    assert (process.returncode, err) == (130, "")
    assert found[-1]["state"] == "cancelled"
    assert last["error"]["type"] == "InterruptedRunError"
    assert f"localrag report --council {found[0]['id']}" in last["error"]["hint"]
    assert [(role, kind, bool(text)) for role, kind, text in said(found)] == [(name, "proposal", True) for name in PERSONAS]
    assert main(["report", "--council", str(found[0]["id"])]) == 0


# --- on a terminal


class Terminal:
    """What a terminal shows of what a process writes to it: lines, a cursor, and whether that is visible."""

    def __init__(self, **started):
        self._ours, theirs = os.openpty()
        self.drawn, self.screen, self.shows_cursor = b"", [""], True
        self.seen = set()
        notes, models, args = started.pop("notes"), started.pop("models"), started.pop("args", ())
        self.process = start(notes, models, *args, **started, stdout=subprocess.PIPE, stderr=theirs, text=True)
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        try:
            while piece := os.read(self._ours, 65536):
                self.drawn += piece
        except OSError:  # the other end was closed
            pass

    def wait_for(self, *words):
        until = time.monotonic() + 120
        while time.monotonic() < until and not all(word in self.drawn for word in words):
            time.sleep(0.02)
            assert self.process.poll() is None, self.drawn
        assert all(word in self.drawn for word in words), self.drawn

    def end(self):
        """(exit code, stdout)"""
        out, _ = self.process.communicate(timeout=120)
        self._reader.join()
        os.close(self._ours)
        self._show()
        return self.process.returncode, out

    def _show(self):
        row = 0
        for word in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", self.drawn.decode()):
            if word == "\n":
                row += 1
                self.screen += [""] * (row + 1 - len(self.screen))
            elif word.endswith("A") and word.startswith("\x1b"):
                row -= int(word[2:-1] or 1)
            elif word == "\x1b[2K":
                self.screen[row] = ""
            elif word in ("\x1b[?25l", "\x1b[?25h"):
                self.shows_cursor = word.endswith("h")
            elif not word.startswith("\x1b") and word != "\r":
                self.screen[row] += word
                self.seen.add(self.screen[row])


@pytest.mark.skipif(sys.platform == "win32", reason="terminals are opened otherwise there")
def test_on_a_terminal_members_write_side_by_side_and_leave_nothing_behind(notes, models):
    terminal = Terminal(notes=notes, models=models)
    code, out = terminal.end()
    assert (code, bool(out.strip())) == (0, True)
    assert any(re.search(r"^chemist: (reading|writing|done)\b.* clerk: (waiting|reading|writing|done)\b", line) for line in terminal.seen)
    shown = [line for line in terminal.screen if line]
    assert shown[0] == "Council default"
    assert shown.index("=== chemist proposes ===") < shown.index("=== buyer proposes ===")
    assert not any(re.match(r"(chemist|buyer|clerk|judge): ", line) for line in shown)
    assert terminal.shows_cursor
    assert "===" not in out


@pytest.mark.skipif(sys.platform == "win32", reason="terminals are opened otherwise there")
def test_ctrl_c_clears_what_is_drawn(notes, models):
    terminal = Terminal(notes=notes, models=models, args=ENDLESS)
    terminal.wait_for(b"chemist: writing", b"buyer: writing")
    drawn, began = len(terminal.drawn), time.monotonic()
    while (num_drawn := terminal.drawn[drawn:].count(b"chemist: ")) < 8 and time.monotonic() < began + 120:
        time.sleep(0.1)
    per_s = num_drawn / (time.monotonic() - began)
    terminal.process.send_signal(signal.SIGINT)
    code, out = terminal.end()
    assert (code, out) == (130, "")
    assert num_drawn >= 8
    assert per_s <= REFRESHES_PER_S + 2
    assert terminal.shows_cursor
    shown = [line for line in terminal.screen if line]
    assert not any(re.match(r"(chemist|buyer|clerk|judge): ", line) for line in shown)
    assert any("localrag report --council" in line for line in shown[-2:])


@pytest.mark.skipif(sys.platform == "win32", reason="terminals are opened otherwise there")
def test_a_dumb_terminal_gets_lines(notes, models):
    terminal = Terminal(notes=notes, models=models, args=("--max-tokens", "20"), env={"TERM": "dumb"})
    assert terminal.end()[0] == 0
    assert b"=== chemist proposes ===" in terminal.drawn
    assert b"\x1b" not in terminal.drawn


def drawn(width, height, **texts):
    """A board of that size after these roles wrote these texts."""
    out = Console(file=io.StringIO(), width=width, height=height, markup=False, highlight=False)
    board = council_render._Board(out)
    board.open(list(texts))
    for role, text in texts.items():
        board.column(role).read()
        for word in re.findall(r"\S+\s*", text):
            board.column(role).write(word)
    board.close()
    with out.capture() as captured:
        out.print(board._draw())
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_narrow_terminal_has_members_one_below_the_other():
    lines = drawn(40, 24, chemist="one two three", buyer="", clerk="x " * 100)
    assert lines[:3] == ["chemist: writing, 3 tokens", "one two three", "buyer: reading, 0 s"]
    assert len(lines) <= 22
    assert all(len(line) <= 40 for line in lines)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (5, 3), (30, 4), (80, 5), (200, 60)])
def test_what_is_drawn_fits_the_terminal(width, height):
    lines = drawn(width, height, **{f"member-{n}": "many words \x1b[2J\n\n世界 " * 200 for n in range(4)})
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= max(4, height)
    assert "\x1b" not in "".join(lines)


def test_who_is_asked_again_begins_anew():
    column = council_render._Column("judge")
    column.write('{"text": "cut')
    column.read()
    assert (column.heading, column.tail) == ("judge: reading, 0 s", "")


def test_of_a_form_only_the_texts_are_shown():
    lines = drawn(60, 20, judge='{"text": "PLA is\\nannealed at \\"90", "decision": "It')
    assert lines[1:] == ["PLA is", 'annealed at "90', "It"]


# --- from Python

ORDERS = (
    "import localrag; localrag.council",
    "from localrag.deliberation.flow import deliberate; import localrag",
    "import localrag; localrag.council; from localrag.deliberation.flow import deliberate",
    "import localrag.session.council_run; import localrag",
    "import localrag.deliberation.flow; import localrag",
)


@pytest.mark.parametrize("order", ORDERS)
def test_the_function_and_the_package_of_one_name_are_both_there(order):
    code = f"""{order}
from localrag import council
from localrag.deliberation.flow import deliberate
import localrag.deliberation.roles
assert localrag.council is council and localrag.deliberation.flow.deliberate is deliberate
try:
    localrag.council("x", "no such council")
except localrag.LocalragError as error:
    print(error.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_a_council_from_python(notes, models):
    settings, found = Settings(home=notes, models_file=models), []
    sat = package.council("How is PLA annealed?", kbs=["notes"], max_tokens=400, settings=settings, on_event=found.append)
    assert sat.verdict.is_whole
    assert [event["event"] for event in found][-2:] == ["verdict", "end"]
    assert sat.id == found[0]["id"]
    assert {hit.label for hit in sat.hits}
    with pytest.raises(BudgetExceededError, match="chemist"):
        package.council("x", n_ctx=64, keep=False, settings=settings)


def test_a_window_that_is_capped_and_an_answer_that_is_lowered_are_told(council):
    args = ("How is PLA annealed?", "--council", "full", "--kb", "notes", "--ctx", "1000000", "--max-tokens", "900000")
    code, out, _ = council(*args, "--json")
    warnings = told(events(out), "end")[0]["warnings"]
    assert code == 0
    assert len([each for each in warnings if "131,072 of the 1,000,000 tokens asked for" in each]) == 1
    assert any(each.startswith("judge: The answer can have ") for each in warnings)
    code, out, err = council(*args)
    assert "Warning: The window has 131,072 of the 1,000,000 tokens asked for (--ctx)" in out + err
