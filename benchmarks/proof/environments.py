"""A virtual environment for each program, made once from its pinned requirements, below build/proof/environments.

llama.cpp is compiled with the flags of scripts/setup, so that all who use llama-cpp-python have the same library; what pip keeps makes
that quick. What cannot be installed is "not run", with pip's last words, and the rest goes on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.proof.programs import Program
from benchmarks.shared import ROOT

_LIMIT_S = 3600
_OURS = ("localrag", "llama-cpp-python", "faiss-cpu", "sentence-transformers", "torch")
_FLAGS = '. scripts/llama-flags.sh; exec "$@"'
"""For bash: the environment in which llama.cpp is compiled, then the command."""


class NotRun(Exception):  # noqa: N818  # a line of the table
    """The program is not there; the text says why."""


def interpreter(program: Program, folder: Path) -> Path:
    """The Python of a program, its environment made if it is missing or made from other requirements. NotRun if that fails."""
    if not program.requirements:
        return Path(sys.executable)
    place = folder / program.name
    stamp, python = place / "installed-from.txt", place / "bin" / "python"
    wanted = "\n".join((sys.version, *program.requirements))
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"Installing {program.label} in {place}", file=sys.stderr, flush=True)
    _call([sys.executable, "-m", "venv", "--clear", str(place)])
    _call(["bash", "-c", _FLAGS, "_", str(python), "-m", "pip", "install", "-q", *program.requirements])
    stamp.write_text(wanted, encoding="utf-8")
    return python


def versions(program: Program, python: Path) -> dict[str, str]:
    """What is installed of the packages that the program's requirements name; without any, of localrag and what it stands on."""
    if not program.requirements:
        return {name: importlib.metadata.version(name) for name in _OURS}
    listed = subprocess.run([str(python), "-m", "pip", "list", "--format=json"], capture_output=True, text=True, timeout=120, check=True)
    installed = {each["name"].lower().replace("_", "-"): each["version"] for each in json.loads(listed.stdout)}
    names = [each.replace("<", "=").partition("=")[0] for each in program.requirements]
    return {name: installed[name] for name in names if name in installed}


def _call(command: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotRun(str(error)) from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise NotRun((errors or lines or ["pip failed"])[-1].removeprefix("ERROR: "))
