"""Compare the memory plan with the peak of fresh processes, each of which loads a model, fills a context and evaluates one more batch."""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import shared
from localrag.engine import gguf, memory
from localrag.engine.llama import LlamaContext, LlamaModel
from localrag.engine.llama_lib import library
from localrag.engine.threads import num_cores

WINDOWS = (2048, 8192, 32_768)
MIB = 1024 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files (without any: the default model)")
    parser.add_argument("--windows", type=int, nargs="*", default=WINDOWS, help="tokens; those beyond a training context are left out")
    parser.add_argument("--one", nargs=2, metavar=("WINDOW", "KERNEL"), help="measure in this process and print one JSON object")
    given = parser.parse_args()
    models = given.models or [shared.default_model()]
    if given.one:
        print(json.dumps(measure(models[0], int(given.one[0]), flash_attention=given.one[1] == "flash")))
        return
    rows = []
    for path in models:
        n_ctx_train = gguf.read_header(path).n_ctx_train
        for window in given.windows:
            rows += [measure_apart(path, window, kernel) for kernel in ("flash", "plain") if window <= n_ctx_train]
    shared.report_table("memory", rows)


def measure_apart(path: Path, window: int, kernel: str) -> dict[str, object]:
    """`measure` in a process of its own: its peak is that of nothing else."""
    command = [sys.executable, "-m", "benchmarks.memory", str(path), "--one", str(window), kernel]
    done = subprocess.run(command, cwd=shared.ROOT, capture_output=True, text=True, check=True, timeout=600)
    found = json.loads(done.stdout)
    return {
        "model": path.name,
        "window": window,
        "attention": kernel,
        **{f"{name} MiB": found[name] / MIB for name in ("weights", "copied", "kv", "compute", "python", "predicted", "measured")},
        "off %": 100 * (found["predicted"] / found["measured"] - 1),
    }


def measure(path: Path, window: int, *, flash_attention: bool) -> dict[str, int]:
    """The plan that is made before loading, and the peak that follows. Bytes.

    The state of 512 evaluated tokens is copied into other sequences until the cells are full but for the last batch: the memory that
    this batch takes depends on the cells that are in use, and not on how they came to be.
    """
    library()
    info = gguf.read_header(path)
    batch = memory.UBATCH_TOKENS
    num_sequences = max(1, window // batch - 1)
    plan = memory.plan(info, window, num_sequences, flash_attention=flash_attention)
    model = LlamaModel(path)
    context = LlamaContext(
        model,
        num_cells=window,
        num_sequences=num_sequences,
        num_outputs=memory.num_outputs(num_sequences),
        batch_tokens=batch,
        num_threads=num_cores(),
        flash_attention=flash_attention,
    )
    ids = [1000 + 7 * i % 5000 for i in range(batch)]
    context.decode([(token, i, 0, i == batch - 1) for i, token in enumerate(ids)])
    fill(context, num_sequences)
    context.decode([(token, batch + i, 0, i >= batch - context.num_outputs) for i, token in enumerate(ids)])
    measured = peak_bytes()
    context.close()
    model.close()
    return {
        "weights": plan.weights_bytes,
        "copied": plan.copied_bytes,
        "kv": plan.kv_bytes,
        "compute": plan.compute_bytes,
        "python": plan.python_bytes,
        "predicted": plan.total,
        "measured": measured,
    }


def fill(context: LlamaContext, num_sequences: int) -> None:
    """Copy the state of sequence 0 into cells of their own for all others."""
    lib, handle = context.lib, context.handle
    size = int(lib.llama_state_seq_get_size(handle, 0))
    state = (ctypes.c_uint8 * size)()
    assert lib.llama_state_seq_get_data(handle, state, size, 0) == size
    for seq_id in range(1, num_sequences):
        assert lib.llama_state_seq_set_data(handle, state, size, seq_id) == size


def peak_bytes() -> int:
    """The most memory that this process ever held (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
