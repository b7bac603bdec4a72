"""Questions for which every matching passage is read: many passes, one answer, and nothing that no passage said."""

import json

import pytest

from localrag.engine.loading import open_model
from localrag.errors import BudgetExceededError, TimeLimitError
from localrag.kb import KnowledgeBase, Where
from localrag.question import Question
from localrag.session import Session
from localrag.session.exhaustive import NO_TIME, NOTHING_NOTED, TOO_LONG, _facts, _schema, ask_all
from localrag.types import SamplingParams
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
    answer = ask_all(session, Question.of(QUESTION, sampling=SamplingParams(max_tokens=8)), on_step=steps.append)
    matching = {chunk.label for chunk in session.knowledge_bases[0].chunks()}
    coverage = answer.to_dict()["coverage"]
    assert coverage["chunks_read"] == len(matching) >= NUM_PAGES
    assert len(coverage["passes"]) > 1
    assert sum(each["chunks_read"] for each in coverage["passes"]) >= len(matching)
    assert all(each["prompt_tokens"] + each["completion_tokens"] <= session.slot.n_ctx for each in coverage["passes"])
    assert {hit.label for hit in answer.hits} <= matching
    evidence = answer.ledger.entry("evidence")
    assert {hit.label for hit in answer.hits} | set(evidence.omitted) == matching
    assert set(evidence.omitted_reasons.values()) <= {NOTHING_NOTED, TOO_LONG}
    assert [step.num_read for step in steps] == sorted(step.num_read for step in steps)
    assert all(step.num_matching == len(matching) for step in steps if step.num_passes == 0)
    if not answer.hits:
        assert any("contain nothing relevant" in warning for warning in answer.warnings)


FAR = ["Which customers did not pay their bill?", "Summarize everything", "zzz qqq"]


@pytest.mark.parametrize("question", FAR)
def test_a_question_that_is_near_no_passage_has_every_passage_read(session, question):
    kb, engine = session.knowledge_bases[0], session.engine
    for n_ctx in (900, 4096):
        sized = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=n_ctx)
        answer = ask_all(sized, Question.of(question, sampling=SamplingParams(max_tokens=8)))
        assert answer.coverage["chunks_read"] == kb.num_chunks
    some = ask_all(sized, Question.of(question, sampling=SamplingParams(max_tokens=8), where=Where.parse(["source=pages/1.md"])))
    assert some.coverage["chunks_read"] == len(kb.chunks(Where.parse(["source=pages/1.md"]))) < kb.num_chunks


def test_an_identical_text_is_read_once_and_named(session, tmp_path):
    folder = tmp_path / "copies"
    folder.mkdir()
    for name in ("may", "june", "july"):
        (folder / f"{name}.txt").write_text("The bill is not paid.")
    (folder / "august.txt").write_text("The bill is paid.")
    for n_ctx in (560, 4096):
        with KnowledgeBase.open(tmp_path / str(n_ctx), "bills", create=True) as kb:
            kb.ingest([folder], HashEmbedder())
            sized = Session(session.engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=n_ctx)
            answer = ask_all(sized, Question.of("Which bills are open?", sampling=SamplingParams(max_tokens=8)))
        assert answer.coverage["chunks_read"] == 4
        evidence = answer.ledger.entry("evidence")
        assert sum(reason.startswith("identical to KB#") for reason in evidence.omitted_reasons.values()) == 2
        assert len(evidence.omitted) + len(answer.hits) == 4
    assert len(answer.hits) == 2
    assert "same text in" in "".join(part.part.text for part in answer.prompt.parts)


def test_a_limit_of_time_leaves_passages_unread_and_names_them(session):
    """The speed of the model is what was measured: whatever it is, the promises hold, and nothing is dropped silently."""
    kb, engine = session.knowledge_bases[0], session.engine
    everything = {chunk.label for chunk in kb.chunks()}
    for n_ctx in (900, 4096):
        sized = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=n_ctx)
        for max_seconds in (0.05, 1.0, 600.0):
            try:
                answer = ask_all(sized, Question.of(QUESTION, sampling=SamplingParams(max_tokens=8), max_seconds=max_seconds))
            except TimeLimitError:
                assert max_seconds < 600
                continue
            evidence = answer.ledger.entry("evidence")
            assert {hit.label for hit in answer.hits} | set(evidence.omitted) == everything
            assert answer.ledger.time.max_seconds == max_seconds
            late = [label for label, reason in evidence.omitted_reasons.items() if reason == NO_TIME]
            assert any("the time limit was reached" in warning for warning in answer.warnings) >= bool(late)
            if max_seconds == 600:
                assert answer.coverage["chunks_read"] == kb.num_chunks


def test_what_fits_at_once_is_answered_at_once(session):
    kb, engine = session.knowledge_bases[0], session.engine
    wide = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=4096)
    answer = ask_all(wide, Question.of(QUESTION, sampling=SamplingParams(max_tokens=8)))
    assert answer.passes == ()
    assert answer.coverage["chunks_read"] == len(answer.hits) == kb.num_chunks


def test_piped_text_is_read_too_and_conditions_that_nothing_passes_are_said(session):
    kb, engine = session.knowledge_bases[0], session.engine
    wide = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=4096)
    both = ask_all(wide, Question.of(QUESTION, sampling=SamplingParams(max_tokens=8), piped="The kilns of size 9 are new."))
    assert {hit.label for hit in both.hits} == {chunk.label for chunk in kb.chunks()} | {"KB#stdin/1"}
    none = ask_all(wide, Question.of(QUESTION, sampling=SamplingParams(max_tokens=8), where=Where.parse(["tag=none"])))
    assert none.warnings == ("No document passes tag=none. To see the documents' fields: localrag kb show NAME",)


def test_a_window_without_room_for_a_passage_is_refused_with_the_numbers(session):
    kb, engine = session.knowledge_bases[0], session.engine
    narrow = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=300)
    with pytest.raises(BudgetExceededError) as caught:
        ask_all(narrow, Question.of(QUESTION, sampling=SamplingParams(max_tokens=8)))
    numbers = caught.value.numbers
    assert numbers["needed"] > numbers["window"] == 300
    enough = Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=numbers["needed"])
    assert ask_all(enough, Question.of(QUESTION, sampling=SamplingParams(max_tokens=8))).passes


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
