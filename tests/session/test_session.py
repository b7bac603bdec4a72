"""The walk on the echo engine: what always holds of an answer object, on random asks."""

import json
import math
import os
import random
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrag.budget import Entry, Flex, Ledger, Percent, Profile, TimeLimit
from localrag.engine.core import FIRST_COUNT_ERROR
from localrag.engine.echo import open_echo
from localrag.engine.memory import Situation, plan
from localrag.errors import BudgetExceededError, UsageError
from localrag.kb import KnowledgeBase, Where
from localrag.question import Question
from localrag.session import Session, retrieval
from localrag.session.answer import ledger_warnings
from localrag.session.retrieval import MIN_DEPTH
from localrag.types import Attachment, Chunk, Hit, SamplingParams, comparable, expanded, merged
from tests import identities, material
from tests.kb.hash_embedder import HashEmbedder

NUM_ASKS = int(os.environ.get("LOCALRAG_TEST_ASKS", "120"))  # 1,000 were exact too


@pytest.fixture(scope="module")
def knowledge_bases(tmp_path_factory):
    """Two knowledge bases of documents in all kinds of text."""
    rng, folder = random.Random(20), tmp_path_factory.mktemp("documents")
    bases = []
    for name in ("mixed", "other"):
        (folder / name).mkdir()
        for number in range(15):
            (folder / name / f"page-{number}.md").write_text(f"# Page {number}\n\n{material.text(rng, 300)}\n", encoding="utf-8")
        bases.append(KnowledgeBase.open(folder / "kb", name, create=True))
        bases[-1].ingest([folder / name], HashEmbedder())
    yield bases
    for each in bases:
        each.close()


def sessions(engine, knowledge_bases, rng):
    """A session with a random window and none, one or both of the knowledge bases."""
    chosen = rng.sample(knowledge_bases, rng.randint(0, 2))
    return Session(engine, knowledge_bases=chosen, embedder=HashEmbedder() if chosen else None, n_ctx=rng.randint(256, 8192))


def test_random_asks_keep_every_promise(knowledge_bases, capsys):
    rng, asked, refused, errors = random.Random(4711), 0, 0, []
    with open_echo() as engine:
        for _ in range(NUM_ASKS):
            session = sessions(engine, knowledge_bases, rng)
            question = material.text(rng, rng.randint(1, 40)) + " heat?"
            options = {
                "system": rng.choice([None, material.text(rng, rng.randint(1, 20))]),
                "top_k": rng.randint(1, 20),
                "context_ratio": rng.choice([0.0, 0.2, 0.5, 0.8, 1.0]),
                "piped": rng.choice(["", "", material.text(rng, rng.randint(1, 400))]),
            }
            sampling = SamplingParams(max_tokens=rng.choice([1, 20, 200, 100_000]))
            runner = None if engine.context is None else engine.context.runner
            evaluated = 0 if runner is None else runner.num_evaluated_tokens
            try:
                answer = session.ask(Question.of(question, sampling=sampling, **options))
            except BudgetExceededError as error:
                refused += 1
                assert error.numbers["needed"] > session.slot.n_ctx
                continue
            identities.check(answer.to_dict(), [hit.label for hit in session.retriever.offered(Question.of(question, **options), question)])
            evaluated = engine.context.runner.num_evaluated_tokens - (evaluated if engine.context.runner is runner else 0)
            assert evaluated == answer.prompt_tokens - answer.cached_tokens + answer.completion_tokens - 1
            asked += 1
            if asked % 4 == 0:  # once more without asking, for the characters
                composed = session.prepare(Question.of(question, max_tokens=sampling.max_tokens, **options)).prompt
                assert len(composed.token_ids) == answer.prompt_tokens
                sent = sum(len(part.part.text) for part in composed.parts)
                errors.append((sent / 4 - answer.prompt_tokens) / answer.prompt_tokens)
    assert refused < NUM_ASKS / 2
    assert asked == NUM_ASKS - refused
    with capsys.disabled():
        errors.sort()
        print(f"\n{asked} asks exact, {refused} refused; characters/4 would be off by {errors[0]:.0%} to {errors[-1]:.0%}")


def test_labels_name_the_knowledge_base_where_there_are_several(knowledge_bases):
    with open_echo() as engine:
        one = Session(engine, knowledge_bases=knowledge_bases[:1], embedder=HashEmbedder())
        both = Session(engine, knowledge_bases=knowledge_bases, embedder=HashEmbedder())
        assert all(hit.label.startswith("KB#") and "/" not in hit.label for hit in one.retrieve(material.WORDS[0]))
        labels = [hit.label for hit in both.retrieve(material.WORDS[0], top_k=20)]
        assert {label.partition("/")[0] for label in labels} == {"KB#mixed", "KB#other"}
        assert len(set(labels)) == len(labels)


def test_the_only_match_among_other_subjects_counts_less_than_a_better_one(tmp_path):
    texts = {
        "pets": "Stockings of nylon are dried before they are worn; hamsters chew them.",
        "printing": "Nylon is dried at 80 °C before printing.",
    }
    opened = []
    for name, text in texts.items():
        (tmp_path / f"{name}.md").write_text(text)
        opened.append(KnowledgeBase.open(tmp_path / "kb", name, create=True))
        opened[-1].ingest([tmp_path / f"{name}.md"], HashEmbedder())
    with open_echo() as engine:
        question = "At how many degrees is nylon dried before printing?"
        alone = [Session(engine, knowledge_bases=[kb], embedder=HashEmbedder()).retrieve(question, top_k=1) for kb in opened]
        best, other = Session(engine, knowledge_bases=opened, embedder=HashEmbedder()).retrieve(question, top_k=2)
    pets, printing = (hits[0] for hits in alone)
    assert (best.label, best.score) == ("KB#printing/1", printing.score)
    assert other.label == "KB#pets/1"
    assert other.score == pytest.approx(pets.score * pets.relevance / printing.relevance)
    assert other.score == sum(other.contributions.values()) < 0.8 * pets.score
    for each in opened:
        each.close()


TERMS = "The customer {} liable for loss, for delay and for each defect that was not reported within a week of delivery, whatever it is."


@pytest.fixture
def bases(tmp_path):
    """Two knowledge bases that share a text; one has an edition of it that says the opposite."""
    files = {"old": {"a": TERMS.format("is"), "b": TERMS.format("IS").replace(" ", "\n", 5)}, "new": {"a": TERMS.format("is")}}
    files["new"]["c"] = TERMS.format("is not")
    opened = []
    for name, texts in files.items():
        (tmp_path / name).mkdir()
        for file, text in texts.items():
            (tmp_path / name / f"{file}.txt").write_text(text)
        opened.append(KnowledgeBase.open(tmp_path / "kb", name, create=True))
        opened[-1].ingest([tmp_path / name], HashEmbedder(max_tokens=400))
    yield opened
    for each in opened:
        each.close()


def test_identical_texts_take_one_place_and_each_is_named_with_the_reason(bases):
    """In the ledger, its JSON and the journal; across knowledge bases too."""
    with open_echo() as engine:
        session = Session(engine, knowledge_bases=bases, embedder=HashEmbedder(max_tokens=400))
        answer = session.ask(Question.of("Is the customer liable for loss?", top_k=2))
        identities.check(answer.to_dict(), [hit.label for hit in answer.offered])
    kept = {hit.label for hit in answer.hits}
    assert {hit.chunk.source for hit in answer.hits} > {"new/c.txt"}
    entry = answer.ledger.entry("evidence")
    [same] = kept - {hit.label for hit in answer.hits if hit.chunk.source == "new/c.txt"}
    assert len(entry.omitted) == 2
    assert dict(entry.omitted_reasons) == dict.fromkeys(entry.omitted, f"identical to {same}")
    data = answer.ledger.to_dict()
    [told] = [each for each in data["entries"] if each["name"] == "evidence"]
    assert told["omitted_reasons"] == dict(entry.omitted_reasons)
    assert Ledger.from_dict(json.loads(json.dumps(data))) == answer.ledger
    assert Ledger.from_dict(data).to_dict() == data


def test_evidence_that_a_caller_hands_in_is_in_the_prompt_or_named(knowledge_bases):
    """Also where texts differ in case and white space alone, and where one is handed in with what was piped in."""
    texts = ["One fact.", "ONE   fact.", "Another fact.", "one\nfact.", "One fact!"]
    hits = [Hit(Chunk(at, 1, at, text, 0, len(text), f"{at}.md", kb="notes"), 1.0 / at) for at, text in enumerate(texts, 1)]
    with open_echo() as engine:
        answer = Session(engine).ask(Question.of("Which fact?", hits=hits))
    assert [hit.label for hit in answer.hits] == ["KB#1", "KB#3", "KB#5"]
    assert answer.ledger.entry("evidence").omitted_reasons == {"KB#2": "identical to KB#1", "KB#4": "identical to KB#1"}
    sent = "".join(part.part.text for part in answer.prompt.parts)
    assert "[KB#1] One fact. (1.md; same text in 2.md, 4.md)" in sent


words = st.lists(st.sampled_from(["a", "A", "b", " ", "\n", "."]), min_size=1, max_size=4).map("".join)


@given(st.lists(words, max_size=12), st.integers(0, 600), st.sets(st.integers(1, 12)))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_that_is_handed_in_is_dropped(echo_engine, texts, room, kept):
    hits = [Hit(Chunk(at, 1, at, text, 0, len(text), f"{at % 3}.md", kb="notes"), 1.0 / at) for at, text in enumerate(texts, 1)]
    answer = Session(echo_engine, n_ctx=700 + room).ask(Question.of("Which?", hits=hits, sampling=SamplingParams(max_tokens=8)))
    identities.check(answer.to_dict(), [hit.label for hit in hits])
    shown = {hit.label: comparable(hit.chunk.text) for hit in answer.hits}
    assert len(set(shown.values())) == len(shown)
    again = merged(hits, kept={f"KB#{number}" for number in kept})
    assert sorted(hit.label for hit in expanded(again)) == sorted(hit.label for hit in hits)
    assert {hit.label for hit in again} >= {f"KB#{number}" for number in kept if number <= len(texts)}


@pytest.fixture(scope="module")
def echo_engine():
    with open_echo() as engine:
        yield engine


def test_as_many_passages_are_offered_as_the_window_may_hold(tmp_path):
    (tmp_path / "notes").mkdir()
    for number in range(300):
        (tmp_path / "notes" / f"{number}.md").write_text(f"Nozzle {number} is heated to {number * 7} degrees.\n")
    with KnowledgeBase.open(tmp_path / "kb", "nozzles", create=True) as kb, open_echo() as engine:
        kb.ingest([tmp_path / "notes"], HashEmbedder())
        sessions = [Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=n_ctx) for n_ctx in (1024, 8192)]
        small, large = (
            session.ask(Question.of("Which nozzle is heated?", top_k="fit", sampling=SamplingParams(max_tokens=20))) for session in sessions
        )
    for answer in (small, large):
        identities.check(answer.to_dict(), [hit.label for hit in answer.offered])
    assert len(small.offered) == MIN_DEPTH
    assert 0 < len(small.hits) < MIN_DEPTH, "what does not fit is left out, and named in the ledger"
    assert len(large.offered) > MIN_DEPTH
    assert len(large.hits) > len(small.hits)


def test_conditions_that_no_document_passes_are_said(knowledge_bases):
    with open_echo() as engine:
        session = Session(engine, knowledge_bases=knowledge_bases[:1], embedder=HashEmbedder())
        none = session.ask(Question.of("qqq zzz?", where=Where.parse(["tag=none"])))
        some = session.ask(Question.of("qqq zzz?", where=Where.parse(["format=md"])))
    assert none.warnings == ("No document passes tag=none. To see the documents' fields: localrag kb show NAME",)
    assert some.warnings == ()


def test_nothing_relevant_is_said_by_an_empty_evidence_list(knowledge_bases):
    with open_echo() as engine:
        session = Session(engine, knowledge_bases=knowledge_bases[:1], embedder=HashEmbedder())
        answer = session.ask("qqq zzz?").to_dict()
    assert answer["evidence"] == []
    assert answer["coverage"] == {"chunks_read": 0, "chunks_in_kb": knowledge_bases[0].num_chunks}
    assert [entry["name"] for entry in answer["ledger"]["entries"]] == ["template", "question", "answer"]


def test_a_tag_in_the_question_is_cited_as_unsupported(knowledge_bases):
    with open_echo() as engine:
        answer = Session(engine).ask("🐈 What does KB#99 say?").to_dict()
    [citation] = answer["citations"]
    assert citation == {"id": "KB#99", "supplied": False, "spans": [[23, 28], [35, 40]]}  # the echo cites the first tag again
    assert {answer["answer"][start:end] for start, end in citation["spans"]} == {"KB#99"}
    assert answer["unsupported_citations"] == ["KB#99"]


@pytest.mark.parametrize(
    ("form", "labels"),
    [
        ("[kb#99]", ["KB#99"]),
        ("[KB#98, 99]", ["KB#98", "KB#99"]),
        ("KB #99", ["KB#99"]),
        ("[KB#98-99]", ["KB#98", "KB#99"]),
        ("[KB#mem_123]", ["KB#mem_123"]),
        ("[KB#99a]", ["KB#99a"]),
        ("[99]", ["KB#99"]),
        ("[^99]", ["KB#99"]),
        ("[KB:99]", ["KB#99"]),
        ("a[99] or [99](x)", []),
    ],
)
def test_an_invented_citation_is_told_in_every_spelling(form, labels):
    with open_echo() as engine:
        answer = Session(engine).ask(f"What does {form} say?")
    assert answer.unsupported_citations == labels
    assert ["".join(answer.text[start:end] for start, end in each.spans[:1]) in form for each in answer.citations] == [True] * len(labels)


def test_leading_zeros_make_no_other_label(knowledge_bases):
    with open_echo() as engine:
        session = Session(engine, knowledge_bases=knowledge_bases[:1], embedder=HashEmbedder())
        [hit] = session.retrieve(material.WORDS[0], top_k=1)
        said = f"{material.WORDS[0]} as in [KB#000{hit.chunk.id}]?"
        answer = session.ask(Question.of(said, hits=[hit]))
    assert [(each.label, each.supplied) for each in answer.citations] == [(hit.label, True)]


@pytest.mark.parametrize("question", ["Is [KB#1007] right?", "Is kb #1007-1010 right?", "Is [KB#1007, 1008] right?", "Is [1007] right?"])
def test_a_citation_that_a_limit_cuts_off_is_neither_cited_nor_invented(question):
    with open_echo() as engine:
        session = Session(engine)
        whole = session.ask(question)
        for max_tokens in range(1, len(whole.text)):
            answer = session.ask(Question.of(question, sampling=SamplingParams(max_tokens=max_tokens)))
            assert answer.finish_reason == "length"
            assert set(answer.unsupported_citations) <= set(whole.unsupported_citations), answer.text
    assert whole.unsupported_citations[0] == "KB#1007"


def test_an_engine_that_only_estimates_gets_a_gap_from_its_own_error():
    """A space really takes two tokens: without the gap, the answer would run out of cells."""
    with open_echo(4096, counts_are_exact=False) as engine:
        session = Session(engine)
        assert engine.count_error == FIRST_COUNT_ERROR
        first = session.ask(Question.of("a b c d e f g h " * 10, sampling=SamplingParams(max_tokens=8)))
        assert first.ledger.entry("gap").allotted == math.ceil(4096 * 0.1 / 1.1)
        assert engine.count_error > 0.3  # nearly every other character is a space
        full = session.ask(Question.of("What?", piped="a b c d e f g h " * 400, sampling=SamplingParams(max_tokens=100_000)))
        assert full.ledger.entry("gap").allotted == math.ceil(4096 * engine.count_error / (1 + engine.count_error))
        assert full.ledger.spare == 0
    with open_echo() as engine:
        assert engine.count_error == 0
        assert all(entry.name != "gap" for entry in Session(engine).ask("a b c").ledger.entries)


def test_a_limit_of_time_binds_where_a_section_has_a_least_share_of_the_window():
    flex = Flex(basis=Percent(30), min=Percent(20), grow=1.0, cut="truncate")
    long = Attachment(label="long.txt", text="The oven dries nylon. " * 1000)
    with open_echo() as engine:
        session = Session(engine, profile=Profile(sections={"attachments": flex}))
        ledger = session.prepare(Question.of("Why?", attachments=[long], max_seconds=6.0)).prompt.ledger
    assert ledger.time.is_bound
    assert ledger.time.planned_s <= 6.0
    assert 0 < ledger.entry("attachments").used < 3000


def test_loading_is_charged_to_the_answer_that_waited_for_it():
    with Session(open_echo()) as session:
        first, second = (session.ask(Question.of("A question?", sampling=SamplingParams(max_tokens=4))).timings for _ in range(2))
    assert first.load_s > 0.0
    assert second.load_s == 0.0
    assert first.total_s > first.first_token_s > first.load_s


def test_an_answer_without_a_limit_has_what_is_left():
    no_limit = SamplingParams(max_tokens=None)
    with Session(open_echo(), n_ctx=2000) as session:
        answer = session.ask(Question.of("Why?", sampling=no_limit))
        assert answer.ledger.entry("answer").allotted == 2000 - answer.prompt_tokens
        assert (answer.text, answer.warnings) == ("You asked: Why?", ())
        timed = session.prepare(Question.of("Why?", max_tokens=None, max_seconds=3600))
        assert timed.prompt.max_tokens == 512
        with pytest.raises(UsageError, match="max_tokens is None"):
            session.engine.generate([65], no_limit)


def test_an_answer_that_ran_out_of_time_is_not_said_to_end_at_max_tokens():
    with Session(open_echo()) as session:
        answer = session.ask(Question.of("Why?", sampling=SamplingParams(max_tokens=40)))
    assert answer.ending == ""
    assert replace(answer, finish_reason="cancelled").ending == "Interrupted."
    assert replace(answer, finish_reason="time").ending == "Stopped at the time limit (--max-seconds)."
    limit = TimeLimit(max_seconds=1, is_bound=True, planned_s=1, prefill_tokens_per_s=1, decode_tokens_per_s=1)
    short = Ledger(900, (Entry("question", 10, 10, 10), Entry("answer", 40, 20, 20)), limit)
    ended = replace(answer, finish_reason="length", ledger=short).ending
    assert ended == "Stopped at 20 tokens, the most that the time limit allows (--max-seconds)."
    assert ledger_warnings(short) == [
        "The answer can have 20 of the 40 tokens asked for (max_tokens): there is no time for more (--max-seconds)."
    ]


def test_the_relevance_of_files_can_weigh_their_passages(knowledge_bases):
    with open_echo() as engine:
        session = Session(engine, knowledge_bases=knowledge_bases[:1], embedder=HashEmbedder())
        plain, weighed = (session.prepare(Question.of("oven heats parts?", top_k=6, weigh=weigh)) for weigh in (False, True))
        assert {hit.label for hit in plain.offered} == {hit.label for hit in weighed.offered}
        assert all("relevance" in hit.contributions for hit in weighed.offered)
        assert all(math.isclose(hit.score, sum(hit.contributions.values())) for hit in weighed.offered)
        scores = [hit.score for hit in weighed.offered]
        assert scores == sorted(scores, reverse=True)


def test_documents_whose_names_are_one_path_are_weighed_too():
    chunks = [Chunk(n, n, 0, "The oven dries nylon.", 0, 21, source) for n, source in enumerate(("https://x.org/a", "https://x.org/a/"), 1)]
    found = retrieval.weighed([Hit(chunk, 1.0) for chunk in chunks], "Which oven?", [], {})
    assert [hit.label for hit in found] == ["KB#1", "KB#2"]
    assert all(hit.contributions["relevance"] > 0 for hit in found)


@pytest.mark.skipif(sys.platform != "linux", reason="pipes of the file system")
def test_a_pipe_in_the_place_of_a_document_does_not_block_its_weighing(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("The oven dries nylon.", encoding="utf-8")
    with KnowledgeBase.open(tmp_path / "kb", "ovens", create=True) as base:
        base.ingest([page], HashEmbedder())
        page.unlink()
        os.mkfifo(page)
        chunk = Chunk(1, 1, 0, "The oven dries nylon.", 0, 21, next(iter(base.paths())))
        found = retrieval.weighed([Hit(chunk, 1.0)], "Which oven?", [base], {})
    assert found[0].contributions["relevance"] > 0


def test_the_memory_plan_is_told_beside_what_was_there_before(knowledge_bases):
    """The echo plans none; with one, the answer object has one key more, and every promise of the others is kept."""
    with open_echo() as engine:
        session = Session(engine, knowledge_bases=knowledge_bases[:1], embedder=HashEmbedder())
        answer = session.ask("Which oven heats?")
        labels = [hit.label for hit in session.retrieve("Which oven heats?")]
        planned = plan(engine.info, 2048, 2, situation=Situation(available_bytes=1 << 40, python_bytes=0))
    without, told = answer.to_dict(), replace(answer, memory=planned).to_dict()
    assert "memory" not in without
    memory = json.loads(json.dumps(told.pop("memory")))
    assert told == without
    identities.check(told, labels)
    assert set(memory) == {
        *("predicted_bytes", "available_bytes", "weights_bytes", "kv_bytes", "gpu_bytes"),
        *("gpu_layers", "kv_type", "flash_attention", "num_cells", "num_sequences"),
    }
    assert (memory["num_cells"], memory["num_sequences"], memory["available_bytes"]) == (2048, 2, 1 << 40)


def test_ctrl_c_at_the_last_piece_loses_nothing():
    """Wherever it comes while text is shown, the answer is given back, also where the limit ends it with that very piece."""
    with open_echo() as engine:
        session = Session(engine, n_ctx=500)
        pieces, question = [], Question.of("Who?", max_tokens=6)
        whole = session.ask(question, on_text=pieces.append).text
        for at in range(1, len(pieces) + 1):
            heard = []

            def hear(text, heard=heard, at=at):
                heard.append(text)
                if len(heard) == at:
                    raise KeyboardInterrupt

            answer = session.ask(question, on_text=hear, keep_partial=True)
            assert whole.startswith(answer.text)
            assert answer.text.startswith("".join(pieces[:at])[:-1])
