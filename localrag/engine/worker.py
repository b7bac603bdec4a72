"""The child process of child.py: llama.cpp is loaded, the job is done by a module's `work`, and what came of it is replied."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping

from localrag import process
from localrag.engine.llama_lib import begin_log, first_error, library
from localrag.errors import LocalragError

_PREFIX = re.compile(r"llama_model_(load: error loading model|quantize: failed to quantize): ")


def main() -> None:
    """Do the job of the command line. `work` raises a LocalragError for what llama.cpp refuses; what it logged says why."""
    work = importlib.import_module(f"localrag.engine.{sys.argv[1]}").work
    library()
    begin_log()
    send({"ready": True})
    problem = None
    try:
        work(json.loads(sys.argv[2]))
    except LocalragError as error:
        problem = _PREFIX.sub("", first_error(), count=1) or error.message
    except Exception as error:  # noqa: BLE001  # whatever a file leads to is an answer, not an end
        problem = f"{type(error).__name__}: {error}"
    send({"error": problem})


def send(reply: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def limit_self(*, spare_bytes: int, cpu_s: float, max_file_bytes: int = 0) -> None:
    """Lets this process grow by `spare_bytes`, compute for `cpu_s` more seconds, and write files of `max_file_bytes`."""
    process.limit_memory(spare_bytes)
    process.limit_files(max_file_bytes)
    process.limit_computing(cpu_s)
