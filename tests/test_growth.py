"""The check of growth tells a line from a square."""

import pytest

from tests.growth import check_linear


def test_a_line_passes_and_a_square_does_not():
    check_linear(lambda size: sum(range(size)), 500_000)
    with pytest.raises(AssertionError, match="for 12000"):
        check_linear(lambda size: sum(range(size * size // 4)), 12000)
