"""Lines that somebody else wrote."""

import pytest

from localrag.errors import UsageError
from localrag.files import check_regular, read_lines, read_object


def test_lines_have_their_numbers_and_blank_ones_are_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf one \r\n\n\t\ntwo\n" + b"x" * 11 + b"\n" + b"y" * 30 + b"\nz\nend")
    assert list(read_lines(path, 10)) == [(1, b"one"), (4, b"two"), (5, None), (6, None), (7, b"z"), (8, b"end")]


def test_a_line_of_the_longest_length_is_read_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 10 + b"\n" + b"y" * 10)
    assert list(read_lines(path, 10)) == [(1, b"x" * 10), (2, b"y" * 10)]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "not JSON"),
        (b"1", "not a JSON object"),
        (b"\xff", "UTF-8"),
        (b'{"a": 1, "a": 2}', "repeated"),
        (b'{"a": NaN}', "NaN is not a number"),
    ],
)
def test_what_is_no_object_says_why(raw, says):
    with pytest.raises(UsageError, match=says):
        read_object(raw, '{"a": 1}')


def test_a_folder_is_no_file_of_lines(tmp_path):
    with pytest.raises(UsageError) as caught:
        check_regular(tmp_path, "Give a file.")
    assert caught.value.hint == "Give a file."
