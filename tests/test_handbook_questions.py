"""The questions that councils are measured by: what they ask for stands in the handbook."""

import json
from pathlib import Path

import pytest

from benchmarks.chat_retrieval import follow_ups
from benchmarks.council_quality import QUESTIONS, is_met, load_questions

HANDBOOK = Path(__file__).parents[1] / "examples" / "handbook"
PAGES = {path.relative_to(HANDBOOK).as_posix(): path.read_text(encoding="utf-8") for path in HANDBOOK.rglob("*.md")}


def test_each_line_is_one_question_of_its_own():
    lines = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 50
    assert all(set(line) == {"id", "question", "answers", "sources"} for line in lines)
    assert len({line["id"] for line in lines}) == len({line["question"].casefold() for line in lines}) == 50
    assert all(line["answers"] and all(line["answers"]) and line["sources"] for line in lines)


def test_every_source_holds_the_whole_answer():
    asked = [*load_questions(), *follow_ups()]
    missing = [(each.answers, source) for each in asked for source in each.sources if not is_met(each.answers, PAGES[source])]
    assert missing == []


def test_every_spelling_stands_in_a_source():
    """So that none is met by what the handbook does not say."""
    strange = [
        (each.id, spelling)
        for each in load_questions()
        for group in each.answers
        for spelling in group
        if not any(is_met([[spelling]], PAGES[source]) for source in each.sources)
    ]
    assert strange == []


def test_every_page_is_asked_about():
    assert {source for each in load_questions() for source in each.sources} == set(PAGES)


def test_no_question_gives_its_answer_away():
    assert [each.id for each in load_questions() if is_met(each.answers, each.question)] == []


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
        ("At -20 °C.", [["−20"]], True),
        ("At 20 °C.", [["−20"]], False),
        ("From 80–110 °C.", [["80"], ["110"]], True),
        ("It lasts five\nyears.", [["5 years", "five years"]], True),
        ("Only one of both: 70.", [["70"], ["75"]], False),
    ],
)
def test_an_answer_is_met_by_words_and_numbers_of_their_own(text, answers, expected):
    assert is_met(answers, text) is expected
