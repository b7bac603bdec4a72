"""The comparison of chat templates with transformers."""

import sys

import pytest

from benchmarks import templates
from tests.chat_templates import CHATML
from tests.engine.call_templates import FAMILIES

pytest.importorskip("transformers")


def run(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["templates", *map(str, args)])
    templates.main()
    return capsys.readouterr().out


def test_the_families_are_rendered_as_transformers_renders_them(tmp_path, monkeypatch, capsys):
    for name, source in FAMILIES.items():
        (tmp_path / f"{name}.jinja").write_text(source, encoding="utf-8")
    out = run(monkeypatch, capsys, tmp_path, "--markdown")
    for name in templates.CONVERSATIONS:
        beyond = 1  # "counted" appends to a list, which transformers' sandbox forbids
        assert f"{name}: {len(FAMILIES) - beyond} equal, {beyond} beyond, of {len(FAMILIES)}" in out


def test_what_differs_is_shown_with_the_reason(tmp_path, monkeypatch, capsys):
    (tmp_path / "chatml.jinja").write_text(CHATML, encoding="utf-8")
    out = run(monkeypatch, capsys, tmp_path, "--show", "chatml")
    assert "== call: different the calls are written as text, for the template drops a tool call" in out
    assert '+{"name":"get_weather","arguments":{"city":"Wien","days":2}}<|im_end|>' in out


def test_a_folder_without_templates_is_an_error(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="There are no templates"):
        run(monkeypatch, capsys, tmp_path)
