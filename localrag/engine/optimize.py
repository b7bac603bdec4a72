"""Quantize a model file to other weight types with llama.cpp, and measure whether the result is worth keeping.

llama.cpp aborts on unexpected input and on a full disk. It runs in a child process, so that an abort becomes an error. The source file is
only read. Requantizing quantized weights gives worse results than quantizing the original ones; quality.py measures the loss.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from localrag.engine import attention, gguf, memory, quality, sandbox, threads
from localrag.engine.gguf import FILE_TYPES
from localrag.engine.llama_lib import library
from localrag.engine.quality import Evaluation, Quality, Run, Window
from localrag.errors import ConfigError, EngineError, ModelError, UsageError
from localrag.files import file_error, locked, make_private_folder, sync_folder
from localrag.types import ModelInfo

BITS_PER_WEIGHT = {
    "Q3_K_M": 3.9,
    "Q4_K_S": 4.6,
    "Q4_K_M": 4.9,
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "IQ4_NL": 4.5,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q5_K_S": 5.5,
    "Q5_K_M": 5.7,
    "Q6_K": 6.6,
    "Q8_0": 8.5,
    "F16": 16.0,
    "BF16": 16.0,
}
"""Approximate bits per weight of the supported types, which are those that need no importance matrix."""
OUTPUT_BITS = 8.5  # llama.cpp stores the first and the last matrix in 6 or 8 bits, even if the others have fewer
SPARE_DISK_BYTES = 256 << 20

_FILE_TYPE_NUMBERS = {name: number for number, name in FILE_TYPES.items()}
_BUFFER_BYTES = 256 << 20
_SPARE_BYTES = 1200 << 20  # buffers, stacks of threads, the header
_CPU_LIMIT_S, _CPU_BYTES_PER_S = 120.0, 2e5  # IQ4_NL, the slowest, took a second for 2 MB
_START_LIMIT_S = 60.0
_STAGE_PREFIX = ".making-"

Step = Callable[[int, int], None]
"""Called with the number of tensors written so far and the total."""


def default_types(info: ModelInfo, system_info: str) -> tuple[str, ...]:
    """Return the types worth trying on this processor, without the file's own. `system_info` comes from `llama_print_system_info`.

    llama.cpp repacks Q4_0 and IQ4_NL for the processor's vector units. IQ4_NL is skipped for weights of fewer than 8 bits: it is slow to
    make and loses as much as Q4_0. Q8_0 loses almost nothing. BF16 is tried only for such weights, on processors that multiply it natively.
    """
    many_bits = BITS_PER_WEIGHT.get(info.quantization or "", 32.0 if info.quantization == "F32" else 0.0) >= 8
    types = ["Q4_0", *(["IQ4_NL"] if many_bits else []), "Q8_0"]
    if not many_bits and any(f"{name} = 1" in system_info for name in ("AVX512_BF16", "AMX_INT8", "BF16_VECTOR_ARITHMETIC")):
        types.append("BF16")
    return tuple(name for name in types if name != info.quantization)


_TRAINED_TYPES = ("MXFP4", "NVFP4")
_TRAINED_NAME = re.compile(r"(?<![a-z])qa[td](?![a-z])", re.IGNORECASE)


def trained_for(info: ModelInfo) -> str | None:
    """Return why a model seems to have been trained for the quantization of its file (QAT), which another one would waste; else None.

    Headers have no key for that. Such files say so in their names, or have types that nobody quantizes to afterwards.
    """
    if info.architecture == "gpt-oss" or info.quantization in _TRAINED_TYPES:
        return f"its experts are {info.quantization if info.quantization in _TRAINED_TYPES else 'MXFP4'}, as it was trained"
    named = next((text for text in (info.name or "", info.path.name) if _TRAINED_NAME.search(text)), None)
    return None if named is None else f"its name says so: {named}"


def check_type(name: str) -> str:
    """Return the canonical name of a type, ignoring case. UsageError for an unsupported type."""
    if (file_type := name.upper()) not in BITS_PER_WEIGHT:
        raise UsageError(f"{name!r} is not a supported type.", hint=f"Choose one of: {', '.join(BITS_PER_WEIGHT)}.", type=name)
    return file_type


def expected_bytes(info: ModelInfo, num_weights: int, file_type: str) -> int:
    """Estimate the size of the new file in bytes, erring on the high side."""
    bits = BITS_PER_WEIGHT[file_type]
    outer = min(num_weights, 2 * info.vocab_size * info.embedding_length)
    return int(((num_weights - outer) * bits * 1.1 + outer * max(bits, OUTPUT_BITS)) / 8) + (32 << 20)


@contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """Create a temporary folder in `folder`, and remove it afterwards. Leftovers of killed runs are removed too.

    UsageError if another run has one, since two concurrent runs would distort each other's timings. ConfigError if `folder` cannot be
    written.
    """
    stack = ExitStack()
    try:
        make_private_folder(folder)
        stack.enter_context(locked(folder / ".making.lock"))
    except TimeoutError:
        hint = "Wait for it to end: concurrent runs slow each other down."
        raise UsageError("Another `models optimize` is running in this home.", hint=hint) from None
    except OSError as error:
        cause = file_error(error, folder, hint="Set LOCALRAG_HOME to a folder that can be written.")
        raise ConfigError(f"{folder} cannot be written: {cause.reason}.", hint=cause.hint, path=str(folder), **cause.numbers) from None
    with stack:
        for stale in folder.glob(f"{_STAGE_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE_PREFIX, dir=folder))
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def require_disk(folder: Path, needed_bytes: int) -> None:
    """Raise EngineError unless the disk of `folder` has room for `needed_bytes` and SPARE_DISK_BYTES."""
    free = shutil.disk_usage(folder).free
    if needed_bytes + SPARE_DISK_BYTES > free:
        raise EngineError(
            f"{(needed_bytes + SPARE_DISK_BYTES) >> 20} MiB are needed on the disk of {folder}, but only {free >> 20} MiB are free.",
            hint="Free some space, or move the home with LOCALRAG_HOME.",
            needed_bytes=needed_bytes + SPARE_DISK_BYTES,
            free_bytes=free,
        )


def quantize(source: Path, target: Path, file_type: str, *, expected: int, num_threads: int, on_step: Step | None = None) -> None:
    """Write `source` to `target` with weights of `file_type`. Validate and try the source first (gguf.py, sandbox.py).

    `target` must not exist; it is removed on failure. The target may grow to four times `expected` bytes. EngineError if llama.cpp refuses
    the source, crashes, or exceeds its time limit. Ctrl-C ends the child.
    """
    file_bytes = source.stat().st_size
    cpu_s = _CPU_LIMIT_S + file_bytes / _CPU_BYTES_PER_S
    job = {
        "source": str(source.absolute()),
        "target": str(target.absolute()),
        "file_type": _FILE_TYPE_NUMBERS[file_type],
        "num_threads": num_threads,
        "buffer_bytes": _BUFFER_BYTES,
        "spare_bytes": _SPARE_BYTES + 2 * file_bytes,
        "most_bytes": 4 * expected,
        "cpu_s": cpu_s,
    }
    try:
        _run(job, file_type, limit_s=_START_LIMIT_S + 2 * cpu_s, on_step=on_step)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _run(job: dict[str, object], file_type: str, *, limit_s: float, on_step: Step | None) -> None:
    def pass_on(reply: dict[str, object]) -> None:
        match reply:
            case {"done": int(done), "of": int(of)} if on_step is not None:
                on_step(done, of)

    ended = sandbox.run("quantize_worker", job, limit_s, on_reply=pass_on)
    if ended.succeeded:
        return
    if ended.expired:
        problem = f"it did not finish within {limit_s:.0f} s"
    else:
        died = f"the process ended with {ended.killed_by or f'code {ended.code}'}{': ' + ended.words if ended.words else ''}"
        problem = ended.problem or died
    raise EngineError(
        f"llama.cpp could not convert the model to {file_type}: {problem}.",
        hint="Try another type with --type.",
        type=file_type,
        exit_code=ended.code,
    )


DEFAULT_MAX_KL = 0.05
"""Nats. About the loss of good 4-bit weights compared with 16-bit weights. 8-bit types stay below a fifth of this."""
DEFAULT_MIN_SPEEDUP = 1.1
"""Timings vary by about 10 % on a machine in use, so a smaller speedup is noise."""
ROUNDS = 3

Progress = Callable[[str, int, int | None], None]
"""Called with the current step, the units done, and the total if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Requirements for a new file: a mean KL divergence from the original of at most `max_kl` nats, and a speedup of `min_speedup`."""

    max_kl: float = DEFAULT_MAX_KL
    min_speedup: float = DEFAULT_MIN_SPEEDUP


@dataclass(slots=True, kw_only=True)
class Measured:
    """Measurements of a file with weights of `file_type`: `quality` relative to the original, and timed `runs`."""

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
        """Seconds for a typical prompt and answer (attention.py has their sizes). Speedups compare this number."""
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
    """The result for one type. `measured` and `speedup` are None if no file could be made. `problem` is the reason not to keep it."""

    file_type: str
    measured: Measured | None
    speedup: float | None
    problem: str | None

    def to_dict(self) -> dict[str, object]:
        measured = {"type": self.file_type} if self.measured is None else self.measured.to_dict()
        return {**measured, "speedup": None if self.speedup is None else round(self.speedup, 3), "problem": self.problem}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The original and the candidates, in the order of the requested types."""

    original: Measured
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate within the limits; None if there is none."""
        return max((each for each in self.candidates if each.problem is None), key=lambda each: each.speedup or 0.0, default=None)


class Bench:
    """Compares a model file with requantized copies, which it writes to the empty folder `stage`.

    `home` stores which files passed a trial load and which attention kernel is faster. `text` defaults to the text shipped with localrag.
    """

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
        """Make and measure a file of each type, by default those that suit this processor. A failure becomes a candidate with a problem.

        Validate and try the original first. EngineError if the original does not fit into memory or produces NaN.
        """
        with tempfile.TemporaryFile(dir=self._stage) as reference:
            original = self._judge(self.info, reference, is_reference=True)
            types = types or default_types(self.info, library().llama_print_system_info().decode("utf-8", "replace"))
            results = {name: self._make(name, reference) for name in dict.fromkeys(types)}
        files = [original, *(each for each in results.values() if isinstance(each, Measured))]
        for turn in range(ROUNDS):
            self._governor.measure()  # as the engine does, but once per round, so that all files use the same number of threads
            for index, each in enumerate(files):
                self._progress("measuring speed", turn * len(files) + index, ROUNDS * len(files))
                with self._open(gguf.read_header(each.path)) as evaluation:
                    ids = self._windows[0].ids
                    evaluation.warm_up(ids)
                    each.runs.append(evaluation.time(ids))
        return Comparison(original=original, candidates=tuple(verdict(original, name, each, limits) for name, each in results.items()))

    def _make(self, file_type: str, reference: IO[bytes]) -> Measured | str:
        """Make a file of a type and compare it with the original. Return the reason as text if that fails."""
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
            sandbox.ensure_safe(target, home=self._home)
            return self._judge(info, reference)
        except (EngineError, ModelError) as error:
            target.unlink(missing_ok=True)
            return error.message

    def _judge(self, info: ModelInfo, reference: IO[bytes], *, is_reference: bool = False) -> Measured:
        file_type = info.quantization or "unknown type"
        self._progress(f"comparing {file_type}", 0, None)
        self._governor.measure()
        with self._open(info) as evaluation:
            if is_reference:
                self._num_weights = evaluation.num_weights
                self._windows = evaluation.windows(self._text)
                require_disk(self._stage, 4 * evaluation.vocab_size * sum(window.num_scored for window in self._windows))
            score = quality.score(evaluation, self._windows, reference, is_reference=is_reference)
        return Measured(file_type=file_type, path=info.path, size_bytes=info.file_size, quality=score)

    def _open(self, info: ModelInfo) -> Evaluation:
        num_cells = min(quality.WINDOW_TOKENS, info.n_ctx_train)
        gpu_layers = info.num_layers + 1 if memory.gpu_devices() else 0
        planned = memory.plan(info, num_cells, quality.OUTPUT_TOKENS, flash_attention=self._flash_attention, gpu_layers=gpu_layers)
        memory.require(planned, info)
        return Evaluation(info.path, num_cells=num_cells, num_threads=self._governor.num_threads, flash_attention=self._flash_attention)


def verdict(original: Measured, file_type: str, result: Measured | str, limits: Limits) -> Candidate:
    """Apply the limits to a file, or to the reason why there is none."""
    if isinstance(result, str):
        return Candidate(file_type=file_type, measured=None, speedup=None, problem=result)
    speedup = original.ask_s / result.ask_s
    problems = []
    if result.quality.mean_kl > limits.max_kl:
        problems.append(f"too far from the original: KL {result.quality.mean_kl:.3f}, at most {limits.max_kl:g}")
    if speedup < limits.min_speedup:
        problems.append(f"not fast enough: speedup {speedup:.2f}, at least {limits.min_speedup:g}")
    return Candidate(file_type=file_type, measured=result, speedup=speedup, problem="; ".join(problems) or None)


@dataclass(frozen=True, slots=True)
class Kept:
    """A new file in its final place, and its sha256."""

    path: Path
    sha256: str

    def to_dict(self) -> dict[str, object]:
        return {"path": str(self.path), "sha256": self.sha256}


def keep(result: Measured, folder: Path, *, source: Path, source_sha256: str) -> Kept:
    """Move a file atomically from the workshop into `folder`. Its new name has the source's name, the start of its sha256, and the type."""
    target = folder / f"{source.stem}-{source_sha256[:8]}-{result.file_type}.gguf"
    digest = sha256_of(result.path)
    result.path.replace(target)
    sync_folder(folder)
    return Kept(target, digest)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
