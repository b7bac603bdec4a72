import pytest

from localrag.messages import strip_reasoning


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>x</think>", ""),
        (" <think>a</think> b\n</think>c", "b\n</think>c"),
        ("<think>\na </think>, b\n</think>\n\nc", "c"),
        ("<think>\na</think>b", "b"),
        ("a\n</think> b", "b"),
    ],
)
def test_thoughts_are_taken_off(text, answer):
    assert strip_reasoning(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "  plain\n",
        "<think> x",
        "It ends with `</think>`.",
        '{"name": "find", "arguments": {"text": "</think>"}}',
        "Thoughts look like this:\n<think>\nHm.\n</think>\nThen comes the answer.",
    ],
)
def test_an_answer_that_speaks_of_the_marks_loses_nothing(text):
    assert strip_reasoning(text) == text
