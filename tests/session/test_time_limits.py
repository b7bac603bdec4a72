"""A limit of time covers all that an answer takes: retrieval, reranking, every role of a council."""

import math
import time

import pytest

from localrag.deliberation import Council, Judge, Member
from localrag.engine.echo import open_echo
from localrag.errors import TimeLimitError, UsageError
from localrag.kb import KnowledgeBase
from localrag.kb.embedder import CrossEncoderReranker
from localrag.question import Question
from localrag.session import Session, open_engine
from localrag.session.answer import RERANK_SKIPPED
from localrag.session.council_run import run_council
from localrag.session.exhaustive import ask_all
from localrag.session.llm_reranker import Judge as LlmReranker
from localrag.session.timing import TimedReranker
from localrag.settings import Settings
from tests.kb.hash_embedder import HashEmbedder


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder, opened = tmp_path_factory.mktemp("documents"), []
    for name in ("one", "two"):
        (folder / name).mkdir()
        for number in range(6):
            (folder / name / f"{number}.md").write_text(f"The oven {name} dries nylon at {number} degrees.\n")
        opened.append(KnowledgeBase.open(folder / "kb", name, create=True))
        opened[-1].ingest([folder / name], HashEmbedder())
    yield opened
    for each in opened:
        each.close()


class Ready:
    """A reranker that keeps to limits, and likes long texts. `num_left` is how many more times it finishes."""

    def __init__(self, num_left=math.inf):
        self.num_left = num_left

    def scores(self, _query, texts):
        return [float(len(text)) for text in texts]

    def scores_until(self, query, texts, ends_at):
        self.num_left -= 1
        return self.scores(query, texts) if self.num_left >= 0 and time.perf_counter() < ends_at else None


class Endless:
    """One that cannot be stopped, and would never end."""

    def scores(self, _query, _texts):
        raise AssertionError("it was begun")


def ask(engine, bases, reranker, **options):
    session = Session(engine, knowledge_bases=bases, embedder=HashEmbedder(), reranker=reranker)
    return session.ask(Question.of("Which oven dries nylon?", **options))


def is_reranked(answer):
    return {"rerank" in hit.contributions for hit in answer.hits}


def test_a_reranker_that_has_time_is_used(bases):
    with open_echo() as engine:
        for reranker in (Ready(), LlmReranker(engine)):
            answer = ask(engine, bases, reranker, max_seconds=600.0)
            assert is_reranked(answer) == {True}
            assert answer.ledger.time.skipped == ()
            assert "skipped" not in answer.ledger.to_dict()["time"]
            assert answer.warnings == ()


@pytest.mark.parametrize("num_kbs", [1, 2])
@pytest.mark.parametrize("make", [Endless, lambda: Ready(0), lambda: Ready(1)])
def test_one_that_cannot_finish_is_skipped_and_the_ledger_says_so(bases, num_kbs, make):
    if num_kbs == 1 and make().__dict__.get("num_left") == 1:
        return  # it finishes
    with open_echo() as engine:
        answer = ask(engine, bases[:num_kbs], make(), max_seconds=600.0)
    assert answer.hits
    assert is_reranked(answer) == {False}, "what is scored with and without a reranker cannot be compared"
    assert answer.ledger.time.skipped == ("rerank",)
    assert answer.ledger.to_dict()["time"]["skipped"] == ["rerank"]
    assert type(answer.ledger).from_dict(answer.ledger.to_dict()) == answer.ledger
    assert RERANK_SKIPPED in answer.warnings


@pytest.mark.parametrize("make", [Endless, lambda: Ready(0)])
def test_where_all_is_read_a_reranker_that_cannot_finish_is_skipped_and_the_ledger_says_so(bases, make):
    with open_echo() as engine:
        session = Session(engine, knowledge_bases=bases, embedder=HashEmbedder(), reranker=make())
        answer = ask_all(session, Question.of("Which oven dries nylon?", max_seconds=600.0))
        assert answer.ledger.time.skipped == ("rerank",)
        assert answer.warnings.count(RERANK_SKIPPED) == 1
        assert is_reranked(answer) == {False}
        session.reranker = Ready()
        reranked = ask_all(session, Question.of("Which oven dries nylon?", max_seconds=600.0))
    assert reranked.ledger.time.skipped == ()
    assert RERANK_SKIPPED not in reranked.warnings
    assert is_reranked(reranked) == {True}


def test_a_model_that_is_too_slow_to_rerank_is_not_begun(bases):
    with open_echo(speedup=0.01) as engine:  # it states 10 tokens a second in, and 1 out
        answer = ask(engine, bases, LlmReranker(engine), max_seconds=120.0)
        assert answer.ledger.time.skipped == ("rerank",)
        assert is_reranked(answer) <= {False}
        assert LlmReranker(engine).scores_until("Why?", [f"{n} because " * 50 for n in range(20)], time.perf_counter() + 60) is None
        assert LlmReranker(engine).scores_until("Why?", ["because"] * 3, time.perf_counter() - 1) is None
        assert engine.is_idle


def test_the_share_of_reranking_is_one_for_all_searches_of_a_question():
    timed = TimedReranker(Ready(), time.perf_counter() - 1)
    assert timed.scores("q", ["a"]) is None
    assert timed.is_skipped
    timed = TimedReranker(Ready(1), time.perf_counter() + 600)
    assert timed.scores("q", ["a"]) == [1.0]
    assert timed.scores("q", ["a"]) is None
    assert timed.is_skipped


def test_a_cross_encoder_is_not_loaded_without_time(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    reranker = CrossEncoderReranker(tmp_path)
    assert reranker.scores_until("q", ["a"], time.perf_counter() - 1) is None
    assert reranker.scores_until("q", [], time.perf_counter() - 1) == []


def test_the_echo_does_not_claim_to_be_slower_than_it_is(tmp_path):
    with open_engine("echo", settings=Settings(home=tmp_path)) as engine:
        assert engine.speed.plan_s(2000, 512) < 0.2


COUNCIL = Council(
    name="test",
    members=(Member(name="a", persona="A.", model="echo"), Member(name="b", persona="B.", model="echo")),
    judge=Judge(model="echo"),
)


def test_a_limit_of_time_covers_a_whole_council(tmp_path):
    settings = Settings(home=tmp_path)
    assert run_council(COUNCIL, "Why?", settings=settings, max_seconds=600.0).warnings == ()
    events = []
    with pytest.raises(TimeLimitError) as caught:
        run_council(COUNCIL, "Why?", settings=settings, max_seconds=1e-6, on_event=events.append)
    assert caught.value.numbers["needed_s"] > 0
    assert events[-2]["type"] == "TimeLimitError"
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="max_seconds"):
            run_council(COUNCIL, "Why?", settings=settings, max_seconds=wrong)
