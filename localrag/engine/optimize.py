"""A model file written anew with other weight types, by llama.cpp's own function in a child process. The source is only read.

llama.cpp aborts on what it does not expect, and a full disk ends it too: in the child either costs an error. From weights that are
quantised already the result is worse than from the original ones; how much worse is for quality.py to say.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from localrag.engine import attention, gguf, memory, quality, sandbox, threads
from localrag.engine.gguf_layout import FILE_TYPES
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
"""The types that can be asked for, and about what a weight takes in each: those that need no importance matrix."""
OUTPUT_BITS = 8.5  # llama.cpp keeps the first and the last matrix in 6 or 8 bits where the rest has fewer
SPARE_DISK_BYTES = 256 << 20

_FILE_TYPE_NUMBERS = {name: number for number, name in FILE_TYPES.items()}
_BUFFER_BYTES = 256 << 20
_SPARE_BYTES = 1200 << 20  # buffers, stacks of threads, the header
_CPU_LIMIT_S, _CPU_BYTES_PER_S = 120.0, 2e5  # IQ4_NL, the slowest, took a second for 2 MB
_START_LIMIT_S = 60.0
_STAGE_PREFIX = ".making-"

Step = Callable[[int, int], None]
"""Tensors written, and of how many."""


def default_types(info: ModelInfo, system_info: str) -> tuple[str, ...]:
    """What is worth trying for this processor, by what `llama_print_system_info` says of it; the file's own type is not.

    Q4_0 and IQ4_NL are what llama.cpp arranges anew for the processor's vectors; from weights of few bits IQ4_NL is left out, since it
    takes long to make and loses as much. Q8_0 loses next to nothing. BF16 is made of weights of few bits alone, where the processor
    multiplies it.
    """
    many_bits = BITS_PER_WEIGHT.get(info.quantization or "", 32.0 if info.quantization == "F32" else 0.0) >= 8
    types = ["Q4_0", *(["IQ4_NL"] if many_bits else []), "Q8_0"]
    if not many_bits and any(f"{name} = 1" in system_info for name in ("AVX512_BF16", "AMX_INT8", "BF16_VECTOR_ARITHMETIC")):
        types.append("BF16")
    return tuple(name for name in types if name != info.quantization)


def check_type(name: str) -> str:
    """The type by its name, in whatever case. UsageError for one that is not made here."""
    if (known := name.upper()) not in BITS_PER_WEIGHT:
        raise UsageError(f"{name!r} is no type that can be made.", hint=f"There are: {', '.join(BITS_PER_WEIGHT)}.", type=name)
    return known


def expected_bytes(info: ModelInfo, num_weights: int, file_type: str) -> int:
    """About how large the file becomes, and rather too large than too small."""
    bits = BITS_PER_WEIGHT[file_type]
    outer = min(num_weights, 2 * info.vocab_size * info.embedding_length)
    return int(((num_weights - outer) * bits * 1.1 + outer * max(bits, OUTPUT_BITS)) / 8) + (32 << 20)


@contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """Make a fresh folder inside `folder`, gone afterwards with all that was not moved out of it; what a killed run left is removed.

    One at a time holds one: UsageError while another does, because two that measure at once measure each other. ConfigError where
    `folder` cannot be written.
    """
    stack = ExitStack()
    try:
        make_private_folder(folder)
        stack.enter_context(locked(folder / ".making.lock"))
    except TimeoutError:
        hint = "Wait until it has ended: they would slow each other."
        raise UsageError("Another run of models optimize is at work here.", hint=hint) from None
    except OSError as error:
        known = file_error(error, folder, hint="Set LOCALRAG_HOME to a folder that can be written.")
        raise ConfigError(f"{folder} cannot be written: {known.reason}.", hint=known.hint, path=str(folder), **known.numbers) from None
    with stack:
        for stale in folder.glob(f"{_STAGE_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE_PREFIX, dir=folder))
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def require_disk(folder: Path, needed_bytes: int) -> None:
    """EngineError with the numbers unless so much can be written there and some is left."""
    free = shutil.disk_usage(folder).free
    if needed_bytes + SPARE_DISK_BYTES > free:
        raise EngineError(
            f"It needs {(needed_bytes + SPARE_DISK_BYTES) >> 20} MiB on the disk of {folder}, and {free >> 20} MiB are free.",
            hint="Free some space, or move the home with LOCALRAG_HOME.",
            needed_bytes=needed_bytes + SPARE_DISK_BYTES,
            free_bytes=free,
        )


def quantize(source: Path, target: Path, file_type: str, *, expected: int, num_threads: int, on_step: Step | None = None) -> None:
    """Write `source` to `target` with weights of `file_type`. The source must have been validated and tried (gguf.py, sandbox.py).

    `target` must not exist; on failure nothing is left of it. `expected` is in bytes: a file of over four times that is given up.
    EngineError if llama.cpp refuses, dies, or comes to no end. Ctrl-C ends the child.
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
        problem = f"it came to no end within {limit_s:.0f} s"
    else:
        died = f"the process ended with {ended.killed_by or f'code {ended.code}'}{': ' + ended.words if ended.words else ''}"
        problem = ended.problem or died
    raise EngineError(
        f"llama.cpp made no {file_type} of it: {problem}.", hint="Try another type with --type.", type=file_type, exit_code=ended.code
    )


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
            sandbox.ensure_safe(target, home=self._home)
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
        gpu_layers = info.num_layers + 1 if memory.gpu_devices() else 0
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
    sync_folder(folder)
    return Kept(target, digest)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
