"""What counts as right, as cited and as refused."""

import pytest

from localrag.grading import Grade, Outcome, Passage, Question, grade, is_met, is_page, is_refusal
from localrag.types import Citation

TPU = Question(id="q", question="How hard is TPU?", answers=(("95A",),), sources=("materials/tpu.md",))
BOTH = Question(
    id="b", question="What lasts, and what does it cost?", answers=(("ASA",), ("25",)), sources=(("sun.md", "cost.md"), ("all.md",))
)
NOBODY = Question(id="u", question="Who invented it?")
RIGHT = Grade(in_evidence=True, is_right=True, cites_holder=True, num_invented=0, is_refused=False)
NOTHING = Grade(in_evidence=False, is_right=False, cites_holder=False, num_invented=0, is_refused=False)


def said(text, *passages, cited=(), invented=()):
    citations = (*(Citation(label, supplied=True) for label in cited), *(Citation(label, supplied=False) for label in invented))
    return Outcome(text=text, citations=citations, passages=tuple(Passage(*each) for each in passages))


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("PETG is annealed at 70 to 75 °C.", [["70"], ["75"]], True),
        ("Anneal it at 75°C, not above 80C.", [["75"], ["80"]], True),
        ("It grows by 0.75 mm, or 175.", [["75"]], False),
        ("About 75.5 or 75,5.", [["75"]], False),
        ("It takes 75.", [["75"]], True),
        ("Use abs (styrene).", [["ABS"]], True),
        ("It is absolutely fine.", [["ABS"]], False),
        ("The tag [KB#75] says so, and KB#pets/75.", [["75"]], False),
        ("The tags [kb #75], [KB#1, 75], [KB:75] and [KB#74-75] say so.", [["75"]], False),
        ("At -20 °C.", [["−20"]], True),
        ("At 20 °C.", [["−20"]], False),
        ("From 80–110 °C.", [["80"], ["110"]], True),
        ("It lasts five\nyears.", [["5 years", "five years"]], True),
        ("Only one of both: 70.", [["70"], ["75"]], False),
    ],
)
def test_an_answer_is_met_by_words_and_numbers_of_their_own(text, answers, expected):
    assert is_met(answers, text) is expected


def test_an_answer_that_is_right_from_what_was_supplied_and_cites_it():
    outcome = said("[KB#1] Shore 95A.", ("KB#1", "handbook/materials/tpu.md", "Shore 95A is common."), cited=["KB#1"])
    assert grade(TPU, outcome) == RIGHT


def test_what_is_right_without_a_source_is_right_alone():
    assert grade(TPU, said("95A.")) == Grade(in_evidence=False, is_right=True, cites_holder=False, num_invented=0, is_refused=False)


def test_a_page_of_another_name_holds_nothing():
    outcome = said("95A [KB#1]", ("KB#1", "notes/tpu.md", "Shore 95A."), cited=["KB#1"])
    assert (grade(TPU, outcome).in_evidence, grade(TPU, outcome).cites_holder) == (False, False)


def test_citing_another_passage_than_the_one_that_holds_it_is_right_by_its_page():
    passages = ("KB#1", "materials/tpu.md", "It is rubber."), ("KB#2", "materials/tpu.md", "Shore 95A.")
    assert grade(TPU, said("95A", *passages, cited=["KB#1"])) == RIGHT


def test_pages_that_stand_together_have_to_be_there_and_cited_all():
    sun, cost = ("KB#1", "h/sun.md", "ASA lasts."), ("KB#2", "h/cost.md", "ASA: 25 euros.")
    text = "ASA, 25 euros."
    assert grade(BOTH, said(text, sun, cost, cited=["KB#1", "KB#2"])) == RIGHT
    assert not grade(BOTH, said(text, sun, cost, cited=["KB#1"])).cites_holder
    assert not grade(BOTH, said(text, cost)).in_evidence  # it holds all words, and not why it is ASA
    assert grade(BOTH, said(text, ("KB#3", "all.md", "ASA"), ("KB#4", "all.md", "25"), cited=["KB#4"])) == RIGHT
    assert not grade(BOTH, said(text, sun, ("KB#2", "h/cost.md", "PLA: 15 euros."))).in_evidence


def test_one_page_has_to_hold_it_in_one_passage():
    question = Question(id="q", question="?", answers=(("70",), ("75",)), sources=("petg.md",))
    assert not grade(question, said("", ("KB#1", "petg.md", "70"), ("KB#2", "petg.md", "75"))).in_evidence
    assert grade(question, said("", ("KB#1", "petg.md", "70 to 75"))).in_evidence


def test_invented_citations_are_counted_and_hold_nothing():
    outcome = said("95A", ("KB#1", "materials/tpu.md", "95A"), invented=["KB#7", "KB#8"])
    assert (grade(TPU, outcome).num_invented, grade(TPU, outcome).cites_holder) == (2, False)


def test_what_no_page_answers_can_only_be_refused():
    passage = ("KB#1", "materials/tpu.md", "TPU")
    assert grade(NOBODY, said("The sources do not say.", passage, cited=["KB#1"])) == Grade(
        in_evidence=False, is_right=False, cites_holder=False, num_invented=0, is_refused=True
    )
    assert grade(NOBODY, said("Scott did, in 1989.")) == NOTHING


def test_a_refusal_that_gives_the_right_answer_too_is_none():
    assert not grade(TPU, said("The sources do not mention PLA. TPU is 95A.")).is_refused
    assert grade(TPU, said("The sources do not mention it.")).is_refused


def test_nothing_said_is_nothing():
    assert grade(TPU, said("")) == grade(NOBODY, said("")) == NOTHING


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The sources do not say who did.", True),
        ("The sources don’t say.", True),
        ("The source doesn't\nmention it.", True),
        ("I can't answer that.", True),
        ("I can not answer that.", True),
        ("That is NOT MENTIONED anywhere.", True),
        ("There is no information on resin.", True),
        ("I don't know.", True),
        ("PLA does not stick to glass.", False),
        ("Do not sleep in a room where a printer runs.", False),
        ("It is unknown territory for PLA, which works.", False),
        ("", False),
    ],
)
def test_a_refusal_is_told_by_its_words(text, expected):
    assert is_refusal(text) is expected


def test_other_phrases_stand_in_place_of_ours():
    assert is_refusal("Das steht dort nicht.", ["steht dort nicht"])
    assert not is_refusal("The sources do not say.", ["steht dort nicht"])


@pytest.mark.parametrize(
    ("source", "page", "expected"),
    [
        ("handbook/README.md", "README.md", True),
        ("README.md", "README.md", True),
        ("handbook/OLD-README.md", "README.md", False),
        ("README.md", "handbook/README.md", False),
    ],
)
def test_a_page_is_named_by_the_end_of_its_path(source, page, expected):
    assert is_page(source, page) is expected
