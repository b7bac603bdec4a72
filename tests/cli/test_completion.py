"""What a shell completes, and that a press of a key waits for nothing heavy."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from localrag.cli import COMMANDS, cli, completion, main, options
from tests.cli.test_cli import HEAVY

CATALOGUE = tomllib.loads((Path(__file__).parents[2] / "models.toml").read_text())
SHIPPED, EMBEDDERS = list(CATALOGUE["models"]), list(CATALOGUE["embedders"])
MODELS = '[models.alpha]\npath = "a"\n[models.beta]\npath = "b"\n[embedders.vec]\npath = "v"\n[budgets.long]\n[councils.wise]\n'


@pytest.fixture
def complete(tmp_path, monkeypatch):
    """The completions of a line, from a home with two knowledge bases and a models.toml; the line ends where the cursor is."""
    (tmp_path / "models.toml").write_text(MODELS)
    (tmp_path / "other.toml").write_text('[models.gamma]\npath = "g"\n')
    for name in ("notes", "handbook"):
        (tmp_path / "kb" / name).mkdir(parents=True)
        (tmp_path / "kb" / name / "kb.sqlite").touch()

    def run(line, *, watch=""):
        words = line.split(" ")
        environment = {
            **os.environ,
            "LOCALRAG_HOME": str(tmp_path),
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            "_LOCALRAG_COMPLETE": "bash_complete",
        }
        code = f"import sys\nfrom localrag.cli import main\ntry: main([])\nfinally: print({watch or 'None'}, file=sys.stderr)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert "Traceback" not in done.stderr
        if watch:
            assert done.stderr.strip() == "[]"
        return [text.removeprefix("plain,") for text in done.stdout.split()]

    return run


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("localrag ask --kb ", ["handbook", "notes"]),
        ("localrag ask why --kb n", ["notes"]),
        ("localrag ask --model ", ["alpha", "beta", *SHIPPED, "echo"]),
        ("localrag ask --models other.toml --model ", ["gamma", "alpha", "beta", *SHIPPED, "echo"]),
        ("localrag bundle x.zip --embedder ", ["vec", *EMBEDDERS]),
        ("localrag budget --budget l", ["long"]),
        ("localrag council --council ", ["wise", "default", "athene-judge"]),
        ("localrag kb show ", ["handbook", "notes"]),
        ("localrag models pull ", ["alpha", "beta", *SHIPPED, "vec", *EMBEDDERS]),
        ("localrag models optimize b", ["beta"]),
        ("localrag comp", ["completion"]),
        ("localrag ", list(COMMANDS)),
        ("localrag report --council ", []),
        ("localrag ask -k n", ["notes"]),
        ("localrag ask -m al", ["alpha"]),
        ("localrag config set max", ["max-tokens"]),
    ],
)
def test_names_are_completed(complete, line, found):
    light = f"sorted(set({HEAVY!r}) & set(sys.modules))" if not line.startswith("localrag report") else ""
    assert complete(line, watch=light) == found


def test_options_of_a_command_are_completed(complete):
    assert complete("localrag ask --max-t") == ["--max-tokens"]
    assert complete("localrag kb ver") == ["verify"]


def test_a_text_to_come_from_standard_input_is_not_waited_for():
    assert options.Text().convert("-", None, click.Context(cli, resilient_parsing=True)) == "-"


def test_what_cannot_be_read_leaves_the_names_of_the_other_files(complete, tmp_path):
    (tmp_path / "models.toml").write_text("[models\n")
    assert complete("localrag ask --model ") == [*SHIPPED, "echo"]
    (tmp_path / "models.toml").write_text("models = 3\n")
    assert complete("localrag ask --model ") == [*SHIPPED, "echo"]
    (tmp_path / "kb").rename(tmp_path / "gone")
    assert complete("localrag ask --kb ") == []


def commands():
    """(path, command) of every command, with those of groups."""
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        yield (name,), command
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                yield (name, inner), command.get_command(context, inner)


def test_every_completed_parameter_exists():
    paths = dict(commands())
    assert completion._ARGUMENTS.keys() <= paths.keys()
    for path in completion._ARGUMENTS:
        assert any(isinstance(param, click.Argument) for param in paths[path].params), path
    options = {option for command in paths.values() for param in command.params for option in param.opts}
    assert completion._OPTIONS.keys() <= options


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_that_its_shell_reads(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_LOCALRAG_COMPLETE={shell}_complete" in script
    if (program := shutil.which(shell)) is None:
        return
    (tmp_path / "script").write_text(script)
    done = subprocess.run([program, "-n", tmp_path / "script"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_with_it(capsys, tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    main(["completion", "bash"])
    (tmp_path / "localrag").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m localrag "$@"\n')
    (tmp_path / "localrag").chmod(0o755)
    (tmp_path / "kb" / "notes").mkdir(parents=True)
    (tmp_path / "kb" / "notes" / "kb.sqlite").touch()
    ask = "COMP_WORDS=(localrag ask --kb n); COMP_CWORD=3; _localrag_completion localrag; echo ${COMPREPLY[@]}"
    done = subprocess.run(
        [bash, "-c", capsys.readouterr().out + ask],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "LOCALRAG_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("notes\n", 0), done.stderr


@pytest.mark.parametrize("args", [["completion"], ["completion", "csh"]])
def test_another_shell_is_refused(args, capsys):
    assert main(args) == 2
    assert capsys.readouterr().err.startswith("Error: ")
