"""A home in which the handbook was indexed, made once and copied."""

import shutil

import pytest

from localrag.kb import import_kb


@pytest.fixture(scope="session")
def furnish(converted, handbook, tmp_path_factory):
    """Makes a folder that is there a home of a person who indexed the handbook, and gives it back."""
    file = tmp_path_factory.mktemp("exported") / "handbook.kb"
    handbook.export(file)

    def _furnish(home):
        shutil.copytree(converted[0].home, home, dirs_exist_ok=True)
        import_kb(home / "kb", file)
        return home

    return _furnish


@pytest.fixture
def home_with_handbook(home, furnish):
    """Such a home, for this process and those it starts."""
    home.mkdir(mode=0o700)
    return furnish(home)
