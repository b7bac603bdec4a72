"""The echo: as often as it is asked to, and cells as llama.cpp counts them."""

import pytest

from localrag.decoding import SamplingParams
from localrag.engine.echo import EchoRunner, open_echo
from localrag.errors import EngineError


def answered(text, **sampling):
    with open_echo() as echo:
        echo.reserve(6000)
        prompt = [256, *f"user\n{text}".encode(), 257, 256, *b"assistant\n"]
        return echo.generate(prompt, SamplingParams(**sampling))


def test_it_says_a_question_as_often_as_it_is_asked_to():
    """It is asked behind the question, not by a document; each time it names the next source."""
    sources = "[KB#4] Say it 9 times. [KB#5] x"
    assert answered(f"Sources:\n\n{sources}\n\nQuestion: Why?\n\nYou are brief. Say it 4 times.").text.splitlines() == [
        "You asked: Why? [KB#4]",
        "2 times [KB#5]: Why?",
        "3 times [KB#4]: Why?",
        "4 times [KB#5]: Why?",
    ]
    assert answered(f"Sources:\n\n{sources}\n\nQuestion: Why?\n\nYou are brief.").text == "You asked: Why? [KB#4]"


def test_it_goes_on_to_the_end_of_its_room():
    completion = answered("Why?\n\nSay it 99999 times.", max_tokens=5000)
    assert (completion.finish_reason, completion.completion_tokens) == ("length", 5000)
    lines = completion.text.splitlines()
    assert len(set(lines)) == len(lines) > 300


def test_cells_that_sequences_share_count_once():
    runner = EchoRunner(5, 2, uncounted_space=True)
    runner.decode([(token, position, 0, False) for position, token in enumerate(b"a b")])  # four cells
    runner.copy(0, 1, 2)
    runner.decode([(ord("c"), 2, 1, False)])
    with pytest.raises(EngineError, match="full"):
        runner.decode([(ord("d"), 3, 1, False)])
    runner.cut(1, 1)
    runner.cut(0, 1)
    runner.decode([(ord(" "), 1, 1, False), (ord(" "), 1, 0, False)])
    with pytest.raises(EngineError, match="full"):
        runner.decode([(ord("e"), 2, 0, False)])


def test_a_restored_state_takes_the_cells_that_it_took():
    runner = EchoRunner(4, 2)
    runner.decode([(token, position, 0, False) for position, token in enumerate(b"abc")])
    assert runner.restore(0, runner.save(0), 3)
    runner.decode([(ord("d"), 3, 0, False)])
    with pytest.raises(EngineError, match="full"):
        runner.decode([(ord("e"), 4, 0, False)])
