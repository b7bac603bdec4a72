import time

import pytest

from localrag.text.thinking import form_of, without_thoughts


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
    assert without_thoughts(text) == answer


PAIRS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
CALL = (
    '<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"text": "<|channel|>final<|message|>"}<|call|>'
)


@pytest.mark.parametrize(("opens", "closes"), PAIRS)
def test_thoughts_of_every_form_are_taken_off(opens, closes):
    assert without_thoughts(f"{opens}\nHm, {closes} is a mark.\n{closes}\n\nYes.") == "Yes."
    assert without_thoughts(f" {opens}Hm.{closes}Yes.") == "Yes."
    assert without_thoughts(f"Hm.\n{closes}\nYes.") == "Yes."


@pytest.mark.parametrize(("opens", "closes"), PAIRS)
def test_what_speaks_of_any_form_loses_nothing(opens, closes):
    for text in (
        f"It ends with `{closes}`.",
        f'{{"name": "find", "arguments": {{"text": "{closes}"}}}}',
        f"Thoughts look like this:\n{opens}\nHm.\n{closes}\nThen comes the answer.",
        f"{opens} never ends",
    ):
        assert without_thoughts(text) == text


@pytest.mark.parametrize(("opens", "closes"), PAIRS)
def test_only_the_form_that_a_text_begins_with_counts(opens, closes):
    for other, end in PAIRS:
        if other != opens:
            assert (
                without_thoughts(f"{opens}\nNot {other} a\n{end}\n but\n{closes}\nWrite {other} and {end}.") == f"Write {other} and {end}."
            )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.", "Yes."),
        (f"<|start|>assistant{ANALYSIS}Hm.<|end|>{FINAL}Yes.<|return|>", "Yes."),
        (f"{ANALYSIS}Hm.{FINAL}Yes: <|end|> ends a message.<|end|>\n", "Yes: <|end|> ends a message."),
        (f"{ANALYSIS}A<|end|><|start|>assistant{ANALYSIS}B<|end|>{FINAL}C", "C"),
        (f"{ANALYSIS}A<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>{FINAL}C", "C"),
        (FINAL.removeprefix("<|start|>assistant") + "Yes.", "Yes."),
        (f"{ANALYSIS}Hm.<|end|>{CALL}", CALL),
        (CALL, CALL),
        (f"{ANALYSIS}Hm, never en", f"{ANALYSIS}Hm, never en"),
        ("`<|channel|>analysis<|message|>` begins thoughts.", "`<|channel|>analysis<|message|>` begins thoughts."),
        ("<|channel|> is a mark, <|message|> too.", "<|channel|> is a mark, <|message|> too."),
        ('{"text": "<|channel|>analysis<|message|>Hm.<|end|>"}', '{"text": "<|channel|>analysis<|message|>Hm.<|end|>"}'),
    ],
)
def test_of_channels_the_answer_stays(text, answer):
    assert without_thoughts(text) == answer


@pytest.mark.parametrize("form", [form_of(opens + closes) for opens, closes in PAIRS] + [form_of("<|channel|>analysis")])
def test_the_forms_that_are_split_while_they_are_written_are_those_taken_off_a_history(form):
    begins = form.opens or ANALYSIS
    assert without_thoughts(f"{begins}Hm.{form.end}Yes.") == "Yes."


@pytest.mark.parametrize("piece", ["<think>", "</think>\n", "\n", " ", ANALYSIS, f"{ANALYSIS}<|end|>", "<|start|>assistant", "[/THINK]"])
def test_a_long_text_takes_time_that_grows_with_its_length(piece):
    started = time.process_time()
    without_thoughts(piece * (300_000 // len(piece)))
    without_thoughts("x" + piece * (300_000 // len(piece)))
    assert time.process_time() - started < 20  # far under 1 s; what grows with the square takes minutes


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
    assert without_thoughts(text) == text
