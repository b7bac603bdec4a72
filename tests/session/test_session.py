"""The walk on the echo engine: what always holds of an answer object, on random asks."""

import json
import math
import os
import random
import sys
from dataclasses import replace

import pytest

from localrag.budget import Flex, Percent, Profile
from localrag.decoding import SamplingParams
from localrag.engine.echo import open_echo
from localrag.engine.engine import FIRST_COUNT_ERROR
from localrag.engine.memory import Situation, plan
from localrag.errors import BudgetExceededError
from localrag.kb import KnowledgeBase, Where
from localrag.messages import Attachment
from localrag.passages import Chunk, Hit
from localrag.session import Session, finding, weighing
from localrag.session.finding import MIN_DEPTH
from tests import identities, material
from tests.kb.hash_embedder import HashEmbedder

NUM_ASKS = int(os.environ.get("LOCALRAG_TEST_ASKS", "250"))  # 1,000 were exact too


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
                answer = session.ask(question, sampling=sampling, **options)
            except BudgetExceededError as error:
                refused += 1
                assert error.numbers["needed"] > session.slot.n_ctx
                continue
            identities.check(answer.to_dict(), [hit.label for hit in finding.offered(session, question, options)])
            evaluated = engine.context.runner.num_evaluated_tokens - (evaluated if engine.context.runner is runner else 0)
            assert evaluated == answer.prompt_tokens - answer.cached_tokens + answer.completion_tokens - 1
            asked += 1
            if asked % 4 == 0:  # once more without asking, for the characters
                composed = session.prepare(question, max_tokens=sampling.max_tokens, **options).prompt
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


def test_as_many_passages_are_offered_as_the_window_may_hold(tmp_path):
    (tmp_path / "notes").mkdir()
    for number in range(300):
        (tmp_path / "notes" / f"{number}.md").write_text(f"Nozzle {number} is heated to {number * 7} degrees.\n")
    with KnowledgeBase.open(tmp_path / "kb", "nozzles", create=True) as kb, open_echo() as engine:
        kb.ingest([tmp_path / "notes"], HashEmbedder())
        sessions = [Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), n_ctx=n_ctx) for n_ctx in (1024, 8192)]
        small, large = (session.ask("Which nozzle is heated?", top_k="fit", sampling=SamplingParams(max_tokens=20)) for session in sessions)
    for answer in (small, large):
        identities.check(answer.to_dict(), [hit.label for hit in answer.offered])
    assert len(small.offered) == MIN_DEPTH
    assert 0 < len(small.hits) < MIN_DEPTH, "what does not fit is left out, and named in the ledger"
    assert len(large.offered) > MIN_DEPTH
    assert len(large.hits) > len(small.hits)


def test_conditions_that_no_document_passes_are_said(knowledge_bases):
    with open_echo() as engine:
        session = Session(engine, knowledge_bases=knowledge_bases[:1], embedder=HashEmbedder())
        none = session.ask("qqq zzz?", where=Where.parse(["tag=none"]))
        some = session.ask("qqq zzz?", where=Where.parse(["format=md"]))
    assert none.warnings == ("No document passes tag=none. To see what they are: localrag kb show NAME",)
    assert some.warnings == ()


def test_nothing_relevant_is_said_by_an_empty_evidence_list(knowledge_bases):
    with open_echo() as engine:
        session = Session(engine, knowledge_bases=knowledge_bases[:1], embedder=HashEmbedder())
        answer = session.ask("qqq zzz?").to_dict()
    assert answer["evidence"] == []
    assert answer["coverage"] == {"chunks_read": 0, "chunks_in_kb": knowledge_bases[0].num_chunks}
    assert [entry["name"] for entry in answer["ledger"]["entries"]] == ["scaffold", "question", "answer"]


def test_a_tag_in_the_question_is_cited_as_unsupported(knowledge_bases):
    with open_echo() as engine:
        answer = Session(engine).ask("What does KB#99 say?").to_dict()
    assert answer["citations"] == [{"id": "KB#99", "supplied": False}]
    assert answer["unsupported_citations"] == ["KB#99"]


def test_an_engine_that_only_estimates_gets_a_gap_from_its_own_error():
    """A space really takes two tokens: without the gap, the answer would run out of cells."""
    with open_echo(4096, counts_are_exact=False) as engine:
        session = Session(engine)
        assert engine.count_error == FIRST_COUNT_ERROR
        first = session.ask("a b c d e f g h " * 10, sampling=SamplingParams(max_tokens=8))
        assert first.ledger.entry("gap").allotted == math.ceil(4096 * 0.1 / 1.1)
        assert engine.count_error > 0.3  # nearly every other character is a space
        full = session.ask("What?", piped="a b c d e f g h " * 400, sampling=SamplingParams(max_tokens=100_000))
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
        ledger = session.prepare("Why?", attachments=[long], max_seconds=6.0).prompt.ledger
    assert ledger.time.is_bound
    assert ledger.time.planned_s <= 6.0
    assert 0 < ledger.entry("attachments").used < 3000


def test_loading_is_charged_to_the_answer_that_waited_for_it():
    with Session(open_echo()) as session:
        first, second = (session.ask("A question?", sampling=SamplingParams(max_tokens=4)).timings for _ in range(2))
    assert first.load_s > 0.0
    assert second.load_s == 0.0
    assert first.total_s > first.first_token_s > first.load_s


def test_the_relevance_of_files_can_weigh_their_passages(knowledge_bases):
    with open_echo() as engine:
        session = Session(engine, knowledge_bases=knowledge_bases[:1], embedder=HashEmbedder())
        plain, weighed = (session.prepare("oven heats parts?", top_k=6, weigh=weigh) for weigh in (False, True))
        assert {hit.label for hit in plain.offered} == {hit.label for hit in weighed.offered}
        assert all("relevance" in hit.contributions for hit in weighed.offered)
        assert all(math.isclose(hit.score, sum(hit.contributions.values())) for hit in weighed.offered)
        scores = [hit.score for hit in weighed.offered]
        assert scores == sorted(scores, reverse=True)


def test_documents_whose_names_are_one_path_are_weighed_too():
    chunks = [Chunk(n, n, 0, "The oven dries nylon.", 0, 21, source) for n, source in enumerate(("https://x.org/a", "https://x.org/a/"), 1)]
    found = weighing.weighed([Hit(chunk, 1.0) for chunk in chunks], "Which oven?", [], {})
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
        found = weighing.weighed([Hit(chunk, 1.0)], "Which oven?", [base], {})
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
