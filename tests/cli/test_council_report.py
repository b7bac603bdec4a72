"""localrag report --council and --councils, and the text that a run is for a terminal."""

import io
import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from localrag.cli import council_render
from localrag.journal import Journal
from localrag.text.sanitize import one_line

ROOT = Path(__file__).parents[2]
MODEL = {"model": "smollm2", "slot": {"n_ctx": 8192, "n_ctx_train": 8192, "requested": None, "bound": "training"}}
LEDGER = {
    "window": 8192,
    "entries": [
        {"name": "template", "wanted": 33, "allotted": 33, "used": 33, "omitted": []},
        {"name": "evidence", "wanted": 6200, "allotted": 4096, "used": 3500, "omitted": ["KB#7", "KB#9"]},
        {"name": "proposals", "wanted": 900, "allotted": 500, "used": 490, "omitted": [],
         "shortened": [{"id": "chemist", "level": "truncated", "tokens": 200, "of": 610}]},
        {"name": "gap", "wanted": 100, "allotted": 100, "used": 0, "omitted": []},
        {"name": "answer", "wanted": 512, "allotted": 300, "used": 0, "omitted": []},
    ],
    "spare": 3163,
}  # fmt: skip
EVIDENCE = [{"id": "KB#1", "source": "guide/pets.md", "heading": "Heat", "place": "lines 10-24", "start": 5, "end": 99}]
SAID = {
    "event": "said",
    "role": "chemist",
    "kind": "proposal",
    "answer": "ABS [KB#1] [KB#4].",
    "finish_reason": "length",
    "evidence": EVIDENCE,
}
CHECKED = {"event": "checked", "member": "chemist", "text": "ABS [KB#1].", "cited": ["KB#1"], "invented": ["KB#4"], "num_repeated": 2}
RANKING = {"event": "ranking", "rankings": {"chemist": ["printer", "buyer"]}, "points": {"buyer": 0.25, "printer": 1.0}}
TOOL = {
    "event": "tool", "tool": "kb_search", "arguments": {"query": "annealing"}, "text": '{"results":[]}', "num_tokens": 12,
    "room_left": 340, "is_error": False, "is_exhausted": False,
}  # fmt: skip
VERDICT = {
    "event": "verdict", "text": "It holds 95 °C [KB#1].\n\n- cheap\n- tough", "decision": "Use ABS.", "confidence": "high",
    "citations": [{"id": "KB#1", "supplied": True}, {"id": "KB#4", "supplied": False}], "is_whole": True,
    "dissent": [{"member": "printer", "view": "PETG is easier."}], "sources": EVIDENCE,
}  # fmt: skip
END = {
    "event": "end", "state": "decided", "total_s": 41.26, "loads": [{"model": "smollm2", "load_s": 0.5, "closed": ["other"]}],
    "usage": {"prompt_tokens": 9200, "cached_tokens": 6000, "evaluated_tokens": 3200, "completion_tokens": 812}, "warnings": ["Slow."],
}  # fmt: skip
ROLES = [{"role": "chemist", **MODEL}, {"role": "judge", **MODEL}]
EVENTS = [
    {"event": "start", "id": 1, "council": "board", "task": "PETG or ABS?", "roles": ROLES},
    {"event": "said", "role": "planner", "kind": "plan", "answer": '{"strategy": "Compare."}'},
    {"event": "planned", "strategy": "Compare the heat.", "searches": ["glass transition"]},
    {"event": "search", "queries": ["PETG or ABS?", "glass transition"], "found": 6, "roles": {"chemist": 6, "judge": 6}},
    {"event": "budget", "role": "chemist", "kind": "proposal", "ledger": LEDGER},
    SAID,
    CHECKED,
    {"event": "said", "role": "chemist", "kind": "review", "answer": '{"ranking": ["A"]}'},
    RANKING,
    {"event": "said", "role": "judge", "kind": "call", "answer": '{"name": "kb_search"}'},
    TOOL,
    {"event": "said", "role": "judge", "kind": "verdict", "answer": '{"text": "It holds"}'},
    VERDICT,
    END,
]  # fmt: skip


@pytest.fixture
def held(home):
    """Keeps a run in the journal; its id."""

    def hold(events=EVENTS, *, state="decided", task="PETG or ABS?", name="board"):
        with Journal.open(home) as journal:
            council_id = journal.councils.begin(name, task, {"seed": 7})
            for event in events:
                journal.councils.add(council_id, event)
            if state:
                journal.councils.end(council_id, state)
        return council_id

    return hold


# --- the text ---


def test_a_budget_in_the_style_of_the_document():
    assert council_render.budget_lines({"event": "budget", "role": "materials engineer", "kind": "proposal", "ledger": LEDGER}) == [
        "=== materials engineer: proposal, 4,023 of 8,192 tokens ===",
        "  ✓ template: 33/33 (100.0 %)",
        "  – evidence: 3,500/4,096 (85.4 %) of 6,200 wanted; 2 left out: KB#7, KB#9",
        "  – proposals: 490/500 (98.0 %) of 900 wanted; 1 shortened: chemist truncated 200/610",
        "    gap: 100 kept free",
        "  – answer: room for 300 of 512 wanted",
        "  Total: 4,023 tokens in, 300 for the answer, 3,163 spare",
    ]


def test_what_was_left_out_is_named_as_far_as_there_is_room():
    entry = {"name": "evidence", "wanted": 9000, "allotted": 50, "used": 0, "omitted": [f"KB#{number}" for number in range(1200)]}
    event = {"role": "a", "kind": "proposal", "ledger": {"window": 50, "entries": [entry], "spare": 0}}
    wide, narrow = council_render.budget_lines(event, 200)[1], council_render.budget_lines(event, 60)[1]
    assert wide == (
        "  – evidence: 0/50 (0.0 %) of 9,000 wanted; 1,200 left out: KB#0, KB#1, KB#2, KB#3, KB#4, KB#5, KB#6, KB#7, … 1,192 more"
    )
    assert narrow.endswith("1,200 left out: KB#0, … 1,199 more")


def test_what_a_member_proposes_and_what_was_struck_out():
    assert council_render.proposal_lines(CHECKED, SAID) == [
        "=== chemist proposes ===",
        "  ABS [KB#1].",
        "  Stopped at its token limit (max_tokens).",
        "  [KB#1] guide/pets.md > Heat (lines 10-24)",
        "  Invented sources removed: KB#4",
        "  Repetitions removed: 2 sentences",
    ]
    broken = {"error": {"type": "EngineError", "message": "Out of memory.", "hint": None}}
    assert council_render.proposal_lines({"member": "chemist", "text": ""}, broken) == [
        "=== chemist proposes ===",
        "  Said nothing.",
        "  The model failed: Out of memory.",
    ]


def test_rankings_tools_and_the_end():
    assert council_render.ranking_lines(RANKING) == [
        "=== ranking ===", "  1. printer: 1.00", "  2. buyer: 0.25", "  chemist ranks: printer, buyer",
    ]  # fmt: skip
    assert council_render.ranking_lines({"rankings": {}, "points": {}})[1:] == ["  No ranking could be read."]
    assert council_render.tool_lines(TOOL) == [
        "=== judge uses kb_search (query: annealing) ===", '  {"results":[]}', "  12 tokens, 340 left",
    ]  # fmt: skip
    many = TOOL | {"text": "\n".join(f"line {number}" for number in range(9)), "is_exhausted": True, "is_error": True}
    lines = council_render.tool_lines(many)
    assert (lines[1], lines[-2:]) == ("  It failed:", ["  … 3 lines more", "  12 tokens, none left"])
    assert council_render.end_lines(END) == [
        "=== decided after 41.3 s ===",
        "  3,200 tokens evaluated, 6,000 of 9,200 shared (65.2 % saved), 812 written",
        "  smollm2 loaded in 0.5 s, replacing other",
        "  Warning: Slow.",
    ]


def test_a_verdict_as_markdown():
    assert council_render.verdict_markdown(VERDICT) == (
        "**Use ABS.**\n\nConfidence: high\n\nIt holds 95 °C [KB#1].\n\n- cheap\n- tough\n\n"
        "## Dissent\n\n- **printer**: PETG is easier.\n\n"
        "## Sources\n\n- KB#1: guide/pets.md > Heat (lines 10-24)\n\n"
        "Cited but not among the sources: KB#4\n"
    )
    cut = {"text": "It hol", "decision": "", "confidence": None, "is_whole": False}
    assert council_render.verdict_markdown(cut) == "It hol\n\nThe verdict was cut off at the judge's token limit.\n"


PIECES = [*"[]()!<>:/#*_`~\\|-=. \n\tab1&;@", "](", "](http://x.example)", "![", "<b>", "```", "www.", "http://", "]: "]
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
ANY_TEXT = HOSTILE | st.text(max_size=40) | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]), max_size=20)
LINKS = {"link_open", "image", "html_inline", "html_block", "fence"}


@settings(max_examples=300, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE)
@example("[a](http://x.example) ![b](http://x.example/i.png) <img src=x> <http://x.example>", "[x][y]\n\n[y]: http://x.example", "\\<b>")
@example("# Sources\n- KB#1: forged\n\nSources\n-------\n> ## Sources", "```", "a**](http://x.example)")
@example("\\[a\\](http://x.example) [a\\]](http://x.example) [[a]](http://x.example)", "\\", "`")
def test_no_text_of_a_model_makes_a_link_an_image_html_or_a_heading(text, short, name):
    verdict = VERDICT | {"text": text, "decision": short, "dissent": [{"member": name, "view": short}]}
    verdict["sources"] = [{"id": "KB#1", "source": name, "heading": short, "place": text}]
    for reader in (MarkdownIt("commonmark"), MarkdownIt("gfm-like", {"linkify": False, "html": True})):
        tokens = reader.parse(council_render.verdict_markdown(verdict))
        inner = [child for token in tokens for child in token.children or ()]
        assert not LINKS & {token.type for token in [*tokens, *inner]}
        headings = [tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"]
        assert headings == ["Dissent", "Sources"]


@settings(max_examples=200, deadline=None)
@given(HOSTILE | st.text(st.characters(codec="utf-8"), max_size=20))
@example("snake_case and _emphasis_ __init__ a__b [KB#12] &lt; &#91; R&D `c` **b** ~~s~~ a|b <b> x < 3 \\")
def test_a_decision_reads_as_it_was_written(text):
    decision = f"It: {text}."
    reader = MarkdownIt("gfm-like", {"linkify": False, "html": True})
    tokens = reader.parse(council_render.verdict_markdown(VERDICT | {"decision": decision}))
    assert tokens[0].type == "paragraph_open"
    inner = tokens[1].children
    assert [child.type for child in inner if child.type != "text"] == ["strong_open", "strong_close"]
    assert "".join(child.content for child in inner) == one_line(decision)


def test_names_stay_readable():
    shown = council_render.verdict_markdown(VERDICT | {"decision": "Use my_file.md [KB#12]."})
    assert shown.startswith("**Use my_file.md [KB#12].**\n")
    bare = VERDICT | {"dissent": [{"member": "buyer", "view": ""}], "sources": [{"id": "KB#1"}]}
    assert "\n- **buyer**\n" in council_render.verdict_markdown(bare)
    assert "\n- KB#1\n" in council_render.verdict_markdown(bare)


@pytest.mark.parametrize("address", ["http://x.example/a", "HTTPS://x.example", "www.x.example", "WWW.x.example"])
def test_a_bare_address_is_no_longer_one(address):
    """Some readers make links of addresses in running text: what they look for is not there, and reads the same."""
    shown = council_render.verdict_markdown(VERDICT | {"text": f"See {address}", "decision": address})
    assert not re.search(r"://|www\.", shown, re.IGNORECASE)
    rendered = MarkdownIt("commonmark").render(shown)
    assert f"<strong>{address}</strong>" in rendered
    assert f"<p>See {address}</p>" in rendered


def controls(text):
    """What could act on a terminal: all control and format characters but joiners, and half characters."""
    return {char for char in text if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")} | (
        set(text) & set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200b\ufeff")
    )


@settings(max_examples=150, deadline=None)
@given(ANY_TEXT, ANY_TEXT)
@example("\x1b[2J\x9b31m\u202e\u2066\u061c", "a\nb\r\nc\x85d\u2028e")
@example("x" * 20_000, "y" * 20_000)
def test_no_text_controls_a_terminal(a, b):
    def hostile(value):
        match value:
            case str():
                return f"{a}{value}{b}"
            case dict():
                return {f"{a}{key}{b}" if key in ("chemist", "printer", "query") else key: hostile(each) for key, each in value.items()}
            case list():
                return [hostile(each) for each in value]
        return value

    told = {event["event"]: event for event in map(dict, EVENTS)} | {"said": SAID}
    told = {name: {key: hostile(value) for key, value in event.items()} for name, event in told.items()}
    error = {"message": f"{a}Broken{b}", "hint": a}
    for lines in (
        council_render.start_lines(told["start"]), council_render.planned_lines(told["planned"]),
        council_render.search_lines(told["search"]),
        council_render.budget_lines(told["budget"]), council_render.proposal_lines(told["checked"], told["said"]),
        council_render.said_lines(told["said"] | {"error": error}), council_render.ranking_lines(told["ranking"]),
        council_render.tool_lines(told["tool"]), council_render.verdict_lines(told["verdict"]), council_render.error_lines(error),
        council_render.end_lines(told["end"]),
    ):  # fmt: skip
        assert lines
        assert not controls("".join(lines))
        assert not any("\n" in line for line in lines)


KEYS = [
    "role", "kind", "ledger", "text", "cited", "points", "rankings", "usage", "loads", "roles", "sources", "arguments", "dissent",
    "citations", "total_s", "decision", "omitted", "error",
]  # fmt: skip
VALUES = st.none() | st.text() | st.floats() | st.integers() | st.lists(st.none() | st.text()) | st.just({"entries": [{}]})


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_an_event_that_lacks_something_is_shown_as_far_as_it_goes(event):
    for make in (council_render.start_lines, council_render.planned_lines, council_render.search_lines, council_render.budget_lines,
                 council_render.ranking_lines, council_render.tool_lines, council_render.verdict_lines, council_render.error_lines,
                 council_render.end_lines, council_render.said_lines):  # fmt: skip
        assert all(isinstance(line, str) for line in make(event))
    assert council_render.proposal_lines(event, None)


def test_marks_that_an_encoding_lacks_are_ascii(monkeypatch):
    assert council_render.printable("✓ – … → Ärger", "ascii") == "+ - ... -> ?rger"
    assert council_render.printable("✓ – Ärger", "latin-1") == "+ - Ärger"
    assert council_render.printable("✓ 🧢", "utf-8") == "✓ 🧢"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert council_render.budget_lines({"role": "a", "kind": "b", "ledger": LEDGER})[1] == "  + template: 33/33 (100.0 %)"


# --- the command ---


def test_a_run_is_shown_again(localrag, held):
    council_id = held()
    code, out, err = localrag("report", "--council", council_id)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"Council board, run {council_id}: decided"
    assert lines[3] == "PETG or ABS?"
    assert lines[5:7] == [f"  {role}: smollm2, window 8,192 tokens, limited by training" for role in ("chemist", "judge")]
    titles = [line for line in lines if line.startswith("=== ")]
    assert titles == [
        "=== plan ===", "=== search: 6 passages (chemist 6, judge 6) ===", "=== chemist: proposal, 4,023 of 8,192 tokens ===",
        "=== chemist proposes ===", "=== ranking ===", "=== judge uses kb_search (query: annealing) ===", "=== verdict ===",
        "=== decided after 41.3 s ===",
    ]  # fmt: skip
    assert "  [KB#1] guide/pets.md > Heat (lines 10-24)" in lines  # from the answer that was checked
    assert "**Use ABS.**" in lines
    assert not any('{"' in line for line in lines if "results" not in line)  # no raw forms
    assert localrag("report", "--council", "last")[1] == out


def test_a_run_as_json(localrag, held):
    held(name="older")
    council_id = held()
    code, out, err = localrag("report", "--council", "last", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data | {"started_at": 0, "ended_at": 0} == {
        "id": council_id, "name": "board", "task": "PETG or ABS?", "about": {"seed": 7}, "state": "decided", "started_at": 0,
        "ended_at": 0, "events": EVENTS,
    }  # fmt: skip
    assert data["started_at"] <= data["ended_at"]


def test_a_run_that_failed_shows_what_was_said(localrag, held):
    error = {"event": "error", "type": "EngineError", "message": "The judge gave no verdict.", "hint": "Give it more room."}
    broken = {"event": "said", "role": "chemist", "kind": "review", "error": {"message": "Out of memory."}}
    said = {"event": "said", "role": "judge", "kind": "verdict", "answer": '{"text": "It'}
    out = localrag("report", "--council", held([broken, RANKING, said, error, END | {"state": "failed"}], state="failed"))[1]
    assert "=== chemist: review, unfinished ===\n  The model failed: Out of memory.\n\n=== ranking ===" in out
    assert '=== judge: verdict, unfinished ===\n  {"text": "It\n\nError: The judge gave no verdict.\n  Give it more room.\n' in out


def test_runs_that_did_not_end(localrag, held, home):
    running = held([SAID], state="")
    out = localrag("report", "--council", running)[1]
    assert out.endswith("=== chemist: proposal, unfinished ===\n  ABS [KB#1] [KB#4].\n\nStill running.\n")
    code = (
        "import sys; from pathlib import Path; from localrag.journal import Journal\n"
        "journal = Journal.open(Path(sys.argv[1])); journal.councils.add(journal.councils.begin('b', 'T?', {}), {'event': 'start'})"
    )
    subprocess.run([sys.executable, "-c", code, str(home)], cwd=ROOT, check=True)
    out = localrag("report", "--council", "last")[1]
    assert out.splitlines()[0] == f"Council b, run {running + 1}: interrupted"
    assert out.splitlines()[-1].startswith("Interrupted: the process ended before the verdict.")
    assert json.loads(localrag("report", "--council", "last", "--json")[1])["state"] == "interrupted"


def test_the_list_of_runs(localrag, held):
    held(task="A very long task " * 20)
    newest = held(state="failed", name="panel")
    code, out, err = localrag("report", "--councils")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["ID", "When", "Council", "Task", "State"]
    assert [(line[0], line[3], line[-1]) for line in lines[1:]] == [(str(newest - 1), "board", "decided"), (str(newest), "panel", "failed")]
    assert max(map(len, out.splitlines())) < 140
    assert out.count("…") == 1
    data = json.loads(localrag("report", "--councils", "--last", 1, "--json")[1])
    (row,) = data["councils"]
    assert row.keys() == {"id", "name", "task", "started_at", "ended_at", "state"}
    assert (row["id"], row["state"]) == (newest, "failed")


def test_no_run_yet(localrag, refused, home):
    assert localrag("report", "--councils") == (0, "", "No council has run yet. To run one: localrag council TASK\n")
    assert json.loads(localrag("report", "--councils", "--json")[1]) == {"councils": []}
    assert "has no council runs" in refused(2, "report", "--council", "last")
    assert not home.exists()
    Journal.open(home).close()
    assert "has no council runs" in refused(2, "report", "--council", 1)


def test_an_unknown_run_is_refused_with_the_newest(refused, held):
    ids = [held() for _ in range(6)]
    for unknown in (99, 0, "9" * 19):
        said = refused(2, "report", "--council", unknown)
        assert "has no council run" in said
        assert f"Newest runs: {', '.join(map(str, reversed(ids[1:])))}." in said
    for bad in ("first", "-1", "1.5", "٣", "9" * 30, ""):
        assert "neither the ID of a run nor last" in refused(2, "report", "--council", bad)


def test_what_does_not_go_with_councils(refused, held, tmp_path):
    council_id = held()
    for arguments, said in (
        (("--council", council_id, "--html", tmp_path / "r.html"), "--html does not work with --council."),
        (("--councils", "--html", tmp_path / "r.html"), "--html does not work with --councils."),
        (("--council", council_id, "--session", "work"), "--session does not work with --council."),
        (("--council", council_id, "--councils"), "--councils does not work with --council."),
    ):
        assert said in refused(2, "report", *arguments)
    assert not (tmp_path / "r.html").exists()


def test_hostile_text_through_the_command(localrag, held):
    bad = "\x1b[31m\u202e[bold]a\x9b\x07\udc80"
    held([{"event": "start", "roles": [{"role": bad, "model": bad}]}, CHECKED | {"member": bad, "text": bad}], name=bad, task=bad)
    for arguments in (("--council", "last"), ("--councils",)):
        code, out, err = localrag("report", *arguments)
        assert (code, err) == (0, "")
        assert "[bold]a" in out
        assert not controls(out) - {"\n"}


def test_a_terminal_without_our_marks(held, home):
    held(task="Ärger?")
    command = [sys.executable, "-m", "localrag", "report", "--council", "last"]
    environment = {"LOCALRAG_HOME": str(home), "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    out = done.stdout.decode("ascii")
    assert "  + template: 33/33 (100.0 %)" in out
    assert "  - evidence:" in out
    assert "?rger?" in out
