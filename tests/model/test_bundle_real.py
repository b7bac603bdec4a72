"""The real model, embedder and handbook carried to a home that has nothing, and asked there without a network."""

import json
import os
import subprocess
import sys

import pytest

from localrag.cli import main
from tests.isolation import without_network

pytestmark = pytest.mark.model


@pytest.fixture
def bundled(home_with_handbook, catalogue, tmp_path, monkeypatch, capsys):
    """A bundle without wheels, and what was said of it."""
    monkeypatch.setenv("LOCALRAG_MODELS", str(catalogue))
    assert main(["bundle", str(tmp_path / "out.zip"), "--no-wheelhouse", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_answers_with_a_citation_where_there_is_no_network(bundled, tmp_path):
    assert [each["kind"] for each in bundled["contents"]] == ["starter", "model", "embedder", "copy", "copy", "models_file", "kb"]
    assert bundled["notes"] == []
    environment = {name: value for name, value in os.environ.items() if name != "LOCALRAG_MODELS"}
    environment["LOCALRAG_HOME"] = str(tmp_path / "there")

    def run(*command):
        done = subprocess.run(
            [*without_network(), sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("-c", "import socket; print([name for _, name in socket.if_nameindex()])").strip() == "['lo']"
    done = json.loads(run("-m", "localrag", "unbundle", bundled["file"], "--json"))
    assert {each["state"] for each in done["contents"]} == {"added"}
    question = ("What dissolves PVA supports?", "--kb", "handbook", "--max-tokens", "48", "--seed", "1", "--json")
    answer = json.loads(run("-m", "localrag", "ask", *question))
    assert answer["usage"]["completion_tokens"] > 0
    assert [each for each in answer["citations"] if each["supplied"]]
    assert str(tmp_path / "there") in json.loads(run("-m", "localrag", "models", "list", "--json"))["models"][0]["path"]
    doctor = json.loads(run("-m", "localrag", "doctor", "--json"))
    assert doctor["catalogue"]["embedders"]["minilm"]["questions"].startswith("llama.cpp, from a copy")
