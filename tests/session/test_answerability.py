"""The probability that the sources answer a question: fitted, stored, and acted upon without asking the model."""

import json
import random
from contextlib import contextmanager

import pytest

from localrag.cli import render
from localrag.engine.echo import open_echo
from localrag.engine.jobs import SERVE
from localrag.errors import UnanswerableError, UsageError
from localrag.journal import Journal
from localrag.kb import KnowledgeBase
from localrag.question import Question
from localrag.session import Session
from localrag.session.answerability import (
    MAX_WRONG,
    NOT_SAID,
    Calibration,
    CalibrationFile,
    Features,
    Sample,
    area,
    fit,
    is_small_talk,
    not_said,
    refusals,
)
from localrag.session.chat import Chat
from localrag.settings import Settings
from localrag.types import Attachment, Chunk, Hit, Memory
from tests.kb.hash_embedder import HashEmbedder

CALIBRATION = Calibration(bias=-4.0, nearest=40.0, lead=0.0, threshold=0.5)
FOUND, NOT_FOUND = "When do hamsters sleep?", "Which xyzzy plugh frobnicates?"


def hits(*relevances):
    return [Hit(Chunk(n, 1, n, f"text {n}", 0, 4, "a.md", kb="book"), 1.0, relevance=each) for n, each in enumerate(relevances)]


def samples(num=200, seed=0):
    """Questions that are answerable with a probability that follows from their features: log odds −4 + 9 · nearest + 6 · lead."""
    rng = random.Random(seed)
    for _ in range(num):
        nearest, lead = rng.random(), rng.random() / 3
        likely = Calibration(bias=-4.0, nearest=9.0, lead=6.0, threshold=0.5).assess(hits(nearest, *[nearest - lead] * 4)).probability
        yield Sample(features=Features(nearest, lead), is_answerable=rng.random() < likely)


@contextmanager
def opened(folder, **options):
    (folder / "pets.md").write_text("# Pets\n\nHamsters sleep by day and run in wheels by night.\n")
    settings = Settings(home=folder / "home")
    CalibrationFile(settings.home).save("hash-1", CALIBRATION)
    with (
        Journal.open(settings.home) as journal,
        KnowledgeBase.open(folder / "kb", "pets", create=True) as kb,
        open_echo() as engine,
    ):
        kb.ingest([folder / "pets.md"], HashEmbedder())
        yield Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), journal=journal, settings=settings, **options)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("pets")) as one:
        yield one


def test_a_fit_finds_the_weights_that_made_the_samples():
    fitted = fit(list(samples(1200)))
    made = fitted.calibration
    assert (made.bias, made.nearest, made.lead) == pytest.approx((-4.0, 9.0, 6.0), rel=0.3)
    assert fitted.unseen.refused_wrongly == pytest.approx(MAX_WRONG, abs=0.03)
    assert fitted.auc == pytest.approx(
        area([(each.features.nearest * 9 + each.features.lead * 6, each.is_answerable) for each in samples(1200)]), abs=0.01
    )
    wrongly, caught = ([getattr(each, name) for each in fitted.curve] for name in ("refused_wrongly", "caught"))
    assert wrongly == sorted(wrongly)
    assert caught == sorted(caught)


def test_questions_that_are_separated_perfectly_still_get_finite_weights_and_too_few_are_refused():
    split = [Sample(features=Features(0.2 + 0.5 * (n % 2), 0.1), is_answerable=n % 2 == 1) for n in range(40)]
    fitted = fit(split)
    assert (fitted.auc, fitted.unseen.refused_wrongly, fitted.unseen.caught) == (1.0, 0.0, 1.0)
    with pytest.raises(UsageError, match="10 questions that the sources answer and 10 that they do not, not 20 and 9"):
        fit(split[:-1] if not split[-1].is_answerable else [each for each in split if each.is_answerable] + [split[0]] * 9)


def test_the_measures_by_hand():
    scored = [(0.9, True), (0.4, True), (0.5, False), (0.4, False)]
    assert area(scored) == (1 + 1 + 0 + 0.5) / 4
    assert (refusals(scored, 0.45).refused_wrongly, refusals(scored, 0.45).caught) == (0.5, 0.5)
    assert Features.of(hits(0.5, 0.9, 0.4, 0.3, 0.2, 0.1)) == Features(0.9, pytest.approx(0.7))
    assert Features.of([]) == Features(0.0, 0.0)
    assert Features.of(hits(0.5)) == Features(0.5, 0.5)


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"e": 1}', '{"e": {"bias": 1}}', '{"e": {"bias": "1", "nearest": 1, "lead": 1, "threshold": 1}}']
)
def test_a_damaged_file_counts_as_no_calibration(tmp_path, damage):
    (tmp_path / "answerability.json").write_text(damage)
    assert CalibrationFile(tmp_path).calibration("e") is None
    CalibrationFile(tmp_path).save("e", CALIBRATION)
    assert CalibrationFile(tmp_path).calibration("e") == CALIBRATION


def test_what_the_sources_do_not_say_is_said_without_asking_the_model(session, capsys):
    answer = session.ask(Question.of(NOT_FOUND))
    assert (answer.text, answer.abstained, answer.finish_reason) == ("The sources do not say.", True, "stop")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.ledger.prompt_tokens) == (0, 0, 0)
    data = answer.to_dict()
    assert (data["answerable"], data["abstained"], data["coverage"]["chunks_read"]) == (0.018, True, 0)
    assert json.dumps(data)
    render.remarks(answer, ["pets"])
    shown = capsys.readouterr().err
    assert "Sources" not in shown
    assert "--unanswerable answer" in shown


def test_what_they_say_is_answered(session):
    answer = session.ask(Question.of(FOUND, max_tokens=8))
    assert (answer.abstained, bool(answer.hits), answer.completion_tokens) == (False, True, 8)
    assert answer.answerability.probability > 0.5
    assert session.ask(Question.of(FOUND, max_tokens=8, top_k=1)).answerability == answer.answerability


def test_the_nearest_passages_are_listed(session, capsys, monkeypatch):
    monkeypatch.setitem(session._calibrations, "hash-1", Calibration(bias=-9.0, nearest=0.0, lead=0.0, threshold=0.5))  # nothing is likely
    pieces = []
    answer = session.ask(Question.of("hamsters sleep by day: wie und wann?"), on_text=pieces.append)
    assert "".join(pieces) == answer.text == "Die Quellen sagen dazu nichts."
    assert [hit.chunk.source for hit in answer.hits] == ["pets.md"]
    render.remarks(answer, ["pets"])
    assert "Nearest passages\n" in capsys.readouterr().err
    answered = session.ask(Question.of(FOUND, unanswerable="answer", max_tokens=8))
    render.remarks(answered, ["pets"])
    assert "probably do not answer this: the probability is 0.00" in capsys.readouterr().err


def test_an_error_carries_the_numbers_and_does_not_stop_others(session):
    events = list(session.run([Question.of(each, unanswerable="error", max_tokens=4, id=each) for each in (NOT_FOUND, FOUND)]))
    [error] = [each.error for each in events if each.error is not None]
    assert isinstance(error, UnanswerableError)
    assert (error.exit_code, error.numbers["answerable"], error.numbers["threshold"]) == (6, 0.018, 0.5)
    assert [each.question.id for each in events if each.answer is not None] == [FOUND]
    assert session.prepare(Question.of(NOT_FOUND, unanswerable="error")).abstains  # a dry run shows it


def test_a_stream_tells_it_as_it_tells_an_answer(session):
    asked = [
        Question.of(NOT_FOUND, id="no"),
        Question.of(NOT_FOUND, id="error", unanswerable="error"),
        Question.of(FOUND, max_tokens=4, id="yes"),
    ]
    events = [each for each in session.run([*asked, None], policy=SERVE) if each.question is not None]
    told = {one: [each for each in events if each.question.id == one] for one in ("no", "error", "yes")}
    assert [bool(each.prepared) for each in told["no"]] == [True, False]
    assert (told["no"][1].text, told["no"][1].answer.abstained) == ("The sources do not say.", True)
    assert isinstance(told["error"][0].error, UnanswerableError)
    assert told["yes"][-1].answer.completion_tokens == 4


@pytest.mark.parametrize(
    "options",
    [
        {"unanswerable": "answer"},
        {"piped": "Piped text."},
        {"attachments": [Attachment(label="a.txt", text="An attachment.")]},
        {"memories": [Memory(label="M1", text="A fact.")]},
        {"json_schema": {"type": "object"}},
        {"hits": []},
    ],
)
def test_what_else_may_answer_is_asked(session, options):
    assert not session.prepare(Question.of(NOT_FOUND, **options)).abstains


def test_small_talk_is_answered_and_marked(session):
    answer = session.ask(Question.of("Hello, and thank you!", max_tokens=8))
    assert (answer.abstained, answer.bypass.value) == (False, "nothing_found")


def test_a_chat_goes_on_after_it(session):
    session.engine.share_contexts()
    chat = Chat.of(session, "talk")
    assert chat.say(NOT_FOUND).abstained
    assert not chat.turns[0].hits
    assert not chat.say(Question.of(FOUND, max_tokens=8)).abstained
    assert chat.turns[0].answer == "The sources do not say."


def test_an_embedder_without_a_calibration_refuses_nothing(session, monkeypatch):
    monkeypatch.setitem(session._calibrations, "hash-1", CalibrationFile(session.settings.home).calibration("another"))
    wanted = session.ask(Question.of(NOT_FOUND, max_tokens=4, unanswerable="error"))
    assert [each for each in wanted.warnings if "--calibrate" in each]
    answer = session.ask(Question.of(NOT_FOUND, max_tokens=4))
    assert answer.warnings == ()
    assert (answer.answerability, answer.to_dict()["answerable"], answer.abstained) == (None, None, False)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Who invented the ramp?", ""),
        ("Ramp?", ""),
        ("", ""),
        ("Wie hoch ist die Kündigungsfrist?", "de"),
        ("Quel est le délai de livraison ?", "fr"),
        ("¿Cuál es el plazo de entrega?", "es"),
        ("Qual è il termine di consegna?", "it"),
        ("Wat is de levertijd van het pakket?", "nl"),
        ("Qual é o prazo de entrega?", "pt"),
        ("Каков срок доставки?", "ru"),
        ("配達期限はいつですか。", "ja"),
        ("交货期是多久？", "zh"),
        ("배송 기간은 얼마나 됩니까?", "ko"),
    ],
)
def test_it_is_said_in_the_language_of_the_question(text, language):
    assert not_said(text) == NOT_SAID[language]


def test_small_talk_is_greetings_and_thanks():
    assert all(map(is_small_talk, ["Hello!", "Thank you very much.", "How are you?", "Guten Morgen", "你好！", "Bonjour, merci beaucoup"]))
    assert not any(map(is_small_talk, ["Hello, who invented PLA?", "PLA", "Wer erfand es?", "价格多少？"]))
