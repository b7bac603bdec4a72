"""The tables of all worked examples, and their places in docs/explanation/budget.md.

A worked example is a module of this folder with `tables() -> dict[str, str]`: Markdown by the name of its place in the page. One that
needs the default model to count with says so: `NEEDS_MODEL = True`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "explanation" / "budget.md"


def examples() -> dict[str, Path]:
    """The files of the worked examples, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.py")) if "\ndef tables(" in path.read_text(encoding="utf-8")}


def load(path: Path) -> ModuleType:
    """A worked example as a module."""
    name = f"worked_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def places(page: str) -> dict[str, str]:
    """What stands in each marked place of a page."""
    return {name: text.strip() for name, text in re.findall(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end -->", page, re.DOTALL)}


def filled(page: str, offered: Mapping[str, str]) -> str:
    """The page with those tables in their places; a place that is not offered stays as it is."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{offered[match[2]]}\n{match[4]}" if match[2] in offered else match[0]

    return re.sub(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", fill, page, flags=re.DOTALL)


def write() -> list[str]:
    """Refresh the page, and return the names of the tables that have a place in it."""
    offered = {name: text for path in examples().values() for name, text in load(path).tables().items()}
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, offered), encoding="utf-8")
    return sorted(offered.keys() & places(page).keys())
