"""A model file written anew with other weight types, by llama.cpp's own function in a child process. The source is only read.

llama.cpp aborts on what it does not expect, and a full disk ends it too: in the child either costs an error. From weights that are
quantised already the result is worse than from the original ones; how much worse is for quality.py to say.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from localrag.disk_errors import file_error
from localrag.engine import child
from localrag.engine.gguf_types import FILE_TYPES
from localrag.errors import ConfigError, EngineError, UsageError
from localrag.files import make_private_folder, open_private
from localrag.locking import try_lock
from localrag.model import ModelInfo

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
    """A fresh folder inside `folder`, gone afterwards with all that was not moved out of it; what a killed run left is removed.

    One at a time holds one: UsageError while another does, because two that measure at once measure each other. ConfigError where
    `folder` cannot be written.
    """
    try:
        make_private_folder(folder)
        lock = open_private(folder / ".making.lock", "ab")
    except OSError as error:
        known = file_error(error, folder, hint="Set LOCALRAG_HOME to a folder that can be written.")
        raise ConfigError(f"{folder} cannot be written: {known.reason}.", hint=known.hint, path=str(folder), **known.numbers) from None
    with lock:
        if not try_lock(lock.fileno()):
            raise UsageError("Another run of models optimize is at work here.", hint="Wait until it has ended: they would slow each other.")
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
    """Write `source` to `target` with weights of `file_type`. The source must have been validated and tried (gguf.py, trial.py).

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

    ended = child.run("quantize_worker", job, limit_s, on_reply=pass_on)
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
