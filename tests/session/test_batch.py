"""A batch on the echo engine: the same as single asks, side by side, in an order that shares what prompts begin with."""

import random
import time

import pytest

from localrag.engine.context import BATCH_TOKENS
from localrag.engine.echo import open_echo
from localrag.engine.engine import MAX_SLOWDOWN
from localrag.engine.loading import open_model
from localrag.errors import InterruptedRunError, LocalragError, TimeLimitError, UsageError
from localrag.journal import Journal
from localrag.kb import KnowledgeBase
from localrag.question import Question
from localrag.session import Session
from localrag.session.pipeline import WINDOW_QUESTIONS
from tests import identities, material
from tests.gguf_files import write_model
from tests.kb.hash_embedder import HashEmbedder
from tests.running import batch


@pytest.fixture(scope="module")
def knowledge_base(tmp_path_factory):
    rng, folder = random.Random(21), tmp_path_factory.mktemp("documents")
    (folder / "pages").mkdir()
    for number in range(10):
        (folder / "pages" / f"page-{number}.md").write_text(f"# Page {number}\n\n{material.text(rng, 200)}\n", encoding="utf-8")
    with KnowledgeBase.open(folder / "kb", "mixed", create=True) as base:
        base.ingest([folder / "pages"], HashEmbedder())
        yield base


def requests(rng, count):
    """Questions of all kinds, some of which do not fit a small window and some of which are empty."""
    return [
        Question.of(
            rng.choice(["", material.text(rng, rng.randint(1, 40)) + " heat?", material.text(rng, rng.randint(1, 10))]),
            id=rng.choice([number, f"q-{number}"]),
            max_tokens=rng.choice([1, 5, 20, 300, 100_000]),
            system=rng.choice([None, "Be brief.", material.text(rng, 30)]),
            top_k=rng.randint(1, 8),
            context_ratio=rng.choice([0.0, 0.3, 0.9]),
        )
        for number in range(count)
    ]


def test_a_citation_that_a_limit_cuts_off_is_neither_cited_nor_invented():
    with open_echo() as engine:
        asked = [Question.of("Is [KB#1007] right?", id=number, max_tokens=number) for number in range(1, 30)]
        for number, outcome in batch(Session(engine), asked):
            assert outcome.unsupported_citations == (["KB#1007"] if number >= len("You asked: Is [KB#1007]") else []), outcome.text


def essence(outcome):
    """What of an outcome does not depend on when it was asked."""
    if isinstance(outcome, LocalragError):
        return outcome.to_dict()
    data = outcome.to_dict()
    del data["timings"], data["usage"]["cached_tokens"]
    return data


def asked_alone(session, request):
    try:
        return session.ask(request)
    except LocalragError as error:
        return error


def test_a_batch_equals_single_asks_whatever_its_order_and_width(knowledge_base):
    rng, num_answers, num_errors = random.Random(77), 0, 0
    for _ in range(8):
        n_ctx, wanted = rng.choice([256, 400, 900, 3000, 20_000]), requests(rng, rng.randint(1, 25))
        with open_echo() as engine, open_echo() as other:
            session = Session(engine, knowledge_bases=[knowledge_base], embedder=HashEmbedder(), n_ctx=n_ctx)
            alone = Session(other, knowledge_bases=[knowledge_base], embedder=HashEmbedder(), n_ctx=n_ctx)
            expected = {request.id: essence(asked_alone(alone, request)) for request in wanted}
            for num_sequences in (1, rng.randint(2, 40)):  # the second finds the context of the first
                rng.shuffle(wanted)
                found = list(batch(session, wanted, num_sequences=num_sequences))
                assert len(found) == len(wanted)
                assert {known: essence(outcome) for known, outcome in found} == expected
                assert engine.is_idle
            offered = {
                each.id: [hit.label for hit in session.retriever.offered(each, each.messages[-1].content)]
                for each in wanted
                if each.messages[-1].content
            }
        for known, outcome in found:
            if isinstance(outcome, LocalragError):
                num_errors += 1
            else:
                identities.check(outcome.to_dict(), offered[known])
                num_answers += 1
    assert min(num_answers, num_errors) > 20


def test_as_many_run_at_once_as_may_and_a_place_is_taken_at_once():
    wanted = [Question.of("why? " * (1 + n % 7), id=n, max_tokens=3 + n % 5) for n in range(40)]
    heard: list[int | None] = []  # how many run while a token is told, and None for an answer
    with open_echo() as engine:

        def hear(event):
            if event.answer is not None:
                heard.append(None)
            elif event.num_tokens:
                heard.append(len(engine._unfinished()))

        assert len(list(batch(Session(engine), wanted, num_sequences=5, on_event=hear))) == len(wanted)
    last = [at for at, each in enumerate(heard) if each is None][-5]  # from then on fewer than five are left
    numbers = [(at, each) for at, each in enumerate(heard[:last]) if each is not None]
    assert max(each for _, each in numbers) == 5
    # fewer run only in the step in which an answer ended, whose event comes with that step's
    assert all(each == 5 or None in heard[max(0, at - 5) : at + 6] for at, each in numbers)
    assert sum(each == 5 for _, each in numbers) > 50


def test_questions_that_share_evidence_share_its_evaluation():
    """Twelve texts, six questions each, in random order, in a context that holds about two prompts at a time."""
    rng = random.Random(5)
    texts = [material.text(rng, 150) for _ in range(12)]
    wanted = [Question.of(f"{q}?", id=f"{t}-{q}", max_tokens=8, system=text)
              for t, text in enumerate(texts) for q in range(6)]  # fmt: skip
    rng.shuffle(wanted)
    with open_echo() as engine:
        answers = [answer for _, answer in batch(Session(engine), wanted, num_sequences=2)]
        evaluated = engine.context.runner.num_evaluated_tokens
    total = sum(answer.prompt_tokens for answer in answers)
    once = sum(len(text.encode()) for text in texts)
    assert total > 6 * once
    assert evaluated < once + len(wanted) * 80  # template, question and answer of each; not its text
    assert sum(answer.cached_tokens for answer in answers) > 5 * once


def test_a_batch_holds_nothing_that_no_question_left_begins_with():
    """What finished questions hold slows every step: each token is weighed against all cells in use."""
    texts = [f"Text {t}. " + material.text(random.Random(t), 60) for t in range(6)]
    wanted = [Question.of(f"{q}?", id=f"{t}-{q}", max_tokens=4 + q, system=text)
              for t, text in enumerate(texts) for q in range(5)]  # fmt: skip
    with open_echo() as engine:
        session, left, num_kept = Session(engine), {}, 0

        def look(_event):
            nonlocal num_kept
            cells = engine.context.cells if engine.context is not None else None
            for seq_id in cells.kept if cells is not None else ():
                held, num_kept = cells.cache.tokens(seq_id), num_kept + 1
                assert any(prompt[: len(held)] == held for prompt in left.values())

        left.update({each.id: list(session.prepare(each.but(max_tokens=9)).prompt.token_ids) for each in wanted})
        for known, _ in batch(session, wanted, num_sequences=4, on_event=look):
            del left[known]
        assert num_kept > 5
        assert engine.context.cells.cache.num_cells == 0


class RunningError(Exception):
    """So many are."""


@pytest.mark.parametrize(
    ("share_of_most", "has_one_text", "max_tokens", "num_at_once"),
    [
        (0.4, True, 40, 6),
        (0.4, False, 2000, 2),  # a third makes all too slow
        (0.4, False, 40, 1),  # what is saved in so short answers is less than what the others' cells cost the prompt
        (0.01, False, 40, 6),
    ],
)
def test_without_a_gpu_prompts_run_side_by_side_only_where_that_is_faster(tmp_path, share_of_most, has_one_text, max_tokens, num_at_once):
    """Each token is weighed against the cells of all that run, so beside long prompts of others an answer is slower than after them."""
    with open_model(write_model(tmp_path / "tiny.gguf", changes={"llama.context_length": 1 << 16}), name="tiny") as engine:
        most = engine.speed.depth_of(MAX_SLOWDOWN)
        words = "words " * int(share_of_most * most / len(engine.tokenizer.encode("words ")))
        texts = [f"{0 if has_one_text else number} {words}" for number in range(6)]
        wanted = [Question.of(f"{number}?", id=number, max_tokens=max_tokens, system=text)
                  for number, text in enumerate(texts)]  # fmt: skip

        def look(_event):
            if num_running := len(engine._unfinished()):
                raise RunningError(num_running)

        with pytest.raises(RunningError) as seen:  # in the first step, before it learns how fast it is
            list(batch(Session(engine), wanted, on_event=look))
    assert seen.value.args == (num_at_once,)


def test_beside_answers_of_a_batch_prompts_are_evaluated_whole():
    """Nobody reads along, and pieces take longer; whoever asks afterwards may."""
    with open_echo() as engine:
        rooms: set[int] = set()
        answers = list(
            batch(Session(engine), [Question.of("x", id=1)], on_event=lambda _: engine.is_idle or rooms.add(engine._prompt_room(0)))
        )
        assert len(answers) == 1
        assert rooms == {BATCH_TOKENS}
        assert engine._prompt_room(0) < BATCH_TOKENS


def test_only_a_window_of_questions_is_read_ahead():
    num_read = 0

    def read():
        nonlocal num_read
        for num_read in range(1, 2 * WINDOW_QUESTIONS + 89):
            yield Question.of("x", id=num_read, max_tokens=1)

    with open_echo() as engine:
        ahead = [num_read - at for at, _ in enumerate(batch(Session(engine, n_ctx=300), read()))]
    assert len(ahead) == 2 * WINDOW_QUESTIONS + 88
    assert max(ahead) == WINDOW_QUESTIONS


def test_leaving_a_batch_ends_what_runs():
    wanted = [Question.of("go on " * n, id=n) for n in range(1, 20)]
    with open_echo() as engine:
        session = Session(engine)
        outcomes = batch(session, wanted)
        next(outcomes)
        assert not engine.is_idle
        outcomes.close()
        assert engine.is_idle
        assert session.ask("Still there?").text == "You asked: Still there?"

        def stop(_):
            if not engine.is_idle:
                raise InterruptedRunError("enough")

        with pytest.raises(InterruptedRunError):
            list(batch(session, wanted, on_event=stop))
        assert engine.is_idle
        assert len(list(batch(session, wanted))) == len(wanted)


def test_cancelled_answers_are_given_as_they_are():
    wanted = [Question.of(f"number {n} " * 5, id=n) for n in range(3)]
    with open_echo() as engine:
        written = {}

        def on_event(event):
            if event.num_tokens:
                written[event.question.id] = event.num_tokens
            if sum(written.values()) >= 30:
                engine.cancel_all()

        found = dict(batch(Session(engine), wanted, on_event=on_event))
    assert {answer.finish_reason for answer in found.values()} == {"cancelled"}
    assert all(0 < answer.completion_tokens <= 30 and "You asked".startswith(answer.text[:9]) for answer in found.values())
    assert written == {known: answer.completion_tokens for known, answer in found.items()}


def test_an_engine_that_only_estimates_does_not_run_out_of_cells():
    wanted = [Question.of("a b c d e f " * (n + 1), id=n, max_tokens=60) for n in range(20)]
    with open_echo(4096, counts_are_exact=False) as engine:
        session = Session(engine)
        session.ask("a b c d e f g h " * 20)  # now it knows its error
        assert all(not isinstance(outcome, LocalragError) for _, outcome in batch(session, wanted))


def test_what_a_batch_cannot_do():
    with open_echo() as engine:
        session = Session(engine)
        with pytest.raises(UsageError):
            list(batch(session, [], num_sequences=0))
        assert list(batch(session, [])) == []
        [(known, error)] = batch(session, [Question.of("Why?", id="a", max_seconds=0.0)])
        assert (known, error.exit_code) == ("a", 2)


def test_a_limit_of_time_holds_for_each_question_of_a_batch_and_counts_from_its_turn():
    long_ago = time.perf_counter() - 10_000
    wanted = [Question.of(f"why {n}? ", id=n, max_seconds=600.0, started_at=long_ago) for n in range(3)]
    wanted.append(Question.of("Why?", id="none"))
    wanted.append(Question.of("why " * 5000, id="short", max_seconds=0.000_1))
    with open_echo() as engine:
        found = dict(batch(Session(engine), wanted))
        assert engine.is_idle
    assert [found[n].text for n in range(3)] == [f"You asked: why {n}?" for n in range(3)]
    assert all(found[n].ledger.time.max_seconds == 600 for n in range(3))
    assert found["none"].ledger.time is None
    assert isinstance(found["short"], TimeLimitError)


def test_a_schema_that_is_not_supported_is_an_outcome_and_the_others_go_on():
    forms = enumerate([None, {"type": "text"}, {"type": "integer"}])
    wanted = [Question.of("Why?", id=number, json_schema=form) for number, form in forms]
    with open_echo() as engine:
        found = dict(batch(Session(engine), wanted))
    assert found[1].exit_code == 2
    assert (found[0].text, found[2].text) == ("You asked: Why?", "0")


def test_every_answer_leaves_its_ledger(tmp_path):
    with open_echo() as engine, Journal.open(tmp_path) as journal:
        session = Session(engine, journal=journal, name="night")
        found = dict(batch(session, [Question.of(f"number {n}?", id=n) for n in range(10)]))
        kept = {ask.question: ask for ask in journal.asks("night")}
        assert len(kept) == 10
        for n, answer in found.items():
            assert kept[f"number {n}?"].ledger == answer.ledger
