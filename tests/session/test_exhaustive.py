"""Questions for which every matching passage is read: many passes, one answer, and nothing that no passage said."""

import json

import pytest

from localrag.decoding import SamplingParams
from localrag.engine.loading import open_model
from localrag.errors import BudgetExceededError
from localrag.kb import KnowledgeBase, Where
from localrag.session import Session
from localrag.session.exhaustive import _facts, _schema, ask_all
from tests.gguf_files import write_model
from tests.kb.hash_embedder import HashEmbedder

QUESTION = "kilns fire cones of size"
NUM_PAGES = 5


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A tiny model of random weights (what it notes is nonsense, and valid) over some pages that all match the question."""
    folder = tmp_path_factory.mktemp("all")
    (folder / "pages").mkdir()
    for number in range(NUM_PAGES):
        text = f"# Kiln {number}\n\nAll kilns here fire cones of size {number}. {'They cool for two days and are opened slowly. ' * 3}\n"
        (folder / "pages" / f"{number}.md").write_text(text, encoding="utf-8")
    model = write_model(folder / "model.gguf", changes={"llama.context_length": 4096})
    with KnowledgeBase.open(folder / "kb", "kilns", create=True) as kb, open_model(model, name="tiny") as engine:
        kb.ingest([folder / "pages"], HashEmbedder())
        yield Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=900)


def test_every_matching_passage_is_read_in_passes_that_fit(session):
    steps = []
    answer = ask_all(session, QUESTION, sampling=SamplingParams(max_tokens=8), on_step=steps.append)
    matching = {hit.label for hit in session.retrieve(QUESTION, top_k=100)}
    coverage = answer.to_dict()["coverage"]
    assert coverage["chunks_read"] == len(matching) >= NUM_PAGES
    assert len(coverage["passes"]) > 1
    assert sum(each["chunks_read"] for each in coverage["passes"]) >= len(matching)
    assert all(each["prompt_tokens"] + each["completion_tokens"] <= session.slot.n_ctx for each in coverage["passes"])
    assert {hit.label for hit in answer.hits} <= matching
    assert [step.num_read for step in steps] == sorted(step.num_read for step in steps)
    assert all(step.num_matching == len(matching) for step in steps if step.num_passes == 0)
    if not answer.hits:
        assert any("Nothing about it was found" in warning for warning in answer.warnings)


def test_what_fits_at_once_is_answered_at_once(session):
    kb, engine = session.knowledge_bases[0], session.engine
    wide = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=4096)
    answer = ask_all(wide, QUESTION, sampling=SamplingParams(max_tokens=8))
    assert answer.passes == ()
    assert answer.coverage["chunks_read"] == len(answer.hits) == len(wide.retrieve(QUESTION, top_k=100))


def test_piped_text_is_read_too_and_conditions_that_nothing_passes_are_said(session):
    kb, engine = session.knowledge_bases[0], session.engine
    wide = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=4096)
    both = ask_all(wide, QUESTION, sampling=SamplingParams(max_tokens=8), piped="The kilns of size 9 are new.")
    assert {hit.label for hit in both.hits} == {hit.label for hit in wide.retrieve(QUESTION, top_k=100)} | {"KB#stdin/1"}
    none = ask_all(wide, QUESTION, sampling=SamplingParams(max_tokens=8), where=Where.parse(["tag=none"]))
    assert none.warnings == ("No document passes tag=none. To see what they are: localrag kb show NAME",)


def test_a_window_without_room_for_a_passage_is_refused_with_the_numbers(session):
    kb, engine = session.knowledge_bases[0], session.engine
    narrow = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=300)
    with pytest.raises(BudgetExceededError) as caught:
        ask_all(narrow, QUESTION, sampling=SamplingParams(max_tokens=8))
    numbers = caught.value.numbers
    assert numbers["needed"] > numbers["window"] == 300
    enough = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=numbers["needed"])
    assert ask_all(enough, QUESTION, sampling=SamplingParams(max_tokens=8)).passes


def test_notes_that_were_cut_off_count_as_far_as_they_are_whole():
    facts = [{"source": "KB#1", "fact": 'a "quoted" {brace}'}, {"source": "KB#2", "fact": "b"}, {"source": "KB#9", "fact": "foreign"}]
    whole = json.dumps({"facts": facts})
    assert _facts(whole, {"KB#1", "KB#2"}) == [("KB#1", 'a "quoted" {brace}'), ("KB#2", "b")]
    for end in range(len(whole)):
        found = _facts(whole[:end], {"KB#1", "KB#2"})
        assert found == [("KB#1", 'a "quoted" {brace}'), ("KB#2", "b")][: len(found)]
    assert _facts('{"facts":[]}', {"KB#1"}) == []


def test_a_fact_can_only_come_from_a_passage_that_was_shown():
    schema = _schema(["KB#1", "KB#7"])
    assert schema["properties"]["facts"]["items"]["properties"]["source"] == {"enum": ["KB#1", "KB#7"]}
