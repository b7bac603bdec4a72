"""The judge's tools, on the echo engine and real knowledge bases: what they give fits the room that they share."""

import json
import random
import sqlite3
from contextlib import ExitStack, closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.budget import Entry, Ledger
from localrag.citation import TAG
from localrag.deliberation import replies
from localrag.deliberation.roles import TOOLS
from localrag.engine.echo import EchoTokenizer, open_echo
from localrag.errors import InterruptedRunError
from localrag.kb import KnowledgeBase
from localrag.kb.retrieve import piped_hits
from localrag.session import Session
from localrag.session.toolbox import NUM_NAMES, Toolbox
from localrag.text.markup import as_content
from tests import material
from tests.kb.hash_embedder import HashEmbedder

ROOM = 20_000
NO_ROOM = '{"note":"no room left"}'


def count(text):
    tokenizer = EchoTokenizer()
    return tokenizer.count(as_content(text, tokenizer))


def index(folder, name, pages):
    (folder / name).mkdir()
    for number, text in enumerate(pages):
        (folder / name / f"page-{number}.md").write_text(text, encoding="utf-8")
    kb = KnowledgeBase.open(folder / "kb", name, create=True)
    kb.ingest([folder / name], HashEmbedder())
    return kb


def guide():
    parts = "\n\n".join(f"## Step {step}\n\nIn step {step} the oven dries nylon number {step}." for step in range(6))
    return f"# Guide\n\n{parts}\n"


@pytest.fixture(scope="module")
def knowledge_bases(tmp_path_factory):
    """A guide of six steps, and pages of all kinds of text."""
    rng, folder = random.Random(6), tmp_path_factory.mktemp("documents")
    with ExitStack() as opened:
        pages = [f"# Page {number}\n\n{material.text(rng, 200)}\n" for number in range(6)]
        yield [opened.enter_context(index(folder, name, texts)) for name, texts in (("guide", [guide()]), ("mixed", pages))]


@pytest.fixture(scope="module")
def engine():
    with open_echo() as engine:
        yield engine


@pytest.fixture(scope="module")
def session(engine, knowledge_bases):
    return Session(engine, knowledge_bases=knowledge_bases[:1], embedder=HashEmbedder(), n_ctx=8192)


@pytest.fixture(scope="module")
def both(engine, knowledge_bases):
    return Session(engine, knowledge_bases=knowledge_bases, embedder=HashEmbedder(), n_ctx=8192)


@pytest.fixture(scope="module")
def steps(knowledge_bases):
    """The ids of the six steps."""
    (first,) = [chunk for chunk in knowledge_bases[0].around(1) if chunk.id == 1]
    return [chunk.id for chunk in knowledge_bases[0].around(first.id, num_before=99, num_behind=99)]


def box(session, room=ROOM, *, ledgers=dict, hits=(), num_calls=None):
    return Toolbox(session, room, ledgers=ledgers, hits={hit.label: hit for hit in hits}, num_calls=num_calls)


def failed(toolbox, tool, **arguments):
    """The message of a call that must fail."""
    used, told = toolbox.use(tool, arguments)
    assert told["is_error"]
    assert used.hits == ()
    assert used.text == told["text"]
    return json.loads(used.text)["error"]


def ids(used):
    return [int(article["id"].rpartition("#")[2]) for article in json.loads(used.text)["results"]]


def test_a_search_gives_passages_and_its_account(session):
    toolbox = box(session)
    used, told = toolbox.use("kb_search", {"query": "nylon number 3"})
    found = session.retrieve("nylon number 3", top_k=8)
    assert used.hits == tuple(found)
    assert [article["text"] for article in json.loads(used.text)["results"]] == [hit.chunk.text for hit in found]
    assert told == {
        "tool": "kb_search",
        "arguments": {"query": "nylon number 3"},
        "text": used.text,
        "num_tokens": count(used.text),
        "room_left": ROOM - count(used.text),
        "is_error": False,
        "is_exhausted": False,
    }
    again, _ = toolbox.use("kb_search", {"query": "nylon number 3"})
    assert again.hits == (), "they stand above already"
    assert json.loads(again.text)["above"] == [hit.label for hit in found]


@pytest.mark.parametrize("form", ["KB#{}", "[KB#{}]", "{}", " kb#{} ", "KB\u200b#{}", "KB#guide/{}"])
def test_a_passage_is_read_with_its_neighbours_by_its_tag(session, steps, form):
    used, told = box(session).use("kb_read", {"id": form.format(steps[2])})
    assert ids(used) == steps[1:4]
    assert [hit.label for hit in used.hits] == [f"KB#{one}" for one in steps[1:4]]
    assert not told["is_error"]


def test_a_passage_that_was_found_keeps_its_score(session, steps):
    found = session.retrieve("nylon number 3")
    used, _ = box(session, hits=found).use("kb_read", {"id": str(steps[3])})
    scores = {hit.label: hit.score for hit in found}
    assert [hit.score for hit in used.hits] == [scores.get(hit.label, 0.0) for hit in used.hits]
    assert any(hit.score for hit in used.hits)


def test_of_several_knowledge_bases_one_is_named(both, steps):
    used, _ = box(both).use("kb_read", {"id": f"[KB#guide/{steps[0]}]"})
    assert [hit.label for hit in used.hits] == [f"KB#guide/{one}" for one in steps[:2]]
    assert set(json.loads(used.text)["results"][0]) == {"id", "source", "heading", "text"}
    assert "several" in failed(box(both), "kb_read", id=str(steps[0]))
    assert "no passage" in failed(box(both), "kb_read", id=f"KB#other/{steps[0]}")
    found, _ = box(both).use("kb_search", {"query": "oven nylon"})
    assert {hit.chunk.scope for hit in found.hits} == {"guide", "mixed"}


@pytest.mark.parametrize(
    "one",
    [
        "KB#999",
        "KB#0",
        "9" * 18,
        "9" * 19,
        "-1",
        "٣",
        "KB#other/1",
        "KB#guide/",
        "1; DROP TABLE chunks",
        "../1",
        "KB#1 KB#2",
        "x",
        "\ud800",
    ],
)
def test_an_id_that_is_not_there_is_told_without_repeating_it(session, one):
    assert failed(box(session), "kb_read", id=one) == "There is no passage with that id. Use the tag of a source."


def test_piped_text_is_read_too(session):
    hits = piped_hits("\n\n".join(f"Line {number}. " + "The nozzle clogs again and again. " * 20 for number in range(6)), "line 2", len)
    assert len(hits) > 4
    used, _ = box(session, hits=hits).use("kb_read", {"id": "KB#stdin/3"})
    assert [hit.label for hit in used.hits] == ["KB#stdin/2", "KB#stdin/3", "KB#stdin/4"]


def test_where_room_is_short_the_passage_itself_comes_first(session, steps):
    whole = count(box(session).use("kb_read", {"id": str(steps[2])})[0].text)
    used, told = box(session, whole - 40, num_calls=1).use("kb_read", {"id": str(steps[2])})
    assert ids(used)[0] == steps[2]
    assert sorted(told["omitted"]) == sorted({f"KB#{one}" for one in steps[1:4]} - {hit.label for hit in used.hits})
    assert told["omitted"]


def test_numbers_are_worked_out(session):
    toolbox = box(session)
    assert toolbox.use("calculate", {"expression": "0.1 + 0.2"})[0].text == '{"result":"0.3"}'
    assert failed(toolbox, "calculate", expression="1 / 0") == "The expression divides by zero."
    assert "cannot be read" in failed(toolbox, "calculate", expression="__import__('os')")


LEDGER = Ledger(
    1000,
    (
        Entry("system", 10, 10, 10),
        Entry("evidence", 900, 300, 280, omitted=("KB#4", "KB#5", "KB#6", "KB#7")),
        Entry("memories", 0, 0, 0),
        Entry("answer", 100, 100, 50),
    ),
)


def test_a_ledger_is_read_by_role(session):
    toolbox = box(session, ledgers=lambda: {"Skeptic": LEDGER, "judge": LEDGER})
    text = toolbox.use("read_ledger", {"role": "skeptic"})[0].text
    assert json.loads(text.replace("\u200b", "")) == {
        "role": "Skeptic",
        "window": 1000,
        "sections": {
            "system": {"used": 10, "allotted": 10},
            "evidence": {"used": 280, "allotted": 300, "num_omitted": 4, "omitted": ["KB#4", "KB#5", "KB#6"]},
            "answer": {"used": 50, "allotted": 100},
        },
    }
    assert NUM_NAMES == 3
    assert not TAG.search(text), "what was left out is no source"
    brief = {"window": 1000, "used": 340, "num_omitted": 4}
    for role in ("", "nobody"):
        assert json.loads(toolbox.use("read_ledger", {"role": role})[0].text) == {"roles": {"Skeptic": brief, "judge": brief}}
    assert json.loads(box(session).use("read_ledger", {})[0].text) == {"roles": {}}


def test_a_ledger_is_told_more_briefly_where_room_is_short(session):
    used, told = box(session, 90, ledgers=lambda: {"judge": LEDGER}, num_calls=1).use("read_ledger", {"role": "judge"})
    assert json.loads(used.text) == {"role": "judge", "window": 1000, "used": 340, "num_omitted": 4}
    assert told["truncated"]


def test_the_ledger_of_a_real_answer(session):
    answer = session.ask("Which oven?")
    read = json.loads(box(session, ledgers=lambda: {"judge": answer.ledger}).use("read_ledger", {"role": "judge"})[0].text)
    assert {name: entry["used"] for name, entry in read["sections"].items()}.items() <= {
        entry.name: entry.used for entry in answer.ledger.entries
    }.items()
    assert read["sections"]["evidence"]["used"]


@pytest.mark.parametrize(("tool", "arguments"), [("delete", {}), ("kb_search", {}), ("kb_read", {"id": "  "}), ("calculate", {"x": "1"})])
def test_a_call_that_is_wrong_is_told(session, tool, arguments):
    assert failed(box(session), tool, **arguments)


def test_a_knowledge_base_that_breaks_is_a_message(engine, tmp_path):
    with index(tmp_path, "broken", [guide()]) as kb:
        with closing(sqlite3.connect(kb.path)) as db:
            db.execute("DROP TABLE chunks")
        session = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=4096)
        for tool, name in (("kb_search", "query"), ("kb_read", "id")):
            assert "cannot be used" in failed(box(session), tool, **{name: "1"})


def raising(error):
    def ledgers():
        raise error

    return ledgers


def test_what_else_a_tool_meets_is_a_message_without_its_text(session):
    said = failed(box(session, ledgers=raising(OSError("/secret/path"))), "read_ledger", role="judge")
    assert said == "The tool failed (OSError)."


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InterruptedRunError("Interrupted.")])
def test_a_person_may_stop_it(session, error):
    with pytest.raises(type(error)):
        box(session, ledgers=raising(error)).use("read_ledger", {"role": "judge"})


def test_one_call_gets_half_of_what_is_left_and_the_last_all(session):
    text = '{"result":"1234567890123456789"}'
    expression = {"expression": "1234567890123456789"}
    assert box(session, 2 * len(text) - 2).use("calculate", expression)[0].text == NO_ROOM
    assert box(session, 2 * len(text)).use("calculate", expression)[0].text == text
    toolbox = box(session, 3 * len(text), num_calls=3)
    given = [toolbox.use("calculate", expression)[0] for _ in range(3)]
    assert [used.text for used in given] == [text, text, text]
    assert [used.is_exhausted for used in given] == [False, False, True]


def test_when_the_room_is_used_up_it_is_told_as_long_as_that_fits(session):
    used, told = box(session, 2 * len(NO_ROOM)).use("read_ledger", {})
    assert (used.text, told["is_exhausted"]) == ('{"roles":{}}', True)
    used, told = box(session, 2 * len(NO_ROOM)).use("calculate", {"expression": "10 ** 30"})
    assert (used.text, used.is_exhausted, told["num_tokens"]) == (NO_ROOM, True, len(NO_ROOM))
    for room in (0, 2 * len(NO_ROOM) - 2, -5):
        used, told = box(session, room).use("calculate", {"expression": "10 ** 30"})
        assert (used.text, used.is_exhausted, told["num_tokens"], told["room_left"]) == ("", True, 0, max(0, room))


texts = st.text(st.characters(exclude_categories=()), max_size=40) | st.sampled_from(
    ["oven", "nylon 3", "KB#guide/2", "KB#mixed/1", "[KB#mixed/7]", "2 ** 100", "1/3", "judge", "<|im_start|>system", ""]
)
arguments = st.fixed_dictionaries({}, optional=dict.fromkeys(("query", "id", "expression", "role"), texts))
used_tools = st.lists(st.tuples(st.sampled_from([*TOOLS, "other"]), arguments), max_size=6)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 3000) | st.integers(0, 150), used_tools, st.booleans())
def test_the_room_is_never_exceeded(both, room, uses, tells_last):
    toolbox = box(both, room, ledgers=lambda: {"judge": LEDGER}, num_calls=len(uses) if tells_last else None)
    left = room
    for number, (tool, given_arguments) in enumerate(uses):
        used, told = toolbox.use(tool, given_arguments)
        assert told["text"] == used.text
        assert told["num_tokens"] == count(used.text)
        assert told["room_left"] == left - told["num_tokens"] >= 0
        is_last = tells_last and number == len(uses) - 1
        assert told["num_tokens"] <= (left if is_last else left // 2)
        assert used.text or used.is_exhausted
        assert used.is_exhausted == told["is_exhausted"]
        left = told["room_left"]
        if left < len(NO_ROOM):
            assert used.is_exhausted
        results = json.loads(used.text).get("results", []) if used.text else []
        assert [article["id"] for article in results] == [hit.label for hit in used.hits]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_call_as_its_form_allows_it_is_read(tool):
    (form,) = [each for each in replies.call_schema([tool])["anyOf"] if each["properties"]["name"]["const"] == tool]
    ((name, wanted),) = form["properties"]["arguments"]["properties"].items()
    reply = json.dumps({"name": tool, "arguments": {name: "x" * wanted["maxLength"]}})
    assert replies.parse_call(reply, TOOLS) == replies.Call(tool, {name: "x" * wanted["maxLength"]})
    assert len(reply) / 2 <= replies.MAX_CALL_TOKENS


@pytest.mark.parametrize("reply", ["", "[" * 100_000, "[]", '{"name":["kb_read"],"arguments":{}}', '{"name":"conclude","arguments":{}}'])
def test_what_is_no_call_ends_them(reply):
    assert replies.parse_call(reply, TOOLS) is None


def test_half_a_character_in_a_call_can_be_kept():
    call = replies.parse_call('{"name":"kb_search","arguments":{"query":"a\\ud800b"}}', TOOLS)
    assert call.arguments["query"].encode()


def test_a_long_expression_is_not_cut_into_another_one():
    expression = "+".join(["1000"] * 40)
    call = replies.parse_call(json.dumps({"name": "calculate", "arguments": {"expression": expression}}), TOOLS)
    assert call.arguments == {"expression": expression}
