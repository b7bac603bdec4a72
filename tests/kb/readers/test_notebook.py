import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.kb.readers import UnreadableError, notebook


def _read(cells, **about):
    return notebook.read(json.dumps({"cells": cells, "metadata": about, "nbformat": 4}).encode())


def _sections(reading):
    return [(section.heading, reading.text[section.start : section.end].strip()) for section in reading.sections]


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
    reading = _read(CELLS, language_info={"name": "python"}, authors=[{"name": "Ann"}, {}, 3])
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
    reading = _read([{"cell_type": "code", "source": "x", "outputs": [{"text": "y" * 100_000}]}])
    assert "y" * notebook.MAX_OUTPUT_CHARS + "\n… (98000 more characters)" in reading.text
    assert len(reading.text) < notebook.MAX_OUTPUT_CHARS + 100


def test_a_fence_is_longer_than_those_in_the_code():
    assert "````\n```\n````" in _read([{"cell_type": "code", "source": "```"}]).text


def test_format_3():
    cells = [{"cell_type": "heading", "level": 2, "source": "Old"}, {"cell_type": "code", "input": "print 1", "outputs": [{"text": "1"}]}]
    reading = notebook.read(json.dumps({"worksheets": [{"cells": cells}], "nbformat": 3}).encode())
    assert _sections(reading) == [("Old", "Old\n\n```\nprint 1\n```\n\n```\n1\n```")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[1]", "no cells"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": %s}' % (b"9" * 5000), "no JSON"),
    ],
)
def test_what_is_no_notebook_says_why(data, reason):
    with pytest.raises(UnreadableError, match=reason):
        notebook.read(data)


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
            notebook.read(json.dumps(document).encode()).text.encode()
        except UnreadableError as error:
            assert str(error)
