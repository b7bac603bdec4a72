"""localrag mcp with the real model and embedder, asked by the official SDK's client."""

import pytest

from localrag.journal import Journal
from tests.mcp_server.live import connected, text_of

pytestmark = pytest.mark.model

QUESTION = "At what temperature is PLA annealed?"


@pytest.fixture(scope="module")
def live(furnish, catalogue, tmp_path_factory):
    home = furnish(tmp_path_factory.mktemp("home"))
    log = tmp_path_factory.mktemp("log") / "log"
    with connected(home, "--models", str(catalogue), "--ctx", "4096", log=log) as connection:
        connection.home = home
        yield connection
    assert "Traceback" not in log.read_text(encoding="utf-8")


def test_a_question_is_answered_from_the_handbook(live):
    asked = {"question": QUESTION, "max_tokens": 24}
    budget, given = live.given("budget", **asked), live.given("ask", **asked, seed=3)
    assert given["answer"].strip()
    assert given["model"] == "smollm2-135m"
    assert any("PLA" in each["heading"] for each in given["sources"])
    assert given["prompt_tokens"] == budget["prompt_tokens"]
    assert sum(each["used"] for each in given["ledger"]["sections"] if each["name"] != "answer") == given["prompt_tokens"]
    assert live.given("ask", **asked, seed=3)["answer"] == given["answer"]


def test_what_is_found_is_read(live):
    hit = live.given("search", query=QUESTION, k=3)["hits"][0]
    assert "anneal" in hit["text"].lower()
    chunks = live.given("read_chunk", tag=hit["id"])["chunks"]
    assert [each["text"] for each in chunks if each["is_wanted"]] == [hit["text"]]
    assert "quoted from documents" in text_of(live.use("read_chunk", tag=hit["id"]))


def test_a_follow_up_is_found_with_the_question_before(live):
    found = live.given("search", query="And for how many hours?", earlier=["At which temperature is PETG dried?"], k=3)["hits"]
    assert any("PETG" in each["text"] and "6" in each["text"] for each in found)
    history = [{"question": "At which temperature is PETG dried?", "answer": "At 65 °C."}]
    sources = live.given("budget", question="And for how many hours?", history=history)["sources"]
    assert found[0]["id"] in [each["id"] for each in sources]


def test_a_question_that_is_too_long(live):
    assert "but the window holds 4096." in live.refused("ask", question="anneal " * 5000)


@pytest.mark.parametrize(
    ("question", "max_tokens"),
    [("Write a poem of fifty lines about rain.", 3000), (f"{'PLA melts. ' * 400} Why?", 16)],
    ids=["while it is written", "while the prompt is evaluated"],
)
def test_cancelling_ends_an_answer_before_its_end(live, question, max_tokens):
    live.abandoned("ask", 3.0, question=question, max_tokens=max_tokens, unanswerable="answer")
    assert live.given("search", query="PLA", k=1)["hits"]  # it waits for the thread of the answer
    with Journal.open(live.home) as journal:
        kept = [ask for ask in journal.asks() if ask.question == question]
    assert [ask.finish_reason for ask in kept] in (["cancelled"], [])  # nothing is kept of one that had not begun after 3 s
    assert all(ask.completion_tokens < max_tokens for ask in kept)
