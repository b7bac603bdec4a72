"""From a fresh home to the first answer: one key fetches the recommended model, from a hub on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localrag.catalog import Catalog
from localrag.settings import Settings, shipped_file
from tests.gguf_files import write_model
from tests.homes import know_attention, know_machine
from tests.hub import LocalHub
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(tmp_path, home):
    """A hub that has a tiny model under the name of each one that ships, and a home in which only the machine is known."""
    know_attention(home)
    know_machine(home)
    tiny = write_model(tmp_path / "tiny.gguf").read_bytes()
    specs = Catalog.load(Settings(home=home, models_file=shipped_file())).models.values()
    with LocalHub({spec.source: {spec.file: tiny} for spec in specs if spec.kind == "repo"}) as hub:
        yield hub


def press(terminal, key):
    """Press a key a moment after the question, as a person would: it is lost while the terminal is set up for it."""
    terminal.read(0.5)
    terminal.send(key)


def test_one_key_leads_from_chat_to_the_first_answer(hub, home, tmp_path):
    with Terminal("chat", "--max-tokens", "4", home=home, env=hub.environment(tmp_path / "hf"), columns=160) as terminal:
        terminal.wait_for("smollm2-135m is not on this machine", "Recommended here: ", "Press Enter to fetch it and make it your default")
        press(terminal, "\r")
        terminal.wait_for("is now the default model")
        terminal.enter("Hello?")
        terminal.wait_for("Stopped at the limit of 4 tokens", " evaluated")
        terminal.send("\x04")
        assert terminal.end() == 0
    chosen = (home / "models.toml").read_text()
    assert chosen.startswith("default_model = ")
    name = chosen.split('"')[1]
    assert name in terminal.text

    # From now on it is the default, without another question.
    with Terminal("ask", "Why?", "--max-tokens", "4", home=home, env=hub.environment(tmp_path / "hf")) as terminal:
        assert terminal.end() == 0
    assert "Press Enter" not in terminal.text


def test_any_other_key_fetches_nothing(hub, home, tmp_path):
    with Terminal("ask", "Why?", home=home, env=hub.environment(tmp_path / "hf"), columns=160) as terminal:
        terminal.wait_for("or any other key to stop.")
        press(terminal, "n")
        assert terminal.end() == 4
    assert "localrag models pull " in terminal.text
    assert not (home / "models.toml").exists()
    assert hub.requests == []


def test_a_model_that_was_named_is_offered_itself_and_does_not_become_the_default(hub, home, tmp_path):
    environment = hub.environment(tmp_path / "hf")
    with Terminal("ask", "Why?", "--model", "qwen3-4b", "--max-tokens", "4", home=home, env=environment, columns=160) as terminal:
        terminal.wait_for("qwen3-4b is not on this machine. To fetch: qwen3-4b.", "Press Enter to fetch it, or")
        press(terminal, "\r")
        assert terminal.end() == 0
    assert not (home / "models.toml").exists()


def test_models_pull_without_a_name_offers_it_too(hub, home, tmp_path):
    with Terminal("models", "pull", home=home, env=hub.environment(tmp_path / "hf"), columns=160) as terminal:
        terminal.wait_for("Recommended here: ", "Press Enter to fetch it and make it your default")
        press(terminal, "q")
        assert terminal.end() == 4
    assert hub.requests == []


@pytest.mark.parametrize("args", [("ask", "Why?"), ("ask", "Why?", "--json"), ("chat",)])
def test_a_script_gets_the_command_and_exit_code_4(hub, home, args):
    environment = {**os.environ, "LOCALRAG_HOME": str(home), **hub.environment(home / "hf")}
    command = [sys.executable, "-m", "localrag", *args]
    done = subprocess.run(command, cwd=ROOT, env=environment, input="", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    said = done.stdout + done.stderr
    assert "smollm2-135m is not on this machine." in said
    assert "localrag models pull " in said
    assert "license" in said  # of the recommended one
    assert hub.requests == []
