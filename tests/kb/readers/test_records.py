import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.kb.readers import UnreadableError, records


def _sections(reading):
    return [(section.heading, reading.text[section.start : section.end].strip()) for section in reading.sections]


def _places(reading):
    return [(place.kind, place.number, reading.text[place.start :].split("\n")[0]) for place in reading.places]


def test_an_array_of_objects_is_records():
    reading = records.read_json(b'[{"name": "PLA", "heat": {"bed": 60, "max": null}}, {"name": "ABS", "tags": ["a", "b"], "ok": true}]')
    assert _sections(reading) == [("", "name: PLA\nheat.bed: 60\nheat.max: null"), ("", "name: ABS\ntags: a, b\nok: true")]
    assert _places(reading) == [("record", 1, "name: PLA"), ("record", 2, "name: ABS")]
    assert not reading.own_lines


def test_records_inside_objects_stand_under_their_path():
    reading = records.read_json(json.dumps({"v": 1, "a": {"users": [{"id": 7}, {"id": 8}], "x": "y"}, "rest": {}}).encode())
    assert _sections(reading) == [("", "v: 1\na.x: y\nrest: {}"), ("a.users", "id: 7"), ("a.users", "id: 8")]
    assert _places(reading) == [("record", 1, "id: 7"), ("record", 2, "id: 8")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": {"b": {"c": "d"}}}, "a.b.c: d"),
        ({"a": "two\nlines"}, "a: two\nlines"),
        ({"a": [1, [2, 3]]}, "a: [1, [2, 3]]"),
        ({"a": [1, {"b": 2}]}, "a.1: 1\na.2.b: 2"),
        ({"a": [], "b": 1.5}, "a: []\nb: 1.5"),
        ([1, 2], "1, 2"),
        (["x" * 150, "y" * 150], "x" * 150 + "\n" + "y" * 150),
        ("word", "word"),
        ({"\ud800": "\udc00x\0"}, "x"),
    ],
)
def test_values(value, text):
    reading = records.read_json(json.dumps(value).encode())
    assert reading.text.strip() == text.strip()
    reading.text.encode()


def test_rows_of_an_array_are_records():
    assert _sections(records.read_json(b'[["a", 1], ["b", 2]]')) == [("", "a, 1"), ("", "b, 2")]


LINES = b'{"a": 1}\r\n\n{"a": "\xe2\x80\xa8x"}\nnot JSON {\n{"a": 3}'


@pytest.mark.parametrize("read", [records.read_json, records.read_json_lines])
def test_json_lines(read):
    reading = read(LINES)
    assert [text for _, text in _sections(reading)] == ["a: 1", "a: \u2028x", "not JSON {", "a: 3"]
    assert [place[:2] for place in _places(reading)] == [("line", 1), ("line", 3), ("line", 4), ("line", 5)]
    assert [place.start for place in reading.places] == [section.start for section in reading.sections]


@pytest.mark.parametrize("data", [b"// comment\n{}x", b'{"a": 1, "b": [', b"plain\ntext", b'{"a": %s}' % (b"9" * 5000)])
def test_what_is_no_json_is_text(data):
    reading = records.read_json(data)
    assert reading.text == data.decode()
    assert reading.own_lines
    assert [(section.start, section.end) for section in reading.sections] == [(0, len(data))]


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"[" * 500 + b"]" * 500, b'{"a":' * 200 + b"1" + b"}" * 200, b'[{"a":' + b"[" * 90 + b"]" * 90 + b"}]"]
)
def test_what_is_nested_too_deep_says_so(data):
    with pytest.raises(UnreadableError, match="more than 64 levels"):
        records.read_json(data)


def test_long_paths_do_not_multiply_text():
    keys = {f"{number}": 0 for number in range(2_000)}
    for _ in range(60):
        keys = {"k" * 200: keys}
    with pytest.raises(UnreadableError, match="more than 20 MB"):
        records.read_json(json.dumps(keys).encode())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(VALUES, st.integers(0, 200))
def test_any_json_is_read_and_no_text_is_lost(value, cut):
    for data in (json.dumps(value).encode(), json.dumps(value).encode()[:cut], (json.dumps(value) + "\n").encode() * 2):
        reading = records.read_json(data)
        assert "".join(reading.text[section.start : section.end] for section in reading.sections).strip() == reading.text.strip()
        assert all(one.end == two.start for one, two in pairwise(reading.sections))
        assert [place.start for place in reading.places] == sorted(place.start for place in reading.places)


def _notebook(cells, **about):
    return records.read_notebook(json.dumps({"cells": cells, "metadata": about, "nbformat": 4}).encode())


CELLS = [
    {"cell_type": "markdown", "source": ["# Heat\n", "\n", "About beds.\n", "## Data\n", "```\n", "# no heading\n", "```"]},
    {
        "cell_type": "code",
        "source": "print(1)\n",
        "outputs": [
            {"output_type": "stream", "text": ["1\n"]},
            {"output_type": "execute_result", "data": {"text/plain": "2", "text/html": "<b>EVIL</b>", "image/png": "EVIL"}},
            {"output_type": "error", "ename": "ValueError", "evalue": "\x1b[31mno\x1b[0m", "traceback": ["EVIL"]},
        ],
    },
    {"cell_type": "raw", "source": "raw ![](data:image/png;base64,iVBORw0KGgo=) text"},
]


def test_a_notebook():
    reading = _notebook(CELLS, language_info={"name": "python"}, authors=[{"name": "Ann"}, {}, 3])
    assert reading.title == "Heat"
    assert reading.fields == (("author", "Ann"),)
    assert reading.markdown
    assert _sections(reading) == [
        ("Heat", "# Heat\n\nAbout beds."),
        ("Heat > Data", "## Data\n```\n# no heading\n```\n\n```python\nprint(1)\n```\n\n```\n1\n2\nValueError: no\n```\n\nraw ![]() text"),
    ]
    found = [(place.number, reading.text[place.start :][:9]) for place in reading.places]
    assert found == [(1, "# Heat\n\nA"), (2, "```python"), (3, "raw ![]()")]
    assert {place.kind for place in reading.places} == {"cell"}


def test_outputs_are_bounded():
    reading = _notebook([{"cell_type": "code", "source": "x", "outputs": [{"text": "y" * 100_000}]}])
    assert "y" * records.MAX_OUTPUT_CHARS + "\n… (98000 more characters)" in reading.text
    assert len(reading.text) < records.MAX_OUTPUT_CHARS + 100


def test_a_fence_is_longer_than_those_in_the_code():
    assert "````\n```\n````" in _notebook([{"cell_type": "code", "source": "```"}]).text


def test_format_3():
    cells = [{"cell_type": "heading", "level": 2, "source": "Old"}, {"cell_type": "code", "input": "print 1", "outputs": [{"text": "1"}]}]
    reading = records.read_notebook(json.dumps({"worksheets": [{"cells": cells}], "nbformat": 3}).encode())
    assert _sections(reading) == [("Old", "Old\n\n```\nprint 1\n```\n\n```\n1\n```")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "no cells"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": %s}' % (b"9" * 5000), "not JSON"),
    ],
)
def test_what_is_no_notebook_says_why(data, reason):
    with pytest.raises(UnreadableError, match=reason):
        records.read_notebook(data)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["code", "markdown", "heading", "# x"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["cells", "metadata", "cell_type", "source", "outputs", "data", "text/plain", "level"]), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_any_shape_is_read_or_unreadable(value):
    for document in (value, {"cells": value}, {"cells": [value], "metadata": value}, {"cells": [{"cell_type": "code", "outputs": value}]}):
        try:
            records.read_notebook(json.dumps(document).encode()).text.encode()
        except UnreadableError as error:
            assert str(error)
