"""What is written is checked: the README's commands run, and what it shows of the house is there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from localrag.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line[2:] for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line.startswith("$ ")
]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_help_is_the_one_that_is_shown(capsys):
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.strip() in README


def test_every_file_of_the_tree_is_there():
    tree = re.search(r"```text\n(localrag/\n.*?)```", README, re.DOTALL)
    assert tree is not None
    folders: list[str] = []
    for line in tree[1].splitlines():
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        folders = [*folders[: depth // 2], name]
        assert (ROOT / "".join(folders)).exists(), "".join(folders)


def test_every_script_that_is_named_is_there():
    named = set(re.findall(r"\bscripts/\w+", README))
    assert {"scripts/demo", "scripts/test", "scripts/bench"} <= named
    assert all((ROOT / name).is_file() for name in named)


@pytest.mark.model
def test_every_command_and_program_of_the_readme_runs(model_path, embedder_path, home, tmp_path):
    """In their order, in one fresh home; the models are those that this machine has."""
    models = tmp_path / "models.toml"
    models.write_text(
        f'default_model = "smollm2-135m"\ndefault_embedder = "minilm"\n'
        f'[models.smollm2-135m]\npath = "{model_path}"\n[embedders.minilm]\npath = "{embedder_path}"\n'
    )
    assert len(COMMANDS) >= 8
    environment = {**os.environ, "LOCALRAG_MODELS": str(models)}

    def run(*words, piped=b""):
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, input=piped, capture_output=True, timeout=200, check=False, env=environment
        )
        assert done.returncode == 0, (words, done.stderr.decode())

    for command in COMMANDS:
        words = shlex.split(command)
        if words == ["scripts/demo"]:  # what it does once everything is set up
            run("-m", "localrag", "index", "examples/handbook", "--kb", "handbook")
        elif words[0] == "cat":
            assert words[2] == "|"
            run("-m", *words[3:], piped=(ROOT / words[1]).read_bytes())
        elif words != ["scripts/test"]:
            assert words[0] == "localrag", command
            run("-m", *words)
    for program in PYTHON:
        run("-c", program)
