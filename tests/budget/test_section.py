"""What a section may be, and the one line that says what it may not."""

from __future__ import annotations

import dataclasses
import json

import pytest

from localrag.budget import Percent, Section
from localrag.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in ("basis", "min", "max") for value in (-1, 1.5, float("nan"), True, "10")]
    + [("basis", None), ("min", None)]
    + [(field, value) for field in ("grow", "shrink") for value in (-0.5, float("nan"), float("inf"), True, "1", None)]
    + [("cut", "always"), ("cut", None)],
)
def test_a_bad_value_is_one_line_that_names_section_and_field(field, value):
    with pytest.raises(ConfigError) as caught:
        Section(**{"name": "evidence", field: value})
    assert caught.value.message.startswith(f"Section 'evidence': {field} ")
    assert "\n" not in caught.value.message
    assert caught.value.hint
    json.dumps(caught.value.to_dict())


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_section_has_a_name(name):
    with pytest.raises(ConfigError, match="name"):
        Section(name=name)


@pytest.mark.parametrize(("low", "high"), [(11, 10), (Percent(11), Percent(10))])
def test_a_min_over_its_max_is_refused(low, high):
    with pytest.raises(ConfigError, match=r"'a': min .* greater than its max"):
        Section(name="a", min=low, max=high)


@pytest.mark.parametrize("value", [-0.1, 100.1, float("nan"), float("inf"), True, "10", None])
def test_a_percentage_is_from_0_to_100(value):
    with pytest.raises(ConfigError, match="percentage"):
        Percent(value)


def test_fixed_is_what_has_one_size_whatever_the_window():
    assert Section.fixed("a", 7) == Section(name="a", basis=7, min=7, max=7, shrink=0)
    assert Section.fixed("a", 7).is_fixed
    assert not Section(name="a", basis=7, min=7).is_fixed
    assert not Section(name="a", basis=Percent(10), min=Percent(10), max=Percent(10)).is_fixed


def test_it_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Section(name="a").basis = 3
