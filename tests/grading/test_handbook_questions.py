"""The questions that answers are measured by: what they ask for stands in the handbook, or in no page of it."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.chat_retrieval import follow_ups
from benchmarks.quality import QUESTIONS, load_questions
from localrag.grading import is_met, is_refusal, read_questions

HANDBOOK = Path(__file__).parents[2] / "examples" / "handbook"
PAGES = {path.relative_to(HANDBOOK).as_posix(): path.read_text(encoding="utf-8") for path in HANDBOOK.rglob("*.md")}
SECTIONS = {page: re.split(r"(?m)^(?=## )", text) for page, text in PAGES.items()}
FILE = read_questions(QUESTIONS)
ANSWERABLE = [each for each in FILE.questions if each.is_answerable]
UNANSWERABLE = [each for each in FILE.questions if not each.is_answerable]
# of each question without an answer, what a section of the handbook would have to speak of to answer it
WANTED = {
    "u01": r"resin|wavelength",
    "u02": r"slicer",
    "u03": r"\bwatts?\b|\d ?kW\b",
    "u04": r"polypropylene|\bPP\b",
    "u05": r"\bPOM\b|acetal",
    "u06": r"bowden",
    "u07": r"(hours?|minutes?) to print|prints? (for|in) \d",
    "u08": r"invent",
    "u09": r"PLA.{0,80}(catch(es)? fire|ignit)",
    "u10": r"dielectric|\bkV\b",
    "u11": r"hardened steel.{0,80}euro|euro.{0,80}hardened steel",
    "u12": r"PVA[^\n]{0,80}MPa",
    "u13": r"HIPS.{0,80}melting point|# HIPS\n.*Melting",
    "u14": r"BVOH.{0,80}°C",
    "u15": r"TPU[^\n]{0,80}GPa",
    "u16": r"wood.{0,80}°C",
    "u17": r"unopened|shelf life|sealed.{0,80}years",
    "u18": r"epoxy.{0,80}(cures?|hours|minutes)",
    "u19": r"isopropyl.{0,80}flash point",
    "u20": r"workplace|exposure|caprolactam.{0,80}(cubic metre|m³)",
}


def test_each_line_is_one_question_of_its_own():
    lines = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 120
    assert all(set(line) <= {"id", "question", "answers", "sources"} for line in lines)
    assert len({line["id"] for line in lines}) == len({line["question"].casefold() for line in lines}) == 120
    assert (len(ANSWERABLE), len(UNANSWERABLE)) == (100, 20)
    assert [each.id for each in ANSWERABLE] == [f"q{number:02}" for number in range(1, 101)]


def test_the_first_fifty_each_rest_on_one_passage():
    """The benchmarks that ask them count on it, and on their order."""
    assert [each.id for each in load_questions()] == [f"q{number:02}" for number in range(1, 51)]
    assert all(isinstance(source, str) for each in load_questions() for source in each.sources)


def test_every_source_holds_the_whole_answer():
    found = [(each.answers, source) for each in [*ANSWERABLE, *follow_ups()] for source in each.sources]
    missing = [(answers, source) for answers, source in found if not is_met(answers, joined(source))]
    assert missing == []


def joined(source):
    return PAGES[source] if isinstance(source, str) else "\n".join(PAGES[page] for page in source)


def test_a_page_that_stands_alone_holds_the_answer_in_one_section():
    missing = [
        (each.id, source)
        for each in ANSWERABLE
        for source in each.sources
        if isinstance(source, str) and not any(is_met(each.answers, text) for text in SECTIONS[source])
    ]
    assert missing == []


def test_some_rest_on_several_passages():
    assert [each.id for each in ANSWERABLE if not all(isinstance(source, str) for source in each.sources)] == [
        "q96",
        "q97",
        "q98",
        "q99",
        "q100",
    ]


def test_every_spelling_stands_in_a_source():
    """So that none is met by what the handbook does not say."""
    strange = [
        (each.id, spelling)
        for each in ANSWERABLE
        for group in each.answers
        for spelling in group
        if not any(is_met([[spelling]], PAGES[page]) for page in each.pages)
    ]
    assert strange == []


def test_every_page_is_asked_about():
    assert {page for each in ANSWERABLE for page in each.pages} == set(PAGES)


def test_no_question_gives_its_answer_away():
    assert [each.id for each in ANSWERABLE if is_met(each.answers, each.question)] == []


def test_no_page_speaks_of_what_has_no_answer():
    """As far as patterns tell: the pages were read too."""
    assert set(WANTED) == {each.id for each in UNANSWERABLE}
    held = [(known, page) for known, said in WANTED.items() for page, text in PAGES.items() if re.search(said, text, re.IGNORECASE)]
    assert held == []


@pytest.mark.model
def test_a_passage_of_every_source_holds_the_whole_answer(handbook):
    """As the handbook is cut for the default embedder: no answer is torn apart."""
    number, texts = 1, {page: [] for page in PAGES}
    while chunks := handbook.around(number, num_before=0, num_behind=0):
        for chunk in chunks:
            texts[chunk.source.removeprefix("handbook/")].append(chunk.text)
        number += 1
    missing = [
        (each.id, source)
        for each in ANSWERABLE
        for source in each.sources
        if isinstance(source, str) and not any(is_met(each.answers, text) for text in texts[source])
    ]
    assert missing == []


def test_no_page_reads_as_a_refusal():
    assert [page for page, text in PAGES.items() if is_refusal(text)] == []
