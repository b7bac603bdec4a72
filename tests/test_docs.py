"""What is written is checked: the README's commands run, and what it shows of the house is there."""

import json
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


RUN_ALL = """
import json, os, sys
from localrag.cli import main
for words, piped in json.load(sys.stdin):
    end = os.open(piped or os.devnull, os.O_RDONLY)  # what a shell would make standard input
    os.dup2(end, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    print("$", *words, file=sys.stderr, flush=True)
    if code := main(words):
        sys.exit(code)
"""


@pytest.mark.model
def test_every_command_and_program_of_the_readme_runs(model_path, embedder_path, home_after_indexing, tmp_path):
    """In their order, in one fresh home and one process (torch takes long to load); the models are those that this machine has."""
    models = tmp_path / "models.toml"
    models.write_text(
        f'default_model = "smollm2-135m"\ndefault_embedder = "minilm"\n'
        f'[models.smollm2-135m]\npath = "{model_path}"\n[embedders.minilm]\npath = "{embedder_path}"\n'
    )
    assert len(COMMANDS) >= 8
    environment = {**os.environ, "LOCALRAG_MODELS": str(models)}
    lines: list[tuple[list[str], str | None]] = []
    for command in COMMANDS:
        words = shlex.split(command)
        if words == ["scripts/demo"]:  # what it does once everything is set up
            lines.append((["index", "examples/handbook", "--kb", "handbook"], None))
        elif words[0] == "cat":
            assert words[2:4] == ["|", "localrag"]
            lines.append((words[4:], words[1]))
        elif words != ["scripts/test"]:
            assert words[0] == "localrag", command
            lines.append((words[1:], None))
    for program, given in ((RUN_ALL, json.dumps(lines)), *((program, "") for program in PYTHON)):
        run = [sys.executable, "-c", program]
        done = subprocess.run(run, cwd=ROOT, input=given, capture_output=True, text=True, timeout=280, check=False, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
