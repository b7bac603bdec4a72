"""What every question needs: the files that all programs share, where each keeps its own, and a way to give one a task."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.proof.environments import NotRun, interpreter, versions
from benchmarks.proof.programs import OURS, Program
from benchmarks.proof.running import Ran, run
from benchmarks.shared import ROOT, compiled_environment, default_model, furnished
from localrag.catalog import Catalog
from localrag.settings import Settings

N_CTX = 8192
MAX_TOKENS = 64
Row = dict[str, Any]
_PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Bench:
    """`folder` holds the environments of the programs and, in `work`, what they make; `collection` is in BEIR's layout, if any."""

    folder: Path
    num_runs: int
    collection: Path | None = None
    max_documents: int | None = None
    """Of the collection; None for all. A trial of the machinery takes few, and its numbers are not kept as results."""

    @property
    def is_trial(self) -> bool:
        return self.max_documents is not None

    @property
    def work(self) -> Path:
        """A trial's indexes are small ones and are kept apart."""
        return self.folder / ("trial" if self.is_trial else "full")

    @cached_property
    def home(self) -> Path:
        """A home of localrag that nothing else uses."""
        return furnished(self.work / "home").home

    @cached_property
    def model(self) -> Path:
        return default_model()

    @cached_property
    def embedder(self) -> Path:
        catalog = Catalog.load(Settings.from_env())
        return catalog.open(catalog.embedder())

    @cached_property
    def embedder_gguf(self) -> Path:
        """The embedder's weights as a GGUF file, for a program that takes no other kind."""
        from localrag.engine.convert import convert  # noqa: PLC0415  # heavy

        file = self.work / f"{OURS.name}-embedder.gguf"
        if not file.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            convert(self.embedder, file)
        return file

    def forget_prompts(self) -> None:
        """What localrag kept of evaluated prompts is gone: a run that is repeated next week must not find those of today."""
        shutil.rmtree(self.home / "prefixes", ignore_errors=True)

    def environment(self, program: Program) -> dict[str, str]:
        """Nothing reaches for the network, and all that a program writes lies below the folder. Modules are compiled and kept."""
        place = self.work / program.name
        place.mkdir(parents=True, exist_ok=True)
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HAYSTACK_TELEMETRY_ENABLED": "False"}
        own = {"XDG_DATA_HOME": str(place), "LLM_USER_PATH": str(place), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        environment = compiled_environment(**offline, **own)
        environment.pop("PYTHONPATH", None)
        if program is OURS:
            environment |= {"PYTHONPATH": str(ROOT), "LOCALRAG_HOME": str(self.home)}
        return environment

    @cached_property
    def _absent(self) -> dict[str, NotRun]:
        """What could not be installed is not tried again for the next question."""
        return {}

    def python(self, program: Program) -> Path:
        """The interpreter of a program. NotRun where it cannot be had."""
        if program.name in self._absent:
            raise self._absent[program.name]
        try:
            return interpreter(program, self.folder / "environments")
        except NotRun as why:
            self._absent[program.name] = why
            raise

    def versions(self, program: Program) -> dict[str, str]:
        return versions(program, self.python(program))

    def index(self, program: Program, documents: str) -> str:
        """Where a program keeps what it indexed: a folder; for localrag the name of a knowledge base."""
        return documents if program is OURS else str(self.work / program.name / documents)

    def localrag(self, *words: str, limit_s: float = 900.0) -> Ran:
        """The `localrag` command in a process of its own."""
        command = [sys.executable, "-m", "localrag", *words]
        return run(command, env=self.environment(OURS), cwd=ROOT, limit_s=limit_s)

    def run(self, program: Program, step: str, *, index: str, limit_s: float = 900.0, **task: Any) -> Row:  # noqa: ANN401  # see adapter.Task
        """What a program's adapter found, with `ran`: when its process wrote its first byte and ended, its memory, what it said.

        {"cannot": why} for a process that did not come to an end by itself; NotRun where the program is not there.
        """
        python = self.python(program)
        place = self.work / program.name
        place.mkdir(parents=True, exist_ok=True)
        answer, file = place / "answer.json", place / "task.json"
        with suppress(FileNotFoundError):
            answer.unlink()
        shared = {"model": str(self.model), "embedder": str(self.embedder), "embedder_gguf": str(self.embedder_gguf)}
        given = {"step": step, "answer": str(answer), "index": self.index(program, index), "n_ctx": N_CTX, "max_tokens": MAX_TOKENS}
        file.write_text(json.dumps(shared | given | task), encoding="utf-8")
        command = [str(python), str(_PEERS / f"with_{program.name}.py"), str(file)]
        ran = run(command, env=self.environment(program), cwd=ROOT if program is OURS else place, limit_s=limit_s)
        found: Row = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {"cannot": _ending(ran, limit_s)}
        return found | {"ran": ran}


def _ending(ran: Ran, limit_s: float) -> str:
    return f"not done after {limit_s:.0f} s" if ran.total_s >= limit_s else f"its process ended: {ran.complaint}"


def refusal(found: Row) -> Row | None:
    """What a row says of a program that did not do it; None if it did."""
    for name in ("cannot", "failed"):
        if name in found:
            return {"cannot": found[name]}
    return None


def attempt(bench: Bench, program: Program) -> Row | None:
    """A row that says why a program is not run; None if it is there."""
    try:
        bench.python(program)
    except NotRun as why:
        return {"not_run": str(why)}
    return None
