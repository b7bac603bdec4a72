"""The same model in other weight types: made, measured beside the original on this machine, and judged.

One file is in memory at a time. Speeds are medians of runs in turn, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from localrag.engine import attention, devices, gguf, memory, quality, threads, trial
from localrag.engine.llama_lib import library
from localrag.engine.quality import Evaluation, Quality, Run, Window
from localrag.engine.quantize import default_types, expected_bytes, quantize, require_disk
from localrag.errors import EngineError, ModelError
from localrag.model import ModelInfo

DEFAULT_MAX_KL = 0.05
"""In nats. About what good 4-bit weights cost a model against its 16-bit ones; types of 8 bits stay below a fifth of it."""
DEFAULT_MIN_SPEEDUP = 1.1
"""Timings on a machine that is used spread by some 10 %: less is not told from none."""
ROUNDS = 3

Progress = Callable[[str, int, int | None], None]
"""What is being done, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a new file must keep: a mean KL divergence from the original of at most `max_kl` nats, and `min_speedup` times its speed."""

    max_kl: float = DEFAULT_MAX_KL
    min_speedup: float = DEFAULT_MIN_SPEEDUP


@dataclass(slots=True, kw_only=True)
class Measured:
    """A file of weights of `file_type`, and what was measured of it: `quality` against the original, and the `runs`."""

    file_type: str
    path: Path
    size_bytes: int
    quality: Quality
    runs: list[Run] = field(default_factory=list)

    @property
    def prompt_tokens_per_s(self) -> float:
        return statistics.median(run.prompt_tokens / run.prompt_s for run in self.runs)

    @property
    def decode_tokens_per_s(self) -> float:
        return statistics.median(run.answer_tokens / run.answer_s for run in self.runs)

    @property
    def ask_s(self) -> float:
        """Seconds for a question with its sources and an answer, as attention.py mixes them: what speeds are compared by."""
        return attention.PROMPT_TOKENS / self.prompt_tokens_per_s + attention.ANSWER_TOKENS / self.decode_tokens_per_s

    def to_dict(self) -> dict[str, object]:
        return {
            "type": self.file_type,
            "size_bytes": self.size_bytes,
            "prompt_tokens_per_s": round(self.prompt_tokens_per_s, 1),
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 1),
            "ask_s": round(self.ask_s, 3),
            "quality": self.quality.to_dict(),
            "runs": [[round(run.prompt_s, 4), round(run.answer_s, 4)] for run in self.runs],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A type that was tried: `speedup` and what was `measured`, unless it could not be made; `problem` is why it is not to be kept."""

    file_type: str
    measured: Measured | None
    speedup: float | None
    problem: str | None

    def to_dict(self) -> dict[str, object]:
        measured = {"type": self.file_type} if self.measured is None else self.measured.to_dict()
        return {**measured, "speedup": None if self.speedup is None else round(self.speedup, 3), "problem": self.problem}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The original and the candidates, in the order in which they were asked for."""

    original: Measured
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest of those within the limits."""
        return max((each for each in self.candidates if each.problem is None), key=lambda each: each.speedup or 0.0, default=None)


class Bench:
    """Measures the original and files made of it in `stage`, a folder of its own. `home` is where trials and kernels are remembered."""

    def __init__(self, source: Path, *, stage: Path, home: Path, progress: Progress, text: str | None = None) -> None:
        self._stage, self._home, self._progress = stage, home, progress
        self._text = quality.shipped_text() if text is None else text
        self._governor = threads.ThreadGovernor()
        self._windows: list[Window] = []
        self._num_weights = 0
        self.info = gguf.read_header(source)
        if self.info.is_vocab_only:
            raise ModelError(f"{source.name} holds a vocabulary and no weights.", hint="Name a whole model.")
        self._flash_attention = attention.flash_attention(home, self._governor)

    def compare(self, types: Sequence[str], limits: Limits) -> Comparison:
        """Make and measure each of `types`; by default those that suit this processor. What fails is a candidate with a problem.

        The original must have been validated and tried. EngineError if it does not fit into memory, or its numbers are none.
        """
        with tempfile.TemporaryFile(dir=self._stage) as reference:
            original = self._judge(self.info, reference, is_reference=True)
            types = types or default_types(self.info, library().llama_print_system_info().decode("utf-8", "replace"))
            made = {name: self._made(name, reference) for name in dict.fromkeys(types)}
        files = [original, *(each for each in made.values() if isinstance(each, Measured))]
        for turn in range(ROUNDS):
            self._governor.measure()  # as the engine does; but the same for all files of a turn
            for index, each in enumerate(files):
                self._progress("measuring speed", turn * len(files) + index, ROUNDS * len(files))
                with self._open(gguf.read_header(each.path)) as evaluation:
                    ids = self._windows[0].ids
                    evaluation.warm_up(ids)
                    each.runs.append(evaluation.time(ids))
        return Comparison(original=original, candidates=tuple(verdict(original, name, each, limits) for name, each in made.items()))

    def _made(self, file_type: str, reference: IO[bytes]) -> Measured | str:
        """The file of that type, compared with the original; or why there is none."""
        target = self._stage / f"{self.info.path.stem}-{file_type}.gguf"
        try:
            expected = expected_bytes(self.info, self._num_weights, file_type)
            require_disk(self._stage, expected)
            quantize(
                self.info.path,
                target,
                file_type,
                expected=expected,
                num_threads=self._governor.num_threads,
                on_step=lambda done, of: self._progress(f"making {file_type}", done, of),
            )
            info = gguf.read_header(target)
            trial.ensure_safe(target, home=self._home)
            return self._judge(info, reference)
        except (EngineError, ModelError) as error:
            target.unlink(missing_ok=True)
            return error.message

    def _judge(self, info: ModelInfo, reference: IO[bytes], *, is_reference: bool = False) -> Measured:
        file_type = info.quantization or "unknown type"
        self._progress(f"reading with {file_type}", 0, None)
        self._governor.measure()
        with self._open(info) as evaluation:
            if is_reference:
                self._num_weights = evaluation.num_weights
                self._windows = evaluation.windows(self._text)
                require_disk(self._stage, 4 * evaluation.vocab_size * sum(window.num_scored for window in self._windows))
            found = quality.score(evaluation, self._windows, reference, is_reference=is_reference)
        return Measured(file_type=file_type, path=info.path, size_bytes=info.file_size, quality=found)

    def _open(self, info: ModelInfo) -> Evaluation:
        num_cells = min(quality.WINDOW_TOKENS, info.n_ctx_train)
        gpu_layers = info.num_layers + 1 if devices.gpu_devices() else 0
        planned = memory.plan(info, num_cells, quality.OUTPUT_TOKENS, flash_attention=self._flash_attention, gpu_layers=gpu_layers)
        memory.require(planned, info)
        return Evaluation(info.path, num_cells=num_cells, num_threads=self._governor.num_threads, flash_attention=self._flash_attention)


def verdict(original: Measured, file_type: str, made: Measured | str, limits: Limits) -> Candidate:
    """Whether a file is worth keeping, by the limits."""
    if isinstance(made, str):
        return Candidate(file_type=file_type, measured=None, speedup=None, problem=made)
    speedup = original.ask_s / made.ask_s
    problems = []
    if made.quality.mean_kl > limits.max_kl:
        problems.append(f"too far from the original: KL {made.quality.mean_kl:.3f}, at most {limits.max_kl:g}")
    if speedup < limits.min_speedup:
        problems.append(f"not faster by enough: {speedup:.2f} times, at least {limits.min_speedup:g}")
    return Candidate(file_type=file_type, measured=made, speedup=speedup, problem="; ".join(problems) or None)


@dataclass(frozen=True, slots=True)
class Kept:
    """A file that was put in place, with the sha256 of its bytes."""

    path: Path
    sha256: str

    def to_dict(self) -> dict[str, object]:
        return {"path": str(self.path), "sha256": self.sha256}


def keep(made: Measured, folder: Path, *, source: Path, source_sha256: str) -> Kept:
    """Move a file out of the workshop into `folder`, whole or not at all; its name says what it was made of."""
    target = folder / f"{source.stem}-{source_sha256[:8]}-{made.file_type}.gguf"
    digest = sha256_of(made.path)
    made.path.replace(target)
    if os.name == "posix":  # the new name itself is on the disk
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return Kept(target, digest)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
