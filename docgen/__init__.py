"""The pages of docs/reference that follow from the code, so that what they say cannot differ from it.

They are kept in the repository, for people who read on disk; `scripts/reference` writes them, and a test compares. Nothing of it is
part of the package that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docgen import commands, models_toml, python_api

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "cli.md": commands.page,
    "python.md": python_api.page,
    "models-toml.md": models_toml.page,
}
