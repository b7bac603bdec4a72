import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.text.sentences import first_sentence, sentences, units, whole_sentences


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('Dry it. "Then print!" he said.', ["Dry it. ", '"Then print!" ', "he said."]),
        ("Version 3.14 is out... Get it.", ["Version 3.14 is out... ", "Get it."]),
        ("**Dry it.** Then print", ["**Dry it.** ", "Then print"]),
        ("「乾燥する。」次に印刷する！？", ["「乾燥する。」", "次に印刷する！？"]),
        ("# Title\n\n- one\n- two", ["# Title\n\n", "- one\n", "- two"]),
        ("", []),
    ],
)
def test_sentences_by_hand(text, pieces):
    assert list(sentences(text)) == pieces


@given(st.text(alphabet="ab .!?…\"'”)*_。！」\n"))
def test_sentences_are_the_text(text):
    assert "".join(sentences(text)) == text
    assert text.startswith(first_sentence(text))
    assert text.startswith(whole_sentences(text))


def test_the_first_and_the_whole_ones():
    assert first_sentence("One. Two.") == "One."
    assert first_sentence("no end") == "no end"
    assert whole_sentences("One. Two! Thr") == "One. Two!"
    assert whole_sentences("One. Two.") == "One. Two."
    assert whole_sentences("no end") == "no end"


@pytest.mark.parametrize("text", ["." * 200_000 + "x", ('."' * 100_000) + "x", "\n" * 200_000])
def test_hostile_text_takes_no_time(text):
    started = time.process_time()
    list(sentences(text))
    whole_sentences(text)
    assert time.process_time() - started < 2


def test_a_row_knows_the_head_of_its_table():
    text = "| a | b |\n| --- | :-: |\n| 1 | 2 |\n|3|4|\nText."
    told = [(text[slice(*each.span)], each.header and text[slice(*each.header)]) for each in units(text)]
    assert told == [("| 1 | 2 |", text[:23]), ("|3|4|", text[:23]), ("Text.", None)]
    assert all(each.header is None for each in units("| a |\n|   |\n| 1 |"))
