"""Count the files that run a function while one question is answered, which are the files that a newcomer must open to follow it.

`localrag ask QUESTION --kb handbook --model echo` runs in a separate process. Code that runs only at import (module level, decorators,
class bodies) does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.shared import ROOT, fresh_home, report_table
from localrag.cli import main as run_command

PACKAGE = f"{ROOT / 'localrag'}/"
QUESTION = "What dissolves PVA supports?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().trace:
        print(json.dumps(calls_by_file(["ask", QUESTION, "--kb", "handbook", "--model", "echo"])))
        return
    with fresh_home() as settings:
        environment = {"PATH": "/usr/bin:/bin", "LOCALRAG_HOME": str(settings.home), "PYTHONPATH": str(ROOT)}
        index = [sys.executable, "-m", "localrag", "index", str(ROOT / "examples" / "handbook"), "--kb", "handbook"]
        subprocess.run(index, env=environment, check=True, capture_output=True)
        traced = subprocess.run([sys.executable, "-m", "benchmarks.files", "--trace"], env=environment, check=True, capture_output=True)
    calls: dict[str, int] = json.loads(traced.stdout)
    lines = {path: sum(1 for _ in (ROOT / path).open(encoding="utf-8")) for path in calls}
    rows: list[dict[str, object]] = [{"file": path, "lines": lines[path], "calls": calls[path]} for path in sorted(calls)]
    modules = list((ROOT / "localrag").rglob("*.py"))
    total = sum(1 for path in modules for _ in path.open(encoding="utf-8"))
    report_table("files", rows, files=len(calls), lines_in_them=sum(lines.values()), modules=len(modules), lines=total)


def calls_by_file(arguments: list[str]) -> Counter[str]:
    """Calls of functions in each file of localrag during one run of the command line."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _arg: Any) -> None:  # noqa: ANN401  # sys.setprofile's signature
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE) and not _is_import(frame):
            calls[str(Path(path).relative_to(ROOT))] += 1

    sys.setprofile(profile)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            run_command(arguments)
    finally:
        sys.setprofile(None)
    return calls


def _is_import(frame: FrameType | None) -> bool:
    """Whether a frame runs because a module of localrag is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    main()
