"""Questions asked in several ways: what an outcome holds, and what one question leaves to the next."""

from dataclasses import replace

import pytest

from localrag.errors import ModelNotFoundError
from localrag.grading import Question, grade
from localrag.kb import KnowledgeBase
from localrag.session.opening import open_embedder
from localrag.session.quality import AskWay, CouncilWay, Means
from localrag.settings import Settings

TEXTS = {"pla": "PLA is annealed at 90 degrees.", "abs": "ABS is smoothed with acetone.", "nylon": "Nylon takes up water."}


@pytest.fixture
def means(home, tmp_path, tiny_catalogue):
    """A home with three notes, to be asked with the echo."""
    settings = Settings(home=home, models_file=tiny_catalogue)
    (tmp_path / "notes").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "notes" / f"{name}.md").write_text(f"# {name}\n\n{text}\n")
    with KnowledgeBase.open(settings.kb_dir, "notes", create=True) as kb:
        kb.ingest([tmp_path / "notes"], open_embedder(settings))
    return Means(settings=settings, model="echo", kbs=("notes",), max_tokens=300)


def test_an_ask_tells_what_was_sent_and_what_came(means):
    with AskWay(means).opened() as answering:
        outcome = answering("How is PLA annealed?")
    assert outcome.text.startswith("You asked: How is PLA annealed? [KB#")
    assert [each.supplied for each in outcome.citations] == [True]
    assert outcome.citations[0].label in {passage.label for passage in outcome.passages}
    assert any("annealed at 90 degrees" in passage.text for passage in outcome.passages if passage.source == "notes/pla.md")
    assert outcome.prompt_tokens == outcome.evaluated_tokens > 0
    assert (outcome.completion_tokens, outcome.finish_reason, outcome.error) == (len(outcome.text) + 1, "stop", "")
    assert outcome.seconds > 0


def test_the_same_question_gains_nothing_from_being_asked_before(means):
    with AskWay(means).opened() as answering:
        first, second = answering("How is PLA annealed?"), answering("How is PLA annealed?")
    assert (first.evaluated_tokens, first.prompt, first.text) == (second.evaluated_tokens, second.prompt, second.text)


def test_a_question_that_fails_is_an_outcome_and_the_next_one_is_asked(means):
    with AskWay(replace(means, n_ctx=400)).opened() as answering:
        failed, asked = answering("x" * 500), answering("How is PLA annealed?")
    assert (failed.error, failed.text) == ("BudgetExceededError", "")
    assert "the window holds 400" in failed.error_text
    assert asked.text.startswith("You asked: How is PLA annealed?")


def test_a_smaller_ratio_supplies_less(means):
    found = {}
    for ratio in (0.0, 0.9):
        with AskWay(replace(means, n_ctx=1200), ratio).opened() as answering:
            found[ratio] = answering("How is PLA annealed, ABS smoothed and nylon dried?")
    assert len(found[0.0].passages) < len(found[0.9].passages)
    assert found[0.0].prompt != found[0.9].prompt


def test_a_council_says_its_verdict_and_shows_what_it_rests_on(means):
    way = CouncilWay.of("default", means)
    with way.opened() as answering:
        outcome = answering("How is PLA annealed?")
    assert way.name == "council default"
    assert "How is PLA annealed?" in outcome.text
    assert {passage.source for passage in outcome.passages} >= {"notes/pla.md"}
    assert all(passage.text for passage in outcome.passages)
    assert 0 < outcome.evaluated_tokens < outcome.prompt_tokens  # what members share
    question = Question(id="q", question="?", answers=(("90",),), sources=("pla.md",))
    assert grade(question, outcome).in_evidence


def test_a_council_without_a_verdict_is_an_outcome_that_failed(means):
    with CouncilWay.of("default", replace(means, n_ctx=256)).opened() as answering:
        outcome = answering("How is PLA annealed?")
    assert outcome.error == "BudgetExceededError"
    assert outcome.passages == ()


def test_what_answers_depend_on_tells_ways_apart(means, tmp_path):
    def other(**changes):
        return replace(means, **changes)

    ways = [AskWay(means), AskWay(means, 0.5), AskWay(other(seed=1)), AskWay(other(n_ctx=900)), AskWay(other(system="Be brief."))]
    ways += [CouncilWay.of("default", means), CouncilWay.of("default", other(top_k=2))]
    for number in range(2):
        (tmp_path / f"{number}.jinja").write_text(f"{{# {number} #}}")
        ways.append(AskWay(other(chat_template=tmp_path / f"{number}.jinja")))
    (tmp_path / "models.toml").write_text(f"{means.settings.models_file.read_text()}[budgets.default]\ngap = 9\n")
    ways.append(AskWay(other(settings=replace(means.settings, models_file=tmp_path / "models.toml"))))
    assert len({repr(way.about) for way in ways}) == len(ways)
    assert repr(AskWay(means).about) == repr(AskWay(means).about)


def test_a_model_that_is_not_there_is_named_before_anything_is_asked(means):
    with pytest.raises(ModelNotFoundError):
        _ = AskWay(replace(means, model="none")).about
