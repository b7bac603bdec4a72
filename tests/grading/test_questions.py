"""Question files that anybody may have written."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrag.errors import UsageError
from localrag.grading import MAX_LINE_BYTES, Outcome, Passage, Question, Share, grade, read_questions, spread, tally
from localrag.types import Citation

GOOD = {"id": "q1", "question": "How hard?", "answers": [["95A"]], "sources": ["tpu.md"]}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Writes the lines of a file: rows as JSON, bytes as they are."""
    path = tmp_path_factory.mktemp("questions") / "qa.jsonl"

    def write(*lines):
        path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
        return path

    return write


def test_what_a_line_says(file):
    several = {"id": "q2", "question": " Where? ", "answers": [["a", " b "], ["c"]], "sources": ["x.md", ["y.md", "z.md"]]}
    read = read_questions(
        file(b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", b"  ", several, {"id": "u", "question": "Who?", "answers": []})
    )
    assert read.questions == (
        Question(id="q1", question="How hard?", answers=(("95A",),), sources=("tpu.md",)),
        Question(id="q2", question="Where?", answers=(("a", "b"), ("c",)), sources=("x.md", ("y.md", "z.md"))),
        Question(id="u", question="Who?"),
    )
    assert [each.is_answerable for each in read.questions] == [True, True, False]
    assert read.questions[1].pages == {"x.md", "y.md", "z.md"}
    assert read.refusals is None


def test_the_first_line_may_say_what_a_refusal_is(file):
    assert read_questions(file({"refusals": ["steht dort nicht"]}, GOOD)).refusals == ("steht dort nicht",)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"no json", "it is not JSON"),
        (b"[1]", "it is not a JSON object"),
        (b"[" * 100_000, "it is not JSON"),
        (b'{"id": "a\xff"}', "it is not UTF-8"),
        (b'{"id": "a", "id": "b"}', "a key is repeated"),
        (GOOD, "its id 'q1' is already used on line 1"),
        (GOOD | {"id": 7}, "id: "),
        (GOOD | {"id": ""}, "id: "),
        (GOOD | {"id": "x" * 201}, "id: "),
        (GOOD | {"id": "a", "question": "  "}, "question: "),
        ({"id": "a", "question": "?"}, "answers: Field required"),
        (GOOD | {"id": "a", "answers": "95A"}, "answers: "),
        (GOOD | {"id": "a", "answers": ["95A"]}, "answers.0: "),
        (GOOD | {"id": "a", "answers": [[]]}, "answers.0: "),
        (GOOD | {"id": "a", "answers": [["  "]]}, "answers.0.0: "),
        (GOOD | {"id": "a", "answers": [[95]]}, "answers.0.0: "),
        (GOOD | {"id": "a", "answers": [["x" * 501]]}, "answers.0.0: "),
        (GOOD | {"id": "a", "answers": [["x"]] * 101}, "answers: "),
        (GOOD | {"id": "a", "sources": []}, "it has answers but no sources"),
        (GOOD | {"id": "a", "sources": [[]]}, "sources.0"),
        (GOOD | {"id": "a", "answers": []}, "it has sources but no answers"),
        (GOOD | {"id": "a", "answer": "95A"}, "answer: "),
        ({"refusals": ["no"]}, "refusals must be on the first line"),
        (b'{"id": "' + b"x" * MAX_LINE_BYTES + b'"}', "it is longer than 256 KiB"),
    ],
)
def test_a_broken_line_is_named_by_its_number(file, line, says):
    path = file(GOOD, b"", line)
    with pytest.raises(UsageError) as caught:
        read_questions(path)
    assert caught.value.message.startswith("Line 3 of qa.jsonl cannot be used: ")
    assert says in caught.value.message
    assert (caught.value.numbers, bool(caught.value.hint)) == ({"line": 3}, True)


@pytest.mark.parametrize("head", [{"refusals": []}, {"refusals": "no"}, {"refusals": ["no"], "id": "q"}, {"refusals": [""]}])
def test_a_broken_head_is_named_too(file, head):
    with pytest.raises(UsageError, match=r"Line 1 of qa\.jsonl cannot be used: "):
        read_questions(file(head, GOOD))


@pytest.mark.parametrize(("lines", "says"), [((), "has no questions"), (({"refusals": ["no"]},), "has no questions")])
def test_a_file_without_a_question(file, lines, says):
    with pytest.raises(UsageError, match=says):
        read_questions(file(*lines))


def test_what_is_no_file(tmp_path):
    with pytest.raises(UsageError, match="is not a file"):
        read_questions(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")


def test_there_is_a_most_of_questions(file):
    rows = ({"id": str(number), "question": "?", "answers": []} for number in range(10_001))
    with pytest.raises(UsageError, match=r"Line 10001 of qa\.jsonl cannot be used: there are more than 10000 questions"):
        read_questions(file(*rows))


PARTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "refusals", "x"]), inner, max_size=4),
    max_leaves=8,
)
BROKEN = st.one_of(
    st.binary(max_size=60),
    PARTS.map(lambda row: json.dumps(row).encode()),
    st.builds(lambda key, value: json.dumps(GOOD | {key: value}).encode(), st.sampled_from(list(GOOD)), PARTS),
    st.integers(0, 80).map(lambda cut: json.dumps(GOOD).encode()[:cut]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(BROKEN, max_size=4))
def test_any_bytes_are_questions_or_one_error_that_names_a_line(file, lines):
    path = file(*lines)
    try:
        read = read_questions(path)
    except UsageError as error:
        assert error.message.startswith("Line ") or "has no questions" in error.message
        assert "\n" not in error.message.replace("\\n", "") or error.message.isprintable() is False
    else:
        assert len({each.id for each in read.questions}) == len(read.questions)
        assert all(spelling.strip() for each in read.questions for group in each.answers for spelling in group)
        assert all(bool(each.sources) == each.is_answerable for each in read.questions)


@pytest.mark.parametrize(
    ("num", "expected"),
    [(None, [0, 1, 2, 3, 4, 5]), (9, [0, 1, 2, 3, 4, 5]), (6, [0, 1, 2, 3, 4, 5]), (3, [0, 2, 4]), (4, [0, 1, 3, 4]), (1, [0])],
)
def test_some_of_them_lie_at_even_distances(num, expected):
    assert spread(range(6), num) == expected


def turns(*texts):
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def test_the_last_question_of_a_conversation(tmp_path):
    rows = [
        {"id": "a", "messages": turns("Dry PETG?", "At 65.", "How long?"), "relevant": ["d1", "d1"], "collection": "c", "reference": "6 h"},
        {"id": "b", "messages": turns("Who?"), "answerability": "unanswerable"},
        {"id": "c", "messages": turns("What?"), "answerability": "underspecified", "relevant": []},
    ]
    (tmp_path / "c.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    a, b, c = read_questions(tmp_path / "c.jsonl").questions
    assert (a.question, a.sources, a.collection, a.is_answerable, a.is_judged) == ("How long?", ("d1",), "c", True, True)
    assert [(each.role, each.content) for each in a.messages] == [("user", "Dry PETG?"), ("assistant", "At 65."), ("user", "How long?")]
    assert [(each.is_answerable, each.is_judged) for each in (b, c)] == [(False, True), (False, False)]
    outcome = Outcome(text="6 h.", citations=(Citation("KB#1", True),), passages=(Passage("KB#1", "d1", "For hours."),))
    found = grade(a, outcome)
    assert (found.in_evidence, found.cites_holder, found.is_right) == (True, True, False)
    row = tally("ask", [(a, outcome, found), (b, outcome, grade(b, outcome))])
    assert (row.is_right, row.cites_holder, row.is_refused) == (Share(0, 0), Share(1, 1), Share(0, 1))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": turns("a", "b")}, "its messages do not end with a question"),
        ({"messages": turns(" ")}, "its messages do not end with a question"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: "),
        ({"messages": turns("a"), "relevant": [1]}, "relevant.0: "),
        ({"messages": turns("a"), "answerability": "perhaps"}, "answerability: "),
        ({"messages": turns("a"), "answerability": "unanswerable", "relevant": ["d"]}, "it is unanswerable but has relevant documents"),
        ({"messages": turns("half \ud83d")}, "messages.0.content: "),
    ],
)
def test_what_is_no_conversation(tmp_path, row, says):
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": "a"} | row))
    with pytest.raises(UsageError, match=r"Line 1 of c\.jsonl cannot be used") as caught:
        read_questions(tmp_path / "c.jsonl")
    assert says in caught.value.message
